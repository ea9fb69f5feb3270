"""What a conversion writes beside its target: a digest per tensor, and what leads back to the source byte for byte."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import blake3

from ..printable import printable
from .containers.base import CheckpointError, Reader
from .containers.remote import is_remote, is_there
from .containers.sources import inside, read_file

DIGEST = "blake3"
"""What a manifest calls a digest."""


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


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest as it was read.

    Attributes:
        layout: layout of the checkpoint it stands beside.
        dtype: what its conversion cast to; "" is nothing.
        source: ``{"layout", "format", "settings"}`` of what it was made of, and how; ``stripped`` is the prefix that
            its names lost, ``dropped`` has pattern -> names of what was left out, ``left_out`` reason -> names of what
            the layout leaves out; ``quantised`` where it was dequantised: name -> ``{"dtype", "shape", "blake3"}`` of
            what was read; ``adapter`` where one was merged: name -> digest of its config and of each of its tensors.
        tensors: name -> ``{"dtype", "shape", "blake3"}``.
        restore: layout -> what leads back to it.
        kept: what its conversion dropped from the source, if anything.
        kept_digests: name there -> digest of its bytes.
    """

    layout: str
    dtype: str
    source: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    restore: dict[str, Any]
    kept: Reader | None = None
    kept_digests: dict[str, str] = dataclasses.field(default_factory=dict)


def places(target: Path, is_folder: bool) -> tuple[Path, Path]:
    """Return where a checkpoint's manifest is, and what was kept aside."""
    if is_folder:
        return target / IN_FOLDER, target / KEPT_IN_FOLDER
    return target.with_name(target.name + BESIDE_FILE), target.with_name(target.name + KEPT_BESIDE_FILE)


def text(
    layout: str,
    dtype: str,
    source: dict[str, Any],
    tensors: dict[str, dict[str, Any]],
    restore: dict[str, Any],
    kept_digests: dict[str, str],
) -> str:
    """Return the manifest as it is written: the same for the same source and options."""
    document = {
        "attn-bridge": VERSION,
        "layout": layout,
        "dtype": dtype,
        "source": source,
        "tensors": tensors,
        "restore": restore,
        **({"kept": kept_digests} if kept_digests else {}),
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def _leads_back(one: Any) -> bool:
    """Whether what a manifest holds of a layout is what a conversion writes."""
    if not isinstance(one, dict):
        return False
    settings, files, metadata = (one.get(name, {}) for name in ("settings", "files", "metadata"))
    if not all(isinstance(part, dict) for part in (settings, files, metadata)):
        return False
    per_file, index = (metadata.get(name, {}) if files else {} for name in ("files", "index"))
    lists = (one.get(name, []) for name in ("dropped", "order"))
    return (
        all(type(value) in (int, str) for value in settings.values())
        and all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in lists)
        and all(isinstance(file, str) for file in files.values())
        and isinstance(per_file, dict)
        and all(isinstance(part, dict) for part in per_file.values())
        and isinstance(index, dict)
        and isinstance(one.get("format", ""), str)
    )


def read(checkpoint: Path) -> Manifest | None:
    """Return the manifest beside a checkpoint, or None if there is none.

    Raises:
        CheckpointError: it is there, and malformed.
    """
    checkpoint = checkpoint if checkpoint.name else checkpoint.absolute()  # "." has no name to put anything behind
    ways = (True, False) if checkpoint.name else (True,)
    found = [pair for pair in (places(checkpoint, way) for way in ways) if is_there(pair[0])]
    if not found:
        return None
    path, kept = found[0]
    try:
        document = json.loads(read_file(path, path.parent, MAX_BYTES).decode("utf-8"))
        if not isinstance(document, dict) or document.get("attn-bridge") != VERSION:
            raise ValueError(f"it is no manifest of version {VERSION}")
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
        for one in (*fields["tensors"].values(), *originals.values()):
            if not isinstance(one, dict) or not isinstance(one.get(DIGEST), str):
                raise ValueError("tensors is malformed")
        if not all(_leads_back(one) for one in fields["restore"].values()):
            raise ValueError("restore is malformed")
        digests = document.get("kept", {})
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError("kept is malformed")
    except CheckpointError:  # the file itself is refused
        raise
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        advice = "" if is_remote(path) else "; remove it to go on without"
        raise CheckpointError(f"{path} can't be used: {printable(reason)}{advice}") from None
    for file in {file for one in fields["restore"].values() for file in one.get("files", {}).values() if file}:
        inside(path.parent, file, path)
    reader = None
    if is_there(kept):
        from .containers.safetensors import SafetensorsReader

        reader = SafetensorsReader(kept, kept.parent)
    return Manifest(**fields, kept=reader, kept_digests=digests)


def of(reader: Reader, path: Path) -> Manifest | None:
    """Return the manifest beside an open checkpoint, also where the path it was opened by only leads to it.

    Raises:
        CheckpointError: it is there, and malformed.
    """
    return read(path) or (read(reader.path) if reader.path != path else None)
