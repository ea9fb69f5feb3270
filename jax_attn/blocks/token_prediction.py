"""A block that predicts one more token ahead, from the states of a model (arXiv 2412.19437, section 2.2).

Twins: `jax_attn.blocks.token_prediction`, `torch_attn.blocks.token_prediction`. Letters: B batch, T query position, S
key position, D width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attn_bridge.specs import TokenPredictionConfig

from .. import functional
from ..initial_weights import linear
from ..layer import Layer, LayerOptions, Unpack
from ..random import Rngs
from ..signatures.attention import LayerCache
from .decoder_block import DecoderBlock, make_norm


class TokenPrediction(Layer):
    """A block behind a decoder that maps states of a position, and the next token, to states of that token.

    Embeddings and head are the decoder's. ``states = predict(x[:, :-1], decoder.tok_emb(tokens[:, 1:], "tokens"))``,
    where ``x`` is the output of its last block, and ``decoder.out_head(predict.final_norm(states))`` gives the logits
    of the token two positions ahead. Another block of this class takes `states` as `x`.

    Args:
        config: of the block.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        TypeError: `config` is something else.
    """

    @TokenPredictionConfig.takes
    def __init__(
        self,
        config: TokenPredictionConfig,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = TokenPredictionConfig.check(config)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        norm, width = config.block.norm, config.block.emb_dim
        self.token_norm = make_norm(norm, **options)
        self.state_norm = make_norm(norm, **options)
        self.projection = linear(2 * width, width, bias=False, **options)
        self.trf_block = DecoderBlock(config.block, **options)
        self.final_norm = make_norm(norm, **options)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        following: Float[Array, "B T D"],
        *,
        attention_mask: Bool[Array, "..."] | None = None,
        positions: Int[Array, "... T"] | None = None,
        cache: LayerCache | None = None,
    ) -> Array | tuple[Array, LayerCache]:
        """Return the states of the tokens that follow, ``(B, T, D)``.

        Args:
            x: states in front of the decoder's last norm, or of another `TokenPrediction`, ``(B, T, D)``.
            following: embeddings of the token behind each position, ``(B, T, D)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, or broadcastable to ``(B, H, T, S)``.
            positions: integers ``(T,)`` or ``(B, T)``; the numbers of the tokens by default.
            cache: of `init_cache`; if given, it is returned behind the output.

        Raises:
            ValueError: `following` has another shape than `x`.
        """
        if functional.shape_of(following) != functional.shape_of(x):
            shapes = functional.shape_of(following), functional.shape_of(x)
            raise ValueError(f"following {shapes[0]} must have the shape of x {shapes[1]}")
        x = self.projection(functional.joined([self.token_norm(following), self.state_norm(x)]))
        return self.trf_block(x, attention_mask=attention_mask, positions=positions, cache=cache)

    def init_cache(self, batch_size: int, capacity: int) -> LayerCache:
        """Return the cache of the block without tokens, for `batch_size` sequences of at most `capacity` tokens."""
        return self.trf_block.init_cache(batch_size, capacity)
