"""The words of a job: what all threads that work on a call know of it, each a whole number of 64 bits.

Those up to `SHAPE_END` come with the call as it was compiled, the others are filled in as it runs.
"""

from __future__ import annotations

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Dtypes that arrays are read and written in, as the kernels call them."""

(
    KIND,  # what arrays hold, of `KINDS`
    HEADS,
    KEY_HEADS,
    QUERIES,
    KEYS,
    DEPTH,  # channels of queries and keys
    VALUE_DEPTH,
    SCALE,  # the bits of a float64
    BANDED,  # 1 where queries see a band of keys: query i those up to i + OFFSET, the last SIZE of them, 0 for all
    OFFSET,
    SIZE,
    CAPPED,  # 1 where scores are capped
    SOFTCAP,  # at this, the bits of a float64
    SINKS,  # 1 where there are sinks
    MASKED,  # 1 where an array hides keys, a byte of which is 0 where it does
    MASK_SPAN,  # sequences that share one, and how far its bytes are apart along each axis, 0 where they are the same
    MASK_SEQUENCE,
    MASK_HEAD,
    MASK_QUERY,
    MASK_KEY,
    BIASED,  # 1 where an array of float32 is added to the scores
    BIAS_SPAN,  # as of the mask, in numbers
    BIAS_SEQUENCE,
    BIAS_HEAD,
    BIAS_QUERY,
    BIAS_KEY,
    D_BIASED,  # 1 where its gradient is asked for
    DROPPED,  # 1 where weights are dropped
    BATCH,  # sequences whose weights are drawn from one seed
    KEPT,  # a weight is kept where 23 random bits are below this
    FACTOR,  # times this, the bits of a float64
    SPAN,  # sequences that a task of the backward pass goes through, as they add to one gradient of the bias
    SHAPE_END,
) = range(33)

(
    TASKS,  # how many there are
    NEXT,  # the first that nobody took
    DONE,  # how many are
    HOLDERS,  # threads that know of the job
    WORKERS,  # those that asked for memory to work in
    ROOM,  # bytes of that for each
    MEMORY,  # where it begins
    PARTS,  # tasks per head
) = range(33, 41)

(
    QUERY,
    KEY,
    VALUE,
    SINK,
    MASK,
    BIAS,
    SEED,  # two words of 32 bits for `BATCH` sequences
    CONTEXT,
    TOP,
    TOTAL,
    D_CONTEXT,
    D_TOTAL,
    D_QUERY,
    D_KEY,
    D_VALUE,
    SLOPE,
    D_BIAS,
) = range(41, 58)
"""Addresses of arrays."""

END = 58

OPTIONAL = {
    "sinks": (SINKS, SINK),
    "mask": (MASKED, MASK),
    "bias": (BIASED, BIAS),
    "seed": (DROPPED, SEED),
}
"""Arguments that come last, in this order, if they are given: the word that says so, and the one of the address."""
