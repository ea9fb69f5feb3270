"""The changelog's form: https://keepachangelog.com/en/1.1.0/."""

from __future__ import annotations

import datetime
import re

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def problems(text: str, version: str | None = None) -> list[str]:
    """Return what is not in the form of Keep a Changelog, one line each.

    Args:
        text: of CHANGELOG.md.
        version: what must have a section; None for none.
    """
    lines, found = text.splitlines(), []
    if not lines or lines[0] != "# Changelog":
        found.append("CHANGELOG.md:1 must be '# Changelog'")
    if "keepachangelog.com" not in text.partition("\n## ")[0]:
        found.append("CHANGELOG.md must say above its first section that it keeps to keepachangelog.com")
    versions: list[str] = []
    for number, line in enumerate(lines, 1):
        at = f"CHANGELOG.md:{number}"
        if line.startswith("## "):
            said = re.fullmatch(r"## \[(Unreleased|[0-9][0-9a-z.]*)\](?: - (\S+))?", line)
            if said is None or (said[1] == "Unreleased") != (said[2] is None) or not _is_day(said[2]):
                found.append(f"{at} must be '## [Unreleased]' or '## [1.2.3] - 2026-01-31', got {line!r}")
            else:
                versions.append(said[1])
        elif line.startswith("### ") and line.removeprefix("### ") not in KINDS:
            found.append(f"{at} must be '### ' and one of {', '.join(KINDS)}, got {line!r}")
    if versions[:1] != ["Unreleased"]:
        found.append("CHANGELOG.md's first section must be '## [Unreleased]'")
    if version is not None and version not in versions:
        found.append(f"CHANGELOG.md has no section of {version}; make it with: python -m release bump {version}")
    return found


def section(text: str, version: str) -> str:
    """Return what a version's section says, for the notes of a release."""
    found = re.search(rf"^## \[{re.escape(version)}\].*?$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section of {version}")
    return found.group(1).strip() + "\n"


def _is_day(text: str | None) -> bool:
    try:
        return text is None or bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False
