"""The mask of a block on every device: one description per distinct view, and the view of each device.

All devices run one program, in which positions are not known; a description is known for given positions alone. So the
program has one branch for every different view that a device may have of its block, and most have the same: all of it,
nothing, or the diagonal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attn_bridge.masks import ArrayMask, Mask
from attn_bridge.masks.description import Combined, OfArrays, Offset
from attn_bridge.masks.sequences import Equal, Padding

State = TypeVar("State")

HIDDEN = "hidden"
"""Replaces the mask of a block without visible keys."""


@dataclasses.dataclass(frozen=True)
class Views:
    """The different views of a block, and which of them is each device's.

    Attributes:
        masks: the mask of each view: a description with numbered places for arrays, None if all keys are visible, or
            `HIDDEN`.
        of_device: for each device, and before that for each turn, the number of its view.
    """

    masks: tuple[Mask | str | None, ...]
    of_device: tuple[int, ...]

    def switch(
        self, at: Array | int, run: Callable[[Mask | None, State], State], state: State, *, in_place: bool = False
    ) -> State:
        """Run the branch of a view, and return its new state; a hidden view returns the state unchanged.

        Args:
            at: the index in `of_device`.
            run: called with the mask and the state.
            state: the initial state.
            in_place: whether to leave the memory of the state untouched for a hidden view, at the cost of its
                derivatives.
        """
        seen = [mask for mask in self.masks if not isinstance(mask, str)]
        branches = [functools.partial(run, mask) for mask in seen]
        if len(self.masks) == 1:
            return branches[0](state) if seen else state
        if in_place and len(seen) < len(self.masks):
            numbers = np.cumsum([not isinstance(mask, str) for mask in self.masks]) - 1
            number = jnp.asarray(numbers)[jnp.asarray(self.of_device)[at]]
            times = jnp.asarray([0 if isinstance(mask, str) else 1 for mask in self.masks])[
                jnp.asarray(self.of_device)[at]
            ]
            # A branch would have a state of its own to return; a loop that runs once or not at all has not.
            return lax.fori_loop(0, times, lambda _, now: lax.switch(number, branches, now), state)
        every = [_same if isinstance(mask, str) else functools.partial(run, mask) for mask in self.masks]
        return lax.switch(jnp.asarray(self.of_device)[at], every, state)


def _same(state: State) -> State:
    return state


def views_of(
    mask: Mask | None, queries: int, keys: int, query_starts: Sequence[int], key_starts: Sequence[int]
) -> Views:
    """Return the views that devices have of blocks of `queries` and `keys`, by the starts of theirs."""
    numbers: dict[Hashable, int] = {}
    masks: list[Mask | str | None] = []
    of_device = []
    for start, key_start in zip(query_starts, key_starts, strict=True):
        seen = True if mask is None else mask.visibility(_range(start, queries), _range(key_start, keys))
        view: Mask | str | None = None
        if seen is False:
            view = HIDDEN
        elif seen is None:
            assert mask is not None
            view = _moved(mask, start, key_start)
        identity = _identity(view, queries, keys) if isinstance(view, Mask) else view
        if identity not in numbers:
            numbers[identity] = len(masks)
            masks.append(view)
        of_device.append(numbers[identity])
    return Views(tuple(masks), tuple(of_device))


def without_moved_arrays(mask: Mask) -> Mask:
    """Return a mask whose arrays cover the present queries and keys; the offset of a padding goes into its lengths."""
    if isinstance(mask, Combined):
        return type(mask)(tuple(map(without_moved_arrays, mask.parts)))
    if isinstance(mask, Offset) and isinstance(mask.mask, Padding):
        return Padding(jnp.asarray(mask.mask.lengths) - mask.keys)
    return mask


def local_arrays(mask: Mask | None, arrays: Sequence[Array], key_start: object, keys: int) -> tuple[Array, ...]:
    """Return the arrays of a mask for a block of keys: columns of those that have them, and lengths from its start."""
    lengths = set() if mask is None else set(_lengths(mask))
    return tuple(
        array - key_start if number in lengths else columns(array, key_start, keys)
        for number, array in enumerate(arrays)
    )


def columns(array: Array, start: Array | int, size: int) -> Array:
    """Return the columns of an array ``(b, h, t, s)`` from `start` on, where it has any."""
    return array if array.shape[-1] == 1 else lax.dynamic_slice_in_dim(array, start, size, array.ndim - 1)


def _range(start: int, size: int) -> range:
    return range(start, start + size)


def _lengths(mask: Mask) -> list[int]:
    """Return the numbers of the places where lengths of paddings stand."""
    if isinstance(mask, Combined):
        return [number for part in mask.parts for number in _lengths(part)]
    return [mask.lengths.number] if isinstance(mask, Padding) else []


def _moved(mask: Mask, start: int, key_start: int) -> Mask:
    """Return a mask as it is seen from these positions; its arrays are those of the block already."""
    if isinstance(mask, Combined):
        return type(mask)(tuple(_moved(part, start, key_start) for part in mask.parts))
    if isinstance(mask, (ArrayMask, Equal, Padding)):
        return mask
    return mask.offset(start, keys=key_start)


def _identity(mask: Mask, queries: int, keys: int) -> Hashable:
    """Return a key that is equal for masks that show the same of a block."""
    if isinstance(mask, Combined):
        return (type(mask), *(_identity(part, queries, keys) for part in mask.parts))
    if isinstance(mask, OfArrays):
        return mask
    interval = mask.interval(np.arange(queries))
    if interval is None:
        return mask
    starts, ends = (np.clip(one, 0, keys) for one in interval)
    is_empty = starts >= ends
    return np.where(is_empty, 0, starts).tobytes(), np.where(is_empty, 0, ends).tobytes()
