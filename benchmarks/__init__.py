"""Benchmarks, each a separate module that prints its measurements, with the machine.

``python -m benchmarks`` measures attention next to its peers, ``python -m benchmarks.checkpoints`` conversion,
``python -m benchmarks.decoding`` a token with a long cache, ``python -m benchmarks.models`` whole models, and
``python -m benchmarks.judged_models`` the judgement of whole models.
"""
