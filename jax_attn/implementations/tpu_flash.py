"""Attention by the flash kernel that JAX ships for TPUs (`jax.experimental.pallas.ops.tpu.flash_attention`)."""

from __future__ import annotations

import jax
from einops import rearrange
from jax import Array
from jaxtyping import Float

from attn_bridge import masks

from .call import Call

LANES = 128
"""Lengths must be multiples of it."""


def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can."""
    return None if jax.default_backend() == "tpu" else f"it needs a TPU, and JAX runs on {jax.default_backend()}"


def unsupported(call: Call) -> str | None:
    """Return why it can't serve a call, None if it can."""
    _, heads, queries, keys = call.scores_shape
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    reasons = {
        "it never holds the attention weights (return_weights=True)": call.return_weights,
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "it has no dropout": call.dropout > 0,
        "it takes no bias here": call.bias is not None,
        "it has only the mask causal(), or none": call.mask not in (None, masks.causal()),
        "float64 would be computed in float32": call.query.dtype == "float64",
        f"lengths must be equal multiples of {LANES}, got {queries} and {keys}": queries != keys
        or queries % LANES != 0,
        f"head widths must be equal, got {width} and {value_width}": width != value_width,
        f"heads of query and key must be equal, got {heads} and {call.key.shape[2]}": heads != call.key.shape[2],
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or unavailable()


def attend(call: Call) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    query, key, value = (rearrange(array, "b t h c -> b h t c") for array in (call.query, call.key, call.value))
    context = flash_attention(query, key, value, causal=call.mask is not None, sm_scale=call.scale)
    return rearrange(context, "b h t c -> b t h c")
