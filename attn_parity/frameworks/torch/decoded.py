"""A block that is run with a cache: a prompt at once, then token by token, as generation does.

The twin is `attn_parity.frameworks.jax.decoded`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Decoded(nn.Module):
    """Run a block step by step through its cache: a prompt first, then token by token.

    Args:
        block: a block of `torch_attn`.
        prompt: number of tokens in the first step.
    """

    def __init__(self, block: nn.Module, prompt: int):
        super().__init__()
        self.block, self.prompt = block, prompt

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output ``(B, T, D)`` for `x` of the same shape."""
        batch, tokens, _ = x.shape
        cache = self.block.init_cache(batch, tokens)
        output, cache = self.block(x[:, : self.prompt], cache=cache)
        pieces = [output]
        for token in range(self.prompt, tokens):
            output, cache = self.block(x[:, token : token + 1], cache=cache)
            pieces.append(output)
        return torch.cat(pieces, 1)
