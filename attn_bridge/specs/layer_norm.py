"""Layer normalisation with a biased, two-pass variance (book section 4.2; Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ..validation import check_number
from .base import LATER, Config, Parameter, Variant, vector


@dataclasses.dataclass(frozen=True)
class LayerNormConfig(Config):
    """Width of the features, the constant added to their variance, and whether they are scaled, and then shifted.

    The scale may count from 1 (`unit_offset`, Nemotron).
    """

    emb_dim: int
    eps: float = 1e-5
    affine: bool = True
    bias: bool = dataclasses.field(default=True, metadata={LATER: True})
    unit_offset: bool = dataclasses.field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("emb_dim")
        check_number("eps", self.eps)
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps ({self.eps}) must be positive and finite")
        object.__setattr__(self, "eps", float(self.eps))
        self._require_bools("affine", "bias", "unit_offset")
        if self.unit_offset and not self.affine:
            raise ValueError(f"unit_offset ({self.unit_offset}) must be False without a scale")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """One scale and one shift per feature, the scale alone, or none."""
        shift = (vector("shift", self.emb_dim),) if self.bias else ()
        return (vector("scale", self.emb_dim), *shift) if self.affine else ()

    @classmethod
    def arguments_from(cls, sizes: Mapping[str, object]) -> dict[str, object]:
        """Take the width of the input as the width of the features."""
        names = ("eps", "affine", "bias", "unit_offset")
        return {"emb_dim": sizes["d_in"]} | {key: sizes[key] for key in names if key in sizes}


VARIANT = Variant("LayerNorm", "layer_norm", LayerNormConfig, returns_weights=False)
