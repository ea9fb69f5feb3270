"""The report of a benchmark as rows, as a page, and as a plot."""
