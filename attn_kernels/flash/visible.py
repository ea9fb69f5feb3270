"""Matrix products of a block of queries and some keys that skip pairs hidden from all queries.

On the edge of a mask a block of scores is a triangle: without these, half of it would be computed for nothing. Skipped
numbers count as 0.
"""

from __future__ import annotations

from ..compiler.language import Array, Code, Value, routine
from ..compiler.processor import LANES, ROWS, VECTORS
from ..vectors.memory import fill
from ..vectors.products import product
from .blocks import job_at, seen_by, seen_by_block
from .softmax import QUERIES

# Tiles are narrow here: the scores of keys that one of their queries sees are computed for all of them.
_WIDEST = min(VECTORS, 2)

_COLUMNS = _WIDEST * LANES
"""Queries whose scores are computed for the same keys, where not all see all: those of a tile."""

_GROUP = 2 * ROWS
"""Rows that share the range of a sum."""


def _sees_all(job: Array, first: Value, count: Value, start: Value, n_keys: Value) -> Value:
    """Return whether all queries from `first` on see all `n_keys` keys from `start` on."""
    # Neither bound goes back from one query to the next: the last query has the latest start, the first the earliest
    # end.
    low, high = seen_by(job, first + count - 1)[0], seen_by(job, first)[1]
    return (low <= start) & (start + n_keys <= high)


def _seen(
    job: Array, first: Value, count: Value, start: Value, n_keys: Value, of_queries: Value, queries: int
) -> tuple[Value, Value]:
    """Return the first of the keys that any query from the `of_queries`th on sees, and the end (exclusive)."""
    code = job.code
    low, high = seen_by_block(job, first + of_queries, code.least(count - of_queries, queries))
    low = code.largest(code.least(low - start, n_keys), 0)
    return low, code.largest(code.least(high - start, n_keys), low)


@routine
def products(
    code: Code,
    address: Value,
    left: Value,
    width: Value,
    right: Value,
    out: Value,
    first: Value,
    count: Value,
    start: Value,
    n_keys: Value,
    depth: Value,
) -> None:
    """Compute the products of `n_keys` keys from `start` on and the queries from `first` on, side by side."""
    job = job_at(code, address)
    with code.either((count == QUERIES) & _sees_all(job, first, count, start, n_keys)) as (whole, parts):
        with whole:
            product(code, left, width, right, QUERIES, out, QUERIES, n_keys, QUERIES // LANES, depth, adds=False)
        with parts, code.loop(0, count, _COLUMNS) as i:
            low, high = _seen(job, first, count, start, n_keys, i, _COLUMNS)
            at, target = left + 4 * low * width, out + 4 * (low * QUERIES + i)
            constants = {"adds": False, "widest": _WIDEST}
            product(code, at, width, right + 4 * i, QUERIES, target, QUERIES, high - low, _WIDEST, depth, **constants)
            for begin, end in ((0, low), (high, n_keys)):
                with code.loop(begin, end) as j:
                    fill(code, out + 4 * (j * QUERIES + i), _COLUMNS, 0.0)


@routine
def add_over_keys(
    code: Code,
    address: Value,
    weights: Value,
    right: Value,
    width: Value,
    out: Value,
    first: Value,
    count: Value,
    start: Value,
    n_keys: Value,
    registers: Value,
) -> None:
    """Add to each query the rows of `n_keys` keys from `start` on, by its weights."""
    job = job_at(code, address)
    with code.either(_sees_all(job, first, count, start, n_keys)) as (whole, parts):
        with whole:
            product(
                code, weights, 0, right, width, out, width, count, registers, n_keys, adds=True, row=1, step=QUERIES
            )
        with parts, code.loop(0, count, _GROUP) as i:
            low, high = _seen(job, first, count, start, n_keys, i, _GROUP)
            left, at, target = weights + 4 * (low * QUERIES + i), right + 4 * low * width, out + 4 * i * width
            rows = code.least(count - i, _GROUP)
            product(
                code, left, 0, at, width, target, width, rows, registers, high - low, adds=True, row=1, step=QUERIES
            )


@routine
def add_over_queries(
    code: Code,
    address: Value,
    weights: Value,
    right: Value,
    width: Value,
    out: Value,
    first: Value,
    count: Value,
    start: Value,
    n_keys: Value,
    registers: Value,
) -> None:
    """Add to each of `n_keys` keys from `start` on the rows of the queries from `first` on, by their weights."""
    job = job_at(code, address)
    with code.either(_sees_all(job, first, count, start, n_keys)) as (whole, parts):
        with whole:
            product(code, weights, 0, right, width, out, width, n_keys, registers, count, adds=True, row=QUERIES)
        with parts:
            # Neither end goes back from one query to the next: the queries that see some of a group of keys go on.
            begin, end = code.variable(0), code.variable(0)
            with code.loop(0, n_keys, _GROUP) as j:
                rows = code.least(n_keys - j, _GROUP)
                with code.repeat() as leave_if:
                    leave_if(begin.get() >= count)
                    leave_if(seen_by(job, first + begin.get())[1] > start + j)
                    begin.set(begin.get() + 1)
                with code.repeat() as leave_if:
                    leave_if(end.get() >= count)
                    leave_if(seen_by(job, first + end.get())[0] >= start + j + rows)
                    end.set(end.get() + 1)
                queries = code.largest(end.get() - begin.get(), 0)
                left, at = weights + 4 * (j * QUERIES + begin.get()), right + 4 * begin.get() * width
                target = out + 4 * j * width
                product(code, left, 0, at, width, target, width, rows, registers, queries, adds=True, row=QUERIES)
