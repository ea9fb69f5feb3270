"""The matrix products of attention in bfloat16 by the processor's own instructions, for `forward` and `backward`.

The twin is `plain`. All sums are float32. Queries, keys, values and the gradient of the context are used as given.
Weights and the gradients of scores are rounded, those for the gradient of queries to twice the digits: components
common to all keys cancel there, but rounding errors would not. Context and the gradient of queries have the channels in
rows. Blocks are computed whole, regardless of masks.
"""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler import processor
from ..compiler.language import Array, Code, Value
from ..vectors.memory import copy, fill, write_row
from ..vectors.packing import pair_rows, read_shorts, round_to_pairs, round_to_pairs_twice
from ..vectors.pairs import CHANNELS, EDGE, product, up_to_edge
from .blocks import KEYS, numbers_of, seen_by, sizes_of
from .softmax import QUERIES, multiply_lanes
from .tiles import transpose, transpose_back, transpose_shorts


def instructions(kernel: Any, kind: int | None) -> str | None:
    """Return the instructions by which a kernel multiplies arrays of a kind in pairs, None if it widens them."""
    return processor.pairs() if kernel.PAIRS and kind == words.KINDS["bfloat16"] else None


class _Sizes:
    """Sizes of a call, filled up to whole tiles."""

    def __init__(self, job: Array):
        self.given = sizes_of(job)
        self.keys, edge = up_to_edge(self.given.keys), CHANNELS[job.code.module.pairs]
        self.width, self.value_width = (up_to_edge(one, edge) for one in (self.given.depth, self.given.value_depth))
        # An odd number of lines of the cache: rows whose distance is a power of two would drive each other out of it.
        self.line = self.keys + (1 - self.keys // EDGE % 2) * EDGE


def _seen(job: Array) -> tuple[Value, Value]:
    """Return the first key that any query sees, and the end (exclusive); no other keys are read."""
    low, high = seen_by(job, job.code.value(0))[0], seen_by(job, job[words.QUERIES] - 1)[1]
    return low, job.code.largest(low, high)


def _read_keys(job: Array, sizes: _Sizes, index: Value, keys: Array | None, values: Array | None) -> None:
    """Read keys or values of a key head, the `index`th of all positions and heads, as rows."""
    code, (low, high), shape = job.code, _seen(job), sizes.given
    for word, channels, target, line in (
        (words.KEY, shape.depth, keys, sizes.width),
        (words.VALUE, shape.value_depth, values, sizes.value_width),
    ):
        if target is not None:
            stride = channels * shape.key_heads
            source = job[word] + 2 * (channels * index + low * stride)
            read_shorts(code, source, stride, high - low, channels, target, line, low, sizes.keys)


def _read_queries(
    job: Array, word: int, channels: Value, index: Value, count: Value, rows: Array, width: Value
) -> None:
    """Read a block of queries, or an array of the same size, as rows."""
    heads = job[words.HEADS]
    source = job[word] + 2 * channels * index
    read_shorts(job.code, source, channels * heads, count, channels, rows, width, job.code.value(0), QUERIES)


def _multiply(code: Code, keys: Array, width: Value, queries: Array, out: object, *where: Value) -> None:
    """Compute the products of rows of keys, or of values, and columns of pairs, as many as fill tiles."""
    _, count, start, n_keys = where
    left, rows, columns = keys.address + 2 * start * width, up_to_edge(n_keys), up_to_edge(count)
    product(code, left, width, queries, QUERIES, out, QUERIES, rows, columns, width, adds=False)


def _add_over_keys(code: Code, keys: Array, sizes: _Sizes, width: Value, pairs: Array, out: Array, *where: Any) -> None:
    """Add to columns of queries the columns of keys, or of values, by their weights in pairs."""
    _, count, start, n_keys = where
    left, columns, depth = keys.address + 2 * start, up_to_edge(count), up_to_edge(n_keys)
    product(code, left, sizes.line, pairs, QUERIES, out, QUERIES, width, columns, depth, adds=True)


def _clear_beyond(code: Code, block: Value, n_keys: Value) -> None:
    """Make the rows beyond `n_keys` of a block of scores that fill the last tile up 0."""
    fill(code, block + 4 * QUERIES * n_keys, QUERIES * (up_to_edge(n_keys) - n_keys), 0.0)


class PairedForward:
    """Scores and context of the queries of a head, a block of them at a time."""

    step = EDGE

    @staticmethod
    def counts(job: Array) -> list[Any]:
        """Return the sizes of its workspace arrays in words of 32 bits."""
        sizes = _Sizes(job)
        width, value_width = sizes.width // 2, sizes.value_width // 2
        return [
            sizes.keys * width,
            sizes.line * value_width,
            EDGE * value_width,
            QUERIES * width,
            QUERIES * width,
            KEYS // 2 * QUERIES,
            sizes.value_width * QUERIES,
            sizes.value_width * QUERIES,
        ]

    def __init__(self, job: Array, arrays: list[Array]):
        self.job, self.sizes, self.numbers = job, _Sizes(job), numbers_of(job)
        self.keys, self.values, self.some_values, self.rows, self.queries, self.pairs, *others = arrays
        self.context, self.of_queries = others

    def read_keys(self, index: Value) -> None:
        """Read keys as rows and values as columns."""
        job, code, sizes = self.job, self.job.code, self.sizes
        _read_keys(job, sizes, index, self.keys, None)
        depth, (low, high) = sizes.given.value_depth, _seen(job)
        stride = depth * sizes.given.key_heads
        with code.loop(0, sizes.keys, EDGE) as start:
            first = code.least(code.largest(low - start, 0), EDGE)
            rows = code.largest(code.least(high - start, EDGE) - first, 0)
            source = job[words.VALUE] + 2 * (depth * index + (start + first) * stride)
            read_shorts(code, source, stride, rows, depth, self.some_values, sizes.value_width, first, EDGE)
            to = self.values.address + 2 * start
            transpose_shorts(code, self.some_values, sizes.value_width, EDGE, sizes.value_width, to, sizes.line)

    def read_queries(self, index: Value, count: Value) -> None:
        """Read a block of queries as columns of pairs."""
        code, width = self.job.code, self.sizes.width
        _read_queries(self.job, words.QUERY, self.sizes.given.depth, index, count, self.rows, width)
        transpose(code, self.rows, width // 2, width // 2, self.queries)
        fill(code, self.context, self.context.count, 0.0)

    def multiply(self, out: Array, *where: Value) -> None:
        """Compute the scores of `n_keys` keys from `start` on and a block of queries."""
        _multiply(self.job.code, self.keys, self.sizes.width, self.queries, out, *where)
        # Scaling the queries instead would round them to bfloat16 again, unless the scale is a power of two.
        copy(self.job.code, out, where[3] * QUERIES, self.numbers.scale, out, to="float32")

    def add(self, weights: Array, shrink: Array, *where: Value) -> None:
        """Add the values of some keys to the context of the queries, after that was shrunk."""
        code, sizes, (_, count, _, n_keys) = self.job.code, self.sizes, where
        multiply_lanes(code, shrink, self.context, sizes.value_width, count)
        # The product runs over whole tiles: rows beyond `n_keys` would add the scores that are left there.
        _clear_beyond(code, weights.address, n_keys)
        round_to_pairs(code, weights, up_to_edge(n_keys), QUERIES, self.pairs)
        _add_over_keys(code, self.values, sizes, sizes.value_width, self.pairs, self.context, *where)

    def finish(self) -> None:
        """Make the context of each query a row."""
        transpose_back(self.job.code, self.context, self.sizes.value_width, self.of_queries)

    def write(self, i: Value, share: Value, index: Value) -> None:
        """Write the context of the `i`th query of the block times a factor, as the `index`th of all."""
        depth, (kind, size, _) = self.sizes.given.value_depth, self.numbers
        row, to = self.of_queries.at(i * self.sizes.value_width), self.job[words.CONTEXT] + size * depth * index
        write_row(self.job.code, row, depth, share, to, kind, depth * self.sizes.given.heads)


class PairedBackward:
    """Scores of the queries that read a key head, and the gradients of both, a block of queries at a time."""

    step = EDGE

    @staticmethod
    def rows(keys: Value) -> Value:
        """Return the rows that weights of `keys` keys take, padded to whole tiles."""
        return up_to_edge(keys)

    @staticmethod
    def counts(job: Array) -> list[Any]:
        """Return the sizes of its workspace arrays in words of 32 bits."""
        sizes = _Sizes(job)
        keys, width, value_width = sizes.keys, sizes.width, sizes.value_width
        return [
            keys * width // 2,
            sizes.line * width // 2,
            keys * width,
            keys * value_width // 2,
            keys * value_width,
            *(QUERIES * width // 2 for _ in range(3)),
            *(QUERIES * value_width // 2 for _ in range(3)),
            *(QUERIES * width for _ in range(2)),
            *(KEYS // 2 * QUERIES for _ in range(3)),
        ]

    def __init__(self, job: Array, arrays: list[Array]):
        self.job, self.sizes, self.numbers = job, _Sizes(job), numbers_of(job)
        self.keys, self.key_columns, self.d_keys, self.values, self.d_values, *others = arrays
        self.rows_of_queries, self.queries, self.query_pairs, *others = others
        self.rows_of_d_contexts, self.d_contexts, self.d_context_pairs, *others = others
        self.d_queries, self.of_queries, self.pairs, self.rests, self.rounded = others

    def read_keys(self, index: Value) -> None:
        """Read keys as rows and as columns, and values as rows."""
        code, sizes = self.job.code, self.sizes
        _read_keys(self.job, sizes, index, self.keys, self.values)
        transpose_shorts(code, self.keys, sizes.width, sizes.keys, sizes.width, self.key_columns, sizes.line)
        for sums in (self.d_keys, self.d_values):
            fill(code, sums, sums.count, 0.0)

    def read_queries(self, index: Value, count: Value, shares: Array) -> None:
        """Read a block of queries and the gradients of their context, as columns of pairs and as pairs of rows."""
        code, sizes = self.job.code, self.sizes
        for word, channels, width, rows, columns, pairs in (
            (words.QUERY, sizes.given.depth, sizes.width, self.rows_of_queries, self.queries, self.query_pairs),
            (
                *(words.D_CONTEXT, sizes.given.value_depth, sizes.value_width),
                *(self.rows_of_d_contexts, self.d_contexts, self.d_context_pairs),
            ),
        ):
            _read_queries(self.job, word, channels, index, count, rows, width)
            transpose(code, rows, width // 2, width // 2, columns)
            pair_rows(code, rows, QUERIES, width, pairs)
        fill(code, self.d_queries, self.d_queries.count, 0.0)

    def multiply(self, out: Value, *where: Value) -> None:
        """Compute the scores of `n_keys` keys from `start` on and a block of queries."""
        _multiply(self.job.code, self.keys, self.sizes.width, self.queries, out, *where)
        copy(self.job.code, out, where[3] * QUERIES, self.numbers.scale, out, to="float32")

    def multiply_values(self, shares: Array, out: Value, *where: Value) -> None:
        """Compute the gradients of the weights of a block of scores, times `shares`."""
        _multiply(self.job.code, self.values, self.sizes.value_width, self.d_contexts, out, *where)
        multiply_lanes(self.job.code, shares, out, where[3], where[1])

    def beyond(self, rows: Value) -> Value:
        """Return how many rows after `rows` must be 0, since they complete the last tile."""
        return up_to_edge(rows) - rows

    def add(self, d_scores: Value, weights: Value, shares: Array, *where: Value) -> None:
        """Add to the gradients of queries, keys and values the contributions of some keys."""
        code, sizes, (_, count, start, n_keys) = self.job.code, self.sizes, where
        keys, width, value_width = up_to_edge(n_keys), sizes.width, sizes.value_width
        # The divisor goes on the weights here, since the gradient of the context is used as given, in bfloat16.
        multiply_lanes(code, shares, weights, n_keys, count)
        with code.when(count < QUERIES), code.loop(0, n_keys) as j:  # what only fills the block up, NaN of a key in it
            for block in (d_scores, weights):
                fill(code, block + 4 * (QUERIES * j + count), QUERIES - count, 0.0)
        round_to_pairs_twice(code, d_scores, keys, QUERIES, self.pairs, self.rests)
        for pairs in (self.pairs, self.rests):
            _add_over_keys(code, self.key_columns, sizes, width, pairs, self.d_queries, *where)
        for numbers, pairs, line, sums in (
            (d_scores, self.query_pairs, width, self.d_keys.at(start * width)),
            (weights, self.d_context_pairs, value_width, self.d_values.at(start * value_width)),
        ):
            copy(code, numbers, keys * QUERIES, 1.0, self.rounded, to="bfloat16")
            product(code, self.rounded, QUERIES, pairs, line, sums, line, keys, line, up_to_edge(count), adds=True)

    def write_queries(self, index: Value, count: Value) -> None:
        """Write the gradients of a block of queries."""
        code, sizes, (kind, size, scale) = self.job.code, self.sizes, self.numbers
        depth, stride = sizes.given.depth, sizes.given.depth * sizes.given.heads
        transpose_back(code, self.d_queries, sizes.width, self.of_queries)
        with code.loop(0, count) as i:
            to = self.job[words.D_QUERY] + size * (depth * index + i * stride)
            write_row(code, self.of_queries.at(i * sizes.width), depth, scale, to, kind, stride)

    def write_keys(self, index: Value) -> None:
        """Write the gradients of keys and values."""
        code, sizes, shape, (kind, size, scale) = self.job.code, self.sizes, self.sizes.given, self.numbers
        with code.loop(0, shape.keys) as j:
            for word, channels, sums, line, factor in (
                (words.D_KEY, shape.depth, self.d_keys, sizes.width, scale),
                (words.D_VALUE, shape.value_depth, self.d_values, sizes.value_width, 1.0),
            ):
                stride = channels * shape.key_heads
                to = self.job[word] + size * (channels * index + j * stride)
                # The queries are unscaled here, unlike in `plain`: the gradient of keys still needs the factor.
                write_row(code, sums.at(j * line), channels, factor, to, kind, stride)
