"""The register of the gallery: who has all entries (`fault_lab.gallery` says what they are).

An entry is a function ``build(fault)`` that returns a `Case`: two sides that hold the same weights, the inputs of the
first, and options for ``compare``. ``build(None)`` is right; ``build("name")`` has that one fault of a port in it. A
framework is imported only inside a build function, so that listing the gallery imports none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from fault_lab.gallery import Case, Entry, Fault, fault, inside

__all__ = ["Case", "Entry", "Fault", "entries", "entry", "fault", "inside", "outside"]

PORTS = (
    "llama",
    "stacks",
    "gpt2",
    "encoders",
    "encoder_decoders",
    "experts",
    "vision",
    "convolutions",
    "recurrent",
    "functions",
    "one_framework",
    "details",
)
"""The files of `ports/`, which hold the entries."""

_ENTRIES: dict[str, Entry] = {}


def entry(
    *tags: str, faults: Mapping[str, Fault], needs: tuple[str, ...] = ()
) -> Callable[[Callable[[str | None], Case]], Callable[[str | None], Case]]:
    """Register a build function under its own name."""

    def register(build: Callable[[str | None], Case]) -> Callable[[str | None], Case]:
        name = build.__name__.replace("_", "-")
        assert name not in _ENTRIES, name
        assert len(faults) >= 2, f"{name} has fewer than two faults"

        def checked(fault: str | None = None) -> Case:
            if fault is not None and fault not in faults:
                raise ValueError(f"{name} has no fault {fault!r}; it has {', '.join(faults)}")
            return Case(*build(fault))

        _ENTRIES[name] = Entry(name, checked, faults, tags, needs)
        return build

    return register


def entries() -> dict[str, Entry]:
    """Return the pairs written here, by name."""
    for file in PORTS:
        importlib.import_module(f"{__package__}.ports.{file}")
    return {name: one for name, one in _ENTRIES.items() if not one.needs}


def outside() -> dict[str, Entry]:
    """Return the pairs that need a package of others, by name."""
    for file in ("outside", "outside_jax"):
        importlib.import_module(f"{__package__}.{file}")
    return {name: one for name, one in _ENTRIES.items() if one.needs}
