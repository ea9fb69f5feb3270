"""``attn-bridge laws``: one side alone, judged by laws that it must obey."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attn_bridge.cli.output import check_writable, progress

from .. import input_files as arrays
from ..command_line import command_line
from ..laws import LAWS
from .compare import (
    BuildSeed,
    Inputs,
    Json,
    Output,
    Shapes,
    Timeout,
    build,
    check_timeout,
    example_inputs,
    load_alone,
    parse_device,
    read_inputs,
)
from .outputs import write_or_show


def laws(
    factory: Annotated[str, typer.Argument(metavar="FACTORY", help="file.py:factory or module:factory.")],
    inputs: Inputs = None,
    shapes: Shapes = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="LAW", help=f"Try this law, of {', '.join(LAWS)} (may be repeated)."),
    ] = None,
    batch_axis: Annotated[
        int | None, typer.Option("--batch-axis", metavar="AXIS", help="Axis of the batch in the first input; else 0.")
    ] = None,
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn weights and inputs.")] = 0,
    build_seed: BuildSeed = 0,
    device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu.")] = None,
    timeout: Timeout = None,
    json_file: Json = None,
) -> int:
    """Try laws that one side must obey alone: rows of a batch, padding, causality, caches, heads, gradients.

    They find faults that a port shares with its source. The side runs in eval mode and in float64, with drawn weights.
    A law is tried where the arguments of the module and of the call allow it; the report names the others, with the
    reason. Factories and inputs are given as for compare. The output of your code is not shown.

    Example: attn-bridge laws mine.py:make --shape 2,8,16 --only causality

    Exit status: 0 = no law is broken, 1 = one is, 2 = bad usage, no law could be tried, or timed out.
    """
    from .isolation.user_code import running, watched

    if json_file not in (None, "-"):
        check_writable(json_file, "--json")
    for name in only or ():
        if name not in LAWS:
            raise ValueError(f"--only ({name}) must be one of {', '.join(LAWS)}")
    for option, number in (("--seed", seed), ("--batch-axis", batch_axis or 0)):
        if number < 0:
            raise ValueError(f"{option} ({number}) must be at least 0")
    check_timeout(timeout)
    if device is not None and "," in device:
        raise ValueError(f"--device ({device}) must be one kind, as one side is judged")
    devices = parse_device(device)
    call = read_inputs(inputs, shapes)
    options: dict[str, object] = {
        "--inputs": inputs, "--shape": shapes, "--only": only, "--batch-axis": batch_axis, "--output": output,
        "--seed": seed or None, "--build-seed": build_seed or None, "--device": device,
        "--timeout": None if timeout is None else f"{timeout:g}",
    }  # fmt: skip
    with arrays.explained(shapes), watched(timeout) as dog, progress() as advance, running("trying laws"):
        from ..laws.driver import laws as judge

        made = load_alone(factory, build_seed, dog)
        call = example_inputs(made) if call is None else call
        report = judge(
            build(made, "", build_seed),
            call,
            only=tuple(only or ()),
            output=output,
            batch_axis=batch_axis,
            device=devices and devices[0],
            seed=seed,
            command=command_line("laws", factory, options=options),
            progress=advance,
        )
    write_or_show(report.to_json, json_file, lambda: typer.echo(str(report)))
    if not report.broken and not report.passed:
        sys.stdout.flush()
        raise ValueError(f"no law could be tried: {report.laws[0].why}")
    return 0 if report.passed else 1
