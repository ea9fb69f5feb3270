"""``attn-bridge mutate``: how many planted faults the judge finds, and how many right pairs it objects to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from attn_bridge.cli.output import check_writable, progress, write_json, written
from attn_bridge.cli.processes import AUTO, Jobs, parse_jobs
from attn_parity.commands.check import parse_mesh


def mutate(
    configs: Annotated[int, typer.Option(help="Right pairs of modules, each of another shape, scale and seed.")] = 30,
    faults: Annotated[int | None, typer.Option(help="Plant only the first N faults of the list.")] = None,
    only: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Plant only faults whose names begin like one of these, joined by commas."),
    ] = "",
    plants: Annotated[int, typer.Option(help="How many times each fault is planted on each side.")] = 1,
    seed: Annotated[int, typer.Option(help="Where seeds begin.")] = 5000,
    jobs: Jobs = AUTO,
    gallery: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE|FILE", help="Judge the entries of a gallery as well; with :NAME if it is not 'entries'."
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(metavar="CASE", help="Run one case of a report again, as right:SEED or FAULT:SIDE:SEED."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Plant distributed faults on a mesh of simulated devices, such as tensor=2,context=2.",
        ),
    ] = None,
    framework: Annotated[
        list[str] | None, typer.Option(help="With --mesh: torch or flax; those that are installed by default.")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="Write the report as JSON to FILE (with a dot or slash in its name), or to stdout.",
        ),
    ] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as Markdown to FILE.")] = None,
) -> int:
    """Measure the judge behind compare: faults planted into torch or Flax must be found, right pairs must pass.

    The table also shows the verdicts of the usual rules on the same numbers: rejected by the outputs | by gradients,
    too. The default makes some 220 comparisons of a few seconds each.

    Each side runs attention by an implementation that the seed draws. A gallery is a Python file of pairs with known
    verdicts, right and with faults; it adds a table, and with it --configs and --faults may be 0.

    Example: attn-bridge mutate --configs 200 --plants 3 --json mutants.json

    Example: attn-bridge mutate --configs 0 --faults 0 --gallery my_pairs.py

    With --mesh the faults are those of many devices, in a hand-written distributed block; right pairs are that block
    and our own modules on the mesh. --configs and --plants then count for each framework.

    Example: attn-bridge mutate --mesh tensor=2,context=2 --configs 50

    Exit status: 0 = every visible fault is found without a false alarm, 1 otherwise, 2 = bad usage.
    """
    from rich.console import Console

    from attn_bridge.backends import usable_cores
    from attn_parity.workers import MAX_JOBS

    from .driver import find_trial, run_trial
    from .driver import mutate as run_mutate
    from .gallery import table_of

    processes = parse_jobs(jobs)
    galleries = gallery or ()
    for option, target in (("--json", json_file), ("--markdown", markdown)):
        if target is not None:
            check_writable(target, option)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    if mesh is not None:
        if gallery or jobs != AUTO:
            raise ValueError(
                "--mesh goes with --configs, --faults, --plants, --seed, --case, --framework and the files"
            )
        return _mutate_mesh(
            parse_mesh(mesh), configs, faults, seed, plants, framework or [], case, json_file, markdown, console
        )
    if framework:
        raise ValueError(f"--framework ({', '.join(framework)}) goes with --mesh")
    if case is not None:
        result = run_trial(find_trial(case, galleries))
        if json_file is not None:
            write_json(result.to_json(), json_file)
        if json_file != "-":
            console.print(result.explanation, markup=False, soft_wrap=True)
            console.print(str(result), markup=False, soft_wrap=True)
        return 1 if result.is_wrong else 0
    with progress() as advance:
        report = run_mutate(
            configs,
            faults,
            seed,
            plants=plants,
            jobs=min(usable_cores(), MAX_JOBS) if processes is None else processes,
            gallery=galleries,
            only=only,
            progress=advance,
        )
    writes: list[Callable[[], object]] = []
    if json_file is not None and json_file != "-":
        writes.append(functools.partial(write_json, report.to_json(), json_file))
    if markdown is not None:
        writes.append(functools.partial(report.to_markdown, markdown))
    with written(*writes):
        if json_file == "-":
            write_json(report.to_json(), "-")
        else:
            if report.results:
                console.print(report.table())
            if report.gallery:
                console.print(table_of(report.gallery))
            for line in report.lines():
                console.print(line, markup=False, soft_wrap=True)
            facts = ", ".join(f"{name} {value}" for name, value in report.environment.items())
            console.print(facts, markup=False, soft_wrap=True)
            console.print(report.summary(), markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def _mutate_mesh(
    sizes: dict[str, int],
    configs: int,
    faults: int | None,
    seed: int,
    plants: int,
    frameworks: list[str],
    case: str | None,
    json_file: str | None,
    markdown: str | None,
    console: Any,
) -> int:
    from .mesh.driver import mutate_mesh, run_cases

    with progress() as advance:
        if case is not None:
            report = run_cases(sizes, [case], progress=advance)
        else:
            report = mutate_mesh(sizes, configs, faults, seed, plants=plants, frameworks=frameworks, progress=advance)
    writes: list[Callable[[], object]] = []
    if json_file is not None and json_file != "-":
        writes.append(functools.partial(write_json, report.to_json(), json_file))
    if markdown is not None:
        writes.append(functools.partial(report.to_markdown, markdown))
    with written(*writes):
        if json_file == "-":
            write_json(report.to_json(), "-")
        else:
            console.print(report.table())
            for line in report.lines():
                console.print(line, markup=False, soft_wrap=True)
            facts = ", ".join(f"{name} {value}" for name, value in report.environment.items())
            console.print(facts, markup=False, soft_wrap=True)
            console.print(report.summary(), markup=False, soft_wrap=True)
    return 0 if report.passed else 1
