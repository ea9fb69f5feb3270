"""Derivatives of derivatives, and those that go forward, of the function and of modules."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import torch_attn
from attn_bridge import masks, specs
from torch_attn import functional

from .attention_calls import draw, operands, supported

deprecated_by_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

SERVED = {
    "sdpa": ({}, {"mask": masks.causal()}),
    "windowed": ({"queries": 90, "keys": 90}, {"mask": masks.sliding_window(7)}),
}


def second_order(of, inputs):
    first = torch.autograd.grad(of.square().sum(), inputs, create_graph=True)
    return *first, *torch.autograd.grad(sum(array.square().sum() for array in first), inputs)


def leaves(*arrays):
    return [array.detach().requires_grad_() for array in arrays]


@pytest.mark.parametrize("name", SERVED)
def test_second_derivatives_are_those_of_the_reference(name):
    sizes, options = SERVED[name]
    inputs = leaves(*operands(**sizes))
    assert supported(inputs, options)[0] == name
    found, wanted = (
        second_order(functional.dot_product_attention(*inputs, **options, implementation=one), inputs)
        for one in (None, "reference")
    )
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_bias_has_second_derivatives():
    inputs = leaves(*operands(), draw(4, 9, 9, seed=5))
    found, wanted = (
        second_order(functional.dot_product_attention(*inputs[:3], bias=inputs[3], implementation=one), inputs)
        for one in ("sdpa", "reference")
    )
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", SERVED)
def test_a_mask_that_was_written_to_is_refused(name):
    inputs = leaves(*operands(queries=90, keys=90))
    shown = torch.ones(1, 90, dtype=torch.bool)
    shown[:, 3] = False
    options = {"mask": SERVED[name][1]["mask"] & shown, "implementation": name}
    context = functional.dot_product_attention(*inputs, **options)
    shown[:, 5] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(context.square().sum(), inputs, create_graph=True)


def test_operands_that_depend_on_each_other_get_their_parts():
    (x,) = leaves(draw(2, 5, 2, 4, seed=1))

    def attend(implementation):
        return functional.dot_product_attention(x, x, x.tanh(), implementation=implementation)

    for got, want in zip(second_order(attend("sdpa"), [x]), second_order(attend("reference"), [x]), strict=True):
        torch.testing.assert_close(got, want)


def test_dropout_of_the_global_generator_names_what_to_choose():
    inputs = leaves(*operands())
    context = functional.dot_product_attention(*inputs, dropout=0.5, implementation="sdpa")
    with pytest.raises(NotImplementedError, match="need implementation='reference'"):
        torch.autograd.grad(context.sum(), inputs, create_graph=True)


@deprecated_by_torch
@pytest.mark.parametrize("length", [4, 64])
def test_modules_pass_gradcheck_and_gradgradcheck(length):
    torch.manual_seed(0)
    module = torch_attn.MultiHeadAttention(4, 4, 64, num_heads=2, dtype=torch.float64).eval()
    inputs = leaves(draw(1, length, 4, seed=1))
    assert gradcheck(module, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(module, inputs, fast_mode=True)


@deprecated_by_torch
def test_nested_gradients_and_hessians_of_torch_func_agree():
    torch.manual_seed(0)
    config = specs.GroupedQueryAttentionConfig(4, num_heads=2, mask=masks.sliding_window(3))
    module = torch_attn.GroupedQueryAttention(config, dtype=torch.float64).eval()
    x = draw(1, 5, 4, seed=1)

    def loss(x):
        return module(x).square().sum()

    hessian = torch.func.hessian(loss)(x)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(x), hessian)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, x), hessian)
