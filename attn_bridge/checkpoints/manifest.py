"""The manifest that a conversion writes next to its target: a digest per tensor, and the data to restore the source."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import blake3

from ..printable import printable
from ..whole_files import JsonObject
from .containers.base import CheckpointError, Reader
from .containers.remote import is_remote, is_there
from .containers.sources import inside, read_file

DIGEST = "blake3"
"""Key of a tensor's digest in a manifest."""


class Digest(Protocol):
    """A digest of a tensor's bytes, which it is fed piece by piece."""

    def update(self, data: memoryview | bytes, /) -> object:
        """Feed bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


new_digest: Callable[[], Digest] = blake3.blake3
"""Returns an empty digest: BLAKE3, twice as fast as SHA-256 with the processor's own instructions."""

VERSION = 1
IN_FOLDER, BESIDE_FILE = "attn-bridge.json", ".attn-bridge.json"
KEPT_IN_FOLDER, KEPT_BESIDE_FILE = "attn-bridge.kept", ".attn-bridge.kept"
MAX_BYTES = 1 << 28
"""Bytes of the largest manifest that is read."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest as read from its file.

    Attributes:
        layout: layout of the checkpoint that it describes.
        dtype: dtype of the conversion's cast; "" without a cast.
        source: ``{"layout", "format", "settings"}`` of the source and its conversion; ``stripped`` is the prefix
            removed from its names, ``dropped`` has pattern -> names of tensors left out, ``left_out`` reason -> names
            of tensors the layout leaves out; ``quantised`` for a dequantised source: name -> ``{"dtype", "shape",
            "blake3"}`` of the quantised tensors; ``adapter`` if merged: name -> digest of its config and of each of its
            tensors.
        tensors: name -> ``{"dtype", "shape", "blake3"}``.
        restore: layout -> the settings, files and metadata to restore it.
        kept: tensors that the conversion dropped from the source, if any.
        kept_digests: name of a kept tensor -> digest of its bytes.
        sizes: settings of the layout that a config.json would supply, of a checkpoint without one.
        config: text of the model's config.json, of a checkpoint without room for it; "" if unknown.
    """

    layout: str
    dtype: str
    source: JsonObject
    tensors: dict[str, JsonObject]
    restore: JsonObject
    kept: Reader | None = None
    kept_digests: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: dict[str, object] = dataclasses.field(default_factory=dict)
    config: str = ""


def places(target: Path, is_folder: bool) -> tuple[Path, Path]:
    """Return the paths of a checkpoint's manifest, and of the tensors kept aside."""
    if is_folder:
        return target / IN_FOLDER, target / KEPT_IN_FOLDER
    return target.with_name(target.name + BESIDE_FILE), target.with_name(target.name + KEPT_BESIDE_FILE)


def text(
    layout: str,
    dtype: str,
    source: JsonObject,
    tensors: dict[str, JsonObject],
    restore: JsonObject,
    kept_digests: dict[str, str],
    sizes: dict[str, object],
    config: str,
) -> str:
    """Return the text of a manifest file: equal for the same source and options."""
    document = {
        "attn-bridge": VERSION,
        "layout": layout,
        "dtype": dtype,
        "source": source,
        "tensors": tensors,
        "restore": restore,
        **({"kept": kept_digests} if kept_digests else {}),
        **({"sizes": sizes} if sizes else {}),
        **({"config": config} if config else {}),
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def _leads_back(entry: object) -> bool:
    """Whether a manifest's restore entry of a layout is well-formed."""
    if not isinstance(entry, dict):
        return False
    settings, files, metadata = (entry.get(name, {}) for name in ("settings", "files", "metadata"))
    if not all(isinstance(part, dict) for part in (settings, files, metadata)):
        return False
    per_file, index = (metadata.get(name, {}) if files else {} for name in ("files", "index"))
    lists = (entry.get(name, []) for name in ("dropped", "order"))
    return (
        all(type(value) in (int, str) for value in settings.values())
        and all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in lists)
        and all(isinstance(file, str) for file in files.values())
        and isinstance(per_file, dict)
        and all(isinstance(part, dict) for part in per_file.values())
        and isinstance(index, dict)
        and isinstance(entry.get("format", ""), str)
    )


def _files_of(checkpoint: Path) -> tuple[Path, Path] | None:
    """Return the paths of the manifest of a checkpoint, and of the tensors kept aside; None without a manifest."""
    checkpoint = checkpoint if checkpoint.name else checkpoint.absolute()  # "." has no name to put anything behind
    ways = (True, False) if checkpoint.name else (True,)
    return next((pair for pair in (places(checkpoint, way) for way in ways) if is_there(pair[0])), None)


def config_of(checkpoint: Path) -> tuple[Path, str] | None:
    """Return the manifest of a checkpoint, and the text of the config.json in it; None without.

    Raises:
        CheckpointError: the manifest can't be read.
    """
    files = _files_of(checkpoint)
    if files is None:
        return None
    try:
        status = files[0].stat()
    except OSError as error:
        raise CheckpointError(f"{files[0]} can't be used: {error.strerror}") from None
    text = _config_in(files[0], status.st_size, status.st_mtime_ns)
    return (files[0], text) if text else None


@functools.lru_cache(maxsize=2)
def _config_in(path: Path, size: int, changed: int) -> str:
    """Return the text of the config.json in a manifest of that state, which a conversion asks for several times."""
    del size, changed  # they tell files apart that had the same name
    config = _document(path).get("config", "")
    return config if isinstance(config, str) else ""


def _document(path: Path) -> JsonObject:
    """Return the JSON object of a manifest's file.

    Raises:
        CheckpointError: it is not a manifest.
    """
    try:
        document = json.loads(read_file(path, path.parent, MAX_BYTES).decode("utf-8"))
        if not isinstance(document, dict) or document.get("attn-bridge") != VERSION:
            raise ValueError(f"it is no manifest of version {VERSION}")
    except CheckpointError:  # the file itself is refused
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, error) from None
    return document


def _unusable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    advice = "" if is_remote(path) else "; remove it to go on without"
    return CheckpointError(f"{path} can't be used: {printable(reason)}{advice}")


def read(checkpoint: Path) -> Manifest | None:
    """Return the manifest next to a checkpoint, or None if missing.

    Raises:
        CheckpointError: the manifest is malformed.
    """
    files = _files_of(checkpoint)
    if files is None:
        return None
    path, kept = files
    document = _document(path)
    try:
        fields = {name: document[name] for name in ("layout", "dtype", "source", "tensors", "restore")}
        kinds = {"layout": str, "dtype": str, "source": dict, "tensors": dict, "restore": dict}
        for name, kind in kinds.items():
            if not isinstance(fields[name], kind):
                raise ValueError(f"{name} is malformed")
        if not isinstance(fields["source"].get("settings", {}), dict):
            raise ValueError("source is malformed")
        if not isinstance(fields["source"].get("stripped", ""), str):
            raise ValueError("source is malformed")
        if not isinstance(fields["source"].get("dropped", {}), dict):
            raise ValueError("source is malformed")
        merged = fields["source"].get("adapter", {})
        if not isinstance(merged, dict) or not all(isinstance(digest, str) for digest in merged.values()):
            raise ValueError("source is malformed")
        originals = fields["source"].get("quantised", {})
        if not isinstance(originals, dict):
            raise ValueError("source is malformed")
        for entry in (*fields["tensors"].values(), *originals.values()):
            if not isinstance(entry, dict) or not isinstance(entry.get(DIGEST), str):
                raise ValueError("tensors is malformed")
        if not all(_leads_back(one) for one in fields["restore"].values()):
            raise ValueError("restore is malformed")
        digests = document.get("kept", {})
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError("kept is malformed")
        sizes = document.get("sizes", {})
        if not isinstance(sizes, dict) or not all(type(value) in (int, str) for value in sizes.values()):
            raise ValueError("sizes is malformed")
        config = document.get("config", "")
        if not isinstance(config, str):
            raise ValueError("config is malformed")
    except (ValueError, KeyError) as error:
        raise _unusable(path, error) from None
    for file in {file for one in fields["restore"].values() for file in one.get("files", {}).values() if file}:
        inside(path.parent, file, path)
    reader = None
    if is_there(kept):
        from .containers.safetensors import SafetensorsReader

        reader = SafetensorsReader(kept, kept.parent)
    return Manifest(**fields, kept=reader, kept_digests=digests, sizes=sizes, config=config)


def of(reader: Reader, path: Path) -> Manifest | None:
    """Return the manifest next to an open checkpoint, or next to the file that its path leads to.

    Raises:
        CheckpointError: the manifest is malformed.
    """
    return read(path) or (read(reader.path) if reader.path != path else None)
