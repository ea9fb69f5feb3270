"""The numbers at the place of a fault, and the hint that they give."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ..results.findings import shown
from .case import FIT, Array, Arrays, Case, ratio_of, written
from .layers import BY_WEIGHTS, LAYERS
from .norms import norms
from .relations import EXACT, VAGUE
from .settings import OWN, differing

MAX = 2
"""Most findings in a hint."""

Relation = Callable[[Case], str]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The computation of both sides on the same numbers, in float64 and with the first side's axes.

    Attributes:
        path: dotted path on the first side.
        second_path: dotted path on the second side.
        direction: of the fault.
        between: the two submodules around the code in question, if it is code between submodules.
        first_class: class on the first side.
        second_class: class on the second side.
        first_settings: name -> value of the first side's settings.
        second_settings: the same of the second side.
        inputs: floating-point inputs, the same on both sides.
        counts_alike: whether an axis of these and of the outputs has the same number on both sides.
        first_outputs: outputs of the first side.
        second_outputs: outputs of the second side.
        first_weights: the first side's weights, under the first side's names.
        second_weights: the second side's, under the same names.
        first_gradients: gradients by name; of inputs under ``input 0`` and so on.
        second_gradients: those of the second side.
        labels: names of the two sides.
        whole: the evidence of the enclosing module, for code between two submodules.
        changes: runs the sides with changes of one operation; returns those with which they agree, or "".
        others: the evidence of further calls of the submodule.
        again: draws the evidence of the same place on fresh weights and inputs; None where that fails.
    """

    path: str = ""
    second_path: str = ""
    direction: Literal["forward", "backward"] = "forward"
    between: tuple[str, str] | None = None
    first_class: str = ""
    second_class: str = ""
    first_settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    second_settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    inputs: Sequence[Array] = ()
    counts_alike: bool = True
    first_outputs: Sequence[Array] = ()
    second_outputs: Sequence[Array] = ()
    first_weights: Arrays = dataclasses.field(default_factory=dict)
    second_weights: Arrays = dataclasses.field(default_factory=dict)
    first_gradients: Arrays = dataclasses.field(default_factory=dict)
    second_gradients: Arrays = dataclasses.field(default_factory=dict)
    labels: tuple[str, str] = ("torch", "flax")
    whole: Evidence | None = None
    changes: Callable[[], str] = lambda: ""
    others: Sequence[Evidence] = ()
    again: Callable[[], Evidence | None] = lambda: None


def hint_for(evidence: Evidence, *, numbers: bool = True, probe: Callable[[], str] = lambda: "") -> str:
    """Return the hint at a difference, "" if nothing is recognised.

    Args:
        evidence: the numbers of both sides.
        numbers: whether to compare numbers, too. If two sides differ only by rounding, exact agreement merely shows
            which elements are not rounded, which resembles a mask.
        probe: runs both sides again and returns a finding, or "". It is called before relations that many causes have.
    """
    names = shown(evidence.labels[0]), shown(evidence.labels[1])
    classes = evidence.first_class, evidence.second_class
    causes = differing(evidence.first_settings, evidence.second_settings, names, classes, evidence.direction)
    if not len(evidence.inputs):  # each side gets another array, which may be padded
        causes = [cause for cause in causes if not cause.startswith("padding")]
    unsure = [cause for cause in causes if cause.startswith(OWN)]
    causes = [cause for cause in causes if cause not in unsure]
    text = ""
    if numbers and len(causes) < MAX:
        text = _lasting(evidence, names, (*LAYERS, *EXACT))
        if not causes:
            text = text or evidence.changes() or probe() or _lasting(evidence, names, VAGUE) or _scale(evidence, names)
        is_norm = any(setting.startswith(("eps is ", "num_groups is ")) for setting in causes)
        # Formulas of two norms say nothing more than their settings.
        causes += [text] if text and not (is_norm and text == relation(evidence, names, (norms,))) else []
    return "; ".join((causes if text else [*causes, *unsure])[:MAX])


def _lasting(evidence: Evidence, labels: tuple[str, str], relations: Sequence[Relation]) -> str:
    """Return the first relation, "" unless the same place has it on a fresh sample and in other calls as well."""

    def first(evidence: Evidence) -> str:
        whole = "" if evidence.whole is None else relation(evidence.whole, labels, BY_WEIGHTS)
        return whole or relation(evidence, labels, relations)

    def has(evidence: Evidence) -> bool:
        return not cases_of(evidence, labels) or _lasting_part(first(evidence)) == _lasting_part(text)

    text = first(evidence)
    again = evidence.again() if text else None
    if not text or not (again is None or has(again)):
        return ""
    return text if all(map(has, evidence.others)) else f"in one of its calls, {text}"


def _lasting_part(text: str) -> str:
    """Return a relation without the factors of single rows or channels, which are those of a sample."""
    return re.sub(r"[\d.e+-]+ (to [\d.e+-]+ )?times", "times", text) if "a multiple of" in text else text


def relation(
    evidence: Evidence, labels: tuple[str, str], relations: Sequence[Relation] = (*LAYERS, *EXACT, *VAGUE)
) -> str:
    """Return the first known relation between the results of the two sides, "" if none applies."""
    with np.errstate(all="ignore"):
        for case in cases_of(evidence, labels):
            text = next((text for one in relations if (text := one(case))), "")
            if re.search(r"ax[ei]s \d", text):
                text += "" if evidence.counts_alike else f" (axes as {labels[0]} counts them)"
            if text:
                return f"{case.name}: {text}" if case.is_gradient else text
    return ""


def _scale(evidence: Evidence, labels: tuple[str, str]) -> str:
    """Recognise another scale of a loss, a single number: all gradients have its ratio."""
    losses = [one for case in cases_of(evidence, labels) for one in (case.first, case.second) if not case.is_gradient]
    if len(losses) != 2 or losses[0].size != 1 or not losses[0].any():
        return ""
    ratio = float(losses[1].item() / losses[0].item())
    pairs = [(_wide(one), _wide(evidence.second_gradients[name])) for name, one in evidence.first_gradients.items()]
    telling = [(one, two) for one, two in pairs if one.any() or two.any()]
    close = [
        np.abs(ratio * one - two).max() <= FIT * np.abs(two).max() for one, two in telling if one.shape == two.shape
    ]
    if len(close) < len(telling) or not close or not all(close):
        return ""
    first, second = labels
    return f"{second} is {written(ratio)} times {first}, and so are all gradients"


def cases_of(evidence: Evidence, labels: tuple[str, str]) -> list[Case]:
    """Return the tensors that differ: outputs, or where these agree the gradients, those of parameters first.

    Nothing that is known of layers is about complex numbers, so these are left out.
    """
    inputs = [_wide(one) for one in evidence.inputs if not np.iscomplexobj(one)]
    weights = {name: _wide(one) for name, one in evidence.first_weights.items() if not np.iscomplexobj(one)}
    counts = _counts(evidence)
    whole = () if evidence.whole is None else evidence.whole.inputs
    around = [_wide(one) for one in whole if not np.iscomplexobj(one)]
    case_of = functools.partial(Case, inputs=inputs, weights=weights, labels=labels, counts=counts)
    cases = []
    for position, (first, second) in enumerate(zip(evidence.first_outputs, evidence.second_outputs, strict=False)):
        name = "the output" if len(evidence.first_outputs) == 1 else f"output {position}"
        cases.append(case_of(name, _wide(first), _wide(second), around=around))
    cases = [case for case in cases if case.is_real and case.differs]
    if cases:
        return cases
    gradients = sorted(evidence.first_gradients, key=lambda name: name.startswith("input "))
    for name in gradients:
        if name in evidence.second_gradients:
            first, second = _wide(evidence.first_gradients[name]), _wide(evidence.second_gradients[name])
            cases.append(case_of(f"the gradient of {name}", first, second, is_gradient=True))
    return [case for case in cases if case.is_real and case.differs]


def _counts(evidence: Evidence) -> tuple[int, ...]:
    values = [*evidence.first_settings.items(), *evidence.second_settings.items()]
    names = ("num_heads", "num_kv_heads", "head_dim")
    counts = [value for name, value in values if name in names and isinstance(value, int)]
    return tuple(dict.fromkeys(int(value) for value in counts if value > 0))


def of_statistic(name: str, before: Array, first: Array, second: Array, rows: int) -> str:
    """Return the cause of a difference in a running statistic after one update, "" if nothing is recognised.

    Args:
        name: its name, such as ``bn.running_var``.
        before: its value before the update, the same on both sides, in float64 like the others.
        first: its value on the first side.
        second: its value on the second side.
        rows: rows of the batch; each element was estimated from a multiple of that many numbers.
    """
    old, first_update, second_update = _wide(before), _wide(first), _wide(second)
    with np.errstate(all="ignore"):
        ratio = ratio_of(first_update - old, second_update - old)
    ours, theirs = shown("torch"), shown("flax")
    if ratio is not None:
        changes = f"{name} changes {ratio:.6g} times as much in {theirs} as in {ours}"
        momentum = "consistent with another momentum (torch's momentum is one minus Flax's)"
        return "" if abs(ratio - 1) < 1e-6 else f"{changes}: {momentum}"
    # With the momentum m of both sides, (1 - m) old + m estimate is the new value, whose estimates have one ratio.
    parts = np.stack([first_update.ravel(), old.ravel()], axis=-1)
    (ratio, kept), _, rank, _ = np.linalg.lstsq(parts, second_update.ravel(), rcond=None)
    fits = np.abs(parts @ (ratio, kept) - second_update.ravel()).max(initial=0.0) <= FIT * np.abs(second_update).max(
        initial=0.0
    )
    if first_update.size < 3 or rank < 2 or not fits or not 0.0 < kept / (1 - ratio) < 1.0:
        return ""
    count = _count_of(float(ratio))
    whole = count / max(count - 1, 1)
    if count < 2 or count % rows or not abs(max(ratio, 1 / ratio) - whole) <= 1e-3 * (whole - 1):
        return ""
    times = "n/(n-1)" if ratio > 1 else "1/(n/(n-1))"
    return (
        f"{name} takes in {times} times as much variance in {theirs} as in {ours}, with n = {count}: consistent with "
        "the unbiased variance on one side alone"
    )


def _count_of(ratio: float) -> int:
    """Return the whole number n for which n/(n-1) or its inverse is next to a ratio; 0 for none."""
    larger = max(ratio, 1 / ratio) if ratio > 0 else 1.0
    return round(larger / (larger - 1)) if larger > 1 else 0


def _wide(array: object) -> Array:
    numbers = np.asarray(array)
    return numbers.astype(np.float64) if numbers.dtype.kind in "fV" else numbers
