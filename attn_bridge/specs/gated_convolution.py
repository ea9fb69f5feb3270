"""Gated short convolution (LFM2, arXiv 2511.23404): products of projections, convolved over a few tokens, and gated."""

from __future__ import annotations

import dataclasses

from .base import DERIVED, Config, Example, Parameter, Variant, linear, short_convolution


@dataclasses.dataclass(frozen=True)
class GatedConvolutionConfig(Config):
    """Widths of the input, of the convolution and of the output.

    The paper calls queries C, keys B, and values h.

    Attributes:
        d_in: width of the input.
        width: channels of query, key and value; `d_in` by default.
        d_out: width of the output; `d_in` by default.
        conv_size: tokens that the convolution sees, the token itself included.
        bias: whether the projections and the convolution have biases.
    """

    d_in: int
    width: int = DERIVED
    d_out: int = DERIVED
    conv_size: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "conv_size")
        self._resolve("width", self.d_in)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("width", "d_out")
        self._require_bools("bias")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence, which is that of the convolution: its earlier inputs, as one head."""
        return 1, self.conv_size - 1, self.width

    @property
    def conv_shape(self) -> None:
        """None: the state is that of the convolution."""
        return None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three projections, the convolution, and the output."""
        return (
            *(
                row
                for name in ("W_query", "W_key", "W_value")
                for row in linear(name, self.d_in, self.width, bias=self.bias, axes=("channels", "embed"))
            ),
            *short_convolution(self.width, self.conv_size, bias=self.bias),
            *linear("out_proj", self.width, self.d_out, bias=self.bias, axes=("embed", "channels")),
        )


EXAMPLES = (
    Example(
        "lfm2",
        GatedConvolutionConfig(6, bias=True),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("wide", GatedConvolutionConfig(5, 7, 4, conv_size=4), mask="padding"),
    Example("one-token", GatedConvolutionConfig(4, conv_size=1), tokens=1, batch=None),
)

VARIANT = Variant(
    "GatedConvolution",
    "gated_convolution",
    GatedConvolutionConfig,
    group="modern",
    returns_weights=False,
    examples=EXAMPLES,
)
