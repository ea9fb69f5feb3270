"""The cases of the parity matrix as data: shapes, masks and non-degenerate numbers for any variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from attn_bridge.backends import Framework
from attn_bridge.specs import Config, Rotary, Variant

from ..sides.arrays import numpy_dtype
from ..sides.subject import Array, Arrays

MODES = {"torch": ("eager", "aot", "inductor"), "flax": ("jit", "eager")}
"""Ways of running a twin; the first one runs everywhere. ``aot`` captures, differentiates and decomposes the whole
graph like ``inductor``, and leaves out the C++ code."""

IN_MODE = {
    "inductor": ("MultiHeadAttention",),
    "eager": ("MultiHeadAttention", "LayerNorm"),
    "aot": ("SelfAttention_v1", "CausalAttention", "LayerNorm"),
}
"""Further mode -> variants that run in it by default. A variant without compiled mode shares its code with one that has
a compiled mode."""


IN_FULL: dict[str, tuple[str, ...] | None] = {"float32": None, "bfloat16": ("MultiHeadAttention", "LayerNorm")}
"""Precision -> variants (None: all) whose first case is compiled as users compile it. The rest goes without LLVM's
optimizations, a tenth of the work: XLA makes the same operations of it, with the same roundings, and what LLVM does to
operations in a precision does not depend on the variant."""


def mode_of(framework: Framework, mode: str, dtype: str, *, in_full: bool) -> str:
    """Return the mode of a subject for one of `MODES`: float64 is compiled quickly, others unless `in_full`."""
    if mode == "jit":
        return "quick" if dtype == "float64" or not in_full else "jit"
    return "untraced" if (framework, mode) == ("flax", "eager") else mode


@dataclasses.dataclass(frozen=True)
class TwinCase:
    """One shape of input and module.

    Attributes:
        name: word for it in reports and on the command line.
        tokens: sequence length T.
        sizes: constructor arguments by name; a variant takes those it has, and its own defaults for the rest.
        batch: batch size B; None for input without a batch axis.
        mask: attention mask to give: none, ``(B, S)`` padding, or one per head with fully masked rows.
        return_weights: whether the attention weights are an output, too.
        gain: factor of the weights; large ones give scores far from zero.
        dtypes: precisions it runs in by default; every compiled program costs seconds, and shapes at the edge only
            have a meaning to prove, which float64 does.
        config: the config of a variant that takes it, instead of sizes.
        context: number and width of the tokens of ``context=``, for a variant that takes it.
    """

    name: str
    tokens: int
    sizes: Mapping[str, Any]
    batch: int | None = None
    mask: Literal["none", "padding", "per-head"] = "none"
    return_weights: bool = False
    gain: float = 1.0
    dtypes: tuple[str, ...] = ("float64",)
    config: Config | None = None
    context: tuple[int, int] | None = None

    def arguments(self, variant: Variant) -> dict[str, Any]:
        """Return the constructor arguments of `variant` in this case."""
        return variant.config.arguments_from(self.sizes) if self.config is None else {"config": self.config}

    def config_of(self, variant: Variant) -> Config:
        """Return the config of `variant` in this case."""
        return variant.config(**self.arguments(variant)) if self.config is None else self.config

    @property
    def rows(self) -> int:
        """Number of token vectors, which a parameter's gradient sums over."""
        return (self.batch or 1) * self.tokens


CASES: tuple[TwinCase, ...] = (
    TwinCase(
        "odd-sizes",
        tokens=7,
        batch=3,
        sizes={"d_in": 5, "d_out": 6, "context_length": 9, "dropout": 0.1, "num_heads": 3, "qkv_bias": True},
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    TwinCase(
        "large-scores",
        tokens=10,
        batch=2,
        sizes={
            "d_in": 7,
            "d_out": 8,
            "context_length": 16,
            "dropout": 0.3,
            "num_heads": 4,
            "qkv_bias": True,
            "eps": 1e-3,
        },
        mask="per-head",
        return_weights=True,
        gain=2.0,
        dtypes=("float64", "float32"),
    ),
    TwinCase("one-head", tokens=6, sizes={"d_in": 3, "d_out": 5, "context_length": 6}),
    TwinCase(
        "one-token",
        tokens=1,
        batch=2,
        sizes={"d_in": 4, "d_out": 6, "context_length": 3, "num_heads": 2, "qkv_bias": True},
        return_weights=True,
    ),
)
"""Every variant without examples runs every case; the first is also run through the other modes."""


def cases_of(variant: Variant, is_brief: bool = False) -> tuple[TwinCase, ...]:
    """Return the cases that a variant runs: its examples, or the shared cases of variants without examples.

    Args:
        variant: the variant.
        is_brief: run the first example without float16, and the others in float64 only.
    """
    if not variant.examples:
        return CASES
    fields = ("name", "tokens", "batch", "mask", "context", "return_weights", "dtypes", "config")
    own = tuple(
        TwinCase(sizes={"d_in": getattr(one.config, "d_in", None)}, **{name: getattr(one, name) for name in fields})
        for one in variant.examples
    )
    if not is_brief:
        return own
    kept = [tuple(dtype for dtype in own[0].dtypes if dtype != "float16"), *[("float64",)] * (len(own) - 1)]
    return tuple(dataclasses.replace(case, dtypes=dtypes) for case, dtypes in zip(own, kept, strict=True))


@dataclasses.dataclass(frozen=True)
class CaseNumbers:
    """Numbers for one module: parameters under torch names, keyword inputs, and one cotangent per output."""

    weights: Arrays
    inputs: Arrays
    cotangents: list[Array]

    def rounded(self, dtype: str) -> CaseNumbers:
        """Return the numbers as `dtype` holds them, in that dtype."""
        return self._cast(lambda array: array.astype(numpy_dtype(dtype)))

    def moved(self, seed: int, by: float = 2.0**-10) -> CaseNumbers:
        """Return the numbers with every weight and input moved at random by a small part of itself."""
        random = np.random.default_rng([seed, len(self.weights)])
        moved = self._cast(lambda array: array * (1.0 + by * random.normal(size=array.shape)))
        return dataclasses.replace(moved, cotangents=self.cotangents)

    def widened(self) -> CaseNumbers:
        """Return the same numbers in float64, exactly."""
        return self._cast(lambda array: array.astype(np.float64))

    def _cast(self, cast: Any) -> CaseNumbers:
        def each(array: Array) -> Any:
            return array if array.dtype.kind in "biu" else cast(array)

        return CaseNumbers(
            {name: each(array) for name, array in self.weights.items()},
            {name: each(array) for name, array in self.inputs.items()},
            [each(array) for array in self.cotangents],
        )


def draw(case: TwinCase, variant: Variant, seed: int, weights: Mapping[str, Array] | None = None) -> CaseNumbers:
    """Draw the numbers of one case in float64, none of them degenerate.

    Biases and scales are neither 0 nor 1; token vectors differ in size by two orders of magnitude, some are nearly
    constant with a mean far from zero. Given `weights` are taken instead of drawn ones.
    """
    random = np.random.default_rng([seed, *case.name.encode(), *variant.name.encode()])
    config = case.config_of(variant)
    drawn = {} if weights is None else dict(weights)
    for parameter in () if weights is not None else config.parameters:
        drawn[parameter.rule.torch] = _draw_weight(random, parameter.shape, case.gain)
    d_in = case.sizes["d_in"]
    leading = (case.tokens,) if case.batch is None else (case.batch, case.tokens)
    x = random.normal(size=(*leading, d_in)) * random.choice([0.03, 0.3, 1.0, 1.0, 2.0], size=(*leading, 1))
    x += random.choice([0.0, 0.0, 1.0, -1.5], size=(*leading, 1))
    inputs = {"x": x}
    if case.context is not None:
        inputs["context"] = random.normal(size=(*leading[:-1], *case.context))
    takes_mask = variant.returns_weights or bool(variant.examples)
    if takes_mask and case.mask != "none":
        inputs["attention_mask"] = _draw_mask(random, case, getattr(config, "num_heads", 1))
    position = getattr(config, "position", None)
    if isinstance(position, Rotary) and position.axes is not None:
        inputs["positions"] = draw_positions(random, position.axes, case.batch or 1, case.tokens)
    return CaseNumbers(drawn, inputs, [])


def draw_positions(random: np.random.Generator, axes: tuple[int, ...], batch: int, tokens: int) -> Array:
    """Draw positions ``(rows, B, T)`` that grow in each row at a separate rate, with jumps both ways."""
    grown = np.arange(tokens) * random.integers(1, 4, (len(axes), batch, 1))
    positions: Array = (grown + random.integers(0, 5, grown.shape)).astype(np.int32)
    return positions


def draw_cotangents(numbers: CaseNumbers, shapes: list[tuple[int, ...]], case: TwinCase, seed: int) -> CaseNumbers:
    """Add a random cotangent for every output."""
    random = np.random.default_rng([seed, *case.name.encode(), len(shapes)])
    return dataclasses.replace(numbers, cotangents=[random.normal(size=shape) for shape in shapes])


def _draw_weight(random: np.random.Generator, shape: tuple[int, ...], gain: float) -> Array:
    if len(shape) == 1:
        return random.choice([-1.0, 1.0], size=shape) * random.uniform(0.2, 1.6, size=shape)
    matrix: Array = random.normal(size=shape) * gain / np.sqrt(shape[-1])
    return matrix


def _draw_mask(random: np.random.Generator, case: TwinCase, num_heads: int) -> Array:
    batch, tokens = case.batch or 1, case.tokens
    keys = tokens if case.context is None else case.context[0]
    positions = np.arange(keys)
    if case.mask == "padding":
        # Sequence 0 is whole, the others are padded on the right and on the left in turn; padding on the left leaves
        # a causal query without any key.
        lengths = np.array([keys, *random.integers(1, keys, size=batch - 1)])[:, None]
        right, left = positions < lengths, positions >= keys - lengths
        return np.where(np.arange(batch)[:, None] % 2 == 1, right, left)
    mask = random.random((batch, num_heads, tokens, keys)) < 0.7
    mask[0, 0, tokens // 2] = False
    mask[-1, -1, 0] = False
    return mask
