"""What is torch's own about attention modules: the global generator, compilers, the book's checkpoints, copies."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_attn
from attn_bridge import specs
from attn_bridge.masks import causal

from ...contract import modules, torch_backend
from ...contract.modules import MHA, PADDING, WRAPPER, draw, draw_weights, drop_uniform, every_causal, every_module
from ...contract.torch_backend import build, output
from ...support.calls import cover
from ...support.calls.bad_calls import CONTEXT_LENGTH, D_IN, MODULES


def make(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a module in eval mode with drawn weights."""
    return modules.make(torch_backend, name, seed, **changes)


# ---- random numbers


def test_a_generator_of_ones_own_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    drop_uniform(torch_backend, 0.25, torch_backend.source(1))
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_random_source_the_global_generator_decides():
    torch.manual_seed(3)
    one, other = drop_uniform(torch_backend, 0.25, None), drop_uniform(torch_backend, 0.25, None)
    torch.manual_seed(3)
    np.testing.assert_array_equal(one, drop_uniform(torch_backend, 0.25, None))
    assert not np.array_equal(one, other)


@every_causal
def test_the_global_seed_repeats_a_modules_dropout(name):
    module, x = make(name, dropout=0.5).train(), draw(2, 5, D_IN)
    torch.manual_seed(7)
    first, second = output(module, x), output(module, x)
    torch.manual_seed(7)
    np.testing.assert_array_equal(first, output(module, x))
    assert not np.array_equal(first, second)


# ---- compilers


@cover.some("name", list(MODULES), [name for name in MODULES if name not in modules.ALIKE])
def test_a_module_compiles_into_one_graph(name):
    module, x = make(name), torch.from_numpy(draw(2, 5, D_IN))
    options = {} if name == "LayerNorm" else {"attention_mask": torch.from_numpy(PADDING), "return_weights": True}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **options), module(x, **options))


def test_compiled_modules_take_a_mask_after_calls_of_other_lengths():
    torch.compiler.reset()
    module = torch_attn.CausalAttention(6, 4, 8).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for batch, tokens in ((2, 3), (4, 5)):
        compiled(torch.randn(batch, tokens, 6))
    x, mask = torch.randn(3, 5, 6), torch.rand(3, 5) < 0.7
    mask[:, 2] = True  # a row that sees nothing warns
    torch.testing.assert_close(compiled(x, attention_mask=mask), module(x, attention_mask=mask))


# ---- checkpoints, copies, dtypes


def book_checkpoint(name: str, mask_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a state dict as the book's class of that name saves it: mask buffers beside the weights."""
    config = specs.find_variant(name).config(**MODULES[name])
    mask = torch.triu(torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH), diagonal=1).to(mask_dtype)
    places = [f"heads.{head}." for head in range(config.num_heads)] if name == WRAPPER else [""]
    weights = {key: torch.from_numpy(array) for key, array in draw_weights(config, 5).items()}
    return {**{f"{place}mask": mask.clone() for place in places}, **weights}


@every_causal
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool], ids=str)
def test_a_checkpoint_of_the_book_loads_strictly(name, mask_dtype):
    checkpoint = book_checkpoint(name, mask_dtype)
    given = {key: tensor.clone() for key, tensor in checkpoint.items()}
    module = build(name, **MODULES[name])
    result = module.load_state_dict(checkpoint, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(checkpoint) == list(given)
    assert all(torch.equal(checkpoint[key], given[key]) for key in given)
    weights = {key: tensor for key, tensor in given.items() if not key.endswith("mask")}
    state = module.state_dict()
    assert sorted(state) == sorted(weights)
    assert all(torch.equal(state[key], weights[key]) for key in weights)


ONES = torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH)
NOT_CAUSAL = "must be the causal mask: non-zero above the diagonal, zero elsewhere"
WRONG_MASKS = {
    "inverted": (ONES.tril(), NOT_CAUSAL),
    "diagonal hidden": (ONES.triu(), NOT_CAUSAL),
    "one entry off": (ONES.triu(1) - ONES.triu(5), NOT_CAUSAL),
    "too large": (torch.ones(7, 7).triu(1), "must be the causal mask of shape (6, 6), got (7, 7)"),
    "with batch axis": (ONES.triu(1)[None], "must be the causal mask of shape (6, 6), got (1, 6, 6)"),
    "no tensor": ("causal", "must be the causal mask of shape (6, 6), got str"),
}


@every_causal
@pytest.mark.parametrize("label", WRONG_MASKS)
def test_a_checkpoint_with_another_mask_is_refused(name, label):
    mask, message = WRONG_MASKS[label]
    key = "heads.1.mask" if name == WRAPPER else "mask"
    with pytest.raises(RuntimeError) as caught:
        build(name, **MODULES[name]).load_state_dict({**book_checkpoint(name), key: mask})
    assert str(caught.value) == f"Error(s) in loading state_dict for {name}:\n\t{key} {message}"


def test_a_checkpoint_of_the_book_loads_inside_a_larger_module():
    outer = nn.Sequential(nn.Linear(D_IN, D_IN), build(MHA, **MODULES[MHA]))
    inner = {f"1.{key}": tensor for key, tensor in book_checkpoint(MHA).items()}
    outer.load_state_dict({"0.weight": torch.ones(D_IN, D_IN), "0.bias": torch.ones(D_IN), **inner})
    assert torch.equal(outer[1].out_proj.bias, inner["1.out_proj.bias"])


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}


@cover.rotated(("name", "how"), list(MODULES), list(COPIES))
def test_a_copy_stands_on_its_own(name, how):
    module, x = make(name), draw(2, 5, D_IN)
    wanted = output(module, x)
    copied = COPIES[how](module)
    for tensor in module.parameters():
        tensor.data.zero_()
    del module
    gc.collect()
    np.testing.assert_array_equal(output(copied, x), wanted)


@every_causal
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_still_loads_the_checkpoints_of_the_book(name, how):
    copied = COPIES[how](make(name))
    gc.collect()
    copied.load_state_dict(book_checkpoint(name))
    key = "heads.1.mask" if name == WRAPPER else "mask"
    with pytest.raises(RuntimeError, match=r"mask must be the causal mask of shape \(6, 6\), got \(2, 2\)"):
        copied.load_state_dict({**book_checkpoint(name), key: torch.ones(2, 2)})


@every_module
def test_a_state_dict_goes_round(name):
    given, target, x = make(name, 0), make(name, 1), draw(2, 5, D_IN)
    assert sorted(given.state_dict()) == sorted(row.rule.torch for row in given.config.parameters)
    assert not np.array_equal(output(given, x), output(target, x))
    target.load_state_dict(given.state_dict())
    np.testing.assert_array_equal(output(given, x), output(target, x))


@every_module
def test_parameters_have_the_dtype_and_the_device_asked_for(name):
    module = build(name, **MODULES[name], dtype=torch.float64, device="meta")
    assert {(tensor.dtype, tensor.device.type) for tensor in module.parameters()} == {(torch.float64, "meta")}


@pytest.mark.parametrize("name", ["GroupedQueryAttention", "MultiHeadLatentAttention", "SparseIndexedAttention"])
def test_a_cache_of_before_a_change_of_dtype_is_read(name):
    config = specs.find_variant(name).examples[0].config
    module = getattr(torch_attn, name)(config).eval()
    cache, x = module.init_cache(2, 5), torch.randn(2, 5, config.d_in, dtype=torch.float64)
    module.double()
    first, cache = module(x[:, :4], cache=cache)
    last, _ = module(x[:, 4:], cache=cache)
    torch.testing.assert_close(torch.cat([first, last], 1), module(x), rtol=1e-4, atol=1e-4)


def test_a_cache_keeps_positions_beyond_32_bits():
    config = specs.GroupedQueryAttentionConfig(8, 2, mask=causal(), position=specs.Alibi())
    module = torch_attn.GroupedQueryAttention(config).eval()
    x, positions = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)), torch.arange(4) + 2**40
    cache = module.init_cache(1, 4)
    _, cache = module(x[:, :3], positions=positions[:3], cache=cache)
    last, _ = module(x[:, 3:], positions=positions[3:], cache=cache)
    torch.testing.assert_close(last, module(x)[:, 3:])
