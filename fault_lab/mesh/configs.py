"""Configurations of the block for distributed faults, drawn from a seed.

The block exists twice, in ``mesh_mutants/`` of each room of `frameworks`, written like typical distributed code: each
device computes its part, and exchanges the rest through explicit collectives. On one device it is the plain block that
it is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_bridge.sharding.plan import Method
from attn_bridge.sharding.sequences import pieces_of

from ..planted.mutants import Array, Arrays


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """One shape of the block, and how devices share it.

    Attributes:
        seed: the seed of the draw.
        tensor: devices that share heads and hidden units.
        context: devices that share tokens.
        method: how queries meet keys of other devices.
        balanced: whether each device serves an early and a late piece of the sequence.
        lengths: length of each sequence of the batch; the rest is padding, on the right.
        tokens: number of positions T.
        d_model: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key heads; where they do not divide, every device holds all of them.
        head_dim: width of a head.
        causal: whether a query sees only itself and earlier tokens.
        window: number of tokens back that a query sees, itself counted; None is all.
        padding: whether padding is hidden.
        rope: whether query and key are rotated by their positions.
        sinks: whether each head has a logit that joins the softmax and carries no value.
        inner_norm: whether the heads' outputs are normalised over all heads, a width that devices share.
        bias: whether query, key, value and output projection have biases.
        hidden: width of the MLP.
    """

    seed: int
    tensor: int
    context: int
    method: Method
    balanced: bool
    lengths: tuple[int, ...]
    tokens: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    padding: bool
    rope: bool
    sinks: bool
    inner_norm: bool
    bias: bool
    hidden: int

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cuts_keys(self) -> bool:
        """Whether devices share the key heads; else each holds all of them."""
        return self.num_kv_heads % self.tensor == 0

    @property
    def masked(self) -> bool:
        """Whether anything is hidden from any query by its place."""
        return self.causal or self.window is not None

    def layout(self, devices: int) -> Array:
        """Return which positions each of some devices serves: ``(N, T / N)``."""
        if devices == 1:
            return np.arange(self.tokens)[None]
        pieces = np.arange(self.tokens).reshape(2 * devices, -1)
        return np.stack([pieces[[*pieces_of(one, devices, balanced=self.balanced)]].ravel() for one in range(devices)])

    def cut_axis(self, name: str) -> int | None:
        """Return which axis of a parameter, by its torch name, devices of ``tensor`` share."""
        owner, _, leaf = name.rpartition(".")
        owner = owner.rpartition(".")[2]
        if leaf == "sinks" or owner == "inner_norm":
            return 0
        if owner in ("q_proj", "fc_in") or (owner in ("k_proj", "v_proj") and self.cuts_keys):
            return 0
        return 1 if owner in ("out_proj", "fc_out") and leaf == "weight" else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by their torch names."""
        inner, inner_kv, width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.d_model
        shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (width,)}
        sizes = {"q_proj": (inner, width), "k_proj": (inner_kv, width), "v_proj": (inner_kv, width)}
        for name, shape in {**sizes, "out_proj": (width, inner)}.items():
            shapes[f"attention.{name}.weight"] = shape
            if self.bias:
                shapes[f"attention.{name}.bias"] = shape[:1]
        if self.sinks:
            shapes["attention.sinks"] = (self.num_heads,)
        if self.inner_norm:
            shapes["attention.inner_norm.weight"] = (inner,)
        shapes["mlp_norm.weight"] = (width,)
        for name, shape in {"fc_in": (self.hidden, width), "fc_out": (width, self.hidden)}.items():
            shapes |= {f"mlp.{name}.weight": shape, f"mlp.{name}.bias": shape[:1]}
        return shapes

    def inputs(self) -> Arrays:
        """Draw the arguments of a call."""
        random = np.random.default_rng([self.seed, 1])
        x = random.normal(size=(len(self.lengths), self.tokens, self.d_model)).astype(np.float32)
        mask = np.arange(self.tokens) < np.array(self.lengths)[:, None]
        return {"x": x, "attention_mask": mask} if self.padding else {"x": x}

    def described(self) -> dict[str, object]:
        """Return it as JSON-ready data."""
        return dataclasses.asdict(self)


def draw_mesh_config(seed: int, sizes: Mapping[str, int]) -> MeshConfig:
    """Draw a configuration for a mesh of these sizes."""
    random = np.random.default_rng([seed, 7])
    tensor, context = sizes.get("tensor", 1), sizes.get("context", 1)

    def one_of(*values: object) -> Any:
        return values[int(random.integers(len(values)))]

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    method: Method = one_of("all_gather", "ring", "ring", "ulysses") if context > 1 else "all_gather"
    heads = tensor * (context * one_of(1, 2) if method == "ulysses" else one_of(1, 2, 3))
    kv_heads = one_of(*(count for count in range(1, heads + 1) if heads % count == 0))
    tokens = 2 * context * int(random.integers(2, 4))
    batch = context * one_of(1, 2) if context < 4 else context
    padding = chance(0.5)
    lengths = (tokens, *(int(one) for one in random.integers(tokens // 2 - 1, tokens, size=batch - 1)))
    causal = chance(0.7)
    return MeshConfig(
        seed=seed,
        tensor=tensor,
        context=context,
        method=method,
        balanced=causal and method != "ulysses" and context > 1 and chance(0.5),
        lengths=lengths if padding else (tokens,) * batch,
        tokens=tokens,
        d_model=one_of(5, 8, 12),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=one_of(2, 4, 6),
        causal=causal,
        window=int(random.integers(2, tokens // 2 + 1)) if chance(0.35) else None,
        padding=padding,
        rope=chance(0.6),
        sinks=chance(0.35),
        inner_norm=chance(0.35),
        bias=chance(0.7),
        hidden=tensor * one_of(3, 5),
    )
