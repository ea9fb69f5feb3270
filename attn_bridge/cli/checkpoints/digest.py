"""``attn-bridge digest``: digests of live weights and of checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from ..judge import load_judge
from ..output import write_json
from .options import Json, Settings, check_report, make_console, parse_settings
from .places import is_remote, place


def digest(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODULE_OR_PATH", help="file.py:factory or module:factory of a module; or a checkpoint."
        ),
    ],
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="LAYOUT", help="Names and shapes to take; default: its own.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors before: bf16, f16, f32, f64; default: never.")
    ] = None,
    settings: Settings = None,
    json_file: Json = None,
) -> int:
    """Show a digest per tensor of a module's weights, or of a checkpoint's: that of what convert would write.

    A module that ranks share is read from where it lies, never gathered: call attn_bridge.digests on every rank of it.
    verify compares what --json wrote with a checkpoint, a manifest, or what another side wrote.

    Example: attn-bridge digest mine.py:trained --layout hf-llama --json trained.json

    Exit status: 0 = taken, 1 = devices that should hold the same do not, 2 = bad usage or bad input.
    """
    from rich.table import Table

    from ...checkpoints import live

    options: dict[str, Any] = {"layout": layout, "dtype": dtype, "settings": parse_settings(settings or [])}
    path = place(source)
    is_module = not is_remote(path) and not path.exists() and re.search(r":[^\W\d][\w.]*$", source) is not None
    check_report(json_file, *(() if is_module else (path,)))
    if is_module:
        factories, user_code = load_judge("factories"), load_judge("commands.isolation.user_code")
        with user_code.running("digesting"):
            digests = live.digests(factories.load(source, "MODULE_OR_PATH").build(0), **options)
    else:
        digests = live.digests(path, **options)
    if json_file is not None:
        write_json(digests.to_json(), json_file)
    problems = digests.problems
    if json_file != "-":
        console = make_console()
        table = Table(box=None, pad_edge=False)
        for title in ("tensor", "dtype", "shape", "blake3"):
            table.add_column(title, overflow="fold")
        for name, tensor in digests.tensors.items():
            table.add_row(name, tensor.dtype, " x ".join(map(str, tensor.shape)) or "scalar", tensor.digest)
        console.print(table)
        for name, problem in problems.items():
            console.print(f"{name}: {problem}", markup=False, soft_wrap=True)
        whose = f"layout {digests.layout}" if digests.layout else "its own names"
        console.print(
            f"{source if is_module else path}: {len(digests.tensors)} tensors, {whose}", markup=False, soft_wrap=True
        )
    return 1 if problems else 0
