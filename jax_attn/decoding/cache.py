"""The key/value cache of decoding: keys and values of earlier tokens, in slots filled from the left.

The twin is `torch_attn.decoding.cache`. A cache is a pytree of fixed shapes, and methods return a new one: a jit
compiles one program for all steps and, if the old cache is donated, writes in place. All rows of a batch use the same
slots: shorter rows are padded, and the mask of their padding is remembered. Letters: B batch, T new tokens, S slots, K
key/value heads, D width of a key, Dv of a value.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attn_bridge import cache_validation, validation
from attn_bridge.masks import ArrayMask, Mask, causal, full, left_padding

from .. import functional, implementations
from ..operations import writing
from . import running


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """The keys and values that new queries attend to, as arguments of `functional.dot_product_attention`.

    Attributes:
        key: ``(B, S, K, D)``.
        value: ``(B, S, K, Dv)``.
        mask: which of the new queries sees which of these keys.
        positions: ``(B, S)``, the positions of these keys.
    """

    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K Dv"]
    mask: Mask
    positions: Int[Array, "B S"]


@dataclasses.dataclass(frozen=True, eq=False)
class SharedKeys:
    """The keys and values of a layer for the tokens of a call, which later layers attend to as well.

    Attributes:
        view: those of all tokens so far, and the mask of the new ones.
        at: positions of the new tokens, as the layer took them.
    """

    view: View
    at: Int[Array, "... T"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "positions", "visible", "padding", "length"],
    meta_fields=["capacity", "rolling", "adaptive"],
)
@dataclasses.dataclass(frozen=True, eq=False)
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
        adaptive: whether keys and values determine the dtype.
    """

    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K Dv"]
    positions: Int[Array, "B S"]
    visible: Bool[Array, "B S"]
    padding: Int[Array, "B 1"]
    length: Int[Array, ""]
    capacity: int
    rolling: bool = False
    adaptive: bool = False

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
        dtype: DTypeLike | None = None,
    ) -> KeyValueCache:
        """Allocate a cache without tokens.

        Args:
            batch_size: B.
            capacity: most tokens that it takes.
            num_kv_heads: K.
            head_dim: D.
            value_dim: Dv; `head_dim` by default.
            rolling: number of last tokens to keep, for masks that reach no further; None keeps all.
            dtype: of keys and values; None is that of the first ones.

        Raises:
            ValueError: a size below 1.
        """
        slots = cache_validation.check_cache_sizes(running.least_size(batch_size), capacity, rolling)
        value_dim = head_dim if value_dim is None else value_dim
        return cls(
            jnp.zeros((batch_size, slots, num_kv_heads, head_dim), dtype),
            jnp.zeros((batch_size, slots, num_kv_heads, value_dim), dtype),
            jnp.zeros((batch_size, slots), int),
            jnp.ones((batch_size, slots), bool),
            jnp.zeros((batch_size, 1), jnp.int32),
            jnp.zeros((), jnp.int32),
            capacity,
            rolling is not None,
            dtype is None,
        )

    def append(
        self,
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K Dv"],
        *,
        mask: Mask | None = None,
        attention_mask: Mask | Bool[Array, "..."] | None = None,
        positions: Int[Array, "... T"] | None = None,
        num_heads: int | None = None,
    ) -> tuple[KeyValueCache, View]:
        """Append new tokens.

        Args:
            key: ``(B, T, K, D)``.
            value: ``(B, T, K, Dv)``.
            mask: which token attends to which, by the numbers of the tokens; `causal()` by default.
            attention_mask: ``(B, S)`` bool over all tokens so far, the new ones included (or up to the capacity, so
                that its shape stays the same), which hides padding from now on; or a restriction of `mask` for this
                call alone: a description, or a bool array ``(B, H, T, S)``.
            positions: ``(T,)`` or ``(B, T)``; the numbers of the tokens by default.
            num_heads: of the queries, for the check of masks that differ between heads; None leaves that to the
                attention.

        Returns:
            The new cache, and the keys, values and mask for the new tokens.

        Raises:
            ValueError: more tokens than the capacity, or shapes that do not fit. A jit knows the number of tokens so
                far, and whether a mask is for as many, only when it runs: it raises then, and its results are NaN.
        """
        cache_validation.check_cached(self.key.shape, key.shape)
        cache_validation.check_cached(self.value.shape, value.shape)
        if self.adaptive and self.key.dtype != key.dtype:
            widened = self.key.astype(key.dtype), self.value.astype(value.dtype)
            return dataclasses.replace(self, key=widened[0], value=widened[1]).append(
                key, value, mask=mask, attention_mask=attention_mask, positions=positions, num_heads=num_heads
            )
        key, value = key.astype(self.key.dtype), value.astype(self.value.dtype)
        first, tokens = self.length, key.shape[1]
        earlier = int(first) if running.is_known(first) else None
        validation.check_bounded((earlier or 0) + tokens, "capacity", self.capacity)
        cache_validation.check_room(earlier or 0, tokens, self.capacity)
        if positions is None:
            positions = first + jnp.arange(tokens, dtype=jnp.int32)
        dtype = functional.dtype_name(positions, "positions")
        validation.check_positions(jnp.shape(positions), dtype, key.shape[0], tokens)
        hidden, mask = self._split(causal() if mask is None else mask, attention_mask, tokens)
        self._check_mask(mask, num_heads, tokens, (earlier or 0) + tokens)
        if earlier is None:
            key, value = self._check_length(key, value, mask, hidden, num_heads)
        # Of a padding that holds for this call alone; that which the cache remembers is counted below.
        padding = left_padding(mask)
        if padding is not None:
            mask = mask.behind(padding[:, None, None])
        cache = dataclasses.replace(self, positions=self._positions())._padded(hidden)
        positions = jnp.broadcast_to(positions, key.shape[:2]).astype(cache.positions.dtype)
        if self.rolling:
            return cache._roll(key, value, positions, hidden, mask)
        cache = cache._write(key, value, positions, hidden)
        if earlier is not None and running.least_size(tokens) > 1:
            return cache, cache._known_view(earlier, tokens, mask)
        return cache, cache._view(tokens, mask)

    def fill(
        self,
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K Dv"],
        *,
        attention_mask: Mask | Bool[Array, "..."] | None = None,
    ) -> KeyValueCache:
        """Replace all tokens by a context, for cross attention.

        Args:
            key: ``(B, S, K, D)``.
            value: ``(B, S, K, Dv)``.
            attention_mask: a mask of padding is remembered, as in `append`; any other mask is for the queries and
                ignored.

        Raises:
            ValueError: more tokens than the capacity, or shapes that do not fit.
        """
        cache_validation.check_cached(self.key.shape, key.shape)
        cache_validation.check_cached(self.value.shape, value.shape)
        cache_validation.check_room(0, key.shape[1], self.capacity)
        cache = self.trim(0)
        hidden, _ = cache._split(full(), attention_mask, key.shape[1])
        return cache.append(key, value, mask=full(), attention_mask=hidden)[0]

    def _check_mask(self, mask: Mask, num_heads: int | None, tokens: int, length: int) -> None:
        """Refuse a mask here that the attention would not: keys are picked from its columns by their numbers.

        A jit does not know how many of the columns it needs: there may be more of them than `length`.
        """

        def check(array: Array) -> None:
            heads = num_heads or (array.shape[1] if array.ndim == 4 else 1)
            keys = length
            if array.ndim and not running.is_known(self.length):
                keys = min(array.shape[-1], self.capacity)
                keys = keys if keys >= length else length  # `max` asks for more than is known of an open length
            wanted = (self.key.shape[0], heads, tokens, keys)
            validation.check_attention_mask(array.shape, functional.dtype_name(array), wanted)

        mask.check_arrays(check)
        mask.check_sizes(self.key.shape[0], length)

    def _check_length(
        self, key: Array, value: Array, mask: Mask, hidden: Array | None, num_heads: int | None
    ) -> tuple[Array, Array]:
        """Raise while a compiled function runs, and give it no numbers to go on with."""
        tokens = key.shape[1]

        def check(first: int) -> None:
            cache_validation.check_room(first, tokens, self.capacity)
            self._check_hidden(hidden, first + tokens)
            self._check_mask(mask, num_heads, tokens, first + tokens)

        def is_too_long(length: int) -> bool:
            try:
                self._check_mask(mask, num_heads, tokens, length)
            except ValueError:
                return True
            return False

        length, longest = self.length + tokens, self.capacity
        if next(mask.arrays(), None) is not None:
            longest = bisect.bisect_left(range(longest + 1), True, key=is_too_long) - 1
        fits = running.raise_unless((length <= longest) & self._is_hidden_of(hidden, length), check, self.length)
        return jnp.where(fits, key, jnp.nan), jnp.where(fits, value, jnp.nan)

    def _check_hidden(self, hidden: Array | None, length: int | None) -> None:
        """Check the ``(B, S)`` mask of padding, if any, against all tokens; None is a number that is not known yet."""
        if hidden is not None:
            shape, dtype = hidden.shape, functional.dtype_name(hidden)
            cache_validation.check_mask_of_cache(shape, dtype, self.key.shape[0], length, self.capacity)

    def _is_hidden_of(self, hidden: Array | None, length: Array) -> Array | bool:
        """Return what `_check_hidden` checks, for a number of tokens that a jit knows when it runs."""
        return hidden is None or hidden.shape[1] == self.capacity or hidden.shape[1] == length

    def _write(self, key: Array, value: Array, positions: Array, hidden: Array | None) -> KeyValueCache:
        first, visible = self.length, self.visible
        if hidden is not None:
            hidden = jnp.broadcast_to(hidden, (visible.shape[0], hidden.shape[1]))
            visible = lax.dynamic_update_slice_in_dim(visible, hidden, 0, 1)
        return dataclasses.replace(
            self,
            key=writing.put(self.key, key, first),
            value=writing.put(self.value, value, first),
            positions=lax.dynamic_update_slice_in_dim(self.positions, positions, first, 1),
            visible=visible,
            length=first + key.shape[1],
        )

    def _padded(self, hidden: Array | None) -> KeyValueCache:
        """Return the cache with the padding of a mask ``(B, S)`` in front of its sequences."""
        if hidden is None:
            return self
        return dataclasses.replace(
            self, padding=jnp.broadcast_to(left_padding(ArrayMask(hidden)), self.padding.shape).astype(jnp.int32)
        )

    def _counting_tokens(self, mask: Mask) -> Mask:
        """Return a mask that counts tokens behind the padding of each sequence."""
        return mask.behind(self.padding[:, None, None])

    def _known_view(self, first: int, tokens: int, mask: Mask) -> View:
        """Return the view of the last tokens if their numbers are known, so that no mask array is needed."""
        if mask.counts_tokens and functional.may_hide(self.padding[:, 0] == 0):
            mask = self._counting_tokens(mask)
        seen = slice(min(mask.first_key(first), first), first + tokens)
        mask = mask.offset(first, keys=seen.start).restrict(self.visible[:, None, None, seen])
        return View(self.key[:, seen], self.value[:, seen], mask, self.positions[:, seen])

    def _view(self, tokens: int, mask: Mask) -> View:
        """Return the view of the last tokens, whatever their numbers: all slots, or as many as a window needs.

        `implementations.few_queries` skips hidden keys for a few queries, so that slicing here would only cost a copy.
        """
        slots, start = self.key.shape[1], jnp.int32(0)
        arrays = [self.key, self.value, self.positions, self.visible]
        span = slots if mask.reach is None else mask.reach + tokens - 1
        if running.least_size(tokens) > implementations.few_queries.MAX_QUERIES and span < slots:
            start = jnp.clip(self.length - span, 0, slots - span)
            arrays = [lax.dynamic_slice_in_dim(one, start, span, 1) for one in arrays]
        numbers = start + jnp.arange(arrays[0].shape[1])
        return _masked_view(arrays, self, tokens, numbers, mask)

    def _split(self, mask: Mask, attention_mask: Mask | Array | None, tokens: int) -> tuple[Array | None, Mask]:
        """Return the ``(B, S)`` array that hides padding, or None, and the mask of this call."""
        mask = mask.with_arrays(jnp.asarray)
        if attention_mask is None:
            return None, mask
        placed = functional.as_placed(attention_mask)
        if not isinstance(placed, ArrayMask):
            return None, mask.restrict(placed)
        array = placed.array
        length = None if isinstance(self.length, jax.core.Tracer) else int(self.length) + tokens
        if array.ndim == 2:
            self._check_hidden(array, length)
            functional.look_at_mask(array, (self.key.shape[0], 1, 0, self.capacity))
            return array, mask
        return None, mask.restrict(array[..., :length] if array.ndim else array)

    def _roll(
        self, key: Array, value: Array, positions: Array, hidden: Array | None, mask: Mask
    ) -> tuple[KeyValueCache, View]:
        """Overwrite the oldest tokens, and return the keys, values and mask for the new ones."""
        tokens, slots, first = key.shape[1], self.key.shape[1], self.length
        length, old_visible = first + tokens, self.visible
        new_numbers = first + jnp.arange(tokens)
        old_numbers = _numbers(first, slots)
        visible = jnp.ones(key.shape[:2], bool)
        if hidden is not None:
            hidden = jnp.broadcast_to(hidden, (key.shape[0], hidden.shape[1]))
            visible, old_visible = hidden[:, new_numbers], hidden[:, old_numbers]
        arrays = (self.key, self.value, self.positions, old_visible)
        new = (key, value, positions, visible)
        if tokens == 1:
            written = [writing.put(one, part, first % slots) for one, part in zip(arrays, new, strict=True)]
        else:
            # Of more new tokens than slots only the last remain: writing all would write slots twice, in no certain
            # order.
            at = new_numbers[-slots:] % slots
            written = [writing.put_at(one, part[:, -slots:], at) for one, part in zip(arrays, new, strict=True)]
        key, value, positions, visible = written
        cache = dataclasses.replace(self, key=key, value=value, positions=positions, visible=visible, length=length)
        if tokens == 1:
            return cache, _masked_view(written, cache, tokens, _numbers(length, slots), mask)
        # Several new tokens may need what they write over.
        seen = [jnp.concatenate([one, part], 1) for one, part in zip(arrays, new, strict=True)]
        return cache, _masked_view(seen, cache, tokens, jnp.concatenate([old_numbers, new_numbers]), mask)

    def look(self, *, attention_mask: Mask | Bool[Array, "..."] | None = None) -> tuple[KeyValueCache, View]:
        """Return the cache and a view of all its tokens for queries from outside, as in cross attention.

        Args:
            attention_mask: as `append` takes it.

        Raises:
            ValueError: a cache without tokens, or a mask that does not fit. A jit knows the former when it runs: it
                raises then, and the values of the view are NaN.
        """
        hidden, mask = self._split(full(), attention_mask, 0)
        cache, has_context = self, self.length > 0
        if running.is_known(self.length):
            validation.check_has_context(bool(has_context))
        else:
            fits = has_context & self._is_hidden_of(hidden, self.length)
            has_context = running.raise_unless(fits, functools.partial(self._check_context, hidden), self.length)
            # One slot that everybody sees will do, and costs no copy of the others.
            first = jnp.where(has_context, self.value[:, 0], jnp.nan)
            cache = dataclasses.replace(self, value=self.value.at[:, 0].set(first))
        if hidden is not None:
            hidden = jnp.broadcast_to(hidden, (self.visible.shape[0], hidden.shape[1]))
            cache = dataclasses.replace(cache, visible=lax.dynamic_update_slice_in_dim(self.visible, hidden, 0, 1))
        arrays = [cache.key, cache.value, cache.positions]
        visible = (cache.visible & (jnp.arange(self.visible.shape[1]) < self.length)) | ~has_context
        if running.is_known(self.length):
            *arrays, visible = (one[:, : int(self.length)] for one in (*arrays, visible))
        return cache, View(arrays[0], arrays[1], mask.restrict(visible[:, None, None]), arrays[2])

    def _check_context(self, hidden: Array | None, length: int) -> None:
        validation.check_has_context(length > 0)
        self._check_hidden(hidden, length)

    def next_positions(self) -> Int[Array, "B 1"]:
        """Return the position of each row's next token."""
        last = (self.length - 1) % self.key.shape[1]
        at, visible = (lax.dynamic_slice_in_dim(array, last, 1, 1) for array in (self._positions(), self.visible))
        # A row that has had only padding stands at position 0: its first token gets 0, not 1.
        is_padding = ~visible & (at == 0)
        return jnp.where(self.length > 0, at + 1 - is_padding.astype(at.dtype), 0)

    def _positions(self) -> Int[Array, "B S"]:
        """Return the positions in 32 bits if JAX has no others now: a cache made with x64 may be continued without."""
        return self.positions.astype(jax.dtypes.canonicalize_dtype(self.positions.dtype))

    def trim(self, length: int) -> KeyValueCache:
        """Forget all tokens but the first `length`.

        Raises:
            TypeError: `length` is not an integer.
            ValueError: `length` is below 0 or above that of the cache, or a rolling cache has forgotten tokens it
                needs. A jit knows that when it runs: it raises then, and keys and values are NaN.
        """
        validation.check_integer("length", length)
        slots, key, value = self.key.shape[1], self.key, self.value
        if running.is_known(self.length, length):
            cache_validation.check_trim(length, int(self.length), slots, self.rolling)
        elif not running.is_known(length) or length != 0:
            fits = (length >= 0) & (length <= self.length)
            if self.rolling:
                fits = fits & ((self.length <= slots) | (length == 0) | (length == self.length))
            check = functools.partial(cache_validation.check_trim, slots=slots, rolling=self.rolling)
            fits = running.raise_unless(fits, check, length, self.length)
            key, value = jnp.where(fits, key, jnp.nan), jnp.where(fits, value, jnp.nan)
        length = jnp.clip(jnp.asarray(length, jnp.int32), 0, self.length)
        visible = self.visible if self.rolling else self.visible | (jnp.arange(slots) >= length)
        padding = jnp.minimum(self.padding, length)
        return dataclasses.replace(self, key=key, value=value, length=length, visible=visible, padding=padding)

    def reorder(self, indices: Int[Array, "B"]) -> KeyValueCache:
        """Take the rows of the batch in another order, some several times or not at all, as beam search does.

        Raises:
            TypeError: indices that are not integers.
            ValueError: not one index per row, or one of no row. A jit knows the latter when it runs: it raises then,
                and such a row is NaN.
        """
        at = running.known_rows(indices, self.key.shape[0])
        names = ("key", "value", "positions", "visible", "padding")
        arrays = {name: jnp.take(getattr(self, name), at, 0, mode="fill") for name in names}
        return dataclasses.replace(self, **arrays)


def _numbers(length: Array, slots: int) -> Array:
    """Return the number of the token in each slot of a rolling cache; below 0 where none has been yet."""
    last = length - 1
    return last - (last - jnp.arange(slots)) % slots


def _masked_view(stored: Sequence[Array], cache: KeyValueCache, tokens: int, numbers: Array, mask: Mask) -> View:
    """Return the view that the last `tokens` of a cache have of keys of these `numbers`; empty slots are hidden.

    `stored` are those keys, their values and positions, and whether they are visible.
    """
    key, value, positions, visible = stored
    queries = cache.length - tokens + jnp.arange(tokens)
    mask = cache._counting_tokens(mask)
    allowed = mask.picked(numbers).allowed(queries[:, None], numbers[None, :])
    allowed = allowed & (numbers >= 0) & (numbers < cache.length)
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape) & visible[:, None, None, :]
    # Beyond the capacity, nobody shall miss the NaN.
    return View(key, value, ArrayMask(allowed | (cache.length > cache.capacity)), positions)
