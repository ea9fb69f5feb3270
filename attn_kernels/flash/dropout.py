"""The weights that dropout keeps: from an array, or as ``jax.random.bernoulli`` over ``(B, H, T, S)`` draws them.

Partitionable Threefry draws a number from its index alone (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011), so a block needs only its own indices.
"""

from __future__ import annotations

from llvmlite import ir

from .. import words
from ..compiler.language import Code, Value, routine
from ..compiler.processor import LANES
from .blocks import float_in, job_at
from .softmax import QUERIES, registers
from .tiles import over_tiles, transpose_registers

_BYTE, _INT = ir.IntType(8), ir.IntType(32)

# The sign bit of a word: with it flipped, a signed comparison orders words as if they were unsigned.
_SIGN = -(2**31)

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits that a word is turned by in each round, for even and odd groups of four."""


def threefry(keys: tuple[Value, ...], counters: list[tuple[Value, Value]]) -> list[Value]:
    """Return 32 random bits of each place: both words of Threefry 2x32 with 20 rounds, one exclusive or the other.

    Several places go through the rounds side by side, as each step of one waits for the step before.
    """
    # The third word of the schedule is the parity of the key, with the constant of the published Threefry (Skein's).
    schedule = (*keys, keys[0] ^ keys[1] ^ 0x1BD11BDA)
    pairs = [(high + schedule[0], low + schedule[1]) for high, low in counters]
    for group in range(5):
        for turn in _TURNS[group % 2]:
            pairs = [(one + two, (two << turn) | (two >> (32 - turn))) for one, two in pairs]
            pairs = [(one, one ^ two) for one, two in pairs]
        # After each four rounds the key is added, turned by one word, and to the last word the number of the group.
        next_one, next_two = schedule[(group + 1) % 3], schedule[(group + 2) % 3] + (group + 1)
        pairs = [(one + next_one, two + next_two) for one, two in pairs]
    return [one ^ two for one, two in pairs]


@routine
def draw(
    code: Code, address: Value, head: Value, factors: Value, first: Value, count: Value, start: Value, n_keys: Value
) -> None:
    """Write the factors of the weights of `n_keys` keys from `start` on and of `count` queries from `first` on.

    `address` is that of the job, and `head` counts the heads of all sequences.
    """
    job = job_at(code, address)
    with code.either(job[words.DRAWN] != 0) as (drawn, to_draw):
        with drawn:
            _read(code, address, head, factors, first, count, start, n_keys)
        with to_draw:
            _draw(code, address, head, factors, first, count, start, n_keys)


@routine
def _read(
    code: Code, address: Value, head: Value, factors: Value, first: Value, count: Value, start: Value, key_count: Value
) -> None:
    """Write the factors given by an array."""
    job = job_at(code, address)
    n_keys = job[words.KEYS]
    stay = job[words.STAY] + (head * job[words.QUERIES] + first) * n_keys + start
    factor = float_in(job, words.FACTOR)

    def factors_of(i: Value, j: Value, kind: ir.Type) -> Value:
        is_dropped = code.load(stay + i * n_keys + j, kind, align=1) == 0
        if isinstance(kind, ir.VectorType):
            return code.choose(is_dropped, code.vector(0.0, LANES), code.vector(factor, LANES))
        return code.choose(is_dropped, 0.0, factor)

    def square(j: Value, i: Value) -> None:
        lines = [factors_of(i + line, j, ir.VectorType(_BYTE, LANES)) for line in range(LANES)]
        for key, numbers in enumerate(transpose_registers(code, lines)):
            code.store(numbers, factors + 4 * ((j + key) * QUERIES + i))

    def single(j: Value, i: Value) -> None:
        code.store(factors_of(i, j, _BYTE), factors + 4 * (j * QUERIES + i))

    over_tiles(code, key_count, count, square, single)


@routine
def _draw(
    code: Code, address: Value, head: Value, factors: Value, first: Value, count: Value, start: Value, key_count: Value
) -> None:
    """Write the factors that are drawn from the seed."""
    job = job_at(code, address)
    of_batch, n_keys = job[words.BATCH] * job[words.HEADS], job[words.KEYS]
    seed = job[words.SEED] + 8 * (head // of_batch)
    keys = tuple(code.vector(code.load(seed + 4 * word, _INT), LANES) for word in range(2))
    below = code.vector(job[words.KEPT].low_bits(_INT), LANES)
    factor = code.vector(float_in(job, words.FACTOR), LANES)
    row = ((head % of_batch) * job[words.QUERIES] + first) * n_keys + start
    between = code.places(LANES) * code.vector(n_keys, LANES)
    with registers(code, count) as lanes:
        rows = [between + code.vector(row + lane // 4 * n_keys, LANES) for lane in lanes]
        starts = [((place >> 32).low_bits(_INT), place.low_bits(_INT)) for place in rows]
        with code.loop(0, key_count) as j:
            step, next_key = code.vector(j.low_bits(_INT), LANES), code.vector(code.value(1).low_bits(_INT), LANES)
            counters = []
            for high, low in starts:
                at = low + step
                # Unsigned, the sum is below its summand if it overflowed 32 bits.
                went_on = (at ^ _SIGN) < (low ^ _SIGN)
                counters.append((high + code.choose(went_on, next_key, 0), at))
            for lane, bits in zip(lanes, threefry(keys, counters), strict=True):
                # `jax.random.uniform` keeps the upper 23 bits as a mantissa: u < p is a comparison of these integers.
                code.store(code.choose(bits >> 9 < below, factor, 0.0), factors + lane + 4 * QUERIES * j)
