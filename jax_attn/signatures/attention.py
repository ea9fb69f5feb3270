"""The calls of attention layers and blocks: the output, then the weights if asked for, then the cache if given.

Twins: `jax_attn.signatures.attention`, `torch_attn.signatures.attention`. Letters: B batch, t query
position, s key position, d and e widths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar, Unpack, overload

from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.masks import Mask

from ..layer import ModeOptions

if TYPE_CHECKING:
    from ..decoding.cache import KeyValueCache, SharedKeys
    from ..decoding.recurrent_cache import RecurrentCache

C = TypeVar("C")

X: TypeAlias = Float[Array, "... t d"]
Weights: TypeAlias = Float[Array, "..."]
AttentionMask: TypeAlias = Mask | Bool[Array, "..."] | Int[Array, "B s"]
LayerCache: TypeAlias = "KeyValueCache | RecurrentCache | tuple[KeyValueCache, RecurrentCache] | tuple[()]"
Output: TypeAlias = Array | tuple[Array, Array]
CachedOutput: TypeAlias = Array | tuple[Array, Array] | tuple[Array, C] | tuple[Array, Array, C]
SharedOutput: TypeAlias = (
    "tuple[Array, SharedKeys] | tuple[Array, Array, SharedKeys] | tuple[Array, SharedKeys, KeyValueCache]"
    " | tuple[Array, Array, SharedKeys, KeyValueCache]"
)


class AttentionOptions(ModeOptions, total=False):
    """Arguments of every layer that do not change the type of its result."""

    attention_mask: AttentionMask | None


class PositionOptions(AttentionOptions, total=False):
    """Those of a layer with positions."""

    positions: Int[Array, "... t"] | None


class SharingOptions(PositionOptions, total=False):
    """Those of attention that may take keys and values of an earlier layer."""

    shared: SharedKeys | None


class GroupedOptions(SharingOptions, total=False):
    """Those of attention that may also take a table of relative biases."""

    relative_bias: Float[Array, "buckets h"] | None


class BlockOptions(SharingOptions, total=False):
    """Those of a block."""

    layer_input: Float[Array, "B T C"] | None


class LatentOptions(PositionOptions, total=False):
    """Those of multi-head latent attention."""

    absorbed: bool | None


class RecurrentOptions(PositionOptions, total=False):
    """Those of a layer that keeps a state."""

    form: str | None


class CrossOptions(AttentionOptions, total=False):
    """Those of attention to a context."""

    context: Float[Array, "... s e"] | None


class SimpleAttentionCall(Protocol):
    """Attention without parameters, a function."""

    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: Literal[False] = False
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: Literal[True]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: bool = False
    ) -> Output: ...


class AttentionCall(Protocol):
    """Attention without a cache."""

    @overload
    def __call__(
        self, x: X, *, return_weights: Literal[False] = False, **options: Unpack[AttentionOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, return_weights: Literal[True], **options: Unpack[AttentionOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, x: X, *, return_weights: bool = False, **options: Unpack[AttentionOptions]) -> Output: ...


class CachedAttentionCall(Protocol):
    """Attention with positions and a cache."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[PositionOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[PositionOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[PositionOptions]
    ) -> tuple[Array, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[PositionOptions]
    ) -> tuple[Array, Array, KeyValueCache]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        **options: Unpack[PositionOptions],
    ) -> CachedOutput[KeyValueCache]: ...


class GroupedAttentionCall(Protocol):
    """Attention with positions and a cache, whose keys and values other layers may share."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[GroupedOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[GroupedOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[GroupedOptions]
    ) -> tuple[Array, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[GroupedOptions]
    ) -> tuple[Array, Array, KeyValueCache]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        return_shared: bool = False,
        **options: Unpack[GroupedOptions],
    ) -> CachedOutput[KeyValueCache] | SharedOutput: ...


class LatentAttentionCall(Protocol):
    """Multi-head latent attention."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[LatentOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[LatentOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[LatentOptions]
    ) -> tuple[Array, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[LatentOptions]
    ) -> tuple[Array, Array, KeyValueCache]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        **options: Unpack[LatentOptions],
    ) -> CachedOutput[KeyValueCache]: ...


class CrossAttentionCall(Protocol):
    """Attention to a context, which a cache keeps."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[CrossOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[CrossOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[CrossOptions]
    ) -> tuple[Array, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[CrossOptions]
    ) -> tuple[Array, Array, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache | None = None, return_weights: bool = False, **options: Unpack[CrossOptions]
    ) -> CachedOutput[KeyValueCache]: ...


class LinearAttentionCall(Protocol):
    """Linear attention, whose cache is a state."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[RecurrentOptions]
    ) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[RecurrentOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: RecurrentCache,
        return_weights: Literal[False] = False,
        **options: Unpack[RecurrentOptions],
    ) -> tuple[Array, RecurrentCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache, return_weights: Literal[True], **options: Unpack[RecurrentOptions]
    ) -> tuple[Array, Array, RecurrentCache]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: RecurrentCache | None = None,
        return_weights: bool = False,
        **options: Unpack[RecurrentOptions],
    ) -> CachedOutput[RecurrentCache]: ...


class RecurrentCall(Protocol):
    """Attention to a state, which has no weights to return: the delta rules, lightning attention, Mamba-2."""

    @overload
    def __call__(self, x: X, *, cache: None = None, **options: Unpack[RecurrentOptions]) -> Array: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache, **options: Unpack[RecurrentOptions]
    ) -> tuple[Array, RecurrentCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache | None = None, **options: Unpack[RecurrentOptions]
    ) -> Array | tuple[Array, RecurrentCache]: ...


class BlockCall(Protocol):
    """A block of a decoder: attention and feed-forward layers."""

    @overload
    def __call__(self, x: X, *, cache: None = None, **options: Unpack[BlockOptions]) -> Array: ...
    @overload
    def __call__(self, x: X, *, cache: LayerCache, **options: Unpack[BlockOptions]) -> tuple[Array, LayerCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: LayerCache | None = None, return_shared: bool = False, **options: Unpack[BlockOptions]
    ) -> (
        Array | tuple[Array, LayerCache] | tuple[Array, SharedKeys | None] | tuple[Array, SharedKeys | None, LayerCache]
    ): ...
