"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ..validation import check_number
from .base import Config, Parameter, Variant, vector


@dataclasses.dataclass(frozen=True)
class RMSNormConfig(Config):
    """Width of the features, the constant added to their mean square, and whether the scale counts from 1 (Gemma)."""

    emb_dim: int
    eps: float = 1e-6
    unit_offset: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("emb_dim")
        check_number("eps", self.eps)
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps ({self.eps}) must be positive and finite")
        object.__setattr__(self, "eps", float(self.eps))
        self._require_bools("unit_offset")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """One scale per feature."""
        return (vector("scale", self.emb_dim),)

    @classmethod
    def arguments_from(cls, sizes: Mapping[str, object]) -> dict[str, object]:
        """Take the width of the input as the width of the features."""
        return {"emb_dim": sizes["d_in"]} | {key: sizes[key] for key in ("eps", "unit_offset") if key in sizes}


VARIANT = Variant("RMSNorm", "rms_norm", RMSNormConfig, group="modern", returns_weights=False)
