"""Calls of attention, right and wrong, and the pairs of cases that cover them."""
