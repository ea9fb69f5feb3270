"""Distributed faults: ``attn-bridge mutate --mesh tensor=2,context=2``."""
