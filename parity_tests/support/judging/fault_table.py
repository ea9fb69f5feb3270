"""Judge whole models of every family, right and with faults: `python -m parity_tests.support.judging.fault_table`.

Tables of both are written to docs/model-faults.md. What was found is kept in a file, a line per family and kind, so
that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from attn_bridge.parity import check_model

from ..models import decoder_oracle
from . import model_faults

PRECISIONS = ("float32", "bfloat16")
"""In which right models are judged."""

KINDS = ("faults", *PRECISIONS)

PAGE = Path(__file__).parents[3] / "docs" / "model-faults.md"


def judge_right(family: str, home: Path, dtype: str) -> dict[str, Any]:
    """Return what `check_model` says of the right model of a family, by all that it judges with."""
    begin = time.perf_counter()
    report = check_model(model_faults.right(family, home, dtype))
    alarms = [f"{part.name} {part.verdict}" for part in report.parts if part.verdict != "equal"]
    pairs = sorted({pair.first for part in report.parts for pair in part.pairs})
    decoded = sum(part.decoding is not None for part in report.parts)
    seconds = time.perf_counter() - begin
    return {"parts": len(report.parts), "alarms": alarms, "pairs": pairs, "decoded": decoded, "seconds": seconds}


def judge_faults(family: str, home: Path) -> dict[str, Any]:
    """Return what `check_model` says of every fault of a family, and of the parts without one."""
    folder = model_faults.right(family, home)
    found: dict[str, Any] = {"faults": {}, "right": 0, "alarms": [], "seconds": 0.0}
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


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page; what was not judged is not in it."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    lines = ["# Faults of whole models", "", "Written by `python -m parity_tests.support.judging.fault_table`.", ""]
    lines += table_of_faults(kinds["faults"]) if kinds["faults"] else []
    lines += table_of_right([row for kind in PRECISIONS for row in kinds[kind]])
    return "\n".join(lines)


def table_of_right(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines on right models."""
    lines = [
        "## Right models",
        "",
        "Models without a fault, judged as `attn-bridge check --model` does: the Flax twin against `transformers` and",
        "the torch twin, and decoding with a cache. Every part must be equal.",
        "",
        "| precision | families | parts | decoded | false alarms | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in PRECISIONS:
        some = [row for row in rows if row["kind"] == dtype]
        parts, decoded, seconds = (sum(row[name] for row in some) for name in ("parts", "decoded", "seconds"))
        alarms = sum(len(row["alarms"]) for row in some)
        lines.append(f"| {dtype} | {len(some)} | {parts} | {decoded} | {alarms} | {seconds:.0f} |")
    named = [f"- {row['family']} in {row['kind']}: {', '.join(row['alarms'])}" for row in rows if row["alarms"]]
    alone = sorted({row["family"] for row in rows if "transformers" not in row["pairs"]})
    named += [f"- judged by the torch twin alone: {', '.join(alone)}"] if alone else []
    return [*lines, "", *named, *([""] if named else [])]


def table_of_faults(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines on faults."""
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
    return [
        "Each fault is planted in the Flax side of a tiny random model of each family where it makes sense, one",
        "per part, and `check_model` judges it against `transformers`. *Placed* is: called `different`, at the",
        "submodule of the block that the fault is in.",
        "",
        "| fault | families | different | placed | not placed in |",
        "|---|---|---|---|---|",
        *lines,
        f"| all | {total} | {seen} | {placed} | |",
        "",
        f"{len(rows)} families; {parts} parts without a fault beside them, {alarms} false alarms; {seconds:.0f} s.",
        "",
    ]


def main() -> None:
    """Judge what was not judged before, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--results", type=Path, required=True, help="what was found, a line per family and kind")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="faults, or right models in a precision"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="written with all that is in the results")
    options = parser.parse_args()
    rows = []
    if options.results.exists():
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    done = {(row["family"], row["kind"]) for row in rows}
    for family in options.families or list(decoder_oracle.DECODERS):
        for kind in options.kinds:
            if (family, kind) not in done:
                with tempfile.TemporaryDirectory() as home:
                    found = (
                        judge_faults(family, Path(home)) if kind == "faults" else judge_right(family, Path(home), kind)
                    )
                rows.append({"family": family, "kind": kind, **found})
                with options.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(family, kind, *found["alarms"], flush=True)
    order = list(decoder_oracle.DECODERS)
    options.page.write_text(page(sorted(rows, key=lambda row: order.index(row["family"]))))


if __name__ == "__main__":
    main()
