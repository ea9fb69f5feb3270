"""Checkpoint files, folders and servers that tests write and read."""
