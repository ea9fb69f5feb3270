"""Blocks of decoders: attention and feed-forward layers, with norms before or after them.

Twins: `jax_attn.blocks.decoder_block`, `torch_attn.blocks.decoder_block`. Letters: B batch, T query position, S key
position, D width.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import DecoderBlockConfig, LayerNormConfig, MixtureOfExpertsConfig, RMSNormConfig, variant_of

from .. import functional
from ..decoding.cache import SharedKeys
from ..differential_attention import DifferentialAttention
from ..dropout import Dropout
from ..gated_convolution import GatedConvolution
from ..gated_delta_net import GatedDeltaNet
from ..grouped_query_attention import GroupedQueryAttention
from ..initial_weights import filled, linear
from ..kimi_delta_attention import KimiDeltaAttention
from ..layer import Layer
from ..layer_norm import LayerNorm
from ..lightning_attention import LightningAttention
from ..linear_attention import LinearAttention
from ..mamba import Mamba
from ..mamba2 import Mamba2
from ..multi_head_latent_attention import MultiHeadLatentAttention
from ..random import JaxRngs
from ..rms_norm import RMSNorm
from ..signatures import typed_as
from ..signatures.attention import BlockCall, LayerCache
from ..sparse_indexed_attention import SparseIndexedAttention
from .activation import Activation
from .alternating_updates import AlternatingUpdates
from .feed_forward import make_feed_forward
from .mixture_of_experts import MixtureOfExperts

Attention: TypeAlias = (
    GroupedQueryAttention
    | MultiHeadLatentAttention
    | SparseIndexedAttention
    | GatedConvolution
    | GatedDeltaNet
    | KimiDeltaAttention
    | LightningAttention
    | LinearAttention
    | Mamba
    | Mamba2
    | DifferentialAttention
)

ATTENTIONS = {kind.__name__: kind for kind in get_args(Attention)}


class DecoderBlock(Layer):
    """Attention and feed-forward layers, each added to its input.

    Args:
        config: those of attention, feed-forward and norms, and the positions of the norms.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(
        self,
        config: DecoderBlockConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        if config.attention is not None:
            attention = ATTENTIONS[variant_of(config.attention).name]
            setattr(self, config.attention_name, attention(config.attention, **options))
        if config.recurrent is not None:
            self.linear_att = ATTENTIONS[variant_of(config.recurrent).name](config.recurrent, **options)
        if isinstance(config.feed_forward, MixtureOfExpertsConfig):
            self.ff = MixtureOfExperts(config.feed_forward, **options)
        elif config.feed_forward is not None:
            self.ff = make_feed_forward(config.feed_forward, **options)
        if config.dense is not None:
            self.dense = make_feed_forward(config.dense, **options)
        if config.layer_input is not None:
            self.layer_gate = linear(config.emb_dim, config.layer_input.dim, bias=False, **options)
            self.layer_proj = linear(config.layer_input.dim, config.emb_dim, bias=False, **options)
            self.layer_activation = Activation(config.layer_input.activation)
        if config.laurel_rank is not None:
            self.laurel_down = linear(config.emb_dim, config.laurel_rank, bias=False, **options)
            self.laurel_up = linear(config.laurel_rank, config.emb_dim, bias=False, **options)
        if config.updates is not None:
            self.altup = AlternatingUpdates(config.updates, **options)
        if config.scaled:
            self.scalar = filled(1, 1.0, **options)
        for name in config.norm_names:
            setattr(self, name, make_norm(config.norm, **options))
        self.drop_shortcut = Dropout(config.dropout, rngs=rngs)

    @torch.no_grad()
    def _reset_own(self) -> None:
        if self.config.scaled:
            self.scalar.fill_(1.0)

    @property
    def attention(self) -> Attention:
        """The attention, whatever its name."""
        return getattr(self, self.config.attention_name)

    __call__: BlockCall

    @typed_as(BlockCall)
    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        attention_mask: Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "... T"] | None = None,
        cache: LayerCache | None = None,
        layer_input: Float[Tensor, "B T C"] | None = None,
        shared: SharedKeys | None = None,
        return_shared: bool = False,
    ) -> Tensor | tuple[Tensor, LayerCache]:
        """Return ``x`` of shape ``(B, T, D)`` plus the outputs of attention and feed-forward layers.

        Args:
            x: ``(B, T, D)``, or ``(B, T, N, D)`` for a config of N streams.
            attention_mask: bool ``(B, S)``, ``False`` for padding, or broadcastable to ``(B, H, T, S)``.
            positions: integers ``(T,)`` or ``(B, T)``, or ``(rows, B, T)`` for a `Rotary` with axes; the numbers of the
                tokens by default.
            cache: of `init_cache`; if given, it is returned behind the output.
            layer_input: ``(B, T, C)``, the block's part of the per-layer embeddings, where the config has such.
            shared: keys and values of the block that the config names in `keys_of`.
            return_shared: also return the keys and values of the attention, in front of the cache.
        """
        config, streams = self.config, x
        if config.updates is not None:
            streams = self.altup.predict(x)
            x = streams[:, :, config.updates.active]
        x, shared, cache = self._run(x, attention_mask, positions, cache, shared, return_shared)
        if config.updates is not None:
            streams = self.altup.correct(streams, x)
            x = self.altup.scaled(streams)
        added = None
        if config.layer_input is not None:
            gate = self.layer_gate(x)
            check_width("layer_gate", gate.shape[-1], config.layer_input.dim)
            gated = self.layer_activation(gate) * layer_input
            added = self.input_norm(self.layer_proj(gated))
        if config.updates is not None:
            # The first stream, which the head reads, is not changed.
            x = streams if added is None else torch.cat([streams[:, :, :1], streams[:, :, 1:] + added[:, :, None]], 2)
        elif added is not None:
            x = x + added
        if self.config.scaled:
            x = x * self.scalar
        return functional.with_cache(functional.with_cache(x, shared if return_shared else None), cache)

    def _run(
        self,
        x: Float[Tensor, "B T D"],
        attention_mask: Bool[Tensor, "..."] | None,
        positions: Int[Tensor, "... T"] | None,
        cache: LayerCache | None,
        shared: SharedKeys | None,
        return_shared: bool,
    ) -> tuple[Tensor, SharedKeys | None, LayerCache | None]:
        """Return the sum behind the feed-forward layers, keys and values if asked for, and the cache."""
        norms, scale = self.config.norms, self.config.residual_scale
        normed = self.norm1(x) if "norm1" in self.config.norm_names else x
        if self.config.attention is None:
            x = x + self.drop_shortcut(self.ff(normed)) * scale
            return x, shared, cache
        attended, shared, cache = self._mix(normed, attention_mask, positions, cache, shared, return_shared)
        check_width("out_proj", attended.shape[-1], x.shape[-1])
        if norms in ("parallel", "parallel_two"):
            x = x + self.drop_shortcut(attended + self.ff(normed if norms == "parallel" else self.norm2(x))) * scale
            return x, shared, cache
        if norms == "residual":
            x = self.post_norm1(x + self.drop_shortcut(attended) * scale)
            x = self.post_norm2(x + self.drop_shortcut(self.ff(x)) * scale)
            return x, shared, cache
        if norms == "stream":
            first, second = self.config.stream_scales
            x = self.norm2(normed * first + self.drop_shortcut(attended) * scale)
            x = x * second + self.drop_shortcut(self.ff(x)) * scale
            return x, shared, cache
        if "post_norm1" in self.config.norm_names:
            attended = self.post_norm1(attended)
        x = x + self.drop_shortcut(attended) * scale
        if self.config.laurel_rank is not None:
            x = (x + normed + self.laurel_norm(self.laurel_up(self.laurel_down(normed)))) / 2.0**0.5
        if self.config.feed_forward is None:
            return x, shared, cache
        normed = self.norm2(x) if "norm2" in self.config.norm_names else x
        if self.config.dense is None:
            added = self.ff(normed)
        else:
            added = self.dense_norm(self.dense(normed)) + self.experts_norm(self.ff(x))
        if "post_norm2" in self.config.norm_names:
            added = self.post_norm2(added)
        x = x + self.drop_shortcut(added) * scale
        return x, shared, cache

    def _mix(
        self,
        x: Float[Tensor, "B T D"],
        attention_mask: Bool[Tensor, "..."] | None,
        positions: Int[Tensor, "... T"] | None,
        cache: LayerCache | None,
        shared: SharedKeys | None,
        return_shared: bool,
    ) -> tuple[Tensor, SharedKeys | None, LayerCache | None]:
        """Return the output of the mixers, keys and values of attention if asked for, and the cache.

        The output is that of attention, or its sum with that of the recurrent layer next to it.
        """
        config = self.config
        arguments: dict[str, Any] = {"attention_mask": attention_mask, "cache": cache}
        at = {"positions": positions} if positions is not None and hasattr(config.attention, "position") else {}
        if config.keys_of is not None:
            arguments = {"shared": shared}
            return self.attention(x, **arguments), shared, cache
        if return_shared:
            arguments["return_shared"] = True
            attended, shared, *caches = self.attention(x, **arguments, **at)
            return attended, shared, caches[0] if caches else None
        if config.recurrent is None:
            attended = self.attention(x, **arguments, **at)
            if cache is not None:
                attended, cache = attended
            return attended, None, cache
        caches = (None, None) if cache is None else arguments["cache"]
        attended = self.attention(x, **{**arguments, "cache": caches[0]}, **at)
        recurrent = self.linear_att(x, **{**arguments, "cache": caches[1]})
        if cache is not None:
            (attended, first), (recurrent, second) = attended, recurrent
            cache = first, second
        attended, recurrent = (
            output if factor == 1.0 else output * factor
            for output, factor in zip((attended, recurrent), config.mixer_scales, strict=True)
        )
        check_width("linear_att.out_proj", recurrent.shape[-1], attended.shape[-1])
        return attended + recurrent, None, cache

    def init_cache(self, batch_size: int, capacity: int) -> LayerCache:
        """Return the cache of the attention without tokens, for `batch_size` sequences of at most `capacity` tokens.

        With a recurrent layer next to attention it is the pair of both caches; without attention, or with keys of
        another block, it is empty.
        """
        if self.config.attention is None or self.config.keys_of is not None:
            return ()
        if self.config.recurrent is None:
            return self.attention.init_cache(batch_size, capacity)
        return self.att.init_cache(batch_size, capacity), self.linear_att.init_cache(batch_size, capacity)


def make_norm(config: RMSNormConfig | LayerNormConfig, **options: Any) -> RMSNorm | LayerNorm:
    """Return the norm of a config; `options` are those of both classes."""
    if isinstance(config, RMSNormConfig):
        return RMSNorm(config.emb_dim, config.eps, config.unit_offset, config.affine, **options)
    return LayerNorm(config.emb_dim, config.eps, config.affine, config.bias, config.unit_offset, **options)
