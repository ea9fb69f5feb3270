"""Wrong reads of a port: weights in another order than stored, or other weights instead.

Each way of reading is a function of the config; it returns () if the config leaves nothing to confuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from einops import rearrange

from attn_bridge.specs import GroupedQueryAttentionConfig, RelativeBias, SparseIndexedAttentionConfig

Reads = Callable[[Any], "tuple[Read, ...]"]
"""Config -> the replacements of weights."""


@dataclasses.dataclass(frozen=True)
class Read:
    """The replacement of a tensor, or of the weight and the bias of a layer.

    Attributes:
        target: name of the vector or layer.
        source: name of the one that is read instead, a bias only where it has one.
        order: the source's index for each index; () keeps the order.
        axis: the axis that is put into this order, 0 or -1, counted in the torch layout; a bias only has the first.
        is_transposed: whether a square matrix is read with its axes exchanged.
    """

    target: str
    source: str
    order: tuple[int, ...] = ()
    axis: int = 0
    is_transposed: bool = False


def read(reads: tuple[Read, ...], tensors: Mapping[str, Any], *, transposed: bool) -> dict[str, Any]:
    """Return the tensors that replace others.

    Args:
        reads: the replacements.
        tensors: all tensors, of either framework, by their names there.
        transposed: whether the axes of layers' matrices are reversed, as in Flax; a bare matrix has the same axes in
            both frameworks.
    """
    replacements = {}
    for replacement in reads:
        for name in tensors:
            layer, _, last = name.rpartition(".")
            if replacement.target not in (name, layer):
                continue
            source = replacement.source if name == replacement.target else f"{replacement.source}.{last}"
            tensor = tensors.get(source, tensors[name])
            if replacement.order and not (replacement.axis and tensor.ndim == 1):
                turned = transposed and tensor.ndim > 1 and name != replacement.target
                tensor = tensor.T if turned else tensor
                order = np.array(replacement.order)
                tensor = tensor[order] if replacement.axis == 0 else tensor[..., order]
                tensor = tensor.T if turned else tensor
            replacements[name] = tensor.T if replacement.is_transposed else tensor
    return replacements


def _order(pattern: str, **sizes: int) -> tuple[int, ...]:
    """Return which held row each row that is needed is read from.

    On the left of the einops pattern stands how the wrong code takes the held rows to lie, on the right how the right
    code does.
    """
    left, right = pattern.split(" -> ")
    names = left.strip("()").split()
    total = int(np.prod([sizes[name] for name in names]))
    order = rearrange(np.arange(total), f"{left} -> {right}", **sizes)
    return tuple(int(one) for one in order)


def _is_as_held(order: tuple[int, ...]) -> bool:
    return order == tuple(range(len(order)))


def swapped(*pairs: tuple[str, str]) -> Reads:
    """Read vectors or layers in each other's place, where they are of one shape."""

    def reads(config: Any) -> tuple[Read, ...]:
        shapes = {parameter.rule.torch.removesuffix(".weight"): parameter.shape for parameter in config.parameters}
        same = [pair for pair in pairs if pair[0] in shapes and shapes[pair[0]] == shapes.get(pair[1])]
        return tuple(Read(*names) for one, two in same for names in ((one, two), (two, one)))

    return reads


def inside_out(layer: str, width: str, heads: str) -> Reads:
    """Read the rows of a layer as (channel head); the sizes are names of fields of the config."""

    def reads(config: Any) -> tuple[Read, ...]:
        if not any(parameter.rule.torch == f"{layer}.weight" for parameter in config.parameters):
            return ()
        order = _order("(c h) -> (h c)", c=getattr(config, width), h=getattr(config, heads))
        return () if _is_as_held(order) else (Read(layer, layer, order),)

    return reads


def indexer_inside_out(config: SparseIndexedAttentionConfig) -> tuple[Read, ...]:
    """Read the rows of an indexer's queries as (channel head)."""
    order = _order("(c h) -> (h c)", c=config.indexer.head_dim, h=config.indexer.num_heads)
    return (Read("indexer.W_index_query", "indexer.W_index_query", order),)


def groups_tiled(config: Any) -> tuple[Read, ...]:
    """Move every head of queries to the key/value head that it would get, with all that belongs to the head."""
    sizes = {"k": config.num_kv_heads, "g": config.num_heads // config.num_kv_heads}
    heads = _order("(g k) -> (k g)", **sizes)
    if _is_as_held(heads):
        return ()
    rows = _order("(g k c) -> (k g c)", c=config.head_dim, **sizes)
    norm = getattr(config, "qk_norm", None)
    moved = [Read(name, name, rows) for name in ("W_query", "W_gate")]
    moved += [Read("q_norm", "q_norm", rows)] if norm is not None and norm.scope == "full" else []
    moved += [Read("relative_bias", "relative_bias", heads, -1)]
    return *moved, Read("sinks", "sinks", heads), Read("out_proj", "out_proj", rows, -1)


def _rows_of_bias(order: Callable[[RelativeBias], Iterable[int]]) -> Reads:
    """Read the rows of the table of a relative bias in an order."""

    def reads(config: GroupedQueryAttentionConfig) -> tuple[Read, ...]:
        if not isinstance(config.position, RelativeBias):
            return ()
        return (Read("relative_bias", "relative_bias", tuple(order(config.position))),)

    return reads


def _later_by_one(position: RelativeBias) -> Iterable[int]:
    count = position.num_per_direction
    return (row - row % count + min(row % count + 1, count - 1) for row in range(position.num_buckets))


def _other_direction(position: RelativeBias) -> Iterable[int]:
    """Return the rows for distances with the opposite sign: past keys count as later ones, and the reverse."""
    if not position.bidirectional:
        return (0 for _ in range(position.num_buckets))
    half = position.num_per_direction
    return ((row + half) % (2 * half) if row % half else row for row in range(position.num_buckets))


buckets_off_by_one = _rows_of_bias(_later_by_one)
direction_swapped = _rows_of_bias(_other_direction)


def bias_transposed(config: GroupedQueryAttentionConfig) -> tuple[Read, ...]:
    """Read the table of a relative bias as (head, bucket), where it is square."""
    if not isinstance(config.position, RelativeBias) or config.position.num_buckets != config.num_heads:
        return ()
    return (Read("relative_bias", "relative_bias", is_transposed=True),)


def maps_interleaved(config: Any) -> tuple[Read, ...]:
    """Read the queries of the two maps of differential attention from neighbouring heads."""
    order = _order("(h n c) -> (n h c)", h=config.num_heads // 2, n=2, c=config.head_dim)
    return () if _is_as_held(order) else (Read("W_query", "W_query", order),)


def rope_first(config: Any) -> tuple[Read, ...]:
    """Take the rotary channels of a latent query to be the first of a head."""
    if config.position is None:
        return ()
    width = config.nope_dim + config.rope_dim
    head_channels = [*range(config.rope_dim, width), *range(config.rope_dim)]
    order = tuple(head * width + channel for head in range(config.num_heads) for channel in head_channels)
    return (Read("W_query", "W_query", order),)


def taps_reversed(config: Any) -> tuple[Read, ...]:
    """Read a short convolution backwards in time."""
    order = tuple(reversed(range(config.conv_size)))
    return (Read("conv1d", "conv1d", order, -1),) if len(order) > 1 else ()


def channels_value_first(config: Any) -> tuple[Read, ...]:
    """Take the channels of a delta net's convolution to lie as value, query, key."""
    return _channels_from(config.value_width, config)


def channels_value_last(config: Any) -> tuple[Read, ...]:
    """Take the channels of Mamba-2's convolution to lie as key, query, value."""
    return _channels_from(2 * config.key_width, config)


def _channels_from(start: int, config: Any) -> tuple[Read, ...]:
    """Read the channels of a convolution from `start` on, then those before it."""
    return (Read("conv1d", "conv1d", (*range(start, config.conv_width), *range(start))),)
