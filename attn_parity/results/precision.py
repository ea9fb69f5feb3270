"""The result of `as_precise`: whether one array is as precise as a trusted one, judged by a float64 oracle."""

from __future__ import annotations

import dataclasses

from .findings import Verdict


@dataclasses.dataclass(frozen=True)
class WorstElement:
    """The element with the largest error of `got`: its index, and the three values there."""

    index: tuple[int, ...]
    got: float
    trusted: float
    oracle: float

    def __str__(self) -> str:
        at = f" at {self.index}" if self.index else ""
        return f"worst{at}: got {self.got:.9g}, trusted {self.trusted:.9g}, oracle {self.oracle:.9g}"


@dataclasses.dataclass(frozen=True)
class Precision:
    """Result of `attn_bridge.parity.as_precise`.

    Attributes:
        verdict: ``equal``; ``precision``: `got` loses more than its allowance; ``different``: more than 100 times that,
            or not finite in the same elements as `trusted`; ``inconclusive``: the arrays can't decide.
        share: largest error of `got` as a share of its allowance; 1 fails.
        worst: the element with the largest error; None if there is no element.
        message: the reason in one line, empty when equal.
        dtype: dtype of `got` and `trusted`.
        shape: shape of all three.
        got_ulps: root mean square error of `got`, in units of the last place of the oracle's largest value.
        trusted_ulps: the same of `trusted`.
        bias_share: the share that the averages alone took; None where they are not judged.
    """

    verdict: Verdict
    share: float
    worst: WorstElement | None
    message: str
    dtype: str
    shape: tuple[int, ...]
    got_ulps: float = 0.0
    trusted_ulps: float = 0.0
    bias_share: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``equal``."""
        return self.verdict == "equal"

    def explain(self) -> str:
        """Return the verdict, the reason and the worst element in one line."""
        used = f"{self.share:.0%} of" if self.share < 1 else f"{self.share:.3g} x"
        what = f"{self.dtype} {list(self.shape)}, {used} the allowed error"
        reason = f": {self.message}" if self.message else ""
        return f"{self.verdict}: {what}{reason}" + (f"; {self.worst}" if self.worst is not None else "")

    def __str__(self) -> str:
        return self.explain()
