"""Pairs the weights of both sides, and the state that belongs to them, by rules, names and trial runs.

Comes in: a `Pair` without a pairing. Goes out: the `Pairing`; state that takes part in it counts among the parameters
of its side from then on. In this order: rules; parameters alone; biases of recurrent layers added; where some are left
over, state of the same name, parameters that no output depends on, state that fits, and frozen parameters. State is
paired with state only if the outputs differ without it.
"""

from .matcher import complete

__all__ = ["complete"]
