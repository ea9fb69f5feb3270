"""``attn-bridge derive``: a family of decoders as data, derived from a class of `transformers` and proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .judge import load_judge


def derive(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER|MODEL_TYPE", help="A model's folder with a config.json, or its model_type.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write; default: MODEL_TYPE.toml.")
    ] = None,
    flax: Annotated[bool, typer.Option(help="Run the Flax model in the proof as well.")] = False,
) -> int:
    """Derive a family of decoders from a class of transformers, and prove it: logits, gradients, padding, caches.

    Needs torch and transformers; random tiny weights, no download. The file that it writes is all that convert and
    from_pretrained need: put it into a folder, and name that in ATTN_BRIDGE_FAMILIES.

    Example: attn-bridge derive starcoder2

    Exit status: 0 = proven and written, 1 = refused: a part is not understood, or the proof fails, 2 = bad usage.
    """
    from .. import backends
    from ..models.derived.description import dumps
    from ..whole_files import checked, write

    backends.require("torch", "torch", "transformers")
    if flax:
        backends.require("flax", "jax", "flax")
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
