"""Containers of weights by name of format: `open_reader` and `make_writer`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...printable import printable
from . import mistaken
from .base import (
    DCP_METADATA,
    ORBAX_ITEMS,
    ORBAX_METADATA,
    ORBAX_UNFINISHED,
    CheckpointError,
    Reader,
    TensorInfo,
    Writer,
)
from .files import bad, listed
from .remote import is_remote, to_path
from .sources import follow, is_folder, numbers_of, open_file

__all__ = [
    "READERS",
    "WRITERS",
    "CheckpointError",
    "Reader",
    "TensorInfo",
    "Writer",
    "check_shared",
    "format_of",
    "make_writer",
    "open_reader",
    "with_settings",
    "writer_class",
]

_READERS = {
    "safetensors": ("safetensors", "open_safetensors"),
    "torch": ("dcp.opening", "open_torch"),
    "npz": ("npz", "open_npz"),
    "msgpack": ("msgpack.reader", "open_msgpack"),
    "orbax": ("orbax.reader", "OrbaxReader"),
    "dcp": ("dcp.reader", "DcpReader"),
    "gguf": ("gguf.reader", "GgufReader"),
    "pickle": ("pickles.arrays", "PickledReader"),
    "equinox": ("npz", "EquinoxReader"),
    "keras": ("keras.reader", "KerasReader"),
}
"""Name of a format -> module and name of its reader."""

_WRITERS = {
    "safetensors": ("safetensors", "SafetensorsWriter"),
    "torch": ("torch_file", "TorchWriter"),
    "npz": ("npz", "NpzWriter"),
    "msgpack": ("msgpack.writer", "MsgpackWriter"),
    "orbax": ("orbax.writer", "OrbaxWriter"),
    "dcp": ("dcp.writer", "DcpWriter"),
}
"""Name of a format -> module and name of its writer."""


_VARIANTS = {"orbax+ocdbt": ("orbax.writer", "OcdbtWriter")}
"""Format with a setting's suffix -> module and name of its writer."""


def _load(home: tuple[str, str]) -> Any:
    """Import a reader or writer on first use; importing all formats takes as long as a small conversion."""
    module, name = home
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __getattr__(name: str) -> Any:
    """Return `READERS` or `WRITERS`: name of a format -> its reader, or its writer."""
    homes = {"READERS": _READERS, "WRITERS": _WRITERS}.get(name)
    if homes is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {format: _load(home) for format, home in homes.items()}


ENDINGS = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".npz": "npz",
    ".msgpack": "msgpack",
    ".orbax": "orbax",
    ".dcp": "dcp",
}
"""Extension -> format."""

TRAINERS = {
    ".ckpt": "torch",
    ".gguf": "gguf",
    ".pkl": "pickle",
    ".pickle": "pickle",
    ".eqx": "equinox",
    **dict.fromkeys((".keras", ".h5", ".hdf5"), "keras"),
}
"""Further extension -> format of files that are read, but not written by it."""

SUFFIXES = {**ENDINGS, **TRAINERS}
"""Extension -> format of files that are read."""

UNFINISHED = "attn-bridge.unfinished"
"""Marker file in a folder of a store while its files are created; a folder that contains it is not yet a checkpoint."""

FOLDERS = ("orbax", "dcp")
"""Formats that are folders, so that no extension identifies them."""

INDEXES = {".safetensors.index.json": "safetensors", ".bin.index.json": "torch", ".weights.json": "keras"}
"""Ending of an index -> format."""


def open_reader(path: Path, format: str | None = None, *, step: int | None = None, item: str | None = None) -> Reader:
    """Open a checkpoint; without a format, its extension or the contents of its folder decide.

    Args:
        path: file or folder.
        format: name of the container.
        step: step of an Orbax run; None is the newest.
        item: item of a step; None is the item that contains a model.

    Raises:
        CheckpointError: the checkpoint is missing, of an unknown format, or malformed.
    """
    path = path if is_remote(path) else to_path(path)
    format = format.partition("+")[0] if format in _VARIANTS else format
    try:
        return _reader_of(path, format, step, item)
    except OSError as error:
        raise bad(path, f"can't be read: {printable(error.strerror or error)}") from None
    except RecursionError:
        raise bad(path, "is nested too deeply") from None
    except MemoryError:
        raise bad(path, "takes more memory than there is") from None


def _reader_of(path: Path, format: str | None, step: int | None, item: str | None) -> Reader:
    if _is_pattern(path) and format in (None, "torch"):
        matching: Reader = _load(("dcp.opening", "open_matching"))(path)
        return matching
    if "\0" in str(path) or not path.exists():
        looks_like_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists()
        if looks_like_hub:
            raise bad(path, f"does not exist; if it is an id of the hub, give hf://{path}")
        is_link = "\0" not in str(path) and not is_remote(path) and path.is_symlink()
        raise bad(path, "is a link that leads nowhere or to itself" if is_link else "does not exist")
    if path.name == DCP_METADATA and format in (None, "dcp"):
        path, format = path.parent, "dcp"
    if is_remote(path) and path.is_dir() and (path / UNFINISHED).is_file():
        raise bad(path, f"is being written, or was never finished: it has {UNFINISHED}")
    if ORBAX_UNFINISHED in path.name and format in (None, "orbax") and path.is_dir():
        raise bad(
            path, "is an unfinished save of Orbax, which renames a folder when all of it is there; read another step"
        )
    chosen: Mapping[str, int | str] = {}
    note, kind, run = "", None, path
    if format in (None, "orbax") and path.is_dir():
        kind = _kind_of(path)
        if kind is None or step is not None or item is not None:
            before, (path, chosen, note) = path, follow(path, step, item)
            kind = kind if path == before else _kind_of(path)
    elif step is not None or item is not None:
        raise bad(path, "is no folder of Orbax, whose steps and items --step and --item choose")
    source = path
    is_newest = step is None and "step" in chosen
    if format is None and path.is_dir():
        if kind is None:
            raise bad(path, _undecided(path) + (_older(run, chosen) if is_newest else ""))
        others = _others(path, *kind)
        if others:
            files, model = listed(list(map(printable, others)), 3), kind[1] if kind[0] == path else kind[0].name
            note = "; ".join(
                [*filter(None, [note]), f"left out, as the model is read from {printable(model)}: {files}"]
            )
        path, format = kind
    elif format is None:
        format = _format_of_index(path.name) or SUFFIXES.get(path.suffix)
        if path.suffix in mistaken.INSTEAD:
            raise bad(path, mistaken.INSTEAD[path.suffix])
        if format is None or format in FOLDERS:
            by_bytes = _kind_by_bytes(path)
            remedy = f"it {by_bytes}" if by_bytes else f"name one of {', '.join(_READERS)} (--source-format)"
            raise bad(path, f"its extension says no format; {remedy}")
    if format not in _READERS:
        raise CheckpointError(f"the format {printable(format)} is unknown; known are {', '.join(_READERS)}")
    if path.is_dir() and format in ("gguf", "pickle", "equinox", "keras"):
        raise bad(path, f"is a folder, which no {format} is")
    open_one = _load(_READERS[format])
    try:
        reader: Reader = open_one(path) if path == source else open_one(path, source)
    except CheckpointError as error:
        older = _older(run, chosen) if is_newest else ""
        if not older:
            raise
        raise CheckpointError(f"{error}{older}") from None
    reader.chosen = chosen
    reader.above = tuple(folder for folder in reader.path.parents if folder.is_relative_to(run))
    reader.notes = (*reader.notes, note) if note else reader.notes
    return reader


def _is_pattern(path: Path) -> bool:
    """Return whether a name is a pattern for the files of several ranks; a file may have a star in its own name."""
    is_torch = SUFFIXES.get(path.suffix) == "torch"
    is_one = is_torch and not is_remote(path) and "*" in path.name and "\0" not in str(path)
    return is_one and is_folder(path.parent) and not path.exists()


def _format_of_index(name: str) -> str:
    """Return the format of an index, maybe of a variant (``model.safetensors.index.fp16.json``); "" for other names."""
    usual = re.sub(r"\.index\.[\w-]+\.json$", ".index.json", name)
    return next((format for ending, format in INDEXES.items() if usual.endswith(ending)), "")


def is_known(path: Path) -> bool:
    """Return whether a path alone determines the container: a folder, an index, or a file with a known extension."""
    return is_folder(path) or bool(_format_of_index(path.name)) or path.name.endswith(tuple(SUFFIXES))


UNDECIDED = "does not determine which checkpoint is meant; give one of its files: "

USUAL = re.compile(r"(open_clip_)?(diffusion_pytorch_|pytorch_|flax_)?model\b.*|consolidated\b.*")
"""Names of the files of a model; other names may be those of a part of it, of an average or of an adapter."""

PART = re.compile(r"(-[0-9]{5}-of-[0-9]{5}|_[0-9]{5})\.")
"""The number in the name of a part of a model, as GGUF and Keras have it."""


def _weights_among(names: Iterable[str]) -> dict[str, str]:
    """Return the names of files of weights, and of their indexes -> their format.

    An index of a format without a file counts only where there is no file of any: some download one format alone.
    """
    candidates = [name for name in names if not name.startswith(".") and not mistaken.STATES.fullmatch(name)]
    weights = {name: SUFFIXES[suffix] for name in candidates if (suffix := Path(name).suffix) in SUFFIXES}
    formats = set(weights.values())
    indexes = {name: format for name in candidates if (format := _format_of_index(name))}
    return weights | {name: format for name, format in indexes.items() if format in formats or not formats}


def _of_model(names: Sequence[str]) -> list[str]:
    """Return names of files without those of weights in other containers than the files with a model's usual names."""
    weights = _weights_among(names)
    usual = {format for name, format in weights.items() if USUAL.fullmatch(name)}
    return [name for name in names if not usual or weights.get(name) in {None, *usual}]


def _others(folder: Path, path: Path, format: str) -> list[str]:
    """Return a folder's files of weights that are not read, as they are in other containers or in other files.

    Args:
        folder: the folder.
        path: the folder, or the file of it that is read.
        format: the container that is read.

    Raises:
        CheckpointError: the files that are read may be another part of the model: they do not have the usual names of
            a model's files, no index names them, and not all others have a name that differs by its extension alone.
    """
    from .shards import stem_of

    weights = _weights_among(one.name for one in folder.iterdir())
    own = [name for name, other in weights.items() if other == format]
    if path != folder:  # one file, and the numbered parts of its model
        parts = [name for name in own if PART.search(name) and stem_of(name) == stem_of(path.name)]
        own = [path.name, *(name for name in parts if name != path.name)]
    others = sorted(name for name in weights if name not in own and not _format_of_index(name))
    is_whole = any(USUAL.fullmatch(name) or _format_of_index(name) for name in own)
    if format in FOLDERS or is_whole or {*map(stem_of, others)} <= {*map(stem_of, own)}:
        return others
    raise bad(folder, UNDECIDED + listed(list(map(printable, sorted([*own, *others]))), 20))


def _older(run: Path, chosen: Mapping[str, int | str]) -> str:
    """Return a hint at the previous step, for an error about the newest step of a run; "" if no other step exists."""
    older = [number for number in numbers_of(run) if number != chosen["step"]]
    return f"; it is the newest step of its run, --step {max(older)} reads the one before" if older else ""


def _undecided(folder: Path) -> str:
    """Return why a folder is not read: it contains several checkpoints, or none."""
    weights = _weights_among(below.name for below in folder.iterdir())
    names = sorted(name for name in weights if not _format_of_index(name))
    if names:
        return UNDECIDED + listed(list(map(printable, names)), 20)
    folders = [] if is_remote(folder) else _below(folder)
    arrays = [] if is_remote(folder) else [one.name for one in folder.iterdir() if _is_zarr(one)]
    if arrays:
        return f"{mistaken.ZARR} ({printable(min(arrays))} is one of {len(arrays)})"
    if any(name.startswith("zero/") for name in folders):
        return "is a universal checkpoint of DeepSpeed, a folder for each tensor; convert the one that it was made of"
    run = mistaken.run_of((*(name.rpartition("/")[2] for name in folders), *(child.name for child in folder.iterdir())))
    if run:
        return run
    if folders:
        return f"holds checkpoints in its folders; give one of them: {listed(folders, 20)}"
    for child in [] if is_remote(folder) else sorted(folder.iterdir())[:LOOKED_AT]:
        if child.suffix in mistaken.INSTEAD:
            return f"has no file that is read; its {printable(child.name)} {mistaken.INSTEAD[child.suffix]}"
        kind = _kind_by_bytes(child) if child.suffix not in SUFFIXES and child.is_file() else ""
        if kind:
            return f"has no file with a known extension; give the file {printable(child.name)}, which {kind}"
    return f"has no checkpoint of a known format in it; known are {', '.join(_READERS)}"


def _is_zarr(path: Path) -> bool:
    """Return whether a folder is an array of Zarr 2 or 3."""
    return any((path / name).is_file() for name in (".zarray", "zarr.json"))


LOOKED_AT, DEPTH = 200, 3
"""Folders and files that are looked at for checkpoints, and how deep below the folder that the user names."""


def _below(folder: Path) -> list[str]:
    """Return the names of folders with a checkpoint, the highest in each branch, below a folder without one."""
    names: list[str] = []
    level = [folder]
    looked_at = 0
    for _ in range(DEPTH):
        lower = sorted(path for above in level for path in above.iterdir() if path.is_dir() and not path.is_symlink())
        level = []
        for path in lower[: max(0, LOOKED_AT - looked_at)]:
            if _kind_of(path) is not None:
                names.append(printable(path.relative_to(folder).as_posix()))
            else:
                level.append(path)
        looked_at += len(lower)
    return names


def _kind_by_bytes(path: Path) -> str:
    """Return the kind of a file without a known extension, and a remedy; "" if unknown."""
    file = open_file(path, None)
    try:
        return mistaken.unnamed(file)
    finally:
        file.close()


def _kind_of(folder: Path) -> tuple[Path, str] | None:
    """Return the folder, or the single checkpoint file in it, and its format; None if the format is unknown."""
    names = _of_model(sorted(one.name for one in folder.iterdir()))
    weights = _weights_among(names)
    if "safetensors" in weights.values():
        return folder, "safetensors"
    if ORBAX_METADATA in names or any((folder / one / ORBAX_METADATA).is_file() for one in ORBAX_ITEMS):
        return folder, "orbax"
    if DCP_METADATA in names:
        return folder, "dcp"
    if any(weights.get(name) == "torch" and not name.endswith(".ckpt") for name in names):
        return folder, "torch"
    single = [name for name in weights if name.endswith((".npz", ".msgpack", ".gguf"))]
    if len(single) > 1:
        from .shards import is_cut, is_numbered

        formats = {SUFFIXES[Path(name).suffix] for name in single}
        if formats <= {"npz", "msgpack"} and len(formats) == 1 and is_cut(single):
            return folder, formats.pop()
        single = single[:1] if formats == {"gguf"} and is_numbered(single) else single
    single = single or [name for name in weights if name.endswith(".keras")] or _keras_weights(list(weights))
    if len(single) == 1:
        return folder / single[0], {**SUFFIXES, ".json": "keras"}[Path(single[0]).suffix]
    return None


def _keras_weights(names: Sequence[str]) -> list[str]:
    """Return the file with the weights of a model among those of a folder, such as a preset of KerasHub."""
    for usual in ("model.weights.json", "model.weights.h5"):
        if usual in names:
            return [usual]
    return [name for name in names if name.endswith(".weights.json")] or [
        name for name in names if name.endswith((".h5", ".hdf5"))
    ]


def format_of(path: Path, format: str | None = None) -> str:
    """Return the format to write to a path: the one given, or that of its extension; safetensors without an extension.

    A suffix that does not start with a letter, as in ``Llama-3.2-1B``, does not count as an extension.

    Raises:
        CheckpointError: the format or the extension is unknown.
    """
    if format is not None:
        if format not in _WRITERS and format not in _VARIANTS:
            raise CheckpointError(f"the format {printable(format)} is unknown; known are {', '.join(_WRITERS)}")
        return format
    is_extension = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix)
    if not is_extension or is_folder(path):
        return ENDINGS.get(path.suffix, "safetensors")
    if path.suffix in TRAINERS and TRAINERS[path.suffix] not in _WRITERS:
        read = TRAINERS[path.suffix]
        how = "; llama.cpp's convert_hf_to_gguf.py makes it of a folder of an hf- layout" if read == "gguf" else ""
        raise bad(path, f"{read} is read, not written{how}; written are {', '.join(_WRITERS)}")
    if path.suffix not in ENDINGS:
        raise bad(path, f"its extension says no format; name one of {', '.join(_WRITERS)} (--format)")
    return ENDINGS[path.suffix]


def with_settings(format: str, settings: Mapping[str, object] | None) -> tuple[str, dict[str, object]]:
    """Return a format with its variant from the settings, and the settings that are not the container's.

    Raises:
        CheckpointError: a setting of the container is neither 0 nor 1.
    """
    left = dict(settings or {})
    if format != "orbax" or "ocdbt" not in left:
        return format, left
    value = left.pop("ocdbt")
    if value not in (0, 1):
        raise CheckpointError(f"--set ocdbt={printable(value)}: must be 0 or 1")
    return ("orbax+ocdbt" if value else format), left


def make_writer(
    format: str, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool = False
) -> Writer:
    """Begin to write a checkpoint, or with `is_share` a part of one that several writers write together.

    Raises:
        CheckpointError: the format is unknown, can't hold one of the tensors, or does not support several writers.
    """
    writer = writer_class(format_of(path, format))
    if not is_share:
        return writer(path, tensors, metadata)
    check_shared(format)
    return writer(path, tensors, metadata, is_share=True)


def check_shared(format: str) -> None:
    """Refuse a format that several writers can't write at once."""
    if not writer_class(format).random_access:
        shared = ", ".join(name for name in _WRITERS if writer_class(name).random_access)
        raise CheckpointError(
            f"a file of {format} is written from its beginning to its end, by one worker; several can write {shared}"
        )


def writer_class(format: str) -> type[Writer]:
    """Return the writer of a known format."""
    writer_type: type[Writer] = _load({**_WRITERS, **_VARIANTS}[format])
    return writer_type
