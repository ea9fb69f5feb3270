"""Multi-head attention in plain torch, as chapter 3 of the book writes it: the peer that readers start from."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PlainMultiHeadAttention(nn.Module):
    """Causal multi-head attention that keeps its mask in a buffer and all scores in memory (book section 3.6.2).

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output, over all heads.
        context_length: longest sequence.
        num_heads: number of heads.
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out)
        self.W_key = nn.Linear(d_in, d_out)
        self.W_value = nn.Linear(d_in, d_out)
        self.out_proj = nn.Linear(d_out, d_out)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the context ``(B, T, d_out)`` of `x` ``(B, T, d_in)``."""
        batch, tokens, _ = x.shape
        keys, queries, values = (
            project(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
            for project in (self.W_key, self.W_query, self.W_value)
        )
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)
        context = (weights @ values).transpose(1, 2)
        return self.out_proj(context.contiguous().view(batch, tokens, -1))
