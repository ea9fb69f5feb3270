"""What all backends do alike: each behaviour is written once, and tested with every framework that can be imported.

A test knows its backend by an adapter, `torch_backend` or `jax_backend`, which takes and gives NumPy arrays.
"""
