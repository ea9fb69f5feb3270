"""The calls of whole models: the logits; before them the loss if labels are given, after them the cache if given.

Twins: `jax_attn.signatures.models`, `torch_attn.signatures.models`. Letters: B batch, T query position, S
key position, C channel of a frame, F frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Unpack, overload

from jax import Array
from jaxtyping import Bool, Float, Int

from ..layer import ModeOptions
from .attention import CachedOutput, LayerCache, Output

if TYPE_CHECKING:
    from ..decoding.cache import KeyValueCache

Tokens: TypeAlias = Int[Array, "B T"]
Source: TypeAlias = Int[Array, "B S"] | Float[Array, "B C F"]
DecoderCache: TypeAlias = "tuple[LayerCache, ...]"
EncoderDecoderCache: TypeAlias = "tuple[tuple[KeyValueCache, KeyValueCache | None], ...]"


class GPTOptions(ModeOptions, total=False):
    """Arguments of `GPTModel` that do not change the type of its result."""

    attention_mask: Bool[Array, "..."] | Int[Array, "B S"] | None
    input_ids: Tokens | None


class DecoderOptions(ModeOptions, total=False):
    """Those of `DecoderModel`."""

    attention_mask: Bool[Array, "..."] | Int[Array, "B S"] | None
    positions: Int[Array, "... T"] | None
    last_only: bool
    input_ids: Tokens | None


class EncoderDecoderOptions(DecoderOptions, total=False):
    """Those of `EncoderDecoderModel`."""

    source_mask: Bool[Array, "B S"] | Int[Array, "B S"] | None


class GPTCall(Protocol):
    """`GPTModel`, which has no cache."""

    @overload
    def __call__(self, ids: Tokens | None = None, *, labels: None = None, **options: Unpack[GPTOptions]) -> Array: ...
    @overload
    def __call__(
        self, ids: Tokens | None = None, *, labels: Tokens, **options: Unpack[GPTOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, ids: Tokens | None = None, *, labels: Tokens | None = None, **options: Unpack[GPTOptions]
    ) -> Output: ...


class DecoderCall(Protocol):
    """`DecoderModel`."""

    @overload
    def __call__(
        self,
        tokens: Tokens | None = None,
        *,
        labels: None = None,
        cache: None = None,
        **options: Unpack[DecoderOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self, tokens: Tokens | None = None, *, labels: Tokens, cache: None = None, **options: Unpack[DecoderOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self,
        tokens: Tokens | None = None,
        *,
        labels: None = None,
        cache: Sequence[LayerCache],
        **options: Unpack[DecoderOptions],
    ) -> tuple[Array, DecoderCache]: ...
    @overload
    def __call__(
        self,
        tokens: Tokens | None = None,
        *,
        labels: Tokens,
        cache: Sequence[LayerCache],
        **options: Unpack[DecoderOptions],
    ) -> tuple[Array, Array, DecoderCache]: ...
    @overload
    def __call__(
        self,
        tokens: Tokens | None = None,
        *,
        labels: Tokens | None = None,
        cache: Sequence[LayerCache] | None = None,
        **options: Unpack[DecoderOptions],
    ) -> CachedOutput[DecoderCache]: ...


class EncoderDecoderCall(Protocol):
    """`EncoderDecoderModel`."""

    @overload
    def __call__(
        self,
        source: Source | None,
        tokens: Tokens | None = None,
        *,
        labels: None = None,
        cache: None = None,
        **options: Unpack[EncoderDecoderOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        source: Source | None,
        tokens: Tokens | None = None,
        *,
        labels: Tokens,
        cache: None = None,
        **options: Unpack[EncoderDecoderOptions],
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self,
        source: Source | None,
        tokens: Tokens | None = None,
        *,
        labels: None = None,
        cache: Sequence[tuple[KeyValueCache, KeyValueCache | None]],
        **options: Unpack[EncoderDecoderOptions],
    ) -> tuple[Array, EncoderDecoderCache]: ...
    @overload
    def __call__(
        self,
        source: Source | None,
        tokens: Tokens | None = None,
        *,
        labels: Tokens,
        cache: Sequence[tuple[KeyValueCache, KeyValueCache | None]],
        **options: Unpack[EncoderDecoderOptions],
    ) -> tuple[Array, Array, EncoderDecoderCache]: ...
    @overload
    def __call__(
        self,
        source: Source | None,
        tokens: Tokens | None = None,
        *,
        labels: Tokens | None = None,
        cache: Sequence[tuple[KeyValueCache, KeyValueCache | None]] | None = None,
        **options: Unpack[EncoderDecoderOptions],
    ) -> CachedOutput[EncoderDecoderCache]: ...
