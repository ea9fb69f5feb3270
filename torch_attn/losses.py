"""The loss of next tokens, as `transformers` adds it to a model's output.

Twins: `jax_attn.losses`, `torch_attn.losses`. Letters: B batch, T position, V size of the vocabulary.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_bridge.specs.model import IGNORED_LABEL, check_beside_ids, check_label_range

from . import functional


def check_labels(labels: Int[Tensor, "B T"], tokens: Int[Tensor, "B T"], name: str, last_only: bool = False) -> None:
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
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], *, are_shifted: bool = False
) -> Float[Tensor, ""]:
    """Return the mean cross entropy of logits with labels, in float32, in float64 for float64.

    Args:
        logits: ``(B, T, V)``.
        labels: ``(B, T)``; -100 does not count.
        are_shifted: whether ``labels[:, t]`` is the token that follows token `t`, not the token itself.

    Raises:
        ValueError: a label that is neither -100 nor in the vocabulary; not on a GPU, where that stops the program.
    """
    if not are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    wide = functional.widen(logits).flatten(0, 1)
    try:
        return nn.functional.cross_entropy(wide, labels.long().flatten(), ignore_index=IGNORED_LABEL)
    except IndexError:
        kept = labels[labels != IGNORED_LABEL]
        check_label_range(int(kept.min()), int(kept.max()), logits.shape[-1])
        raise
