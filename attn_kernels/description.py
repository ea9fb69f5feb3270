"""Describes a call to a kernel in words, from sizes and options alone, for any framework."""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Mapping

import numpy as np

from attn_bridge.masks import Mask, goes_forward

from . import words

Shape = tuple[int, ...]


def intervals(mask: Mask | None, queries: int) -> np.ndarray | None:
    """Return the first visible key of each query, and the end of them, ``(2, T)``; None if they are not intervals.

    Neither may decrease from a query to the next. Without a mask, the array has no queries.
    """
    if mask is None:
        return np.zeros((2, 0), np.int64)
    return _known_intervals(mask, queries) if goes_forward(mask) else _intervals(mask, queries)


def _intervals(mask: Mask, queries: int) -> np.ndarray | None:
    interval = mask.interval(np.arange(queries))
    return None if interval is None or (np.diff(interval) < 0).any() else np.stack(interval)


_known_intervals = functools.lru_cache(maxsize=16)(_intervals)
"""Cache for masks that are equal by value; a layer requests the same ones repeatedly."""


def describe(
    dtype: str,
    query: Shape,
    key: Shape,
    value: Shape,
    others: Mapping[str, Shape],
    *,
    scale: float,
    softcap: float | None,
    dropout: float,
    batch: int,
    bounded: bool,
    differentiates_bias: bool,
    strides: tuple[Shape, Shape] | None = None,
) -> list[int]:
    """Return the words of a call up to `words.SHAPE_END`.

    Args:
        dtype: of query, key and value, one of `words.KINDS`.
        query: the shape ``(..., T, H, D)``, all before the last three counted as sequences.
        key: ``(..., S, K, D)``.
        value: ``(..., S, K, Dv)``.
        others: shapes of optional arguments, by the names of `words.OPTIONAL`. A mask and a bias are ``(..., H, T,
            S)``, each axis whole or 1; each may apply to several neighbouring sequences.
        scale: factor of the scores.
        softcap: scores are capped at this, None for no cap.
        dropout: rate at which weights are dropped.
        batch: sequences whose weights are drawn from one seed.
        bounded: whether each query sees an interval of keys.
        differentiates_bias: whether the gradient of the bias is requested.
        strides: of keys and of values, distances in numbers along sequences, positions and heads; None for arrays
            without gaps. Only the kernel for few queries supports others.
    """
    sequences = math.prod(query[:-3])
    shape_words = [0] * words.SHAPE_END
    shape_words[words.KIND] = words.KINDS[dtype]
    shape_words[words.QUERIES], shape_words[words.HEADS], shape_words[words.DEPTH] = query[-3:]
    shape_words[words.KEYS], shape_words[words.KEY_HEADS], shape_words[words.VALUE_DEPTH] = value[-3:]
    shape_words[words.SCALE] = bits(scale)
    shape_words[words.BATCH], shape_words[words.SPAN], shape_words[words.BOUNDED] = batch, 1, int(bounded)
    of_keys, of_values = strides or (_gapless(key), _gapless(value))
    shape_words[words.KEY_SEQUENCE : words.KEY_HEAD + 1] = of_keys
    shape_words[words.VALUE_SEQUENCE : words.VALUE_HEAD + 1] = of_values
    for name in others:
        shape_words[words.OPTIONAL[name][0]] = 1
    if softcap is not None:
        shape_words[words.CAPPED], shape_words[words.SOFTCAP] = 1, bits(softcap)
    for name, word in (("query_ids", words.QUERY_IDS_SPAN), ("key_ids", words.KEY_IDS_SPAN)):
        if name in others:
            shape_words[word] = _spread(others[name], sequences)[0]
    for name, first, last in (
        ("mask", words.MASK_SPAN, words.MASK_KEY),
        ("bias", words.BIAS_SPAN, words.BIAS_KEY),
    ):
        if name in others:
            shape_words[first : last + 1] = _spread(others[name], sequences)
    if "bias" in others and differentiates_bias:
        shape_words[words.D_BIASED] = 1
        # Tasks write without locks, so that one task takes all sequences that add to one gradient; where queries share
        # a row of the bias, each sequence has a gradient of its own, which the caller sums.
        shape_words[words.SPAN] = shape_words[words.BIAS_SPAN] if shape_words[words.BIAS_QUERY] else 1
    if dropout:
        # `jax.random.bernoulli` keeps where 23 bits, as a fraction, are below float32(1 - dropout): as whole numbers,
        # below its ceiling.
        below = math.ceil(float(np.float32(1.0 - dropout)) * 2**23)
        shape_words[words.DROPPED], shape_words[words.KEPT], shape_words[words.FACTOR] = (
            1,
            below,
            bits(1.0 / (1.0 - dropout)),
        )
    return shape_words


def describe_product(dtype: str, rows: int, depth: int, columns: int) -> list[int]:
    """Return the words of the product of `rows` rows and a matrix ``(depth, columns)`` up to `words.SHAPE_END`."""
    shape_words = [0] * words.SHAPE_END
    shape_words[words.KIND], shape_words[words.QUERIES] = words.KINDS[dtype], rows
    shape_words[words.DEPTH], shape_words[words.VALUE_DEPTH] = depth, columns
    return shape_words


def bits(number: float) -> int:
    """Return the bits of a float64 as a word."""
    return int.from_bytes(struct.pack("=d", number), sys.byteorder, signed=True)


def _gapless(shape: Shape) -> Shape:
    """Return the strides along sequences, positions and heads of an array without gaps."""
    positions, heads, width = shape[-3:]
    return positions * heads * width, heads * width, width


def _spread(shape: Shape, sequences: int) -> Shape:
    """Return how many sequences share a part of an array, and its strides along the last four axes."""
    *before, heads, queries, keys = shape
    apart = [
        heads * queries * keys,
        *(rest if size > 1 else 0 for size, rest in ((heads, queries * keys), (queries, keys), (keys, 1))),
    ]
    return (sequences // math.prod(before), *apart)
