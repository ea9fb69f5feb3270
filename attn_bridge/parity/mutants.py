"""The pairs that `mutate` plants faults into or judges as they are, drawn from a seed.

The block stands twice, in ``torch_attn.mutants`` and ``jax_attn.mutants``: one pre-norm layer of a decoder or encoder
with everything that attention comes with today. A fault is a name; the block of one side takes it and goes wrong at
that place (`block_faults`). Next to it stand our variants and stock modules.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ..specs import VARIANTS
from ..weights import Rule, Rules

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

FIRST_SEED = 5000
"""Numbers from here on were never used to choose a constant of the judge."""

MOST_DRAWS = 20_000
"""How many configurations are looked through for one that a fault fits."""


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One shape of the block, and of the numbers that it holds and is given.

    Attributes:
        seed: what it was drawn from.
        lengths: length of each sequence of the batch; the rest is padding.
        tokens: number of positions T.
        d_model: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: width of a head.
        fused: whether query, key and value come from one matrix, whose rows are query, then key, then value.
        causal: whether a query sees only itself and what came before it.
        window: how many tokens back a query sees, itself counted; None is all.
        padding: side on which short sequences are padded, ``none`` for no mask.
        rope: whether query and key are rotated by their positions, halves of a head as pairs.
        rope_theta: its base.
        qk_norm: whether query and key are normalised per head, before the rotation.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: whether each head has a logit that joins the softmax and carries no value.
        qkv_bias: whether query, key and value have biases.
        out_bias: whether the output projection has one.
        norm: LayerNorm or RMSNorm.
        eps: constant added to the variance.
        hidden: width of the MLP with GELU; 0 leaves it out.
        outputs: 2 also returns what attention adds to the residual stream.
        dropout: rate of the dropout of attention weights, which eval mode switches off.
        input_scale: spread of the input.
        input_mean: mean of the input.
        gain: spread of matrices, times the root of their width; 0 stands for weights as a model starts with: spread
            0.02, biases 0, norms 1.
        zero_biases: whether the biases that are held are 0.
    """

    seed: int
    lengths: tuple[int, ...]
    tokens: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    fused: bool
    causal: bool
    window: int | None
    padding: Literal["none", "left", "right"]
    rope: bool
    rope_theta: float
    qk_norm: bool
    softcap: float | None
    sinks: bool
    qkv_bias: bool
    out_bias: bool
    norm: Literal["layer", "rms"]
    eps: float
    hidden: int
    outputs: int
    dropout: float
    input_scale: float
    input_mean: float
    gain: float
    zero_biases: bool

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def masked(self) -> bool:
        """Whether anything is hidden from any query."""
        return self.tokens > 1 and (self.causal or self.window is not None or self.padding != "none")

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def attention_mask(self) -> Array | None:
        """Return ``(B, S)``, True = may be attended; None without padding."""
        if self.padding == "none":
            return None
        positions, lengths = np.arange(self.tokens), np.array(self.lengths)[:, None]
        return positions < lengths if self.padding == "right" else positions >= self.tokens - lengths

    def visible(self) -> Array:
        """Return which query sees which key: ``(B, T, S)``."""
        query, key = np.arange(self.tokens)[:, None], np.arange(self.tokens)[None, :]
        allowed = np.ones((len(self.lengths), self.tokens, self.tokens), bool)
        if self.causal:
            allowed &= key <= query
        if self.window is not None:
            allowed &= np.abs(query - key) < self.window
        mask = self.attention_mask()
        return allowed if mask is None else allowed & mask[:, None, :]

    @property
    def empty_rows(self) -> bool:
        """Whether some query sees no key at all."""
        return not bool(self.visible().any(-1).all())

    def inputs(self) -> dict[str, Array]:
        """Draw the arguments of a call."""
        random = np.random.default_rng([self.seed, 1])
        x = self.input_scale * random.normal(size=(len(self.lengths), self.tokens, self.d_model)) + self.input_mean
        mask = self.attention_mask()
        return {"x": x.astype(np.float32)} | ({} if mask is None else {"attention_mask": mask})


def draw_config(seed: int) -> BlockConfig:
    """Draw a configuration."""
    random = np.random.default_rng([seed, 0])

    def one_of(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    num_heads, num_kv_heads = one_of((4, 2), (6, 2), (6, 3), (4, 2), (3, 3), (2, 2), (4, 1), (1, 1))
    head_dim, tokens, batch = one_of(2, 4, 4, 6, 8), int(random.integers(4, 10)), int(random.integers(2, 4))
    causal = chance(0.7)
    padding = one_of("none", "left", "right")
    lengths = (tokens, *(int(length) for length in random.integers(1, tokens, size=batch - 1)))
    far = chance(0.08)
    return BlockConfig(
        seed=seed,
        lengths=lengths if padding != "none" else (tokens,) * batch,
        tokens=tokens,
        d_model=one_of(5, 7, 8, 10, 12, 16),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        fused=chance(0.3),
        causal=causal,
        window=int(random.integers(2, tokens)) if chance(0.35) else None,
        padding=padding,
        rope=chance(0.5),
        rope_theta=one_of(10_000.0, 10_000.0, 500.0),
        qk_norm=chance(0.35),
        softcap=one_of(1.5, 5.0, 30.0) if chance(0.3) else None,
        sinks=chance(0.25),
        qkv_bias=chance(0.7),
        out_bias=chance(0.7),
        norm=one_of("layer", "rms"),
        eps=one_of(1e-5, 1e-6),
        hidden=one_of(0, 9, 12),
        outputs=one_of(1, 1, 2),
        dropout=0.1,
        input_scale=1.0 if far else one_of(0.01, 1.0, 1.0, 30.0),
        input_mean=100.0 if far else 0.0,
        gain=one_of(0.0, 0.5, 1.0, 1.0, 3.0),
        zero_biases=chance(0.25),
    )


def find_seed(start: int, wanted: Callable[[int], bool]) -> int:
    """Return the first seed from `start` on that is wanted.

    Raises:
        ValueError: there is none among many.
    """
    for seed in range(start, start + MOST_DRAWS):
        if wanted(seed):
            return seed
    raise ValueError(f"no configuration from seed {start} on fits")


def draw_weights(shapes: Mapping[str, tuple[int, ...]], seed: int, gain: float, *, zero_biases: bool = False) -> Arrays:
    """Draw weights for torch names and shapes; a gain of 0 draws them as a model starts with."""
    drawn = {}
    for name, shape in shapes.items():
        random = np.random.default_rng([seed, zlib.crc32(name.encode()), 2])
        if len(shape) > 1:
            drawn[name] = random.normal(size=shape) * (gain / np.sqrt(shape[-1]) if gain else 0.02)
        elif name.endswith("bias"):
            drawn[name] = np.zeros(shape) if zero_biases or not gain else 0.5 * random.normal(size=shape)
        elif name.endswith("sinks"):
            drawn[name] = random.normal(size=shape)
        else:
            drawn[name] = random.uniform(0.5, 1.5, size=shape) if gain else np.ones(shape)
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def block_rules(shapes: Mapping[str, tuple[int, ...]]) -> Rules:
    """Return the rules of a block's weights, from their torch names and shapes."""
    return Rules(
        Rule(name, f"{name.removesuffix('weight')}kernel", "o i -> i o") if len(shape) == 2 else Rule(name, name)
        for name, shape in shapes.items()
    )


# ---- pairs without a fault


@dataclasses.dataclass(frozen=True)
class Pair:
    """A module of each framework, known to be the same, with the numbers that it holds and is given.

    Attributes:
        name: ``Block``, or what ``build`` of both backends takes.
        seed: what it was drawn from.
        arguments: the sizes that it is built from.
        inputs: keyword arguments of the torch call.
        flax_inputs: keyword arguments of the Flax call.
        gain: see `BlockConfig`.
        zero_biases: see `BlockConfig`.
        config: the block's configuration; None for other modules.
    """

    name: str
    seed: int
    arguments: Mapping[str, Any]
    inputs: Mapping[str, Array]
    flax_inputs: Mapping[str, Array]
    gain: float
    zero_biases: bool
    config: BlockConfig | None = None

    def described(self) -> dict[str, Any]:
        """Return what it is as JSON-ready data."""
        if self.config is not None:
            return dataclasses.asdict(self.config)
        shapes = {name: list(array.shape) for name, array in self.inputs.items()}
        arguments = {name: str(one) if name == "config" else one for name, one in self.arguments.items()}
        return {"seed": self.seed, "gain": self.gain, "zero_biases": self.zero_biases, "inputs": shapes} | arguments


def block_pair(config: BlockConfig) -> Pair:
    """Return the block of a configuration as a pair."""
    inputs = config.inputs()
    return Pair("Block", config.seed, {"config": config}, inputs, inputs, config.gain, config.zero_biases, config)


def draw_modern(seed: int, name: str = "") -> Pair:
    """Draw a pair of one of our modern variants, of any by default, in the config of one of its examples."""
    random = np.random.default_rng([seed, 7])
    draw = _Draw(seed, random)
    variants = [variant for variant in VARIANTS if variant.examples and name in ("", variant.name)]
    variant = variants[int(random.integers(len(variants)))]
    examples = [example for example in variant.examples if example.tokens > 2]
    example = examples[int(random.integers(len(examples)))]
    tokens = example.tokens if example.tokens > 64 else draw.tokens + 2
    inputs = {"x": draw.array(draw.batch, tokens, getattr(example.config, "d_in"))}  # noqa: B009
    if example.context is not None:
        keys = draw.size(3, 6)
        inputs["context"] = draw.array(draw.batch, keys, example.context[1])
    if draw.chance():
        inputs["attention_mask"] = draw.mask(tokens if example.context is None else keys)
    return draw.pair(variant.name, {"config": example.config}, inputs)


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
        arguments: Mapping[str, Any],
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
