"""What users of torch_attn write: type checkers give each call the type of its result. `make types` runs mypy on it."""

from collections.abc import Callable
from typing import assert_type

from torch import Tensor, nn

import torch_attn
from attn_bridge.specs import DecoderConfig, EncoderDecoderConfig
from torch_attn.decoding.cache import KeyValueCache
from torch_attn.decoding.recurrent_cache import RecurrentCache

Cached = KeyValueCache | RecurrentCache | tuple[KeyValueCache, RecurrentCache] | tuple[()]


def without_a_cache(layer: torch_attn.MultiHeadAttention, x: Tensor, flag: bool) -> None:
    assert_type(layer(x), Tensor)
    assert_type(layer(x, attention_mask=x > 0), Tensor)
    assert_type(layer(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(layer.forward(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(layer(x, return_weights=flag), Tensor | tuple[Tensor, Tensor])


def every_class_without_a_cache(x: Tensor) -> None:
    assert_type(torch_attn.SelfAttention_v1(4, 4)(x), Tensor)
    assert_type(torch_attn.SelfAttention(4, 4)(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(torch_attn.CausalAttention(4, 4, 8)(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(torch_attn.MultiHeadAttentionWrapper(4, 4, 8)(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(torch_attn.simple_self_attention(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(torch_attn.functional.dot_product_attention(x, x, x), Tensor)
    assert_type(
        torch_attn.functional.dot_product_attention(x, x, x, return_weights=True, scale=1.0), tuple[Tensor, Tensor]
    )


def with_a_cache(layer: torch_attn.GroupedQueryAttention, x: Tensor) -> None:
    cache = layer.init_cache(1, 8)
    assert_type(layer(x), Tensor)
    assert_type(layer(x, cache=cache), tuple[Tensor, KeyValueCache])
    assert_type(layer(x, cache=cache, return_weights=True), tuple[Tensor, Tensor, KeyValueCache])
    _, cache = layer(x, positions=None, cache=cache)


def every_class_with_a_cache(
    differential: torch_attn.DifferentialAttention,
    latent: torch_attn.MultiHeadLatentAttention,
    cross: torch_attn.CrossAttention,
    linear: torch_attn.LinearAttention,
    delta: torch_attn.GatedDeltaNet,
    kimi: torch_attn.KimiDeltaAttention,
    lightning: torch_attn.LightningAttention,
    convolution: torch_attn.GatedConvolution,
    mamba: torch_attn.Mamba,
    mamba2: torch_attn.Mamba2,
    sparse: torch_attn.SparseIndexedAttention,
    block: torch_attn.DecoderBlock,
    x: Tensor,
) -> None:
    assert_type(differential(x, cache=differential.init_cache(1, 8)), tuple[Tensor, KeyValueCache])
    assert_type(latent(x, cache=latent.init_cache(1, 8), absorbed=True), tuple[Tensor, KeyValueCache])
    assert_type(cross(x, context=x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(linear(x, cache=linear.init_cache(1, 8), form="chunked"), tuple[Tensor, RecurrentCache])
    assert_type(delta(x, cache=delta.init_cache(1, 8)), tuple[Tensor, RecurrentCache])
    assert_type(kimi(x, cache=kimi.init_cache(1, 8), form="chunked"), tuple[Tensor, RecurrentCache])
    assert_type(lightning(x), Tensor)
    assert_type(mamba(x, cache=mamba.init_cache(1, 8)), tuple[Tensor, RecurrentCache])
    assert_type(sparse(x, cache=sparse.init_cache(1, 8), return_weights=True), tuple[Tensor, Tensor, KeyValueCache])
    assert_type(block(x, cache=block.init_cache(1, 8)), tuple[Tensor, Cached])
    assert_type(block(x), Tensor)


def whole_models(decoder: DecoderConfig, encoder_decoder: EncoderDecoderConfig, ids: Tensor) -> None:
    model = torch_attn.DecoderModel(decoder)
    caches = model.init_cache(1, 8)
    assert_type(caches, tuple[Cached, ...])
    assert_type(model(ids), Tensor)
    assert_type(model(input_ids=ids, labels=ids), tuple[Tensor, Tensor])
    assert_type(model(ids, cache=caches), tuple[Tensor, tuple[Cached, ...]])
    assert_type(model(ids, cache=caches, labels=ids, attention_mask=ids), tuple[Tensor, Tensor, tuple[Cached, ...]])
    assert_type(model.generate(ids, 4), Tensor)
    gpt = torch_attn.GPTModel({"vocab_size": 8})
    assert_type(gpt(ids), Tensor)
    assert_type(gpt(input_ids=ids, labels=ids), tuple[Tensor, Tensor])
    both = torch_attn.EncoderDecoderModel(encoder_decoder)
    assert_type(both(ids, ids, source_mask=ids), Tensor)
    _, cache = both(None, ids, cache=both.init_cache(1, 8))
    assert_type(both(None, ids, cache=cache, labels=ids)[0], Tensor)


def layers_without_options(x: Tensor) -> None:
    assert_type(torch_attn.RMSNorm(4)(x), Tensor)


def layers_as_functions(layer: torch_attn.GroupedQueryAttention, norm: torch_attn.RMSNorm, x: Tensor) -> None:
    functions: list[Callable[[Tensor], Tensor]] = [layer, norm]  # as torch.compile and torch.vmap take them
    assert_type(functions[0](x), Tensor)


def wrong_calls(layer: torch_attn.GroupedQueryAttention, x: Tensor, state: RecurrentCache) -> None:
    layer(x, attention_masc=x)  # type: ignore[call-overload]
    layer(x, x, x)  # type: ignore[call-overload]
    layer(x, cache=state)  # type: ignore[call-overload]
    layer(x, form="chunked")  # type: ignore[call-overload]


class Wrapped(nn.Module):
    """A module of the user's with one of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch_attn.MultiHeadAttention(4, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return x + self.attention(x)
