"""Linear layers of few rows, as in decoding: the matrix is read once, in its stored form."""
