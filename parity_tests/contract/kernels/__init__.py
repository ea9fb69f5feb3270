"""What the kernels for processors promise, in either framework."""
