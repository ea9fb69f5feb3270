"""Plant random faults and print which of them the suite catches: ``python -m parity_tests.power --faults 60 --seed 1``.

`make power FAULTS=60 SEED=1` sets the environment in which ``make test`` runs. The working tree is never changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .drawing import PACKAGES, Fault, draw
from .trial import Result, Workshop

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str]) -> int:
    """Try faults; exit 1 if any is neither caught nor absent."""
    options = _parser().parse_args(words)
    numbers = options.only or range(1, options.faults + 1)
    drawn = draw(ROOT, max(numbers), options.seed, tuple(options.packages))
    faults = [fault for fault in drawn if fault.number in numbers]
    print(f"seed {options.seed}, faults {options.faults} of {', '.join(options.packages)}", flush=True)
    if options.list:
        for fault in faults:
            print(f"{fault.number:3} {fault}\n    {fault.text.strip()}")
        return 0
    results: list[tuple[Fault, Result]] = []
    shop = {name: getattr(options, name) for name in ("limit", "workers", "nearest")}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # through the end of the workshop, which removes the copy
    with Workshop.of(options.tree or ROOT, **shop) as workshop:
        for fault in faults:
            results.append((fault, workshop.try_fault(fault)))
            print(_row(*results[-1]), flush=True)
            if options.json is not None:
                document = {"seed": options.seed, "faults": [_as_json(*pair) for pair in results]}
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    outcomes = Counter(result.outcome for _, result in results)
    caught = outcomes["caught"] + outcomes["timeout"]
    tried = len(results) - outcomes["absent"]
    print(f"caught {caught} of {tried}: {', '.join(f'{name} {count}' for name, count in sorted(outcomes.items()))}")
    return 0 if caught == tried else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.power", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="number of faults (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), help="packages that get faults")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--only", type=int, action="append", metavar="K", help="try fault K alone; may be repeated")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="plant the same faults in another checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each fault")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for a batch of test files (600)")
    parser.add_argument("--nearest", type=int, metavar="N", help="run the N nearest test files only")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default 2)")
    return parser


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _row(fault: Fault, result: Result) -> str:
    where = f" by {result.test}" if result.test else ""
    return f"{fault.number:3} {result.outcome:9} {result.seconds:6.0f} s {result.files:3} files  {fault}{where}"


def _as_json(fault: Fault, result: Result) -> dict[str, object]:
    return {
        "number": fault.number,
        "path": fault.path,
        "line": fault.site.line,
        "kind": fault.site.kind,
        "before": fault.site.before,
        "after": fault.site.after,
        "text": fault.text,
        **dataclasses.asdict(result),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
