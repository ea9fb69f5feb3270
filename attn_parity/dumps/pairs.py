"""The pair to record: a side with itself, or a side with the dump of the other one."""

from __future__ import annotations

from typing import Any

from attn_bridge.printable import listed
from attn_bridge.weights import Rule

from .. import matching
from ..matching import state
from ..matching.outputs import PROBE_LIMIT, apart, check_outputs
from ..pair import Pair, narrowed, widened
from ..pairing import Match, Pairing, whole
from ..results.findings import Side, shown
from ..samples import calls, sampling
from ..samples.sampling import FIRST
from ..sides.arrays import class_of, is_float
from ..sides.modes import Modes
from ..sides.subject import Arguments, Arrays, ModuleFailedError, Subject, is_array
from ..verdict.runner import Live
from .format import ORACLE, Dump
from .trials import RecordedTrials


def alone(subject: Subject, inputs: Any) -> Pair:
    """Return the pair of a subject with itself.

    State that holds data counts among its weights: the other side's will be given it, so that it is not a table.
    """
    notes: list[str] = []
    numbers = all_state(subject)
    subject.carry(
        [name for name in numbers if subject.state()[name].persistent and state.waits_for_data(numbers[name])]
    )
    weights: Arrays = subject.weights()
    own = calls.common_dtype(weights)
    call = calls.in_dtype(_plain_call(subject, calls.as_arguments(inputs), notes), own)
    matches = tuple(_itself(name, one) for name, one in subject.parameters().items())
    return Pair(
        first=subject,
        second=subject,
        arguments={"first": call, "second": call},
        same_inputs=calls.alike(call, call),
        fixed=frozenset(),
        vary=frozenset(),
        own_weights={"first": weights, "second": weights},
        dtype=own or next((one.dtype.name for one in call.leaves if is_float(one)), "float32"),
        outputs=list(subject.describe_outputs(weights, call)),
        pairing=Pairing(matches),
        kept=state.kept(Pairing(matches), subject.parameters()),
        notes=notes,
    )


def beside(subject: Subject, inputs: object, like: Dump) -> Pair:
    """Return the pair of another side's dump and a subject; the parameters are yet to be paired."""
    notes: list[str] = []
    own: Arrays = subject.weights()
    weights = widened(own, subject, like.manifest.dtype)
    if weights is not own:
        notes.append(narrowed(shown(subject.framework)))
    plain = _plain_call(subject, calls.as_arguments(_call_of(like) if inputs is None else inputs), notes)
    call = calls.in_dtype(plain, calls.common_dtype(weights) or like.manifest.dtype)
    outputs = list(subject.describe_outputs(weights, call))
    pair = Pair(
        first=like,
        second=subject,
        arguments={"first": like.arguments, "second": call},
        same_inputs=calls.alike(like.arguments, call),
        fixed=frozenset(),
        vary=frozenset(),
        own_weights={"first": like.weights(), "second": weights},
        dtype=like.manifest.dtype,
        outputs=outputs,
        pairing=Pairing(()),
        notes=notes,
    )
    check_outputs(like.manifest.outputs, outputs, pair.shown)
    return pair


def match_weights(pair: Pair, like: Dump, runner: Live, rules: object) -> None:
    """Pair the weights of a side with those of a dump; its stored float64 results settle ambiguous pairings.

    Raises:
        ValueError: they cannot be paired, or a rule drops weights that the samples of the dump draw at random.
    """
    drawn = next((one for one in like.manifest.samples if one.kind == "own"), FIRST)
    dtype = like.manifest.dtypes[0]
    stored = like.run(drawn, dtype, like.manifest.modes[0] if like.manifest.lacks else ORACLE)

    def distance(candidate: Pairing) -> float:
        sample = runner.sample(drawn)
        sample = sampling.rounded(sample, None if dtype == pair.dtype else dtype)
        weights = pair.own_weights["second"] | candidate.to_second(sample.weights)
        difference = apart(stored, runner.precisely("second", weights, sample.arguments["second"]))
        return 0.0 if like.manifest.lacks and difference < PROBE_LIMIT else difference

    matching.complete(pair, (None, None), rules, trials=RecordedTrials(pair, {"first": like}, distance))
    for side, name, why in pair.pairing.dropped:
        parameter = like.parameters().get(name) if side == "first" else None
        is_drawn = (
            parameter is not None
            and not parameter.frozen
            and class_of(parameter.dtype) == "float"
            and parameter.role != "state"
        )
        if is_drawn and like.manifest.reach.get(name, (True, True))[0]:
            raise ValueError(
                f"{name} is dropped ({why}), and the samples of {like.path} draw it at random; freeze it in that "
                "module, or compare both sides in one process"
            )


def all_state(subject: Subject) -> Arrays:
    """Return copies of all state of a subject."""
    names, parameters = subject.state(), subject.parameters()
    subject.carry(names)
    try:
        state = subject.weights()
    finally:
        subject.carry([name for name in names if name in parameters])
    return {name: state[name] for name in names}


def parted(pair: Pair, side: Side) -> tuple[Arrays, Arrays]:
    """Return the weights and the state of the side to record; a note names the state that a dump cannot hold.

    The first side's state is kept apart from its weights, because the other side decides which state is carried.
    """
    subject, weights_and_state = pair.subject(side), pair.own_weights[side]
    names = subject.state() if side == "first" else {}
    weights = {name: array for name, array in weights_and_state.items() if name not in names}
    rest = {name: array for name, array in all_state(subject).items() if name not in weights}
    recordable = {name: array for name, array in rest.items() if array.dtype.kind in "fiub" or is_float(array)}
    lost = [name for name in rest if name not in recordable]
    pair.notes += [f"state of a dtype that a dump cannot hold: {listed(lost)}"] if lost else []
    return weights, recordable


def _plain_call(subject: Subject, call: Arguments, notes: list[str]) -> Arguments:
    """Return a call in eval mode that a dump can hold; torch's attention is asked for no weights, as Flax has none."""
    call, of_mode = Modes.of(subject, call).in_eval_mode(call, shown(subject.framework))
    notes += of_mode
    stock = subject.framework == "torch" and subject.name == "MultiheadAttention"
    if stock and "need_weights" in subject.argument_names and "need_weights" not in call.kwargs:
        notes.append("attention weights of torch's MultiheadAttention: not compared, Flax returns none")
        call = Arguments(call.args, {**call.kwargs, "need_weights": False})
    arrays = {name: one for name, one in call.kwargs.items() if is_array(one)}
    plain = {name: one for name, one in call.kwargs.items() if name not in arrays}
    kinds = {type(one) for one in plain.values()}
    if not all(map(is_array, call.args)) or not kinds <= {bool, int, float, str, type(None)}:
        raise ModuleFailedError("a dump takes arrays, and plain values by keyword, as inputs")
    return Arguments(call.args, arrays | plain)


def _call_of(like: Dump) -> Arguments:
    """Return the call of a torch dump, as the Flax side takes it."""
    own = {"need_weights"} if like.name == "MultiheadAttention" else set()
    call = like.arguments
    return Arguments(call.args, {name: one for name, one in call.kwargs.items() if name not in own})


def _itself(name: str, parameter: Any) -> Match:
    tensor = whole(name, parameter)
    return Match(tensor, tensor, Rule("torch", "flax"), "name")
