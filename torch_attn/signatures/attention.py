"""The calls of attention layers and blocks: the output, then the weights if asked for, then the cache if given.

Twins: `jax_attn.signatures.attention`, `torch_attn.signatures.attention`. Letters: B batch, t query
position, s key position, d and e widths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_bridge.masks import Mask

if TYPE_CHECKING:
    from ..decoding.cache import KeyValueCache, SharedKeys
    from ..decoding.recurrent_cache import RecurrentCache

C = TypeVar("C")

X: TypeAlias = Float[Tensor, "... t d"]
Weights: TypeAlias = Float[Tensor, "..."]
AttentionMask: TypeAlias = Mask | Bool[Tensor, "..."] | Int[Tensor, "B s"]
LayerCache: TypeAlias = "KeyValueCache | RecurrentCache | tuple[KeyValueCache, RecurrentCache] | tuple[()]"
Output: TypeAlias = Tensor | tuple[Tensor, Tensor]
CachedOutput: TypeAlias = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, C] | tuple[Tensor, Tensor, C]
SharedOutput: TypeAlias = (
    "tuple[Tensor, SharedKeys] | tuple[Tensor, Tensor, SharedKeys] | tuple[Tensor, SharedKeys, KeyValueCache]"
    " | tuple[Tensor, Tensor, SharedKeys, KeyValueCache]"
)


class AttentionOptions(TypedDict, total=False):
    """Arguments of every layer that do not change the type of its result."""

    attention_mask: AttentionMask | None


class PositionOptions(AttentionOptions, total=False):
    """Those of a layer with positions."""

    positions: Int[Tensor, "... t"] | None


class SharingOptions(PositionOptions, total=False):
    """Those of attention that may take keys and values of an earlier layer."""

    shared: SharedKeys | None


class GroupedOptions(SharingOptions, total=False):
    """Those of attention that may also take a table of relative biases."""

    relative_bias: Float[Tensor, "buckets h"] | None


class BlockOptions(SharingOptions, total=False):
    """Those of a block."""

    layer_input: Float[Tensor, "B T C"] | None


class LatentOptions(PositionOptions, total=False):
    """Those of multi-head latent attention."""

    absorbed: bool | None


class RecurrentOptions(PositionOptions, total=False):
    """Those of a layer that keeps a state."""

    form: str | None


class CrossOptions(AttentionOptions, total=False):
    """Those of attention to a context."""

    context: Float[Tensor, "... s e"] | None


class SimpleAttentionCall(Protocol):
    """Attention without parameters, a function."""

    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: X, *, attention_mask: AttentionMask | None = None, return_weights: bool = False
    ) -> Output: ...


class AttentionCall(Protocol):
    """Attention without a cache."""

    @overload
    def __call__(
        self, x: X, *, return_weights: Literal[False] = False, **options: Unpack[AttentionOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, return_weights: Literal[True], **options: Unpack[AttentionOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, x: X, *, return_weights: bool = False, **options: Unpack[AttentionOptions]) -> Output: ...


class CachedAttentionCall(Protocol):
    """Attention with positions and a cache."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[PositionOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[PositionOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[PositionOptions]
    ) -> tuple[Tensor, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[PositionOptions]
    ) -> tuple[Tensor, Tensor, KeyValueCache]: ...
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
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[GroupedOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[GroupedOptions]
    ) -> tuple[Tensor, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[GroupedOptions]
    ) -> tuple[Tensor, Tensor, KeyValueCache]: ...
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
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[LatentOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[LatentOptions]
    ) -> tuple[Tensor, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[LatentOptions]
    ) -> tuple[Tensor, Tensor, KeyValueCache]: ...
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
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[CrossOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[False] = False, **options: Unpack[CrossOptions]
    ) -> tuple[Tensor, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache, return_weights: Literal[True], **options: Unpack[CrossOptions]
    ) -> tuple[Tensor, Tensor, KeyValueCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: KeyValueCache | None = None, return_weights: bool = False, **options: Unpack[CrossOptions]
    ) -> CachedOutput[KeyValueCache]: ...


class LinearAttentionCall(Protocol):
    """Linear attention, whose cache is a state."""

    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[False] = False, **options: Unpack[RecurrentOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: None = None, return_weights: Literal[True], **options: Unpack[RecurrentOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self,
        x: X,
        *,
        cache: RecurrentCache,
        return_weights: Literal[False] = False,
        **options: Unpack[RecurrentOptions],
    ) -> tuple[Tensor, RecurrentCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache, return_weights: Literal[True], **options: Unpack[RecurrentOptions]
    ) -> tuple[Tensor, Tensor, RecurrentCache]: ...
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
    def __call__(self, x: X, *, cache: None = None, **options: Unpack[RecurrentOptions]) -> Tensor: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache, **options: Unpack[RecurrentOptions]
    ) -> tuple[Tensor, RecurrentCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: RecurrentCache | None = None, **options: Unpack[RecurrentOptions]
    ) -> Tensor | tuple[Tensor, RecurrentCache]: ...


class BlockCall(Protocol):
    """A block of a decoder: attention and feed-forward layers."""

    @overload
    def __call__(self, x: X, *, cache: None = None, **options: Unpack[BlockOptions]) -> Tensor: ...
    @overload
    def __call__(self, x: X, *, cache: LayerCache, **options: Unpack[BlockOptions]) -> tuple[Tensor, LayerCache]: ...
    @overload
    def __call__(
        self, x: X, *, cache: LayerCache | None = None, return_shared: bool = False, **options: Unpack[BlockOptions]
    ) -> (
        Tensor
        | tuple[Tensor, LayerCache]
        | tuple[Tensor, SharedKeys | None]
        | tuple[Tensor, SharedKeys | None, LayerCache]
    ): ...
