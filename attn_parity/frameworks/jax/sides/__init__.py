"""One adapter per kind of JAX side: NNX modules, Linen modules with variables, functions."""
