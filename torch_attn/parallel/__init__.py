"""Modules over many devices."""
