"""What a conversion writes beside its target: a digest per tensor, and what leads back to the source byte for byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .containers.base import CheckpointError, Reader

VERSION = 1
IN_FOLDER, BESIDE_FILE = "attn-bridge.json", ".attn-bridge.json"
KEPT_IN_FOLDER, KEPT_BESIDE_FILE = "attn-bridge.kept", ".attn-bridge.kept"
MOST_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest as it was read.

    Attributes:
        layout: layout of the checkpoint it stands beside.
        dtype: what its conversion cast to; "" is nothing.
        source: ``{"layout", "format"}`` of what it was made of.
        tensors: name -> ``{"dtype", "shape", "sha256"}``.
        restore: layout -> what leads back to it.
        kept: what its conversion dropped from the source, if anything.
    """

    layout: str
    dtype: str
    source: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    restore: dict[str, Any]
    kept: Reader | None = None


def places(target: Path, is_folder: bool) -> tuple[Path, Path]:
    """Return where a checkpoint's manifest is, and what was kept aside."""
    if is_folder:
        return target / IN_FOLDER, target / KEPT_IN_FOLDER
    return target.with_name(target.name + BESIDE_FILE), target.with_name(target.name + KEPT_BESIDE_FILE)


def text(
    layout: str, dtype: str, source: dict[str, str], tensors: dict[str, dict[str, Any]], restore: dict[str, Any]
) -> str:
    """Return the manifest as it is written: the same for the same source and options."""
    document = {
        "attn-bridge": VERSION,
        "layout": layout,
        "dtype": dtype,
        "source": source,
        "tensors": tensors,
        "restore": restore,
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def read(checkpoint: Path) -> Manifest | None:
    """Return the manifest beside a checkpoint, or None if there is none.

    Raises:
        CheckpointError: it is there, and malformed.
    """
    found = [pair for pair in (places(checkpoint, True), places(checkpoint, False)) if pair[0].is_file()]
    if not found:
        return None
    path, kept = found[0]
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("attn-bridge") != VERSION:
            raise ValueError(f"it is no manifest of version {VERSION}")
        fields = {name: document[name] for name in ("layout", "dtype", "source", "tensors", "restore")}
        kinds = {"layout": str, "dtype": str, "source": dict, "tensors": dict, "restore": dict}
        for name, kind in kinds.items():
            if not isinstance(fields[name], kind):
                raise ValueError(f"{name} is malformed")
        for one in fields["tensors"].values():
            if not isinstance(one, dict) or not isinstance(one.get("sha256"), str):
                raise ValueError("tensors is malformed")
        if not all(isinstance(one, dict) for one in fields["restore"].values()):
            raise ValueError("restore is malformed")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} can't be used: {reason}; remove it to go on without") from None
    reader = None
    if kept.is_file():
        from .containers.safetensors import SafetensorsReader

        reader = SafetensorsReader(kept)
    return Manifest(**fields, kept=reader)
