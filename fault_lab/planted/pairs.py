"""Equal pairs of modules, with their weights and inputs, drawn from a seed.

`mutate` judges them unchanged, and plants faults into the block and into our modern variants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_bridge.specs import VARIANTS, Rotary
from attn_parity.check.cases import draw_positions

from .mutants import Array, BlockConfig, draw_config


@dataclasses.dataclass(frozen=True)
class Pair:
    """A module of each framework, known to be equal, with their weights and inputs.

    Attributes:
        name: ``Block``, or another name that ``build`` of both backends takes.
        seed: the seed of the draw.
        arguments: the sizes or the config that it is built from.
        inputs: keyword arguments of the torch call.
        flax_inputs: keyword arguments of the Flax call.
        gain: see `BlockConfig`.
        zero_biases: see `BlockConfig`.
    """

    name: str
    seed: int
    arguments: Mapping[str, Any]
    inputs: Mapping[str, Array]
    flax_inputs: Mapping[str, Array]
    gain: float
    zero_biases: bool

    def described(self) -> dict[str, object]:
        """Return the description of the pair as JSON-ready data."""
        config = self.arguments.get("config")
        if isinstance(config, BlockConfig):
            return dataclasses.asdict(config)
        shapes = {name: list(array.shape) for name, array in self.inputs.items()}
        arguments = {name: str(one) if name == "config" else one for name, one in self.arguments.items()}
        return {"seed": self.seed, "gain": self.gain, "zero_biases": self.zero_biases, "inputs": shapes} | arguments


def block_pair(config: BlockConfig) -> Pair:
    """Return the block of a configuration as a pair."""
    inputs = config.inputs()
    return Pair("Block", config.seed, {"config": config}, inputs, inputs, config.gain, config.zero_biases)


def draw_modern(seed: int, name: str = "") -> Pair:
    """Draw a pair of one of our modern variants, of any by default, in the config of one of its examples."""
    random = np.random.default_rng([seed, 7])
    draw = _Draw(seed, random)
    variants = [variant for variant in VARIANTS if variant.examples and name in ("", variant.name)]
    variant = variants[int(random.integers(len(variants)))]
    examples = [example for example in variant.examples if example.tokens > 2]
    example = examples[int(random.integers(len(examples)))]
    tokens = example.tokens if example.tokens > 64 else draw.tokens + 2
    config: Any = example.config
    inputs = {"x": draw.array(draw.batch, tokens, config.d_in)}
    if example.context is not None:
        keys = draw.size(3, 6)
        inputs["context"] = draw.array(draw.batch, keys, example.context[1])
    if draw.chance():
        inputs["attention_mask"] = draw.mask(tokens if example.context is None else keys)
    position = getattr(config, "position", None)
    if isinstance(position, Rotary) and position.axes is not None:
        inputs["positions"] = draw_positions(random, position.axes, draw.batch, tokens)
    return draw.pair(variant.name, {"config": config}, inputs)


def draw_pair(seed: int) -> Pair:
    """Draw a pair without a fault: three blocks in five, else one of our variants or a stock module."""
    random = np.random.default_rng([seed, 3])
    if random.random() < 0.6:
        return block_pair(draw_config(seed))
    return _STOCK[int(random.integers(len(_STOCK)))](seed, random)


class _Draw:
    """Draws sizes and arrays of one pair."""

    def __init__(self, seed: int, random: np.random.Generator):
        self.seed, self.random = seed, random
        self.batch, self.tokens = int(random.integers(2, 4)), int(random.integers(3, 9))
        self.spread = float(random.choice([0.01, 1.0, 30.0]))

    def array(self, *shape: int) -> Array:
        return (self.spread * self.random.normal(size=shape)).astype(np.float32)

    def size(self, *sizes: int) -> int:
        return int(self.random.choice(sizes))

    def chance(self) -> bool:
        return bool(self.random.random() < 0.5)

    def mask(self, keys: int) -> Array:
        """Return ``(B, S)``, True = may be attended, padded on either side."""
        lengths = np.array([keys, *self.random.integers(1, keys + 1, size=self.batch - 1)])[:, None]
        positions = np.arange(keys)
        return positions < lengths if self.chance() else positions >= keys - lengths

    def pair(
        self,
        name: str,
        arguments: Mapping[str, object],
        inputs: Mapping[str, Array],
        flax_inputs: Mapping[str, Array] | None = None,
    ) -> Pair:
        gain, zero_biases = float(self.random.choice([0.0, 0.5, 1.0, 3.0])), self.chance()
        flax_inputs = inputs if flax_inputs is None else flax_inputs
        return Pair(name, self.seed, arguments, inputs, flax_inputs, gain, zero_biases)


def _linear(seed: int, random: np.random.Generator) -> Pair:
    draw = _Draw(seed, random)
    d_in, d_out = draw.size(3, 8, 17), draw.size(1, 5, 12)
    torch, flax = {"input": draw.array(draw.batch, draw.tokens, d_in)}, "inputs"
    return draw.pair("Linear", {"d_in": d_in, "d_out": d_out, "bias": draw.chance()}, torch, {flax: torch["input"]})


def _layer_norm(seed: int, random: np.random.Generator) -> Pair:
    draw = _Draw(seed, random)
    width = draw.size(4, 9, 32)
    x = draw.array(draw.batch, draw.tokens, width)
    return draw.pair("LayerNorm (stock)", {"width": width}, {"input": x}, {"x": x})


def _attention(seed: int, random: np.random.Generator) -> Pair:
    draw = _Draw(seed, random)
    num_heads = draw.size(1, 2, 4)
    width, keys = num_heads * draw.size(2, 3, 5), draw.size(4, 7)
    query, key, value = (
        draw.array(draw.batch, draw.tokens, width),
        *(draw.array(draw.batch, keys, width) for _ in range(2)),
    )
    torch: dict[str, Array] = {"query": query, "key": key, "value": value}
    flax: dict[str, Array] = {"inputs_q": query, "inputs_k": key, "inputs_v": value}
    if draw.chance():
        mask = draw.mask(keys)
        torch["key_padding_mask"], flax["mask"] = ~mask, mask[:, None, None, :]
    return draw.pair("MultiheadAttention", {"width": width, "num_heads": num_heads}, torch, flax)


def _encoder_layer(seed: int, random: np.random.Generator) -> Pair:
    draw = _Draw(seed, random)
    num_heads = draw.size(1, 2, 3)
    width = num_heads * draw.size(4, 6)
    arguments = {
        "width": width,
        "num_heads": num_heads,
        "hidden": draw.size(8, 12),
        "activation": "gelu" if draw.chance() else "relu",
        "norm_first": draw.chance(),
    }
    x = draw.array(draw.batch, draw.tokens, width)
    torch, flax = {"src": x}, {"src": x}
    if draw.chance():
        mask = draw.mask(draw.tokens)
        torch["src_key_padding_mask"], flax["mask"] = ~mask, mask[:, None, None, :]
    return draw.pair("TransformerEncoderLayer", arguments, torch, flax)


def _variant(seed: int, random: np.random.Generator) -> Pair:
    draw = _Draw(seed, random)
    variants = [variant for variant in VARIANTS if variant.group == "chapter 3" and not variant.is_function]
    variant = variants[int(random.integers(len(variants)))]
    num_heads, d_in = draw.size(1, 2, 3), draw.size(3, 5, 8)
    sizes = {
        "d_in": d_in,
        "d_out": num_heads * draw.size(1, 2, 4),
        "context_length": draw.tokens + draw.size(0, 3),
        "dropout": 0.1,
        "num_heads": num_heads,
        "qkv_bias": draw.chance(),
        "emb_dim": d_in,
        "eps": 1e-5,
    }
    inputs = {"x": draw.array(draw.batch, draw.tokens, d_in)}
    if variant.returns_weights and draw.chance():
        inputs["attention_mask"] = draw.mask(draw.tokens)
    return draw.pair(variant.name, variant.config.arguments_from(sizes), inputs)


def _modern(seed: int, random: np.random.Generator) -> Pair:
    del random
    return draw_modern(seed)


_STOCK = (
    _variant,
    _variant,
    _variant,
    _modern,
    _modern,
    _modern,
    _linear,
    _layer_norm,
    _attention,
    _attention,
    _encoder_layer,
)
