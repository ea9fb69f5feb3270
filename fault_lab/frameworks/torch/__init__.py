"""Torch blocks with a fault planted in them."""
