"""Kernels for processors, compiled by LLVM for the one at hand; `implementations.cpu_flash` is how JAX calls them."""
