"""Forty ports as agents write them, each with the test that its author wrote, next to the usual rules and the judge.

``ports/`` has a file per kind of module: the original in torch, a right port to JAX, and inputs. `catalogue` lists the
forty ports: the changed lines of the wrong ones, and their tests (`authors`). ``python -m benchmarks.agents`` runs them
and prints docs/agents.md.
"""
