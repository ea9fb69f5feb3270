"""Attention layers of `transformers` models in torch, from a config.json and the layer's arrays, and back.

The twin is `jax_attn.checkpoints.hugging_face`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from attn_bridge import backends


def from_hf(config: Mapping[str, Any], layer: int, state: Mapping[str, Any]) -> nn.Module:
    """Return the attention of one layer, in eval mode, in the dtype of its arrays.

    Args:
        config: the model's ``config.json`` as a dict; keys that it leaves out take the defaults of `transformers`.
        layer: index of the layer, from 0.
        state: the layer's attention arrays under their Hugging Face names, below any prefix or none, or those of the
            whole model: arrays of NumPy, torch or JAX.

    Returns:
        A module of ours, such as `GroupedQueryAttention`, with ``module.config``.

    Raises:
        TypeError: a value of the wrong type, or a dtype that the framework lacks or would narrow.
        ValueError: a ``model_type`` that is not known, or a value that does not fit.
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen tensors, all of them.
    """
    from attn_bridge.models import families

    attention = families.find_layer(config, layer)
    arrays = attention.to_ours(state)
    backend = backends.load("torch")
    dtype = next(iter(arrays.values())).dtype.name
    module: nn.Module = backend.build_blank(attention.variant, attention.config, dtype)
    backend.set_weights(module, arrays)
    return module


def to_hf(
    config: Mapping[str, object],
    layer: int,
    module: nn.Module,
    *,
    library: str | None = None,
    prefix: str | None = None,
) -> dict[str, np.ndarray]:
    """Return the arrays of a layer's attention under their Hugging Face names.

    Args:
        config: the model's ``config.json`` as a dict.
        layer: index of the layer, from 0.
        module: its attention, as `from_hf` makes it.
        library: another library whose names and shapes to use, such as ``meta`` for Llama; None is `transformers`.
        prefix: prefix of the names; None takes that of `transformers`, ``""`` adds none.

    Raises:
        ValueError: an unknown ``model_type`` or `library`, or a value that does not fit.
        WeightsMismatchError: (a ValueError) the module's tensors are not those of the layer.
    """
    from attn_bridge.models import families

    attention = families.find_layer(config, layer)
    arrays = backends.load("torch").get_weights(module)
    return attention.to_theirs(arrays, library=library, prefix=prefix)
