"""A table of vectors, looked up by id, that reports ids out of range.

The twin is `jax_attn.embedding`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs.model import check_range

from . import functional
from .random import JaxRngs, check_rngs


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose rows start from a normal distribution of mean 0 and variance 1.

    Args:
        size: number of rows.
        emb_dim: width of a row.
        first: row of the id 0; rows before it are unused.
        rngs: JAX's random numbers, for the initial rows (stream ``params``), which are those of the Flax twin then, but
            for rounding; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(
        self,
        size: int,
        emb_dim: int,
        first: int = 0,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        check_rngs(rngs)
        super().__init__(size, emb_dim, device=device if rngs is None else "meta", dtype=dtype)
        self.first = first
        if rngs is not None:
            self.to_empty(device=torch.get_default_device() if device is None else device)
            with torch.no_grad():
                self.weight.copy_(rngs.params.normal((size, emb_dim), self.weight.dtype))

    def forward(self, ids: Int[Tensor, "..."], name: str = "ids") -> Float[Tensor, "... d"]:
        """Look up ``ids`` of any shape ``(...)``; gives ``(..., emb_dim)``.

        Raises:
            ValueError: an id out of range; the message calls the ids `name`. Not on a GPU, where such an id stops the
                program.
        """
        check_width("an embedding", self.weight.shape[1], self.embedding_dim)
        ids = functional.signed(ids)
        try:
            return nn.functional.embedding(ids, self.weight[self.first :]) if self.first else super().forward(ids)
        except IndexError:
            check_range(name, int(ids.min()), int(ids.max()), self.num_embeddings - self.first)
            raise
