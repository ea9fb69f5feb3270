"""The version: one place has it, `attn_bridge.__version__`; what repeats it for other readers must say the same."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = "attn_bridge/__init__.py"
REPEATED = {
    "CITATION.cff": r"^version: (\S+)$",
    "recipe/recipe.yaml": r'^  version: "([^"]+)"$',
}
"""File -> where the version stands in it, for readers that can't ask Python."""

_HOME = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_FORM = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?")


def current(root: Path = ROOT) -> str:
    """Return the version."""
    found = _HOME.search((root / HOME).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f'{HOME} has no line __version__ = "..."')
    return found.group(1)


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return what does not agree with the version, one line each.

    Args:
        root: of the project.
        tag: that of the commit to be released, ``v`` and the version; None for none.
    """
    version, found = current(root), []
    for file, pattern in REPEATED.items():
        said = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        if said is None or said.group(1) != version:
            found.append(f"{file} says version {said and said.group(1)}; {HOME} has {version}")
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag}; {HOME} has {version}, whose tag is v{version}")
    return found


def bump(version: str, root: Path = ROOT, day: datetime.date | None = None) -> None:
    """Write a new version into every place, and make the changelog's section of it from what is unreleased.

    Raises:
        ValueError: it is no version, it is not a later one, or nothing is unreleased.
    """
    if not _FORM.fullmatch(version):
        raise ValueError(f"version ({version}) must be like 0.2.0 or 0.2.0rc1")
    former = current(root)
    if _order(version) <= _order(former):
        raise ValueError(f"version ({version}) must be later than {former}")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    head = "## [Unreleased]\n"
    before, found, after = text.partition(head)
    if not found or not re.match(r"\s*### ", after):
        raise ValueError(f"CHANGELOG.md has nothing under {head.strip()}")
    section = f"{head}\n## [{version}] - {day or datetime.date.today()}\n"
    changelog.write_text(before + section + after, encoding="utf-8")
    _replace(root / HOME, _HOME.pattern, version)
    for file, pattern in REPEATED.items():
        _replace(root / file, pattern, version)


def _replace(file: Path, pattern: str, version: str) -> None:
    text = file.read_text(encoding="utf-8")
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{file} has no version")
    file.write_text(text[: found.start(1)] + version + text[found.end(1) :], encoding="utf-8")


def _order(version: str) -> tuple[int, int, int, str]:
    numbers, _, _ = re.sub(r"(a|b|rc)", r" \1", version).partition(" ")
    first, second, third = map(int, numbers.split("."))
    return first, second, third, version.removeprefix(numbers) or "z"
