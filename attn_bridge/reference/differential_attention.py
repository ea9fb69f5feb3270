"""Differential attention by its formula (Ye et al., arXiv 2410.05258, equations 1 to 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import DifferentialAttentionConfig
from .attention import as_double, attend, linear, merge_heads, restricted, split_heads
from .rms_norm import rms_norm
from .rotary import number, rotate


def reference(
    config: DifferentialAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    positions: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output ``([b,] t, d_out)`` and both softmaxes ``([b,] h, t, s)``, those of the first half first.

    Shapes: `x` ``([b,] t, d_in)``; `positions` ``(t,)``, ``(b, t)`` or, of a `Rotary` with axes, ``(rows, b, t)``, from
    0 without padding on the left by default.
    """
    heads = {"W_query": config.num_heads, "W_key": config.num_kv_heads, "W_value": config.num_kv_heads}
    query, key, value = (
        split_heads(linear(x, parameters, name, bias=config.qkv_bias), number) for name, number in heads.items()
    )
    if config.position is not None:
        positions = number(x, attention_mask) if positions is None else positions
        query, key = (rotate(part, config.position, positions) for part in (query, key))
    group = config.num_heads // config.num_kv_heads
    pairs, kv_pairs = config.num_heads // 2, config.num_kv_heads // 2
    seen = restricted(config.mask, attention_mask, x.shape[-2])
    softmaxes, contexts = [], []
    for half in range(2):
        for pair in range(pairs):
            kv_pair = pair // group
            values = np.concatenate([value[..., kv_pair, :, :], value[..., kv_pair + kv_pairs, :, :]], -1)
            context, weights = attend(
                query[..., half * pairs + pair, :, :][..., None, :, :],
                key[..., half * kv_pairs + kv_pair, :, :][..., None, :, :],
                values[..., None, :, :],
                scale=config.scale,
                causal=False,
                attention_mask=seen if seen.shape[1] == 1 else seen[:, half * pairs + pair][:, None],
            )
            softmaxes.append(weights)
            contexts.append(context)
    first, second = (np.concatenate(contexts[half * pairs : (half + 1) * pairs], -3) for half in range(2))
    vectors = {name: as_double(parameters[f"lambda_{name}"]) for name in ("q1", "k1", "q2", "k2")}
    factor = np.exp(np.sum(vectors["q1"] * vectors["k1"])) - np.exp(np.sum(vectors["q2"] * vectors["k2"]))
    difference = first - (factor + config.lambda_init) * second
    normed = rms_norm(difference, np.ones(difference.shape[-1]), eps=config.norm_eps)
    context = merge_heads((1.0 - config.lambda_init) * normed)
    return linear(context, parameters, "out_proj", bias=config.out_bias), np.concatenate(softmaxes, -3)
