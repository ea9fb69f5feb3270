"""Draws faults at random: a file by its number of lines, then a kind, then a site, each evenly."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

from .planting import KINDS, Kind, Site, sites

PACKAGES = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "torch_attn", "jax_attn")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A site of a file of the repository.

    Attributes:
        number: number in the draw, from 1.
        path: file, relative to the repository's root.
        site: the span and its replacement.
        text: the line, for people and to find the site in another checkout.
    """

    number: int
    path: str
    site: Site
    text: str

    def __str__(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.site.before, self.site.after))
        return f"{self.path}:{self.site.line} {self.site.kind} `{before.strip()}` -> `{after.strip()}`"


def draw(root: Path, count: int, seed: int, packages: tuple[str, ...] = PACKAGES) -> list[Fault]:
    """Return faults, no two of them at the same place; the first ones are the same for every count."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    }
    return list(_faults(texts, count, random.Random(seed)))


def _faults(texts: dict[str, str], count: int, rng: random.Random) -> Iterator[Fault]:
    paths = list(texts)
    weights = [texts[path].count("\n") for path in paths]
    by_path: dict[str, list[Site]] = {}
    planted: set[tuple[str, int]] = set()
    while len(planted) < count:
        (path,) = rng.choices(paths, weights)
        if path not in by_path:
            by_path[path] = sites(texts[path])
        kind: Kind = rng.choice(KINDS)
        candidates = [site for site in by_path[path] if site.kind == kind]
        if not candidates:
            continue
        site = rng.choice(candidates)
        if (path, site.start) in planted:
            continue
        planted.add((path, site.start))
        yield Fault(len(planted), path, site, texts[path].splitlines()[site.line - 1])


def find_again(fault: Fault, text: str) -> Site | None:
    """Return the same site in another version of the file; None if its line is not there, or there more than once."""
    wanted = (fault.site.kind, fault.site.before, fault.site.after)
    lines = text.splitlines()
    same = [
        site
        for site in sites(text)
        if (site.kind, site.before, site.after) == wanted and lines[site.line - 1] == fault.text
    ]
    exact = [site for site in same if site == fault.site]
    if exact:
        return exact[0]
    return same[0] if len(same) == 1 else None
