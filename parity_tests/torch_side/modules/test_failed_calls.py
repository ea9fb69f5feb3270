"""Calls that fail behind the layer that took the tokens, which torch's caches are written in place by."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import torch_attn
from attn_bridge import masks
from attn_bridge.specs import VARIANTS, CrossAttentionConfig, GroupedQueryAttentionConfig
from attn_bridge.specs.base import Config
from parity_tests.support.models import drawn_encoder_decoders

CONFIGS = {variant.name: variant.examples[0].config for variant in VARIANTS if variant.examples}
CACHED = [name for name in CONFIGS if name != "CrossAttention"]
ROLLING = GroupedQueryAttentionConfig(8, 2, mask=masks.sliding_window(3))
LEFT = torch.tensor([[False, True, True, True, True], [True, True, True, True, True]])


class Interrupted(BaseException):
    """Ends a call as an interrupt does."""


def interrupted(module: torch.nn.Module, call: Callable[[], Any]) -> None:
    """Run a call of a module that is interrupted at its end."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    handle = module.register_forward_hook(interrupt)
    with pytest.raises(Interrupted):
        call()
    handle.remove()


def make(config: Config, name: str = "GroupedQueryAttention") -> tuple[Any, torch.Tensor]:
    """Return a module in float64, and tokens for it."""
    torch.manual_seed(0)
    module = getattr(torch_attn, name)(config, dtype=torch.float64).eval().requires_grad_(False)
    return module, torch.randn(2, 5, config.d_in, dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, LEFT], ids=["plain", "padded"])
@pytest.mark.parametrize("name", CACHED)
def test_tokens_of_an_interrupted_call_may_be_tried_again(name, mask):
    module, x = make(CONFIGS[name], name)
    rest = {} if mask is None else {"attention_mask": mask}
    _, cache = module(
        x[:, :3], cache=module.init_cache(2, 6), **({} if mask is None else {"attention_mask": mask[:, :3]})
    )
    interrupted(module, lambda: module(x[:, 3:], cache=cache, **rest))
    assert cache.length == 3
    output, _ = module(x[:, 3:], cache=cache, **rest)
    torch.testing.assert_close(output, module(x, **rest)[:, 3:], rtol=0, atol=1e-12)


def test_padding_of_an_interrupted_call_is_forgotten():
    module, x = make(CONFIGS["GroupedQueryAttention"])
    _, cache = module(x[:, :3], cache=module.init_cache(2, 6))
    interrupted(module, lambda: module(x[:, 3:], cache=cache, attention_mask=LEFT))
    output, _ = module(x[:, 3:], cache=cache)
    torch.testing.assert_close(output, module(x)[:, 3:], rtol=0, atol=1e-12)


def test_a_window_that_lost_tokens_is_refused_until_it_is_emptied():
    module, x = make(ROLLING)
    _, cache = module(x[:, :3], cache=module.init_cache(2, 9, rolling=True))
    interrupted(module, lambda: module(x[:, 3:], cache=cache))
    for lost in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), tree_map(lambda leaf: leaf, cache)):
        with pytest.raises(RuntimeError, match="a call that failed overwrote tokens of the rolling cache; begin again"):
            module(x[:, 3:], cache=lost)
    output, _ = module(x, cache=cache.trim(0))
    torch.testing.assert_close(output, module(x), rtol=0, atol=1e-12)


def test_an_empty_window_loses_nothing():
    module, x = make(ROLLING)
    cache = module.init_cache(2, 9, rolling=True)
    interrupted(module, lambda: module(x, cache=cache))
    output, _ = module(x, cache=cache)
    torch.testing.assert_close(output, module(x), rtol=0, atol=1e-12)


def test_a_window_with_free_slots_goes_on():
    module, x = make(ROLLING)
    _, cache = module(x[:, :2], cache=module.init_cache(2, 9, rolling=True))
    interrupted(module, lambda: module(x[:, 2:3], cache=cache))
    output, _ = module(x[:, 2:], cache=cache)
    torch.testing.assert_close(output, module(x)[:, 2:], rtol=0, atol=1e-12)


def test_an_interrupted_call_gives_back_the_old_context():
    module, x = make(CrossAttentionConfig(8, 2, d_context=8), "CrossAttention")
    want, cache = module(x, context=x[:, :3], cache=module.init_cache(2, 6))
    interrupted(module, lambda: module(x, context=x + 1.0, cache=cache))
    output, _ = module(x, cache=cache)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-12)


def test_an_interrupted_call_gives_back_the_old_padding_of_a_source():
    torch.manual_seed(0)
    config = drawn_encoder_decoders.draw("bart", 0)
    model = torch_attn.EncoderDecoderModel(config, dtype=torch.float64).eval().requires_grad_(False)
    source, tokens = torch.randint(3, 20, (2, 5)), torch.randint(3, 20, (2, 4))
    want = model(source, tokens, source_mask=LEFT)[:, 2:]
    _, cache = model(source, tokens[:, :2], source_mask=LEFT, cache=model.init_cache(2, 4))
    interrupted(model.decoder, lambda: model(None, tokens[:, 2:], source_mask=LEFT.flip(0), cache=cache))
    output, _ = model(None, tokens[:, 2:], cache=cache)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-12)
