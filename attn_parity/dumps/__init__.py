"""Two environments: a folder per side, written in one and judged in another."""
