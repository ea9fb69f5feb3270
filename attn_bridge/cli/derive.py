"""``attn-bridge derive``: a family of decoders as data, derived from a class of `transformers` and proven."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Annotated

import typer

from .judge import load_judge


def derive(
    source: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER|MODEL_TYPE", help="A model's folder with a config.json, or its model_type."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="File to write; with --all a folder. Default: MODEL_TYPE.toml."
        ),
    ] = None,
    flax: Annotated[bool, typer.Option(help="Run the Flax model in the proof as well.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Derive all causal language models of the installed transformers.")
    ] = False,
    seconds: Annotated[float, typer.Option(metavar="N", min=1.0, help="With --all: limit of each family.")] = 600.0,
    memory: Annotated[float, typer.Option(metavar="GIB", min=1.0, help="With --all: limit of each process.")] = 8.0,
) -> int:
    """Derive a family of decoders from a class of transformers, and prove it: logits, gradients, padding, caches.

    Needs torch and transformers; random tiny weights, no download. The file that it writes is all that convert and
    from_pretrained need: put it into a folder, and name that in ATTN_BRIDGE_FAMILIES. With --all, a folder gets the
    files of all proven families, and survey.json with the outcome of each.

    Example: attn-bridge derive starcoder2

    Exit status: 0 = proven and written, 1 = refused: a part is not understood, or the proof fails, 2 = bad usage. With
    --all, 0 = surveyed.
    """
    from .. import backends

    if every == (source is not None):
        raise ValueError("give either FOLDER|MODEL_TYPE or --all")
    if every and output is None:
        raise ValueError("--all needs a folder to write to (--output)")
    backends.require("torch", "torch", "transformers")
    if flax:
        backends.require("flax", "jax", "flax")
    if every:
        assert output is not None, "checked above"
        return _survey(output, seconds, memory, flax)
    assert source is not None, "checked above"
    return _derive_one(source, output, flax)


def _derive_one(source: str, output: Path | None, flax: bool) -> int:
    from ..models.derived.description import dumps
    from ..whole_files import checked, write

    model_type = _model_type(source)
    target = checked(output or Path(f"{model_type.replace('/', '-')}.toml"))
    derivation = load_judge("frameworks.torch.derivation")
    try:
        description = derivation.derive(model_type, flax=flax)
    except derivation.DerivationError as error:
        typer.echo(f"refused: {error}", err=True)
        return 1
    write(target, dumps(description))
    proof = description.proof
    typer.echo(
        f"proven: {description.architecture}, {proof['configs_equal']} configs equal, "
        f"{proof['configs_refused']} refused, {proof['gradients']} gradients; {target}"
    )
    return 0


def _survey(folder: Path, seconds: float, memory: float, flax: bool) -> int:
    """Derive all families into a folder, and print a line for each."""
    survey = load_judge("frameworks.torch.derivation.survey")
    folder.mkdir(parents=True, exist_ok=True)
    counts: collections.Counter[str] = collections.Counter()
    for outcome in survey.survey(survey.names(), folder, seconds=seconds, memory=int(memory * (1 << 30)), flax=flax):
        counts[outcome.kind] += 1
        detail = outcome.detail or f"{outcome.proof['configs_equal']} configs equal"
        typer.echo(f"{outcome.model_type}: {outcome.kind}, {detail}")
    typer.echo(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + f"; {folder / survey.FILE}")
    return 0


def _model_type(source: str) -> str:
    """Return the ``model_type`` of a folder's config.json, or the source itself.

    Raises:
        ValueError: a folder without a config.json that names one.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise ValueError(f"{path} has no model_type")
    return model_type
