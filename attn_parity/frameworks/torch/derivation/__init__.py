"""Families of decoders derived from a class of `transformers`: proposed from a tiny instance, then proven against it.

In: a ``model_type`` that the installed `transformers` has. Out: an `attn_bridge` description of the family, or a
`DerivationError` that names the first part that is not understood.

The room `model_classes` makes tiny random instances and reads their keys, names, shapes and order of calls; `choices`
lists what they leave open, and `search` takes the choices that compute the same on a `model_pair`; `proof` compares on
many configs, which `key_changes` makes. A proposal may be wrong, a proof may not: `proof` does not know how a proposal
was made.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from attn_bridge import backends
from attn_bridge.models import families
from attn_bridge.models.derived.description import Description
from attn_bridge.models.derived.family import Family, using
from attn_bridge.models.derived.known import family_of
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.models.reading import multimodal
from attn_bridge.printable import printable

from ..model_classes import model_class, structure
from ..model_classes.model_class import DerivationError
from . import model_pair, proof, repair, search

__all__ = ["DerivationError", "check", "derive", "derive_family", "read_config"]


def derive(model_type: str, *, flax: bool = True) -> Description:
    """Return the proven description of a ``model_type`` of the installed `transformers`.

    Args:
        model_type: the name of the family.
        flax: whether the proof runs the Flax model as well.

    Raises:
        DerivationError: the first part that no class of ours computes, and the nearest class; or a failed proof.
    """
    model = model_class.find(multimodal.written_type(model_type))
    parts = structure.read(model)
    model, proposal = search.propose_plain(model, parts)
    proposal = repair.fix_keys(model, proposal)
    description = repair.tidy(model, parts, proposal)
    try:
        return dataclasses.replace(description, proof=proof.prove(model, description, flax=flax))
    except model_pair.WrongError as error:
        raise DerivationError(f"{model.model_class.__name__} could not be proven: {error}") from error


def derive_family(config: Mapping[str, object] | str | os.PathLike[str], *, flax: bool = False) -> DerivedFamily:
    """Return the proven family of a config, a folder or a ``model_type``; see `attn_bridge.models.derive`."""
    keys = read_config(config)
    backends.require("torch", "torch", "transformers")
    if flax:
        backends.require("flax", "jax", "flax")
    family = family_of(derive(str(keys["model_type"]), flax=flax))
    check_reads(family, keys)
    return family


def read_config(source: Mapping[str, object] | str | os.PathLike[str]) -> Mapping[str, object]:
    """Return the keys of a causal model's config: those given, those of a folder's config.json, or a name alone.

    Raises:
        TypeError: `source` is of another type.
        ValueError: it names no ``model_type``, or the config.json can't be read.
    """
    if isinstance(source, Mapping):
        config: object = source
        label = "config"
    elif isinstance(source, str) and not Path(source).is_dir():
        return {"model_type": source}
    elif isinstance(source, str | os.PathLike):
        path = Path(source) / "config.json"
        label = str(path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} can't be read as JSON: {printable(str(error), 200)}") from None
    else:
        raise TypeError(
            f"config must be a config.json as a dict, a folder or a model_type, got {type(source).__name__}"
        )
    keys = multimodal.text_of(config) if isinstance(config, Mapping) else {}
    if not isinstance(keys.get("model_type"), str):
        raise ValueError(f"{label} has no model_type")
    return keys


def check_reads(family: Family, keys: Mapping[str, object]) -> None:
    """Refuse a config that a proven family does not compute.

    Args:
        family: the family.
        keys: the config's; a ``model_type`` alone is not a config.

    Raises:
        DerivationError: the message names the key.
    """
    if len(keys) < 2:
        return
    try:
        with using(family):
            families.find_decoder(keys)
    except (TypeError, ValueError) as error:
        raise DerivationError(f"the family is proven, but not with this config: {error}") from error


def check(family: Family, *, flax: bool = False) -> Mapping[str, object]:
    """Prove a stored family again with the installed `transformers`; return the counts of comparisons.

    Raises:
        DerivationError: `transformers` has no such class, or it computes something else than the family describes.
    """
    if not isinstance(family, DerivedFamily):
        raise DerivationError(f"{family.model_types[0]} is an encoder with its decoder, which the tests prove")
    # A key that the family refuses other values of keeps the proven one in the usual instance, as in a derivation.
    model = model_class.find(family.description.model_type).fitting(family.description.fixed)
    try:
        return proof.prove(model, family.description, flax=flax)
    except model_pair.WrongError as error:
        raise DerivationError(f"{model.model_class.__name__} is not what the family describes: {error}") from error
