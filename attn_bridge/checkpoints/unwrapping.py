"""Parts that wrappers of torch add to names (``_orig_mod``, ``module``), which are removed wherever they stand."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping

from ..models import layouts
from ..models.beginnings import MODULE, WRAPPERS
from ..printable import printable
from .containers.base import CheckpointError, Reader
from .wrapped import Renamed


def unwrap(reader: Reader) -> tuple[Reader, dict[str, int]]:
    """Return a source by names without wrappers, and how many names lost which part.

    Raises:
        CheckpointError: two names are one without them.
    """
    bare = without_wrappers(reader.tensors)
    counts = counted(bare)
    if not counts:
        return reader, {}
    names: dict[str, str] = {}
    for name, own in bare.items():
        if own in names:
            raise CheckpointError(
                f"{printable(names[own])} and {printable(name)} of {printable(str(reader.path), 400)} are one name, "
                f"{printable(own)}, without wrappers; --strip takes one of them, --drop leaves one out"
            )
        names[own] = name
    return Renamed(reader, names), counts


def counted(bare: Mapping[str, str]) -> dict[str, int]:
    """Return how many names lost which part.

    Args:
        bare: name -> the name without wrappers.
    """
    lost: collections.Counter[str] = collections.Counter()
    for name, own in bare.items():
        if name != own:
            lost.update((collections.Counter(name.split(".")) - collections.Counter(own.split("."))).keys())
    return dict(lost)


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return name -> the name without wrappers.

    ``module`` may be a part of a user's own model. It is removed in front of all names; and further inside where it is
    all that its parent has, if only so the names are those of a whole model of some library.
    """
    if not any(
        "module" in name or "_mod" in name for name in names
    ):  # as all wrappers are called; most files have none
        return dict(zip(names, names, strict=True))
    bare = {name: _without(name.split("."), WRAPPERS) for name in names}
    while bare and all(own[0] == MODULE and len(own) > 1 for own in bare.values()):
        bare = {name: own[1:] for name, own in bare.items()}
    found = {name: ".".join(own) for name, own in bare.items()}
    if not any(MODULE in own[:-1] for own in bare.values()):
        return found
    inner = {name: ".".join(own) for name, own in _without_lone_modules(bare).items()}
    is_model = inner != found and len({*inner.values()}) == len(inner) and _fit(inner.values()) > _fit(found.values())
    return inner if is_model else found


def _without(parts: list[str], gone: Collection[str]) -> list[str]:
    return [part for part in parts[:-1] if part not in gone] + parts[-1:]


def _without_lone_modules(bare: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return names without each ``module`` that has no siblings."""
    below: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
    for own in bare.values():
        for depth, part in enumerate(own):
            below[tuple(own[:depth])].add(part)
    return {
        name: [
            part
            for depth, part in enumerate(own)
            if part != MODULE or depth == len(own) - 1 or below[tuple(own[:depth])] != {MODULE}
        ]
        for name, own in bare.items()
    }


def _fit(names: Iterable[str]) -> int:
    """Return how many names the whole model has that most of them fit."""
    names = list(names)
    whole = [layout for layout in map(layouts.find, layouts.names()) if layout.whole]
    return max(len(layout.match(names)[1]) for layout in whole)
