"""Gates that a layer keeps in another order than torch: they are paired one by one.

Comes in: the matches of a pairing. Goes out: the same, with fused gates taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .tensors import Match, Tensor

TORCH, KERAS = "rzn", "zrn"
"""The gates of a GRU in the order in which torch and Keras keep them."""

_KERAS_GRU = re.compile(r"(^|[./])gru_cell(_\d+)?[./](kernel|recurrent_kernel|bias)$")
"""Paths of the variables of Keras's GRU: its cell is a layer of that name."""


def by_gates(matches: Iterable[Match]) -> Iterator[Match]:
    """Yield matches, those between a GRU of torch and one of Keras gate by gate."""
    for match in matches:
        orders = _order(match.first), _order(match.second)
        is_plain = not match.rule.sizes and not match.text
        if is_plain and all(orders) and orders[0] != orders[1]:
            torch = match.first if orders[0] == TORCH else match.second
            source = "h" if "_hh" in torch.source else "i"  # the state or the input
            for gate in TORCH:
                first, second = (
                    _gate(tensor, order, gate, f"{source}{gate}")
                    for tensor, order in zip((match.first, match.second), orders, strict=True)
                )
                yield Match(first, second, match.rule, match.how)
        else:
            yield match


def _order(tensor: Tensor) -> str:
    """Return the order of the gates in a tensor; "" if it is not of a GRU whose order is known."""
    if tensor.framework == "torch" and tensor.parameter.owner in ("GRU", "GRUCell"):
        return TORCH
    return KERAS if _KERAS_GRU.search(tensor.source) else ""


def _gate(tensor: Tensor, order: str, gate: str, label: str) -> Tensor:
    axis = 0 if order == TORCH else len(tensor.shape) - 1  # torch's matrices are (outputs, inputs), Keras's kernels not
    width, position = tensor.shape[axis] // len(order), order.index(gate)
    return tensor.slice(axis, position * width, (position + 1) * width, f"{tensor.name}[{label}]")
