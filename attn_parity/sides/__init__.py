"""One side of a comparison: the subject protocol, its numbers, and pure functions as sides."""
