"""Results of a comparison: the report, accepted differences, changes since another report."""
