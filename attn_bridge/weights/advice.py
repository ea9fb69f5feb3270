"""Rules to write for tensors that no rule covers, as an error suggests them."""

from __future__ import annotations

import math
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 3
"""Rules that a message shows."""

_KERNELS = {2: "o i -> i o", 3: "o i w -> w i o", 4: "o i h w -> h w i o", 5: "o i d h w -> d h w i o"}
"""Number of axes -> pattern of the weight of a linear layer or a convolution."""


def suggest_rules(torch: Shapes, flax: Shapes) -> str:
    """Return rules for uncovered tensors: pairs of fitting shapes, those with equal parents first; otherwise drops.

    Args:
        torch: name -> shape of the torch module's uncovered tensors.
        flax: those of the Flax module.
    """
    left, rules = dict(flax), list[str]()
    for name, shape in torch.items():
        fitting = [other for other in left if _pattern(shape, left[other]) is not None]
        siblings = [other for other in fitting if _parent(other) == _parent(name)]
        choice = name if name in siblings else siblings[0] if siblings else ""
        if not choice and len(fitting) == 1:  # another path: only if no other shape fits
            choice = fitting[0]
        if choice:
            pattern = _pattern(shape, left.pop(choice))
            rules.append(f"Rule({name!r}, {choice!r}{f', {pattern!r}' if pattern else ''})")
    if rules:
        return f"give rules=[{_listed(rules)}]"
    if torch and flax:
        first, second = next(iter(torch)), next(iter(flax))
        return f"give rules=[Rule({first!r}, {second!r}, 'axes -> axes'), ...]"
    drops = [f"Rule(torch={name!r}, drop='why')" for name in torch] + [
        f"Rule(flax={name!r}, drop='why')" for name in flax
    ]
    return f"give rules=[{_listed(drops)}] to leave {'it' if len(drops) == 1 else 'them'} out" if drops else ""


def _listed(rules: list[str]) -> str:
    return ", ".join([*rules[:_SHOWN], *(["..."] if len(rules) > _SHOWN else [])])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _pattern(shape: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    """Return the usual pattern between two shapes, "" for unchanged axes; None if they do not fit."""
    if len(shape) != len(other) or math.prod(shape) != math.prod(other):
        return None
    moved = _KERNELS.get(len(shape))
    if moved is not None and (*shape[2:], shape[1], shape[0]) == tuple(other):
        return moved
    return "" if tuple(shape) == tuple(other) else None
