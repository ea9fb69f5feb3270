"""User code apart from the command that judges it: output and changes are isolated, in separate processes."""
