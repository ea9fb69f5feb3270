"""Latent attention over devices, where queries go to the latents: products with matrices of the device's heads."""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attn_bridge.sharding.plan import Role

from ... import functional
from ...multi_head_latent_attention import MultiHeadLatentAttention
from ...shards import is_sharded
from ..classes import cut_of
from ..devices import Cut, Devices


def absorbed(
    self: MultiHeadLatentAttention, query_nope: Tensor, query_rope: Tensor, latent: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Like `MultiHeadLatentAttention._absorbed`, each device for its heads and tokens."""
    if not is_sharded(query_nope):
        return MultiHeadLatentAttention._absorbed(self, query_nope, query_rope, latent, options)
    width = self.config.latent_dim
    asked = _by_heads(self, query_nope, self.W_key, "b t h c, h c l -> b t h l")
    query = torch.cat([asked, self.sharding.cut(query_rope, cut_of(self.sharding, asked))], -1)
    context, weights = functional.as_pair(functional.dot_product_attention(query, latent, latent, **options))
    return _by_heads(self, context, self.W_value, "b t h l, h c l -> b t h c", width), weights


def _by_heads(
    self: MultiHeadLatentAttention, array: Tensor, layer: nn.Linear, pattern: str, width: int | None = None
) -> DTensor:
    """Multiply the first `width` channels of each head by its rows of a weight, each device for its own heads."""
    sharding: Devices = self.sharding
    heads = self.config.num_heads
    cut = cut_of(sharding, array)
    cut["tensor"] = 2 if sharding.divides("tensor", heads) else None
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    rows: Cut = {"tensor": None if cut["tensor"] is None else 0}
    matrix = sharding.local(layer._parameters["weight"], rows, working)
    matrix = rearrange(matrix, "(h c) l -> h c l", c=layer.out_features // heads)
    return sharding.joined(einsum(sharding.local(array, cut, working)[..., :width], matrix, pattern), cut)
