"""Inputs of a comparison from the command line: a file of arrays, or shapes."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge.whole_files import check_regular

from .sides.subject import Arguments, Array, CannotPromoteError, ModuleFailedError

HOW = "give --inputs FILE.npz or --shape 2,8,16 (once per positional input)"

_WANTS_WHOLE_NUMBERS = re.compile(r"\bintegers?\b|\bLong\b|\bindices\b|\bmust be long\b", re.IGNORECASE)
"""Matches the error messages of frameworks that received floats as indices."""

_POSITIONAL = re.compile(r"arr_(0|[1-9][0-9]*)")


def read_npz(path: Path) -> Arguments:
    """Return the call that a file of arrays holds: ``arr_0 arr_1 ...`` are positional, other names keywords.

    Raises:
        ValueError: the file is missing, no ``.npz``, or holds anything but numbers.
    """
    check_regular(path)
    try:
        with path.open("rb") as stream:
            if stream.read(6) == b"\x93NUMPY":
                raise ValueError("it holds one bare array; np.savez writes one")
            stream.seek(0)
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is no archive")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no .npz file of plain arrays: {reason}") from error
    return arguments(arrays, str(path))


def arguments(arrays: dict[str, Any], where: str) -> Arguments:
    """Return the call that named arrays are.

    Raises:
        ValueError: there is none, one does not hold numbers, or a position is left out.
    """
    if not arrays:
        raise ValueError(f"{where} holds no array")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            hint = "; .npz can't hold bfloat16, store float32" if array.dtype.kind == "V" else ""
            raise ValueError(f"{where}: {name} must hold numbers or bools, it has dtype {array.dtype}{hint}")
    native = {name: np.array(array, dtype=array.dtype.newbyteorder("="), order="C") for name, array in arrays.items()}
    positional = {int(match[1]): name for name in native if (match := _POSITIONAL.fullmatch(name))}
    missing = next((i for i in range(len(positional)) if i not in positional), None)
    if missing is not None:
        raise ValueError(f"{where} has arr_{max(positional)} and no arr_{missing}")
    args = tuple(native.pop(positional[i]) for i in range(len(positional)))
    return Arguments(args, {name: _plain(one) for name, one in native.items()})


def _plain(array: Array) -> Array | bool:
    """Return a bool without axes as Python's: an argument such as ``deterministic``, on which code branches."""
    return bool(array) if array.dtype == np.bool_ and array.ndim == 0 else array


def write_npz(path: Path, call: Arguments) -> bool:
    """Write a call for `read_npz`; False if it holds more than arrays, and then nothing is written."""
    switches = {name: np.asarray(one) for name, one in call.kwargs.items() if isinstance(one, bool)}
    arrays = {f"arr_{i}": one for i, one in enumerate(call.args)} | dict(call.kwargs) | switches
    clash = any(_POSITIONAL.fullmatch(name) or name == "file" for name in call.kwargs)
    if clash or not all(isinstance(one, np.ndarray) and one.dtype.kind in "biufV" for one in arrays.values()):
        return False
    # float32 holds every bfloat16; the comparison casts it back.
    plain = {name: one.astype(np.float32) if one.dtype.kind == "V" else one for name, one in arrays.items()}
    np.savez(path, **plain)
    return True


def draw(shapes: Sequence[str]) -> Arguments:
    """Return positional inputs of the shapes, drawn from a normal distribution.

    Raises:
        ValueError: a shape is malformed, or too large for memory.
    """
    random = np.random.default_rng(0)
    drawn = []
    for text in shapes:
        if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text) or any(int(size) < 1 for size in text.split(",")):
            raise ValueError(f"--shape ({text}) must be whole numbers from 1 with commas between, such as 2,8,16")
        try:
            drawn.append(random.standard_normal(tuple(map(int, text.split(","))), dtype=np.float32))
        except (MemoryError, ValueError, OverflowError) as error:
            raise ValueError(f"--shape ({text}) is more than fits into memory") from error
    return Arguments(tuple(drawn))


@contextlib.contextmanager
def explained(shapes: Sequence[str] | None) -> Iterator[None]:
    """Extend the error of a side that received floats instead of whole numbers by the remedy."""
    try:
        yield
    except (ModuleFailedError, CannotPromoteError) as error:
        if not shapes or not _WANTS_WHOLE_NUMBERS.search(str(error)):
            raise
        how = "give whole numbers, such as token ids, by --inputs FILE.npz, or by a function example_inputs() beside a "
        raise ModuleFailedError(f"{error}; --shape draws floats; {how}factory") from error
