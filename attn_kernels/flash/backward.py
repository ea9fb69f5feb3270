"""The gradients of attention, a block of queries at a time (FlashAttention-2, arXiv 2307.08691), but for one thing.

All weights of a block of queries are held, with their gradients, so that the slope of a row of softmax is the sum of
the very products it is subtracted from: their rounding cancels then, where that of the context would stay, times the
common part of the keys.
"""

from __future__ import annotations

from .. import words
from ..compiler.language import Array, Code, Value
from ..vectors.memory import fill
from ..vectors.pairs import ready
from . import paired, plain
from .blocks import KEYS, partition, room_for, seen_by_block, sizes_of
from .dropout import draw
from .scores import add_to_gradient_of_bias, complete, gradient_of_bias, may_see
from .sharing import cut_key_heads, finish_nothing, share_nothing
from .softmax import QUERIES, differentiate, multiply, weigh_again

NAME = "flash_backward"

UNROLLS = PAIRS = True

ARRAYS = (
    *(words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL, words.D_CONTEXT, words.D_TOTAL),
    *(words.D_QUERY, words.D_KEY, words.D_VALUE, words.SLOPE),
)
"""Words for the arguments and then the results of a call."""

cut, shared, finish = cut_key_heads, share_nothing, finish_nothing


def _products(job: Array) -> type[plain.Backward] | type[paired.PairedBackward]:
    return paired.PairedBackward if job.code.module.pairs else plain.Backward


def _counts(job: Array) -> list[object]:
    of, keys = _products(job), job[words.KEYS]
    return [
        of.rows(keys) * QUERIES,
        of.rows(keys) * QUERIES,
        job[words.CAPPED] * keys * QUERIES,
        job[words.DROPPED] * keys * QUERIES,
        QUERIES,
        QUERIES,
        QUERIES,
        2 * QUERIES,
        *of.counts(job),
    ]


def room(job: Array) -> Value:
    """Return the bytes of a thread's workspace."""
    return room_for(job.code, _counts(job))


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Do one of the tasks: a key head of `SPAN` sequences, and all queries that read it."""
    sizes, span = sizes_of(job), job[words.SPAN]
    first, key_head = task // sizes.key_heads * span, task % sizes.key_heads
    group = sizes.heads // sizes.key_heads
    with code.when(job[words.D_BIASED] != 0), code.loop(0, group) as head:
        start, of_query = gradient_of_bias(job, first * sizes.heads + key_head * group + head)
        fill(code, start, code.choose(of_query != 0, sizes.queries, 1) * sizes.keys, 0.0)
    with ready(code), code.loop(first, first + span) as sequence:
        _differentiate_key_head(code, job, sequence, key_head, memory)


def _differentiate_key_head(code: Code, job: Array, batch: Value, key_head: Value, memory: Value) -> None:
    """Compute the gradients of a key head of a sequence, and of all queries that read it."""
    sizes = sizes_of(job)
    heads, key_heads, n_queries = sizes.heads, sizes.key_heads, sizes.queries
    group = heads // key_heads
    weights, d_weights, caps, factors, tops, slopes, shares, bounds, *others = partition(code, memory, _counts(job))
    of = _products(job)(job, others)

    key_place = batch * sizes.keys * key_heads + key_head
    of.read_keys(key_place)
    with code.loop(0, group * ((n_queries + (QUERIES - 1)) // QUERIES)) as block:
        head, first = key_head * group + block % group, block // group * QUERIES
        of_head = batch * heads + head
        count = code.least(n_queries - first, QUERIES)
        index = (batch * n_queries + first) * heads + head
        of_row = of_head * n_queries + first
        fill(code, tops, QUERIES, float("inf"))  # queries that only fill the block up have no weights
        fill(code, slopes, QUERIES, 0.0)
        fill(code, shares, QUERIES, 0.0)
        with code.loop(0, count) as i:
            total = Array(code, job[words.TOTAL])[of_row + i]
            tops[i] = Array(code, job[words.TOP])[of_row + i]
            shares[i] = code.choose(total != 0.0, 1.0 / total, 0.0)
        of.read_queries(index, count, shares)

        low, high = seen_by_block(job, first, count, of.step)
        with code.loop(low, high, KEYS) as start:
            n_keys = code.least(high - start, KEYS)
            with code.when(may_see(job, batch, first, count, start, n_keys)):
                at, where = QUERIES * (start - low), (first, count, start, n_keys)
                scores, d_out = weights.at(at), d_weights.at(at)
                of.multiply(scores, *where)
                complete(job, of_head, scores, *where, bounds, caps.at(at))
                of.multiply_values(shares, d_out, *where)
                with code.when(job[words.DROPPED] != 0):
                    draw(code, job, of_head, factors.at(at), *where)
                    multiply(code, factors.at(at), d_out, n_keys, count)
                weigh_again(code, scores, d_out, tops, slopes, n_keys, count)
        for block_of_weights in (weights, d_weights):
            fill(code, block_of_weights.at(QUERIES * (high - low)), QUERIES * of.beyond(high - low), 0.0)
        with code.loop(0, count) as i:
            share = shares[i]
            d_total = code.choose(share != 0.0, Array(code, job[words.D_TOTAL])[of_row + i], 0.0)
            # Weights are exp(score - top), undivided, and P = weight * share. With D = sum(P dP), the sum in `slopes`,
            # P (dP - D) = weight * (share * dP - share * D), and a gradient of the sum of weights adds weight *
            # d_total.
            slopes[i] = slopes[i] * share - d_total
            Array(code, job[words.SLOPE])[of_row + i] = slopes[i]

        with code.loop(low, high, KEYS) as start:
            n_keys = code.least(high - start, KEYS)
            with code.when(may_see(job, batch, first, count, start, n_keys)):
                at, where = QUERIES * (start - low), (first, count, start, n_keys)
                of_weights, of_scores = weights.at(at), d_weights.at(at)
                differentiate(code, of_weights, of_scores, slopes, n_keys, count)
                with code.when(job[words.D_BIASED] != 0):
                    # Before the derivative of the cap is multiplied in: the bias is added behind the cap.
                    add_to_gradient_of_bias(code, job, of_head, of_scores, *where)
                with code.when(job[words.CAPPED] != 0):
                    multiply(code, caps.at(at), of_scores, n_keys, count)
                with code.when(job[words.DROPPED] != 0):
                    # Only now: the gradients of scores need the weights before dropout, those of values the weights
                    # after it.
                    multiply(code, factors.at(at), of_weights, n_keys, count)
                of.add(of_scores, of_weights, shares, *where)
        of.write_queries(index, count)
    of.write_keys(key_place)
