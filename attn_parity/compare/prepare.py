"""Makes a pair of two live sides: subjects, calls in their dtypes, one structure of outputs, parameters paired."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from attn_bridge import backends
from attn_bridge.printable import listed

from .. import matching
from ..matching.outputs import check_outputs, plain_outputs
from ..pair import SIDES, Pair, Progress, input_notes, labels_of, narrowed, weights_held, widened
from ..pairing import Match, Pairing
from ..results.findings import Side, shown
from ..samples import calls
from ..samples.sampling import OutputStructure
from ..sides.arrays import class_of, is_float
from ..sides.dropout_masks import differences
from ..sides.libraries import KINDS, as_side
from ..sides.modes import IN_TRAIN_MODE, Modes, called_with
from ..sides.subject import Arguments, Arrays, ModuleFailedError, Returned, Subject, load_adapter

LOOKED_AT = 256
"""Numbers of a tensor that are compared with the other side's, of which two tensors drawn apart share none."""


def prepare(
    first: object,
    second: object,
    inputs: object,
    second_inputs: object = None,
    *,
    device: str | tuple[str, str] | None = None,
    rules: object = None,
    transfer: bool = True,
    train: bool = False,
    reference: bool = False,
    fixed: Iterable[int | str] | int | str = (),
    vary: Iterable[int | str] | int | str = (),
    output: str | None = None,
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
    for subject in subjects:
        subject.returned = Returned(output)
    ours, theirs = subjects
    labels = labels_of(ours.framework, theirs.framework)
    weights, notes = _held((ours, theirs), labels)
    dtypes = {side: calls.common_dtype(weights[side]) for side in SIDES}
    dtype = dtypes["first"] or dtypes["second"]
    call = calls.as_arguments(inputs)
    second_given = call if second_inputs is None else calls.as_arguments(second_inputs)
    arguments: dict[Side, Arguments] = {
        "first": calls.in_dtype(call, dtype),
        "second": calls.in_dtype(second_given, dtypes["second"] or dtype),
    }
    same_inputs = calls.alike(call, second_given)
    kinds = (leaf.dtype.name for leaf in arguments["first"].leaves if is_float(leaf))
    pair = Pair(
        first=ours,
        second=theirs,
        arguments=arguments,
        same_inputs=same_inputs,
        fixed=frozenset(calls.named_leaves("fixed", fixed, call, ours.argument_names)),
        vary=frozenset(calls.named_leaves("vary", vary, call, ours.argument_names)),
        own_weights=weights,
        dtype=dtype or next(kinds, "float32"),
        outputs=[],
        pairing=Pairing(()),
        transfer=transfer,
        reference=reference,
        progress=progress,
        notes=notes,
    )
    modes = {side: Modes.of(pair.subject(side), arguments[side]) for side in SIDES}
    _call_in_eval_mode(pair, modes, to_train=train)
    pair.outputs = _common_structure(pair, is_own=second_inputs is not None)
    pair.arguments["second"] = calls.like(pair.arguments["second"], pair.arguments["first"], same_inputs)
    pair.notes += input_notes(pair)
    # In eval mode, so that masks make no difference to it.
    matching.complete(pair, (first, second), rules, fold=fold)
    pair.notes += _replaced(pair)
    if train:
        _start_to_train(pair, modes)
    return pair


def subject_of(value: object, device: str | None = None, what: str = "module") -> Subject:
    """Return a runnable subject: a torch, NNX or Linen module, a module of another library, or a function.

    Args:
        value: the side.
        device: where it runs; None is the device of its weights.
        what: name of the argument, for messages.

    Raises:
        TypeError: the value is of another type.
        MissingBackendError: its framework is not installed.
    """
    value = as_side(value)
    framework = backends.framework_of(value)
    if framework is None:
        raise TypeError(_refusal(value, what))
    subject: Subject = load_adapter(framework).subject_of(value, device)
    return subject


def _held(subjects: tuple[Subject, Subject], labels: Mapping[Side, str]) -> tuple[dict[Side, Arrays], list[str]]:
    """Return the weights that both sides hold, and a note where JAX made float64 ones float32."""
    weights = {side: weights_held(one, shown(labels[side])) for side, one in zip(SIDES, subjects, strict=True)}
    others = [calls.common_dtype(weights[side]) for side in reversed(SIDES)]
    wide = {side: widened(weights[side], one, other) for side, one, other in zip(SIDES, subjects, others, strict=True)}
    return wide, [narrowed(shown(labels[side])) for side in SIDES if wide[side] is not weights[side]]


def _refusal(value: object, what: str) -> str:
    """Return the error message for a value that is not a side."""
    rule = (
        f"{what} must be a torch.nn.Module, a flax.nnx.Module, (a Linen module, its variables), {KINDS} or "
        "parity.function(f, weights)"
    )
    kinds = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    if any(kind.startswith("flax.linen") for kind in kinds):
        return f"{rule}; {type(value).__name__} is a Linen module, give (module, variables)"
    if isinstance(value, type):
        return f"{rule}; {value.__name__} is a class, give an instance of it"
    return f"{rule}, got {type(value).__name__}"


def _replaced(pair: Pair) -> Iterator[str]:
    """Name the second side's weights that differ from the first's where others are equal: a loader may be wrong.

    The first numbers of each tensor decide; those that all tensors start with (0, 1) do not count.
    """
    if not pair.transfer:
        return
    first, second = (pair.pairing.aligned(pair.own_weights[side], side) for side in SIDES)
    alike: list[Match] = []
    unlike: list[Match] = []
    for match in pair.pairing.matches:
        first_values, second_values = (np.asarray(side[match.first.name]).flat[:LOOKED_AT] for side in (first, second))
        is_drawn = match.first.parameter.role == "parameter" and is_float(first_values)
        if is_drawn and min(first_values.size, second_values.size) > 1 and first_values.min() < first_values.max():
            (alike if np.array_equal(first_values, second_values) else unlike).append(match)
    if unlike and len(alike) >= len(unlike):
        names = listed([f"{match.first.name} = {match.second.name}" for match in unlike])
        yield (
            f"{pair.shown['second']} holds the numbers of {pair.shown['first']} in {len(alike)} of "
            f"{len(alike) + len(unlike)} tensors and others in {names}; all were replaced; --no-transfer "
            "(transfer=False) judges what each side holds"
        )


def _outputs(pair: Pair, *, is_own: bool) -> Iterator[OutputStructure]:
    """Yield the structure of the outputs of each side.

    Raises:
        ModuleFailedError: a side can't be called; names the layout where images with their channels last could.
    """
    for side in SIDES:
        call = pair.arguments[side]
        try:
            yield pair.subject(side).describe_outputs(pair.own_weights[side], call)
        except ModuleFailedError as error:
            if side == "second" and not is_own and _can_be_called(pair, side, _channels_last(call)):
                raise ModuleFailedError(
                    f"{error}; it can be called with the channels last: give it inputs of its own "
                    "(second_inputs=, --second-inputs)"
                ) from error
            raise


def _channels_last(call: Arguments) -> Arguments:
    """Return a call whose sequences, images and volumes have their channels last, not second."""
    is_image = [is_float(leaf) and 3 <= leaf.ndim <= 5 for leaf in call.leaves]
    leaves = zip(call.leaves, is_image, strict=True)
    return call.with_leaves([np.moveaxis(leaf, 1, -1) if moves else leaf for leaf, moves in leaves])


def _can_be_called(pair: Pair, side: Side, call: Arguments) -> bool:
    try:
        pair.subject(side).describe_outputs(pair.own_weights[side], call)
    except ModuleFailedError:
        return False
    return True


def _common_structure(pair: Pair, *, is_own: bool) -> OutputStructure:
    """Check that both sides return the same structure, and return it."""
    ours, theirs = _outputs(pair, is_own=is_own)
    stock = pair.first.name == "MultiheadAttention" and "need_weights" in pair.first.argument_names
    if stock and "need_weights" not in pair.arguments["first"].kwargs and len(ours) == 2 and len(theirs) == 1:
        call = pair.arguments["first"]
        pair.arguments["first"] = Arguments(call.args, {**call.kwargs, "need_weights": False})
        pair.notes.append("attention weights of torch's MultiheadAttention: not compared, Flax returns none")
        ours = ours[:1]
    labels = pair.shown
    theirs = _in_first_layout(pair, ours, theirs)
    check_outputs(ours, theirs, labels, pair.first.returned.entry)
    same_dtype = calls.common_dtype(pair.own_weights["first"]) == calls.common_dtype(pair.own_weights["second"])
    for (path, _, dtype), (_, _, other) in zip(ours, theirs, strict=True):
        if class_of(dtype) != class_of(other) or (same_dtype and class_of(dtype) == "float" and dtype != other):
            pair.notes.append(
                f"output{path} is {dtype} in {labels['first']} and {other} in {labels['second']}; only its values are "
                "compared"
            )
    pair.notes += plain_outputs(pair.first.plain, pair.second.plain, (labels["first"], labels["second"]))
    return list(ours)


def _in_first_layout(pair: Pair, ours: OutputStructure, theirs: OutputStructure) -> OutputStructure:
    """Have outputs of the second side judged with the first's axes, if their channels moved as those of its inputs."""
    orders = [one.axes for one in pair.same_inputs if isinstance(one, calls.Rearranged) and len(one.axes) > 2]
    moves = [move for move in MOVES if any(list(order) == _moved(len(order), *MOVES[move]) for order in orders)]
    axes, structure = dict[str, tuple[int, ...]](), list(theirs)
    for position, ((_, shape, _), (path, other, dtype)) in enumerate(zip(ours, theirs, strict=False)):
        for move in moves if len(other) > 2 and shape != other else ():
            back = _moved(len(other), *MOVES[move][::-1])
            if tuple(other[axis] for axis in back) == shape:
                axes[path], structure[position] = tuple(back), (path, shape, dtype)
                pair.notes.append(
                    f"output{path} of {pair.shown['second']} has its channels {move}, as its inputs have: it is judged "
                    f"with the axes of {pair.shown['first']}"
                )
                break
    pair.second.returned = dataclasses.replace(pair.second.returned, axes=axes)
    return structure


MOVES = {"last": (1, -1), "second": (-1, 1)}
"""Layout of the second side -> the axis of channels in the first side's, and its place in the second's."""


def _moved(count: int, source: int, target: int) -> list[int]:
    """Return the order of some axes after one is moved."""
    axes = list(range(count))
    moved = axes.pop(source)
    axes.insert(target % count, moved)
    return axes


def _call_in_eval_mode(pair: Pair, modes: Mapping[Side, Modes], *, to_train: bool) -> None:
    """Have both sides called in eval mode; before train mode, the values that the user gave don't count either."""
    for side, mode in modes.items():
        call, notes = mode.in_eval_mode(pair.arguments[side], pair.shown[side])
        if to_train:
            bools = [name for name, value in mode.passed.items() if isinstance(value, bool)]
            call = called_with(call, mode.names, {name: not IN_TRAIN_MODE[name] for name in bools})
        pair.arguments[side] = call
        pair.notes += [] if to_train else notes


def _start_to_train(pair: Pair, modes: Mapping[Side, Modes]) -> None:
    """Switch both sides to train mode, and compare the masks that they ask for."""
    pair.train = pair.first.train = pair.second.train = True
    for side, mode in modes.items():
        in_train = {name: IN_TRAIN_MODE[name] for name in mode.defaults}
        pair.arguments[side] = called_with(pair.arguments[side], mode.names, {**in_train, **mode.passed})
        pair.notes += mode.notes(pair.shown[side], train=True)
    ours, theirs = (pair.subject(side).run(pair.own_weights[side], pair.arguments[side]) for side in SIDES)
    pair.foreign = [side for side, run in zip(SIDES, (ours, theirs), strict=True) if run.foreign]
    pair.masks = differences(ours.draws, theirs.draws, (pair.shown["first"], pair.shown["second"]))
    pair.notes.append(_on_masks(pair, len(ours.draws), len(theirs.draws)))
    if any(parameter.role == "statistic" for parameter in pair.first.parameters().values()):
        trainable = (pair.first.kind, pair.second.kind) == ("torch module", "NNX module")
        more = "; parity.train does that" if trainable else ""
        pair.notes.append(f"running statistics that train mode changes are not compared{more}")


def _on_masks(pair: Pair, first: int, second: int) -> str:
    """Return the note on how many dropout masks both sides draw per call."""
    if pair.masks:
        return (
            f"train mode: the sides drop by masks that are not all the same, {first} per call in "
            f"{pair.shown['first']} and {second} in {pair.shown['second']}"
        )
    if first or second:
        return f"train mode: both sides drop by the same masks, {first} per call"
    return "train mode: neither side drops anything"
