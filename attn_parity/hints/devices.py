"""Relations that the devices which share a side explain: each function returns a sentence if it holds, "" if not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from ..results.findings import shown
from .case import FIT, Array, Case, ratio_of
from .evidence import Evidence, cases_of

MAX_PARTS = 32
"""Most pieces of a sequence whose order is looked for."""

MAX_ADDENDS = 2
"""Most things that are added to a multiple behind it: a bias and the residual stream."""


def of_devices(evidence: Evidence, mesh: Mapping[str, int], labels: tuple[str, str]) -> str:
    """Return the cause that a difference is consistent with if only devices explain it, "" if nothing is recognised.

    Args:
        evidence: the numbers of both sides.
        mesh: axis of the mesh -> number of devices.
        labels: names of the two sides.
    """
    sizes = {name: size for name, size in mesh.items() if size > 1}
    names = shown(labels[0]), shown(labels[1])
    with np.errstate(all="ignore"):
        for case in cases_of(evidence, names) if sizes else ():
            text = _multiplied(case, sizes) or _repeated(case, sizes) or _reordered(case, sizes)
            if text:
                return f"{case.name}: {text}" if case.is_gradient else text
        return _unused(evidence, sizes, names) if sizes else ""


def _axes(sizes: Mapping[str, int], count: int) -> str:
    return " or ".join(name for name, size in sizes.items() if size == count)


def _unused(evidence: Evidence, sizes: Mapping[str, int], labels: tuple[str, str]) -> str:
    """Recognise parts of a weight that no device of one side uses: equal parts of it that get no gradient there."""
    for name, gradient in evidence.first_gradients.items():
        other_gradient = evidence.second_gradients.get(name)
        if (
            name.startswith("input ")
            or other_gradient is None
            or gradient.shape != other_gradient.shape
            or not gradient.ndim
        ):
            continue
        for axis in range(gradient.ndim):
            others = tuple(place for place in range(gradient.ndim) if place != axis)
            used: list[Array] = [np.asarray((side != 0).any(axis=others)) for side in (gradient, other_gradient)]
            for label, own, other in ((labels[0], used[0], used[1]), (labels[1], used[1], used[0])):
                missing = int((other & ~own).sum())
                for count in sorted(set(sizes.values())):
                    if missing and other.all() and missing * count == len(own) * (count - 1):
                        return (
                            f"{missing} of {len(own)} parts of {name} get no gradient in {label} alone: consistent "
                            f"with the {count} devices of {_axes(sizes, count)} all using the part of one"
                        )
    return ""


def _addends(case: Case) -> dict[str, Array]:
    """Return the possible addends of an output: biases, and inputs of its shape."""
    added = {name: one for name, one in case.weights.items() if one.shape == case.first.shape[-1:]}
    return added | {f"input {place}": one for place, one in enumerate(case.inputs) if one.shape == case.first.shape}


def _multiplied(case: Case, sizes: Mapping[str, int]) -> str:
    """Recognise a tensor summed twice over devices, or averaged: a multiple, apart from addends behind the sum."""
    added = {} if case.is_gradient else _addends(case)
    addends = [names for count in range(MAX_ADDENDS + 1) for names in itertools.combinations(added, count)]
    for names in addends:
        behind = sum((added[name] for name in names), np.zeros(1))
        ratio = ratio_of(np.asarray(case.first - behind), np.asarray(case.second - behind))
        for count in sorted(set(sizes.values())):
            but = f" but for {' and '.join(names)}" if names else ""
            what = f"over the {count} devices of {_axes(sizes, count)}"
            for factor, text in ((count, f"added up twice {what}"), (1 / count, f"averaged {what}, not added up")):
                if ratio is not None and abs(ratio - factor) <= FIT * factor:
                    times = f"{case.labels[1]} is {factor:.6g} times {case.labels[0]} everywhere{but}"
                    return f"{times}: consistent with what is {text}"
    return ""


def _repeated(case: Case, sizes: Mapping[str, int]) -> str:
    """Recognise a bias, or the residual stream, that each device adds before all add up."""
    if case.is_gradient:
        return ""
    for name, addend in _addends(case).items():
        for count in sorted(set(sizes.values())):
            for sign, label in ((1, case.labels[1]), (-1, case.labels[0])):
                if case.fits(case.apart, np.broadcast_to(sign * (count - 1) * addend, case.first.shape)):
                    axis = _axes(sizes, count)
                    return (
                        f"{label} has {name} {count} times: consistent with each of the {count} devices of {axis} "
                        "adding it before they add up"
                    )
    return ""


def _reordered(case: Case, sizes: Mapping[str, int]) -> str:
    """Recognise pieces of a sequence in another order."""
    if case.is_gradient or case.first.ndim < 2:
        return ""
    axis = case.first.ndim - 2
    for parts in sorted({times * size for size in sizes.values() for times in (1, 2)}):
        if parts > MAX_PARTS or case.first.shape[axis] % parts:
            continue
        first, second = (np.split(one, parts, axis) for one in (case.first, case.second))
        order = [next((at for at, one in enumerate(first) if case.fits(one, two)), None) for two in second]
        if None not in order and order != list(range(parts)):
            text = ", ".join(map(str, order))
            return (
                f"{case.labels[1]} has the {parts} pieces of the sequence in the order {text}: consistent with parts "
                "of devices put together in another order, or a balanced order not restored"
            )
    return ""
