"""Families outside the package: a file that ``attn-bridge derive`` wrote, alone or in the folder of a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ...printable import printable
from ...specs.decoder_model import DecoderConfig
from ..attention_layer import AttentionLayer
from ..layout import Layout
from ..reading.decoders import WrittenKeys
from ..reading.model_config import ConfigFile
from . import known
from .description import Description, loads
from .family import Family, using
from .reading import DerivedFamily

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
        return StoredFamily(description, known.own_layout(description), path)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{printable(str(path), 400)}: {printable(str(error), 400)}") from None


class StoredFamily(DerivedFamily):
    """A family of a user's file, which may lack a field that its configs need; that error names the file.

    Args:
        description: the data.
        layout: the table of its tensors.
        path: the file.
    """

    def __init__(self, description: Description, layout: Layout, path: Path):
        super().__init__(description, layout)
        self.path = path

    def attention(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return the attention of a layer."""
        with self._complete():
            return super().attention(config, layer)

    def model(self, config: ConfigFile, names: Collection[str] = ()) -> DecoderConfig:
        """Return a whole decoder."""
        with self._complete():
            return super().model(config, names)

    def write(self, config: DecoderConfig) -> WrittenKeys:
        """Return the keys of a config."""
        with self._complete():
            return super().write(config)

    @contextlib.contextmanager
    def _complete(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, AttributeError, ZeroDivisionError) as error:
            path = printable(str(self.path), 400)
            raise ValueError(f"{path} lacks {printable(str(error))} of the family") from error


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
