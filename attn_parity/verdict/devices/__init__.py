"""Relate a difference to the devices that share a side."""
