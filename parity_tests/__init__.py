"""The proof: NumPy float64 references and the test suite.

``neutral`` needs no framework, ``torch_side`` and ``jax_side`` need one each, ``twins`` needs both. ``contract`` holds
what is said once of all backends; it runs with one framework at a time.
"""
