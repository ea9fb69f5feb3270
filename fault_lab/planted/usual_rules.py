"""The rules by which ports are usually tested, to be measured on the same numbers as the judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from attn_parity.results.findings import Array, Picture


@dataclasses.dataclass(frozen=True)
class UsualRule:
    """One rule: its short name, its condition on the two float32 results, and the check."""

    name: str
    about: str
    accepts: Callable[[Picture], bool]


def _close(atol: float, rtol: float) -> Callable[[Picture], bool]:
    def accepts(picture: Picture) -> bool:
        return bool(np.allclose(_wide(picture.flax), _wide(picture.torch), rtol=rtol, atol=atol, equal_nan=True))

    return accepts


def _same_mean(picture: Picture) -> bool:
    if not picture.torch.size:
        return True
    return bool(abs(_wide(picture.flax).mean() - _wide(picture.torch).mean()) <= 1e-4)


def _twice_the_error(picture: Picture) -> bool:
    if picture.oracle is None or not picture.torch.size:
        return True
    truth = picture.oracle.astype(picture.torch.dtype)
    third = truth.dtype.type(0.3)
    floor = 2.0 * float(np.abs(_wide(truth + third - third) - _wide(truth)).max())
    candidate, trusted = (float(np.abs(_wide(one) - picture.oracle).max()) for one in (picture.flax, picture.torch))
    return candidate <= 2.0 * trusted + floor


USUAL_RULES: tuple[UsualRule, ...] = (
    UsualRule("1e-5", "every element within atol = rtol = 1e-5 (assert_allclose)", _close(1e-5, 1e-5)),
    UsualRule("1e-3", "every element within atol = rtol = 1e-3", _close(1e-3, 1e-3)),
    UsualRule("1e-2", "every element within rtol = 1e-3, atol = 1e-2", _close(1e-2, 1e-3)),
    UsualRule("mean", "the means within 1e-4", _same_mean),
    UsualRule(
        "2x f64",
        "the largest error of Flax, against torch in float64, at most twice torch's own, plus twice the rounding of "
        "x + 0.3 - 0.3 (FlashAttention's tests)",
        _twice_the_error,
    ),
)


def rejections(pictures: Sequence[Picture]) -> dict[str, tuple[bool, bool]]:
    """Return rule -> whether it rejects the outputs, and whether it rejects the outputs or any gradient."""
    outputs = [picture for picture in pictures if picture.name.startswith("output")]
    with np.errstate(all="ignore"):
        return {
            rule.name: (
                not all(rule.accepts(picture) for picture in outputs),
                not all(rule.accepts(picture) for picture in pictures),
            )
            for rule in USUAL_RULES
        }


def _wide(array: Array) -> Array:
    return array.astype(np.float64)
