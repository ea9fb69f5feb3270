"""The contenders of a benchmark: ours and their peers in each framework, and the oracle that their results meet."""
