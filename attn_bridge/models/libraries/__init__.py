"""Layouts of JAX libraries: how their models name and shape what is ours."""
