"""Containers of weights by name of format: `open_reader` and `make_writer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import CheckpointError, Reader, TensorInfo, Writer, printable
from .files import bad
from .msgpack import MsgpackReader, MsgpackWriter
from .npz import NpzReader, NpzWriter
from .orbax import METADATA as ORBAX_METADATA
from .orbax import OrbaxReader, OrbaxWriter
from .safetensors import SafetensorsWriter, open_safetensors
from .torch_file import TorchWriter, open_torch

__all__ = [
    "READERS",
    "WRITERS",
    "CheckpointError",
    "Reader",
    "TensorInfo",
    "Writer",
    "format_of",
    "make_writer",
    "open_reader",
]

READERS: dict[str, Callable[[Path], Reader]] = {
    "safetensors": open_safetensors,
    "torch": open_torch,
    "npz": NpzReader,
    "msgpack": MsgpackReader,
    "orbax": OrbaxReader,
}
"""Name of a format -> what opens a checkpoint of it."""

WRITERS: dict[str, type[Writer]] = {
    "safetensors": SafetensorsWriter,
    "torch": TorchWriter,
    "npz": NpzWriter,
    "msgpack": MsgpackWriter,
    "orbax": OrbaxWriter,
}
"""Name of a format -> its writer."""

ENDINGS = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".npz": "npz",
    ".msgpack": "msgpack",
    ".orbax": "orbax",
}
"""Extension -> format."""

INDEXES = {".safetensors.index.json": "safetensors", ".bin.index.json": "torch"}
"""Ending of an index -> format."""

DCP = (
    "is a distributed checkpoint of torch: its .metadata is a pickle that runs code when it is loaded, which is "
    "refused; where you trust it, make it one file: python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
)


def open_reader(path: Path, format: str | None = None) -> Reader:
    """Open a checkpoint; without a format, its extension or what is in its folder decides.

    Raises:
        CheckpointError: there is none, none of a known format, or a malformed one.
    """
    path = Path(path)
    try:
        return _reader_of(path, format)
    except OSError as error:
        raise bad(path, f"can't be read: {printable(error.strerror or error)}") from None
    except RecursionError:
        raise bad(path, "is nested too deeply") from None
    except MemoryError:
        raise bad(path, "takes more memory than there is") from None


def _reader_of(path: Path, format: str | None) -> Reader:
    if "\0" in str(path) or not path.exists():
        raise bad(path, "does not exist")
    if path.name == ".metadata":
        raise bad(path.parent, DCP)
    if format is None and path.is_dir():
        path, format = _look_into(path)
    elif format is None:
        indexes = [name for ending, name in INDEXES.items() if path.name.endswith(ending)]
        format = indexes[0] if indexes else ENDINGS.get(path.suffix)
        if format is None or format == "orbax":
            raise bad(path, f"its extension says no format; name one of {', '.join(READERS)}")
    elif format == "torch" and (path / ".metadata").exists():
        raise bad(path, DCP)
    if format not in READERS:
        raise CheckpointError(f"the format {printable(format)} is unknown; known are {', '.join(READERS)}")
    if path.is_dir() and format in ("npz", "msgpack"):
        raise bad(path, f"is a folder, which no {format} is")
    return READERS[format](path)


def _look_into(folder: Path) -> tuple[Path, str]:
    """Return the format of a folder, and the folder or the one file in it that is meant."""
    names = sorted(one.name for one in folder.iterdir())
    for ending in (".safetensors", ".safetensors.index.json"):
        if any(name.endswith(ending) and not name.startswith(".") for name in names):
            return folder, "safetensors"
    if ORBAX_METADATA in names or (folder / "default" / ORBAX_METADATA).is_file():
        return folder, "orbax"
    if ".metadata" in names:
        raise bad(folder, DCP)
    if any(name.endswith((".bin", ".bin.index.json", ".pt", ".pth")) for name in names):
        return folder, "torch"
    single = [name for name in names if name.endswith((".npz", ".msgpack"))]
    if len(single) == 1:
        return folder / single[0], ENDINGS[Path(single[0]).suffix]
    raise bad(folder, f"has no checkpoint of a known format in it; known are {', '.join(READERS)}")


def format_of(path: Path, format: str | None = None) -> str:
    """Return the format that is written to a path: the one named, or the one of its extension; none is safetensors.

    What follows a dot and begins with no letter, as in ``Llama-3.2-1B``, is no extension.

    Raises:
        CheckpointError: the format is unknown, or the extension says none.
    """
    if format is not None:
        if format not in WRITERS:
            raise CheckpointError(f"the format {printable(format)} is unknown; known are {', '.join(WRITERS)}")
        return format
    is_extension = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix)
    if not is_extension or path.is_dir():
        return ENDINGS.get(path.suffix, "safetensors")
    if path.suffix not in ENDINGS:
        raise bad(path, f"its extension says no format; name one of {', '.join(WRITERS)}")
    return ENDINGS[path.suffix]


def make_writer(format: str, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any]) -> Writer:
    """Begin to write a checkpoint.

    Raises:
        CheckpointError: the format is unknown, or can't hold one of the tensors.
    """
    return WRITERS[format_of(path, format)](path, tensors, metadata)
