"""What readers of a ``config.json`` share: its values, rotary positions, whole decoders."""
