"""Lightning attention (Qin et al., arXiv 2405.17381) as MiniMax-01 runs it: each head fades its state at its rate."""

from __future__ import annotations

import dataclasses
import math

from ..validation import check_number
from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear
from .model import below
from .rms_norm import RMSNormConfig


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(Config):
    """Sizes of the heads, their rates of decay, and the norm behind them.

    Attributes:
        d_in: width of the input.
        num_heads: heads of query, key and value, each with a state.
        head_dim: width of a head; ``d_in // num_heads`` by default.
        d_out: width of the output; `d_in` by default.
        decay_rates: rate of each head, 0 or more: a token leaves ``exp(-rate)`` of the state. By default those of
            ALiBi, ``2 ** (-8 * (head + 1) / num_heads)``; `layer_decay_rates` gives those of a layer of MiniMax-01.
        eps: constant added to the mean square in the norm of the context, which spans all heads.
    """

    d_in: int
    num_heads: int
    head_dim: int = DERIVED
    d_out: int = DERIVED
    decay_rates: tuple[float, ...] = DERIVED
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("d_out", self.d_in)
        self._resolve("decay_rates", _published_rates(self.num_heads, 1.0))
        self._require_positive_ints("head_dim", "d_out")
        self._require_positive_number("eps")
        if not isinstance(self.decay_rates, tuple | list):
            raise TypeError(f"decay_rates must be a tuple of numbers, got {type(self.decay_rates).__name__}")
        for head, rate in enumerate(self.decay_rates):
            check_number(f"decay_rates[{head}]", rate)
            if not 0 <= rate < math.inf:
                raise ValueError(f"decay_rates[{head}] ({rate}) must be at least 0 and finite")
        if len(self.decay_rates) != self.num_heads:
            raise ValueError(f"number of decay_rates ({len(self.decay_rates)}) must be num_heads ({self.num_heads})")
        object.__setattr__(self, "decay_rates", tuple(float(rate) for rate in self.decay_rates))

    @property
    def width(self) -> int:
        """Width of query, of key, of value and of the gate, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def norm(self) -> RMSNormConfig:
        """Config of the norm of the context, over all heads."""
        return RMSNormConfig(self.width, self.eps)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence: heads, channels of a key, channels of a value."""
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def conv_shape(self) -> None:
        """None: there is no convolution."""
        return None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Four projections of the input, the norm, and the output projection."""
        by_head = Axis("heads", self.num_heads)
        names = ("W_query", "W_key", "W_value", "W_gate")
        return (
            *(
                row
                for name in names
                for row in linear(name, self.d_in, self.width, bias=False, axes=(by_head, "embed"))
            ),
            *below("norm", self.norm.parameters),
            *linear("out_proj", self.width, self.d_out, bias=False, axes=("embed", by_head)),
        )


def layer_decay_rates(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return the rates of a layer of MiniMax-01 (arXiv 2501.08313): the deeper the layer, the slower its decay.

    Args:
        num_heads: heads of the layer.
        layer: index of the layer, from 0.
        num_layers: layers of the model, those of other kinds included.
    """
    # The published code adds 1e-5 twice: the rates of the last layer are small, not 0.
    return _published_rates(num_heads, 1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def _published_rates(num_heads: int, factor: float) -> tuple[float, ...]:
    base = 1 / 2 ** (8 / num_heads)
    return tuple(base ** (head + 1) * factor for head in range(num_heads))


EXAMPLES = (
    Example(
        "minimax",
        LightningAttentionConfig(8, 4, 3, 5, layer_decay_rates(4, 1, 3), eps=1e-3),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("two-chunks", LightningAttentionConfig(4, 2), tokens=66, batch=None),
    Example("no-decay", LightningAttentionConfig(6, 2, decay_rates=(0.0, 40.0)), mask="padding"),
    Example("as-many-tokens-as-heads", LightningAttentionConfig(6, 3), tokens=3),
    Example("one-token", LightningAttentionConfig(6, 3, 4), tokens=1, batch=2),
)

VARIANT = Variant(
    "LightningAttention",
    "lightning_attention",
    LightningAttentionConfig,
    group="modern",
    returns_weights=False,
    examples=EXAMPLES,
)
