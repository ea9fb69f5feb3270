"""Scaled dot-product attention as explicit loops, and the small pieces that the references share.

Dimensions: `b` batch, `h` head, `t` query position, `s` key position, `c` channel of a head.
Everything is complex-analytic: no absolute value, no conjugation, and the softmax is shifted by a real number.
Source: Vaswani et al., arXiv 1706.03762, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..masks import Mask, as_mask, left_padding


def as_double(array: np.ndarray) -> np.ndarray:
    """Return the array in double precision: complex128 if it is complex, float64 otherwise."""
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def linear(x: np.ndarray, parameters: Mapping[str, np.ndarray], name: str, *, bias: bool) -> np.ndarray:
    """Apply a linear layer in torch's layout.

    Shapes: `x` ``(..., in)``, ``{name}.weight`` ``(out, in)``, ``{name}.bias`` ``(out,)``; gives ``(..., out)``.
    """
    result = as_double(x) @ as_double(parameters[f"{name}.weight"]).T
    return result + as_double(parameters[f"{name}.bias"]) if bias else result


def short_convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Weigh each channel of a token and of those just before it; the last tap is the token's own.

    Shapes: `x` ``(t, c)``, `kernel` ``(c, k)``; gives ``(t, c)``.
    """
    size = kernel.shape[1]
    result = np.zeros(x.shape, np.result_type(x, kernel))
    for token, tap in np.ndindex(x.shape[0], size):
        earlier = token - (size - 1 - tap)
        if earlier >= 0:
            result[token] += kernel[:, tap] * x[earlier]
    return result


def over_sequences(
    read: Callable[[np.ndarray, np.ndarray], np.ndarray], x: np.ndarray, attention_mask: np.ndarray | None
) -> np.ndarray:
    """Return the results of a function of a sequence ``(t, d)`` and its mask ``(t,)``, for `x` ``([b,] t, d)``.

    `attention_mask` is ``(b, t)``; without it, no token is hidden.
    """
    x = as_double(x)
    batch = x if x.ndim == 3 else x[None]
    masks = np.broadcast_to(True if attention_mask is None else attention_mask, batch.shape[:2])
    results = np.stack([read(*pair) for pair in zip(batch, masks, strict=True)])
    return results if x.ndim == 3 else results[0]


def silu(x: np.ndarray) -> np.ndarray:
    """Return ``x`` times its sigmoid."""
    return x / (1.0 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function, elementwise."""
    return 1.0 / (1.0 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    """Return vectors divided by their length, with the 1e-6 under the root that the delta rule's layers have."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def split_heads(features: np.ndarray, num_heads: int) -> np.ndarray:
    """Cut the features into contiguous slices, one per head.

    Shapes: ``([b,] t, h * c)`` gives ``([b,] h, t, c)``.
    """
    head_dim = features.shape[-1] // num_heads
    heads = [features[..., head * head_dim : (head + 1) * head_dim] for head in range(num_heads)]
    return np.stack(heads, axis=-3)


def merge_heads(context: np.ndarray) -> np.ndarray:
    """Concatenate the heads on the features.

    Shapes: ``([b,] h, t, c)`` gives ``([b,] t, h * c)``.
    """
    return np.concatenate([context[..., head, :, :] for head in range(context.shape[-3])], axis=-1)


def visible_keys(shape: tuple[int, int, int, int], *, causal: bool, attention_mask: np.ndarray | None) -> np.ndarray:
    """Return which query sees which key: the causal rule and the mask, both of which must allow it.

    Shapes: `shape` is ``(b, h, t, s)``; `attention_mask` is ``(b, s)`` if 2-D, else broadcastable to `shape`.

    Raises:
        TypeError: the mask is not bool.
        ValueError: the mask is 3-D or does not fit.
    """
    visible = np.ones(shape, dtype=bool)
    if causal:
        for query in range(shape[2]):
            visible[:, :, query, query + 1 :] = False
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        if mask.dtype != bool:
            raise TypeError(f"attention_mask must be bool, got {mask.dtype}")
        if mask.ndim == 3:
            raise ValueError(f"attention_mask {mask.shape} must be (B, S) or broadcastable to (B, H, T, S), not 3-D")
        visible &= mask[:, None, None, :] if mask.ndim == 2 else mask
    return visible


def restricted(mask: Mask, attention_mask: np.ndarray | None, tokens: int) -> np.ndarray:
    """Return the intersection of a description and a call's mask: bool ``(b, h, t, t)``, where b and h may be 1."""
    places = np.arange(tokens)
    if attention_mask is not None and attention_mask.ndim == 2:
        mask = mask.behind(left_padding(as_mask(attention_mask))[:, None, None])
    seen = np.asarray(mask.allowed(places[:, None], places[None, :]))
    seen = seen if seen.ndim == 4 else seen[None, None]
    if attention_mask is None:
        return seen
    return seen & (attention_mask[:, None, None, :] if attention_mask.ndim == 2 else attention_mask)


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    scale: float,
    causal: bool,
    attention_mask: np.ndarray | None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Average the values of the visible keys with the softmax of the scaled scores; zeros where no key is visible.

    Scores are scaled, then capped to ``softcap * tanh(scores / softcap)``, then `bias` is added; a sink is one more
    logit per head, without a value.

    Shapes: `query` ``([b,] h, t, c)``, `key` and `value` ``([b,] h, s, c)``, `bias` broadcastable to ``(b, h, t, s)``,
    `sinks` ``(h,)``; gives the context ``([b,] h, t, c)`` and the weights ``([b,] h, t, s)``.
    """
    if query.ndim == 3:
        context, weights = attend(
            query[None],
            key[None],
            value[None],
            scale=scale,
            causal=causal,
            attention_mask=attention_mask,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
        )
        return context[0], weights[0]
    shape = (*query.shape[:3], key.shape[2])
    added = np.broadcast_to(0.0 if bias is None else bias, shape)
    dtype = np.result_type(query, key, value, added, *(() if sinks is None else (sinks,)))
    visible = visible_keys(shape, causal=causal, attention_mask=attention_mask)
    weights = np.zeros(shape, dtype)
    context = np.zeros((*shape[:3], value.shape[-1]), dtype)
    for b, h, t in np.ndindex(shape[:3]):
        keys = np.flatnonzero(visible[b, h, t])
        if keys.size == 0:
            continue
        scores = np.array([scale * np.sum(query[b, h, t] * key[b, h, s]) for s in keys])
        scores = (scores if softcap is None else softcap * np.tanh(scores / softcap)) + added[b, h, t, keys]
        logits = scores if sinks is None else np.append(scores, sinks[h])
        exponentials = np.exp(logits - logits.real.max())
        weights[b, h, t, keys] = exponentials[: keys.size] / np.sum(exponentials)
        for s in keys:
            context[b, h, t] += weights[b, h, t, s] * value[b, h, s]
    return context, weights
