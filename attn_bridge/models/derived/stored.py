"""Families outside the package: a file that ``attn-bridge derive`` wrote, alone or in the folder of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ParamSpec, TypeVar

from ...printable import printable
from ..family import Family, using
from .description import loads
from .known import family_of
from .reading import DerivedFamily

P = ParamSpec("P")
T = TypeVar("T")

FILE = "attn-bridge-family.toml"
"""Name of the file in a model's folder."""

LIMIT = 1 << 20
"""Maximum size of a file in bytes; the largest of the package has 20 kB."""


def read_family(path: Path) -> DerivedFamily:
    """Return the family of a file.

    Raises:
        ValueError: it can't be read, or does not describe a family; the message names the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
        if len(content) > LIMIT:
            raise ValueError(f"it has more than {LIMIT} bytes")
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{printable(str(path), 400)} can't be read as a family: {printable(str(reason))}") from None
    description = loads(text, printable(str(path), 400))
    try:
        family = family_of(description)
        assert family.decoder is not None, "families of data are whole decoders"
        assert family.write is not None, "families of data are whole decoders"
        return dataclasses.replace(
            family,
            read=_guarded(family.read, path),
            decoder=_guarded(family.decoder, path),
            write=_guarded(family.write, path),
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{printable(str(path), 400)}: {printable(str(error), 400)}") from None


def _guarded(reader: Callable[P, T], path: Path) -> Callable[P, T]:
    """Return a reader of configs that refuses data without a field that it needs, as a file of a user's may be.

    Raises:
        ValueError: the message names the file.
    """

    @functools.wraps(reader)
    def read(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return reader(*arguments, **options)
        except (LookupError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"{printable(str(path), 400)} lacks {printable(str(error))} of the family") from error

    return read


def beside(folder: Path) -> DerivedFamily | None:
    """Return the family whose file is in a folder; None where there is none, or no folder.

    Raises:
        ValueError: the file does not describe a family.
    """
    path = folder / FILE
    with contextlib.suppress(OSError):
        if path.is_file():
            return read_family(path)
    return None


def used(folder: Path, family: Family | str | os.PathLike[str] | None = None) -> AbstractContextManager[None]:
    """Return a context in which models of a folder are read by a family.

    Args:
        folder: of the model, whose own file is read where `family` is None.
        family: a family, or the path of its file.

    Raises:
        TypeError: `family` is something else.
        ValueError: the file does not describe a family.
    """
    if family is None:
        return using(beside(folder))
    if isinstance(family, str | os.PathLike):
        return using(read_family(Path(family)))
    if not isinstance(family, Family):
        raise TypeError(f"family must be a Family or the path of its file, got {type(family).__name__}")
    return using(family)
