"""Whether a pair trains alike: steps from the same numbers, and free runs."""
