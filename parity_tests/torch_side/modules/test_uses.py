"""What users of torch's own layers do with a module: show it, export a step of decoding, give it nested tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torch_attn
from attn_bridge.specs import VARIANTS, Rotary, find_variant

from ...contract import modules, torch_backend
from ...contract.models.test_decoder_model import CONFIG
from ...support.calls import cover
from ...support.calls.bad_calls import D_IN, MODULES

MODERN = [variant.name for variant in VARIANTS if variant.group == "modern" and variant.examples]
CACHED = [name for name in MODERN if name != "CrossAttention"]


def make(name: str) -> nn.Module:
    if name in MODULES:
        return modules.make(torch_backend, name)
    return torch_attn.RMSNorm(D_IN) if name == "RMSNorm" else modules.make_example(torch_backend, name)[0]


@pytest.mark.parametrize("name", [*MODULES, *MODERN, "RMSNorm"])
def test_a_module_shows_its_sizes(name):
    module = make(name)
    shown = repr(module).replace("\n", " ")
    sizes = {key: value for key, value in vars(module.config).items() if type(value) is int}
    assert sizes
    assert all(f"{key}={value}" in shown for key, value in sizes.items())


def test_a_module_shows_mask_and_positions_without_their_defaults():
    config = find_variant("GroupedQueryAttention").config(8, 2, position=Rotary(base=500.0))
    shown = torch_attn.GroupedQueryAttention(config).extra_repr()
    assert "mask=Causal()" in shown
    assert "position=Rotary(base=500)" in shown
    assert "softcap" not in shown
    assert repr(torch_attn.DecoderModel(CONFIG)).startswith("DecoderModel(\n  vocab_size=11, emb_dim=8")


class Step(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        return self.inner(x, cache=cache)


@cover.some("name", CACHED, [name for name in CACHED if name not in modules.ALIKE])
@torch.no_grad()
def test_an_exported_step_decodes_on_from_any_length(name):
    module, x = modules.make_example(torch_backend, name)
    tokens = torch.tensor(x[:, :1])

    def begin() -> Any:
        return module(torch.tensor(x), cache=module.init_cache(2, 12))[1]

    ours, exported = begin(), begin()
    parts = pytree.tree_flatten(begin(), is_leaf=lambda one: not isinstance(one, type(ours)))[0]
    dims = [torch.export.Dim.DYNAMIC if isinstance(part, int) else None for part in parts]
    program = torch.export.export(Step(module), (tokens, begin()), dynamic_shapes={"x": None, "cache": dims}).module()
    for _ in range(4):
        wanted, ours = module(tokens, cache=ours)
        found, exported = program(tokens, exported)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert (type(exported), exported.length, exported.capacity) == (type(ours), 9, 12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_in_one_line(layout):
    rows = [torch.randn(3, D_IN), torch.randn(5, D_IN)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1, 2, 3])], layout=layout)
    calls = [
        (make(modules.MHA), x, "x"),
        (make("SelfAttention_v1"), x, "x"),
        (torch_attn.DecoderModel(CONFIG), ids, "tokens"),
    ]
    for module, given, name in calls:
        with pytest.raises(TypeError, match="nested") as caught:
            module(given)
        assert str(caught.value) == (
            f"{name} must be a dense tensor (pad it by torch.nested.to_padded_tensor, and give attention_mask= for the "
            "padding), got a nested one"
        )


def test_norms_take_jagged_tensors():
    rows = [torch.randn(3, D_IN), torch.randn(5, D_IN)]
    found = torch_attn.LayerNorm(D_IN)(torch.nested.nested_tensor(rows, layout=torch.jagged))
    torch.testing.assert_close(found.unbind()[1], torch_attn.LayerNorm(D_IN)(rows[1]))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("name", ["GroupedQueryAttention", "GatedDeltaNet"])
def test_a_cache_is_copied_while_gradients_are_recorded(name, duplicate):
    config = find_variant(name).examples[0].config
    module = getattr(torch_attn, name)(config).eval()
    x = torch.randn(2, 5, config.d_in, generator=torch.Generator().manual_seed(0))
    _, cache = module(x[:, :3], cache=module.init_cache(2, 5))
    other = duplicate(cache)
    torch.testing.assert_close(module(x[:, 3:], cache=other)[0], module(x[:, 3:], cache=cache)[0])
