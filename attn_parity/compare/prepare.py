"""Makes a pair of two live sides: subjects, calls in their dtypes, one structure of outputs, parameters paired."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from attn_bridge import backends
from attn_bridge.module_weights import check_same_meaning, own_rules
from attn_bridge.weights import Rules, WeightsMismatchError

from .. import pairing as pairings
from ..adapters import load_adapter
from ..pairing import Pairing, state
from ..pairing.pair import SIDES, Pair, Progress, input_notes, labels_of, narrowed, weights_held, widened
from ..results.findings import Side, shown
from ..samples import inputs as calls
from ..samples.sampling import Outputs, draw_weights
from ..sides.dropout_masks import differences
from ..sides.dtypes import is_float
from ..sides.folded import FoldedSubject, folds
from ..sides.subject import Arguments, Arrays, Parameter, Run, Subject
from ..verdict.runner import Live
from .outputs import apart, check_outputs, class_of, plain_outputs

PROBE_LIMIT = 1e-4
"""How far apart outputs may be that are said to agree, where one side has no float64."""


PAIRING_WORK = 3e11
"""Operations that trying out pairings may take: about 30 s of float64 on two cores, forward passes alone."""

LEAST_CANDIDATES = 8
"""Pairings that are tried out however large the sides are."""


def prepare(
    first: Any,
    second: Any,
    inputs: Any,
    second_inputs: Any = None,
    *,
    device: str | tuple[str, str] | None = None,
    rules: Any = None,
    transfer: bool = True,
    train: bool = False,
    reference: bool = False,
    fixed: Iterable[int | str] | int | str = (),
    vary: Iterable[int | str] | int | str = (),
    progress: Progress = lambda what, done, total: None,
    fold: bool = False,
) -> Pair:
    """Return the pair that `compare` judges; its arguments are those of `compare`.

    With `fold`, biases that torch's recurrent layers add are one parameter where the other side holds their sum.
    """
    devices = device if isinstance(device, tuple) else (device, device)
    subjects = [
        subject_of(value, one, what)
        for value, one, what in zip((first, second), devices, ("first", "second"), strict=True)
    ]
    ours, theirs = subjects
    labels = labels_of(ours.framework, theirs.framework)
    held, notes = _held((ours, theirs), labels)
    dtypes = {side: calls.common_dtype(held[side]) for side in SIDES}
    dtype = dtypes["first"] or dtypes["second"]
    given = calls.as_arguments(inputs)
    second_given = given if second_inputs is None else calls.as_arguments(second_inputs)
    arguments = {
        "first": calls.in_dtype(given, dtype),
        "second": calls.in_dtype(second_given, dtypes["second"] or dtype),
    }
    same_inputs = calls.alike(given, second_given)
    kinds = (leaf.dtype.name for leaf in arguments["first"].leaves if is_float(leaf))
    pair = Pair(
        first=ours,
        second=theirs,
        arguments=arguments,  # type: ignore[arg-type]
        same_inputs=same_inputs,
        fixed=frozenset(calls.named_leaves("fixed", fixed, given, ours.argument_names)),
        vary=frozenset(calls.named_leaves("vary", vary, given, ours.argument_names)),
        held=held,
        dtype=dtype or next(kinds, "float32"),
        outputs=[],
        pairing=Pairing(()),
        transfer=transfer,
        reference=reference,
        progress=progress,
        notes=notes,
    )
    pair.outputs = _common_structure(pair)
    pair.arguments["second"] = calls.like(pair.arguments["second"], pair.arguments["first"], same_inputs)
    pair.notes += input_notes(pair)
    # In eval mode, so that masks make no difference to it.
    pair.pairing = (_folded if fold else _paired)(pair, (first, second), rules)
    pair.notes += [
        f"{name} of {pair.shown[_side(where)]} is left out: {why}" for where, name, why in pair.pairing.dropped
    ]
    pair.notes += [pair.pairing.doubt] if pair.pairing.doubt else []
    pair.kept = state.kept(pair.pairing, pair.first.parameters())
    pair.notes += state.frozen_notes(pair)
    if train:
        _start_to_train(pair)
    return pair


def subject_of(value: Any, device: str | None = None, what: str = "module") -> Subject:
    """Return what runs one side: a torch module, an NNX module, a Linen module with its variables, or a function.

    Args:
        value: the side.
        device: where it runs; None is where its weights are.
        what: what it is called in messages.

    Raises:
        TypeError: it is none of these.
        MissingBackendError: its framework is not installed.
    """
    framework = backends.framework_of(value)
    if framework is None:
        raise TypeError(_refusal(value, what))
    subject: Subject = load_adapter(framework).subject_of(value, device)
    return subject


def _held(subjects: tuple[Subject, Subject], labels: Mapping[Side, str]) -> tuple[dict[Side, Arrays], list[str]]:
    """Return the weights that both sides hold, and a note where JAX made float64 ones float32."""
    held = {side: weights_held(one, shown(labels[side])) for side, one in zip(SIDES, subjects, strict=True)}
    others = [calls.common_dtype(held[side]) for side in reversed(SIDES)]
    wide = {side: widened(held[side], one, other) for side, one, other in zip(SIDES, subjects, others, strict=True)}
    return wide, [narrowed(shown(labels[side])) for side in SIDES if wide[side] is not held[side]]


def _refusal(value: Any, what: str) -> str:
    """Say what is wrong with something that is no side."""
    rule = (
        f"{what} must be a torch.nn.Module, a flax.nnx.Module, (a Linen module, its variables) or "
        "parity.function(f, weights)"
    )
    kinds = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    if any(kind.startswith("flax.linen") for kind in kinds):
        return f"{rule}; {type(value).__name__} is a Linen module, give (module, variables)"
    if isinstance(value, type):
        return f"{rule}; {value.__name__} is a class, give an instance of it"
    return f"{rule}, got {type(value).__name__}"


def _side(name: str) -> Side:
    return "first" if name == "first" else "second"


def _common_structure(pair: Pair) -> Outputs:
    """Check that both sides return the same structure, and return it."""
    ours, theirs = (pair.subject(side).describe_outputs(pair.held[side], pair.arguments[side]) for side in SIDES)
    stock = pair.first.name == "MultiheadAttention" and "need_weights" not in pair.arguments["first"].kwargs
    if stock and len(ours) == 2 and len(theirs) == 1:
        call = pair.arguments["first"]
        pair.arguments["first"] = Arguments(call.args, {**call.kwargs, "need_weights": False})
        pair.notes.append("attention weights of torch's MultiheadAttention: not compared, Flax returns none")
        ours = ours[:1]
    labels = pair.shown
    check_outputs(ours, theirs, labels)
    same_dtype = calls.common_dtype(pair.held["first"]) == calls.common_dtype(pair.held["second"])
    for (place, _, dtype), (_, _, other) in zip(ours, theirs, strict=True):
        if class_of(dtype) != class_of(other) or (same_dtype and class_of(dtype) == "float" and dtype != other):
            pair.notes.append(
                f"output{place} is {dtype} in {labels['first']} and {other} in {labels['second']}; only its values are "
                "compared"
            )
    pair.notes += plain_outputs(pair.first.plain, pair.second.plain, (labels["first"], labels["second"]))
    return list(ours)


def _folded(pair: Pair, sides: tuple[Any, Any], rules: Any) -> Pairing:
    """Pair the parameters; where that can't be, with the biases of one side's recurrent layers added."""
    try:
        return _paired(pair, sides, rules)
    except WeightsMismatchError:
        for side in SIDES:
            subject, held = pair.subject(side), pair.held[side]
            added = folds(subject.parameters())
            if not added:
                continue
            folded = FoldedSubject(subject, added)
            setattr(pair, side, folded)
            pair.held[side] = widened(weights_held(folded, pair.shown[side]), folded, calls.common_dtype(held))
            with contextlib.suppress(WeightsMismatchError):
                found = _paired(pair, sides, rules)
                names = ", ".join(f"{one.folded} to {one.kept}" for one in added)
                pair.notes.append(
                    f"{pair.shown[side]} adds two biases of a recurrent layer and the other side holds one: they are "
                    f"judged as their sum ({names})"
                )
                return found
            setattr(pair, side, subject)
            pair.held[side] = held
        raise


def _paired(pair: Pair, sides: tuple[Any, Any], rules: Any) -> Pairing:
    ours, theirs = pair.first.parameters(), pair.second.parameters()
    ours, theirs = _weights_of(pair.first, ours, theirs), _weights_of(pair.second, theirs, ours)
    if isinstance(rules, Pairing):  # it is known beforehand
        return rules
    labels = (pair.shown["first"], pair.shown["second"])
    if rules is None:
        own = _rules_of_configs(pair, sides)
        if own is not None:
            with contextlib.suppress(ValueError):
                return pairings.from_rules(own, ours, theirs, how="rule")
    runner = Live(pair)

    @functools.cache
    def drawn(kept: frozenset[str]) -> Arrays:
        return draw_weights(ours, pair.held["first"], (0, 1), kept)

    @functools.cache
    def wanted(kept: frozenset[str]) -> Run:
        return runner.precisely("first", drawn(kept), pair.arguments["first"])

    def probe(candidate: Pairing) -> float:
        kept = state.kept(candidate, ours)
        weights = {**pair.held["second"], **candidate.to_second(drawn(kept))}
        distance = apart(wanted(kept), runner.precisely("second", weights, pair.arguments["second"]))
        return 0.0 if pair.lacks and distance < PROBE_LIMIT else distance

    def orders() -> tuple[dict[str, int], dict[str, int]]:
        first, second = (_uses(pair, side) for side in SIDES)
        return first, second

    try:
        return pairings.pair_parameters(ours, theirs, probe, rules, labels, orders, _most_candidates(pair))
    except WeightsMismatchError as error:
        tied = [
            f"in {pair.shown[side]} {name} is {own}"
            for side in SIDES
            for name, own in pair.subject(side).tied().items()
        ]
        error.args = (f"{error}; tied: {', '.join(tied)}" if tied else str(error),)
        raise


def _uses(pair: Pair, side: Side) -> dict[str, int]:
    """Return name of a weight of a side -> when it is used first; nothing if that can't be told."""
    with contextlib.suppress(Exception):  # it decides nothing that could not be decided without it
        found: dict[str, int] = pair.subject(side).uses(pair.held[side], pair.arguments[side])
        return found
    return {}


def _most_candidates(pair: Pair) -> int:
    """Return how many pairings are tried at most, which follows from the work of a run and not from a clock."""
    affordable = int(PAIRING_WORK / max(pair.effort.work, 1.0))
    return max(LEAST_CANDIDATES, min(pairings.MAX_CANDIDATES, affordable))


def _weights_of(
    subject: Subject, own: Mapping[str, Parameter], others: Mapping[str, Parameter]
) -> Mapping[str, Parameter]:
    """Return the parameters of a side; of a function's tree without whole numbers and bools that it has alone."""
    if not subject.kind.endswith("function"):
        return own
    return {name: one for name, one in own.items() if class_of(one.dtype) == "float" or name in others}


def _rules_of_configs(pair: Pair, sides: tuple[Any, Any]) -> Rules | None:
    """Return the rules of our own modules inside both, if there are any."""
    if (pair.first.kind, pair.second.kind) != ("torch module", "NNX module"):
        return None
    readers = [backends.load(pair.subject(side).framework) for side in SIDES]
    configs = [reader.find_configs(module) for reader, module in zip(readers, sides, strict=True)]
    if not configs[0] or configs[0].keys() != configs[1].keys():
        return None
    with contextlib.suppress(ValueError):
        check_same_meaning(*configs)
        return own_rules(readers[0], sides[0])
    return None


def _start_to_train(pair: Pair) -> None:
    """Switch both sides to train mode, and compare the masks that they ask for."""
    pair.train = pair.first.train = pair.second.train = True
    ours, theirs = (pair.subject(side).run(pair.held[side], pair.arguments[side]) for side in SIDES)
    pair.foreign = [side for side, run in zip(SIDES, (ours, theirs), strict=True) if run.foreign]
    pair.masks = differences(ours.draws, theirs.draws, (pair.shown["first"], pair.shown["second"]))
    pair.notes.append(
        f"train mode: both sides drop by the same masks, {len(ours.draws)} per call"
        if ours.draws or theirs.draws
        else "train mode: neither side drops anything"
    )
    if any(parameter.role == "statistic" for parameter in pair.first.parameters().values()):
        pair.notes.append("running statistics that train mode changes are not compared; parity.train does that")
