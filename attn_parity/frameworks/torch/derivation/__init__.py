"""Families of decoders derived from a class of `transformers`: proposed from a tiny instance, then proven against it.

In: a ``model_type`` that the installed `transformers` has. Out: an `attn_bridge` description of the family, or a
`DerivationError` that names the first part that is not understood.

`subject` makes tiny random instances and records which keys of a config they read; `structure` reads names, shapes and
the order of calls; `search` proposes the rest and takes the proposal that computes the same; `proof` compares on many
configs, which `key_changes` makes. A proposal may be wrong, a proof may not: `proof` does not know how a proposal was
made.
"""

from __future__ import annotations

import dataclasses

from attn_bridge.models.derived.description import Description

from . import proof, search, structure, subject
from .subject import DerivationError

__all__ = ["DerivationError", "derive"]


def derive(model_type: str, *, flax: bool = True) -> Description:
    """Return the proven description of a ``model_type`` of the installed `transformers`.

    Args:
        model_type: the name of the family.
        flax: whether the proof runs the Flax model as well.

    Raises:
        DerivationError: the first part that no class of ours computes, and the nearest class; or a failed proof.
    """
    model = subject.find(model_type)
    parts = structure.read(model)
    proposal = search.fix_keys(model, search.propose(model, parts))
    description = search.tidy(model, parts, proposal)
    try:
        return dataclasses.replace(description, proof=proof.prove(model, description, flax=flax))
    except proof.WrongError as error:
        raise DerivationError(f"{model.model_class.__name__} could not be proven: {error}") from error
