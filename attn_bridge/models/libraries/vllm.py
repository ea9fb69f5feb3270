"""The form of a model of vLLM, which selects its norms and the place of its experts in `tables/vllm.toml`."""

from __future__ import annotations

from collections.abc import Mapping

from ...weights.placements import Shape
from ..layout import Settings
from ..layout.chosen import Form


def form_of_theirs(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form of a model of vLLM."""
    if any(".post_feedforward_layernorm." in name for name in shapes):
        return {"kind": "gemma" if any(".input_layernorm." in name for name in shapes) else "olmo2"}
    return {"kind": "mixtral" if any(".block_sparse_moe." in name for name in shapes) else "llama"}


def form_of_ours(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form for a model of ours; Mixtral alone has experts without norms of queries."""
    if any(".post_norm1." in name for name in shapes):
        return {"kind": "gemma" if any(".norm1." in name for name in shapes) else "olmo2"}
    is_mixtral = any(".ff.experts." in name for name in shapes) and not any(".q_norm." in name for name in shapes)
    return {"kind": "mixtral" if is_mixtral else "llama"}
