"""Layouts of JAX libraries, in terms of our names and shapes."""
