"""Drawing tokens one after another: the prompt at once, then each new token with a cache.

Twins: `jax_attn.decoding.generation`, `torch_attn.decoding.generation`. Letters: B batch, T prompt, N prompt and new
tokens, V size of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.generation import Options, check_length, check_padding
from attn_bridge.specs.model import check_ids, check_range

from .. import functional
from ..random import JaxRngs, RandomSource, RngStream


@torch.no_grad()
def generate(
    model: object,
    tokens: Int[Tensor, "B T"],
    options: Options,
    rng: RandomSource = None,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    source: tuple[Tensor, ...] = (),
    source_mask: Bool[Tensor, "B S"] | None = None,
) -> Int[Tensor, "B N"]:
    """Return prompt and new tokens; see `DecoderModel.generate` and `EncoderDecoderModel.generate`.

    One number per row and token is drawn from `rng` beforehand, so that the twins draw alike. `source` is passed to the
    model in front of the tokens in the first step; later steps pass None instead.
    """
    steps = _steps(model, tokens, options, rng, attention_mask, source, source_mask)
    with _evaluating(model):
        return torch.cat([tokens.long(), torch.stack([token for token, _ in steps], 1)], 1)


def stream(
    model: object,
    tokens: Int[Tensor, "B T"],
    options: Options,
    rng: RandomSource = None,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    source: tuple[Tensor, ...] = (),
    source_mask: Bool[Tensor, "B S"] | None = None,
) -> Iterator[Int[Tensor, "B"]]:
    """Return an iterator over the new tokens, until every row has ended; the model keeps its mode between them."""
    steps = _steps(model, tokens, options, rng, attention_mask, source, source_mask)

    def each() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            with _evaluating(model), torch.no_grad():
                drawn = next(steps, None)
            if drawn is None:
                return
            yield drawn

    return until_ended(each())


def until_ended(steps: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Int[Tensor, "B"]]:
    """Yield the token of each step until every row has ended."""
    for token, is_done in steps:
        yield token
        if bool(is_done.all()):
            return


def ended(token: Int[Tensor, "B"], eos: int | None, is_done: Bool[Tensor, "B"]) -> tuple[Tensor, Tensor]:
    """Return `eos` for the rows that have ended and their token for the others, and which rows have ended with it."""
    if eos is None:
        return token, is_done
    token = torch.where(is_done, eos, token)
    return token, is_done | (token == eos)


def _steps(
    model: nn.Module,
    tokens: Int[Tensor, "B T"],
    options: Options,
    rng: RandomSource,
    attention_mask: Bool[Tensor, "B T"] | None,
    source: tuple[Tensor, ...],
    source_mask: Bool[Tensor, "B S"] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Check the arguments, and return an iterator over each token ``(B,)`` and whether its rows have ended."""
    check_ids(functional.dtype_name(tokens, "tokens"), functional.shape_of(tokens), name="tokens")
    check_range("tokens", int(tokens.min()), int(tokens.max()), model.config.vocab_size)
    options = options.checked(model.config.vocab_size)
    _check_source(rng)
    batch, length = tokens.shape
    new, device = options.max_new_tokens, tokens.device
    arguments = {} if source_mask is None else {"source_mask": source_mask}
    padding = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    attention_mask = functional.as_visible(attention_mask, "attention_mask")
    if attention_mask is not None:
        dtype, mask = functional.dtype_name(attention_mask, "attention_mask"), attention_mask.numpy(force=True)
        check_padding(functional.shape_of(attention_mask), dtype, mask, (batch, length))
        padding = length - attention_mask.sum(-1, keepdim=True)
        arguments["attention_mask"] = attention_mask
    check_length(length - int(padding.min()), new, model.config.num_positions)
    is_greedy = options.temperature is None
    numbers = torch.zeros(new, batch, device=device) if is_greedy else _uniform(rng, (new, batch), device)

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        cache = model.init_cache(batch, length + new)
        at = (torch.arange(length, device=device) - padding).clamp(min=0)
        logits, cache = model(*source, tokens.long(), positions=at, cache=cache, last_only=True, **arguments)
        is_done = torch.zeros(batch, dtype=torch.bool, device=device)
        for step in range(new):
            token = pick(logits[:, -1], numbers[step], options)
            token, is_done = ended(token, options.eos, is_done)
            yield token, is_done
            if step + 1 < new:
                at = length + step - padding
                logits, cache = model(*[None] * len(source), token[:, None], positions=at, cache=cache)

    return steps()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and each of its modules back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def pick(logits: Float[Tensor, "B V"], numbers: Float[Tensor, "B"], options: Options) -> Int[Tensor, "B"]:
    """Return a token of each row: the likeliest, or the one where a number from [0, 1) falls among the likely ones.

    Args:
        logits: ``(B, V)``.
        numbers: ``(B,)``, in [0, 1).
        options: how to draw, checked.
    """
    if options.temperature is None:
        return logits.argmax(-1)
    logits = functional.widen(logits)
    logits = (logits - logits.amax(-1, keepdim=True)) / options.temperature
    if options.top_k is not None:
        least = torch.sort(logits, -1, descending=True).values[:, options.top_k - 1, None]
        logits = torch.where(logits < least, -torch.inf, logits)
    if options.top_p is not None:
        ordered = torch.sort(logits, -1, descending=True).values
        likely = torch.softmax(ordered, -1)
        before = torch.cumsum(likely, -1) - likely
        least = torch.where(before < options.top_p, ordered, torch.inf).amin(-1, keepdim=True)
        logits = torch.where(logits < least, -torch.inf, logits)
    below = torch.cumsum(torch.softmax(logits, -1), -1)
    total = below[:, -1:]
    return ((below <= numbers[:, None].to(below.dtype) * total) & (below < total)).sum(-1)


def _check_source(rng: RandomSource) -> None:
    if rng is not None and not isinstance(rng, (torch.Generator, RngStream, JaxRngs)):
        raise TypeError(f"rng must be a torch.Generator, a stream, a JaxRngs or None, got {type(rng).__name__}")


def _uniform(rng: RandomSource, shape: tuple[int, int], device: Device) -> Float[Tensor, "N B"]:
    """Return float32 numbers from [0, 1)."""
    if rng is None or isinstance(rng, torch.Generator):
        return torch.rand(shape, generator=rng, device=device if rng is None else rng.device).to(device)
    return rng.uniform(shape, dtype=torch.float32, device=device)
