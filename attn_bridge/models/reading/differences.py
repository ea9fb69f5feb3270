"""Compares two configs of whole models, and lists differences that change the computation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import DecoderConfig
from ...specs.model import ModelConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.position import Rotary

ROUNDING = 1e-15
"""Relative difference of numbers that a reader's formula makes of a key, such as ``1 / logits_scaling``."""


def differences(wanted: ModelConfig, actual: ModelConfig) -> list[str]:
    """Return the values of a config that differ in another one, as ``path (value)``; empty if both compute the same."""
    return list(_differences(_plain(wanted), _plain(actual), ""))


def _differences(wanted: object, actual: object, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(wanted) and type(wanted) is type(actual):
        for field in dataclasses.fields(wanted):
            below = f"{path}.{field.name}" if path else field.name
            yield from _differences(getattr(wanted, field.name), getattr(actual, field.name), below)
    elif isinstance(wanted, tuple) and isinstance(actual, tuple) and len(wanted) == len(actual):
        for number, pair in enumerate(zip(wanted, actual, strict=True)):
            yield from _differences(*pair, f"{path}[{number}]")
    elif isinstance(wanted, float) and isinstance(actual, float):
        if not math.isclose(wanted, actual, rel_tol=ROUNDING):
            yield f"{path} ({wanted})"
    elif wanted != actual:
        yield f"{path} ({wanted!s:.80})"


def _plain(config: ModelConfig) -> ModelConfig:
    """Return a decoder's config with equivalent spellings normalised; other configs unchanged."""
    if not isinstance(config, DecoderConfig):
        return config
    blocks = []
    for block in config.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        position = getattr(attention, "position", None)
        is_latent = isinstance(attention, MultiHeadLatentAttentionConfig)
        width = getattr(attention, "rope_dim" if is_latent else "head_dim", None)
        rotary = position if isinstance(position, Rotary) else None
        if attention is not None and rotary is not None and rotary.dim is not None and rotary.dim == width:
            changes: dict[str, Any] = {"position": dataclasses.replace(rotary, dim=None)}
            attention = dataclasses.replace(attention, **changes)
        if isinstance(feed_forward, MixtureOfExpertsConfig):
            groups = feed_forward.router.groups
            if groups is not None and groups.chosen == groups.number:  # a token may choose from all experts
                router = dataclasses.replace(feed_forward.router, groups=None)
                feed_forward = dataclasses.replace(feed_forward, router=router)
        blocks.append(dataclasses.replace(block, attention=attention, feed_forward=feed_forward))
    return dataclasses.replace(config, blocks=tuple(blocks))
