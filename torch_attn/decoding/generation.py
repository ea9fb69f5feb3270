"""Drawing tokens one after another: the prompt at once, then each new token with a cache.

Twins: `jax_attn.decoding.generation`, `torch_attn.decoding.generation`. Letters: B batch, T prompt, N prompt and new
tokens, V size of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_bridge.generation import Options, check_padding
from attn_bridge.specs.model import check_ids, check_range

from .. import functional


@torch.no_grad()
def generate(
    model: Any,
    tokens: Int[Tensor, "B T"],
    options: Options,
    rng: Any = None,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    source: tuple[Any, ...] = (),
    source_mask: Bool[Tensor, "B S"] | None = None,
) -> Int[Tensor, "B N"]:
    """Return prompt and new tokens; see `DecoderModel.generate` and `EncoderDecoderModel.generate`.

    One number per row and token is drawn from `rng` beforehand, so that the twins draw alike. `source` is what the
    model takes before the tokens at first; None takes its place afterwards.
    """
    check_ids(functional.dtype_name(tokens), functional.shape_of(tokens), name="tokens")
    check_range("tokens", int(tokens.min()), int(tokens.max()), model.config.vocab_size)
    options.check(model.config.vocab_size)
    batch, given = tokens.shape
    new, device = options.max_new_tokens, tokens.device
    numbers = _uniform(rng, (new, batch), device) if options.temperature > 0 else torch.zeros(new, batch, device=device)
    arguments, padding = (
        {} if source_mask is None else {"source_mask": source_mask},
        torch.zeros((batch, 1), dtype=torch.int64, device=device),
    )
    if attention_mask is not None:
        check_padding(attention_mask.shape, functional.dtype_name(attention_mask), attention_mask.cpu().numpy(), given)
        padding = given - attention_mask.sum(-1, keepdim=True)
        arguments["attention_mask"] = attention_mask
    was_training = model.training
    model.eval()
    try:
        found, cache = tokens.long(), model.init_cache(batch, given + new)
        at = (torch.arange(given, device=device) - padding).clamp(min=0)
        logits, cache = model(*source, found, positions=at, cache=cache, **arguments)
        is_done = torch.zeros(batch, dtype=torch.bool, device=device)
        for step in range(new):
            token = pick(logits[:, -1], numbers[step], options)
            if options.eos is not None:
                token = torch.where(is_done, options.eos, token)
                is_done = is_done | (token == options.eos)
            found = torch.cat([found, token[:, None]], 1)
            if step + 1 < new:
                at = given + step - padding
                logits, cache = model(*[None] * len(source), token[:, None], positions=at, cache=cache)
    finally:
        model.train(was_training)
    return found


def pick(logits: Float[Tensor, "B V"], numbers: Float[Tensor, "B"], options: Options) -> Int[Tensor, "B"]:
    """Return a token of each row: the likeliest, or the one where a number from [0, 1) falls among the likely ones.

    Args:
        logits: ``(B, V)``.
        numbers: ``(B,)``, in [0, 1).
        options: how to draw.
    """
    if options.temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(functional.wide_dtype(logits)) / options.temperature
    if options.top_k is not None and options.top_k < logits.shape[-1]:
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


def _uniform(rng: Any, shape: tuple[int, int], device: Any) -> Float[Tensor, "N B"]:
    """Return float32 numbers from [0, 1)."""
    if rng is None or isinstance(rng, torch.Generator):
        return torch.rand(shape, generator=rng, device=device if rng is None else rng.device).to(device)
    return rng.uniform(shape, dtype=torch.float32, device=device)
