"""The decoder of `llama` once more: in Linen, scanned over stacked layers, through ToNNX, and checkpointed."""

from __future__ import annotations

import functools
from typing import Any

from ..gallery import Case, entry, fault, inside
from ..weights import carry, held, linen, onto, rules, tokens
from .llama import (
    ATTENTION,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MLP,
    NNX_NAMES,
    VOCABULARY,
    WIDTH,
    T,
    attend,
    nnx_llama,
    rotate,
    tables,
    torch_llama,
)

SCAN = ("", "blocks", ("embed", "norm"))
"""A layer that is scanned can't be told from the next: it is the stack that is wrong, between what stands around it."""

LINEN_NAMES = """
embed.weight | embed.embedding
blocks.{i}.attn_norm.weight | blocks_{i}.attn_norm.scale
blocks.{i}.mlp_norm.weight | blocks_{i}.mlp_norm.scale
blocks.{i}.{rest}.weight | blocks_{i}.{rest}.kernel | o d -> d o
norm.weight | norm.scale
head.weight | head.kernel | o d -> d o
"""

STACKED = rules("""
blocks.{i}.attn_norm.weight | blocks.attn_norm.scale | d -> l d | stack=l
blocks.{i}.mlp_norm.weight | blocks.mlp_norm.scale | d -> l d | stack=l
blocks.{i}.attn.q_proj.weight | blocks.attn.q_proj.kernel | o d -> l d o | stack=l
blocks.{i}.attn.k_proj.weight | blocks.attn.k_proj.kernel | o d -> l d o | stack=l
blocks.{i}.attn.v_proj.weight | blocks.attn.v_proj.kernel | o d -> l d o | stack=l
blocks.{i}.attn.o_proj.weight | blocks.attn.o_proj.kernel | o d -> l d o | stack=l
blocks.{i}.mlp.gate_proj.weight | blocks.mlp.gate_proj.kernel | o d -> l d o | stack=l
blocks.{i}.mlp.up_proj.weight | blocks.mlp.up_proj.kernel | o d -> l d o | stack=l
blocks.{i}.mlp.down_proj.weight | blocks.mlp.down_proj.kernel | o d -> l d o | stack=l
""")

ENDS = rules("""
embed.weight | embed.embedding
norm.weight | norm.scale
head.weight | head.kernel | o d -> d o
""")


def linen_llama(wrong: str | None = None, *, layers: int = 1, scanned: bool = False) -> Any:
    """Return the Linen decoder."""
    import jax.numpy as jnp
    import numpy as np
    from flax import linen as nn

    plain = functools.partial(nn.Dense, use_bias=False)
    norm = functools.partial(nn.RMSNorm, epsilon=1e-5 if wrong == "norm-eps" else 1e-6)

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, cos, sin):
            b, t, _ = x.shape
            q = plain(HEADS * HEAD, name="q_proj")(x).reshape(b, t, HEADS, HEAD)
            k = plain(KV_HEADS * HEAD, name="k_proj")(x).reshape(b, t, KV_HEADS, HEAD)
            v = plain(KV_HEADS * HEAD, name="v_proj")(x).reshape(b, t, KV_HEADS, HEAD)
            q, k = rotate(q, cos, sin, wrong), rotate(k, cos, sin, wrong)
            return plain(WIDTH, name="o_proj")(attend(q, k, v, wrong))

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            gate, up = plain(HIDDEN, name="gate_proj")(x), plain(HIDDEN, name="up_proj")(x)
            if wrong == "gate-and-up-exchanged":
                gate, up = up, gate
            return plain(WIDTH, name="down_proj")(nn.silu(gate) * up)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, cos, sin):
            x = x + Attention(name="attn")(norm(name="attn_norm")(x), cos, sin)
            x = x + MLP(name="mlp")(norm(name="mlp_norm")(x))
            return (x, None) if scanned else x

    class Llama(nn.Module):
        @nn.compact
        def __call__(self, ids):
            cos, sin = map(jnp.asarray, tables(np.arange(ids.shape[1])))
            x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
            if scanned:
                stack = nn.scan(
                    Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers, in_axes=nn.broadcast
                )
                x, _ = stack(name="blocks")(x, cos, sin)
            else:
                for i in range(layers):
                    x = Block(name=f"blocks_{i}")(x, cos, sin)
            return plain(VOCABULARY, name="head")(norm(name="norm")(x))

    return Llama()


def nnx_stack(wrong: str | None = None, *, layers: int = 2, remat: bool = False) -> Any:
    """Return the NNX decoder with its blocks in one stack, scanned."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, key) -> None:
            one = nnx_llama(wrong).blocks[0]  # every layer alike; its weights come from the first side
            self.attn_norm, self.attn, self.mlp_norm, self.mlp = one.attn_norm, one.attn, one.mlp_norm, one.mlp
            del key

        def __call__(self, x, cos, sin):
            x = x + self.attn(self.attn_norm(x), cos, sin)
            return x + self.mlp(self.mlp_norm(x))

    class Llama(nnx.Module):
        def __init__(self) -> None:
            ends = nnx_llama(wrong, layers=0)
            self.embed, self.norm, self.head = ends.embed, ends.norm, ends.head
            make = nnx.vmap(Block, in_axes=0, out_axes=0)
            self.blocks = make(jax.random.split(jax.random.key(0), layers))

        def __call__(self, ids):
            cos, sin = map(jnp.asarray, tables(np.arange(ids.shape[1])))
            if wrong == "one-layer-too-few":

                def forward(block, x, i):
                    return jnp.where(i < layers - 1, block(x, cos, sin), x)
            else:

                def forward(block, x, i):
                    return block(x, cos, sin)

            forward = nnx.remat(forward) if remat else forward
            scan = nnx.scan(forward, in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
            x = scan(self.blocks, self.embed(ids), jnp.arange(layers))
            return self.head(self.norm(x))

    return Llama()


@entry(
    "Linen",
    faults={
        "norm-eps": fault("blocks.0.attn_norm"),
        "heads-tiled": fault(*ATTENTION),
        "gate-and-up-exchanged": fault(*MLP),
        "scores-in-bfloat16": fault(*ATTENTION, effect="precision"),
    },
)
def llama_linen(wrong: str | None) -> Case:
    """Pair a Linen module with its variables."""
    first, inputs = torch_llama(), tokens(2, T)
    arrays = carry(held(first), rules(LINEN_NAMES))
    return Case(first, linen(linen_llama(wrong), arrays, inputs), inputs)


@entry(
    "Linen",
    "ToNNX",
    faults={"rotary-interleaved": fault(*ATTENTION), "mask-off-by-one": fault(*ATTENTION)},
)
def llama_to_nnx(wrong: str | None) -> Case:
    """Pair a Linen module through ``nnx.bridge.ToNNX``."""
    from flax import nnx

    first, inputs = torch_llama(), tokens(2, T)
    second = nnx.bridge.ToNNX(linen_llama(wrong), rngs=nnx.Rngs(0)).lazy_init(inputs)
    return Case(first, onto(first, second, LINEN_NAMES), inputs)


@entry(
    "Linen",
    "scan",
    faults={"gate-and-up-exchanged": fault(*MLP, *SCAN), "mask-off-by-one": fault(*ATTENTION, *SCAN)},
)
def llama_linen_scan(wrong: str | None) -> Case:
    """``nn.scan`` over layers against numbered torch blocks."""
    first, inputs = torch_llama(layers=2), tokens(2, T)
    arrays = carry(held(first), [*STACKED, *ENDS])
    return Case(first, linen(linen_llama(wrong, layers=2, scanned=True), arrays, inputs), inputs, {"rules": STACKED})


@entry(
    "scan",
    faults={
        "one-layer-too-few": fault(*SCAN, ("blocks.0", "blocks.1", "norm")),
        "heads-tiled": fault(*ATTENTION, *SCAN),
    },
)
def llama_nnx_scan(wrong: str | None) -> Case:
    """``nnx.vmap`` makes the stack, ``nnx.scan`` runs it."""
    first = torch_llama(layers=2)
    return Case(first, onto(first, nnx_stack(wrong), [*STACKED, *ENDS]), tokens(2, T), {"rules": STACKED})


@entry(
    "scan",
    "remat",
    "checkpoint",
    faults={"gate-and-up-exchanged": fault(*MLP, *SCAN), "norm-eps": fault("blocks.*_norm", "norm", *SCAN)},
)
def llama_checkpointed_scan(wrong: str | None) -> Case:
    """Checkpointed on both sides, the second one scanned."""
    first = torch_llama(layers=2, reentrant=False)
    second = nnx_stack(wrong, remat=True)
    return Case(first, onto(first, second, [*STACKED, *ENDS]), tokens(2, T), {"rules": STACKED})


@entry(
    "checkpoint",
    faults={
        "keys-not-turned": fault(*ATTENTION),
        "residual-missing": fault(*inside("blocks.0", "attn", "mlp")),
    },
)
def llama_checkpoint(wrong: str | None) -> Case:
    """``torch.utils.checkpoint`` that recomputes by saved-tensor hooks."""
    first = torch_llama(reentrant=False)
    return Case(first, onto(first, nnx_llama(wrong), NNX_NAMES), tokens(2, T))


@entry(
    "checkpoint",
    faults={"scaled-by-the-model-width": fault(*ATTENTION), "gelu-for-silu": fault(*MLP)},
)
def llama_checkpoint_reentrant(wrong: str | None) -> Case:
    """``torch.utils.checkpoint`` that runs a second graph in the backward pass."""
    first = torch_llama(layers=2, reentrant=True)
    return Case(first, onto(first, nnx_llama(wrong, layers=2), NNX_NAMES), tokens(2, T))
