"""Mamba (Gu and Dao, arXiv 2312.00752): each channel keeps a state that fades by a step chosen from the token."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ..weights import Rule
from .base import DERIVED, Config, Example, Parameter, Variant, linear, short_convolution, vector
from .model import below
from .rms_norm import RMSNormConfig

LatentNorms = Literal["none", "plain", "scaled"]


@dataclasses.dataclass(frozen=True)
class MambaConfig(Config):
    """Sizes of the channels, their states and steps, and of the short convolution before them.

    The paper calls queries C, keys B, values x, the gate z, and steps delta.

    Attributes:
        d_in: width of the input.
        width: channels of value and gate; ``2 * d_in`` by default.
        state_size: numbers in the state of a channel, and the width of query and of key, which all channels share.
        step_rank: width between the two projections of the steps; a sixteenth of `d_in`, rounded up, by default.
        d_out: width of the output; `d_in` by default.
        conv_size: tokens that the convolution sees, the token itself included.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections of the input and of the output have biases.
        latent_norms: whether step, key and query are brought to mean square 1 (``plain``, Falcon Mamba), and scaled as
            well (``scaled``, Jamba); ``none`` leaves them as they are.
        eps: constant added to the mean square in these norms.
    """

    d_in: int
    width: int = DERIVED
    state_size: int = 16
    step_rank: int = DERIVED
    d_out: int = DERIVED
    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    latent_norms: LatentNorms = "none"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "state_size", "conv_size")
        self._resolve("width", 2 * self.d_in)
        self._resolve("step_rank", -(-self.d_in // 16))
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("width", "step_rank", "d_out")
        self._require_bools("conv_bias", "bias")
        self._require_choice("latent_norms", get_args(LatentNorms))
        self._require_positive_number("eps")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence: one head, numbers of the state of a channel, channels."""
        return 1, self.state_size, self.width

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Inputs of the convolution that a cache keeps, and their channels."""
        return self.conv_size - 1, self.width

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Projections of the input, the convolution, steps, keys and queries, the decay, the residual, the output."""
        width, rank, d_out = self.width, self.step_rank, self.d_out
        rates = Parameter(Rule("A_log", "A_log", "c k -> c k"), (width, self.state_size), ("channels", "latent"))
        return (
            *linear("W_gate", self.d_in, width, bias=self.bias, axes=("channels", "embed")),
            *linear("W_value", self.d_in, width, bias=self.bias, axes=("channels", "embed")),
            *short_convolution(width, self.conv_size, bias=self.conv_bias),
            *linear("W_step_down", width, rank, bias=False, axes=("latent", "channels")),
            *linear("W_key", width, self.state_size, bias=False, axes=("latent", "channels")),
            *linear("W_query", width, self.state_size, bias=False, axes=("latent", "channels")),
            *self._norm_parameters,
            *linear("W_step_up", rank, width, bias=False, axes=("channels", "latent")),
            vector("dt_bias", width, "channels"),
            rates,
            vector("D", width, "channels"),
            *linear("out_proj", width, d_out, bias=self.bias, axes=("embed", "channels")),
        )

    @property
    def _norm_parameters(self) -> tuple[Parameter, ...]:
        if self.latent_norms != "scaled":
            return ()
        sizes = {"step_norm": self.step_rank, "k_norm": self.state_size, "q_norm": self.state_size}
        return tuple(
            dataclasses.replace(row, axes=("latent",))
            for name, size in sizes.items()
            for row in below(name, RMSNormConfig(size, self.eps).parameters)
        )


EXAMPLES = (
    Example(
        "mamba",
        MambaConfig(6, state_size=3, step_rank=2),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("falcon-mamba", MambaConfig(5, 7, 4, 3, latent_norms="plain", eps=1e-3), mask="padding"),
    Example("jamba", MambaConfig(4, 6, 3, 2, bias=True, latent_norms="scaled", eps=1e-3), mask="padding"),
    Example("no-bias", MambaConfig(6, 5, 2, d_out=4, conv_size=2, conv_bias=False)),
    Example("two-chunks", MambaConfig(4, 3, 2, conv_size=1), tokens=18, batch=None),
    Example("one-token", MambaConfig(6, 5, 3), tokens=1, batch=2),
)

VARIANT = Variant("Mamba", "mamba", MambaConfig, group="modern", returns_weights=False, examples=EXAMPLES)
