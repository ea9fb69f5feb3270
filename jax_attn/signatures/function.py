"""The call of `functional.dot_product_attention`.

Twins: `jax_attn.signatures.function`, `torch_attn.signatures.function`. Letters: B batch, T query position, S
key position, H query heads, K key/value heads, D and Dv channels of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict, Unpack, overload

from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attn_bridge.masks import Mask

from ..random import Rngs

if TYPE_CHECKING:
    from ..parallel.sharding import Sharding


class FunctionOptions(TypedDict, total=False):
    """Arguments that do not change the type of the result."""

    mask: Mask | Bool[Array, "..."] | None
    bias: Float[Array, "..."] | None
    scale: float | None
    softcap: float | None
    sinks: Float[Array, "H"] | None
    dropout: float
    rng: Array | nnx.RngStream | Rngs | None
    implementation: str | None
    sharding: Sharding | None


Query: TypeAlias = Float[Array, "B T H D"]
Key: TypeAlias = Float[Array, "B S K D"]
Value: TypeAlias = Float[Array, "B S K Dv"]
Context: TypeAlias = Float[Array, "B T H Dv"]
Weights: TypeAlias = Float[Array, "B H T S"]


class FunctionCall(Protocol):
    """The context, and the weights if asked for."""

    @overload
    def __call__(
        self,
        query: Query,
        key: Key,
        value: Value,
        *,
        return_weights: Literal[False] = False,
        **options: Unpack[FunctionOptions],
    ) -> Context: ...
    @overload
    def __call__(
        self, query: Query, key: Key, value: Value, *, return_weights: Literal[True], **options: Unpack[FunctionOptions]
    ) -> tuple[Context, Weights]: ...
    @overload
    def __call__(
        self, query: Query, key: Key, value: Value, *, return_weights: bool = False, **options: Unpack[FunctionOptions]
    ) -> Context | tuple[Context, Weights]: ...
