"""One side: what a subject is, its numbers, and a pure function as a side."""
