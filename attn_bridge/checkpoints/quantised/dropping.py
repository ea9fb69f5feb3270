"""Scales and tables that quantised numbers mean nothing without, by name: ``--drop`` may not leave them out alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...printable import printable
from ..containers.base import CheckpointError, TensorInfo
from . import bitsandbytes, packed, pairs

CODES = ("int8", "uint8", "int32", "int64", *pairs.FLOAT8)
"""Dtypes that quantised numbers have in files."""

ENDINGS = {
    **dict.fromkeys((packed.ZEROS, packed.SCALES, packed.GROUPS), packed.NUMBERS),
    **dict.fromkeys(
        (bitsandbytes.ABSMAX, bitsandbytes.TABLE, bitsandbytes.NESTED_ABSMAX, bitsandbytes.NESTED_TABLE), ""
    ),
    bitsandbytes.SCB: ".weight",
    **dict.fromkeys((pairs.BY_BLOCK, pairs.BY_ROW), ""),
}
"""Ending of a name -> what the name of its numbers has in its place."""


def check(tensors: Mapping[str, TensorInfo], dropped: Iterable[str]) -> None:
    """Refuse to leave out what the numbers that stay are multiplied by, or the order they have.

    Args:
        tensors: name -> header of all tensors.
        dropped: names that are left out.

    Raises:
        CheckpointError: the first such name, and that of its numbers.
    """
    gone = set(dropped)
    for name in sorted(gone):
        for numbers in _numbers_of(name):
            if numbers in tensors and numbers not in gone and tensors[numbers].dtype in CODES:
                raise CheckpointError(
                    f"--drop leaves out {printable(name)}, without which {printable(numbers)} are codes that mean "
                    "nothing; --dequantize makes floating point of both"
                )


def _numbers_of(name: str) -> list[str]:
    """Return the names that the numbers of a scale or table may have."""
    endings = [*ENDINGS.items(), *((scales, numbers) for numbers, scales in pairs.ENDINGS)]
    names = [name.removesuffix(ending) + numbers for ending, numbers in endings if name.endswith(ending)]
    stem, is_state, _ = name.rpartition(bitsandbytes.STATE)
    return [*names, stem] if is_state else names
