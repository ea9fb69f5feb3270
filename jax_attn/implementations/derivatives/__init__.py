"""Derivatives of attention whose gradients are written by hand, or that a kernel gives backward alone."""
