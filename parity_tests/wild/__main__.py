"""Print the gallery's table: ``python -m parity_tests.wild [--outside] [--docs] [ENTRY ...]``

Every row is shown as it is found.
With ``--docs`` the rows go into docs/gallery.md as well; those of entries that were not asked for stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .gallery import entries, outside
from .judging import Finding, finding

DOCS = Path(__file__).parents[2] / "docs" / "gallery.md"
HEAD = "| entry | fault | verdict | place | seconds | right |\n|---|---|---|---|---|---|"
ROW = re.compile(r"^\| (?P<entry>[\w-]+) \| (?P<fault>[\w-]*) \| .* \| (?P<right>yes|place|NO) \|$", re.MULTILINE)


def main(words: Sequence[str]) -> int:
    """Judge the entries whose names begin with one of the words, or all; exit 1 if anything is wrong."""
    lane = "--outside" if "--outside" in words else ""
    known = outside() if lane else entries()
    names = [word for word in words if not word.startswith("-")]
    chosen = [one for one in known.values() if not names or any(one.name.startswith(name) for name in names)]
    print(HEAD)
    rows = []
    for entry in chosen:
        for fault in (None, *entry.faults):
            rows.append(row_of(finding(entry, fault)))
            print(rows[-1], flush=True)
        if "--docs" in words:
            write(lane, list(known), rows)
    print(f"\n{summary(rows)}")
    return 0 if all(ROW.fullmatch(row)["right"] == "yes" for row in rows) else 1  # type: ignore[index]


def row_of(one: Finding) -> str:
    """Return a line of the table."""
    right = "yes" if one.right else "place" if one.seen else "NO"
    said = (one.entry, one.fault, one.verdict[:160].replace("|", "/"), one.place, f"{one.seconds:.1f}", right)
    return f"| {' | '.join(said)} |"


def summary(rows: Sequence[str]) -> str:
    """Count the rows in a sentence."""
    found = [match for row in rows if (match := ROW.fullmatch(row))]
    pairs, faults = [one for one in found if not one["fault"]], [one for one in found if one["fault"]]
    return (
        f"{len(pairs)} pairs, {sum(one['right'] == 'yes' for one in pairs)} equal; {len(faults)} faults, "
        f"{sum(one['right'] != 'NO' for one in faults)} seen, {sum(one['right'] == 'yes' for one in faults)} "
        "seen and placed."
    )


def write(lane: str, order: Sequence[str], rows: Sequence[str]) -> None:
    """Put rows into the table of a lane in docs/gallery.md, in place of the rows of the same entries."""
    from attn_bridge.parity.settings.environment import environment
    from benchmarks.machine import describe

    text = DOCS.read_text(encoding="utf-8")
    begin = f"<!-- begin: {' '.join(filter(None, ['python -m parity_tests.wild', lane, '--docs']))} -->\n"
    before, rest = text.split(begin)
    old, after = rest.split("<!-- end -->", 1)
    new = {ROW.fullmatch(row)["entry"] for row in rows}  # type: ignore[index]
    kept = [match[0] for match in ROW.finditer(old) if match["entry"] in order and match["entry"] not in new]
    table = sorted([*kept, *rows], key=lambda row: order.index(ROW.fullmatch(row)["entry"]))  # type: ignore[index]
    machine, versions = describe(), environment()
    facts = [f"Measured on {machine['cpu']}, {machine['cores']} cores, {machine['system']};"]
    facts.append(", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "jax", "flax", "numpy")) + ".")
    block = "\n".join([summary(table), *facts, "", HEAD, *table])
    DOCS.write_text(f"{before}{begin}\n{block}\n\n<!-- end -->{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
