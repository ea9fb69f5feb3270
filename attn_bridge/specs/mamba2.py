"""Mamba-2 (Dao and Gu, arXiv 2405.21060): a state that fades by a step chosen from each token."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from ..validation import check_number
from .base import DERIVED, LATER, Axis, Config, Example, Parameter, Variant, linear, short_convolution, vector
from .model import below

GatedNormOrder = Literal["gate_first", "norm_first", "none"]


@dataclasses.dataclass(frozen=True)
class Mamba2Config(Config):
    """Sizes of heads, states and groups, of the short convolution before them, and of the gated norm behind them.

    The paper calls queries C, keys B, values x, the gate z, and steps dt.

    Attributes:
        d_in: width of the input.
        num_heads: heads of value, each with a separate state.
        head_dim: width of a head of value; ``2 * d_in // num_heads`` by default.
        state_size: width of a query and of a key.
        num_groups: sets of query and key, each of which serves ``num_heads // num_groups`` heads.
        d_out: width of the output; `d_in` by default.
        conv_size: tokens that the convolution sees, the token itself included.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        norm_groups: parts of the context that are normalised separately; `num_groups` by default.
        eps: constant added to the mean square in the norm.
        min_step: lower bound of a step.
        max_step: upper bound of a step; None sets no limit.
        norm_order: whether the gate multiplies the context before the norm (``gate_first``), after it
            (``norm_first``), or without any norm (``none``); Falcon-H1 has all three.
        projection_scales: factors of gate, value, key, query and step behind their projections (Falcon-H1).
    """

    d_in: int
    num_heads: int
    head_dim: int = DERIVED
    state_size: int = 128
    num_groups: int = 1
    d_out: int = DERIVED
    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = DERIVED
    eps: float = 1e-5
    min_step: float = 0.0
    max_step: float | None = None
    norm_order: GatedNormOrder = dataclasses.field(default="gate_first", metadata={LATER: True})
    projection_scales: tuple[float, float, float, float, float] = dataclasses.field(
        default=(1.0, 1.0, 1.0, 1.0, 1.0), metadata={LATER: True}
    )

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads", "state_size", "num_groups", "conv_size")
        self._require_multiple("num_heads", "num_groups")
        if self.head_dim is None and 2 * self.d_in % self.num_heads:
            raise ValueError(f"2 * d_in ({2 * self.d_in}) must be a multiple of num_heads ({self.num_heads})")
        self._resolve("head_dim", 2 * self.d_in // self.num_heads)
        self._resolve("d_out", self.d_in)
        self._resolve("norm_groups", self.num_groups)
        self._require_positive_ints("head_dim", "d_out", "norm_groups")
        self._require_bools("conv_bias", "bias")
        self._require_positive_number("eps")
        if self.width % self.norm_groups:
            raise ValueError(
                f"num_heads * head_dim ({self.width}) must be a multiple of norm_groups ({self.norm_groups})"
            )
        check_number("min_step", self.min_step)
        if not 0 <= self.min_step < math.inf:
            raise ValueError(f"min_step ({self.min_step}) must be at least 0 and finite")
        object.__setattr__(self, "min_step", float(self.min_step))
        if self.max_step is not None:
            self._require_positive_number("max_step")
            if self.max_step < self.min_step:
                raise ValueError(f"max_step ({self.max_step}) must be at least min_step ({self.min_step})")
        self._require_choice("norm_order", get_args(GatedNormOrder))
        self._require_factors("projection_scales", 5)

    @property
    def width(self) -> int:
        """Width of value, and of the gate, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of query, and of key, over all groups."""
        return self.num_groups * self.state_size

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: value, key and query, one after the other."""
        return self.width + 2 * self.key_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence: heads, channels of a key, channels of a value."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Inputs of the convolution that a cache keeps, and their channels."""
        return self.conv_size - 1, self.conv_width

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Five projections, the convolution, decay and steps, the residual of the values, the norm, and the output."""
        # Devices share groups: the heads of one read the same query and key.
        by_group = Axis("heads", self.num_groups)
        return (
            *linear("W_gate", self.d_in, self.width, bias=self.bias, axes=(by_group, "embed")),
            *linear("W_value", self.d_in, self.width, bias=self.bias, axes=(by_group, "embed")),
            *linear("W_key", self.d_in, self.key_width, bias=self.bias, axes=(by_group, "embed")),
            *linear("W_query", self.d_in, self.key_width, bias=self.bias, axes=(by_group, "embed")),
            *linear("W_step", self.d_in, self.num_heads, bias=self.bias, axes=(by_group, "embed")),
            *short_convolution(self.conv_width, self.conv_size, bias=self.conv_bias),
            vector("dt_bias", self.num_heads, by_group),
            vector("A_log", self.num_heads, by_group),
            vector("D", self.num_heads, by_group),
            *self._norm_parameters,
            *linear("out_proj", self.width, self.d_out, bias=self.bias, axes=("embed", by_group)),
        )

    @property
    def _norm_parameters(self) -> tuple[Parameter, ...]:
        if self.norm_order == "none":
            return ()
        return below("norm", (vector("scale", self.width, Axis("heads", self.norm_groups)),))


EXAMPLES = (
    Example(
        "mamba2",
        Mamba2Config(8, 4, 3, 5, 2, conv_size=4, eps=1e-3),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("biases", Mamba2Config(6, 3, 4, 2, d_out=5, conv_size=2, bias=True, norm_groups=4), mask="padding"),
    Example("limited-steps", Mamba2Config(4, 2, state_size=3, conv_bias=False, min_step=0.3, max_step=0.9)),
    Example(
        "falcon-h1",
        Mamba2Config(6, 4, 3, 2, 2, norm_order="norm_first", projection_scales=(0.5, 1.5, 0.7, 1.3, 2.0)),
        mask="padding",
    ),
    Example("no-norm", Mamba2Config(4, 2, 3, 2, norm_order="none"), tokens=3),
    Example("two-chunks", Mamba2Config(4, 2, 3, 3, conv_size=1), tokens=66, batch=None),
    Example("as-many-tokens-as-heads", Mamba2Config(6, 3, 2, 3, 3), tokens=3),
    Example("one-token", Mamba2Config(6, 2, 3, 4, 2), tokens=1, batch=2),
)

VARIANT = Variant("Mamba2", "mamba2", Mamba2Config, group="modern", returns_weights=False, examples=EXAMPLES)
