"""``attn-bridge derive``: a family of decoders as data, derived from a class of `transformers` and proven."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .judge import load_judge

if TYPE_CHECKING:
    from ..models.derived.family import Family
    from ..models.derived.reading import DerivedFamily


def derive(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FOLDER|MODEL_TYPE",
            help="A model's folder with a config.json, or its model_type; with --check also a family's file.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            "-o",
            metavar="PATH",
            help="File to write; with --all a folder. Default: attn-bridge-family.toml in FOLDER, or MODEL_TYPE.toml.",
        ),
    ] = None,
    flax: Annotated[bool, typer.Option(help="Run the Flax model in the proof as well.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Prove a stored family again, of the package, a folder or a file.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Derive all causal language models of the installed transformers.")
    ] = False,
    seconds: Annotated[float, typer.Option(metavar="N", min=1.0, help="With --all: limit of each family.")] = 600.0,
    memory: Annotated[float, typer.Option(metavar="GIB", min=1.0, help="With --all: limit of each process.")] = 8.0,
    reuse: Annotated[
        bool,
        typer.Option("--reuse", help="With --all: take packaged families proven with this transformers as they are."),
    ] = False,
) -> int:
    """Derive a family of decoders from a class of transformers, and prove it: logits, gradients, padding, caches.

    Needs torch and transformers; random tiny weights, no download. The file that it writes is all that convert and
    from_pretrained need: they read it in the model's folder, and in the folder that ATTN_BRIDGE_FAMILIES names. With
    --all, a folder gets the files of all proven families, and survey.json with the outcome of each.

    Example: attn-bridge derive starcoder2

    Exit status: 0 = proven (and written), 1 = refused: a part is not understood, or the proof fails, 2 = bad usage.
    With --all, 0 = surveyed.
    """
    from .. import backends

    if every == (source is not None):
        raise ValueError("give either FOLDER|MODEL_TYPE or --all")
    if every and output is None:
        raise ValueError("--all needs a folder to write to (--out)")
    if check and (every or output is not None):
        raise ValueError("--check proves a stored family and writes nothing, so that it takes neither --all nor --out")
    backends.require("torch", "torch", "transformers")
    if flax:
        backends.require("flax", "jax", "flax")
    if every:
        assert output is not None, "checked above"
        return _survey(output, seconds, memory, flax, reuse)
    assert source is not None, "checked above"
    return _check_again(source, flax) if check else _derive_one(source, output, flax)


def _derive_one(source: str, output: Path | None, flax: bool) -> int:
    from ..models.derived.stored import FILE
    from ..whole_files import checked

    derivation = load_judge("frameworks.torch.derivation")
    model_type = derivation.read_config(source)["model_type"]
    usual = Path(source, FILE) if Path(source).is_dir() else Path(f"{model_type.replace('/', '-')}.toml")
    target = checked(output or usual)
    assert target is not None, "a path is given"
    try:
        family: DerivedFamily = derivation.derive_family(source, flax=flax)
    except derivation.DerivationError as error:
        typer.echo(f"refused: {error}", err=True)
        return 1
    family.save(target)
    proof = family.description.proof
    typer.echo(
        f"proven: {family.architecture}, {proof['configs_equal']} configs equal, "
        f"{proof['configs_refused']} refused, {proof['gradients']} gradients; {target}"
    )
    return 0


def _check_again(source: str, flax: bool) -> int:
    """Prove a stored family again, and print the counts."""
    derivation = load_judge("frameworks.torch.derivation")
    try:
        proof = derivation.check(_stored(source), flax=flax)
    except derivation.DerivationError as error:
        typer.echo(f"refused: {error}", err=True)
        return 1
    typer.echo(
        f"proven: {source}, {proof['configs_equal']} configs equal, {proof['configs_refused']} refused, "
        f"{proof['gradients']} gradients"
    )
    return 0


def _stored(source: str) -> Family:
    """Return a stored family: of a folder, a file, or the package.

    Raises:
        ValueError: no such family is stored.
    """
    from ..models import families
    from ..models.derived import stored
    from ..printable import printable

    path = Path(source)
    if path.is_dir():
        family = stored.beside(path)
        if family is None:
            raise ValueError(f"{path} has no {stored.FILE}; attn-bridge derive {path} writes it")
        return family
    if path.suffix == ".toml":
        return stored.read_family(path)
    if source not in families.FAMILIES:
        raise ValueError(f"no family is stored for model_type ({printable(source)}); attn-bridge derive makes them")
    return families.FAMILIES[source]


def _survey(folder: Path, seconds: float, memory: float, flax: bool, reuse: bool) -> int:
    """Derive all families into a folder, and print a line for each."""
    survey = load_judge("frameworks.torch.derivation.survey")
    folder.mkdir(parents=True, exist_ok=True)
    counts: collections.Counter[str] = collections.Counter()
    most = int(memory * (1 << 30))
    for outcome in survey.survey(survey.names(), folder, seconds=seconds, memory=most, flax=flax, reuse=reuse):
        counts[outcome.kind] += 1
        detail = outcome.detail or f"{outcome.proof['configs_equal']} configs equal"
        typer.echo(f"{outcome.model_type}: {outcome.kind}, {detail}")
    typer.echo(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + f"; {folder / survey.FILE}")
    return 0
