"""One device's part of a call of attention, as calls on that device alone.

Letters: b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Bool, Float
from torch import Tensor

from attn_bridge.masks import Mask

from ... import implementations
from ...implementations import KernelCall
from ...implementations.reference import Drawn
from ...signatures.attention import Output
from ..masks import block_of


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The operands of `functional.dot_product_attention` that a device holds.

    Attributes:
        query: ``(b, t, h, c)``, the device's own.
        key: ``(b, s, k, c)``; query head ``i`` of the device reads its key head ``i // (h // k)``.
        value: ``(b, s, k, c)``.
        mask: for the device's sequences and heads, in positions of the whole sequence.
        bias: ``(b, h, t, s)``: each axis the device's, all keys, or 1.
        sinks: ``(h,)``.
        keep: dropout mask like `bias`, None without dropout.
        start: position of the first query.
        scale: factor of the scores.
        softcap: as `functional.dot_product_attention` has it.
        dropout: rate.
        return_weights: whether the weights are asked for.
        implementation: which one is asked for, None for the fastest.
    """

    query: Float[Tensor, "b t h c"]
    key: Float[Tensor, "b s k c"]
    value: Float[Tensor, "b s k c"]
    mask: Mask | None
    bias: Float[Tensor, "..."] | None
    sinks: Float[Tensor, "h"] | None
    keep: Bool[Tensor, "..."] | None
    start: int
    scale: float
    softcap: float | None
    dropout: float
    return_weights: bool
    implementation: str | None

    def attend(self) -> Output:
        """Return the context, and the weights if asked for, of the queries to all keys, which the device holds."""
        queries = range(self.start, self.start + self.query.shape[1])
        mask = block_of(self.mask, queries, range(self.key.shape[1]), self.query.device)
        call = KernelCall(
            self.query,
            self.key,
            self.value,
            mask,
            self.bias,
            self.scale,
            self.softcap,
            self.sinks,
            self.dropout,
            None if self.keep is None else Drawn(self.keep),
            self.return_weights,
        )
        return implementations.choose(call, self.implementation).attend(call)

    def rows(self, first: int, count: int, start: int) -> Part:
        """Return the part of `count` queries from the device's number `first` on, whose first position is `start`."""

        def cut(array: Tensor | None) -> Tensor | None:
            return array if array is None or array.shape[2] == 1 else array[:, :, first : first + count]

        query = self.query[:, first : first + count]
        return dataclasses.replace(self, query=query, bias=cut(self.bias), keep=cut(self.keep), start=start)
