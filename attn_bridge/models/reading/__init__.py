"""Shared by readers of a ``config.json``: its values, rotary positions, whole decoders."""
