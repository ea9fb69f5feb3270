"""Plant random faults and print which of them the suite catches: ``python -m parity_tests.power --faults 60 --seed 1``.

`make power FAULTS=60 SEED=1` sets the environment in which ``make test`` runs. The working tree is never changed. A
state file has the faults and their outcomes, after each fault: the next call goes on from it, and with a larger
``--budget``, or where test files have changed, tries the faults again that no test has caught.
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
from .planting import Site
from .trial import DECIDED, Result, Workshop

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str]) -> int:
    """Try faults; exit 1 if any is neither caught nor absent."""
    options = _parser().parse_args(words)
    state: Path = options.state or ROOT / "build" / f"power-{options.faults}-{options.seed}.json"
    results = _read(state)
    if not results:
        results = dict.fromkeys(draw(ROOT, options.faults, options.seed, tuple(options.packages)))
    wanted = [fault for fault in results if not options.only or fault.number in options.only]
    print(f"seed {options.seed}, faults {options.faults} of {', '.join(options.packages)}", flush=True)
    if options.list:
        for fault in wanted:
            print(f"{_row(fault, results[fault])}\n    {fault.text.strip()}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # through the end of the workshop, which removes the copy
    state.parent.mkdir(parents=True, exist_ok=True)
    with Workshop.of(options.tree or ROOT, budget=options.budget, limit=options.limit) as workshop:
        open_faults = [fault for fault in wanted if (result := results[fault]) is None or result.outcome not in DECIDED]
        workshop.order_tests({fault.path for fault in open_faults})
        for fault in open_faults:
            results[fault] = workshop.try_fault(fault, results[fault])
            print(_row(fault, results[fault]), flush=True)
            state.write_text(
                json.dumps([_as_json(*pair) for pair in results.items()], indent=1) + "\n", encoding="utf-8"
            )
    tried = [result.outcome for fault in wanted if (result := results[fault]) is not None]
    outcomes = Counter(outcome for outcome in tried if outcome != "absent")
    caught = outcomes["caught"] + outcomes["timeout"]
    print(f"caught {caught} of {outcomes.total()}: {', '.join(f'{name} {count}' for name, count in outcomes.items())}")
    return 0 if caught == outcomes.total() else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.power", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="number of faults (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), help="packages that get faults")
    parser.add_argument("--list", action="store_true", help="print the faults and their outcomes, and run nothing")
    parser.add_argument("--only", type=int, action="append", metavar="K", help="try fault K alone; may be repeated")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="plant the same faults in another checkout")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="faults and outcomes (default build/power-FAULTS-SEED.json)"
    )
    parser.add_argument(
        "--budget", type=float, default=60, metavar="SECONDS", help="processor time of a fault's test files (60)"
    )
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="after which a run is taken to wait forever (1800)"
    )
    return parser


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _row(fault: Fault, result: Result | None) -> str:
    if result is None:
        return f"{fault.number:3} {fault}"
    where = f": {result.test}" if result.test else ""
    return f"{fault.number:3} {result.outcome:9} {result.seconds:6.0f} s {len(result.files):3} files  {fault}{where}"


def _read(state: Path) -> dict[Fault, Result | None]:
    """Return the faults of a state file and their outcomes; nothing if the file does not exist."""
    rows = json.loads(state.read_text(encoding="utf-8")) if state.is_file() else []
    return {
        Fault(**row["fault"] | {"site": Site(**row["fault"]["site"])}): row["result"] and Result(**row["result"])
        for row in rows
    }


def _as_json(fault: Fault, result: Result | None) -> dict[str, object]:
    return {"fault": dataclasses.asdict(fault), "result": result and dataclasses.asdict(result)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
