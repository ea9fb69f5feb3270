"""A model's call with a cache that fails leaves the caches of all blocks as they were."""

from __future__ import annotations

import copy
import functools
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_bridge.backends import as_numpy

from ...support.models import drawn_decoders
from .. import backends

backend = backends.fixture(backends.adapters("backend"))

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)
BATCHES = ("gpt2", "stablelm", "glm4_moe_lite", "llama", "mamba")
"""Families of learned positions, of rotary ones for a part or all of a head, in latent attention, and of none."""

LATE = {
    "positions": ("qwen3_next", {"positions": np.zeros(3, np.int32)}, "positions must have shape (T,) or (B, T)"),
    "queries": ("falcon_h1", {"attention_mask": np.ones((2, 1, 2, 5), bool)}, "attention mask (2, 1, 2, 5) must have"),
    "mask": ("minimax", {"attention_mask": np.ones((2, 1, 2, 5), bool)}, "attention mask (2, 1, 2, 5) must have"),
}
"""Family whose later layer refuses what earlier ones take; arguments; beginning of the message."""


@functools.cache
def begun(backend: ModuleType, family: str) -> tuple[Any, Any, np.ndarray]:
    """Return a model, its cache of three tokens, and the logits of the last two."""
    model = backend.build("DecoderModel", config=drawn_decoders.draw(family, 0))
    model.eval()
    ids = backend.as_argument(IDS)
    _, cache = model(ids[:, :3], cache=model.init_cache(2, 6))
    return model, cache, as_numpy(model(ids)[:, 3:])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", BATCHES)
def test_another_batch_than_that_of_the_cache_is_refused(backend, family, rows):
    """A batch of 1 would be broadcast to the rows of the cache by the positions of their next tokens."""
    model, kept, _ = begun(backend, family)
    with pytest.raises(ValueError, match=re.escape(f"batch of x ({rows}) must be the batch of the cache (2)")):
        model(backend.as_argument(IDS[[0, 1, 0]][:rows, 3:]), cache=copy.deepcopy(kept))


@pytest.mark.parametrize("label", LATE)
def test_tokens_that_a_later_layer_refuses_may_be_tried_again(backend, label):
    family, given, message = LATE[label]
    model, kept, want = begun(backend, family)
    cache, tokens = copy.deepcopy(kept), backend.as_argument(IDS[:, 3:])
    with pytest.raises(ValueError, match=re.escape(message)):
        model(tokens, cache=cache, **{name: backend.as_argument(value) for name, value in given.items()})
    logits, _ = model(tokens, cache=cache)
    np.testing.assert_allclose(as_numpy(logits), want, rtol=0, atol=1e-4 * np.abs(want).max())
