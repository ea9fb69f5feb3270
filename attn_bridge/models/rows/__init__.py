"""Rows that tables of several layouts share: attention, whole decoders, and general ones."""
