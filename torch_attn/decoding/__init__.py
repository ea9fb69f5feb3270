"""Caches of earlier tokens for decoding, and generation."""
