"""Damaged files for the parsers of checkpoints, in the suite a few and with ``python -m`` for as long as wanted."""
