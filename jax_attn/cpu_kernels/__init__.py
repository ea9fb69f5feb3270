"""Kernels for processors, compiled by Numba for the one at hand; `implementations.cpu_flash` is how JAX calls them."""
