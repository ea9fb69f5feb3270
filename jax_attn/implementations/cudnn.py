"""Attention by cuDNN's fused kernel on an NVIDIA GPU, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attn_bridge import masks

from .call import KernelCall
from .derivatives.backward_only import with_gradients_alone


def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can."""
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version.lower():
        return f"it needs an NVIDIA GPU, and JAX runs on {jax.default_backend()}"
    return None


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can."""
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    reasons = {
        "it never holds the attention weights (return_weights=True)": call.return_weights,
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "its dropout draws other masks than JAX's generators": call.dropout > 0,
        "it takes no bias here": call.bias is not None,
        "it has only the masks causal() and sliding_window(), or none": (
            call.mask is not None and _size_of_band(call.mask) is None
        ),
        f"query, key and value must be float16 or bfloat16, got {call.query.dtype}": not _is_16_bit(call),
        f"head widths must be equal, at most 128 and multiples of 8, got {width} and {value_width}": (
            width != value_width or width > 128 or width % 8 != 0
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or unavailable()


def attend(call: KernelCall) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    call = with_gradients_alone("cudnn", call)
    size = None if call.mask is None else _size_of_band(call.mask)
    return jax.nn.dot_product_attention(
        call.query,
        call.key,
        call.value,
        scale=call.scale,
        is_causal=call.mask is not None,
        # Keys before and behind the query's own, which our size counts, too.
        local_window_size=(size - 1, 0) if size else None,
        implementation="cudnn",
    )


def _is_16_bit(call: KernelCall) -> bool:
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    return len(dtypes) == 1 and dtypes <= {jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)}


def _size_of_band(mask: masks.Mask) -> int | None:
    """Return the size of a window, 0 for causal(); None for any other mask."""
    band = masks.as_band(mask)
    if band is None or band[1] or band[0].offset:
        return None
    return band[0].size or 0
