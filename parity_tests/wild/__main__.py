"""Print the gallery's table: ``python -m parity_tests.wild [--outside] [ENTRY ...]``; every row as it is found."""

from __future__ import annotations

import sys

from .gallery import entries, outside
from .judging import finding


def main(words: list[str]) -> int:
    """Judge the entries whose names begin with one of the words, or all; exit 1 if anything is wrong."""
    known = outside() if "--outside" in words else entries()
    names = [word for word in words if not word.startswith("-")]
    chosen = [one for one in known.values() if not names or any(one.name.startswith(name) for name in names)]
    print("| entry | fault | verdict | place | seconds | right |\n|---|---|---|---|---|---|")
    found = []
    for entry in chosen:
        for fault in (None, *entry.faults):
            row = finding(entry, fault)
            found.append(row)
            right = "yes" if row.right else "place" if row.seen else "NO"
            cells = (row.entry, row.fault, row.verdict[:160], row.place, f"{row.seconds:.1f}", right)
            print(f"| {' | '.join(cells)} |", flush=True)
    pairs, faults = [row for row in found if not row.fault], [row for row in found if row.fault]
    print(
        f"\n{len(pairs)} pairs, {sum(row.right for row in pairs)} equal; {len(faults)} faults, "
        f"{sum(row.seen for row in faults)} seen, {sum(row.right for row in faults)} seen and placed"
    )
    return 0 if all(row.right for row in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
