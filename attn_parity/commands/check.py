"""``attn-bridge check``: the parity matrix on this machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from attn_bridge.cli.output import check_writable, progress
from attn_bridge.cli.processes import AUTO, Jobs, Process, parse_jobs

from .compare import Json
from .outputs import show_table, write_or_show


def check(
    context: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VARIANT ...]", help="Classes, such as MultiHeadAttention; all by default."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this case, such as odd-sizes or gpt-oss, or layer-N with --weights (may be repeated). A wrong "
            "name of a class or case prints all names."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Only float64 and this one of float32, bfloat16, float16 (may be repeated)."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many times numbers are drawn; statistics are pooled over them.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="Every case in every precision and mode; takes minutes.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="Check MultiHeadAttention with the weights of this file or folder.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of that file, such as hf-bert or hf-gpt2.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="What that layout's names can't say, such as num_heads=12; else read from config.json beside it.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Judge the decoder of this folder block by block, and its logits; takes no VARIANT."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="With --model: the folder of the Flax side, weights and config; the same by default."),
    ] = None,
    oracle: Annotated[
        str | None,
        typer.Option(help="With --model: judge by transformers or torch (the twin) alone; both by default."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With --model: tokens of each row; 12 by default.")] = None,
    batch: Annotated[int | None, typer.Option(help="With --model: rows of tokens; 2 by default.")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="With --model: write the report as a page.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Share each VARIANT out over simulated devices: tensor=2,context=2,fsdp=2, or some of them.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="With --mesh: all_gather, ring or ulysses, how queries meet keys of other devices."),
    ] = None,
    framework: Annotated[
        list[str] | None, typer.Option(help="With --mesh: torch or flax; those that are installed by default.")
    ] = None,
    jobs: Jobs = AUTO,
    json_file: Json = None,
) -> int:
    """Prove the torch and Flax twins equal on this machine: outputs and every gradient, in four precisions.

    Several processes judge some variants each; the report does not depend on their number. Called from Python code with
    arguments, the command stays in the process of its caller unless --jobs asks for more.

    Example: attn-bridge check MultiHeadAttention --dtype bfloat16 --seeds 20

    Exit status: 0 = all equal, 1 = a mismatch, 2 = bad usage.
    """
    from attn_bridge.models import layouts

    from ..check.matrix import check as run_check
    from ..check.matrix import seldom_collecting

    if mesh is not None:
        if case or full or weights is not None or settings or model is not None or html is not None:
            raise ValueError("--mesh goes with VARIANT, --method, --framework, --dtype, --seeds and --json alone")
        options = {"frameworks": framework or (), "dtypes": dtype or (), "seeds": seeds}
        return _check_mesh(parse_mesh(mesh), variants or [], method, options, json_file)
    for option, words in (("method", [method] if method else []), ("framework", framework or [])):
        if words:
            raise ValueError(f"--{option} ({', '.join(words)}) goes with --mesh")
    if model is not None:
        if variants or case or dtype or full or weights is not None or settings:
            raise ValueError(
                "--model judges a whole model; it goes with --against, --oracle, --tokens, --batch, --seeds, --json "
                "and --html alone"
            )
        shape = {name: value for name, value in (("tokens", tokens), ("batch", batch)) if value is not None}
        return _check_model(model, against, oracle or "auto", seeds, shape, json_file, html)
    of_models = {"against": against, "oracle": oracle, "tokens": tokens, "batch": batch, "html": html}
    for name, value in of_models.items():
        if value is not None:
            raise ValueError(f"--{name} ({value}) goes with --model")
    processes = parse_jobs(jobs)
    if processes is None and not Process.of(context).may_have_helpers():
        processes = 1
    if (weights is None) != (layout is None):
        raise ValueError(f"--weights and --layout go together; layouts: {', '.join(layouts.names())}")
    subjects = None
    if weights is not None and layout is not None:
        from ..check.real_weights import subjects_from_file

        if variants:
            raise ValueError("--weights checks the layers of a file; it takes no VARIANT")
        subjects = subjects_from_file(weights, layout, _parse_settings(settings or []))
    elif settings:
        raise ValueError("--set says what the layout of --weights can't; it goes with --weights and --layout")
    if json_file is not None:
        check_writable(json_file)
    with progress() as advance, seldom_collecting():
        report = run_check(
            variants or (),
            cases=case or (),
            dtypes=dtype or (),
            seeds=seeds,
            full=full,
            subjects=subjects,
            jobs=processes,
            progress=advance,
        )
    lines = [f"not run: {row}: {reason}" for row, reason in report.missing_rows.items()]
    lines += [*(f"note: {note}" for note in report.notes), *(cell.explain() for cell in report.failures)]
    write_or_show(report.to_json, json_file, lambda: show_table(report, lines, 110))
    return 0 if report.passed else 1


def _check_model(
    model: Path,
    against: Path | None,
    oracle: str,
    seeds: int,
    shape: Mapping[str, int],
    json_file: str | None,
    html: str | None,
) -> int:
    from ..check.model.walk import check_model

    for option, target in (("--json", json_file), ("--html", html)):
        if target is not None:
            check_writable(target, option)
    if html == "-" or (html is not None and html == json_file):
        raise ValueError(f"--html {html} must be a file of its own")
    with progress() as advance:
        report = check_model(model, against, oracle=cast(Any, oracle), seeds=seeds, progress=advance, **shape)
    pages = [] if html is None else [functools.partial(report.to_html, html)]
    write_or_show(report.to_json, json_file, lambda: print("\n".join(report.lines())), *pages)
    if report.stopped:
        raise KeyboardInterrupt
    return 0 if report.passed else 1


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes of a mesh by name.

    Raises:
        ValueError: the text is not made of ``NAME=SIZE``, or names an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.isdecimal() or name in sizes:
            raise ValueError(f"--mesh takes axes such as tensor=2,context=2, each once, got {text}")
        sizes[name] = int(size)
    return sizes


def _check_mesh(
    sizes: dict[str, int],
    variants: list[str],
    method: str | None,
    options: Mapping[str, Any],
    json_file: str | None,
) -> int:
    from ..check.mesh.run import check_mesh

    if json_file is not None:
        check_writable(json_file)
    with progress() as advance:
        report = check_mesh(sizes, variants, method=method or "all_gather", progress=advance, **options)
    write_or_show(report.to_json, json_file, lambda: show_table(report, report.explanations(), 140))
    return 0 if report.passed else 1


def _parse_settings(settings: list[str]) -> dict[str, int]:
    values = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"--set takes KEY=VALUE with a whole number from 1, got {setting}")
        values[key] = int(value)
    return values
