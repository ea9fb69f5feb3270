"""The report of `mutate --mesh`: distributed faults found and named, and right pairs rejected."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import rich.box
import rich.table

from attn_bridge import whole_files as files

from ..planted.mutants import FIRST_SEED
from ..trials import upper_bound
from .faults import find_mesh_fault
from .trials import MeshResult

HEAD = """# How good the judge is on many devices

Every fault below is planted into a transformer block that is written by hand for many devices, in torch (DTensor and
collectives) and in JAX (`jax.shard_map`): `mesh_mutants/` in both rooms of `fault_lab/frameworks/`. Then
`attn_bridge.parity.compare` judges it against the plain block on one device, on a mesh of simulated devices.

`found` is how many plants were detected, of those that show: whether one shows is measured on its own side, in float64
against the block without devices. `named` is how many of them the report names by shard or by kind: it says which
devices hold other copies than the rest, or which shards differ while others agree, or it has a hint what the numbers
are consistent with. A report that only says in which submodule the two part counts as found and not as named.
"""


@dataclasses.dataclass(frozen=True)
class MeshMutationReport:
    """Result of `mutate_mesh`.

    Attributes:
        results: one per trial.
        mesh: size of each axis.
        configs: number of right pairs of each framework.
        plants: how many times each fault was planted in each framework.
        seed: where seeds began.
        environment: versions and machine.
        seconds: how long it took.
        options: further options of the command that runs it again.
    """

    results: tuple[MeshResult, ...]
    mesh: Mapping[str, int]
    configs: int
    plants: int
    seed: int
    environment: Mapping[str, str]
    seconds: float
    options: tuple[str, ...] = ()

    @property
    def right(self) -> list[MeshResult]:
        """Right pairs that were compared."""
        return [one for one in self.results if not one.trial.fault and one.outcome != "refused"]

    @property
    def visible(self) -> list[MeshResult]:
        """Faults that show."""
        return [one for one in self.results if one.is_visible]

    @property
    def wrong(self) -> list[MeshResult]:
        """Results that count against the judge: missed faults, and rejected right pairs."""
        return [one for one in self.results if one.is_wrong]

    @property
    def unnamed(self) -> list[MeshResult]:
        """Faults that were found, and not named by shard or kind."""
        return [one for one in self.results if one.outcome == "detected" and not one.is_named]

    @property
    def unseen(self) -> list[str]:
        """Faults that did not show wherever they were planted, so that nothing was learnt about them."""
        planted = dict.fromkeys(one.trial.fault for one in self.results if one.trial.fault)
        visible_faults = {one.trial.fault for one in self.visible}
        return [name for name in planted if name not in visible_faults]

    @property
    def passed(self) -> bool:
        """Whether every fault that shows was found, every fault showed, and no right pair was objected to."""
        return not (self.wrong or self.unseen)

    @property
    def command(self) -> str:
        """The command that runs it again."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        options = [f"--mesh {mesh}", f"--configs {self.configs}", f"--plants {self.plants}"]
        options += [f"--seed {self.seed}"] if self.seed != FIRST_SEED else []
        return " ".join(["attn-bridge mutate", *options, *self.options])

    def summary(self) -> str:
        """Return the last line of the report."""
        visible = self.visible
        num_detected = sum(one.outcome == "detected" for one in visible)
        named = sum(one.outcome == "detected" and one.is_named for one in visible)
        count = len({one.trial.fault for one in visible})
        alarms = sum(one.outcome == "false alarm" for one in self.right)
        outcomes = collections.Counter(one.outcome for one in self.results)
        parts = [
            f"{num_detected} of {len(visible)} visible plants of {count} distributed faults detected",
            f"{named} named by shard or kind",
            f"{alarms} false alarms on {len(self.right)} right pairs",
        ]
        parts += [f"{outcomes[name]} {name}" for name in ("invisible", "refused") if outcomes[name]]
        parts += [f"never seen: {', '.join(self.unseen)}"] if self.unseen else []
        return f"{', '.join(parts)}, in {self.seconds:.0f} s"

    def rows(self) -> list[tuple[str, ...]]:
        """Return per fault its name, its description, the counts per framework, and an example of a finding."""
        rows = []
        frameworks = self._frameworks()
        for name in dict.fromkeys(one.trial.fault for one in self.results if one.trial.fault):
            planted = [one for one in self.results if one.trial.fault == name]
            cells = [_counts([one for one in planted if one.trial.framework == side]) for side in frameworks]
            example = next((one.shard or one.kind for one in planted if one.is_named), "")
            rows.append((name, find_mesh_fault(name).about, *cells, example))
        return rows

    def headings(self) -> list[str]:
        """Return the headings of the rows."""
        return ["fault", "what goes wrong", *(f"{one}: found, named" for one in self._frameworks()), "a report says"]

    def _frameworks(self) -> list[str]:
        return list(dict.fromkeys(one.trial.framework for one in self.results))

    def lines(self) -> list[str]:
        """Return everything that is not as it should be."""
        return [*map(str, self.wrong), *(f"not named: {one.trial}: {one.place}" for one in self.unnamed)]

    def table(self) -> rich.table.Table:
        """Return one row per fault."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for heading in self.headings():
            table.add_column(heading)
        for row in self.rows():
            table.add_row(*row)
        return table

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready data."""
        return {
            "passed": self.passed,
            "summary": self.summary(),
            "mesh": dict(self.mesh),
            "configs": self.configs,
            "plants": self.plants,
            "seed": self.seed,
            "command": self.command,
            "seconds": round(self.seconds, 3),
            "environment": dict(self.environment),
            "unnamed": [str(one.trial) for one in self.unnamed],
            "unseen": self.unseen,
            "trials": [one.to_json() for one in self.results],
        }

    def to_markdown(self, path: str | Path) -> str:
        """Write the report as a Markdown page, and return it."""
        alarms = sum(one.outcome == "false alarm" for one in self.right)
        parts = [
            HEAD.strip(),
            f"<!-- made by: {self.command} -->",
            f"`{self.command}`: {self.summary()}.",
            ", ".join(f"{name} {value}" for name, value in self.environment.items()) + ".",
        ]
        if self.right:
            bound = upper_bound(alarms, len(self.right))
            parts.append(
                f"{alarms} of {len(self.right)} right pairs were objected to; with 95 % confidence the rate is below "
                f"{bound:.2%}."
            )
        parts.append(_table(self.headings(), self.rows()))
        if self.lines():
            parts += ["## What is not as it should be", "```\n" + "\n".join(self.lines()) + "\n```"]
        text = "\n\n".join(parts) + "\n"
        files.write(files.checked(path), text)
        return text


def _counts(planted: Sequence[MeshResult]) -> str:
    visible = [one for one in planted if one.is_visible]
    detections = [one for one in visible if one.outcome == "detected"]
    return f"{len(detections)}/{len(visible)}, {sum(one.is_named for one in detections)}" if visible else "-"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])
