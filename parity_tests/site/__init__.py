"""The site that ``make site`` has built into build/site, in a real browser; and the notebooks beside it."""
