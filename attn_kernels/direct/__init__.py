"""Kernels called by the addresses of arrays, on threads of their own: what a framework without an interface needs."""
