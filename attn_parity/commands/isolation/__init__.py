"""User code away from the command that judges it: output and changes are isolated, in processes of their own."""
