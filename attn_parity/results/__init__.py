"""What a comparison found: the report, accepted differences, changes since another report."""
