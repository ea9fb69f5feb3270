"""Attention computes on the device of its inputs, whichever device new tensors are made on by default."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from attn_bridge import masks
from parity_tests.contract import modules, torch_backend
from torch_attn import functional, random

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="the extra cpu is not installed"
)
NAMES = [pytest.param("cpu_flash", marks=needs_kernels), "windowed", "sdpa", "by_rows", "reference"]
WINDOW = masks.sliding_window(9) & torch.arange(70)[None].ge(3)


class HasDevice(np.ndarray):
    """An array whose `device` is none of torch's, as JAX's arrays have."""

    device = object()


def gradients(name, **options):
    torch.manual_seed(0)
    arrays = torch.randn(3, 1, 70, 2, 16, device="cpu").requires_grad_()
    out = functional.dot_product_attention(*arrays, mask=WINDOW, implementation=name, **options)
    (first,) = torch.autograd.grad((out**2).sum(), arrays, create_graph=not options)
    return [out, first] if options else [out, first, *torch.autograd.grad((first**2).sum(), arrays)]


def same_on_another_device(call):
    wanted = call()
    with torch.device("meta"):
        found = call()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_where_their_inputs_are(name):
    same_on_another_device(lambda: gradients(name))


@pytest.mark.parametrize(
    "rng", [lambda: None, lambda: torch.Generator("cpu").manual_seed(3), lambda: random.JaxRngs(3)]
)
@pytest.mark.parametrize("name", [NAMES[0], "reference"])
def test_masks_of_dropout_are_drawn_where_the_inputs_are(name, rng):
    same_on_another_device(lambda: gradients(name, dropout=0.5, rng=rng()))


@pytest.mark.parametrize("name", ["GroupedQueryAttention", "DifferentialAttention", "Mamba2", "LinearAttention"])
def test_modules_take_masks_where_their_inputs_are(name):
    module, x = modules.make_example(torch_backend, name)
    x, mask = torch.from_numpy(x), torch.from_numpy(modules.PADDING)
    foreign = modules.PADDING.view(HasDevice)
    masks_of_all = mask, modules.PADDING, foreign
    same_on_another_device(lambda: [module(x, attention_mask=each) for each in masks_of_all])
