"""Whole models with planted faults, and reports as tests read them."""
