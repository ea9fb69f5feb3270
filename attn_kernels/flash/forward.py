"""Attention forward, a block of queries at a time (FlashAttention-2, arXiv 2307.08691).

Scores lie with the keys in rows and the queries side by side, so that what happens to a query, from its largest score
to the sum of its weights, happens in its own lane of a register.
"""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Code, Value
from ..compiler.processor import ROWS
from ..vectors.exponentials import exp
from ..vectors.memory import fill
from ..vectors.pairs import ready
from . import paired, plain
from .blocks import KEYS, partition, room_for, seen_by_block, sizes_of
from .dropout import draw
from .scores import complete, may_see
from .sharing import cut_query_heads, finish_nothing, share_nothing
from .softmax import QUERIES, multiply, weigh

NAME = "flash_forward"

UNROLLS = PAIRS = True

ARRAYS = (words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL)
"""Words for the arguments and then the results of a call."""

cut, shared, finish = cut_query_heads, share_nothing, finish_nothing

_NONE = float("-inf")


def _products(job: Array) -> type[plain.Forward] | type[paired.PairedForward]:
    return paired.PairedForward if job.code.module.pairs else plain.Forward


def _counts(job: Array) -> list[object]:
    # A product rounds its rows up to whole tiles of `ROWS`, and writes them: scores need room beyond `KEYS`.
    common = [(KEYS + 2 * ROWS) * QUERIES, KEYS * QUERIES, QUERIES, QUERIES, QUERIES, 2 * QUERIES]
    return [*common, *_products(job).counts(job)]


def room(job: Array) -> Value:
    """Return the bytes of a thread's workspace."""
    return room_for(job.code, _counts(job))


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Run a task: of `PARTS` tasks for each head of each sequence, every `PARTS`-th block of queries."""
    sizes, parts = sizes_of(job), job[words.PARTS]
    of_head, part = task // parts, task % parts
    batch, head = of_head // sizes.heads, of_head % sizes.heads
    scores, factors, tops, sums, shrink, bounds, *others = partition(code, memory, _counts(job))
    of = _products(job)(job, others)

    with ready(code):
        of.read_keys(batch * sizes.keys * sizes.key_heads + head // (sizes.heads // sizes.key_heads))
        # Every `PARTS`-th block, not neighbouring ones: under a causal mask later blocks see more keys, and tasks
        # should be of about one length.
        with code.loop(part * QUERIES, sizes.queries, parts * QUERIES) as first:
            count = code.least(sizes.queries - first, QUERIES)
            index = (batch * sizes.queries + first) * sizes.heads + head
            of.read_queries(index, count)
            fill(code, tops, QUERIES, _NONE)
            fill(code, sums, QUERIES, 0.0)
            low, high = seen_by_block(job, first, count, of.step)
            with code.loop(low, high, KEYS) as start:
                n_keys = code.least(high - start, KEYS)
                with code.when(may_see(job, batch, first, count, start, n_keys)):
                    where = first, count, start, n_keys
                    of.multiply(scores, *where)
                    complete(job, of_head, scores, *where, bounds)
                    weigh(code, scores, tops, sums, shrink, n_keys, count)
                    # After `weigh` has added to the sums: dropout acts on normalised weights, so the divisor counts
                    # dropped keys, too.
                    with code.when(job[words.DROPPED] != 0):
                        draw(code, job, of_head, factors, *where)
                        multiply(code, factors, scores, n_keys, count)
                    of.add(scores, shrink, *where)
            of.finish()
            _write_rows(job, of, of_head, first, count, index, tops, sums)


def _write_rows(
    job: Array, of: Any, of_head: Value, first: Value, count: Value, index: Value, tops: Array, sums: Array
) -> None:
    """Write the results of a block of queries; sinks join them here."""
    code = job.code
    with code.loop(0, count) as i:
        top, total, shrunk = (code.variable(one) for one in (tops[i], sums[i], 1.0))
        # A query that saw only NaN has the largest score -inf, too, but the sum NaN: it stays NaN. One without keys
        # gets zeros.
        is_hidden = (top.get() == _NONE) & (total.get() == total.get())
        with code.either(is_hidden) as (hidden, seen):
            with hidden:
                top.set(code.value(0.0))
                total.set(code.value(0.0))
            with seen, code.when(job[words.SINKS] != 0):
                # A sink is a score without a value: it joins the largest score and the sum, and so only shrinks the
                # context.
                sink = Array(code, job[words.SINK])[of_head]
                largest = code.largest(sink, top.get())
                shrunk.set(exp(top.get() - largest))
                total.set(total.get() * shrunk.get() + exp(sink - largest))
                top.set(largest)
        # The context is divided by the sum once, behind the last key, not at every block (FlashAttention-2, section
        # 3.1).
        share = code.choose(total.get() != 0.0, shrunk.get() / total.get(), 0.0)
        of.write(i, share, index + i * job[words.HEADS])
        of_row = of_head * job[words.QUERIES] + first + i
        # Both, not their log-sum-exp, from which weights are recomputed with its rounding error: with scores of 50
        # torch's kernel loses 3 to 15 units of the last place in gradients of values, where the formula itself loses 1.
        Array(code, job[words.TOP])[of_row] = top.get()
        Array(code, job[words.TOTAL])[of_row] = total.get()
