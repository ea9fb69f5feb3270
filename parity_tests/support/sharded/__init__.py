"""Sides and weights on a mesh of devices."""
