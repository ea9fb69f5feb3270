"""Measure the judge: correct pairs of any shape, planted faults, and how well it separates them."""
