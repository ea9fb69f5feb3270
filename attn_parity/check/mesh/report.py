"""Report of a check on a mesh: a row for each module, as a table and as JSON."""

from __future__ import annotations

import dataclasses

import rich.box
import rich.table

from attn_bridge.whole_files import JsonObject


@dataclasses.dataclass(frozen=True)
class MeshRow:
    """One module on the mesh.

    Attributes:
        case: its class, and which example it is of.
        framework: ``torch`` or ``flax``.
        verdict: that of `attn_bridge.parity.compare`, or ``refused`` where the module can't be shared out so.
        largest: largest difference in float64, as a part of the largest value of its kind.
        collectives: how often each collective operation runs in one forward pass.
        step: the same of one forward and backward pass.
        message: why it is refused, or what differs, on which shard.
        seconds: how long it took.
    """

    case: str
    framework: str
    verdict: str
    largest: float | None = None
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    step: dict[str, int] = dataclasses.field(default_factory=dict)
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class MeshReport:
    """All rows.

    Attributes:
        rows: one for each module and framework.
        mesh: size of each axis.
        method: how queries meet keys of other devices.
        environment: hardware and versions.
        seeds: how many times numbers were drawn.
        seconds: how long it took.
    """

    rows: tuple[MeshRow, ...]
    mesh: dict[str, int]
    method: str
    environment: dict[str, str]
    seeds: int
    seconds: float

    @property
    def failures(self) -> list[MeshRow]:
        """Rows that are neither equal nor refused."""
        return [row for row in self.rows if row.verdict not in ("equal", "refused")]

    @property
    def passed(self) -> bool:
        """Whether no sharded module failed, and at least one equals its plain module."""
        return not self.failures and any(row.verdict == "equal" for row in self.rows)

    def table(self) -> rich.table.Table:
        """Return the rows as a table."""
        table = rich.table.Table(box=rich.box.SIMPLE, header_style="bold")
        for name in ("module", "framework", "verdict", "float64 diff", "collectives forward", "and with backward"):
            table.add_column(name)
        for row in self.rows:
            largest = "" if row.largest is None else f"{row.largest:.1e}"
            counts = (", ".join(f"{name} {n}" for name, n in one.items()) for one in (row.collectives, row.step))
            table.add_row(row.case, row.framework, row.verdict, largest, *counts)
        return table

    def explanations(self) -> list[str]:
        """Return a line for each row that is refused or not equal."""
        return [
            f"{row.verdict}: {row.framework} {row.case}: {row.message}" for row in self.rows if row.verdict != "equal"
        ]

    def summary(self) -> str:
        """Return the counts in one line."""
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        equal = sum(row.verdict == "equal" for row in self.rows)
        refused = sum(row.verdict == "refused" for row in self.rows)
        counts = f"{equal} of {len(self.rows) - refused} modules equal"
        return f"{counts} on a mesh of {axes} ({self.method}), {refused} refused, {self.seconds:.0f} s"

    def to_json(self) -> JsonObject:
        """Return all of it as JSON-ready data."""
        return {"passed": self.passed, **dataclasses.asdict(self)}
