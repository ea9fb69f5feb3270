"""The key/value cache of decoding: keys and values of earlier tokens, in slots filled from the left.

The twin is `jax_attn.decoding.cache`. A cache is allocated once; here it is written in place, and methods return the
cache itself where the twin's return a new one. All rows of a batch use the same slots: shorter rows are padded, and the
mask of their padding is remembered. Letters: B batch, T new tokens, S slots, K key/value heads, D width of a key, Dv of
a value.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.types import Device

from attn_bridge import cache_validation, validation
from attn_bridge.masks import ArrayMask, Mask, as_mask, causal, full, left_padding

from .. import functional, recomputation
from ..shards import beside
from .trees import register


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """The keys and values that new queries attend to, as arguments of `functional.dot_product_attention`.

    Attributes:
        key: ``(B, S, K, D)``.
        value: ``(B, S, K, Dv)``.
        mask: which of the new queries sees which of these keys.
        positions: ``(B, S)``, the positions of these keys.
    """

    key: Float[Tensor, "B S K D"]
    value: Float[Tensor, "B S K Dv"]
    mask: Mask
    positions: Int[Tensor, "B S"]


@dataclasses.dataclass(frozen=True, eq=False)
class SharedKeys:
    """The keys and values of a layer for the tokens of a call, which later layers attend to as well.

    Attributes:
        view: those of all tokens so far, and the mask of the new ones.
        at: positions of the new tokens, as the layer took them.
    """

    view: View
    at: Int[Tensor, "... T"]


@dataclasses.dataclass(eq=False)
class KeyValueCache:
    """Keys and values of the tokens so far.

    Attributes:
        key: ``(B, S, K, D)``; S is the capacity or, of a rolling cache, the size of its window.
        value: ``(B, S, K, Dv)``.
        positions: ``(B, S)``, the position of each key.
        visible: ``(B, S)`` bool, ``False`` for padding.
        padding: ``(B, 1)``, tokens of padding in front of each sequence.
        length: number of tokens so far.
        capacity: most tokens that it takes.
        rolling: whether it keeps the last S tokens only; slot ``i`` then holds a token whose number is ``i`` modulo S.
        padded: whether any row may have padding.
        adaptive: whether the first keys and values determine the dtype.
        lost: whether a call that failed overwrote tokens of a rolling cache, which takes no others then.
    """

    key: Float[Tensor, "B S K D"]
    value: Float[Tensor, "B S K Dv"]
    positions: Int[Tensor, "B S"]
    visible: Bool[Tensor, "B S"]
    padding: Int[Tensor, "B 1"]
    length: int
    capacity: int
    rolling: bool = False
    padded: bool = False
    adaptive: bool = False
    lost: bool = False

    @classmethod
    def empty(
        cls,
        batch_size: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        rolling: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> KeyValueCache:
        """Allocate a cache without tokens.

        Args:
            batch_size: B.
            capacity: most tokens that it takes.
            num_kv_heads: K.
            head_dim: D.
            value_dim: Dv; `head_dim` by default.
            rolling: number of last tokens to keep, for masks that reach no further; None keeps all.
            device: device of the arrays.
            dtype: of keys and values; None is that of the first ones.

        Raises:
            ValueError: a size below 1.
        """
        slots = cache_validation.check_cache_sizes(batch_size, capacity, rolling)
        value_dim = head_dim if value_dim is None else value_dim
        # In memory the slots of a head follow one another, which is how the kernels read them.
        key, value = (
            torch.zeros(batch_size, num_kv_heads, slots, width, device=device, dtype=dtype).transpose(1, 2)
            for width in (head_dim, value_dim)
        )
        return cls(
            key,
            value,
            torch.zeros(batch_size, slots, device=device, dtype=torch.int64),
            torch.ones(batch_size, slots, device=device, dtype=torch.bool),
            torch.zeros(batch_size, 1, device=device, dtype=torch.int32),
            0,
            capacity,
            rolling is not None,
            adaptive=dtype is None,
        )

    def append(
        self,
        key: Float[Tensor, "B T K D"],
        value: Float[Tensor, "B T K Dv"],
        *,
        mask: Mask | None = None,
        attention_mask: Mask | Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "... T"] | None = None,
        num_heads: int | None = None,
    ) -> tuple[KeyValueCache, View]:
        """Append new tokens.

        Args:
            key: ``(B, T, K, D)``.
            value: ``(B, T, K, Dv)``.
            mask: which token attends to which, by the numbers of the tokens; `causal()` by default.
            attention_mask: ``(B, S)`` bool over all tokens so far, the new ones included (or up to the capacity), which
                hides padding from now on; or a restriction of `mask` for this call alone: a description, or a bool
                array ``(B, H, T, S)``.
            positions: ``(T,)`` or ``(B, T)``; the numbers of the tokens by default.
            num_heads: of the queries, for the check of masks that differ between heads; None leaves that to the
                attention.

        Returns:
            The cache, and the keys, values and mask for the new tokens.

        Raises:
            ValueError: more tokens than the capacity, or shapes that do not fit.
            RuntimeError: a checkpoint repeats the call in a backward pass.
        """
        cache_validation.check_cached(tuple(self.key.shape), tuple(key.shape))
        cache_validation.check_cached(tuple(self.value.shape), tuple(value.shape))
        first, tokens = self.length, key.shape[1]
        if not torch.compiler.is_compiling():
            recomputation.check_cache(self, first)
        if self.lost:
            raise RuntimeError(
                "a call that failed overwrote tokens of the rolling cache; begin again with an empty one, or trim(0)"
            )
        cache_validation.check_room(first, tokens, self.capacity)
        length = first + tokens
        if positions is None:
            positions = torch.arange(first, length, device=key.device)
        dtype = functional.dtype_name(positions, "positions")
        validation.check_positions(tuple(positions.shape), dtype, key.shape[0], tokens)
        hidden, mask = self._split(causal() if mask is None else mask, attention_mask, length)
        self._check_mask(mask, num_heads, tokens, length)
        # Of a padding that holds for this call alone; that which the cache remembers is counted below.
        padding = left_padding(mask)
        if padding is not None:
            mask = mask.behind(padding[:, None, None])
        # Nothing is refused from here on: a call that raises leaves the cache as it was.
        if self.adaptive and self.key.dtype != key.dtype:
            for name, array in (("key", key), ("value", value)):
                setattr(self, name, getattr(self, name).to(array))
        if self.rolling:
            return self, self._roll(key, value, positions, hidden, mask)
        self._write(key, value, positions, hidden)
        mask = self._counting_tokens(mask)
        # Keys that nobody sees any more are left out; these are views, nothing is copied.
        seen = slice(min(mask.first_key(first), first), length)
        mask = mask.offset(first, keys=seen.start)
        if self.padded:
            mask = mask.restrict(self.visible[:, None, None, seen])
        return self, View(self.key[:, seen], self.value[:, seen], mask, self.positions[:, seen])

    def fill(
        self,
        key: Float[Tensor, "B S K D"],
        value: Float[Tensor, "B S K Dv"],
        *,
        attention_mask: Mask | Bool[Tensor, "..."] | None = None,
    ) -> KeyValueCache:
        """Replace all tokens by a context, for cross attention.

        Args:
            key: ``(B, S, K, D)``.
            value: ``(B, S, K, Dv)``.
            attention_mask: a mask of padding is remembered, as in `append`; any other mask is for the queries and
                ignored.

        Raises:
            ValueError: more tokens than the capacity, or shapes that do not fit; the cache is then unchanged.
        """
        cache_validation.check_cached(tuple(self.key.shape), tuple(key.shape))
        cache_validation.check_cached(tuple(self.value.shape), tuple(value.shape))
        cache_validation.check_room(0, key.shape[1], self.capacity)
        hidden, _ = self._split(full(), attention_mask, key.shape[1])
        if self.length and not torch.compiler.is_compiling():  # the old arrays stay for a call that fails
            for name in ("key", "value", "positions", "visible", "padding"):
                setattr(self, name, getattr(self, name).clone())
        return self.trim(0).append(key, value, mask=full(), attention_mask=hidden)[0]

    def _check_mask(self, mask: Mask, num_heads: int | None, tokens: int, length: int) -> None:
        """Refuse a mask before anything is written that the attention would refuse after it."""

        def check(array: Tensor) -> None:
            shape = tuple(array.shape)
            heads = num_heads or (shape[1] if len(shape) == 4 else 1)
            wanted = (self.key.shape[0], heads, tokens, length)
            validation.check_attention_mask(shape, functional.dtype_name(array), wanted)

        mask.check_arrays(check)
        mask.check_sizes(self.key.shape[0], length)

    def _write(self, key: Tensor, value: Tensor, positions: Tensor, hidden: Tensor | None) -> None:
        new = slice(self.length, self.length + key.shape[1])
        self.key[:, new] = key
        self.value[:, new] = value
        self.positions[:, new] = positions
        self._advance(new.stop, hidden)
        if hidden is not None:
            self.visible[:, : hidden.shape[1]] = hidden

    def _advance(self, length: int, hidden: Tensor | None = None) -> None:
        self.lost = self.lost and length > 0
        self.length = length
        if hidden is not None:
            self.padded = True
            self.padding[:] = left_padding(ArrayMask(hidden))

    def _counting_tokens(self, mask: Mask) -> Mask:
        """Return a mask that counts tokens behind the padding of each sequence."""
        return mask.behind(self.padding[:, None, None]) if self.padded else mask

    def _split(self, mask: Mask, attention_mask: object, length: int) -> tuple[Tensor | None, Mask]:
        """Return the ``(B, S)`` array that hides padding, or None, and the mask of this call."""
        device = self.key.device
        if attention_mask is None:
            return None, mask
        placed = functional.as_placed(attention_mask, device)
        if not isinstance(placed, ArrayMask):
            return None, mask.restrict(placed)
        array = placed.array
        if array.ndim == 2:
            shape, dtype = tuple(array.shape), functional.dtype_name(array)
            cache_validation.check_mask_of_cache(shape, dtype, self.key.shape[0], length, self.capacity)
            functional.look_at_mask(array, (self.key.shape[0], 1, 0, self.capacity))
            return array, mask
        return None, mask.restrict(array[..., :length] if array.ndim else array)

    def _roll(self, key: Tensor, value: Tensor, positions: Tensor, hidden: Tensor | None, mask: Mask) -> View:
        """Overwrite the oldest tokens, and return the keys, values and mask for the new ones."""
        batch, tokens, slots, first = key.shape[0], key.shape[1], self.key.shape[1], self.length
        length = first + tokens
        self._advance(length, hidden)
        mask = self._counting_tokens(mask)
        oldest = max(0, first - slots)
        old = torch.arange(oldest, first, device=key.device)
        # Of more new tokens than slots only the last remain: writing all would write slots twice, in no certain order.
        kept = torch.arange(max(first, length - slots), length, device=key.device)
        visible = torch.ones(1, tokens, device=key.device, dtype=torch.bool)
        if hidden is not None:
            visible = hidden[:, first:length]
            self.visible[:, old % slots] = hidden[:, oldest:first]
        arrays = (self.key, self.value, self.positions, self.visible)
        new = (key, value, positions.expand(batch, -1), visible.expand(batch, -1))
        if tokens > 1:
            # They may need what they are about to write over.
            seen = [torch.cat([array[:, old % slots], part], 1) for array, part in zip(arrays, new, strict=True)]
            mask = mask.offset(first, keys=oldest)
        for array, part in zip(arrays, new, strict=True):
            array[:, kept % slots] = part[:, kept - first].to(array.dtype)
        if tokens == 1:
            seen = [array[:, :length] for array in arrays]
            mask = self._of_slots(mask)
        if self.padded:
            mask = mask.restrict(seen[3][:, None, None])
        return View(seen[0], seen[1], mask, seen[2])

    def _of_slots(self, mask: Mask) -> Mask:
        """Return the mask of the last token over the slots of a rolling cache."""
        last, slots = self.length - 1, self.key.shape[1]
        seen = None
        if not torch.compiler.is_compiling():  # which would take the ends of a range as constants: a program per token
            seen = mask.visibility(range(last, last + 1), range(max(0, last + 1 - slots), last + 1))
        if seen:
            return full()
        # Slot i holds the last token whose number is i modulo S.
        numbers = last - (last - torch.arange(min(last + 1, slots), device=self.key.device)) % slots
        query = torch.full((1, 1), last, device=self.key.device)
        return as_mask(mask.picked(numbers).allowed(query, numbers[None]))

    def look(self, *, attention_mask: Mask | Bool[Tensor, "..."] | None = None) -> tuple[KeyValueCache, View]:
        """Return the cache and a view of all its tokens for queries from outside, as in cross attention.

        Args:
            attention_mask: as `append` takes it.

        Raises:
            ValueError: a cache without tokens, or a mask that does not fit.
        """
        validation.check_has_context(self.length > 0)
        hidden, mask = self._split(full(), attention_mask, self.length)
        if hidden is not None:
            self.visible[:, : hidden.shape[1]] = hidden
        self._advance(self.length, hidden)
        seen = slice(0, self.length)
        if self.padded:
            mask = mask.restrict(self.visible[:, None, None, seen])
        return self, View(self.key[:, seen], self.value[:, seen], mask, self.positions[:, seen])

    def next_positions(self) -> Int[Tensor, "B 1"]:
        """Return the position of each row's next token; the cache has at least one."""
        last = (self.length - 1) % self.key.shape[1]
        at = self.positions[:, last : last + 1]
        # A row that has had only padding stands at position 0: its first token gets 0, not 1.
        is_padding = ~self.visible[:, last : last + 1] & (at == 0)
        return at + 1 - is_padding.to(at.dtype)

    def trim(self, length: int) -> KeyValueCache:
        """Forget all tokens but the first `length`.

        Raises:
            TypeError: `length` is not an integer.
            ValueError: `length` is below 0 or above that of the cache, or a rolling cache has forgotten tokens it
                needs.
        """
        cache_validation.check_trim(length, self.length, self.key.shape[1], self.rolling)
        if not self.rolling:
            self.visible[:, length:].fill_(True)
        self.padding.clamp_(max=length)
        self._advance(length)
        return self

    def reorder(self, indices: Int[Tensor, "B"]) -> KeyValueCache:
        """Take the rows of the batch in another order, some several times or not at all, as beam search does.

        Raises:
            TypeError: indices that are not integers.
            ValueError: not one index per row, or an index out of range.
        """
        dtype = functional.dtype_name(indices, "indices")
        rows = () if torch.compiler.is_compiling() else indices.tolist()
        cache_validation.check_reorder(tuple(indices.shape), dtype, self.key.shape[0], rows)
        for array in (self.key, self.value, self.positions, self.visible, self.padding):
            array.copy_(array[beside(indices, array)])
        return self


register(
    KeyValueCache,
    ("key", "value", "positions", "visible", "padding", "length"),
    ("capacity", "rolling", "padded", "adaptive", "lost"),
)
