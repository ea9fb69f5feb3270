"""Linear layers with hooks, or with a forward of their own, inside our modules: every call goes through them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torch_attn
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    HyperConnectionConfig,
    LayerNormConfig,
    MixtureOfExpertsConfig,
    MultiHeadLatentAttentionConfig,
)
from torch_attn.blocks.hyper_connection import HyperConnection
from torch_attn.blocks.mixture_of_experts import MixtureOfExperts


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    return module.eval()


def experts() -> MixtureOfExperts:
    return drawn(MixtureOfExperts(MixtureOfExpertsConfig(FeedForwardConfig(6, 5), 4, 2), dtype=torch.float64))


def wrapper() -> torch_attn.MultiHeadAttentionWrapper:
    return drawn(torch_attn.MultiHeadAttentionWrapper(6, 3, 9, num_heads=2).double())


def streams() -> HyperConnection:
    return drawn(HyperConnection(HyperConnectionConfig(6, 2), dtype=torch.float64))


X = torch.randn(2, 5, 6, generator=torch.manual_seed(3), dtype=torch.float64)

IDS = torch.arange(6).reshape(2, 3)


def decoder() -> torch_attn.DecoderModel:
    block = DecoderBlockConfig(GroupedQueryAttentionConfig(6, 2), FeedForwardConfig(6, 5), LayerNormConfig(6))
    config = DecoderConfig(7, 6, (block,), LayerNormConfig(6), num_token_types=2)
    return drawn(torch_attn.DecoderModel(config, dtype=torch.float64))


def test_hooks_of_the_types_of_tokens_take_part():
    model = decoder()
    want = model(IDS)
    model.type_emb.weight.data[0] *= 3
    scaled = model(IDS)
    model.type_emb.weight.data[0] /= 3
    assert (scaled - want).abs().max() > 1e-3
    model.type_emb.register_forward_hook(lambda layer, args, result: 3 * result)
    torch.testing.assert_close(model(IDS), scaled, rtol=0, atol=1e-12)


CALLS = {
    "router": (experts, "router", lambda module: module(X)),
    "head": (wrapper, "heads.1.W_key", lambda module: module(X)),
    "streams": (streams, "projection", lambda module: module.read(X[:, :2])[0]),
}


@pytest.fixture(params=CALLS)
def case(request):
    """Return a module, one of its layers, and the function that calls the module."""
    make, path, call = CALLS[request.param]
    module = make()
    return module, module.get_submodule(path), lambda: call(module)


@pytest.mark.parametrize("way", ["hook", "hook before", "hook of all", "own forward"])
@torch.no_grad()
def test_what_a_layer_is_hooked_with_takes_part(case, way):
    _, layer, call = case
    plain, weight = call(), layer.weight.clone()
    layer.weight.copy_(3 * weight)
    scaled = call()
    layer.weight.copy_(weight)
    assert (scaled - plain).abs().max() > 1e-3

    def after(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor | None:
        return 3 * result if module is layer else None

    if way == "hook":
        handle = layer.register_forward_hook(after)
    elif way == "hook before":
        handle = layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    elif way == "hook of all":
        handle = nn.modules.module.register_module_forward_hook(after)
    else:
        layer.forward = lambda x: 3 * nn.Linear.forward(layer, x)
    found = call()
    if way != "own forward":
        handle.remove()
    torch.testing.assert_close(found, scaled, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_pruned_layer_has_its_newest_weights(case):
    _, layer, call = case
    keep = torch.arange(layer.weight.numel()).reshape(layer.weight.shape) % 3 > 0
    prune.custom_from_mask(layer, "weight", keep)
    layer.weight_orig.mul_(3)  # as a step of an optimizer, after which the attribute is an old product
    found = call()
    prune.remove(layer, "weight")
    torch.testing.assert_close(found, call(), rtol=0, atol=1e-12)


def test_a_hook_that_looks_changes_no_number_of_a_router_in_16_bits():
    module, x = experts().bfloat16(), X.bfloat16()
    module.router.weight.requires_grad_()
    plain = module(x)
    (gradient,) = torch.autograd.grad(plain.sum(), module.router.weight)
    seen: list[torch.Tensor] = []
    module.router.register_forward_hook(lambda layer, args, result: seen.append(result))
    watched = module(x)
    assert torch.equal(watched, plain)
    assert torch.equal(torch.autograd.grad(watched.sum(), module.router.weight)[0], gradient)
    assert [result.dtype for result in seen] == [torch.float32]
    assert module.router.weight.dtype == torch.bfloat16


def latent() -> torch_attn.MultiHeadLatentAttention:
    config = MultiHeadLatentAttentionConfig(6, 2, 4, 4, 2, 3)
    return drawn(torch_attn.MultiHeadLatentAttention(config, dtype=torch.float64))


@pytest.mark.parametrize("name", ["W_key", "W_value"])
@torch.no_grad()
def test_a_layer_of_latents_that_adds_to_its_product_decodes_right_or_is_refused(name):
    module = latent()
    getattr(module, name).register_forward_hook(lambda layer, args, result: result + torch.arange(result.shape[-1]))
    want, cache = module(X), module.init_cache(2, 5)
    found = torch.cat([module(token, cache=cache)[0] for token in X.split(1, 1)], 1)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"absorbed must be False for a layer \(Linear\) that adds something"):
        module(X, absorbed=True)


@torch.no_grad()
def test_absorbed_matrices_are_those_that_hooks_make():
    module = latent()
    for layer in (module.W_key, module.W_value):
        layer.register_forward_hook(lambda layer, args, result: 3 * result)
    torch.testing.assert_close(module(X, absorbed=True), module(X, absorbed=False), rtol=0, atol=1e-12)


def test_compiled_modules_run_the_hooks(case):
    _, layer, call = case
    layer.register_forward_hook(lambda layer, args, result: 3 * result)
    want = call()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(), want)
    torch.compiler.reset()
