"""Checks of caches for decoding, shared by both backends: their sizes, room, masks, rows and order.

The rules of `validation` hold here, too. Letters: B batch, S tokens with those in the cache, K key heads, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from .validation import MAX_INDEX, Shape, check_integer, is_one_of, show


def check_cache(cache: object, package: str, array: str = "length") -> None:
    """Check that a cache is one of a backend and of a kind, or None.

    Args:
        cache: the argument.
        package: name of the backend, such as ``torch_attn``.
        array: an attribute that the kind has, such as ``key`` or ``state``.

    Raises:
        TypeError: it is something else, such as a cache of the other backend, or of a module of another kind.
    """
    if cache is None:
        return
    kind = type(cache)
    if not all(hasattr(cache, name) for name in ("length", "capacity", array)):
        raise TypeError(f"cache must be what init_cache of the module returns, got {kind.__name__}")
    if kind.__module__.partition(".")[0] in {"torch_attn", "jax_attn"} - {package}:
        raise TypeError(f"cache must be what init_cache of the module returns, got one of {kind.__module__}")


def check_caches(caches: object, blocks: int, *, pairs: bool = False) -> None:
    """Check a model's cache: a cache per block, which the block itself checks, or None.

    Args:
        caches: the argument.
        blocks: number of blocks.
        pairs: whether each has two parts, for self attention and for cross attention.

    Raises:
        TypeError: it is not a tuple or list, or of another model.
        ValueError: it has more or fewer.
    """
    if caches is None:
        return
    if not isinstance(caches, (tuple, list)):
        raise TypeError(f"cache must be what init_cache of the model returns, got {type(caches).__name__}")
    if len(caches) != blocks:
        raise ValueError(f"cache must hold one cache of each block ({blocks}), got {len(caches)}")
    other = next((one for one in caches if pairs and not (isinstance(one, tuple) and len(one) == 2)), None)
    if other is not None:
        raise TypeError(f"cache must be what init_cache of the model returns, got one of {type(other).__name__}")


def check_cache_sizes(batch_size: int, capacity: int, rolling: int | None = None) -> int:
    """Check the sizes of a new cache, and return how many slots it needs.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below 1, or beyond any index.
    """
    sizes = {"batch_size": batch_size, "capacity": capacity} | ({} if rolling is None else {"rolling": rolling})
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name} must be an integer, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1")
        if size > MAX_INDEX:
            raise ValueError(f"{name} ({size}) must be at most {MAX_INDEX}")
    return capacity if rolling is None else min(capacity, rolling)


def check_rows(batch: int, rows: int) -> None:
    """Check that the input has as many sequences as the cache.

    Raises:
        ValueError: the numbers differ.
    """
    if batch != rows:
        raise ValueError(f"batch of x ({batch}) must be the batch of the cache ({rows})")


def check_cached(cache: Shape, new: Shape) -> None:
    """Check new keys or values against those in a cache, ``(B, S, K, D)``: all sizes except S must be equal.

    Raises:
        ValueError: a size differs.
    """
    if len(new) != 4 or new[0] != cache[0]:
        raise ValueError(f"batch of x ({new[0]}) must be the batch of the cache ({cache[0]})")
    if new[2:] != cache[2:]:
        raise ValueError(f"new keys or values {show(new)} must have the heads and widths of the cache {show(cache)}")


def check_room(length: int, tokens: int, capacity: int) -> None:
    """Check that a cache of `length` tokens has room for new ones.

    Raises:
        ValueError: the total exceeds the capacity.
    """
    if length + tokens > capacity:
        raise ValueError(
            f"tokens in the cache ({int(length)}) and new ones ({int(tokens)}) must be at most capacity ({capacity})"
        )


def check_mask_of_cache(shape: Shape, dtype: str, rows: int, length: int | None, capacity: int) -> None:
    """Check a ``(B, S)`` mask that hides padding in a cache; `length` includes the new tokens, None if unknown.

    Raises:
        TypeError: `dtype` is not bool.
        ValueError: S is neither the number of tokens so far nor the capacity.
    """
    if dtype != "bool":
        raise TypeError(f"attention mask must have dtype bool (True = may be attended), got {dtype}")
    has_length = length is None or is_one_of(shape[1], (length, capacity))
    if not is_one_of(shape[0], (1, rows)) or shape[1] > capacity or not has_length:
        so_far = "" if length is None else f"tokens so far, cached and new ({length}), or "
        raise ValueError(
            f"2-D attention mask {show(shape)} must be (B, S) with B = {rows} and S the {so_far}capacity ({capacity})"
        )


def check_trim(length: int, tokens: int, slots: int, rolling: bool) -> None:
    """Check the number of tokens to which a cache of `tokens` is to be trimmed.

    Raises:
        TypeError: `length` is not an integer.
        ValueError: it is below 0 or above `tokens`, or a rolling cache has overwritten earlier tokens.
    """
    check_integer("length", length)
    if not 0 <= length <= tokens:
        raise ValueError(f"length ({length}) must be at least 0 and at most the tokens in the cache ({tokens})")
    if rolling and tokens > slots and not is_one_of(length, (0, tokens)):
        raise ValueError(
            f"length ({length}) must be 0 or {tokens}: the rolling cache keeps the last {slots} tokens only"
        )


def check_reorder(shape: Shape, dtype: str, rows: int, indices: Sequence[int] = ()) -> None:
    """Check the indices for reordering a cache's rows; `indices` is empty if their values are not available yet.

    Raises:
        TypeError: `dtype` is not an integer one.
        ValueError: not one index per row, or an index of no row.
    """
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"indices must have an integer dtype, got {dtype}")
    if shape != (rows,):
        raise ValueError(f"indices must have shape (B,) = ({rows},), got {show(shape)}")
    for index in indices:
        if not 0 <= index < rows:
            raise ValueError(f"index ({index}) must be at least 0 and below the batch of the cache ({rows})")
