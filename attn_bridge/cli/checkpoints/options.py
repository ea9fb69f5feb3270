"""Shared by commands on checkpoints: options, parsing of sizes and settings, and the display of a plan."""

from __future__ import annotations

import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..output import check_writable
from .places import is_remote, place

if TYPE_CHECKING:
    from rich.console import Console

    from ...checkpoints.planning.plans import Plan, TargetTensor

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Source = Annotated[Path, typer.Argument(metavar="SRC", help="File or folder to convert, or its URL.", parser=place)]
Destination = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="File (its extension says the container), or folder (safetensors).", parser=place
    ),
]
FromLayout = Annotated[
    str | None, typer.Option("--from", metavar="LAYOUT", help="Layout of SRC; default: found by its names.")
]
ToLayout = Annotated[
    str | None,
    typer.Option("--to", metavar="LAYOUT", help="Layout of DST; default: flax, or torch for what is Flax's; same."),
]
Container = Annotated[
    str | None,
    typer.Option(metavar="CONTAINER", help="Container of DST: safetensors, torch, npz, msgpack, orbax, dcp."),
]
Dtype = Annotated[str | None, typer.Option(help="Cast floating-point tensors: bf16, f16, f32, f64; default: never.")]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Make floating point of MXFP4, float8 with scales, GPTQ, AWQ, bitsandbytes and compressed-tensors: "
        "--dtype, or bf16.",
    ),
]
Strip = Annotated[
    str | None,
    typer.Option(
        metavar="PREFIX", help="Take PREFIX, such as module., away from SRC's names; what has it not is left out."
    ),
]
SourceContainer = Annotated[
    str | None,
    typer.Option("--source-format", metavar="CONTAINER", help="Container of SRC, where its extension says another."),
]
Adapter = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Merge this LoRA of peft into SRC, in float32, rounded once.", parser=place),
]
Step = Annotated[
    int | None, typer.Option(metavar="N", help="Step of SRC, a run of Orbax's CheckpointManager; default: the newest.")
]
Item = Annotated[
    str | None, typer.Option(metavar="NAME", help="Item of a step of Orbax, where it has several, such as params.")
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Leave out SRC's tensors whose names fit PATTERN, such as 'visual.*' (may be repeated)."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="What names and shapes can't say, such as num_heads=12; else read from config.json (may be repeated).",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the report as JSON to FILE (with a dot or slash in its name), or to stdout.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB; default: 3 x the largest tensor."),
]
Rules = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML file of your own rules, in place of the layouts.")
]
TaskBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="What a worker writes at a time, at most, and half of its memory; default: 256MiB."
    ),
]


def plan_json(plan: Plan) -> dict[str, object]:
    """Return a plan as data for a report."""
    return {
        "source": {"path": str(plan.source), "format": plan.source_format, "layout": plan.source_layout},
        "layout": plan.target_layout,
        "tensors": [
            {
                "name": one.info.name,
                "dtype": one.info.dtype,
                "shape": list(one.info.shape),
                "file": one.info.file,
                "operation": one.operation,
                "sources": _sources(plan, one),
                "bytes": one.info.nbytes,
            }
            for one in plan.targets
        ],
        "kept_aside": plan.dropped,
        "dropped": {pattern: list(names) for pattern, names in plan.selection.dropped.items()},
        "left_out": list(plan.selection.left_out),
        "notes": list(plan.notes),
        "bytes": plan.nbytes,
        "peak_memory": plan.peak,
    }


def _sources(plan: Plan, target: TargetTensor) -> list[str]:
    """Return the source tensors of a target, including scales of quantised numbers."""
    return [one for name in target.sources for one in (name, *plan.scales.get(name, ()))]


def print_plan(plan: Plan, console: Console, memory: str) -> None:
    """Print every tensor of a plan, and the totals."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "bytes", "operation", "from", "file"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    for target in plan.targets:
        shape = " x ".join(map(str, target.info.shape)) or "scalar"
        sources = ", ".join(_sources(plan, target))
        table.add_row(
            target.info.name,
            target.info.dtype,
            shape,
            shown_size(target.info.nbytes),
            target.operation,
            sources,
            target.info.file,
        )
    console.print(table)
    console.print(f"{summary(plan, 'would write')}, {memory}", markup=False, soft_wrap=True)


def memory_of(plan: Plan, workers: int, task_bytes: int | None, max_memory: int | None = None) -> str:
    """Return the approximate memory of a conversion: per worker if workers or task sizes were requested."""
    if workers == 1 and task_bytes is None:
        return f"peak memory about {shown_size(plan.peak if max_memory is None else min(plan.peak, max_memory))}"
    from ...checkpoints.workers.jobs import BASE, size_of

    most = BASE + 2 * size_of(plan, workers, task_bytes)
    most = most if max_memory is None else min(most, max_memory // workers)
    return f"peak memory of each worker about {shown_size(most)}"


def summary(plan: Plan, begin: str) -> str:
    """Return a plan in one line."""
    layouts = f"{plan.source_layout} to {plan.target_layout}" if plan.source_layout else "same layout"
    kept = f", {len(plan.dropped)} kept aside" if plan.dropped else ""
    left_out = plan.selection.count_left_out
    kept += f", {left_out} left out" if left_out else ""
    return f"{begin} {len(plan.targets)} tensors, {shown_size(plan.nbytes)}, {layouts}{kept}"


def shown_size(count: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def make_console() -> Console:
    """Return the console that a table goes to: as wide as a terminal, else wide enough."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 140)


def parse_settings(settings: list[str]) -> dict[str, object]:
    """Return settings by name; whole numbers as such."""
    values_by_key: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, got {setting}")
        values_by_key[key] = int(value) if value.isdecimal() else value
    return values_by_key


def parse_size(text: str, option: str = "--max-memory") -> int:
    """Return a number of bytes: ``1000000``, ``512MiB``, ``2GB``."""
    hit = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if hit is None:
        raise ValueError(f"{option} ({text}) must be a size such as 512MiB or 2GB")
    return int(Decimal(hit.group(1)) * _UNITS[(hit.group(2) or "").lower()])


def check_report(json_file: str | None, *paths: Path, option: str = "--json") -> None:
    """Refuse a report that can't be written, or whose path conflicts with a checkpoint.

    Raises:
        ValueError: it is one of the paths, in one of them, a file of their manifests, or has a checkpoint's extension.
    """
    from ...checkpoints.containers import ENDINGS

    if json_file in (None, "-"):
        return
    assert json_file is not None
    check_writable(json_file, option)
    report = Path(os.path.realpath(json_file))
    for path in (Path(os.path.realpath(one)) for one in paths if not is_remote(one)):
        if path in (report, *report.parents) or report.name.startswith(f"{path.name}.attn-bridge."):
            raise ValueError(f"{option} {json_file} must not be part of {path}")
    if report.suffix in ENDINGS:
        raise ValueError(f"{option} {json_file} is named as a checkpoint is; choose another name")
