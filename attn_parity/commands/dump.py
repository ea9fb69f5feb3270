"""``attn-bridge dump`` and ``compare-dumps``: the two sides of a comparison where they can't share an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attn_bridge.cli.output import progress

from .. import input_files as arrays
from ..command_line import command_line
from .compare import (
    Aftermath,
    Allow,
    Baseline,
    BuildSeed,
    Dtypes,
    FirstSeed,
    Fixed,
    Full,
    Html,
    Inputs,
    Json,
    Junit,
    Modes,
    Output,
    RulesFile,
    Seeds,
    Shapes,
    Timeout,
    Vary,
    build,
    check_timeout,
    example_inputs,
    load_alone,
    modes_and_dtypes,
    named,
    parse_device,
    read_inputs,
)
from .outputs import Outputs


def dump(
    factory: Annotated[str, typer.Argument(metavar="FACTORY", help="file.py:factory or module:factory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be empty or not there.")],
    inputs: Inputs = None,
    shapes: Shapes = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FIRST_DUMP",
            help="For the second side: take weights, inputs, seeds, modes and precisions from this dump.",
        ),
    ] = None,
    fixed: Fixed = None,
    vary: Vary = None,
    rules: RulesFile = None,
    no_transfer: Annotated[
        bool, typer.Option("--no-transfer", help="With --like, keep the weights that the module holds.")
    ] = False,
    seeds: Seeds = 4,
    first_seed: FirstSeed = 0,
    build_seed: BuildSeed = 0,
    modes: Modes = None,
    dtypes: Dtypes = None,
    output: Output = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu.")] = None,
    timeout: Timeout = None,
) -> int:
    """Write the results of one side to a folder, for compare-dumps; the other side's framework is not needed.

    Dump the first side first, then the second with --like FIRST_DUMP. A second dump without --like can be compared only
    where both sides hold the same weights already. Factories and inputs are given as for compare.

    Example: attn-bridge dump mine.py:make first-dump --shape 2,8,16

    Exit status: 0 = written, 2 = bad usage, or timed out.
    """
    from attn_bridge import whole_folders as folders
    from attn_bridge.weights import Rules

    from .. import factories
    from ..dumps import recording
    from .isolation.user_code import running, watched

    folders.check_new(out, "OUT")
    chosen = modes_and_dtypes(modes, dtypes, seeds, first_seed)
    chosen |= {name: value for name, value in (("fixed", named(fixed)), ("vary", named(vary))) if value}
    chosen |= {} if output is None else {"output": output}
    check_timeout(timeout)
    if device is not None and "," in device:
        raise ValueError(f"--device ({device}) must be one kind, as one side is dumped")
    devices = parse_device(device)
    if like is not None and (modes or dtypes or fixed or vary or (seeds, first_seed) != (4, 0)):
        raise ValueError("--like takes inputs to draw, seeds, modes and precisions from that dump; give them there")
    if like is None and (rules is not None or no_transfer):
        raise ValueError("--rules and --no-transfer go with --like")
    call = read_inputs(inputs, shapes)
    parsed_rules = None if rules is None else Rules.from_toml(rules)
    with arrays.explained(shapes), watched(timeout) as dog, progress() as advance, running("dumping"):
        made = load_alone(factory, build_seed, dog)
        if dog is not None:
            dog.leave_nothing_beside(out)
        if call is None and like is None:
            call = example_inputs(made)
        module = build(made, "", build_seed)
        recording.dump(
            module,
            call,
            out.absolute(),
            like=None if like is None else like.absolute(),
            rules=parsed_rules,
            transfer=not no_transfer,
            seeds=seeds,
            first_seed=first_seed,
            device=devices and devices[0],
            progress=advance,
            **chosen,
        )
    typer.echo(f"{out}: {factories.name_of(module)}")
    return 0


def compare_dumps(
    first: Annotated[Path, typer.Argument(metavar="FIRST_DUMP", help="Folder of the first side's dump.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND_DUMP", help="Folder of the second side's dump.")],
    rules: RulesFile = None,
    allow: Allow = None,
    baseline: Baseline = None,
    html: Html = None,
    json_file: Json = None,
    junit: Junit = None,
    full: Full = False,
) -> int:
    """Judge two dumps as compare judges two sides; no framework is needed.

    Example: attn-bridge compare-dumps first-dump second-dump --json report.json

    Exit status: 0 = equal, 1 = different, or one side is less precise, 2 = bad usage, or inconclusive.
    """
    from attn_bridge.weights import Rules

    from ..dumps import replay

    outputs = Outputs(html, json_file, junit, full)
    after = Aftermath.of(allow, baseline)
    options: dict[str, Any] = {"--rules": rules, "--allow": allow, "--baseline": baseline}
    command = command_line("compare-dumps", str(first), str(second), options=options)
    parsed_rules = None if rules is None else Rules.from_toml(rules)
    with progress() as advance:
        report = replay.compare_dumps(first, second, rules=parsed_rules, command=command, progress=advance)
    return outputs.write(after.apply(report))
