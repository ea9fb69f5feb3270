"""Functions that the processes of a mesh run in tests; workers import them by name."""
