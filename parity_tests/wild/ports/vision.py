"""Vision transformers: ViT (arXiv 2010.11929) and Swin's shifted windows (2103.14030).

b image, n token, h head, c channel of a head, w windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, linen, numbers, onto, rules

WIDTH, HEADS, HIDDEN, IMAGE, PATCH = 16, 2, 24, 8, 4

VIT_NAMES = """
cls_token | cls_token
pos_embed | pos_embed
patch_embed.weight | patch_embed.kernel | o i h w -> h w i o
blocks.{i}.norm1.weight | blocks.{i}.norm1.scale
blocks.{i}.norm2.weight | blocks.{i}.norm2.scale
norm.weight | norm.scale
{path}weight | {path}kernel | o d -> d o
{path}bias | {path}bias
"""


def torch_vit() -> Any:
    """Return ViT of one block, in timm's arrangement: fused qkv, class token, NCHW images."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            b, n, d = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
            return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x):
            return self.fc2(functional.gelu(self.fc1(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn = nn.LayerNorm(WIDTH, eps=1e-6), Attention()
            self.norm2, self.mlp = nn.LayerNorm(WIDTH, eps=1e-6), MLP()

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, WIDTH))
            self.blocks = nn.ModuleList([Block()])
            self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 7)

        def forward(self, image):
            x = self.patch_embed(image).flatten(2).mT
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)[:, 0])

    return fresh(ViT())


def embed_patches(x: Any, cls: Any, position: Any, wrong: str | None) -> Any:
    """Join the class token and the patches (b, height, width, d), and add positions."""
    import jax.numpy as jnp

    x = (x.swapaxes(1, 2) if wrong == "patches-by-columns" else x).reshape(x.shape[0], -1, WIDTH)
    cls = jnp.broadcast_to(cls, (x.shape[0], 1, WIDTH))
    if wrong == "class-token-without-position":
        return jnp.concatenate([cls, x + position[:, 1:]], 1)
    return jnp.concatenate([x, cls] if wrong == "class-token-last" else [cls, x], 1) + position


VIT_ATTENTION = inside("blocks.0.attn", "qkv", "proj")
PATCHES = inside("", "patch_embed", "blocks.0", "blocks.0.norm1")


@entry(
    "ViT",
    "channels last",
    faults={
        "patches-by-columns": fault(*PATCHES, "patch_embed"),
        "class-token-without-position": fault(*PATCHES),
        "gelu-tanh": fault(*inside("blocks.0.mlp", "fc1", "fc2")),
        "scaled-by-the-model-width": fault(*VIT_ATTENTION),
        "kernel-upside-down": fault("patch_embed"),
    },
)
def vit(wrong: str | None) -> Case:
    """Timm's ViT against NNX; images are NHWC there."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Attention(nnx.Module):
        def __init__(self) -> None:
            self.qkv, self.proj = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            b, n, d = x.shape
            q, k, v = (one.reshape(b, n, HEADS, -1) for one in jnp.split(self.qkv(x), 3, -1))
            scale = WIDTH**-0.5 if wrong == "scaled-by-the-model-width" else None
            return self.proj(jax.nn.dot_product_attention(q, k, v, scale=scale).reshape(b, n, d))

    class MLP(nnx.Module):
        def __init__(self) -> None:
            self.fc1, self.fc2 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.fc2(nnx.gelu(self.fc1(x), approximate=wrong == "gelu-tanh"))

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.attn = nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs), Attention()
            self.norm2, self.mlp = nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs), MLP()

        def __call__(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Patches(nnx.Conv):
        def __call__(self, x):
            if wrong == "kernel-upside-down":
                x = x.reshape(x.shape[0], -1, PATCH, x.shape[2], x.shape[3])[:, :, ::-1].reshape(x.shape)
            return super().__call__(x)

    class ViT(nnx.Module):
        def __init__(self) -> None:
            self.patch_embed = Patches(3, WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID", rngs=rngs)
            self.cls_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
            self.pos_embed = nnx.Param(jnp.zeros((1, 5, WIDTH)))
            self.blocks = nnx.List([Block()])
            self.norm = nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 7, rngs=rngs)

        def __call__(self, image):
            x = embed_patches(self.patch_embed(image), self.cls_token[...], self.pos_embed[...], wrong)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)[:, 0])

    first, image = torch_vit(), numbers(2, 3, IMAGE, IMAGE)
    return Case(first, onto(first, ViT(), VIT_NAMES), image, {"second_inputs": image.transpose(0, 2, 3, 1)})


LINEN_VIT = """
cls_token | cls
pos_embed | posembed
patch_embed.weight | embedding.kernel | o i y x -> y x i o
patch_embed.bias | embedding.bias
blocks.0.norm1.weight | encoderblock_0.LayerNorm_0.scale
blocks.0.norm1.bias | encoderblock_0.LayerNorm_0.bias
blocks.0.norm2.weight | encoderblock_0.LayerNorm_1.scale
blocks.0.norm2.bias | encoderblock_0.LayerNorm_1.bias
blocks.0.attn.proj.weight | encoderblock_0.MultiHeadDotProductAttention_0.out.kernel | d (h c) -> h c d
blocks.0.attn.proj.bias | encoderblock_0.MultiHeadDotProductAttention_0.out.bias
blocks.0.mlp.fc1.weight | encoderblock_0.MlpBlock_0.Dense_0.kernel | o d -> d o
blocks.0.mlp.fc1.bias | encoderblock_0.MlpBlock_0.Dense_0.bias
blocks.0.mlp.fc2.weight | encoderblock_0.MlpBlock_0.Dense_1.kernel | o d -> d o
blocks.0.mlp.fc2.bias | encoderblock_0.MlpBlock_0.Dense_1.bias
norm.weight | encoder_norm.scale
norm.bias | encoder_norm.bias
head.weight | head.kernel | o d -> d o
head.bias | head.bias
"""


def linen_vit(wrong: str | None) -> Any:
    """Return the Linen port, with the names of Google's own code."""
    from flax import linen as nn

    class MlpBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(HIDDEN)(x), approximate=False)
            return nn.Dense(WIDTH)(x)

    class EncoderBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(use_fast_variance=False)(x)
            y = nn.MultiHeadDotProductAttention(HEADS)(y, y)
            x = x + (y * 0.9 if wrong == "dropped-scale" else y)  # dropout's factor left in
            return x + MlpBlock()(nn.LayerNorm(use_fast_variance=False)(x))

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, image):
            x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), "VALID", name="embedding")(image)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, WIDTH))
            x = embed_patches(x, cls, self.param("posembed", nn.initializers.zeros, (1, 5, WIDTH)), wrong)
            x = EncoderBlock(name="encoderblock_0")(x)
            y = nn.LayerNorm(use_fast_variance=False, name="encoder_norm")(x)
            return nn.Dense(7, name="head")((x + 0 * y if wrong == "final-norm-missing" else y)[:, 0])

    return ViT()


@entry(
    "ViT",
    "Linen",
    "fused and split",
    faults={
        "class-token-last": fault(*PATCHES),
        "final-norm-missing": fault("", "norm", ("blocks.0", "norm", "head")),
        "dropped-scale": fault("blocks.0", *inside("blocks.0", "attn", "mlp", "norm1", "norm2")),
    },
)
def vit_linen(wrong: str | None) -> Case:
    """Against Linen as Google's own code names it, with ``MultiHeadDotProductAttention``."""
    first, image = torch_vit(), numbers(2, 3, IMAGE, IMAGE)
    arrays = held(first)
    attention = "encoderblock_0.MultiHeadDotProductAttention_0"
    fused = {name: arrays.pop(f"blocks.0.attn.qkv.{name}") for name in ("weight", "bias")}
    carried = carry(arrays, rules(LINEN_VIT, h=HEADS))
    for i, name in enumerate(("query", "key", "value")):
        weight, bias = (np.split(fused[one], 3)[i] for one in ("weight", "bias"))
        carried[f"{attention}.{name}.kernel"] = weight.T.reshape(WIDTH, HEADS, -1)
        carried[f"{attention}.{name}.bias"] = bias.reshape(HEADS, -1)
    channels_last = image.transpose(0, 2, 3, 1)
    return Case(first, linen(linen_vit(wrong), carried, channels_last), image, {"second_inputs": channels_last})


SIDE, WINDOW, SHIFT = 8, 4, 2


def relative_index() -> np.ndarray:
    """Return which bias each pair of tokens of a window takes."""
    at = np.stack(np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None] + WINDOW - 1
    return apart[0] * (2 * WINDOW - 1) + apart[1]


def shift_mask() -> np.ndarray:
    """Return which tokens of each shifted window see each other: those that were neighbours before."""
    region = np.zeros((SIDE, SIDE), int)
    spans = (slice(0, -WINDOW), slice(-WINDOW, -SHIFT), slice(-SHIFT, None))
    for i, rows in enumerate(spans):
        for j, columns in enumerate(spans):
            region[rows, columns] = 3 * i + j
    windows = region.reshape(2, WINDOW, 2, WINDOW).transpose(0, 2, 1, 3).reshape(4, -1)
    return windows[:, :, None] == windows[:, None]


@entry(
    "Swin",
    "relative bias",
    faults={
        "shift-the-wrong-way": fault("", ("norm1", "attn"), *inside("attn", "qkv", "proj")),
        "bias-transposed": fault(*inside("attn", "qkv", "proj")),
        "mask-left-out": fault("", *inside("attn", "qkv", "proj")),
        "window-not-shifted-back": fault("", ("attn", "norm2", "norm1", "mlp")),
    },
)
def swin(wrong: str | None) -> Case:
    """Attention in shifted windows with a relative position bias."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    index, seen = relative_index(), shift_mask()

    class TorchAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, HEADS))
            self.register_buffer("relative_position_index", torch.as_tensor(index), persistent=False)

        def forward(self, x, mask):
            n, t, d = x.shape
            q, k, v = self.qkv(x).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
            scores = q * (d // HEADS) ** -0.5 @ k.mT + bias.view(t, t, HEADS).permute(2, 0, 1)
            scores = scores.view(-1, 4, HEADS, t, t) + mask[:, None]
            weights = scores.view(n, HEADS, t, t).softmax(-1)
            return self.proj((weights @ v).transpose(1, 2).reshape(n, t, d))

    class TorchSwin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn = nn.LayerNorm(WIDTH), TorchAttention()
            self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            mask = torch.zeros(seen.shape).masked_fill(~torch.as_tensor(seen), -100.0)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x):
            b, d = x.shape[0], x.shape[-1]
            y = torch.roll(self.norm1(x), (-SHIFT, -SHIFT), (1, 2))
            y = y.view(b, 2, WINDOW, 2, WINDOW, d).transpose(2, 3).reshape(-1, WINDOW * WINDOW, d)
            y = self.attn(y, self.mask)
            y = y.view(b, 2, 2, WINDOW, WINDOW, d).transpose(2, 3).reshape(b, SIDE, SIDE, d)
            x = x + torch.roll(y, (SHIFT, SHIFT), (1, 2))
            return x + self.mlp(self.norm2(x))

    rngs = nnx.Rngs(0)

    class Attention(nnx.Module):
        def __init__(self) -> None:
            self.qkv, self.proj = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.relative_position_bias_table = nnx.Param(jnp.zeros(((2 * WINDOW - 1) ** 2, HEADS)))

        def __call__(self, x, mask):
            n, t, d = x.shape
            q, k, v = jnp.moveaxis(self.qkv(x).reshape(n, t, 3, HEADS, -1), (2, 3), (0, 2))
            bias = self.relative_position_bias_table[...][index.T if wrong == "bias-transposed" else index]
            scores = q * (d // HEADS) ** -0.5 @ k.mT + bias.transpose(2, 0, 1)
            if wrong != "mask-left-out":
                scores = (scores.reshape(-1, 4, HEADS, t, t) + mask[:, None]).reshape(n, HEADS, t, t)
            y = jax.nn.softmax(scores, -1) @ v
            return self.proj(y.swapaxes(1, 2).reshape(n, t, d))

    class Swin(nnx.Module):
        def __init__(self) -> None:
            self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
            self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
            self.attn, self.mlp = Attention(), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            b, d = x.shape[0], x.shape[-1]
            by = SHIFT if wrong == "shift-the-wrong-way" else -SHIFT
            y = jnp.roll(self.norm1(x), (by, by), (1, 2))
            y = y.reshape(b, 2, WINDOW, 2, WINDOW, d).swapaxes(2, 3).reshape(-1, WINDOW * WINDOW, d)
            y = self.attn(y, jnp.where(seen, 0.0, -100.0))
            y = y.reshape(b, 2, 2, WINDOW, WINDOW, d).swapaxes(2, 3).reshape(b, SIDE, SIDE, d)
            x = x + (y if wrong == "window-not-shifted-back" else jnp.roll(y, (-by, -by), (1, 2)))
            return x + self.mlp(self.norm2(x))

    first = fresh(TorchSwin())
    names = """
    norm1.weight | norm1.scale
    norm2.weight | norm2.scale
    attn.relative_position_bias_table | attn.relative_position_bias_table
    {path}weight | {path}kernel | o d -> d o
    {path}bias | {path}bias
    """
    return Case(first, onto(first, Swin(), names), numbers(1, SIDE, SIDE, WIDTH))
