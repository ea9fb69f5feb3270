"""The long ways that users take: commands in processes of their own, every documented block, the examples."""
