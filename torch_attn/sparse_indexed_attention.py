"""Multi-head latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556).

Twins: `jax_attn.sparse_indexed_attention`, `torch_attn.sparse_indexed_attention`. Letters: b batch, t query position,
s key position, c channel of the indexer's key, l channel of the latent, q channel of what queries are made of.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.specs import SparseIndexedAttentionConfig

from . import functional
from .decoding.cache import KeyValueCache
from .lightning_indexer import LightningIndexer
from .multi_head_latent_attention import MultiHeadLatentAttention
from .random import JaxRngs
from .signatures import DType
from .signatures.attention import AttentionMask


class SparseIndexedAttention(MultiHeadLatentAttention):
    """Attention like `MultiHeadLatentAttention`, from each query to the keys with the indexer's highest scores.

    No gradient flows through the choice, so that the indexer's parameters get none: train them with a loss of their
    own.

    Args:
        config: sizes, position, mask, biases, and the indexer.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    config: SparseIndexedAttentionConfig

    @SparseIndexedAttentionConfig.takes
    def __init__(
        self,
        config: SparseIndexedAttentionConfig,
        *,
        rngs: JaxRngs | None = None,
        implementation: str | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        config = SparseIndexedAttentionConfig.check(config)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        super().__init__(config, implementation=implementation, **options)
        self.indexer = LightningIndexer(config.indexer, config.d_in, config.query_source, **options)

    def _index_keys(
        self, x: Float[Tensor, "b t d"], tables: tuple[Tensor, Tensor] | None, latent: Float[Tensor, "b t 1 l"]
    ) -> Float[Tensor, "b t 1 c"]:
        """Return the keys of the indexer, which a cache holds with the latents."""
        return self.indexer.keys(x, tables)

    def _choose(
        self,
        asking: Float[Tensor, "b t q"],
        x: Float[Tensor, "b t d"],
        index: Float[Tensor, "b s 1 c"],
        tables: tuple[Tensor, Tensor] | None,
        mask: AttentionMask,
    ) -> AttentionMask:
        """Return the mask of the keys with the highest scores, of those that a mask shows."""
        return self.indexer(asking, x, index, tables, mask=mask, num_heads=self.config.num_heads)

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        It holds the latent and the key with the position side by side as the key of one head, and the key of the
        indexer as its value.

        Raises:
            ValueError: a size below 1.
        """
        config, options = self.config, functional.cache_options(self.W_latent)
        width = config.latent_dim + config.rope_dim
        return KeyValueCache.empty(batch_size, capacity, 1, width, config.indexer.head_dim, **options)
