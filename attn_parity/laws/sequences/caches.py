"""Caches: decoding token by token, and in chunks, gives the outputs of one pass over the whole sequence.

Each convention is a program over the module: its arguments and methods decide which of them apply.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...sides.subject import Array
from ..layout import Axes
from ..side import REFUSALS, Gap, LawResult, NotTriedError, OneSide, failed
from .order import is_causal

STATES = (
    *("cache", "kv_cache", "past_key_value", "past_key_values", "layer_past", "past", "past_kv"),
    *("state", "hx", "h0", "hidden", "hidden_state", "initial_state", "carry", "initial_carry"),
)
"""Arguments that take the state that an earlier call returned behind its output."""

SLICED = ("position_ids", "positions", "cache_position")
"""Arguments with an element per token, which a piece takes its part of."""

MOST_SINGLE = 6
"""Last tokens that are decoded one by one; those before them are prefilled."""


Piece = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a call on some tokens."""

Program = Callable[[Any, Sequence[Piece], Piece], Sequence[object]]
"""From the module, the arguments of each piece of a sequence, and those of all of it, to the output of each piece."""


@dataclasses.dataclass(frozen=True)
class _Convention:
    """One way to continue a sequence.

    Attributes:
        label: how, for the report.
        program: calls the module piece by piece.
        full: arguments of the full pass that the cached one implies, from the length of the sequence.
        is_single: whether it takes one token at a time only.
    """

    label: str
    program: Program
    full: Callable[[int], Mapping[str, object]] = lambda length: {}
    is_single: bool = False


def cached(side: OneSide, layout: Axes) -> LawResult:
    """Decode the last tokens one by one, and compare with one pass."""
    length = _length(side, layout)
    prefill = max(1, length - MOST_SINGLE)
    return _tried(side, layout, [prefill, *[1] * (length - prefill)], "one by one", is_single=True)


def chunked(side: OneSide, layout: Axes) -> LawResult:
    """Continue the sequence in chunks of several tokens, and compare with one pass."""
    length = _length(side, layout)
    if length < 4:
        raise NotTriedError("the sequence has fewer than four tokens")
    first = max(1, length // 3)
    sizes = [first, max(2, (length - first) // 2)]
    return _tried(side, layout, [*sizes, length - sum(sizes)], "in chunks", is_single=False)


def _length(side: OneSide, layout: Axes) -> int:
    if layout.time is None:
        raise NotTriedError("the input has no axis of a sequence")
    return int(side.call.leaves[layout.main].shape[layout.time])


def _tried(side: OneSide, layout: Axes, sizes: list[int], how: str, *, is_single: bool) -> LawResult:
    conventions = list(_conventions(side, layout))
    if not conventions:
        raise NotTriedError("the module takes no cache and no state")
    if len(sizes) < 2 or 0 in sizes:
        raise NotTriedError("the sequence is too short")
    refused = NotTriedError("the cache takes one token at a time")
    for convention in conventions:
        if convention.is_single and not is_single:
            continue
        own = [1] * sum(sizes) if convention.is_single else sizes
        if not convention.full(2) and not is_causal(side, layout):
            raise NotTriedError("outputs of the full pass see later positions, which a cache can't hold yet")
        try:
            gap = _gap(side, layout, convention, own)
        except REFUSALS as error:
            refused = failed(error)
            continue
        except NotTriedError as error:
            refused = error
            continue
        first_sizes = f"{sizes[0]} tokens, then {how}" if not convention.is_single else how
        return LawResult(gap, f"{first_sizes} ({convention.label})", f"by {convention.label}, {how}")
    raise refused


def _gap(side: OneSide, layout: Axes, convention: _Convention, sizes: Sequence[int]) -> Gap:
    axis, length = layout.time or 0, sum(sizes)

    def full(target: Callable[..., object], *args: object, **kwargs: object) -> object:
        return first_array(target(*args, **kwargs, **convention.full(length)))

    def program(target: object, *args: object, **kwargs: object) -> Sequence[object]:
        return convention.program(target, list(_pieces(side, layout, sizes, args, kwargs)), (args, kwargs))

    whole, parts = (_outputs(side, one) for one in (full, program))
    (expected,) = whole
    if expected.ndim <= axis or expected.shape[axis] != length:
        raise NotTriedError("no output has an element per token")
    got = np.concatenate(parts, axis)
    return side.gap([expected], [got], side.structure[:1])


def _outputs(side: OneSide, program: Callable[..., object]) -> list[Array]:
    subject = side.programmed(program)
    results: list[Array] = subject.run(side.weights_of(subject), side.call, dtype=side.dtype).outputs
    return results


def first_array(result: object) -> Any:
    """Return the first array of a return value: the output, which a cache follows."""
    while not hasattr(result, "shape"):
        values = list(result.values()) if isinstance(result, Mapping) else result
        if not isinstance(values, (tuple, list)) or not values:
            raise TypeError(f"the call returned {type(result).__name__}, and not its output first")
        result = values[0]
    return result


def _conventions(side: OneSide, layout: Axes) -> Iterator[_Convention]:
    """Yield the ways to continue a sequence that a side's arguments and methods allow."""
    arguments, root = side.arguments, side.root
    if _main_argument(side, layout) is None:
        return
    shape = side.call.leaves[layout.main].shape
    if hasattr(root, "init_cache") and "cache" in arguments:
        rows = shape[layout.batch] if layout.batch is not None else 1
        yield _Convention("init_cache and cache", functools.partial(_with_init_cache, rows, _length(side, layout)))
    if hasattr(root, "init_cache") and "decode" in arguments and "mask" in arguments:
        program = functools.partial(_with_decode, shape)
        yield _Convention("init_cache and decode", program, _causal_mask, is_single=True)
    if isinstance(getattr(root, "decode", None), bool) and hasattr(root, "clone"):
        causal = _mask_alone if "mask" in arguments else lambda length: {}
        yield _Convention("decode=True", _with_collection, causal, is_single=True)
    for name in ("past_key_values", "cache_params"):
        if name in arguments and "use_cache" in arguments:
            yield _Convention(f"{name} and use_cache", functools.partial(_with_past, name))
            return
    if "return_carry" in arguments and "initial_carry" in arguments:
        yield _Convention("initial_carry and return_carry", _with_carry)
        return
    for name in STATES:
        if name in arguments and name not in side.given and not hasattr(root, "init_cache"):
            more = {"use_cache": True} if "use_cache" in arguments else {}
            yield _Convention(f"the argument {name}", functools.partial(_with_state, name, more))


def _main_argument(side: OneSide, layout: Axes) -> int | str | None:
    """Return the position or name of the main input; None if it is inside a tuple."""
    path = side.call.paths[layout.main]
    key, rest = path[1:].partition("]")[0], path.partition("]")[2]
    if rest:
        return None
    return int(key) if key.isdigit() else key.strip("'\"")


def _pieces(
    side: OneSide, layout: Axes, sizes: Sequence[int], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[Piece]:
    """Yield the arguments of each piece of a sequence, from those of the whole call; `sizes` count tokens."""
    main, axis, length = _main_argument(side, layout), layout.time or 0, sum(sizes)
    names = [*side.names[: len(args)], *[""] * (len(args) - len(side.names))]

    def cut(at: slice, key: int | str, name: str, value: Any) -> object:
        if key == main:
            return value[(slice(None),) * axis + (at,)]
        if getattr(value, "ndim", 0) and value.shape[-1] == length:
            if name in SLICED:
                return value[..., at]
            if name == "attention_mask" and value.ndim == 2:
                return value[:, : at.stop]
        return value

    for at in itertools.starmap(slice, itertools.pairwise(itertools.accumulate(sizes, initial=0))):
        positional = tuple(cut(at, position, *pair) for position, pair in enumerate(zip(names, args, strict=True)))
        yield positional, {name: cut(at, name, name, value) for name, value in kwargs.items()}


def _with_init_cache(rows: int, length: int, target: Any, pieces: Sequence[Piece], whole: Piece) -> list[object]:
    cache, results = target.init_cache(rows, length), []
    for args, kwargs in pieces:
        result = target(*args, **kwargs, cache=cache)
        results.append(first_array(result))
        cache = result[-1]
    return results


def _with_decode(shape: Sequence[int], target: Any, pieces: Sequence[Piece], whole: Piece) -> list[object]:
    target.init_cache(tuple(shape))
    return [first_array(target(*args, **kwargs, decode=True)) for args, kwargs in pieces]


def _causal_mask(length: int) -> Mapping[str, object]:
    return {**_mask_alone(length), "decode": False}


def _mask_alone(length: int) -> Mapping[str, object]:
    return {"mask": np.tril(np.ones((1, 1, length, length), bool))}


def _with_collection(target: Any, pieces: Sequence[Piece], whole: Piece) -> list[object]:
    """Decode by the collection `cache` of a Linen module, which a call on the whole sequence creates."""
    decoder = target.clone(parent=None, decode=True)
    state = decoder.apply(target.variables, *whole[0], **whole[1], mutable=["cache"])[1]
    results = []
    for args, kwargs in pieces:
        result, state = decoder.apply({**target.variables, **state}, *args, **kwargs, mutable=["cache"])
        results.append(first_array(result))
    return results


def _with_past(name: str, target: Any, pieces: Sequence[Piece], whole: Piece) -> list[object]:
    past, results = None, []
    for args, kwargs in pieces:
        result = target(*args, **{**kwargs, name: past, "use_cache": True})
        results.append(first_array(result))
        past = getattr(result, name, None)
        past = result[1] if past is None and isinstance(result, (tuple, list)) and len(result) > 1 else past
        if past is None:
            raise TypeError(f"the call returned no {name}")
    return results


def _with_carry(target: Any, pieces: Sequence[Piece], whole: Piece) -> list[object]:
    state: dict[str, object] = {}
    results = []
    for args, kwargs in pieces:
        carry, outputs = target(*args, **{**kwargs, **state, "return_carry": True})
        results.append(outputs)
        state = {"initial_carry": carry}
    return results


def _with_state(
    name: str, more: Mapping[str, object], target: Any, pieces: Sequence[Piece], whole: Piece
) -> list[object]:
    state: dict[str, object] = {}
    results = []
    for args, kwargs in pieces:
        result = target(*args, **{**kwargs, **more, **state})
        if not isinstance(result, (tuple, list)) or len(result) < 2 or result[-1] is None:
            raise TypeError(f"the call returned nothing for {name} behind its output")
        results.append(first_array(result))
        state = {name: result[-1]}
    return results
