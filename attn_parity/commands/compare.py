"""``attn-bridge compare``: a user's own pair, any two sides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_bridge.cli import collector
from attn_bridge.cli.output import progress

from .. import input_files as arrays
from ..command_line import command_line
from ..samples.limits import MAX_SEEDS
from ..sides.arrays import DTYPES
from .outputs import Outputs

if TYPE_CHECKING:
    from ..factories import Factory
    from ..results.changes import Data
    from ..results.report import Report
    from ..watch import Watchdog

MODES = ("eager", "jit")
DEVICES = ("cpu", "gpu", "tpu")

Html = Annotated[
    str | None, typer.Option(metavar="[FILE]", help="Write the report as one HTML page; without FILE report.html.")
]
Open = Annotated[bool, typer.Option("--open", help="Open the HTML page in a browser; it is a temporary one by itself.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the report as JSON to FILE (with a dot or slash in its name), or to stdout.",
    ),
]
Junit = Annotated[str | None, typer.Option(help="Write the report as JUnit XML.")]
Full = Annotated[
    bool, typer.Option("--full", help="Show every module, tensor and pair, the noise and the environment.")
]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE.toml", help="Which parameter is which; else proposed.")
]
Inputs = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="arr_0, arr_1 ... are positional inputs, other names keywords."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="2,8,16", help="Draw a positional input of this shape, of floats (may be repeated)."
    ),
]
Fixed = Annotated[
    list[str] | None,
    typer.Option("--fixed", metavar="NAME", help="Never draw this input, a name or position (may be repeated)."),
]
Vary = Annotated[
    list[str] | None,
    typer.Option("--vary", metavar="NAME", help="Draw this input although it holds whole numbers (may be repeated)."),
]
Output = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Judge this entry of what the sides return: logits, last_hidden_state."),
]
Seeds = Annotated[int, typer.Option(help=f"How many times weights and inputs are drawn, at most {MAX_SEEDS}.")]
FirstSeed = Annotated[int, typer.Option(help="The first seed.")]
BuildSeed = Annotated[int, typer.Option(help="Seed of Python, NumPy and torch while a factory runs.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="eager or jit (may be repeated).")]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", help=f"A precision, of {', '.join(DTYPES)} (may be repeated); else the modules' own."),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Longest that a side may take to be built, or for one run of it."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PATH=REASON",
        help="Accept a known difference in this submodule or tensor (may be repeated); every report says so.",
    ),
]
Baseline = Annotated[
    Path | None, typer.Option(metavar="REPORT.json", help="Show what has changed since this report was written.")
]


def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="file.py:factory or module:factory.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="file.py:factory or module:factory.")],
    inputs: Inputs = None,
    second_inputs: Annotated[
        Path | None,
        typer.Option(
            "--second-inputs",
            "--flax-inputs",
            metavar="FILE.npz",
            help="The second side's call, where it takes its arguments in another way.",
        ),
    ] = None,
    shapes: Shapes = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this (pytest ... or python ...) and compare on what it calls the class FIRST (a.b.Class) with.",
        ),
    ] = None,
    fixed: Fixed = None,
    vary: Vary = None,
    rules: RulesFile = None,
    no_transfer: Annotated[bool, typer.Option("--no-transfer", help="Judge the weights that each side holds.")] = False,
    output: Output = None,
    train: Annotated[
        bool, typer.Option("--train", help="Run both in train mode, with the same dropout masks, instead of eval mode.")
    ] = False,
    seeds: Seeds = 4,
    first_seed: FirstSeed = 0,
    build_seed: BuildSeed = 0,
    modes: Modes = None,
    dtypes: Dtypes = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, gpu or tpu, or the first side's and the second's: cpu,gpu.")
    ] = None,
    timeout: Timeout = None,
    allow: Allow = None,
    baseline: Baseline = None,
    html: Html = None,
    show: Open = False,
    json_file: Json = None,
    junit: Junit = None,
    save_repro: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Unless equal, write a folder that holds all it takes to run this again."),
    ] = None,
    full: Full = False,
    separate: Annotated[bool, typer.Option("--separate", help="Run each side in a process of its own.")] = False,
    first_python: Annotated[
        str | None,
        typer.Option(
            "--first-python", "--torch-python", metavar="PATH", help="Python to run the first side, with --separate."
        ),
    ] = None,
    second_python: Annotated[
        str | None,
        typer.Option(
            "--second-python", "--flax-python", metavar="PATH", help="Python to run the second side, with --separate."
        ),
    ] = None,
) -> int:
    """Judge whether two sides compute the same outputs and gradients, and find where they diverge.

    A factory is a function without arguments that returns a side, a class whose constructor needs none, or the side
    itself: a torch.nn.Module, an nnx.Module, a Linen module with its variables, an Equinox module, a Haiku function
    with its parameters, a Keras model, or parity.function(f, weights). Its file's folder is importable, and so is the
    current one. Without --inputs and --shape, the inputs come from a function example_inputs() in the file of a factory
    (FIRST is asked first). The output of your code is not shown.

    With --record, FIRST is a class by the name that the command imports it by. It is built with the constructor
    arguments of its first call there, and both sides are called with the arguments of that call.

    Example: attn-bridge compare mine.py:make theirs.py:Model --shape 2,8,16 --html report.html

    Exit status: 0 = equal, 1 = different, or one side is less precise, 2 = bad usage, inconclusive, or timed out.
    """
    outputs = Outputs(html, json_file, junit, full, show)
    chosen: dict[str, Any] = modes_and_dtypes(modes, dtypes, seeds, first_seed)
    chosen |= {name: value for name, value in (("fixed", named(fixed)), ("vary", named(vary))) if value}
    chosen |= {} if output is None else {"output": output}
    chosen |= {"seeds": seeds, "first_seed": first_seed, "device": parse_device(device)}
    check_timeout(timeout)
    after = Aftermath.of(allow, baseline)
    call = read_inputs(inputs, shapes)
    options: dict[str, object] = {
        "--inputs": inputs, "--second-inputs": second_inputs, "--shape": shapes, "--record": record,
        "--fixed": fixed, "--vary": vary,
        "--rules": rules, "--no-transfer": no_transfer, "--output": output, "--train": train,
        "--seeds": seeds if seeds != 4 else None,
        "--first-seed": first_seed or None, "--build-seed": build_seed or None, "--mode": modes, "--dtype": dtypes,
        "--device": device, "--timeout": _plain(timeout), "--allow": allow, "--baseline": baseline,
        "--separate": separate, "--first-python": first_python, "--second-python": second_python,
    }  # fmt: skip
    run = Comparison(
        (first, second), call, second_inputs, rules, options, build_seed, timeout, json_file is not None, record
    )
    run.check(train, separate, save_repro, chosen["modes"])
    if separate:
        from .isolation.separate import run_separately

        report = after.apply(run_separately(first, second, chosen["device"], options, run.command))
        return outputs.write(report)
    with arrays.explained(shapes):
        report, bundle = run.judged({"transfer": not no_transfer, "train": train, **chosen}, after, save_repro)
    if bundle is None or save_repro is None:
        return outputs.write(report)
    from .. import repro

    bundle.write(save_repro, report)
    return outputs.write(report, f"saved: {save_repro}; {repro.HOW}")


@dataclasses.dataclass(frozen=True)
class Aftermath:
    """Filters that apply to a report before it is shown.

    Attributes:
        allow: path -> why it may differ.
        baseline: the data of an earlier report, None for none.
    """

    allow: Mapping[str, str]
    baseline: Mapping[str, object] | None

    @classmethod
    def of(cls, allow: Sequence[str] | None, baseline: Path | None) -> Aftermath:
        """Read both, before any work is done."""
        from ..results import allowances, changes

        return cls(allowances.parse(allow or ()), None if baseline is None else changes.read(baseline))

    def apply(self, report: Report) -> Report:
        """Return the report with allowed differences marked, and with the changes since the baseline."""
        from ..results import allowances

        report = report if report.allowed else allowances.accept(report, self.allow)
        if self.baseline is None:
            return report
        return dataclasses.replace(report, changes=report.changes_since(self.baseline))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One run of the command in this process.

    Attributes:
        factories: names of the factories, the first side first.
        call: the first side's call; None to use ``example_inputs()``.
        second_inputs: file of the second side's call.
        rules: the rules file.
        options: all options by name, for the command that runs it again.
        build_seed: seed while factories run.
        timeout: longest that a call of a side, or the command that is recorded, may take, in seconds.
        with_subjects: whether the report stores digests of code, weights and inputs.
        record: the command whose calls of the first side are recorded; None for none.
    """

    factories: tuple[str, str]
    call: Any
    second_inputs: Path | None
    rules: Path | None
    options: Mapping[str, Any]
    build_seed: int
    timeout: float | None
    with_subjects: bool = False
    record: str | None = None

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return command_line("compare", *self.factories, options=self.options)

    def check(self, train: bool, separate: bool, save_repro: Path | None, modes: tuple[str, ...]) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: some don't.
        """
        if self.record is not None and (self.call is not None or separate or save_repro is not None):
            raise ValueError("--record does not go with --inputs, --shape, --separate and --save-repro")
        if not separate and (self.options["--first-python"] or self.options["--second-python"]):
            raise ValueError("--first-python and --second-python go with --separate")
        if train and modes != ("eager",):
            raise ValueError("--train goes with --mode eager only: compiled code draws dropout masks of its own")
        if separate and train:
            raise ValueError("--train needs both sides in one process; it does not go with --separate")
        if separate and save_repro is not None:
            raise ValueError("--save-repro needs both sides in one process; it does not go with --separate")
        if save_repro is not None:
            from attn_bridge import whole_folders as folders

            folders.check_new(save_repro, "--save-repro")

    def judged(self, chosen: Mapping[str, Any], after: Aftermath, save_repro: Path | None) -> tuple[Report, Any]:
        """Return the report, and the bundle that reproduces it if one is wanted and the two are not equal."""
        from attn_bridge.weights import Rules

        from .. import breadcrumbs, factories, repro
        from ..compare.driver import compare as judge
        from ..recorded.process import recorded
        from .isolation.user_code import running, watched

        second_call = None if self.second_inputs is None else arrays.read_npz(self.second_inputs)
        parsed_rules = None if self.rules is None else Rules.from_toml(self.rules)
        with watched(self.timeout) as dog, progress() as advance, running("comparing"):
            kept = None if self.record is None else recorded(self.record, self.factories[0], self.timeout)
            ours = _loaded(self.factories[0], "FIRST", self.build_seed) if kept is None else kept.factory
            theirs = _loaded(self.factories[1], "SECOND", self.build_seed)
            sources = _sources(ours, theirs)
            collector.resume()
            breadcrumbs.note(sources={side: str(file) for side, file in sources.items()})
            if dog is not None:
                dog.sources |= sources
            call = self.call if kept is None else kept.call.inputs
            call = example_inputs(ours, theirs) if call is None else call
            pair = build(ours, "first", self.build_seed), build(theirs, "second", self.build_seed)
            sides = _names(factories.labels(pair))
            breadcrumbs.note(names=sides)
            if dog is not None:
                dog.names |= sides
            # Before the comparison, which gives the sides other weights.
            subjects = self._subjects(pair, call, second_call) if self.with_subjects else {}
            more = dict(chosen) if second_call is None else {**chosen, "flax_inputs": second_call}
            more |= {"allow": after.allow}  # what is left of a difference then takes another run
            report = judge(pair[0], pair[1], call, rules=parsed_rules, command=self.command, progress=advance, **more)
            if subjects:
                report = dataclasses.replace(report, subjects=_with_code(subjects, (ours, theirs)))
            report = after.apply(report)
            report.notes[:0] = [] if kept is None else kept.notes
            if save_repro is None or report.passed:
                return report, None
            return report, repro.Bundle((ours, theirs), pair, call, second_call, self.rules, self.options)

    def _subjects(self, pair: tuple[object, object], call: object, second_call: object) -> Data:
        """Return the digests of all subjects but the code, which imports more while it runs."""
        from ..attestation import subjects

        calls = [call] if second_call is None else [call, second_call]
        return {
            **{name: {"weights": subjects.weights(side)} for name, side in zip(subjects.SIDES, pair, strict=True)},
            "inputs": [subjects.call(given) for given in calls],
            "rules": None if self.rules is None else subjects.of_file(self.rules),
            "judge": subjects.judge(),
        }


def _with_code(data: Data, pair: tuple[Factory, Factory]) -> Data:
    """Return digests with those of the code of both sides."""
    from ..attestation import subjects

    sides = zip(subjects.SIDES, pair, strict=True)
    return {**data, **{name: {**data[name], **subjects.code(factory, Path.cwd())} for name, factory in sides}}


def _loaded(name: str, what: str, seed: int) -> Factory:
    from .. import factories, watch

    with watch.phase(what.lower(), "importing"), factories.seeded(seed):
        return factories.load(name, what or "FACTORY")


def build(factory: Factory, side: str, seed: int) -> object:
    """Build a side's module; a timeout names the side, "" for a side alone."""
    from .. import watch

    with watch.phase(side, "building"):
        return factory.build(seed)


def _names(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each side in messages, by its position and by its framework if the two differ."""
    from ..results.findings import shown

    names = {place: f"{place} side ({shown(label)})" for place, label in labels.items() if label != place}
    return names | {labels[place]: name for place, name in names.items()}


def _sources(*factories: Factory) -> dict[str, Path]:
    """Return side -> the file of its factory, where the two are not in one."""
    files = [getattr(one.module, "__file__", None) for one in factories]
    if len({*files, None}) < 3:
        return {"": Path(files[0])} if files[0] else {}
    return {side: Path(str(file)) for side, file in zip(("first", "second"), files, strict=True)}


def named(texts: Sequence[str] | None) -> tuple[str | int, ...]:
    """Return names of inputs as `compare` takes them: a position as a number, also where it is written ``arr_0``."""
    plain = [one.removeprefix("arr_") for one in texts or ()]
    return tuple(int(one) if one.isdecimal() else name for one, name in zip(plain, texts or (), strict=True))


def check_timeout(seconds: float | None) -> None:
    """Raise a ValueError for a limit that is not a positive, finite number of seconds."""
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"--timeout ({seconds:g}) must be a number of seconds above 0")


def _plain(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:g}"


def load_alone(name: str, seed: int, dog: Watchdog | None) -> Factory:
    """Import the factory of a command that runs one side; crashes and timeouts name its file from then on."""
    from .. import breadcrumbs

    made = _loaded(name, "", seed)
    collector.resume()
    sources = _sources(made)
    names = dict.fromkeys(("torch", "flax"), "side")  # there is no other
    breadcrumbs.note(names=names, sources={side: str(file) for side, file in sources.items()})
    if dog is not None:
        dog.sources |= sources
        dog.names |= names
    return made


def modes_and_dtypes(
    modes: Sequence[str] | None, dtypes: Sequence[str] | None, seeds: int, first_seed: int
) -> dict[str, Any]:
    """Return the options of `compare` for these, checked before any work is done."""
    for option, names, choices in (("--mode", modes, MODES), ("--dtype", dtypes, DTYPES)):
        for name in names or ():
            if name not in choices:
                raise ValueError(f"{option} ({name}) must be one of {', '.join(choices)}")
    for option, number, least in (("--seeds", seeds, 1), ("--first-seed", first_seed, 0)):
        if number < least:
            raise ValueError(f"{option} ({number}) must be at least {least}")
    if seeds > MAX_SEEDS:
        raise ValueError(f"--seeds ({seeds}) must be at most {MAX_SEEDS}")
    return {"modes": tuple(modes or ("eager",)), "dtypes": tuple(dtypes) if dtypes else None}


def parse_device(text: str | None) -> tuple[str, str] | None:
    """Return the kinds of device of the first and the second side."""
    kinds = [] if text is None else ["gpu" if kind == "cuda" else kind for kind in text.split(",")]
    if any(kind not in DEVICES for kind in kinds) or len(kinds) > 2:
        raise ValueError(f"--device ({text}) must be one of {', '.join(DEVICES)}, or two for both sides: cpu,gpu")
    return (kinds[0], kinds[-1]) if kinds else None


def read_inputs(file: Path | None, shapes: Sequence[str] | None) -> Any:
    """Return the call that --inputs or --shape give; None without both."""
    if file is not None and shapes:
        raise ValueError("--inputs and --shape do not go together")
    if file is not None:
        return arrays.read_npz(file)
    return arrays.draw(shapes) if shapes else None


def example_inputs(*factories: Factory) -> Any:
    """Return the inputs of the first factory whose module has ``example_inputs()``.

    Raises:
        ValueError: no factory has any.
    """
    for factory in factories:
        example = factory.example_inputs()
        if example is not None:
            return example
    raise ValueError(f"there are no inputs: {arrays.HOW}, or put a function example_inputs() beside a factory")
