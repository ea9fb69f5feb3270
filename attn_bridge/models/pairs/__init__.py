"""Families of encoders with decoders: a TOML file each, which `reading` reads."""
