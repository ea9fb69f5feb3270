"""Runs with other roundings, and the order in which code uses its weights."""
