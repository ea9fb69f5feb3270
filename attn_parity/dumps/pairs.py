"""The pair that is recorded: a side with itself, or a side beside the dump of the other one."""

from __future__ import annotations

from typing import Any

from attn_bridge.weights import Rule

from ..matching import state
from ..matching.outputs import check_outputs
from ..pair import Pair, narrowed, widened
from ..pairing import Match, Pairing, whole
from ..results.findings import shown
from ..samples import inputs as calls
from ..sides.dtypes import is_float
from ..sides.subject import Arguments, Arrays, ModuleFailedError, is_array
from .format import Dump


def alone(subject: Any, inputs: Any) -> Pair:
    """Return the pair of a subject with itself."""
    notes: list[str] = []
    held: Arrays = subject.weights()
    own = calls.common_dtype(held)
    call = calls.in_dtype(_without_weights(subject, calls.as_arguments(inputs), notes), own)
    matches = tuple(_itself(name, one) for name, one in subject.parameters().items())
    return Pair(
        first=subject,
        second=subject,
        arguments={"first": call, "second": call},
        same_inputs=calls.alike(call, call),
        fixed=frozenset(),
        vary=frozenset(),
        held={"first": held, "second": held},
        dtype=own or next((one.dtype.name for one in call.leaves if is_float(one)), "float32"),
        outputs=list(subject.describe_outputs(held, call)),
        pairing=Pairing(matches),
        kept=state.kept(Pairing(matches), subject.parameters()),
        notes=notes,
    )


def beside(subject: Any, inputs: Any, like: Dump) -> Pair:
    """Return the pair of another side's dump and a subject; the parameters are yet to be paired."""
    notes: list[str] = []
    own: Arrays = subject.weights()
    held = widened(own, subject, like.manifest.dtype)
    if held is not own:
        notes.append(narrowed(shown(subject.framework)))
    given = _without_weights(subject, calls.as_arguments(_call_of(like) if inputs is None else inputs), notes)
    call = calls.in_dtype(given, calls.common_dtype(held) or like.manifest.dtype)
    outputs = list(subject.describe_outputs(held, call))
    pair = Pair(
        first=like,
        second=subject,
        arguments={"first": like.arguments, "second": call},
        same_inputs=calls.alike(like.arguments, call),
        fixed=frozenset(),
        vary=frozenset(),
        held={"first": like.weights(), "second": held},
        dtype=like.manifest.dtype,
        outputs=outputs,
        pairing=Pairing(()),
        notes=notes,
    )
    check_outputs(like.manifest.outputs, outputs, pair.shown)
    return pair


def _without_weights(subject: Any, call: Arguments, notes: list[str]) -> Arguments:
    """Return a call that a dump can hold; torch's own attention is asked for no weights, as Flax returns none."""
    if subject.framework == "torch" and subject.name == "MultiheadAttention" and "need_weights" not in call.kwargs:
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
