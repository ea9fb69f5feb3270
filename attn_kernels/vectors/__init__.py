"""Building blocks of kernels: memory read by address, exponentials of vectors, matrix products."""
