"""Results of a check: cells of the matrix with their verdicts, as a table, as JSON, and as messages for debugging."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import rich.box
import rich.table

from attn_bridge.specs import VARIANTS
from attn_bridge.whole_files import JsonObject

from ..results.findings import TensorVerdict
from ..sides.arrays import LOW_PRECISIONS


@dataclasses.dataclass(frozen=True)
class Cell:
    """One judged run of one case.

    Attributes:
        variant: name of the variant.
        case: name of the case.
        dtype: precision of the run.
        what: the two compared runs, in words.
        verdict: ``equal``, ``different`` (in meaning), ``precision`` (one side loses more than its share) or
        ``inconclusive`` (it could not be run).
        tensors: the judged tensors.
        command: the command to run it again.
        message: why it is inconclusive.
        notes: remarks for the reader on how it was run.
    """

    variant: str
    case: str
    dtype: str
    what: str
    verdict: str
    tensors: tuple[TensorVerdict, ...]
    command: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """Describe the failure in enough detail to start debugging."""
        lines = [f"{self.verdict}: {self.variant}, {self.case}, {self.dtype}, {self.what}"]
        if self.message:
            lines.append(f"  {self.message}")
        lines += [f"  {tensor}" for tensor in self.tensors if tensor.verdict != "equal"]
        passed = [tensor.name for tensor in self.tensors if tensor.verdict == "equal"]
        if passed and self.verdict != "equal":
            lines.append(f"  within bounds: {', '.join(passed)}")
        return "\n".join([*lines, f"  again: {self.command}"])


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Cells that were not run: an implementation of attention in a case that it does not serve on this machine.

    Attributes:
        variant: name of the row.
        case: name of the case.
        reason: why it cannot run: the machine, the installation, or a requirement of the case.
    """

    variant: str
    case: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Result of `attn_bridge.parity.check`.

    Attributes:
        cells: the judged cells.
        environment: versions of Python and of the packages, and the machine.
        seeds: number of draws.
        seconds: how long it took.
        left_out: the cells that were not run, with reasons.
    """

    cells: tuple[Cell, ...]
    environment: dict[str, str]
    seeds: int
    seconds: float
    left_out: tuple[LeftOut, ...] = ()

    @property
    def missing_rows(self) -> dict[str, str]:
        """Row -> why the table has none for it: no case that was chosen can run it here."""
        rows = {cell.variant for cell in self.cells}
        reasons: dict[str, list[str]] = {}
        for omission in self.left_out:
            if omission.variant not in rows:
                reasons.setdefault(omission.variant, []).append(omission.reason)
        return {row: "; ".join(dict.fromkeys(found)) for row, found in reasons.items()}

    @property
    def passed(self) -> bool:
        """Whether there are cells and every one is equal."""
        return bool(self.cells) and all(cell.verdict == "equal" for cell in self.cells)

    @property
    def failures(self) -> tuple[Cell, ...]:
        """The cells that are not equal."""
        return tuple(cell for cell in self.cells if cell.verdict != "equal")

    @property
    def notes(self) -> tuple[str, ...]:
        """The cells' remarks on how they were run, each once."""
        return tuple(dict.fromkeys(note for cell in self.cells for note in cell.notes))

    def summary(self) -> str:
        """Return the last line of the report."""
        tensors = sum(len(cell.tensors) for cell in self.cells)
        state = "all equal" if self.passed else f"{len(self.failures)} not equal"
        effort = f"{self.seeds} seed{'s' if self.seeds > 1 else ''} each, in {self.seconds:.0f} s"
        return f"{len(self.cells)} comparisons of {tensors} tensors, {effort}: {state}"

    def table(self) -> rich.table.Table:
        """Return one row per variant: largest float64 difference, and the share of the allowance used below it."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("variant", "cases", "float64", *LOW_PRECISIONS, "verdict"):
            table.add_column(heading, justify="left" if heading in ("variant", "verdict") else "right")
        group = ""
        for variant in dict.fromkeys(cell.variant for cell in self.cells):
            if _group(variant) != group:
                group = _group(variant)
                table.add_section()
                table.add_row(f"[bold]{group}[/]")
            cells = [cell for cell in self.cells if cell.variant == variant]
            verdicts = dict.fromkeys(cell.verdict for cell in cells if cell.verdict != "equal")
            verdict = f"[red]{', '.join(verdicts)}[/]" if verdicts else "[green]equal[/]"
            shares = [_largest(cells, dtype, _used, "{:.0%}") for dtype in LOW_PRECISIONS]
            cases = len({cell.case for cell in cells})
            table.add_row(variant, str(cases), _largest(cells, "float64", _relative, "{:.1e}"), *shares, verdict)
        return table

    def to_json(self) -> JsonObject:
        """Return the report as JSON-ready data; infinite shares are given as null."""
        return {
            "schema": 2,
            "passed": self.passed,
            "summary": self.summary(),
            "seeds": self.seeds,
            "seconds": round(self.seconds, 3),
            "environment": self.environment,
            "notes": list(self.notes),
            "left_out": [dataclasses.asdict(one) for one in self.left_out],
            "cells": [
                {
                    "variant": cell.variant,
                    "case": cell.case,
                    "dtype": cell.dtype,
                    "what": cell.what,
                    "verdict": cell.verdict,
                    "message": cell.message,
                    "command": cell.command,
                    "tensors": [_finite(dataclasses.asdict(tensor)) for tensor in cell.tensors],
                }
                for cell in self.cells
            ],
        }


def _group(variant: str) -> str:
    """Return the heading of a variant; ``implementations`` for names without a class."""
    return next((one.group for one in VARIANTS if one.name == variant), "implementations")


def _largest(cells: list[Cell], dtype: str, value: Callable[[Cell, TensorVerdict], float], form: str) -> str:
    values = [value(cell, tensor) for cell in cells if cell.dtype == dtype for tensor in cell.tensors]
    return form.format(max(values)) if values else "-"


def _relative(cell: Cell, tensor: TensorVerdict) -> float:
    del cell
    return tensor.relative or 0.0


def _used(cell: Cell, tensor: TensorVerdict) -> float:
    """Return the share of its allowance that the run took, not that of the twin it is judged by."""
    return (tensor.first_used if cell.what.startswith("torch") else tensor.second_used) or 0.0


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
