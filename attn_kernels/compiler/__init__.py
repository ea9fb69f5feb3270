"""The language that kernels are written in, and how it becomes machine code."""
