"""A model that llama-gguf-split cut into files ``NAME-00001-of-00003.gguf``: which they are; all must be there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....printable import printable
from ..files import bad

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST = 4096
"""Files of a model at most."""

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def is_part(values: Mapping[str, object]) -> bool:
    """Whether a header is that of a file of several."""
    return isinstance(values.get(COUNT), int) and values[COUNT] != 1


def paths_of(path: Path, values: Mapping[str, Any]) -> list[Path]:
    """Return the files of a model, by the name of one of them.

    Raises:
        CheckpointError: its name is not that of a part, or a file is missing.
    """
    hit = _NAME.fullmatch(path.name)
    count = values[COUNT]
    if hit is None or int(hit["count"]) != count or not 1 < count <= MOST:
        raise bad(path, f"is one of {printable(count, 40)} files of a model ({COUNT}), whose names must be "
                  f"NAME-00001-of-{count % 100_000:05}.gguf and so on")  # fmt: skip
    paths = [path.with_name(f"{hit['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None:
        raise bad(path, f"is one of {count} files of a model, of which {printable(missing.name)} is missing")
    return paths


def check(path: Path, number: int, count: int, values: Mapping[str, object]) -> None:
    """Refuse a file whose keys contradict the part number in its name.

    Raises:
        CheckpointError: its keys contradict its name.
    """
    if (values.get(NUMBER), values.get(COUNT)) != (number, count):
        raise bad(path, f"{NUMBER} ({printable(values.get(NUMBER), 40)}) and {COUNT} "
                  f"({printable(values.get(COUNT), 40)}) must be {number} and {count}, by its name")  # fmt: skip


def check_count(path: Path, values: Mapping[str, object], count: int) -> None:
    """Refuse files whose number of tensors differs from the first header's.

    Raises:
        CheckpointError: more or fewer tensors.
    """
    if values.get(TENSORS, count) != count:
        raise bad(path, f"{TENSORS} is {printable(values[TENSORS], 40)}; the files have {count} tensors")


def first_of(names: Sequence[str]) -> str | None:
    """Return the first file of the one model that all names of files are parts of; None where they are not."""
    hits = [_NAME.fullmatch(name) for name in names]
    if not names or len({(one["stem"], one["count"]) if one else None for one in hits}) != 1 or hits[0] is None:
        return None
    return min(names)
