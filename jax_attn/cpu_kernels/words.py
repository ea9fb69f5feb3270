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
    SINKS,  # 1 where there are sinks
    MASKED,  # 1 where an array hides keys, a byte of which is 0 where it does
    MASK_BATCH,  # how far its bytes are apart along each axis, 0 where they are the same
    MASK_HEAD,
    MASK_QUERY,
    MASK_KEY,
    SHAPE_END,
) = range(18)

(
    TASKS,  # how many there are
    NEXT,  # the first that nobody took
    DONE,  # how many are
    HOLDERS,  # threads that know of the job
    WORKERS,  # those that asked for memory to work in
    ROOM,  # bytes of that for each
    MEMORY,  # where it begins
    PARTS,  # tasks per head
) = range(18, 26)

(QUERY, KEY, VALUE, SINK, MASK, CONTEXT, TOP, TOTAL, D_CONTEXT, D_TOTAL, D_QUERY, D_KEY, D_VALUE, SLOPE) = range(26, 40)
"""Addresses of arrays."""

END = 40
