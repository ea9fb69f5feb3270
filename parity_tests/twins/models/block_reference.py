"""The block that faults are planted into, from its formulas: attention and an MLP, behind norms, beside residuals.

Sources: pre-norm (arXiv 2002.04745), RMSNorm (1910.07467), rotary positions (2104.09864), grouped heads (2305.13245),
soft-cap (2408.00118), sinks (2508.10925), GELU (1606.08415).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from attn_bridge.reference.attention import as_double, linear, merge_heads, split_heads
from fault_lab.planted.mutants import BlockConfig


def reference(
    config: BlockConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the block's output, and what attention adds to the residual stream if the config has two outputs.

    Shapes: `x` ``(b, t, d)``, `attention_mask` ``(b, s)``; both results ``(b, t, d)``.
    """
    x = as_double(x)
    normed = _norm(config, parameters, "attention_norm", x)
    query, key, value = _project(config, parameters, normed)
    if config.qk_norm:
        query = query / _root_mean_square(query, config.eps) * as_double(parameters["q_norm.weight"])
        key = key / _root_mean_square(key, config.eps) * as_double(parameters["k_norm.weight"])
    if config.rope:
        query, key = _rotate(config, query), _rotate(config, key)
    context = np.zeros(query.shape, np.result_type(query, key, value, as_double(parameters.get("sinks", 0.0))))
    for b, h, t in np.ndindex(query.shape[:3]):
        shared = h // (config.num_heads // config.num_kv_heads)
        keys = [s for s in range(x.shape[1]) if _sees(config, t, s)]
        keys = [s for s in keys if attention_mask is None or attention_mask[b, s]]
        if not keys:
            continue
        scores = np.array([np.sum(query[b, h, t] * key[b, shared, s]) for s in keys]) / math.sqrt(config.head_dim)
        if config.softcap is not None:
            scores = config.softcap * np.tanh(scores / config.softcap)
        shift = scores.real.max()
        weights = np.exp(scores - shift)
        total = np.sum(weights)
        if config.sinks:
            total = total + np.exp(as_double(parameters["sinks"])[h] - shift)
        for s, weight in zip(keys, weights, strict=True):
            context[b, h, t] += weight / total * value[b, shared, s]
    added = linear(merge_heads(context), parameters, "out_proj", bias=config.out_bias)
    out = x + added
    if config.hidden:
        hidden = linear(_norm(config, parameters, "mlp_norm", out), parameters, "fc_in", bias=True)
        out = out + linear(hidden * 0.5 * (1.0 + _erf(hidden / math.sqrt(2.0))), parameters, "fc_out", bias=True)
    return out, added if config.outputs == 2 else None


def _project(config: BlockConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """Return query ``(b, h, t, c)``, key and value ``(b, k, s, c)``."""
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    if not config.fused:
        features = [linear(x, parameters, f"{name}_proj", bias=config.qkv_bias) for name in "qkv"]
    else:
        rows = linear(x, parameters, "qkv_proj", bias=config.qkv_bias)
        ends = np.cumsum([count * config.head_dim for count in heads])
        features = [rows[..., : ends[0]], rows[..., ends[0] : ends[1]], rows[..., ends[1] :]]
    return [split_heads(one, count) for one, count in zip(features, heads, strict=True)]


def _norm(config: BlockConfig, parameters: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    weight = as_double(parameters[f"{name}.weight"])
    if config.norm == "rms":
        return x / _root_mean_square(x, config.eps) * weight
    centred = x - np.sum(x, axis=-1, keepdims=True) / x.shape[-1]
    return centred / _root_mean_square(centred, config.eps) * weight + as_double(parameters[f"{name}.bias"])


def _root_mean_square(x: np.ndarray, eps: float) -> np.ndarray:
    return np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / x.shape[-1] + eps)


def _rotate(config: BlockConfig, x: np.ndarray) -> np.ndarray:
    """Turn channel pairs ``(i, i + c / 2)`` of ``(b, h, t, c)`` as complex numbers would be, one by one."""
    half = config.head_dim // 2
    turned = np.empty_like(x)
    for position in range(x.shape[2]):
        for i in range(half):
            angle = position / config.rope_theta ** (i / half)
            first, second = x[:, :, position, i], x[:, :, position, i + half]
            turned[:, :, position, i] = math.cos(angle) * first - math.sin(angle) * second
            turned[:, :, position, i + half] = math.sin(angle) * first + math.cos(angle) * second
    return turned


def _sees(config: BlockConfig, query: int, key: int) -> bool:
    near = config.window is None or abs(query - key) < config.window
    return near and (key <= query or not config.causal)


def _erf(x: np.ndarray) -> np.ndarray:
    """Return the error function, of complex numbers to first order in the imaginary part."""
    result = np.vectorize(math.erf, otypes=[float])(x.real)
    return result + 1j * x.imag * 2.0 / math.sqrt(math.pi) * np.exp(-(x.real**2)) if np.iscomplexobj(x) else result
