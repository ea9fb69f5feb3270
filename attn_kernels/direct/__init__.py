"""Kernels called with addresses of arrays, on their own threads: for a framework without a call interface."""
