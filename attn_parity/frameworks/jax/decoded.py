"""A block that is run with a cache: a prompt at once, then token by token, as generation does.

The twin is `attn_parity.frameworks.torch.decoded`.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array


class Decoded(nnx.Module):
    """Run a block step by step through its cache: a prompt first, then token by token.

    Args:
        block: a block of `jax_attn`.
        prompt: number of tokens in the first step.
    """

    def __init__(self, block: nnx.Module, prompt: int):
        self.block, self.prompt = block, prompt

    def __call__(self, x: Array) -> Array:
        """Return the block's output ``(B, T, D)`` for `x` of the same shape."""
        batch, tokens, _ = x.shape
        cache = self.block.init_cache(batch, tokens)
        output, cache = self.block(x[:, : self.prompt], cache=cache)
        pieces = [output]
        for token in range(self.prompt, tokens):
            output, cache = self.block(x[:, token : token + 1], cache=cache)
            pieces.append(output)
        return jnp.concatenate(pieces, 1)
