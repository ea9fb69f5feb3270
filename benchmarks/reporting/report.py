"""The measurements: rows, the ratios between them, and their presentation and storage."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import rich.box
import rich.table

from ..measuring import machine
from ..measuring.cells import Group

SCHEMA = 1

LEGEND = (
    "ms: median and interquartile range. GFLOP/s: 4 B H T T D, half of it as causal, 2.5 times that backward, and the "
    "projections of a module. of matmul: of the rate at which the same framework multiplies two square matrices in the "
    "same run. MiB: most memory over the inputs, in a process of its own. first call: seconds, with compiling. "
    "x peer, x stock, x torch: how many times as fast as the fastest peer in the same framework and mode, as what the "
    "framework itself has, and as what torch itself has. *: what is picked by default."
)

SHORT_NAMES = {"torch.nn.MultiheadAttention": "nn", "flax.nnx.MultiHeadAttention": "nnx"}
SUMMARY_TITLES = {
    "attention": "causal attention, ms (MiB)",
    "modules": "modules, ms; nn: torch.nn.MultiheadAttention, nnx: flax.nnx.MultiHeadAttention, book: plain version",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender in one group.

    Attributes:
        subject, cell, dtype, direction: the group, see `cells.Group`.
        framework: ``"torch"`` or ``"jax"``.
        contender: its name.
        kind: of `contender.KINDS`.
        mode: of `cells.MODES`.
        picked: whether our function or module runs it by default.
        status: ``"right"``, ``"wrong"``, ``"failed"`` or ``"skipped"``; all but the first have no times.
        reason: why it is not right.
        seconds: of a call, one per round.
        first_call_s: seconds of the first call.
        matmul_flops: floating-point operations per second of the framework's product of matrices in this group.
        memory_bytes: most memory over the inputs; None if not measured.
    """

    subject: str
    cell: str
    dtype: str
    direction: str
    framework: str
    contender: str
    kind: str
    mode: str
    picked: bool
    status: str
    reason: str | None
    seconds: tuple[float, ...]
    first_call_s: float | None
    matmul_flops: float
    memory_bytes: int | None

    @property
    def group(self) -> Group:
        """The comparison that it belongs to."""
        return Group.from_json(dataclasses.asdict(self))

    @property
    def median(self) -> float | None:
        """Seconds of a call; None if there is no right answer."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Seconds between which the middle half of the rounds lies."""
        if len(self.seconds) < 2:
            return (self.seconds[0], self.seconds[0]) if self.seconds else None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def flops(self) -> float | None:
        """Floating-point operations per second."""
        return self.group.flops() / self.median if self.median else None


@dataclasses.dataclass(frozen=True)
class Report:
    """All rows, with the machine that they were measured on.

    Attributes:
        rows: in the order of measurement, group by group.
        machine: facts of `machine.describe`, and ``frameworks``.
        notes: lines on omissions.
        rounds: number of timings per contender.
        quick: whether the sizes are too small to show speed.
    """

    rows: tuple[Row, ...]
    machine: dict[str, Any]
    notes: tuple[str, ...]
    rounds: int
    quick: bool = False

    @property
    def passed(self) -> bool:
        """Whether none of ours is wrong or failed."""
        return not any(row.kind == "ours" and row.status in ("wrong", "failed") for row in self.rows)

    def groups(self) -> Iterator[tuple[Group, list[Row]]]:
        """Yield each group with its rows."""
        by_group: dict[Group, list[Row]] = {}
        for row in self.rows:
            by_group.setdefault(row.group, []).append(row)
        yield from by_group.items()

    def ratios(self, row: Row) -> dict[str, float | None]:
        """Return the speed of a row relative to others of its group; None without a row to compare with.

        ``peer`` is the fastest of the same framework and mode that is not ours, ``stock`` the framework's own layer, in
        the same mode, ``torch`` torch's own layer, in its faster mode.
        """
        group = [one for one in self.rows if one.group == row.group and one.kind != "ours"]
        same = [one for one in group if (one.framework, one.mode) == (row.framework, row.mode)]
        others = {
            "peer": same,
            "stock": [one for one in same if one.kind == "stock"],
            "torch": [one for one in group if one.framework == "torch" and one.kind == "stock"],
        }
        ratios: dict[str, float | None] = {}
        for name, rows in others.items():
            best = fastest(rows)
            ratios[name] = best.median / row.median if best and best.median and row.median else None
        return ratios

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready data; `from_json` reads it back."""
        rows = []
        for row in self.rows:
            derived = {"median_s": row.median, "quartiles_s": row.quartiles, "flops": row.flops}
            rows.append(dataclasses.asdict(row) | derived | {"times_as_fast_as": self.ratios(row)})
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "rounds": self.rounds,
            "quick": self.quick,
            "notes": list(self.notes),
            "rows": rows,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """Read what `to_json` returned; ValueError if it is something else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"no report of schema {SCHEMA}")
        names = [field.name for field in dataclasses.fields(Row)]
        rows = tuple(
            Row(**{name: row[name] for name in names} | {"seconds": tuple(row["seconds"])}) for row in data["rows"]
        )
        return cls(rows, data["machine"], tuple(data["notes"]), data["rounds"], data["quick"])

    def tables(self) -> Iterator[rich.table.Table]:
        """Yield a table per group."""
        for group, rows in self.groups():
            table = _table(heading(group, rows), ("framework", "contender", "mode"), COLUMNS)
            for row in rows:
                name = f"{row.contender} *" if row.picked and row.subject == "attention" else row.contender
                style = None if row.status == "right" else "yellow" if row.status == "skipped" else "red"
                table.add_row(row.framework, name, row.mode, *self.numbers(row), style=style)
            yield table

    def numbers(self, row: Row) -> list[str]:
        """Return the texts of `COLUMNS`; a wrong answer has no time."""
        if row.median is None or row.quartiles is None or row.flops is None:
            return [row.status, *[""] * (len(COLUMNS) - 1)]
        low, high = row.quartiles
        ratios = self.ratios(row)
        return [
            milliseconds(row.median),
            f"{milliseconds(low)}-{milliseconds(high)}",
            f"{row.flops / 1e9:.0f}" if row.flops > 1e10 else f"{row.flops / 1e9:.2g}",
            f"{row.flops / row.matmul_flops:.0%}",
            mebibytes(row.memory_bytes),
            "" if row.first_call_s is None else f"{row.first_call_s:.2f}",
            *(times(ratios[name]) for name in ("peer", "stock", "torch")),
        ]

    def summaries(self) -> Iterator[rich.table.Table]:
        """Yield a short table per subject: ours, and the layers of each framework itself, both in their faster mode."""
        for subject in dict.fromkeys(row.subject for row in self.rows):
            columns: list[str] = []
            lines: list[list[str]] = []
            for group, rows in self.groups():
                if group.subject != subject:
                    continue
                columns, texts = self._summary(rows)
                lines.append([str(group.cell), group.dtype, "fwd+bwd" if group.backward else "fwd", *texts])
            table = _table(SUMMARY_TITLES[subject], ("BxTxHxD", "dtype", ""), columns)
            for line in lines:
                table.add_row(*line)
            yield table

    def _summary(self, rows: list[Row]) -> tuple[list[str], list[str]]:
        columns, texts = [], []
        for framework in self.machine["frameworks"]:
            mine = [row for row in rows if row.framework == framework]
            ours = fastest([row for row in mine if row.kind == "ours" and row.picked])
            theirs = [row for row in mine if row.kind != "ours"]
            with_memory = rows[0].subject == "attention"
            columns.append(f"{framework} ours")
            texts.append(_brief(ours, [row for row in mine if row.picked], with_memory))
            for contender in dict.fromkeys(row.contender for row in theirs):
                contender_rows = [row for row in theirs if row.contender == contender]
                best = fastest(contender_rows)
                ratio = best.median / ours.median if best and ours and best.median and ours.median else None
                columns += [SHORT_NAMES.get(contender, contender), "x"]
                texts += [_brief(best, contender_rows, with_memory), times(ratio)]
        return columns, texts

    def lines(self) -> Iterator[str]:
        """Yield the lines below the tables, one fact per line."""
        groups: dict[tuple[str, str, str, str, str | None], list[Group]] = collections.defaultdict(list)
        for row in self.rows:
            if row.status != "right":
                groups[row.status, row.framework, row.contender, row.mode, row.reason].append(row.group)
        for (status, framework, contender, mode, reason), several in groups.items():
            of = str(several[0]) if len(several) == 1 else f"{len(several)} groups"
            yield f"{status}: {framework} {contender}, {mode}, {of}: {reason}"
        yield from self.notes
        yield from machine.sentences(self.machine)
        kind = "; quick: too small to say anything about speed" if self.quick else ""
        yield f"{len(self.rows)} rows, {self.rounds} rounds, in turn{kind}"
        loads = [self.machine.get(f"load_average_{when}") for when in ("before",)]
        if loads[0] is not None and loads[0] > 0.5:
            yield f"note: other programs were running (load average {loads[0]} at the start)"


COLUMNS = ("ms", "quartiles", "GFLOP/s", "of matmul", "MiB", "first call", "x peer", "x stock", "x torch")


def heading(group: Group, rows: Iterable[Row]) -> str:
    """Return a title with the work of the group and the yardsticks."""
    rates = {row.framework: f"{row.framework} {row.matmul_flops / 1e9:.0f}" for row in rows}
    work = f"{group.flops() / 1e9:.3g} GFLOP"
    return f"{group.subject}, {group.cell}, {group.dtype}, {group.direction}: {work}; matmul GFLOP/s: " + ", ".join(
        rates.values()
    )


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the fastest right row, None if no row is right."""
    return min((row for row in rows if row.median is not None), key=lambda row: row.median or 0.0, default=None)


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three significant digits."""
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def mebibytes(count: int | None) -> str:
    """Return MiB, empty if not known."""
    return "" if count is None else f"{count / 2**20:.0f}" if count >= 10 * 2**20 else f"{count / 2**20:.1f}"


def times(ratio: float | None) -> str:
    """Return a ratio with two digits or three, empty if not known."""
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _brief(row: Row | None, rows: list[Row], with_memory: bool) -> str:
    if row is None or row.median is None:
        return rows[0].status if rows else ""
    memory = mebibytes(row.memory_bytes) if with_memory else ""
    return milliseconds(row.median) + (f" ({memory})" if memory else "")


def _table(title: str, names: Iterable[str], columns: Iterable[str]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table
