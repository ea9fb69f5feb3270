"""Attention that keeps a state of one size: the recurrence, and the convolution in front of it."""
