"""Kernels for GPUs, as far as a processor shows them: FlexAttention's formula, cuDNN's rank."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from attn_bridge import masks
from torch_attn import functional
from torch_attn.implementations import KernelCall, flex, sdpa

from .attention_calls import all_options, draw, operands


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.sliding_window(3), masks.sliding_window(3).offset(-4)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"sinks": draw(4, seed=5)}, {"softcap": 2.0, "sinks": draw(4, seed=5)}], ids=str
)
def test_flex_attention_matches_the_reference(options, mask, key_heads):
    inputs = operands(queries=20, keys=20, key_heads=key_heads, width=16, value_width=32)
    call = functional._checked(*inputs, **all_options({**options, "mask": mask}))
    got = flex.attend_by(flex_attention.flex_attention, call)
    want = functional.dot_product_attention(*inputs, mask=mask, **options, implementation="reference")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"return_weights": True}, "it does not return the weights"),
        ({}, {"bias": torch.zeros(1)}, "it takes no bias"),
        ({}, {"dropout": 0.1}, "it has no dropout"),
        ({}, {"mask": masks.causal() & torch.ones(2, 9, dtype=torch.bool)}, "it takes no mask arrays"),
        ({"width": 8}, {}, "head_dim (8) is not between 16 and 256"),
        ({"value_width": 300}, {}, "head_dim (300) is not between 16 and 256"),
        ({}, {"softcap": 2.0, "sinks": torch.zeros(4), "mask": masks.sliding_window(3)}, None),
    ],
)
def test_flex_attention_declares_its_limits(changes, options, reason):
    inputs = [one.float() for one in operands(**{"width": 16, "value_width": 16, **changes})]
    call: KernelCall = functional._checked(*inputs, **all_options(options))
    assert flex.unsupported_anywhere(call) == reason
    wide = functional._checked(*(one.double() for one in inputs), **all_options({}))
    if reason is None:
        assert flex.unsupported_anywhere(wide) == "it does not compute in float64"


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(sdpa, "_capability", lambda index: ((9, 0), (8, 0), (10, 0))[index])
    with sdpa_kernel(list(sdpa.FIRST_CUDNN)):
        yield


def stand_in(**changes: Any) -> Any:
    device = types.SimpleNamespace(index=changes.pop("index", 0))
    defaults = {"is_cuda": True, "dtype": torch.bfloat16, "device": device, "shape": (2, 8, 1024, 128)}
    return types.SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("query", "options", "is_first"),
    [
        (stand_in(), {}, True),
        (stand_in(dtype=torch.float16), {}, True),
        (stand_in(dtype=torch.float32), {}, False),
        (stand_in(is_cuda=False), {}, False),
        (stand_in(index=1), {}, False),
        (stand_in(index=2), {}, False),
        (stand_in(shape=(2, 8, 1024, 64)), {}, False),
        (stand_in(), {"mask": torch.ones(1)}, False),
        (stand_in(), {"dropout": 0.1}, False),
    ],
)
def test_cudnn_comes_first_on_hopper(query, options, is_first, on_hopper):
    before = torch._C._get_sdp_priority_order()
    with sdpa._kernels(query, options.get("mask"), options.get("dropout", 0.0)):
        first = torch._C._get_sdp_priority_order()[0]
        assert torch.backends.cuda.flash_sdp_enabled(), "what cuDNN refuses goes to the next"
    assert (first == int(SDPBackend.CUDNN_ATTENTION)) == is_first
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize(("index", "tokens", "is_last"), [(0, 1, True), (2, 1, True), (1, 1, False), (2, 1024, False)])
def test_cudnn_comes_last_where_each_call_has_another_shape(index, tokens, is_last, on_hopper):
    few = stand_in(index=index, shape=(2, 8, tokens, 128))
    with sdpa_kernel(list(sdpa.FIRST_CUDNN), set_priority=True), sdpa._kernels(few, torch.ones(1), 0.0):
        assert (torch._C._get_sdp_priority_order()[3] == int(SDPBackend.CUDNN_ATTENTION)) == is_last


def test_a_choice_of_kernels_stays(on_hopper):
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel(SDPBackend.MATH), sdpa._kernels(stand_in(), None, 0.0):
        assert torch._C._get_sdp_priority_order() == before
        assert not torch.backends.cuda.cudnn_sdp_enabled()
