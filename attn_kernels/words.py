"""The words of a job: the data that all threads of a call share, each a whole number of 64 bits.

Those up to `SHAPE_END` come from the compiled call, the others are filled in as it runs.
"""

from __future__ import annotations

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Dtypes that arrays are read and written in, as the kernels call them."""

FEW = 16
"""Maximum queries for the separate kernel that reads keys and values in place."""

(
    KIND,  # what arrays hold, of `KINDS`
    HEADS,
    KEY_HEADS,
    QUERIES,
    KEYS,
    DEPTH,  # channels of queries and keys
    VALUE_DEPTH,
    SCALE,  # the bits of a float64
    BOUNDED,  # 1 where each query sees an interval of keys: the first of all queries follow the shape, then the ends
    CAPPED,  # 1 where scores are capped
    SOFTCAP,  # at this, the bits of a float64
    SINKS,  # 1 where there are sinks
    MASKED,  # 1 where an array hides keys, a byte of which is 0 where it does
    MASK_SPAN,  # sequences that share one, and how far its bytes are apart along each axis, 0 where they are the same
    MASK_SEQUENCE,
    MASK_HEAD,
    MASK_QUERY,
    MASK_KEY,
    DOCUMENTED,  # 1 where queries see the keys of their number alone, words of 32 bits
    QUERY_IDS_SPAN,  # sequences that share those of the queries
    KEY_IDS_SPAN,
    BIASED,  # 1 where an array of float32 is added to the scores
    BIAS_SPAN,  # as of the mask, in numbers
    BIAS_SEQUENCE,
    BIAS_HEAD,
    BIAS_QUERY,
    BIAS_KEY,
    D_BIASED,  # 1 where its gradient is asked for
    DROPPED,  # 1 where weights are dropped
    DRAWN,  # 1: given by an array of bytes, 0 where dropped; 0: drawn from the bits of a seed
    BATCH,  # sequences whose weights are drawn from one seed
    KEPT,  # a weight is kept where 23 random bits are below this
    FACTOR,  # times this, the bits of a float64
    SPAN,  # sequences that a task of the backward pass goes through, as they add to one gradient of the bias
    KEY_SEQUENCE,  # how far the numbers of keys are apart along each axis; the channels of one are neighbours
    KEY_TOKEN,
    KEY_HEAD,
    VALUE_SEQUENCE,  # as of keys
    VALUE_TOKEN,
    VALUE_HEAD,
    SHAPE_END,
) = range(41)

(
    TASKS,  # how many there are
    NEXT,  # the first task not yet taken
    DONE,  # how many are
    HOLDERS,  # threads that know of the job
    WORKERS,  # those that asked for memory to work in
    ROOM,  # bytes of that for each
    MEMORY,  # where it begins
    PARTS,  # tasks per head, or parts that the keys are cut into
    BOUNDS,  # where the intervals are
    TOGETHER,  # key heads of a task, where the keys are cut
    SHARED,  # memory that tasks leave their results in, where others put them together
) = range(41, 52)

(
    QUERY,
    KEY,
    VALUE,
    SINK,
    MASK,
    QUERY_IDS,
    KEY_IDS,
    BIAS,
    SEED,  # two words of 32 bits for `BATCH` sequences
    STAY,
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
) = range(52, 72)
"""Addresses of arrays."""

END = 72

OPTIONAL = {
    "sinks": (SINKS, SINK),
    "mask": (MASKED, MASK),
    "query_ids": (DOCUMENTED, QUERY_IDS),
    "key_ids": (DOCUMENTED, KEY_IDS),
    "bias": (BIASED, BIAS),
    "seed": (DROPPED, SEED),
    "kept": (DRAWN, STAY),
}
"""Trailing arguments, in this order, if present: the word of their presence, and that of their address."""
