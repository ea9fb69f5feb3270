"""Configurations of the block that faults are planted into, and numbers for it, drawn from a seed.

The block stands twice, in ``mutants.py`` of each room of `frameworks`: one pre-norm layer of a decoder or encoder
with everything that attention comes with today. A fault is a name; the block of one side takes it and goes wrong at
that place (`block_faults`).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from attn_bridge.weights import Rule, Rules

Array = np.ndarray
Arrays = dict[str, Array]

FIRST_SEED = 5000
"""Numbers from here on were never used to choose a constant of the judge."""

MAX_DRAWS = 20_000
"""How many configurations are looked through for one that a fault fits."""


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One shape of the block, and of its weights and inputs.

    Attributes:
        seed: the seed of the draw.
        lengths: length of each sequence of the batch; the rest is padding.
        tokens: number of positions T.
        d_model: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: width of a head.
        fused: whether query, key and value come from one matrix, whose rows are query, then key, then value.
        causal: whether a query sees only itself and earlier tokens.
        window: number of tokens back that a query sees, itself counted; None is all.
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
        outputs: 2 also returns the contribution of attention to the residual stream.
        dropout: rate of the dropout of attention weights, which eval mode switches off.
        input_scale: spread of the input.
        input_mean: mean of the input.
        gain: spread of matrices, times the root of their width; 0 means weights like a fresh model's: spread 0.02,
            biases 0, norms 1.
        zero_biases: whether the biases are 0.
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

    def one_of(*values: object) -> Any:
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


def find_seed(start: int, wanted: Callable[[int], bool], draws: int = MAX_DRAWS) -> int:
    """Return the first of `draws` seeds from `start` on that satisfies `wanted`.

    Raises:
        ValueError: none of them does.
    """
    for seed in range(start, start + draws):
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
