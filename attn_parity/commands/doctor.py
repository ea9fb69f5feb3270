"""``attn-bridge doctor``: what on this machine would make equal implementations look different."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attn_bridge.cli.output import check_writable, write_json


def doctor(
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="Write the diagnosis as JSON to FILE (with a dot or slash in its name), or to stdout.",
        ),
    ] = None,
) -> int:
    """Show versions, devices and every setting that changes numbers, and name those that would spoil a comparison here.

    It examines a new process: the environment and the defaults. Inside a program, call
    attn_parity.settings.precision.record() to see the settings that the program made. A setting that no device of this
    machine reads spoils nothing.

    Example: attn-bridge doctor --json doctor.json

    Exit status: 0 = nothing unsafe, 1 = an unsafe setting, 2 = bad usage.
    """
    from rich.console import Console

    from ..settings.doctor import examine

    if json_file is not None:
        check_writable(json_file)
    diagnosis = examine()
    if json_file is not None:
        write_json(diagnosis.to_json(), json_file)
    if json_file != "-":
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        if diagnosis.switches:
            console.print(diagnosis.table())
        for line in diagnosis.lines():
            console.print(line, markup=False, soft_wrap=True)
    return 0 if diagnosis.passed else 1
