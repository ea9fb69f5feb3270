"""Runs of one pair of submodules alone: on the same inputs, with other roundings, with an operation changed."""
