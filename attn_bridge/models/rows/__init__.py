"""Rows that tables of several layouts share: attention, whole decoders, and what stands anywhere."""
