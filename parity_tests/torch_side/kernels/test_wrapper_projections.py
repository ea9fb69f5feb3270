"""The heads of MultiHeadAttentionWrapper are projected in one product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn

from .attention_calls import draw


def products(module: torch.nn.Module, x: Tensor) -> int:
    """Return how many matrix products a module's linear layers are."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    with Log():
        module(x)
    return sum(name in ("addmm", "mm", "linear") for name in seen)


@pytest.mark.parametrize("bias", [False, True])
def test_the_heads_of_the_wrapper_are_projected_in_one_product(bias):
    torch.manual_seed(0)
    module = torch_attn.MultiHeadAttentionWrapper(6, 3, 9, num_heads=4, qkv_bias=bias)
    x = draw(2, 5, 6, seed=1).float()
    parameters = list(module.parameters())
    assert products(module, x) == 1
    context = module(x)
    cotangent = draw(*context.shape, seed=2).float()
    alone = torch.cat([head(x) for head in module.heads], -1)
    torch.testing.assert_close(context, alone)
    torch.testing.assert_close(
        torch.autograd.grad(context, parameters, cotangent), torch.autograd.grad(alone, parameters, cotangent)
    )


def test_hooked_and_replaced_layers_are_called_individually():
    module = torch_attn.MultiHeadAttentionWrapper(6, 3, 9, num_heads=4)
    x = draw(2, 5, 6, seed=1).float()
    seen = []
    handle = module.heads[2].W_key.register_forward_hook(lambda layer, args, result: seen.append(result))
    before = module(x)
    assert [one.shape for one in seen] == [(2, 5, 3)]
    handle.remove()
    module.heads[1].W_value = torch.nn.Sequential(torch.nn.Linear(6, 3, bias=False))
    assert (module(x) - before).abs().amax((0, 1)).gt(1e-4).tolist() == [False] * 3 + [True] * 3 + [False] * 6
