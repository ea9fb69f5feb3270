"""The register of the gallery: what an entry is, what a fault is, and who has them all.

An entry is a function ``build(fault)`` that returns a `Case`: two sides that hold the same weights, the inputs of the
first, and options for ``compare``. ``build(None)`` is right; ``build("name")`` has that one fault of a port in it. A
framework is imported only inside a build function, so that listing the gallery imports none.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

ROOMS = (
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
"""The files with entries."""

Place = str | tuple[str, ...]
"""A module path of the first side (``*`` stands for anything), or the modules around the code that is wrong."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One realistic error of a port.

    Attributes:
        places: where it may be said to be; a path, or the modules that the wrong code lies between.
        effect: ``meaning`` (shows in float64), or ``precision`` (shows in the working precision only).
        side: the side that has it.
        direction: ``backward`` where the forward pass does not show it.
    """

    places: tuple[Place, ...]
    effect: Literal["meaning", "precision"] = "meaning"
    side: Literal["first", "second"] = "second"
    direction: Literal["forward", "backward"] = "forward"

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdicts that name this fault rightly."""
        return ("different",) if self.effect == "meaning" else ("precision", "different")

    def is_placed_by(self, divergence: Any) -> bool:
        """Tell whether a report's first divergence names the place: the module, or modules around the code."""
        if divergence is None:
            return False
        paths = [place for place in self.places if isinstance(place, str)]
        around = [place for place in self.places if isinstance(place, tuple)]
        between = getattr(divergence, "between", None)
        if between and around:
            return any(all(any(fnmatch.fnmatchcase(end, one) for one in place) for end in between) for place in around)
        return any(fnmatch.fnmatchcase(divergence.path or "", path) for path in paths)


def fault(*places: Place, **how: Any) -> Fault:
    """Return a `Fault` at these places."""
    return Fault(places, **how)


def inside(path: str, *children: str) -> tuple[Place, ...]:
    """Return the places of wrong code in a module's own forward pass: the module, or between these children.

    The module itself stands for its start and its end, before and after all of them.
    """
    return path, (path, *(f"{path}.{child}".lstrip(".") for child in children))


class Case(NamedTuple):
    """What ``compare`` is called with."""

    first: Any
    second: Any
    inputs: Any
    options: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A pair of the gallery.

    Attributes:
        name: its name, as the table shows it.
        build: builds the pair; with the name of a fault, with that fault.
        faults: what can be wrong with it.
        tags: what it covers.
        needs: packages that it imports besides torch, JAX and Flax.
    """

    name: str
    build: Callable[[str | None], Case]
    faults: Mapping[str, Fault]
    tags: tuple[str, ...]
    needs: tuple[str, ...] = ()


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
    for room in ROOMS:
        importlib.import_module(f"{__package__}.{room}")
    return {name: one for name, one in _ENTRIES.items() if not one.needs}


def outside() -> dict[str, Entry]:
    """Return the pairs that need a package of others, by name."""
    for room in ("outside", "outside_jax"):
        importlib.import_module(f"{__package__}.{room}")
    return {name: one for name, one in _ENTRIES.items() if one.needs}
