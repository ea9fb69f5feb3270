"""Checks of a module's arguments, shared by both backends, so that both give the same errors.

Shapes are tuples of sizes, dtypes are names such as ``"float32"``; nothing here touches a framework. Letters: B batch,
H query heads, T query positions, S key positions.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]


MAX_INDEX = (1 << 63) - 1
"""The largest size that both frameworks can index, and that is a finite float."""


def is_floating(dtype: str) -> bool:
    """Return whether a dtype name is a real floating-point one."""
    return dtype.startswith(("float", "bfloat"))


def check_tokens(shape: Shape, dtype: str, *, d_in: int | None = None, context_length: int | None = None) -> None:
    """Check the input ``x`` of an attention module.

    Raises:
        TypeError: `dtype` is not floating point.
        ValueError: `shape` is not ``(T, d_in)`` or ``(B, T, d_in)``, has no token, or T exceeds `context_length`.
    """
    if not is_floating(dtype):
        raise TypeError(f"x must have a floating-point dtype, got {dtype}")
    if len(shape) not in (2, 3):
        raise ValueError(f"x must have shape (T, d_in) or (B, T, d_in), got {show(shape)}")
    if d_in is not None and shape[-1] != d_in:
        raise ValueError(f"last dimension of x ({shape[-1]}) must be d_in ({d_in})")
    if shape[-2] < 1:
        raise ValueError(f"x must hold at least 1 token, got shape {show(shape)}")
    if context_length is not None and shape[-2] > context_length:
        raise ValueError(f"number of tokens ({shape[-2]}) must be at most context_length ({context_length})")


def check_bounded(tokens: int, name: str, longest: int | None) -> None:
    """Check that a number of tokens that `jax.export` leaves open is compared with its bound.

    Raises:
        ValueError: no constraint bounds it.
    """
    if longest is None or isinstance(tokens, int):
        return
    try:
        bool(tokens <= longest)
    except Exception:  # JAX's own, which has no public name
        raise ValueError(
            f"number of tokens ({tokens}) must be at most {name} ({longest}): give jax.export.symbolic_shape "
            f'constraints=["{tokens} <= {longest}"]'
        ) from None


def check_dense(name: str, array: object) -> None:
    """Check that an array is not a nested tensor of torch, whose sequences differ in length.

    Raises:
        TypeError: it is nested.
    """
    if getattr(array, "is_nested", False):
        raise TypeError(
            f"{name} must be a dense tensor (pad it by torch.nested.to_padded_tensor, and give attention_mask= for the "
            "padding), got a nested one"
        )


def check_context(shape: Shape, dtype: str, x_shape: Shape, *, d_context: int) -> None:
    """Check the context of a cross attention against its input ``x``.

    Raises:
        TypeError: `dtype` is not floating point.
        ValueError: `shape` is not ``(S, d_context)`` or ``(B, S, d_context)`` as `x_shape` is ``(T, d_in)`` or ``(B, T,
            d_in)``, or has no token.
    """
    if not is_floating(dtype):
        raise TypeError(f"context must have a floating-point dtype, got {dtype}")
    if len(shape) != len(x_shape):
        raise ValueError(
            f"context must have shape (S, d_context) beside x (T, d_in), or (B, S, d_context) beside x (B, T, d_in), "
            f"got {show(shape)} beside {show(x_shape)}"
        )
    if shape[-1] != d_context:
        raise ValueError(f"last dimension of context ({shape[-1]}) must be d_context ({d_context})")
    if shape[-2] < 1:
        raise ValueError(f"context must hold at least 1 token, got shape {show(shape)}")
    if shape[:-2] != x_shape[:-2]:
        raise ValueError(f"batch of context ({shape[0]}) must be the batch of x ({x_shape[0]})")


def check_has_context(has_context: bool) -> None:
    """Check that a cross attention without a context argument has one in its cache.

    Raises:
        ValueError: the cache has none.
    """
    if not has_context:
        raise ValueError("context must be given, or a cache that holds one")


def check_features(shape: Shape, dtype: str, emb_dim: int) -> None:
    """Check the input ``x`` of a normalisation layer: ``(..., emb_dim)``, floating point.

    Raises:
        TypeError: `dtype` is not floating point.
        ValueError: the last dimension is not `emb_dim`.
    """
    if not is_floating(dtype):
        raise TypeError(f"x must have a floating-point dtype, got {dtype}")
    if not shape or shape[-1] != emb_dim:
        last = shape[-1] if shape else "none"
        raise ValueError(f"last dimension of x ({last}) must be emb_dim ({emb_dim})")


def check_attention_mask(shape: Shape, dtype: str, scores_shape: Shape) -> None:
    """Check a bool mask against scores of shape ``(B, H, T, S)``.

    A 2-D mask is always ``(B, S)``; a ``(T, S)`` one has to be given as ``(1, 1, T, S)``; 3-D is refused. Integers of
    shape ``(B, S)`` have become bool before.

    Raises:
        TypeError: `dtype` is not bool.
        ValueError: `shape` is 3-D or does not broadcast.
    """
    if dtype != "bool":
        raise TypeError(f"attention mask must have dtype bool (True = may be attended), got {dtype}")
    batch, _, _, keys = scores_shape
    if len(shape) == 3:
        raise ValueError(
            f"attention mask of 3 dimensions {show(shape)} is ambiguous: give (B, S) or a shape that broadcasts to "
            f"(B, H, T, S) = {show(scores_shape)}"
        )
    if len(shape) == 2:
        if not _broadcasts(shape, (batch, keys)):
            raise ValueError(
                f"2-D attention mask {show(shape)} must broadcast to (B, S) = {show((batch, keys))}; "
                "give a (T, S) mask as (1, 1, T, S)"
            )
    elif not _broadcasts(shape, scores_shape):
        raise ValueError(f"attention mask {_misfit(shape, scores_shape)}")


def is_padding_of_integers(shape: Shape, dtype: str) -> bool:
    """Return whether a mask has the shape ``(B, S)`` and an integer dtype, as tokenizers make it."""
    return len(shape) == 2 and dtype.startswith(("int", "uint"))


def check_zeros_and_ones(name: str, lowest: int, highest: int) -> None:
    """Check the least and the largest value of a padding mask of integers.

    Raises:
        ValueError: one is neither 0 nor 1.
    """
    if lowest < 0 or highest > 1:
        value = lowest if lowest < 0 else highest
        raise ValueError(f"{name} of integers must hold 0 (padding) and 1 (token) alone, got {value}")


def check_mask_rows(name: str, rows: int, batch: int) -> None:
    """Check that a mask has an entry per sequence of the batch, or a single one for all of them.

    Raises:
        ValueError: it has another number.
    """
    # `rows not in (1, batch)` is answered wrongly for the symbolic sizes of torch.compile.
    if rows != 1 and rows != batch:
        raise ValueError(f"{name} ({int(rows)}) must be as many as sequences in the batch ({int(batch)})")


def check_attention(
    query: Shape,
    key: Shape,
    value: Shape,
    dtypes: Sequence[str],
    *,
    dropout: float,
    scale: float | None,
    softcap: float | None,
) -> Shape:
    """Check the arguments of ``functional.dot_product_attention`` and return the shape ``(B, H, T, S)`` of its scores.

    Raises:
        TypeError: a dtype is not floating point.
        ValueError: shapes that do not fit each other, `dropout` outside [0, 1), `softcap` not positive, a
            number that is not finite.
    """
    for name, dtype in zip(("query", "key", "value"), dtypes, strict=True):
        if not is_floating(dtype):
            raise TypeError(f"{name} must have a floating-point dtype, got {dtype}")
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            raise ValueError(f"{name} must have shape (B, T, H, D), got {show(shape)}")
    if key[:3] != value[:3]:
        raise ValueError(f"key {show(key)} and value {show(value)} must agree in batch, length and heads")
    if key[1] < 1:
        raise ValueError(f"key must hold at least 1 position, got {show(key)}")
    if query[0] != key[0]:
        raise ValueError(f"batch of query ({query[0]}) must be the batch of key ({key[0]})")
    if query[3] != key[3]:
        raise ValueError(f"head_dim of query ({query[3]}) must be the head_dim of key ({key[3]})")
    if query[3] < 1:
        raise ValueError(f"head_dim of query ({query[3]}) must be at least 1")
    if key[2] < 1 or query[2] % key[2]:
        is_swapped = key[1] > 0 and query[1] % key[1] == 0
        advice = (
            "; the axes are (B, T, H, D), and these shapes fit (B, H, T, D): swap axes 1 and 2" if is_swapped else ""
        )
        raise ValueError(f"heads of query ({query[2]}) must be a multiple of the heads of key ({key[2]}){advice}")
    check_rate("dropout", dropout)
    if softcap is not None:
        check_number("softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap ({softcap}) must be positive and finite")
    if scale is not None:
        check_number("scale", scale)
        if not -math.inf < scale < math.inf:  # torch.compile traces comparisons of symbolic numbers, not isfinite
            raise ValueError(f"scale ({scale}) must be finite")
    return (query[0], query[2], query[1], key[1])


def check_scores_operand(name: str, shape: Shape, dtype: str, scores_shape: Shape) -> None:
    """Check a float operand that is added to the scores: it must broadcast to ``(B, H, T, S)``."""
    if not is_floating(dtype):
        raise TypeError(f"{name} must have a floating-point dtype, got {dtype}")
    if not _broadcasts(shape, scores_shape):
        raise ValueError(f"{name} {_misfit(shape, scores_shape)}")


def check_no_offset(kind: str, offset: bool) -> None:
    """Refuse a layer that adds something to its product where the matrix alone is asked for.

    Raises:
        ValueError: it does; gives the class of the layer.
    """
    if offset:
        raise ValueError(f"absorbed must be False for a layer ({kind}) that adds something to its product")


def check_sinks(shape: Shape, dtype: str, num_heads: int) -> None:
    """Check the sink logits: one per query head, floating point."""
    if not is_floating(dtype):
        raise TypeError(f"sinks must have a floating-point dtype, got {dtype}")
    if shape != (num_heads,):
        raise ValueError(f"sinks must have shape ({num_heads},), one logit per query head, got {show(shape)}")


def check_number(name: str, value: object) -> None:
    """Check that a value is a real number, Python's or NumPy's, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_integer(name: str, value: object) -> None:
    """Check that a value is an integer, Python's or one of an array library, and not a bool."""
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__ if dtype is None else str(dtype).removeprefix("torch.")
    is_whole = hasattr(value, "__index__") and (dtype is None or kind.startswith(("int", "uint")))
    if isinstance(value, bool) or not is_whole:
        raise TypeError(f"{name} must be an integer, got {kind}")


def check_32_bits(lowest: int, highest: int) -> None:
    """Check integers that JAX holds in int32.

    Raises:
        ValueError: an integer below ``-2**31``, or from ``2**31`` on.
    """
    for number in (lowest, highest):
        if not -(1 << 31) <= number < 1 << 31:
            raise ValueError(f"an integer ({number}) must fit in 32 bits without jax_enable_x64")


def check_rate(name: str, rate: float) -> None:
    """Check a dropout rate: a real number in [0, 1)."""
    check_number(name, rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{name} ({rate}) must be in [0, 1)")


def check_source(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    """Check a source of random numbers: None, or one of the kinds that the framework takes.

    Raises:
        TypeError: it is something else, such as the other framework's source or a seed.
    """
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__module__}.{type(value).__qualname__}")


def check_shared(is_shared: bool, is_given: bool) -> None:
    """Check that attention gets keys and values of an earlier layer exactly if it does not project them.

    Raises:
        ValueError: they are missing, or superfluous.
    """
    if is_shared and not is_given:
        raise ValueError("shared must be given to attention that does not project keys")
    if is_given and not is_shared:
        raise ValueError("shared must be None for attention that projects keys")


def check_table(is_shared: bool, shape: tuple[int, ...] | None, wanted: tuple[int, ...] | None) -> None:
    """Check that attention gets a table of relative biases exactly if its config shares one.

    Args:
        is_shared: whether it does.
        shape: of the table; None without one.
        wanted: buckets and heads; None for a config without relative bias.

    Raises:
        ValueError: it is missing or superfluous, or has another shape.
    """
    if is_shared != (shape is not None):
        need = "be given to attention whose position shares it" if is_shared else "be None: no position shares it"
        raise ValueError(f"relative_bias must {need}")
    if shape is not None and shape != wanted:
        raise ValueError(f"relative_bias must have shape (num_buckets, num_heads) = {wanted}, got {shape}")


def check_implementation(name: str | None, names: Sequence[str]) -> None:
    """Check the name of an implementation of attention."""
    if name is not None and name not in names:
        raise ValueError(f"implementation ({name!r}) must be one of {', '.join(map(repr, names))} or None")


def is_one_of(size: object, sizes: Iterable[object]) -> bool:
    """Return whether a size, or a shape, equals one of some.

    While `torch.compile` traces, ``in`` does not find one that it leaves open among numbers, nor the other way round.
    """
    return any(size == other for other in sizes)


def check_positions(
    shape: Shape, dtype: str, batch: int, tokens: int, rows: int = 0, *, every_row: bool = False
) -> None:
    """Check the positions of tokens: integers ``(T,)``, ``(B, T)``, or with several positions per token ``(R, B, T)``.

    Args:
        shape: of the positions.
        dtype: of the positions.
        batch: B.
        tokens: T.
        rows: R; 0 where a token has one position.
        every_row: whether the rows can't be left out.

    Raises:
        TypeError: `dtype` is not an integer one.
        ValueError: another shape.
    """
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"positions must have an integer dtype, got {dtype}")
    if rows and len(shape) == 3 and shape[0] == rows and is_one_of(shape[1], (1, batch)) and shape[2] == tokens:
        return
    if rows and (every_row or len(shape) > 2):
        raise ValueError(f"positions must have shape (rows, B, T) = {show((rows, batch, tokens))}, got {show(shape)}")
    if len(shape) not in (1, 2) or not _broadcasts(shape, (batch, tokens)) or shape[-1] != tokens:
        raise ValueError(f"positions must have shape (T,) or (B, T) = {show((batch, tokens))}, got {show(shape)}")


def check_rows_given(wanted: Shape | None) -> None:
    """Check that a call without positions needs none.

    Args:
        wanted: ``(rows, B, T)`` of positions that have no default; None if they have one.

    Raises:
        ValueError: they have none.
    """
    if wanted is not None:
        raise ValueError(f"positions of an image must be given, of shape (rows, B, T) = {show(wanted)}")


def _misfit(shape: Shape, scores_shape: Shape) -> str:
    """Return a message for a mask that does not fit the scores; mention swapped axes if it fits ``(B, H, T, D)``."""
    batch, heads, queries, _ = scores_shape
    text = f"{show(shape)} must broadcast to (B, H, T, S) = {show(scores_shape)}"
    if not _broadcasts(shape, (batch, queries, heads, heads)):
        return text
    return f"{text}; the axes of query are (B, T, H, D), and this fits (B, H, T, D): swap axes 1 and 2"


def _broadcasts(shape: Shape, target: Shape) -> bool:
    if len(shape) > len(target):
        return False
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return all(is_one_of(size, (1, wanted)) for size, wanted in sizes)


def show(shape: Shape) -> str:
    """Return a shape as a tuple of plain integers."""
    return str(tuple(int(size) for size in shape))
