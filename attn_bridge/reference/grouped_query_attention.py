"""Grouped-query attention by its formulas (Ainslie et al., arXiv 2305.13245), with what models add to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from ..specs import Alibi, GroupedQueryAttentionConfig, LayerNormConfig, RelativeBias, Rotary, Temperature
from .attention import as_double, attend, linear, merge_heads, restricted, sigmoid, split_heads
from .layer_norm import reference as layer_norm
from .rms_norm import rms_norm
from .rotary import number, rotate


def reference(
    config: GroupedQueryAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    positions: np.ndarray | None = None,
    shared: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output ``([b,] t, d_out)`` and the attention weights ``([b,] h, t, t)``.

    Shapes: `x` ``([b,] t, d_in)``; `positions` ``(t,)``, ``(b, t)`` or, of a `Rotary` with axes, ``(rows, b, t)``, from
    0 without padding on the left by default; `shared` has `keys_and_values` of an earlier layer.
    """
    tokens = x.shape[-2]
    positions = number(x, attention_mask) if positions is None else np.asarray(positions)
    query = _projected(config, parameters, x, "W_query", config.qkv_bias)
    query = _turned(config, parameters, query, config.num_heads, "q_norm", positions)
    if config.temperature is not None:
        query = query * _factors(config.temperature, positions)[..., None, :, None]
    key, value = keys_and_values(config, parameters, x, positions) if shared is None else shared
    # Query head h reads key/value head h // (heads per group).
    readers = [head // (config.num_heads // config.num_kv_heads) for head in range(config.num_heads)]
    context, weights = attend(
        query,
        key[..., readers, :, :],
        value[..., readers, :, :],
        scale=config.scale,
        causal=False,
        attention_mask=restricted(config.mask, attention_mask, tokens),
        softcap=config.softcap,
        bias=_bias(config, parameters, positions),
        sinks=as_double(parameters["sinks"]) if config.sinks else None,
    )
    context = merge_heads(context)
    if config.gate:
        logits = linear(x, parameters, config.gate_name, bias=config.qkv_bias)
        gate = np.log(1.0 + np.exp(logits)) if config.gate_activation == "softplus" else sigmoid(logits)
        context = context * (gate if config.gate_scope == "channel" else np.repeat(gate, config.value_width, -1))
    if config.context_norm is not None:
        context = rms_norm(context, parameters["context_norm.scale"], eps=config.context_norm)
    return linear(context, parameters, "out_proj", bias=config.out_bias), weights


def keys_and_values(
    config: GroupedQueryAttentionConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values by head, ``([b,] h, t, c)`` each, which later layers may read as well."""
    key = _projected(config, parameters, x, "W_key", bool(config.key_bias))
    value = key if config.key_is_value else _projected(config, parameters, x, "W_value", config.qkv_bias)
    value = split_heads(value, config.num_kv_heads) * config.value_scale
    if config.value_norm is not None:
        value = rms_norm(value, np.ones(config.value_width), eps=config.value_norm)
    return _turned(config, parameters, key, config.num_kv_heads, "k_norm", positions), value


def _projected(
    config: GroupedQueryAttentionConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, name: str, bias: bool
) -> np.ndarray:
    heads = linear(x, parameters, name, bias=bias)
    return heads if config.clip is None else np.clip(heads, -config.clip, config.clip)


def _turned(
    config: GroupedQueryAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    heads: np.ndarray,
    count: int,
    name: Literal["q_norm", "k_norm"],
    positions: np.ndarray,
) -> np.ndarray:
    """Return queries or keys by head, normed and rotated."""
    norm = config.qk_norm
    if norm is not None and norm.scope == "full":
        heads = _norm(config, parameters, heads, name)
    heads = split_heads(heads, count)
    if norm is not None and norm.scope == "head" and not norm.rotated:
        heads = _norm(config, parameters, heads, name)
    if isinstance(config.position, Rotary):
        heads = rotate(heads, config.position, positions)
    return _norm(config, parameters, heads, name) if norm is not None and norm.rotated else heads


def _norm(
    config: GroupedQueryAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    heads: np.ndarray,
    name: Literal["q_norm", "k_norm"],
) -> np.ndarray:
    arguments = config.norm_arguments(name)
    if not config.has_layer_norms:
        eps, unit_offset = arguments["eps"], arguments["unit_offset"]
        scale = parameters[f"{name}.scale"] if arguments.get("affine", True) else np.ones(arguments["emb_dim"])
        return rms_norm(heads, scale, eps=eps, unit_offset=unit_offset)
    own = {key: parameters[f"{name}.{key}"] for key in ("scale", "shift")}
    normalised, _ = layer_norm(LayerNormConfig(**arguments), own, heads)
    return normalised


def _factors(temperature: Temperature, positions: np.ndarray) -> np.ndarray:
    """Return the factor of the query at each position, as Llama 4's report and code have it."""
    latest = positions.max(0) if positions.ndim == 3 else positions
    steps = np.floor(np.maximum(as_double(latest) + temperature.offset, 0.0) / temperature.interval)
    return 1.0 + temperature.rate * np.log(1.0 + steps)


def _bias(
    config: GroupedQueryAttentionConfig, parameters: Mapping[str, np.ndarray], positions: np.ndarray
) -> np.ndarray | None:
    """Return the bias of the scores that follows from positions ``([b,] h, t, t)``; None without one."""
    if isinstance(config.position, RelativeBias):
        later = positions[..., None, :] - positions[..., :, None]
        buckets = np.array([_bucket(config.position, int(offset)) for offset in later.ravel()]).reshape(later.shape)
        return np.moveaxis(as_double(parameters["relative_bias"])[buckets], -1, -3)
    return _distances(config.num_heads, positions) if isinstance(config.position, Alibi) else None


def _bucket(position: RelativeBias, later: int) -> int:
    """Return the bucket of a key that is `later` positions behind its query, as the code of T5 (1910.10683) does."""
    count, first = position.num_buckets, 0
    if position.bidirectional:
        count //= 2
        first = count if later > 0 else 0
    distance = abs(later) if position.bidirectional else max(-later, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    # In float32, as in all published code: weights were trained with its roundings.
    growth = np.float32(math.log(np.float32(distance) / np.float32(exact)))
    share = growth / np.float32(math.log(position.max_distance / exact))
    return first + min(exact + int(share * np.float32(count - exact)), count - 1)


def _distances(num_heads: int, positions: np.ndarray) -> np.ndarray:
    """Return ALiBi's bias ``([b,] h, t, t)``: minus the slope of the head times the distance."""
    distance = positions[..., :, None] - positions[..., None, :]
    return np.stack([-_slope(head, num_heads) * distance for head in range(num_heads)], axis=-3)


def _slope(head: int, num_heads: int) -> float:
    """Return the slope as the code of Press et al. (arXiv 2108.12409) has it, by recursion on powers of two."""
    whole = 1
    while whole * 2 <= num_heads:
        whole *= 2
    if head < whole:
        return 2.0 ** (-8.0 * (head + 1) / whole)
    return _slope(2 * (head - whole), 2 * whole)
