"""Modules whose linear layers were replaced: by wrappers without ``weight``, storage in float8, quantised layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_attn
from attn_bridge.specs import VARIANTS, FeedForwardConfig, MixtureOfExpertsConfig
from torch_attn.blocks.mixture_of_experts import MixtureOfExperts

from ...contract import modules, torch_backend
from ...support.calls.bad_calls import ATTENTION_MODULES, D_IN

MODERN = {variant.name: variant.examples[0] for variant in VARIANTS if variant.examples}
CACHED = [name for name in MODERN if name != "CrossAttention"]
RECURRENT = [name for name in CACHED if not hasattr(MODERN[name].config, "mask")]


class Wrapped(nn.Module):
    """Calls the layer that it replaced, as an adapter does."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.inner = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Stored(nn.Linear):
    """Stores its weights in 8 bits and multiplies in the dtype of its input."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


class Quantised(torch.Tensor):
    """A weight of torch's ``Linear`` that knows the product of that layer alone, as those of torchao do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        tensor.inner = inner
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = (*arguments, None)[:3]
            return nn.functional.linear(x, weight.inner, bias, **(options or {}))
        return super().__torch_function__(function, types, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(arguments[0].inner)
        raise NotImplementedError(f"{function} of a quantised weight")


def quantised(layer: nn.Linear) -> nn.Linear:
    """Return the layer with a quantised weight."""
    layer.weight = nn.Parameter(Quantised(layer.weight.detach()), requires_grad=False)
    return layer


def replace(module: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> int:
    """Replace the linear layers of a module; return their number."""
    parents = [(parent, name) for parent in module.modules() for name, layer in parent.named_children()
               if type(layer) is nn.Linear]  # fmt: skip
    for parent, name in parents:
        setattr(parent, name, kind(getattr(parent, name)))
    return len(parents)


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """Return a module in eval mode, arguments of its calls, and an input."""
    generator = torch.manual_seed(1)  # weights are drawn from it, too
    if name in ATTENTION_MODULES:
        module = modules.make(torch_backend, name).to(dtype)
        return module, {}, torch.randn(2, 5, D_IN, generator=generator).to(dtype)
    config = MODERN[name].config
    module = getattr(torch_attn, name)(config, dtype=dtype).eval()
    x = torch.randn(2, 5, config.d_in, generator=generator).to(dtype)
    arguments = {}
    if name == "CrossAttention":
        arguments["context"] = torch.randn(2, 3, config.d_context, generator=generator).to(dtype)
    return module, arguments, x


@pytest.mark.parametrize("kind", [Wrapped, quantised])
@pytest.mark.parametrize("name", [*(name for name in ATTENTION_MODULES if name != "SelfAttention_v1"), *MODERN])
def test_replaced_layers_give_what_the_layers_gave(name, kind):
    module, arguments, x = build(name)
    want = module(x, **arguments)
    assert replace(module, kind)
    torch.testing.assert_close(module(x, **arguments), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Wrapped, Stored, quantised])
@pytest.mark.parametrize("name", [name for name in CACHED if name not in RECURRENT])
def test_a_cache_of_replaced_layers_has_the_dtype_of_their_results(name, kind, dtype):
    module, _, x = build(name, dtype)
    replace(module, kind)
    cache, parts = module.init_cache(2, 5), []
    for token in x.split(1, 1):
        part, cache = module(token, cache=cache)
        parts.append(part)
    assert cache.key.dtype == dtype
    limit = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 0.1}
    torch.testing.assert_close(torch.cat(parts, 1), module(x), **limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_classes_decode_with_replaced_layers(name, dtype):
    module, _, x = build(name, dtype)
    replace(module, Wrapped)
    cache, parts = module.init_cache(2, 5), []
    for token in x.split(1, 1):
        part, cache = module(token, cache=cache)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CACHED)
def test_dynamically_quantised_modules_run_eagerly_and_cached(name):
    module, _, x = build(name)
    want = module(x)
    quantised = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(layer) is nn.Linear for layer in quantised.modules())
    found, _ = quantised(x, cache=quantised.init_cache(2, 5))
    torch.testing.assert_close(found, quantised(x), rtol=0, atol=1e-5)
    assert 0 < (found - want).norm() < 0.1 * want.norm()  # 0.02 to 0.04; a gated norm of a small state is worse


def test_a_router_may_be_quantised():
    torch.manual_seed(0)
    layer = MixtureOfExperts(MixtureOfExpertsConfig(FeedForwardConfig(4, 5), num_experts=3, top_k=2))
    x = torch.randn(2, 5, 4)
    want = layer(x)
    assert replace(layer, quantised)
    torch.testing.assert_close(layer(x), want)
