"""Distance between whole models by the log-probabilities of tokens: two sides, the noise of one -> a report."""
