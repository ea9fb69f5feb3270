"""Layers of torch and Flax themselves that compute the same: their kinds, and one rule per tensor.

They have no config of ours, so each backend's `find_stock_layers` describes those in a module by their type. Recurrent
cells are not among them: torch adds two biases where Flax adds their sum, so no rule is a bijection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from ..weights import Rule, Rules

_VECTORS = (("weight", "scale", "... -> ..."), ("bias", "bias", "... -> ..."))

_ROWS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "linear": (("weight", "kernel", "o i -> i o"), ("bias", "bias", "o -> o")),
    "embedding": (("weight", "embedding", "n d -> n d"),),
    "layer norm": _VECTORS,
    "RMS norm": _VECTORS,
    "group norm": _VECTORS,
    "batch norm": (*_VECTORS, ("running_mean", "mean", "o -> o"), ("running_var", "var", "o -> o")),
    "1d convolution": (("weight", "kernel", "o i w -> w i o"), ("bias", "bias", "o -> o")),
    "2d convolution": (("weight", "kernel", "o i h w -> h w i o"), ("bias", "bias", "o -> o")),
    "3d convolution": (("weight", "kernel", "o i d h w -> d h w i o"), ("bias", "bias", "o -> o")),
}
"""Kind -> the names in torch and in Flax of each tensor, and the pattern from torch's axes to Flax's."""

_COUNTER = "num_batches_tracked"
"""Counter of torch's batch norms, which Flax lacks; it has a meaning where momentum is None alone."""


@dataclasses.dataclass(frozen=True)
class StockLayer:
    """The meaning of the weights of a stock layer.

    Attributes:
        kind: a key of the table of rows.
        groups: of a group norm, the number of groups.
        eps: of a norm, the constant added to the variance; None if unknown. The same weights may have another.
    """

    kind: str
    groups: int = 0
    eps: float | None = None

    def rules(self, path: str, torch: Container[str], flax: Container[str]) -> Rules:
        """Return the rules of a layer's tensors inside a larger module.

        Args:
            path: dotted path of the layer on both sides.
            torch: names of all tensors of the torch module.
            flax: those of the Flax module. A tensor that neither side has (a bias, a scale) gets no rule.
        """
        rows = [(_below(path, ours), _below(path, theirs), pattern) for ours, theirs, pattern in _ROWS[self.kind]]
        rules = [Rule(*row) for row in rows if row[0] in torch or row[1] in flax]
        if _below(path, _COUNTER) in torch:
            rules.append(Rule(torch=_below(path, _COUNTER), drop="a counter that Flax's batch norm does not have"))
        return Rules(rules)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
