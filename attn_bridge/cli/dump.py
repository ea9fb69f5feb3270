"""``attn-bridge dump`` and ``compare-dumps``: the two sides of a comparison where they can't share an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .compare import (
    Dtypes,
    FirstSeed,
    Full,
    Html,
    Inputs,
    Json,
    Junit,
    Modes,
    RulesFile,
    Seeds,
    Shapes,
    command_line,
    example_inputs,
    modes_and_dtypes,
    parse_device,
    read_inputs,
)
from .output import Outputs, progress


def dump(
    factory: Annotated[str, typer.Argument(metavar="FACTORY", help="file.py:factory or module:factory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be empty or not there.")],
    inputs: Inputs = None,
    shapes: Shapes = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="TORCH_DUMP", help="For Flax: take weights, inputs, seeds, modes and precisions from this dump."
        ),
    ] = None,
    rules: RulesFile = None,
    no_transfer: Annotated[
        bool, typer.Option("--no-transfer", help="With --like, keep the weights that the module holds.")
    ] = False,
    seeds: Seeds = 4,
    first_seed: FirstSeed = 0,
    modes: Modes = None,
    dtypes: Dtypes = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu.")] = None,
) -> int:
    """Write what one side computes into a folder, for compare-dumps; the other side's framework is not needed.

    Dump the torch side first, then the Flax side with --like TORCH_DUMP. A Flax dump without --like can be compared
    only where both sides hold the same weights already. Factories and inputs are given as for compare.

    Example: attn-bridge dump mine.py:make torch-dump --shape 2,8,16

    Exit status: 0 = written, 2 = bad usage.
    """
    from ..parity import factories
    from ..parity.dumps import folders, recording
    from ..weights import Rules
    from .user_code import running

    folders.check_new(out, "OUT")
    chosen = modes_and_dtypes(modes, dtypes, seeds, first_seed)
    if device is not None and "," in device:
        raise ValueError(f"--device ({device}) must be one kind, as one side is dumped")
    devices = parse_device(device)
    if like is not None and (modes or dtypes or (seeds, first_seed) != (4, 0)):
        raise ValueError("--like takes seeds, modes and precisions from the torch dump; give them there")
    if like is None and (rules is not None or no_transfer):
        raise ValueError("--rules and --no-transfer go with --like")
    call = read_inputs(inputs, shapes)
    found = None if rules is None else Rules.from_toml(rules)
    with progress() as advance, running("dumping"):
        made = factories.load(factory, "FACTORY")
        if call is None and like is None:
            call = example_inputs(made)
        module = made.build()
        recording.dump(
            module,
            call,
            out.absolute(),
            like=None if like is None else like.absolute(),
            rules=found,
            transfer=not no_transfer,
            seeds=seeds,
            first_seed=first_seed,
            device=devices and devices[0],
            progress=advance,
            **chosen,
        )
    typer.echo(f"{out}: {type(module).__name__}")
    return 0


def compare_dumps(
    torch: Annotated[Path, typer.Argument(metavar="TORCH_DUMP", help="Folder of the torch dump.")],
    flax: Annotated[Path, typer.Argument(metavar="FLAX_DUMP", help="Folder of the Flax dump.")],
    rules: RulesFile = None,
    html: Html = None,
    json_file: Json = None,
    junit: Junit = None,
    full: Full = False,
) -> int:
    """Judge two dumps as compare judges two modules; no framework is needed.

    Example: attn-bridge compare-dumps torch-dump flax-dump --json report.json

    Exit status: 0 = equal, 1 = different, or one side is less precise, 2 = bad usage, or inconclusive.
    """
    from ..parity.dumps import replay
    from ..weights import Rules

    outputs = Outputs(html, json_file, junit, full)
    options: dict[str, Any] = {"--rules": rules}
    command = command_line("compare-dumps", str(torch), str(flax), options=options)
    found = None if rules is None else Rules.from_toml(rules)
    with progress() as advance:
        report = replay.compare_dumps(torch, flax, rules=found, command=command, progress=advance)
    return outputs.write(report)
