"""Drawing tokens one after another: the prompt at once, then each new token with a cache.

Twins: `jax_attn.decoding.generation`, `torch_attn.decoding.generation`. Letters: B batch, T prompt, N prompt and new
tokens, V size of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from attn_bridge.generation import Options, check_length, check_padding
from attn_bridge.specs.model import check_ids, check_range

from .. import functional
from ..random import RandomSource, TorchRngs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "eos"],
    meta_fields=["max_new_tokens"],
)
@dataclasses.dataclass(frozen=True)
class _Options(Options):
    """Options whose numbers a compiled program takes as arguments, so that other numbers compile no other."""


def generate(
    model: nnx.Module,
    tokens: Int[Array, "B T"],
    options: Options,
    rng: RandomSource = None,
    attention_mask: Bool[Array, "B T"] | None = None,
    source: tuple[Array, ...] = (),
    source_mask: Bool[Array, "B S"] | None = None,
) -> Int[Array, "B N"]:
    """Return prompt and new tokens; see `DecoderModel.generate` and `EncoderDecoderModel.generate`.

    One number per row and token is drawn from `rng` beforehand, so that the twins draw alike. `source` is passed to the
    model in front of the tokens in the first step; later steps pass None instead.
    """
    start = _begin(model, tokens, options, rng, attention_mask, source, source_mask)
    model, prompt, padding, logits, cache, numbers, known_options = start
    sequences = jnp.asarray(np.pad(prompt, ((0, 0), (0, len(numbers)))))
    return _continue(model, sequences, padding, logits, cache, numbers, prompt.shape[1], known_options, len(source))


def stream(
    model: nnx.Module,
    tokens: Int[Array, "B T"],
    options: Options,
    rng: RandomSource = None,
    attention_mask: Bool[Array, "B T"] | None = None,
    source: tuple[Array, ...] = (),
    source_mask: Bool[Array, "B S"] | None = None,
) -> Iterator[Int[Array, "B"]]:
    """Return an iterator over the new tokens, until every row has ended."""
    start = _begin(model, tokens, options, rng, attention_mask, source, source_mask)

    def each() -> Iterator[tuple[Array, Array]]:
        model, prompt, padding, logits, cache, numbers, known_options = start
        (batch, length), new = prompt.shape, len(numbers)
        is_done = jnp.zeros(batch, bool)
        for step in range(new):
            token, is_done = _draw_alone(logits, numbers[step], known_options, is_done)
            yield token, is_done
            if step + 1 < new:
                logits, cache = _advance_alone(model, token, length + step - padding, cache, len(source))

    return until_ended(each())


def until_ended(steps: Iterator[tuple[Array, Array]]) -> Iterator[Int[Array, "B"]]:
    """Yield the token of each step until every row has ended."""
    for token, is_done in steps:
        yield token
        if bool(is_done.all()):
            return


def ended(token: Int[Array, "B"], eos: int | None, is_done: Bool[Array, "B"]) -> tuple[Array, Array]:
    """Return `eos` for the rows that have ended and their token for the others, and which rows have ended with it."""
    if eos is None:
        return token, is_done
    token = jnp.where(is_done, eos, token)
    return token, is_done | (token == eos)


def _begin(
    model: nnx.Module,
    tokens: Int[Array, "B T"],
    options: Options,
    rng: RandomSource,
    attention_mask: Bool[Array, "B T"] | None,
    source: tuple[Array, ...],
    source_mask: Bool[Array, "B S"] | None,
) -> tuple[Any, ...]:
    """Check the arguments and read the prompt; return all that the tokens are drawn with."""
    check_ids(functional.dtype_name(tokens, "tokens"), functional.shape_of(tokens), name="tokens")
    prompt = _numbers_of("tokens", tokens)
    check_range("tokens", int(prompt.min()), int(prompt.max()), model.config.vocab_size)
    options = options.checked(model.config.vocab_size)
    _check_source(rng)
    batch, length = prompt.shape
    new = options.max_new_tokens
    padding = np.zeros((batch, 1), np.int32)
    attention_mask = functional.as_visible(attention_mask, "attention_mask")
    if attention_mask is not None:
        dtype = functional.dtype_name(attention_mask, "attention_mask")
        mask = _numbers_of("attention_mask", attention_mask)
        check_padding(functional.shape_of(attention_mask), dtype, mask, (batch, length))
        padding = (length - mask.sum(-1, keepdims=True)).astype(np.int32)
    check_length(length - int(padding.min()), new, model.config.num_positions)
    is_greedy = options.temperature is None
    numbers = jnp.zeros((new, batch)) if is_greedy else _uniform(rng, (new, batch))
    prompt = prompt.astype(np.int32)
    model = nnx.view(model, deterministic=True, raise_if_not_found=False)
    arguments = {} if source_mask is None else {"source_mask": source_mask}
    logits, cache = _read(model, source, prompt, padding, {"attention_mask": attention_mask, **arguments}, new)
    return model, prompt, padding, logits, cache, numbers, _Options(**vars(options))


def _draw(logits: Array, numbers: Array, options: Options, is_done: Array) -> tuple[Array, Array]:
    """Return a token of each row, and whether the rows have ended with it."""
    token = pick(logits, numbers, options).astype(jnp.int32)
    return ended(token, options.eos, is_done)


def _advance(model: nnx.Module, token: Array, at: Array, cache: object, sources: int) -> tuple[Array, object]:
    """Return the logits that follow a token, and the cache with it."""
    logits, cache = model(*[None] * sources, token[:, None], positions=at, cache=cache)
    return logits[:, -1], cache


_draw_alone = jax.jit(_draw)
_advance_alone = jax.jit(_advance, static_argnums=4)


@functools.partial(jax.jit, static_argnums=5)
def _read(
    model: nnx.Module, source: tuple[Array, ...], tokens: Array, padding: Array, masks: Mapping[str, object], new: int
) -> tuple[Array, object]:
    """Return the logits of the last token of a prompt, and a cache with room for the new tokens."""
    batch, length = tokens.shape
    cache = model.init_cache(batch, length + new)
    at = jnp.maximum(jnp.arange(length, dtype=jnp.int32) - padding, 0)
    logits, cache = model(*source, tokens, positions=at, cache=cache, last_only=True, **masks)
    return logits[:, -1], cache


@functools.partial(jax.jit, static_argnums=8)
def _continue(
    model: nnx.Module,
    sequences: Array,
    padding: Array,
    logits: Array,
    cache: object,
    numbers: Array,
    prompt_length: Array,
    options: Options,
    sources: int,
) -> Array:
    """Return all tokens: each is drawn from the logits, and read for the next ones, in one program."""
    is_done = jnp.zeros(sequences.shape[0], bool)
    new = numbers.shape[0]

    def draw(step: Array, sequences: Array, logits: Array, is_done: Array) -> tuple[Array, Array, Array]:
        token, is_done = _draw(logits, numbers[step], options, is_done)
        return lax.dynamic_update_slice_in_dim(sequences, token[:, None], prompt_length + step, 1), token, is_done

    def advance(step: Array, state: Any) -> Any:
        sequences, logits, cache, is_done = state
        sequences, token, is_done = draw(step, sequences, logits, is_done)
        at = prompt_length + step - padding
        logits, cache = _advance(model, token, at, cache, sources)
        return sequences, logits, cache, is_done

    sequences, logits, _, is_done = lax.fori_loop(0, new - 1, advance, (sequences, logits, cache, is_done))
    return draw(jnp.asarray(new - 1), sequences, logits, is_done)[0]


def pick(logits: Float[Array, "B V"], numbers: Float[Array, "B"], options: Options) -> Int[Array, "B"]:
    """Return a token of each row: the likeliest, or the one where a number from [0, 1) falls among the likely ones.

    Args:
        logits: ``(B, V)``.
        numbers: ``(B,)``, in [0, 1).
        options: how to draw, checked.
    """
    if options.temperature is None:
        return logits.argmax(-1)
    logits = functional.widen(logits)
    logits = (logits - logits.max(-1, keepdims=True)) / options.temperature
    if options.top_k is not None:
        least = jnp.sort(logits, -1, descending=True)[:, options.top_k - 1, None]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if options.top_p is not None:
        ordered = jnp.sort(logits, -1, descending=True)
        likely = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(likely, -1) - likely
        least = jnp.where(before < options.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    below = jnp.cumsum(jax.nn.softmax(logits, -1), -1)
    total = below[:, -1:]
    return ((below <= numbers[:, None].astype(below.dtype) * total) & (below < total)).sum(-1)


def _numbers_of(name: str, array: ArrayLike) -> np.ndarray:
    """Return an array on the host, where its numbers can be checked."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name} must be an array, not a tracer: call generate outside jax.jit, it compiles itself")
    return np.asarray(array)


def _check_source(rng: RandomSource) -> None:
    if rng is not None and not isinstance(rng, (Array, np.ndarray, nnx.RngStream, nnx.Rngs, TorchRngs)):
        raise TypeError(f"rng must be a key, a stream, an nnx.Rngs or a TorchRngs, got {type(rng).__name__}")


def _uniform(rng: RandomSource, shape: tuple[int, int]) -> Float[Array, "N B"]:
    """Return float32 numbers from [0, 1)."""
    if rng is None:
        raise ValueError(
            "rng (None) must be a key, a stream of nnx.Rngs, or a TorchRngs where temperature is above 0; "
            "give rng=jax.random.key(0)"
        )
    if isinstance(rng, TorchRngs):
        return rng.uniform(shape)
    return jax.random.uniform(rng() if callable(rng) else rng, shape, jnp.float32)
