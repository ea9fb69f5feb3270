"""The report of `mutate`: the detections of each fault, and the rejections of right pairs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import rich.box
import rich.table

from attn_bridge import whole_files as files

from .gallery import Finding, summarised
from .planted.block_faults import always
from .planted.faults import FAULTS, find_fault
from .planted.mutants import FIRST_SEED
from .planted.usual_rules import USUAL_RULES
from .trials import Result, count_rules

SCHEMA = 1
"""Version of the JSON; it changes when a key is renamed or removed."""


@dataclasses.dataclass(frozen=True)
class MutationReport:
    """Result of `fault_lab.driver`.

    Attributes:
        results: one per trial, faults first.
        configs: number of right pairs.
        faults: number of faults.
        seed: the first seed.
        plants: number of times that each fault was planted on each side.
        jobs: number of processes.
        environment: versions and machine.
        seconds: its duration.
        galleries: the galleries that were judged.
        only: prefixes of the names of the planted faults; "" plants all.
        gallery: the results on their entries.
    """

    results: tuple[Result, ...]
    configs: int
    faults: int
    seed: int
    plants: int
    jobs: int
    environment: Mapping[str, str]
    seconds: float
    galleries: tuple[str, ...] = ()
    only: str = ""
    gallery: tuple[Finding, ...] = ()

    @property
    def planted(self) -> tuple[Result, ...]:
        """The trials with a fault."""
        return tuple(result for result in self.results if result.trial.fault)

    @property
    def right(self) -> tuple[Result, ...]:
        """The trials without a fault."""
        return tuple(result for result in self.results if not result.trial.fault)

    @property
    def survivors(self) -> tuple[Result, ...]:
        """Faults that show and were not detected."""
        return self._of("missed")

    @property
    def false_alarms(self) -> tuple[Result, ...]:
        """Objections to right pairs, and to faults that change nothing."""
        return self._of("false alarm")

    @property
    def objections(self) -> tuple[Finding, ...]:
        """Entries of galleries whose verdict is wrong: right ones that are not equal, and faults that are missed."""
        return tuple(one for one in self.gallery if one.is_wrong)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Faults that should show and did not wherever they were planted, so that nothing was learnt about them."""
        rows = self._by_fault()
        return tuple(
            name
            for name, row in rows.items()
            if not any(one.outcome != "invariance" for one in row) and not _is_invariance(name)
        )

    @property
    def passed(self) -> bool:
        """Whether every fault that shows was detected, every fault showed, and there was no false alarm.

        Entries of galleries count as the rest does; a place that is named wrongly does not.
        """
        return not (self.survivors or self.false_alarms or self.objections or self.unseen)

    @property
    def command(self) -> str:
        """The command that runs it again."""
        options = [f"--configs {self.configs}", f"--plants {self.plants}"]
        options += [f"--faults {self.faults}"] if self.faults != len(FAULTS) else []
        options += [f"--only {self.only}"] if self.only else []
        options += [f"--seed {self.seed}"] if self.seed != FIRST_SEED else []
        options += [f"--gallery {one}" for one in self.galleries]
        return " ".join(["attn-bridge mutate", *options, f"--jobs {self.jobs}"])

    def summary(self) -> str:
        """Return the last line of the report."""
        visible = [result for result in self.planted if result.visible]
        num_detected = sum(result.outcome == "detected" for result in visible)
        parts = [
            f"{num_detected} of {len(visible)} visible plants of {len(self._by_fault())} faults detected",
            f"{sum(one.outcome == 'false alarm' for one in self.right)} false alarms on {len(self.right)} right pairs",
        ]
        parts += [f"gallery: {summarised(self.gallery)}"] if self.gallery else []
        hidden = collections.Counter(one.outcome for one in self.planted if not one.visible)
        parts += [f"{count} {_plural(name, count)}" for name, count in hidden.items()]
        parts += [f"never seen: {', '.join(self.unseen)}"] if self.unseen else []
        return f"{', '.join(parts)}, in {self.seconds:.0f} s"

    def lines(self) -> list[str]:
        """Return everything that is not as it should be, with the command that runs it again."""
        lines = []
        wrong: tuple[Result | Finding, ...] = (*self.survivors, *self.false_alarms, *self.objections)
        for result in wrong:
            lines += [str(result), f"  again: {result.command}"]
        return lines

    def table(self) -> rich.table.Table:
        """Return one row per fault and one for right pairs; usual rules on outputs, and on gradients as well."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("fault", "judge", "verdict"):
            table.add_column(heading, justify="right" if heading == "judge" else "left")
        for rule in USUAL_RULES:
            table.add_column(rule.name, justify="right")
        for name, judged, verdicts, rules in self.rows():
            good = "red" if _is_short(judged) else "green"
            table.add_row(name, f"[{good}]{judged}[/]" if judged != "-" else judged, verdicts, *rules)
        table.add_section()
        for name, judged, rules in self.alarm_rows()[-1:]:
            color = "green" if judged.startswith("0 ") else "red"
            table.add_row(f"false alarms, {name}", f"[{color}]{judged}[/]", "", *rules)
        return table

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready data."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "summary": self.summary(),
            "configs": self.configs,
            "faults": self.faults,
            "plants": self.plants,
            "seed": self.seed,
            "jobs": self.jobs,
            "command": self.command,
            "seconds": round(self.seconds, 3),
            "environment": dict(self.environment),
            "rules": {rule.name: rule.about for rule in USUAL_RULES},
            "survivors": [str(result.trial) for result in self.survivors],
            "false_alarms": [str(result.trial) for result in self.false_alarms],
            "unseen": list(self.unseen),
            "trials": [result.to_json() for result in self.results],
            "gallery": [finding.to_json() for finding in self.gallery],
        }

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the report as a Markdown page, and write it to `path` if one is given."""
        from .page import as_markdown

        text = as_markdown(self)
        if path is not None:
            files.write(files.checked(path), text)
        return text

    # ---- rows

    def _of(self, outcome: str) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.outcome == outcome)

    def _by_fault(self) -> dict[str, list[Result]]:
        rows: dict[str, list[Result]] = {}
        for result in self.planted:
            rows.setdefault(result.trial.fault, []).append(result)
        return rows

    def rows(self) -> list[tuple[str, str, str, list[str]]]:
        """Return per fault its name, its number of detections, the verdicts, and the findings of the usual rules."""
        rows = []
        for name, results in self._by_fault().items():
            visible = [result for result in results if result.visible]
            judged = f"{sum(one.outcome == 'detected' for one in visible)}/{len(visible)}" if visible else "-"
            counts = collections.Counter(one.verdict if one.visible else one.outcome for one in results)
            verdicts = ", ".join(what if len(counts) == 1 else f"{count} {what}" for what, count in counts.items())
            rows.append((name, judged, verdicts, count_rules(visible)))
        return rows

    def alarm_rows(self) -> list[tuple[str, str, list[str]]]:
        """Return per module, and for all together, how often the judge and the usual rules objected to right pairs."""
        modules = dict(sorted(collections.Counter(one.module for one in self.right).items(), key=lambda item: -item[1]))
        groups = [(module, [one for one in self.right if one.module == module]) for module in modules]
        rows = []
        for name, results in [*groups, (f"{len(self.right)} right pairs", list(self.right))]:
            alarms = sum(one.outcome == "false alarm" for one in results)
            rows.append((name, f"{alarms} of {len(results)}", count_rules(results)))
        return rows


def _is_invariance(name: str) -> bool:
    return find_fault(name).hidden is always


def _is_short(judged: str) -> bool:
    num_detected, _, count = judged.partition("/")
    return num_detected != count and judged != "-"


def _plural(outcome: str, count: int) -> str:
    names = {"invariance": "true invariances", "false alarm": "false alarms on invariances"}
    return names.get(outcome, outcome) if count > 1 else outcome
