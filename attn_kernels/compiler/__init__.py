"""The language that kernels are written in, and its compilation to machine code."""
