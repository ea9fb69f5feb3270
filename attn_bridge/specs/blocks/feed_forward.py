"""Feed-forward layers: two matrices with an activation between them, or three, one of which gates (2002.05202)."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Literal, get_args

from ...validation import check_number
from ..base import LATER, Config, Parameter, linear, number, vector
from ..model import below

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "quick_gelu", "relu2"]

HiddenActivation = Activation | Literal["xielu"]

_HIDDEN = (*get_args(Activation), "xielu")


XIELU: dict[str, tuple[()] | tuple[int]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Number of the activation xIELU -> its shape in files."""


@dataclasses.dataclass(frozen=True)
class ClampedGate:
    """The gate of gpt-oss (arXiv 2508.10925): both halves are clipped, and 1 is added to the half that is gated.

    Attributes:
        limit: upper bound of the gate; the gated half is clipped to this and its negative.
        alpha: the gate is multiplied by the sigmoid of `alpha` times itself.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name in ("limit", "alpha"):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive and finite")
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig(Config):
    """Widths, activation and biases.

    Attributes:
        d_in: width of the input, and of the output.
        hidden_dim: width between the matrices.
        activation: ``silu``, ``gelu``, its approximations by tanh ``gelu_tanh`` and by a sigmoid ``quick_gelu``,
            ``relu``, or its square ``relu2``; without a gate also ``xielu``, whose numbers are learned (2411.13010).
        gated: whether the activation of one projection multiplies another: ``fc3(activation(fc1(x)) * fc2(x))``.
        bias: whether the matrices have biases.
        clamp: how gpt-oss clips the gate and the gated half; for ``silu`` alone.
        dropout: rate of dropout behind the activation in training; without a gate alone (BART).
        scales: factors of the gate in front of its activation, and of the output (Falcon-H1); with a gate alone.
        sparsity: share of a token's gate that becomes 0 in front of the activation, if its numbers are distributed
            normally: those below a bound are, and it is taken off the others (Gemma 3n); with a gate alone.
        hidden_norm: constant added to the mean square in a root mean square norm in front of the last matrix (BitNet),
            with a gate alone; None omits the norm.
    """

    d_in: int
    hidden_dim: int
    activation: HiddenActivation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: ClampedGate | None = None
    dropout: float = 0.0
    scales: tuple[float, float] = dataclasses.field(default=(1.0, 1.0), metadata={LATER: True})
    sparsity: float = dataclasses.field(default=0.0, metadata={LATER: True})
    hidden_norm: float | None = dataclasses.field(default=None, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "hidden_dim")
        self._require_choice("activation", _HIDDEN)
        self._require_bools("gated", "bias")
        if self.gated and self.activation == "xielu":
            raise ValueError(f"activation ({self.activation}) must be another with a gate")
        self._require_rates("dropout")
        if self.gated and self.dropout:
            raise ValueError(f"dropout ({self.dropout}) must be 0 with a gate")
        self._require_factors("scales", 2)
        if self.scales != (1.0, 1.0) and (not self.gated or self.clamp is not None):
            raise ValueError(f"scales ({self.scales}) need a gate without clamp")
        self._require_rates("sparsity")
        if self.sparsity and (not self.gated or self.clamp is not None):
            raise ValueError(f"sparsity ({self.sparsity}) needs a gate without clamp")
        if self.hidden_norm is not None:
            self._require_positive_number("hidden_norm")
            if not self.gated or self.clamp is not None:
                raise ValueError(f"hidden_norm ({self.hidden_norm}) needs a gate without clamp")
        if self.clamp is not None:
            self._require_kind("clamp", ClampedGate)
            if not self.gated or self.activation != "silu":
                raise ValueError(f"clamp ({self.clamp}) needs a gate with activation 'silu'")

    @property
    def bound(self) -> float:
        """Bound of the gate that gives its sparsity, in standard deviations above the mean."""
        return statistics.NormalDist().inv_cdf(self.sparsity)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Two linear layers in a list with the activation, or three named ones."""
        if not self.gated:
            own = tuple(number(name, shape) for name, shape in XIELU.items()) if self.activation == "xielu" else ()
            return (
                *linear("layers.0", self.d_in, self.hidden_dim, bias=self.bias, axes=("mlp", "embed")),
                *below("layers.1", own),
                *linear("layers.2", self.hidden_dim, self.d_in, bias=self.bias, axes=("embed", "mlp")),
            )
        return (
            *linear("fc1", self.d_in, self.hidden_dim, bias=self.bias, axes=("mlp", "embed")),
            *linear("fc2", self.d_in, self.hidden_dim, bias=self.bias, axes=("mlp", "embed")),
            *linear("fc3", self.hidden_dim, self.d_in, bias=self.bias, axes=("embed", "mlp")),
            *(below("hidden_norm", [vector("scale", self.hidden_dim, "mlp")]) if self.hidden_norm is not None else ()),
        )
