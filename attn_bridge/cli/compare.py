"""``attn-bridge compare``: a user's own pair of modules."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..parity.compare.dtypes import DTYPES
from . import inputs as arrays
from .output import Outputs, progress

MODES = ("eager", "jit")
DEVICES = ("cpu", "gpu", "tpu")

Html = Annotated[str | None, typer.Option(help="Write the report as one HTML page.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the report as JSON to FILE (with a dot or slash in its name), or to stdout.",
    ),
]
Junit = Annotated[str | None, typer.Option(help="Write the report as JUnit XML.")]
Full = Annotated[bool, typer.Option("--full", help="Show every module, tensor and pair.")]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE.toml", help="Which parameter is which; else proposed.")
]
Inputs = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="arr_0, arr_1 ... are positional inputs, other names keywords."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="2,8,16", help="Draw a positional input of this shape (may be repeated)."),
]
Seeds = Annotated[int, typer.Option(help="How many times weights and inputs are drawn.")]
FirstSeed = Annotated[int, typer.Option(help="The first seed.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="eager or jit (may be repeated).")]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", help=f"A precision, of {', '.join(DTYPES)} (may be repeated); else the modules' own."),
]


def compare(
    torch: Annotated[str, typer.Argument(metavar="TORCH", help="file.py:factory or module:factory.")],
    flax: Annotated[str, typer.Argument(metavar="FLAX", help="file.py:factory or module:factory.")],
    inputs: Inputs = None,
    flax_inputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="The Flax side's call, where it takes its arguments in another way."),
    ] = None,
    shapes: Shapes = None,
    rules: RulesFile = None,
    no_transfer: Annotated[bool, typer.Option("--no-transfer", help="Judge the weights that each side holds.")] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Run both in train mode, with the same dropout masks, instead of eval mode.")
    ] = False,
    seeds: Seeds = 4,
    first_seed: FirstSeed = 0,
    modes: Modes = None,
    dtypes: Dtypes = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu, or torch's and Flax's: cpu,gpu.")] = None,
    html: Html = None,
    json_file: Json = None,
    junit: Junit = None,
    save_repro: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Unless equal, write a folder that holds all it takes to run this again."),
    ] = None,
    full: Full = False,
    separate: Annotated[bool, typer.Option("--separate", help="Run each side in a process of its own.")] = False,
    torch_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python to run the torch side, with --separate.")
    ] = None,
    flax_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python to run the Flax side, with --separate.")
    ] = None,
) -> int:
    """Judge whether a torch and a Flax module compute the same outputs and gradients, and find where they part.

    A factory is a function without arguments that returns the module, a class whose constructor needs none, or the
    module itself. Its file's folder is importable, and so is the current one. Without --inputs and --shape, a function
    example_inputs() beside a factory (the torch one first) is called. What your code prints is not shown.

    Example: attn-bridge compare mine.py:make theirs.py:Model --shape 2,8,16 --html report.html

    Exit status: 0 = equal, 1 = different, or one side is less precise, 2 = bad usage, or inconclusive.
    """
    outputs = Outputs(html, json_file, junit, full)
    chosen = modes_and_dtypes(modes, dtypes, seeds, first_seed)
    devices = parse_device(device)
    call = read_inputs(inputs, shapes)
    flax_call = None if flax_inputs is None else arrays.read_npz(flax_inputs)
    options: dict[str, Any] = {
        "--inputs": inputs, "--flax-inputs": flax_inputs, "--shape": shapes, "--rules": rules,
        "--no-transfer": no_transfer, "--train": train, "--seeds": seeds if seeds != 4 else None,
        "--first-seed": first_seed or None, "--mode": modes, "--dtype": dtypes, "--device": device,
        "--separate": separate, "--torch-python": torch_python, "--flax-python": flax_python,
    }  # fmt: skip
    command = command_line("compare", torch, flax, options=options)
    if not separate and (torch_python or flax_python):
        raise ValueError("--torch-python and --flax-python go with --separate")
    if train and chosen["modes"] != ("eager",):
        raise ValueError("--train goes with --mode eager only: compiled code draws dropout masks of its own")
    if separate and train:
        raise ValueError("--train needs both sides in one process; it does not go with --separate")
    if separate:
        from .separate import run_separately

        if save_repro is not None:
            raise ValueError("--save-repro needs both sides in one process; it does not go with --separate")
        return outputs.write(run_separately(torch, flax, devices, options, command))

    from ..parity import factories, repro
    from ..parity.compare.driver import compare as judge
    from ..parity.dumps import folders
    from ..weights import Rules
    from .user_code import running

    if save_repro is not None:
        folders.check_new(save_repro, "--save-repro")
    found = None if rules is None else Rules.from_toml(rules)
    with progress() as advance, running("comparing"):
        ours, theirs = factories.load(torch, "TORCH"), factories.load(flax, "FLAX")
        if call is None:
            call = example_inputs(ours, theirs)
        pair = ours.build("torch"), theirs.build("flax")
        report = judge(
            *pair,
            call,
            rules=found,
            transfer=not no_transfer,
            train=train,
            seeds=seeds,
            first_seed=first_seed,
            device=devices,
            flax_inputs=flax_call,
            command=command,
            progress=advance,
            **chosen,
        )
        wanted = save_repro is not None and not report.passed
        bundle = repro.Bundle((ours, theirs), pair, call, flax_call, rules, options) if wanted else None
    if bundle is None or save_repro is None:
        return outputs.write(report)
    bundle.write(save_repro, report)
    return outputs.write(report, f"saved: {save_repro}; {repro.HOW}")


def modes_and_dtypes(
    modes: Sequence[str] | None, dtypes: Sequence[str] | None, seeds: int, first_seed: int
) -> dict[str, Any]:
    """Return the options of `compare` for these, checked before any work is done."""
    for option, names, known in (("--mode", modes, MODES), ("--dtype", dtypes, DTYPES)):
        for name in names or ():
            if name not in known:
                raise ValueError(f"{option} ({name}) must be one of {', '.join(known)}")
    for option, number, least in (("--seeds", seeds, 1), ("--first-seed", first_seed, 0)):
        if number < least:
            raise ValueError(f"{option} ({number}) must be at least {least}")
    return {"modes": tuple(modes or ("eager",)), "dtypes": tuple(dtypes) if dtypes else None}


def parse_device(text: str | None) -> tuple[str, str] | None:
    """Return the kinds of device of the torch and the Flax side."""
    kinds = [] if text is None else text.split(",")
    if any(kind not in DEVICES for kind in kinds) or len(kinds) > 2:
        raise ValueError(f"--device ({text}) must be one of {', '.join(DEVICES)}, or two for torch and Flax: cpu,gpu")
    return (kinds[0], kinds[-1]) if kinds else None


def read_inputs(file: Path | None, shapes: Sequence[str] | None) -> Any:
    """Return the call that --inputs or --shape give; None without both."""
    if file is not None and shapes:
        raise ValueError("--inputs and --shape do not go together")
    if file is not None:
        return arrays.read_npz(file)
    return arrays.draw(shapes) if shapes else None


def example_inputs(*found: Any) -> Any:
    """Return what the first of some factories that has ``example_inputs()`` beside it gives."""
    for factory in found:
        example = factory.example_inputs()
        if example is not None:
            return example
    raise ValueError(f"there are no inputs: {arrays.HOW}, or put a function example_inputs() beside a factory")


def command_line(*given: str, options: Mapping[str, Any]) -> str:
    """Return the command that runs this again."""
    return shlex.join(["attn-bridge", *given, *words(options)])


def words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line; those that are None, False or empty are left out."""
    found: list[str] = []
    for option, value in options.items():
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                found += [option, str(one)]
    return found
