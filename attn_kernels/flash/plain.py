"""The matrix products of attention in float32, for arrays of any dtype, for `forward` and `backward`.

The twin is `paired`: shared steps, softmax among them, call their methods.
"""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Value
from ..compiler.processor import ROWS
from ..vectors.memory import copy, fill, read_rows, write_row
from .blocks import numbers_of, sizes_of
from .softmax import QUERIES
from .tiles import transpose
from .visible import add_over_keys, add_over_queries, products


class Forward:
    """Scores and context of the queries of a head, a block of them at a time."""

    step = 1
    """Blocks of keys begin at multiples of this."""

    @staticmethod
    def counts(job: Array) -> list[Any]:
        """Return the sizes of its workspace arrays in numbers."""
        sizes = sizes_of(job)
        return [
            # A product rounds its rows up to a whole tile: it reads up to ROWS keys beyond the last, and writes as many
            # contexts. Values are on the right, whose rows are exactly the keys.
            (sizes.keys + ROWS) * sizes.depth,
            sizes.keys * sizes.value_width,
            QUERIES * sizes.depth,
            QUERIES * sizes.depth,
            (QUERIES + ROWS) * sizes.value_width,
        ]

    def __init__(self, job: Array, arrays: list[Array]):
        self.job, self.sizes, self.numbers = job, sizes_of(job), numbers_of(job)
        self.keys, self.values, self.rows, self.queries, self.context = arrays

    def read_keys(self, index: Value) -> None:
        """Read the keys and values of a key head, the `index`th of all positions and heads."""
        job, sizes, (kind, size, _) = self.job, self.sizes, self.numbers
        for word, channels, target, line in (
            (words.KEY, sizes.depth, self.keys, sizes.depth),
            (words.VALUE, sizes.value_depth, self.values, sizes.value_width),
        ):
            source, stride = job[word] + size * channels * index, channels * sizes.key_heads
            read_rows(job.code, source, stride, sizes.keys, channels, kind, 1.0, target, line, target.count)

    def read_queries(self, index: Value, count: Value) -> None:
        """Read a block of queries, from the `index`th on of all positions and heads."""
        job, depth, (kind, size, scale) = self.job, self.sizes.depth, self.numbers
        source, stride = job[words.QUERY] + size * depth * index, depth * self.sizes.heads
        read_rows(job.code, source, stride, count, depth, kind, scale, self.rows, depth, self.rows.count)
        transpose(job.code, self.rows, depth, depth, self.queries)
        fill(job.code, self.context, self.context.count, 0.0)

    def multiply(self, out: Array, *where: Value) -> None:
        """Compute the scores of `n_keys` keys from `start` on and `count` queries from `first` on."""
        depth, start = self.sizes.depth, where[2]
        products(self.job.code, self.job, self.keys.at(start * depth), depth, self.queries, out, *where, depth)

    def add(self, weights: Array, shrink: Array, *where: Value) -> None:
        """Add the values of some keys to the context of the queries, after that was shrunk."""
        code, width, (_, count, start, _) = self.job.code, self.sizes.value_width, where
        with code.loop(0, count) as i:
            factor, row = shrink[i], self.context.at(i * width)
            # Most blocks of keys raise no query's largest score; then its context stays as it is.
            with code.when(factor != 1.0):
                copy(code, row, width, factor, row, to="float32")
        registers, values = self.sizes.value_registers, self.values.at(start * width)
        add_over_keys(code, self.job, weights, values, width, self.context, *where, registers)

    def finish(self) -> None:
        """Emit the code that runs when a block of queries has seen all keys: nothing."""

    def write(self, i: Value, share: Value, index: Value) -> None:
        """Write the context of the `i`th query of the block times a factor, as the `index`th of all."""
        depth, (kind, size, _) = self.sizes.value_depth, self.numbers
        row, to = self.context.at(i * self.sizes.value_width), self.job[words.CONTEXT] + size * depth * index
        write_row(self.job.code, row, depth, share, to, kind, depth * self.sizes.heads)


class Backward:
    """Scores of the queries that read a key head, and the gradients of both, a block of queries at a time."""

    step = 1

    @staticmethod
    def rows(keys: Value) -> Value:
        """Return the rows that weights of `keys` keys take, padding included."""
        return keys + 2 * ROWS

    @staticmethod
    def counts(job: Array) -> list[Any]:
        """Return the sizes of its workspace arrays in numbers."""
        sizes = sizes_of(job)
        keys, width, value_width = sizes.keys + ROWS, sizes.width, sizes.value_width
        return [
            keys * width,
            keys * width,
            keys * value_width,
            keys * value_width,
            QUERIES * width,
            QUERIES * width,
            QUERIES * value_width,
            QUERIES * value_width,
            (QUERIES + ROWS) * width,
        ]

    def __init__(self, job: Array, arrays: list[Array]):
        self.job, self.sizes, self.numbers = job, sizes_of(job), numbers_of(job)
        self.keys, self.d_keys, self.values, self.d_values, self.of_queries, *others = arrays
        self.queries, self.of_d_contexts, self.d_contexts, self.d_queries = others

    def read_keys(self, index: Value) -> None:
        """Read the keys and values of a key head, the `index`th of all positions and heads."""
        job, sizes, (kind, size, _) = self.job, self.sizes, self.numbers
        for word, channels, target, line in (
            (words.KEY, sizes.depth, self.keys, sizes.width),
            (words.VALUE, sizes.value_depth, self.values, sizes.value_width),
        ):
            source, stride = job[word] + size * channels * index, channels * sizes.key_heads
            read_rows(job.code, source, stride, sizes.keys, channels, kind, 1.0, target, line, target.count)
        for sums in (self.d_keys, self.d_values):
            fill(job.code, sums, sums.count, 0.0)

    def read_queries(self, index: Value, count: Value, shares: Array) -> None:
        """Read a block of queries from the `index`th on, and the gradients of their context times `shares`."""
        job, code, sizes, (kind, size, scale) = self.job, self.job.code, self.sizes, self.numbers
        depth, width, value_depth, value_width = sizes.depth, sizes.width, sizes.value_depth, sizes.value_width
        rows, d_rows = self.of_queries, self.of_d_contexts
        source, stride = job[words.QUERY] + size * depth * index, depth * sizes.heads
        read_rows(code, source, stride, count, depth, kind, scale, rows, width, rows.count)
        transpose(code, rows, depth, width, self.queries)
        source, stride = job[words.D_CONTEXT] + size * value_depth * index, value_depth * sizes.heads
        read_rows(code, source, stride, count, value_depth, kind, 1.0, d_rows, value_width, d_rows.count)
        # The softmax's divisor goes on a row of channels once, so that the weights of all keys stay undivided.
        with code.loop(0, count) as i:
            row = d_rows.at(i * value_width)
            copy(code, row, value_width, shares[i], row, to="float32")
        transpose(code, d_rows, value_depth, value_width, self.d_contexts)
        fill(code, self.d_queries, self.d_queries.count, 0.0)

    def multiply(self, out: Value, *where: Value) -> None:
        """Compute the scores of `n_keys` keys from `start` on and `count` queries from `first` on."""
        width, start = self.sizes.width, where[2]
        keys, depth = self.keys.at(start * width), self.sizes.depth
        products(self.job.code, self.job, keys, width, self.queries, out, *where, depth)

    def multiply_values(self, shares: Array, out: Value, *where: Value) -> None:
        """Compute the gradients of the weights of a block of scores, times the `shares` of `read_queries`."""
        width, start = self.sizes.value_width, where[2]
        values, depth = self.values.at(start * width), self.sizes.value_depth
        products(self.job.code, self.job, values, width, self.d_contexts, out, *where, depth)

    def beyond(self, rows: Value) -> Value:
        """Return how many rows after `rows` must be 0, since they complete the last tile."""
        return self.job.code.value(ROWS)

    def add(self, d_scores: Value, weights: Value, shares: Array, *where: Value) -> None:
        """Add to the gradients of queries, keys and values the contributions of some keys."""
        job, code, sizes, start = self.job, self.job.code, self.sizes, where[2]
        width, registers = sizes.width, sizes.registers
        add_over_keys(code, job, d_scores, self.keys.at(start * width), width, self.d_queries, *where, registers)
        of_keys = self.d_keys.at(start * width)
        add_over_queries(code, job, d_scores, self.of_queries, width, of_keys, *where, registers)
        width, registers = sizes.value_width, sizes.value_registers
        of_values = self.d_values.at(start * width)
        add_over_queries(code, job, weights, self.of_d_contexts, width, of_values, *where, registers)

    def write_queries(self, index: Value, count: Value) -> None:
        """Write the gradients of a block of queries."""
        sizes, (kind, size, scale) = self.sizes, self.numbers
        stride = sizes.depth * sizes.heads
        with self.job.code.loop(0, count) as i:
            to = self.job[words.D_QUERY] + size * (sizes.depth * index + i * stride)
            write_row(self.job.code, self.d_queries.at(i * sizes.width), sizes.depth, scale, to, kind, stride)

    def write_keys(self, index: Value) -> None:
        """Write the gradients of keys and values."""
        sizes, (kind, size, _) = self.sizes, self.numbers
        with self.job.code.loop(0, sizes.keys) as j:
            for word, channels, sums, line in (
                (words.D_KEY, sizes.depth, self.d_keys, sizes.width),
                (words.D_VALUE, sizes.value_depth, self.d_values, sizes.value_width),
            ):
                stride = channels * sizes.key_heads
                to = self.job[word] + size * (channels * index + j * stride)
                # Queries were scaled when they were read, so the gradient of keys has the factor already.
                write_row(self.job.code, sums.at(j * line), channels, 1.0, to, kind, stride)
