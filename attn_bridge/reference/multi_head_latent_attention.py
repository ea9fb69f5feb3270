"""Multi-head latent attention by its formulas (DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and 2.1.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..specs import MultiHeadLatentAttentionConfig
from .attention import as_double, attend, linear, merge_heads, restricted, split_heads
from .rms_norm import rms_norm
from .rotary import number, rotate

Choose = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def reference(
    config: MultiHeadLatentAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    positions: np.ndarray | None = None,
    choose: Choose | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output ``([b,] t, d_out)`` and the attention weights ``([b,] h, t, s)``.

    Shapes: `x` ``([b,] t, d_in)``; `positions` ``(t,)``, ``(b, t)`` or, of a `Rotary` with axes, ``(rows, b, t)``, from
    0 without padding on the left by default.
    `choose` returns the keys to attend to, of what queries are made of, the visible keys, and the positions.
    """
    tokens = x.shape[-2]
    asking = as_double(x)
    if config.query_dim is not None:
        asking = linear(asking, parameters, "W_query_latent", bias=config.bias)
        asking = rms_norm(asking, parameters["query_norm.scale"], eps=config.norm_eps)
    query = split_heads(linear(asking, parameters, "W_query", bias=False), config.num_heads)
    latent = linear(x, parameters, "W_latent", bias=config.bias)
    latent = rms_norm(latent, parameters["latent_norm.scale"], eps=config.norm_eps)
    shared = linear(x, parameters, "W_key_rope", bias=config.bias)[..., None, :, :]
    query_rope = query[..., config.nope_dim :]
    positions = number(x, attention_mask) if positions is None else positions
    if config.position is not None:
        query_rope, shared = (rotate(part, config.position, positions) for part in (query_rope, shared))
    visible = restricted(config.mask, attention_mask, tokens)
    if choose is not None:
        visible = choose(asking, visible, positions)
    key_nope = split_heads(linear(latent, parameters, "W_key", bias=False), config.num_heads)
    everywhere = np.ones((*key_nope.shape[:-1], 1))
    context, weights = attend(
        np.concatenate([query[..., : config.nope_dim], query_rope], -1),
        np.concatenate([key_nope, everywhere * shared], -1),
        split_heads(linear(latent, parameters, "W_value", bias=False), config.num_heads),
        scale=config.scale,
        causal=False,
        attention_mask=visible,
    )
    return linear(merge_heads(context), parameters, "out_proj", bias=config.bias), weights
