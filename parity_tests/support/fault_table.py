"""``python -m parity_tests.support.fault_table``: plants faults of whole models in every family, and writes a table.

What was found is kept in a file per line and family, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from attn_bridge.parity import check_model

from . import decoder_oracle, model_faults

PAGE = Path(__file__).parents[2] / "docs" / "model-faults.md"


def judge(family: str, home: Path) -> dict[str, Any]:
    """Return what `check_model` says of every fault of a family, and of the parts without one."""
    folder = model_faults.right(family, home)
    found: dict[str, Any] = {"family": family, "faults": {}, "right": 0, "alarms": [], "seconds": 0.0}
    for number, planted in enumerate(model_faults.planted(folder)):
        begin = time.perf_counter()
        wrong = model_faults.write(planted, home / f"{family}-wrong-{number}")
        report = check_model(folder, wrong, oracle="transformers", seeds=1, tokens=10)
        found["seconds"] += time.perf_counter() - begin
        for part in report.parts:
            if part.name not in planted.faults:
                found["right"] += part.verdict == "equal"
                found["alarms"] += [part.name] if part.verdict != "equal" else []
                continue
            name, place = planted.faults[part.name]
            inside = ".".join(filter(None, ("" if part.name == "ends" else part.name, place)))
            placed = part.verdict == "different" and part.place.startswith(inside)
            found["faults"][name] = {"verdict": part.verdict, "place": part.place, "placed": placed}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    names = [one.name for one in (*model_faults.BLOCK_FAULTS, *model_faults.END_FAULTS)]
    lines = []
    total = seen = placed = 0
    for name in names:
        found = {row["family"]: row["faults"][name] for row in rows if name in row["faults"]}
        if not found:
            continue
        different = sum(one["verdict"] == "different" for one in found.values())
        right = sum(one["placed"] for one in found.values())
        total, seen, placed = total + len(found), seen + different, placed + right
        missed = ", ".join(family for family, one in found.items() if not one["placed"])
        lines.append(f"| {name} | {len(found)} | {different} | {right} | {missed} |")
    parts = sum(row["right"] + len(row["alarms"]) for row in rows)
    alarms = sum(len(row["alarms"]) for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    return "\n".join(
        [
            "# Faults of whole models",
            "",
            "Written by `python -m parity_tests.support.fault_table`: each fault is planted in the Flax side of a tiny",
            "random model of each family where it makes sense, one per part, and `check_model` judges it against",
            "`transformers`. *Placed* is: called `different`, at the submodule of the block that the fault is in.",
            "",
            "| fault | families | different | placed | not placed in |",
            "|---|---|---|---|---|",
            *lines,
            f"| all | {total} | {seen} | {placed} | |",
            "",
            f"{len(rows)} families; {parts} parts without a fault beside them, {alarms} false alarms; {seconds:.0f} s.",
            "",
        ]
    )


def main() -> None:
    """Judge what was not judged before, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--results", type=Path, required=True, help="what was found, a line per family")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    rows = []
    if options.results.exists():
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    done = {row["family"] for row in rows}
    for family in options.families or list(decoder_oracle.DECODERS):
        if family not in done:
            with tempfile.TemporaryDirectory() as home:
                rows.append(judge(family, Path(home)))
            with options.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    order = list(decoder_oracle.DECODERS)
    options.page.write_text(table(sorted(rows, key=lambda row: order.index(row["family"]))))


if __name__ == "__main__":
    main()
