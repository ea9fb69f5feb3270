"""Processes that are killed, and what a process uses."""
