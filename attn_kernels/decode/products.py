"""Products of a few rows with many keys or values, read in place in their stored dtype.

A few rows are not worth transposing: a product of a query and a key is summed over the lanes of a register. Many
products are computed side by side so that none waits for the previous one, while the processor prefetches the next
data.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .. import words
from ..compiler.language import FLOAT, Array, Code, Value, Variable, routine
from ..compiler.processor import LANES
from ..vectors.memory import BYTES, STORED, widened

BLOCK = 64
"""Keys whose scores are computed at once; so far are the scores of one row and of the next apart."""

SUMS = max(LANES, 8)
"""Sums that are added to side by side."""

_ROWS = [4, 2, 1]
"""Rows that go through the keys together."""

_VECTOR = ir.VectorType(FLOAT, LANES)
# Bytes of a cache line on x86-64 and most ARM processors: an instruction fetches that much ahead.
_LINE = 64


@routine
def multiply(
    code: Code,
    queries: Value,
    width: Value,
    keys: Value,
    stride: Value,
    out: Value,
    rows: Value,
    n_keys: Value,
    registers: Value,
    following: Value,
    *,
    kind: str,
) -> None:
    """Compute the products of `rows` queries, `width` apart, and of `n_keys` keys, `stride` bytes apart.

    The number of keys fills registers. As many bytes of the following data as are read are prefetched, in order.
    """
    for together, start, end in _tiles(code, rows, _ROWS):
        with code.loop(start, end, together) as r:
            query, target, is_first = queries + 4 * r * width, out + 4 * r * BLOCK, r == 0
            keys_together = LANES // together
            with code.loop(0, n_keys, keys_together) as j:
                at = [keys + (j + i) * stride for i in range(keys_together)]
                # Only the first tile of rows prefetches; later ones would fetch the same lines again, and name data
                # that is in the cache instead.
                next_lines = code.choose(is_first, following + j * (BYTES[kind] * LANES) * registers, at[0])
                _multiply_tile(code, query, width, at, target + 4 * j, together, registers, next_lines, kind)


def _multiply_tile(
    code: Code,
    query: Value,
    width: Value,
    keys: list[Value],
    out: Value,
    rows: int,
    registers: Value,
    following: Value,
    kind: str,
) -> None:
    zero = code.vector(0.0, LANES)
    sums = [[code.variable(zero) for _ in keys] for _ in range(rows)]
    offsets = [4 * r * width for r in range(rows)]
    size = len(keys) * LANES * BYTES[kind]
    with code.loop(0, registers * LANES, LANES) as c:
        for line in range(0, size, _LINE):
            code.fetch(following + c * (len(keys) * BYTES[kind]) + line)
        of_keys = [_read(code, key + BYTES[kind] * c, kind) for key in keys]
        for offset, of_row in zip(offsets, sums, strict=True):
            number = code.load(query + offset + 4 * c, _VECTOR)
            for total, key in zip(of_row, of_keys, strict=True):
                total.set(code.times_plus(number, key, total.get()))
    reduced, apart = _sums_of(code, [total.get() for of_row in sums for total in of_row]), len(keys)
    for r in range(rows):
        part = code.shuffle(reduced, reduced, list(range(r * apart, (r + 1) * apart)))
        code.store(part, out + 4 * r * BLOCK)


def _sums_of(code: Code, registers: list[Value]) -> Value:
    """Return the sum of the lanes of each of `LANES` registers."""
    step = 1
    while len(registers) > 1:
        low, high = ([_place(lane, step, last) for lane in range(LANES)] for last in (False, True))
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [code.shuffle(one, two, low) + code.shuffle(one, two, high) for one, two in pairs]
        step *= 2
    return registers[0]


def _place(lane: int, step: int, last: bool) -> int:
    """Return which lane of two registers one of their half sums takes: those of a pair become neighbours."""
    of_second, rest = (lane // step) % 2, lane - (lane // step) % 2 * step
    return rest + step * last + LANES * of_second


@routine
def add(
    code: Code,
    weights: Value,
    factors: Value,
    values: Value,
    stride: Value,
    out: Value,
    line: Value,
    rows: Value,
    n_keys: Value,
    registers: Value,
    following: Value,
    *,
    kind: str,
) -> None:
    """Multiply `rows` rows, `line` apart, by a factor each, and add to each `n_keys` values by its weights.

    It prefetches as many bytes of the following data as it reads, in their order.
    """
    for together, start, end in _tiles(code, rows, _ROWS):
        with code.loop(start, end, together) as r:
            left, target, is_first = weights + 4 * r * BLOCK, out + 4 * r * line, r == 0
            done = code.value(0)
            widths = [SUMS // together, 1]
            for vectors, first, last in _tiles_from(code, done, registers, widths):
                with code.loop(first * LANES, last * LANES, vectors * LANES) as c:
                    zero = code.vector(0.0, LANES)
                    sums = [[code.variable(zero) for _ in range(vectors)] for _ in range(together)]
                    start_of_values = values + BYTES[kind] * c
                    next_lines = code.choose(is_first, following + BYTES[kind] * c * n_keys, start_of_values)
                    _add_tile(code, left, start_of_values, stride, sums, n_keys, next_lines, kind)
                    for i, of_row in enumerate(sums):
                        factor = code.vector(code.load(factors + 4 * (r + i), FLOAT), LANES)
                        for v, total in enumerate(of_row):
                            at = target + 4 * (i * line + c + v * LANES)
                            code.store(code.times_plus(code.load(at, _VECTOR), factor, total.get()), at)


def _add_tile(
    code: Code,
    weights: Value,
    values: Value,
    stride: Value,
    sums: list[list[Variable]],
    n_keys: Value,
    following: Value,
    kind: str,
) -> None:
    vectors = len(sums[0])
    size = vectors * LANES * BYTES[kind]
    with code.loop(0, n_keys) as j:
        for line in range(0, size, _LINE):
            code.fetch(following + j * size + line)
        at = values + j * stride
        of_value = [_read(code, at + BYTES[kind] * LANES * v, kind) for v in range(vectors)]
        for i, of_row in enumerate(sums):
            number = code.vector(code.load(weights + 4 * (i * BLOCK + j), FLOAT), LANES)
            for total, vector in zip(of_row, of_value, strict=True):
                total.set(code.times_plus(number, vector, total.get()))


def _tiles(code: Code, count: Value, sizes: list[int]) -> list[tuple[int, Value, Value]]:
    """Return sizes of tiles, from where to where those of each size go: the larger ones first."""
    return _tiles_from(code, code.value(0), count, sizes)


def _tiles_from(code: Code, start: Value, count: Value, sizes: list[int]) -> list[tuple[int, Value, Value]]:
    tiles = []
    for size in sizes:
        end = start + (count - start) // size * size
        tiles.append((size, start, end))
        start = end
    return tiles


def _read(code: Code, address: Value, kind: str) -> Value:
    """Return the numbers of a kind at an address as float32."""
    return widened(kind, code.load(address, ir.VectorType(STORED[kind], LANES), align=2))


def for_kinds(job: Array, write: Callable[..., None]) -> None:
    """Write the code that depends on the kind of the arrays' numbers, once for each possible kind."""
    code, constant = job.code, job.code.module.known.get(words.KIND)
    for name, number in words.KINDS.items():
        if constant in (None, number):
            with code.when(job[words.KIND] == number):
                write(kind=name)
