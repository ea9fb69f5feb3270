"""Linear layers of few rows, as decoding has them: the matrix is read once, and as it is."""
