"""The loss of next tokens, as `transformers` adds it to a model's output.

Twins: `jax_attn.losses`, `torch_attn.losses`. Letters: B batch, T position, V size of the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from attn_bridge.specs.model import IGNORED_LABEL, check_beside_ids, check_label_range

from . import functional


def check_labels(labels: Int[Array, "B T"], tokens: Int[Array, "B T"], name: str, last_only: bool = False) -> None:
    """Check the labels of a call: integers, one per token, of which all logits are computed.

    Raises:
        TypeError: labels that are not integers.
        ValueError: another shape, or logits of the last token alone.
    """
    if last_only:
        raise ValueError("last_only (True) must be False with labels")
    dtype, shape = functional.dtype_name(labels, "labels"), functional.shape_of(labels)
    check_beside_ids("labels", dtype, shape, functional.shape_of(tokens), ids_name=name)


def mean_loss(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], *, are_shifted: bool = False
) -> Float[Array, ""]:
    """Return the mean cross entropy of logits with labels, in float32, in float64 for float64.

    Args:
        logits: ``(B, T, V)``.
        labels: ``(B, T)``; -100 does not count.
        are_shifted: whether ``labels[:, t]`` is the token that follows token `t`, not the token itself.

    Raises:
        ValueError: a label that is neither -100 nor in the vocabulary. Inside ``jax.jit`` labels have no values yet:
            the loss is NaN then.
    """
    if not are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    size = logits.shape[-1]
    if not isinstance(labels, jax.core.Tracer) and getattr(labels, "is_fully_addressable", True):
        values = np.asarray(labels)
        values = values[values != IGNORED_LABEL]
        if values.size:
            check_label_range(int(values.min()), int(values.max()), size)
    labels = functional.signed(labels)
    counts, is_known = labels != IGNORED_LABEL, (labels >= 0) & (labels < size)
    log = jax.nn.log_softmax(functional.widen(logits), -1)
    of_labels = jnp.take_along_axis(log, jnp.where(is_known, labels, 0)[..., None], -1)[..., 0]
    losses = jnp.where(counts, jnp.where(is_known, -of_labels, jnp.nan), 0.0)
    return losses.sum() / counts.sum()
