"""Outside models as data: how their configs are read, and how other libraries name and shape the weights of ours.

A file per family: its config reader, and its tables of rows, each an outside tensor in terms of ours. `families` finds
the attention of a layer from a config, `layouts` the table of a whole checkpoint; one layout to another goes through
ours. `derive` makes a family of a class of `transformers`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from . import families, layouts
from .derived.reading import DerivedFamily

__all__ = ["derive", "families", "layouts"]


def derive(config: Mapping[str, object] | str | os.PathLike[str], *, flax: bool = False) -> DerivedFamily:
    """Derive the family of a decoder from its class in `transformers`, and prove it; takes about a minute.

    Args:
        config: a ``config.json`` as a dict, a model's folder, or a ``model_type``.
        flax: whether the proof runs the Flax model as well.

    Returns:
        The family, for ``from_pretrained(folder, family=...)``; ``save(path)`` writes its file.

    Raises:
        TypeError: `config` is something else.
        ValueError: it names no ``model_type``, or the derivation is refused (`DerivationError`); the message names the
            first part that no class of ours computes, or the key of the config that the family does not compute.
        ImportError: torch or `transformers` is not installed.
    """
    derivation = importlib.import_module("attn_parity.frameworks.torch.derivation")
    family: DerivedFamily = derivation.derive_family(config, flax=flax)
    return family
