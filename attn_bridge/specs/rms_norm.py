"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ..validation import check_number
from .base import LATER, Config, Parameter, Variant, vector


@dataclasses.dataclass(frozen=True)
class RMSNormConfig(Config):
    """Width of the features, the constant added to their mean square, and whether they are scaled (NanoChat's are not).

    The scale may count from 1 (`unit_offset`, Gemma).
    """

    emb_dim: int
    eps: float = 1e-6
    unit_offset: bool = False
    affine: bool = dataclasses.field(default=True, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("emb_dim")
        check_number("eps", self.eps)
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps ({self.eps}) must be positive and finite")
        object.__setattr__(self, "eps", float(self.eps))
        self._require_bools("unit_offset", "affine")
        if self.unit_offset and not self.affine:
            raise ValueError(f"unit_offset ({self.unit_offset}) must be False without a scale")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """One scale per feature, or none."""
        return (vector("scale", self.emb_dim),) if self.affine else ()

    @classmethod
    def arguments_from(cls, sizes: Mapping[str, object]) -> dict[str, object]:
        """Take the width of the input as the width of the features."""
        return {"emb_dim": sizes["d_in"]} | {
            key: sizes[key] for key in ("eps", "unit_offset", "affine") if key in sizes
        }


VARIANT = Variant("RMSNorm", "rms_norm", RMSNormConfig, group="modern", returns_weights=False)
