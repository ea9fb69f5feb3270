"""Implementations under transformations and compilers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torch_attn
from attn_bridge import masks
from torch_attn import functional
from torch_attn.implementations import by_rows

from .attention_calls import draw, operands, some, supported, to

deprecated_by_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Tensor:
    return functional.dot_product_attention(query, key, value, mask=mask, **options)


MASKS = {"causal": masks.causal(), "window": masks.sliding_window(7), "none": None}
masked = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@masked
@deprecated_by_torch
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_of_grad_works(mask):
    query, key, value = (
        torch.stack([one, two])
        for one, two in zip(*(operands(queries=60, keys=60, seed=s) for s in (0, 1)), strict=True)
    )
    found = torch.func.vmap(torch.func.grad(lambda *x: attend(*x, mask).square().sum(), argnums=(0, 1, 2)))(
        query, key, value
    )
    for n in range(2):
        inputs, _ = to(torch.float64, [query[n], key[n], value[n]], {})
        want = torch.autograd.grad(attend(*inputs, mask).square().sum(), inputs)
        for got, one in zip(found, want, strict=True):
            torch.testing.assert_close(got[n], one)


@deprecated_by_torch
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_blocks_of_rows_have_all_derivatives(monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", 7)
    options = {"mask": masks.sliding_window(9), "softcap": 3.0}
    inputs, tangents = operands(queries=20, keys=20), operands(queries=20, keys=20, seed=1)
    assert supported(inputs, options)[0] == "by_rows"

    def loss(name: str | None) -> Any:
        return lambda *x: functional.dot_product_attention(*x, **options, implementation=name).square().sum()

    def derivatives(of: Any) -> list[Any]:
        gradient = torch.func.grad(of, argnums=(0, 1, 2))
        stacked = [torch.stack([one, two]) for one, two in zip(inputs, tangents, strict=True)]
        one_of = torch.func.grad(lambda *x: sum(one.square().sum() for one in gradient(*x)))
        _, forward = torch.func.jvp(of, tuple(inputs), tuple(tangents))
        return [*torch.func.vmap(gradient)(*stacked), one_of(*inputs), forward]

    for got, want in zip(derivatives(loss(None)), derivatives(loss("reference")), strict=True):
        torch.testing.assert_close(got, want)


@masked
@deprecated_by_torch
def test_forward_mode_runs_through_the_reference(mask):
    inputs, tangents = operands(queries=60, keys=60), operands(queries=60, keys=60, seed=1)
    _, found = torch.func.jvp(lambda *x: attend(*x, mask), tuple(inputs), tuple(tangents))
    _, want = torch.func.jvp(lambda *x: attend(*x, mask, implementation="reference"), tuple(inputs), tuple(tangents))
    torch.testing.assert_close(found, want)
    moved = [attend(*(x + h * t for x, t in zip(inputs, tangents, strict=True)), mask) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield CompileCounter()
    torch.compiler.reset()


LENGTHS = (64, 96, 128, 200, 257, 400)


@pytest.mark.parametrize("label", ["module", "module with padding", "window", "window with padding", "full", "softcap"])
def test_one_graph_serves_all_lengths_after_the_first(label):
    module = torch_attn.MultiHeadAttention(8, 8, 512, num_heads=2).eval()

    def call(x: Tensor, padding: Tensor) -> Any:
        if label.startswith("module"):
            return module(x, attention_mask=padding if "padding" in label else None)
        heads = x.reshape(*x.shape[:2], 2, 4)
        options = {"softcap": 3.0} if label == "softcap" else {}
        mask = masks.sliding_window(20) if "window" in label else masks.full()
        return attend(heads, heads, heads, mask.restrict(padding if "padding" in label else None), **options)

    with fresh_compiler() as counter:
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for length in LENGTHS:
            arguments = draw(2, length, 8, seed=length).float(), some(2, length, seed=length)
            torch.testing.assert_close(compiled(*arguments), call(*arguments))
        assert counter.frame_count == 2, "one for the first length, one for all others"


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"mask": masks.sliding_window(8), "scale": 0.3}])
def test_every_size_may_be_symbolic(options):
    """dynamic=True makes symbols of numbers of heads and of scales, too, which the kernels and checks must take."""
    with fresh_compiler() as counter:
        compiled = torch.compile(
            lambda *heads: attend(*heads, **options), fullgraph=True, dynamic=True, backend=counter
        )
        for length in (16, 33, 100):
            heads = [draw(2, length, heads, 8, seed=length).float() for heads in (4, 2, 2)]
            torch.testing.assert_close(compiled(*heads), attend(*heads, **options))
        assert counter.frame_count <= 2, "the window takes another path where it covers all keys"
