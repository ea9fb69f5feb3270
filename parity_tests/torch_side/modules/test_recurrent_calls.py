"""Recurrent classes in the ways that the others are called: without rows, without numbers, exported for any length."""

from __future__ import annotations

import pytest
import torch

import torch_attn
from attn_bridge.specs import VARIANTS
from torch_attn.recurrent import recurrence

from ...contract import modules

CONFIGS = {variant.name: variant.examples[0].config for variant in VARIANTS if variant.name in modules.RECURRENT}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_rows_gives_none(name):
    module = getattr(torch_attn, name)(CONFIGS[name])
    x = torch.zeros(0, 70, CONFIGS[name].d_in, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert (tuple(out.shape), tuple(x.grad.shape)) == ((0, 70, CONFIGS[name].d_out), (0, 70, CONFIGS[name].d_in))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_meta_device_gives_shapes(name):
    module = getattr(torch_attn, name)(CONFIGS[name], device="meta")
    x = torch.zeros(2, 70, CONFIGS[name].d_in, device="meta")
    out, cache = module(x, cache=module.init_cache(2, 71))
    assert (out.device.type, tuple(out.shape), cache.length) == ("meta", (2, 70, CONFIGS[name].d_out), 70)
    assert module(x).shape == out.shape


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_module_takes_any_length(name):
    module = getattr(torch_attn, name)(CONFIGS[name]).eval()
    draw = torch.Generator().manual_seed(2)
    length = torch.export.Dim("length", min=2, max=512)
    sample = torch.randn(2, 70, CONFIGS[name].d_in, generator=draw)
    exported = torch.export.export(module, (sample,), dynamic_shapes=({1: length},)).module()
    for tokens in (9, 64, 65, 130):
        x = torch.randn(2, tokens, CONFIGS[name].d_in, generator=draw)
        torch.testing.assert_close(exported(x), module(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 40])
def test_triangular_systems_are_solved_by_products_for_onnx(tokens, monkeypatch):
    generator = torch.Generator().manual_seed(tokens)
    matrix = torch.randn(2, 3, tokens, tokens, dtype=torch.float64, generator=generator) / 3
    wanted = recurrence._inverse(matrix)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.linalg, "solve_triangular", None)
    torch.testing.assert_close(recurrence._inverse(matrix), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "GatedConvolution"])
def test_a_cache_keeps_its_dtypes_under_autocast(name):
    module = getattr(torch_attn, name)(CONFIGS[name]).eval()
    cache = module.init_cache(2, 4)
    before = [None if state is None else state.dtype for state in (cache.state, cache.conv_state)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, cache = module(torch.randn(2, 4, CONFIGS[name].d_in), cache=cache)
    assert [None if state is None else state.dtype for state in (cache.state, cache.conv_state)] == before
