"""All changes of a program: those of every kind of operation, with code that runs repeatedly changed everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....hints.changes import BINARY, COMPARISONS
from .arrangement import (
    of_concatenation,
    of_constants,
    of_padding,
    of_parts,
    of_reshape,
    of_reversal,
    of_sort,
    of_transpose,
)
from .elementwise import (
    UNARY,
    of_binary,
    of_call,
    of_comparison,
    of_complex,
    of_exchanged_numbers,
    of_missing,
    of_positions,
    of_select,
    of_unary,
)
from .program import Program, ProgramChange
from .reductions import (
    of_convolution,
    of_cumulation,
    of_loop,
    of_place,
    of_product,
    of_reduction,
    of_transform,
    of_windows,
)

_KINDS: dict[tuple[str, ...], Callable[..., Iterator[ProgramChange]]] = {
    UNARY: of_unary,
    tuple(BINARY): of_binary,
    tuple(COMPARISONS): of_comparison,
    ("select_n",): of_select,
    ("iota",): of_positions,
    ("reduce_sum", "reduce_max", "reduce_min"): of_reduction,
    ("transpose",): of_transpose,
    ("reshape",): of_reshape,
    ("dot_general",): of_product,
    ("concatenate",): of_concatenation,
    ("pad",): of_padding,
    ("conv_general_dilated",): of_convolution,
    ("cumsum", "cumprod"): of_cumulation,
    ("scan",): of_loop,
    ("sort",): of_sort,
    ("fft",): of_transform,
    ("real", "imag"): of_complex,
    ("argmin", "argmax"): of_place,
    ("reduce_window_sum", "reduce_window_max"): of_windows,
    ("rev",): of_reversal,
}
"""Names of operations -> their changes."""


def changes_of(program: Program) -> Iterator[ProgramChange]:
    """Yield the changes of a program, from its end: what comes last needs the fewest operations again.

    Code that runs several times, as that of a layer in every block, is changed everywhere.
    """
    repeated = _repeated(program)
    made: dict[tuple[int, str], ProgramChange] = {}
    for change in _single_changes(program):
        made.setdefault((change.at, change.text), change)
        if change.at not in repeated:
            yield change
    for change in list(made.values()):
        group = repeated.get(change.at, ())
        if group and change.at == group[0]:
            others = [made[at, change.text] for at in group if (at, change.text) in made]
            results = {at: result for other in others for at, result in other.results.items()}
            yield ProgramChange(change.text, change.at, results)
    for change in made.values():
        runs = repeated.get(change.at, ())
        if runs and len(change.results.keys() & set(runs)) <= 1:  # else it changes several runs
            yield change


def _repeated(program: Program) -> dict[int, tuple[int, ...]]:
    """Return position of an operation -> the positions of all that the same code calls for, if it runs repeatedly."""
    sites: dict[object, list[int]] = {}
    for at, operation in enumerate(program.operations):
        sites.setdefault(operation.code, []).append(at)
    repeated: dict[int, tuple[int, ...]] = {}
    for positions in sites.values():
        names = [program.operations[at].name for at in positions]
        length = next(size for size in range(1, len(names) + 1) if names == (names[:size] * len(names))[: len(names)])
        if length < len(names) and len(names) % length == 0:
            groups = {first: tuple(positions[first::length]) for first in range(length)}
            repeated |= {at: group for group in groups.values() for at in group}
    return repeated


def _single_changes(program: Program) -> Iterator[ProgramChange]:
    for name, at, source, made in reversed(program.calls):
        if name and not name.startswith("_"):
            yield from of_call(program, name, at, source, made)
    for operation in reversed([item for item in program.operations if not item.is_of_algorithm]):
        for kind, maker in _KINDS.items():
            if operation.name in kind:
                yield from maker(program, operation)
    yield from of_parts(program)
    yield from of_exchanged_numbers(program)
    yield from of_missing(program)
    yield from of_constants(program)
