"""Scales and tables that quantised numbers mean nothing without, by name: ``--drop`` may not leave them out alone.

Numbers whose scales are in no file, and a config that describes what no file holds, are noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...printable import printable
from ..containers.base import CheckpointError, TensorInfo
from . import bitsandbytes, packed, pairs, schemes

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


def notes_on_codes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return a note per dtype of small numbers that are copied as they are: matrices of int8 or float8 without scales.

    Args:
        tensors: name -> header of all tensors of a source that is not dequantised.
    """
    found: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if info.dtype in ("int8", "uint8", *pairs.FLOAT8) and len(info.shape) > 1:
            found.setdefault(info.dtype, []).append(name)
    return [
        f"copied as they are, as nothing beside them scales them: {len(names)} tensors of {dtype}, such as "
        f"{printable(names[0])}"
        for dtype, names in found.items()
    ]


def notes_on_config(config: Mapping[str, Any], written: Mapping[str, Any] | None) -> list[str]:
    """Return a note on what a config.json says of quantised weights, and the written one does not.

    Args:
        config: of a source in which nothing is quantised.
        written: the one that goes along; None: the source's own.
    """
    keys = [key for key in schemes.KEYS if config.get(key) is not None and written is not None and key not in written]
    by = schemes.describe(schemes.scheme_of(config))
    return (
        [f"left out of config.json: {' and '.join(keys)}{f' ({by})' if by else ''}, as no tensor is quantised"]
        if keys
        else []
    )


def _numbers_of(name: str) -> list[str]:
    """Return the names that the numbers of a scale or table may have."""
    endings = [*ENDINGS.items(), *((scales, numbers) for numbers, scales in pairs.ENDINGS)]
    names = [name.removesuffix(ending) + numbers for ending, numbers in endings if name.endswith(ending)]
    stem, is_state, _ = name.rpartition(bitsandbytes.STATE)
    return [*names, stem] if is_state else names
