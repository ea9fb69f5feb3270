"""What users write, for type checkers alone: `make types` checks that calls have the types of their results."""
