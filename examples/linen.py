"""Use a Flax NNX attention module inside a Linen model, with weights from its torch twin."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import torch
from flax import nnx

import attn_bridge
import jax_attn
import torch_attn

SIZES = {"d_in": 8, "d_out": 8, "context_length": 16, "num_heads": 2, "qkv_bias": True}


class Block(nn.Module):
    """A residual block with attention in the middle."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``x`` plus what attention makes of it."""
        return x + nnx.bridge.to_linen(jax_attn.MultiHeadAttention, **SIZES, name="attention")(x)


def main() -> None:
    """Load torch weights into the Linen model and print the largest difference of the outputs."""
    torch.manual_seed(0)
    ours = torch_attn.MultiHeadAttention(**SIZES)
    x = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)

    block = Block()
    variables = block.init({"params": jax.random.key(0)}, x)
    weights = {name: tensor.detach().numpy() for name, tensor in ours.named_parameters()}
    for name, array in attn_bridge.torch_to_flax(weights, ours.config.rules()).items():
        layer, leaf = name.split(".")
        variables["params"]["attention"][layer][leaf] = array

    with jax.default_matmul_precision("highest"):
        theirs = np.asarray(block.apply(variables, x))
    with torch.no_grad():
        expected = x + ours(torch.from_numpy(x)).numpy()
    print(f"largest difference: {np.abs(theirs - expected).max():.1e}")


if __name__ == "__main__":
    main()
