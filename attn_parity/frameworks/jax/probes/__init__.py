"""Runs with other roundings: every operation, softmax, tables."""
