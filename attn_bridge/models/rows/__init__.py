"""Rows that tables of several layouts share: whole decoders, and general ones."""
