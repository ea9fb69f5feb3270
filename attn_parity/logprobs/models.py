"""Log-probabilities of tokens as a model gives them, and what rounding in bfloat16 does to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..compare.prepare import subject_of
from ..sides.arrays import is_float
from ..sides.libraries import Value
from ..sides.subject import Arguments, Array, Arrays, Subject

DRAWS = 4
"""Runs in bfloat16 whose operations round at random, for the noise."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of one model.

    Attributes:
        own: per sequence those in the precision of its weights; NaN for the first token.
        noise: draws of the changes that rounding in bfloat16 makes, over all tokens.
    """

    own: list[Array]
    noise: list[Array]


def scored(model: Value, tokens: Sequence[Array], *, with_noise: bool) -> Scores:
    """Return the log-probabilities that a model gives to tokens, and its noise.

    Args:
        model: any side of `compare`, which returns logits ``(sequences, tokens, ids)`` for ids.
        tokens: the ids of each sequence.
        with_noise: measure the noise as well.

    Raises:
        ValueError: it can't be run, or returns no logits of that shape.
    """
    subject = subject_of(model)
    weights = subject.weights()
    own = _logprobs(subject, weights, tokens, None)
    if not with_noise:
        return Scores(own, [])
    exact = np.concatenate(_logprobs(subject, weights, tokens, "float32"))
    rounded = [_logprobs(subject, weights, tokens, "bfloat16")]
    rounded += [_logprobs(subject, weights, tokens, "bfloat16", seed) for seed in range(1, DRAWS + 1)]
    with np.errstate(invalid="ignore"):
        return Scores(own, [np.concatenate(run) - exact for run in rounded])


def _logprobs(
    subject: Subject, weights: Arrays, tokens: Sequence[Array], dtype: str | None, seed: int = 0
) -> list[Array]:
    """Return the log-probabilities of one run per sequence; a seed rounds every operation at random."""
    scores = []
    for ids in tokens:
        call = Arguments((np.asarray(ids)[None],))
        run = subject.run(weights, call, dtype=dtype, mode="jitter" if seed else "eager", seed=seed)
        logits = next((array for array in run.outputs if is_float(array) and array.ndim == 3), None)
        if logits is None or logits.shape[:2] != (1, ids.size):
            shapes = [list(array.shape) for array in run.outputs]
            raise ValueError(
                f"a model must return logits [1, {ids.size}, n] for ids [1, {ids.size}], it gives {shapes}"
            )
        wide = logits[0].astype(np.float64)
        top = wide.max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # logits of NaN and inf are reported later
            normal = wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))
        row = np.full(ids.size, np.nan)
        row[1:] = np.take_along_axis(normal[:-1], np.asarray(ids)[1:, None], axis=-1)[:, 0]
        scores.append(row)
    return scores
