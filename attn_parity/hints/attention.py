"""Attention computed in NumPy as ports compute it, rightly and wrongly: the way that gives each side's numbers.

One side computes it plainly, under some scale and mask; the other as well, or with one step taken wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .case import FIT, LARGEST, Array, Case, divisors

SCORES = 1 << 20
"""Most scores of a sequence for which wrong steps are tried."""

LENGTHS = 64
"""Most positions for which every window is tried."""

TABLES = 1e-5
"""As `FIT`, where angles may have been computed in float32."""

BASES = (1e4, 5e5, 1e6, 1e5)
"""Of rotary positions, the commonest first."""

PARTS = (1, 2, 4)
"""One over how much of a head is turned by its position, from the first channel on."""

TURNED = {
    (1, 1, 0): "",
    (-1, -1, 0): ", turned the other way",
    (1, 0, 0): " of queries alone",
    (0, 1, 0): " of keys alone",
    (1, 1, 1): " of values as well",
}
"""Directions in which queries, keys and values are turned: 0 not at all, -1 the other way."""

APART = (1, -1)
"""How many positions ports count keys from another one than queries."""

SPLITS = {
    "": "",
    "apart": "heads split as (channel, head)",
    "rows": "heads split without their axis moved before the positions",
}
MERGES = {
    "": "",
    "apart": "merged as (channel, head)",
    "rows": "merged without their axis moved behind the positions",
}
SOFTMAXES = {
    "": "",
    "masked after": "masked after the softmax",
    "queries": "softmax over the queries",
    "heads": "softmax over the heads",
}


class AttentionStep(NamedTuple):
    """The deviations from standard attention in splitting, merging and softmax; "" for the standard step."""

    split: str = ""
    merge: str = ""
    softmax: str = ""
    in_turn: bool = False
    """Whether neighbouring heads of queries read different heads of keys."""

    @property
    def text(self) -> str:
        """The deviations as a suffix of a message."""
        turn = "heads of keys repeated as a whole, not each beside itself" if self.in_turn else ""
        deviations = [SPLITS[self.split], MERGES[self.merge], SOFTMAXES[self.softmax], turn]
        return "".join(f", {one}" for one in deviations if one)


STEPS = (
    *(AttentionStep(split, merge) for split, merge in (("apart", "apart"), ("apart", ""), ("", "apart"))),
    *(AttentionStep(split, merge) for split, merge in (("rows", "rows"), ("rows", ""), ("", "rows"))),
    *(AttentionStep(softmax=softmax) for softmax in SOFTMAXES if softmax),
    AttentionStep(in_turn=True),
)


class RotaryFormula(NamedTuple):
    """How queries and keys are turned by their positions (RoPE, arXiv 2104.09864)."""

    halves: bool
    base: float
    part: int = 1
    turns: tuple[int, int, int] = (1, 1, 0)
    apart: int = 0
    """How much later the position of a key is counted than that of a query."""

    @property
    def text(self) -> str:
        """The rotation as a suffix of a message."""
        part = f" of the first 1/{self.part} of each head" if self.part > 1 else ""
        apart = (
            f", keys {abs(self.apart)} {'later' if self.apart > 0 else 'earlier'} than queries" if self.apart else ""
        )
        return f", rotary {'halves' if self.halves else 'pairs'} of base {self.base:g}{part}{TURNED[self.turns]}{apart}"

    def turn(self, which: int, array: Array, places: Array) -> Array:
        """Return ``(..., T, width)`` turned, queries (0), keys (1) or values (2) at these positions."""
        size = array.shape[-1] // self.part
        cos, sin = _angles(self.base, size, int(places.max()) + 2)
        at = places + max(0, self.apart if which == 1 else -self.apart if which == 0 else 0)
        cos, sin = cos[at], self.turns[which] * sin[at]
        cos = cos if self.turns[which] else np.ones_like(cos)
        head, rest = array[..., :size], array[..., size:]
        x, y = (head[..., : size // 2], head[..., size // 2 :]) if self.halves else (head[..., ::2], head[..., 1::2])
        turned = [x * cos - y * sin, y * cos + x * sin]
        result = np.concatenate(turned, -1) if self.halves else np.stack(turned, -1).reshape(head.shape)
        return np.concatenate([result, rest], -1) if self.part > 1 else result


@functools.lru_cache(8)
def _angles(base: float, size: int, length: int) -> tuple[Array, Array]:
    """Return cosines and sines of the angles of some positions."""
    angles = np.arange(length)[:, None] * base ** (-np.arange(0, size, 2) / size)
    return np.cos(angles), np.sin(angles)


class AttentionFormula(NamedTuple):
    """One way to compute attention: the width of heads, scale, mask, and the roles of the given arrays."""

    operands: tuple[Array, ...]
    order: str
    width: int
    scale: float
    scaled: str
    kind: str
    mask: Array
    rotary: RotaryFormula | None = None

    @property
    def heads(self) -> str:
        """Return the number of heads, and the factor of their scores, for a message."""
        query, key = (one.shape[-3] if one.ndim == 4 else one.shape[-1] // self.width for one in self.operands[:2])
        return (
            f"attention of {query} heads{f', {key} of keys,' if key != query else ''} with scores times {self.scaled}"
        )

    @property
    def text(self) -> str:
        """Return the description of this attention for a message."""
        return f"{self.kind}{self.heads}{self.order}{self.rotary.text if self.rotary else ''}"

    def parts(self, way: str = "") -> tuple[Array, Array, Array]:
        """Return queries, keys and values by heads."""
        query, key, value = (_split(one, self.width, way) for one in self.operands)
        if self.rotary:
            query, key, value = (self._turned(i, one) for i, one in enumerate((query, key, value)))
        return query, key, value

    def _turned(self, which: int, array: Array, places: Array | None = None) -> Array:
        if self.rotary is None or not self.rotary.turns[which]:
            return array
        return self.rotary.turn(which, array, np.arange(array.shape[-2]) if places is None else places)

    def fits(self, made: Array, side: Array, scale: float) -> bool:
        """Return whether numbers are a side's; tables of a rotary position are float32 in most models."""
        close = TABLES if self.rotary else FIT
        return bool(float(np.abs(made - side).max()) <= close * scale)

    def of(self, few: Array) -> Array:
        """Return the outputs of some of the queries."""
        query, key, value = self.parts()
        products = query[..., few, :] @ _repeated(key, query).swapaxes(-1, -2)
        return _merge(_softmax(products * self.scale + self.mask[few]) @ _repeated(value, query), self.operands[0].ndim)

    def glance(self, few: Array) -> Array:
        """Return the output of the first head for some of the queries, at a fraction of the cost of all."""
        query, key, value = (one[..., :1, :, :] if one.ndim == 4 else one[..., : self.width] for one in self.operands)
        query = self._turned(0, query[..., few, :], few)
        key, value = self._turned(1, key), self._turned(2, value)
        return np.asarray(_softmax(query @ key.swapaxes(-1, -2) * self.scale + self.mask[few]) @ value)

    def first_head(self, side: Array) -> Array:
        """Return the part of a side's output that `glance` computes."""
        return side[..., :1, :, :] if side.ndim == 4 else side[..., : self.width]


def attention(case: Case) -> str:
    """Recognise attention that is scaled by another width, masked another way, or split wrongly into heads."""
    if case.is_gradient or not 2 < case.first.ndim < 5 or case.first[:1].size > LARGEST:
        return ""
    inputs = [one[:1] for one in case.inputs if one.ndim]
    sample = dataclasses.replace(case, first=case.first[:1], second=case.second[:1], inputs=inputs)
    few = np.unique(np.linspace(0, case.first.shape[-2] - 1, 8).astype(int))  # with the first and the last query
    sides = [one[..., few, :] for one in (sample.first, sample.second)]
    if not dataclasses.replace(sample, first=sides[0], second=sides[1]).differs:
        return ""
    plains: list[AttentionFormula | None] = [None, None]
    scales = [float(np.abs(one).max()) for one in sides]
    middle = len(few) // 2
    far = float(np.abs(sides[0] - sides[1]).max()) > 100 * TABLES * sample.scale
    for way in itertools.chain(_plain_ways(sample), _rotary_ways(sample) if far else ()):
        made = way.glance(few[middle : middle + 1])
        seen = (way.first_head(one[..., middle : middle + 1, :]) for one in sides)
        fits = [way.fits(made, one, scale) for one, scale in zip(seen, scales, strict=True)]
        if not any(fit and one is None for fit, one in zip(fits, plains, strict=True)):
            continue
        made = way.of(few)
        plains = [
            one or (way if fit and way.fits(made, side, scale) else None)
            for one, fit, side, scale in zip(plains, fits, sides, scales, strict=True)
        ]
        if all(plains):
            break
    texts = [one.text if one else "" for one in plains]
    # A port is wrong where the other side is right: what nobody computes plainly is not looked for.
    plain = next((one for one in plains if one), None)
    if plain and not all(plains):
        wrong = texts.index("")
        ways = _wrong_ways(sample, plain, few)
        texts[wrong] = next((text for text, made in ways if plain.fits(made, sides[wrong], scales[wrong])), "")
    first, second = case.labels
    return f"{first} computes {texts[0]}, {second} {texts[1]}" if all(texts) and texts[0] != texts[1] else ""


def _given(case: Case) -> list[Array]:
    """Return queries, keys and values, in the order that they were computed in; [] where they are not known."""
    shape = case.first.shape
    alike = [given for given in case.inputs if given.shape == shape][-3:]
    if len(alike) == 3:
        return alike
    fused = [given for given in case.inputs if given.shape == (*shape[:-1], 3 * shape[-1])]
    if fused:
        return np.split(fused[-1], 3, axis=-1)
    several = [given for given in case.inputs if given.ndim == len(shape) and given.shape[:-2] == shape[:-2]][-3:]
    is_grouped = len(several) == 3 and several[0].shape == shape and several[1].shape == several[2].shape
    return several if is_grouped else []


def _plain_ways(case: Case) -> Iterator[AttentionFormula]:
    """Yield attention as it is, then with two of query, key and value exchanged."""
    operands = _given(case)
    if not operands or not all(one.size for one in operands):
        return
    words, orders = ("queries", "keys", "values"), [((0, 1, 2), "")]
    if len({one.shape for one in operands}) == 1:
        orders += [
            (order, f" and {words[one]} and {words[two]} exchanged")
            for one, two, order in ((0, 1, (1, 0, 2)), (0, 2, (2, 1, 0)), (1, 2, (0, 2, 1)))
        ]
    size, masks = case.first.shape[-1], _masks(operands[0].shape[-2], operands[1].shape[-2])
    counts = [size // count for count in case.counts if count and size % count == 0]
    widths = [size] if case.first.ndim == 4 else dict.fromkeys((*counts, *divisors(size)))
    for (order, text), width in itertools.product(orders, widths):
        if operands[1].shape[-1] % width or operands[0].shape[-1] // width % (operands[1].shape[-1] // width):
            continue
        ordered = tuple(operands[i] for i in order)
        for (kind, mask), (scaled, scale) in itertools.product(masks.items(), _scales(case, width).items()):
            yield AttentionFormula(ordered, text, width, scale, scaled, kind, mask)


def _rotary_ways(case: Case) -> Iterator[AttentionFormula]:
    """Yield attention with rotary positions, scaled as it mostly is."""
    for plain in _plain_ways(case):
        if not plain.order and plain.scale == plain.width**-0.5 and plain.width % 2 == 0:
            for part, base, halves in itertools.product(PARTS, BASES, (True, False)):
                if plain.width % (2 * part) == 0:
                    yield plain._replace(rotary=RotaryFormula(halves, base, part))


def _wrong_ways(case: Case, plain: AttentionFormula, few: Array) -> Iterator[tuple[str, Array]]:
    """Yield attention with one step taken wrongly."""
    axes = plain.operands[0].ndim
    query, key, value = plain.parts()
    if query.size // query.shape[-1] * key.shape[-2] > SCORES:
        return
    for other in _otherwise_turned(case, plain):
        yield other.text, other.of(few)
    for step in STEPS:
        if not _applies(step, query, key, axes):
            continue
        query_heads, key_heads, value_heads = plain.parts(step.split)
        products = query_heads @ _repeated(key_heads, query_heads, step.in_turn).swapaxes(-1, -2) * plain.scale
        context = _weights(products, plain.mask, step.softmax) @ _repeated(value_heads, query_heads, step.in_turn)
        yield plain.text + step.text, _merge(context, axes, step.merge)[..., few, :]
    products = query[..., few, :] @ _repeated(key, query).swapaxes(-1, -2) * plain.scale
    rotary = plain.rotary.text if plain.rotary else ""
    for kind, mask in _other_masks(query.shape[-2], key.shape[-2]):
        context = _softmax(products + mask[few]) @ _repeated(value, query)
        yield f"{plain.heads}, {kind}{plain.order}{rotary}", _merge(context, axes)
    if query.shape == key.shape and query.shape[-3] > 1:
        query_heads, key_heads, value_heads = (each.swapaxes(-2, -3) for each in (query, key, value))
        context = _softmax(query_heads @ key_heads.swapaxes(-1, -2) * plain.scale) @ value_heads
        text = f"{plain.heads}, between the heads of a position instead of between positions"
        yield text, _merge(context.swapaxes(-2, -3), axes)[..., few, :]


def _otherwise_turned(case: Case, plain: AttentionFormula) -> Iterator[AttentionFormula]:
    """Yield attention with rotary positions whose scale or turns are other ones."""
    if not plain.rotary:
        return
    for scaled, scale in _scales(case, plain.width).items():
        if scale != plain.scale:
            yield plain._replace(scale=scale, scaled=scaled)
    for turns in TURNED:
        if turns != plain.rotary.turns:
            yield plain._replace(rotary=plain.rotary._replace(turns=turns))
    for apart in APART:
        yield plain._replace(rotary=plain.rotary._replace(apart=apart))


def _applies(step: AttentionStep, query: Array, key: Array, axes: int) -> bool:
    """Return whether a step differs from the plain one."""
    if step.in_turn:
        return bool(1 < key.shape[-3] < query.shape[-3])
    if step.split or step.merge:
        return axes == 3 and query.shape[-3] > 1
    return step.softmax != "heads" or query.shape[-3] > 1


def _split(array: Array, width: int, way: str = "") -> Array:
    """Split ``(1, T, C)`` into heads, ``(1, heads, T, width)``; return an array that has an axis of heads unchanged.

    Args:
        array: the array.
        width: channels per head.
        way: "" splits channels into contiguous heads, ``apart`` into strided ones, ``rows`` reshapes without
            transposing.
    """
    if array.ndim == 4:
        return array
    *before, length, size = array.shape
    heads = size // width
    if way == "rows":
        return array.reshape(*before, heads, length, width)
    if way == "apart":
        return np.moveaxis(array.reshape(*before, length, width, heads), -1, -3)
    return np.moveaxis(array.reshape(*before, length, heads, width), -2, -3)


def _merge(context: Array, axes: int, way: str = "") -> Array:
    """Return heads side by side, as `_split` took them apart."""
    if axes == 4:
        return context
    *before, heads, length, width = context.shape
    if way == "rows":
        return context.reshape(*before, length, heads * width)
    order = (-2, -1, -3) if way == "apart" else (-2, -3, -1)
    axes_before = range(len(before))
    moved = context.transpose(*axes_before, *(context.ndim + one for one in order))
    return moved.reshape(*before, length, heads * width)


def _repeated(array: Array, query: Array, in_turn: bool = False) -> Array:
    """Return heads of keys or values, as many as there are of queries."""
    times = query.shape[-3] // array.shape[-3]
    return np.concatenate([array] * times, axis=-3) if in_turn else np.repeat(array, times, axis=-3)


def _masks(queries: int, keys: int) -> dict[str, Array]:
    ends, places = np.arange(queries)[:, None], np.arange(keys)
    masks = {"": np.zeros((queries, keys)), "causal ": _hidden(places > ends)}
    if queries < keys:
        masks["causal (of the last queries) "] = _hidden(places > ends + keys - queries)
    return masks


def _other_masks(queries: int, keys: int) -> Iterator[tuple[str, Array]]:
    """Yield masks that ports take for the causal one, and windows."""
    if queries != keys:
        return
    back = np.arange(queries)[:, None] - np.arange(keys)
    yield "each position seeing those before it and not itself", _hidden(back < 1)
    itself = (back == 0) & (np.arange(keys) == 0)
    yield "each position seeing those before it and not itself, but for the first", _hidden((back < 1) & ~itself)
    yield "each position seeing the next one, too", _hidden(back < -1)
    yield "each position seeing itself and those after it", _hidden(back > 0)
    for window in range(1, queries if queries <= LENGTHS else 1):
        yield f"causal in a window of {window}", _hidden((back < 0) | (back >= window))
        yield f"in a window of {window} to both sides", _hidden(np.abs(back) >= window)


def _hidden(hides: Array) -> Array:
    return np.where(hides, -np.inf, 0.0)


def _scales(case: Case, width: int) -> dict[str, float]:
    widths = dict.fromkeys((width, case.first.shape[-1], *case.counts))
    return {f"1/sqrt({one})": one**-0.5 for one in widths} | {"1": 1.0} | {f"1/{one}": 1 / one for one in widths}


def _weights(products: Array, mask: Array, way: str) -> Array:
    if way == "masked after":
        weights: Array = _softmax(products) * np.isfinite(mask)
        return weights
    return _softmax(products + mask, {"queries": -2, "heads": -3}.get(way, -1))


def _softmax(scores: Array, axis: int = -1) -> Array:
    """Return the softmax of scores; rows without visible keys get zeros."""
    top = scores.max(axis=axis, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    return np.asarray(weights / np.maximum(weights.sum(axis=axis, keepdims=True), np.finfo(np.float64).tiny))
