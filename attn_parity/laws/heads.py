"""Heads: attention whose heads are permuted, with the weights that belong to them, gives the same outputs.

A wrong split into heads (a reshape without a transpose) breaks it. Modules order the channels of heads in several ways:
the law holds if one of them keeps the outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..sides.subject import Array, Arrays
from .layout import Axes, orders
from .side import Gap, LawResult, NotTriedError, OneSide

QUERY = ("q_proj", "query", "w_query", "wq", "to_q", "q", "q_lin", "query_proj", "c_q")
KEY = ("k_proj", "key", "w_key", "wk", "to_k", "k", "k_lin", "key_proj", "c_k")
VALUE = ("v_proj", "value", "w_value", "wv", "to_v", "v", "v_lin", "value_proj", "c_v")
OUTPUT = ("out_proj", "o_proj", "out", "wo", "to_out", "o", "out_lin", "output_proj", "c_proj", "to_out.0")
"""Names of projections, in lower case."""

FUSED = ("in_proj_weight", "in_proj_bias")
"""torch's query, key and value in one array, one below the other."""

JOINED = ("qkv", "c_attn", "wqkv", "qkv_proj", "in_proj", "query_key_value", "to_qkv", "attn_qkv")
"""Names of projections to query, key and value at once, in lower case."""

PER_HEAD = ("alibi", "relative", "sink", "slope", "lambda")
"""Words of weights and positions that a head has for itself."""

STOCK = ("torch", "flax", "torch_attn", "jax_attn")
"""Packages whose modules show in their classes, weights and configs how heads differ; of others the code is read."""

MOST_MODULES = 4
"""Most attention modules of a model that are tried."""


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Weights of one attention by role.

    Attributes:
        path: path of the module.
        heads: number of query heads.
        groups: number of key/value heads.
        query: names of the weights of queries.
        key_value: names of the weights of keys and values.
        output: name of the matrix that reads the heads.
        fused: names of arrays with query, key and value in one.
        first: names of matrices whose first axis are their outputs, as torch's are.
    """

    path: str
    heads: int
    groups: int
    query: tuple[str, ...]
    key_value: tuple[str, ...]
    output: str
    fused: tuple[str, ...]
    first: frozenset[str]


def head_permutation(side: OneSide, layout: Axes) -> LawResult:
    """Permute the heads of each attention with their weights, and compare the outputs."""
    del layout
    if any(word in text for word in PER_HEAD for text in _texts(side)):
        raise NotTriedError("heads differ by more than their weights: by their positions, sinks or factors")
    results = list(_attentions(side))[:MOST_MODULES]
    if not results:
        raise NotTriedError("no attention tells its heads (num_heads, and projections of query, key, value and output)")
    worst, where = Gap(0.0, "", (), 0.0, 0.0), ""
    for attention in results:
        gap = _gap(side, attention)
        if gap.size > worst.size or not where:
            worst, where = gap, attention.path or side.name
    if worst.size > side.limit:
        why = f"the heads of {where} are not independent: channels are split or joined in another way"
        return LawResult(worst, why, f"with the heads of {where} in another order")
    return LawResult(worst, f"heads of {len(results)} attention{'s' * (len(results) > 1)} in another order")


def _gap(side: OneSide, attention: _Attention) -> Gap:
    """Return how far the outputs are with the heads in other orders, for the order of channels that fits best.

    Raises:
        NotTriedError: the weights have other shapes than the heads.
    """

    def moved(changed: Arrays) -> Gap:
        # Further outputs, such as weights and caches, may have an axis of heads.
        outputs = side.outputs(side.call, weights={**side.weights, **changed})
        return side.gap(side.base[:1], outputs[:1], side.structure[:1])

    by_order = [_permuted(side.weights, attention, order) for order in orders(attention.groups)]
    gaps = [max(map(moved, changes), key=lambda gap: gap.size) for changes in zip(*by_order, strict=True)]
    if not gaps:
        raise NotTriedError(f"the weights of {attention.path or side.name} have other shapes than their heads say")
    return min(gaps, key=lambda gap: gap.size)


def _texts(side: OneSide) -> Iterator[str]:
    """Yield names of weights, state and classes, and the words of the code, in lower case."""
    for name in (*side.weights, *side.subject.state()):
        yield name.lower()
    for child in side.parts.values():
        yield type(child).__name__.lower()
        yield type(getattr(getattr(child, "config", None), "position", None)).__name__.lower()
        if type(child).__module__.partition(".")[0] not in STOCK:
            code = getattr(getattr(type(child), "forward", None) or type(child).__call__, "__code__", None)
            yield from (word.lower() for word in (*code.co_names, *code.co_varnames)) if code is not None else ()


def _attentions(side: OneSide) -> Iterator[_Attention]:
    """Yield the attention modules that name their number of heads."""
    parameters, settings = side.subject.parameters(), side.subject.settings()
    first = frozenset(name for name, one in parameters.items() if one.framework == "torch" and one.owner != "Conv1D")
    for path, child in side.parts.items():
        config = getattr(child, "config", None)
        heads = settings.get(path, {}).get("num_heads") or _number(config, "num_heads", "num_attention_heads")
        groups = settings.get(path, {}).get("num_kv_heads")
        groups = groups or _number(config, "num_kv_heads", "num_key_value_heads") or heads
        if isinstance(heads, int) and isinstance(groups, int) and groups > 1 and not heads % groups:
            inside = f"{path}." if path else ""
            own = {name.removeprefix(inside): name for name in side.weights if name.startswith(inside)}
            attention = _attention(path, heads, groups, own, first, side.weights)
            if attention is not None:
                yield attention


def _number(config: object, *names: str) -> object:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _attention(
    path: str, heads: int, groups: int, own: Mapping[str, str], first: frozenset[str], weights: Arrays
) -> _Attention | None:
    def named(words: Sequence[str]) -> dict[str, str]:
        results = {}
        for name, whole in own.items():
            parent, _, last = name.rpartition(".")
            if parent.lower() in words and last in ("weight", "kernel", "bias"):
                results[last] = whole
        return results

    output = named(OUTPUT)
    matrix = output.get("weight", output.get("kernel"))
    if matrix is None:
        return None
    query, key, value = named(QUERY), named(KEY), named(VALUE)
    fused = tuple(own[name] for name in FUSED if name in own) or tuple(named(JOINED).values())
    paired = {*query.values(), *key.values(), *value.values(), *fused, *output.values()}
    # A norm as wide as a head is shared by all heads; anything else may belong to some of them.
    width = weights[matrix].shape[1 if matrix in first else 0] // heads
    rest = {name: weights[whole].shape for name, whole in own.items() if whole not in paired}
    if any("norm" not in name.lower() or shape != (width,) for name, shape in rest.items()):
        return None
    if not (fused and heads == groups) and not (query and key and value):
        return None
    key_value = (*key.values(), *value.values())
    return _Attention(path, heads, groups, tuple(query.values()), key_value, matrix, fused, first)


def _permuted(weights: Arrays, attention: _Attention, order: Array) -> Iterator[dict[str, object]]:
    """Yield the weights with key/value heads in an order, for each way in which the channels of heads may follow."""
    size = attention.heads // attention.groups
    query_order = (order[:, None] * size + np.arange(size)).reshape(-1)
    width = weights[attention.output].shape[1 if attention.output in attention.first else 0] // attention.heads
    ways = [(True, False), *([(True, True)] if attention.fused else [])]
    # Where the width is a multiple, every h-th channel in another order permutes the channels inside of each head,
    # which changes nothing whatever the heads are; and heads of every h-th channel then pass as blocks do.
    ways += [(False, False)] if width % attention.heads and size == 1 else []
    for is_block, is_joint in ways:
        changed: dict[str, object] = {}
        try:
            for names, some in ((attention.query, query_order), (attention.key_value, order)):
                for name in names:
                    changed[name] = _turned(weights[name], some, is_block, name in attention.first or _is_bias(name))
            for name in attention.fused:
                is_first = name in attention.first or _is_bias(name)
                parts = [weights[name]] if is_joint else np.split(weights[name], 3, 0 if is_first else -1)
                turned = [_turned(part, order, is_block, is_first) for part in parts]
                changed[name] = np.concatenate(turned, 0 if is_first else -1)
            changed[attention.output] = _turned(
                weights[attention.output], query_order, is_block, attention.output not in attention.first
            )
        except ValueError:
            continue
        yield changed


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2].endswith("bias")


def _turned(array: Array, order: Array, is_block: bool, is_first: bool) -> Array:
    """Return an array with its heads in another order.

    Args:
        array: a weight, ``(h c, d)`` or ``(d, h c)``, or with separate axes of heads and channels.
        order: the order of the heads.
        is_block: whether a head is a block of channels.
        is_first: whether the channels of the heads are the first axis.

    Raises:
        ValueError: the axis is no multiple of the number of heads.
    """
    heads = len(order)
    is_bias_of_heads = array.ndim == 2 and is_first and array.shape[0] == heads
    if array.ndim == 3 or is_bias_of_heads:
        axis = next((axis for axis in ((0, 1) if is_first else (1, 0)) if array.shape[axis] == heads), None)
        if axis is None:
            raise ValueError("no axis of heads")
        return np.take(array, order, axis)
    axis = 0 if is_first else array.ndim - 1
    moved = np.moveaxis(array, axis, 0)
    if moved.shape[0] % heads:
        raise ValueError("the axis is no multiple of the heads")
    shape = (heads, -1) if is_block else (-1, heads)
    split = moved.reshape(*shape, *moved.shape[1:])
    return np.moveaxis(np.take(split, order, 0 if is_block else 1).reshape(moved.shape), 0, axis)
