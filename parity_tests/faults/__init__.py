"""Planted faults that take long: of whole models, between devices, and those that the skill for agents is tried on."""
