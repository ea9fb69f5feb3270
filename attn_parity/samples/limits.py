"""Limits that the judge, the command line and the pytest plugin share; it imports nothing, as the plugin is light."""

MAX_SEEDS = 1000
"""Most times that weights and inputs are drawn."""
