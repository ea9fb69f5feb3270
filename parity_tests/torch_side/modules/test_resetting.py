"""Parameters are drawn again as the constructor draws them, after the meta device too."""

from __future__ import annotations

import pytest
import torch

import torch_attn
from attn_bridge.specs import VARIANTS

GPT = {
    "vocab_size": 50,
    "context_length": 8,
    "emb_dim": 16,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": True,
}
CHAPTER = {
    "SelfAttention_v1": (48, 40),
    "SelfAttention_v2": (48, 40, True),
    "CausalAttention": (48, 40, 8, 0.1, True),
    "MultiHeadAttentionWrapper": (48, 20, 8, 0.1, 2, True),
    "MultiHeadAttention": (48, 40, 8, 0.1, 2, True),
    "LayerNorm": (48,),
    "GPTModel": (GPT,),
}
MODERN = {
    f"{variant.name} {number}": (variant.name, example.config)
    for variant in VARIANTS
    for number, example in enumerate(variant.examples)
}


def maker(name, *arguments):
    return lambda device: getattr(torch_attn, name)(*arguments, device=device)


MAKERS = {
    **{name: maker(name, *arguments) for name, arguments in CHAPTER.items()},
    **{label: maker(name, config) for label, (name, config) in MODERN.items()},
}


DRAWS = 20


def pooled(modules):
    """Return the values of every parameter over several draws."""
    drawn = [dict(module.named_parameters()) for module in modules]
    return {name: torch.stack([one[name].detach().clone() for one in drawn]) for name in drawn[0]}


def blank(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    return module


@pytest.mark.parametrize("label", MAKERS)
def test_a_reset_draws_what_the_constructor_draws(label):
    make = MAKERS[label]
    torch.manual_seed(0)
    made = pooled([make("cpu") for _ in range(DRAWS)])
    modules = [blank(make("meta").to_empty(device="cpu")) for _ in range(DRAWS)]
    for module in modules:
        module.reset_parameters()
    again = pooled(modules)
    assert made.keys() == again.keys()
    for name, values in made.items():
        ours = again[name]
        if values.std(correction=0) == 0.0:
            assert torch.equal(ours, values), name
            continue
        assert len(ours.unique()) > 1, name
        near = 6.0 / values.numel() ** 0.5  # six standard errors
        assert ours.mean().item() == pytest.approx(values.mean().item(), abs=near * values.std().item()), name
        assert ours.std().item() == pytest.approx(values.std().item(), rel=near), name


@pytest.mark.parametrize("label", MAKERS)
def test_one_seed_resets_to_one_set_of_numbers(label):
    module = MAKERS[label]("cpu")
    states = []
    for _ in range(2):
        torch.manual_seed(1)
        blank(module).reset_parameters()
        states.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *states))
