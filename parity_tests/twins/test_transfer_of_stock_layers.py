"""`attn_bridge.transfer` between attention layers of torch and Flax, stock ones and drop-ins, and by joint rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import Rule, WeightsMismatchError, transfer
from jax_attn import compat as flax_compat
from torch_attn import compat as torch_compat

D, H, B, T, S = 8, 2, 2, 5, 7
SIZES = {
    "packed": ({}, {}),
    "separate": ({"kdim": 6, "vdim": 6}, {"in_kv_features": 6}),
    "no biases": ({"bias": False}, {"use_bias": False}),
}
TORCH = {"stock": nn.MultiheadAttention, "drop-in": torch_compat.MultiheadAttention}
FLAX = {"stock": nnx.MultiHeadAttention, "drop-in": flax_compat.MultiHeadAttention}
every_size = pytest.mark.parametrize("size", SIZES)
every_pair = pytest.mark.parametrize(("ours", "theirs"), [(a, b) for a in TORCH for b in FLAX])


def make_torch(kind="drop-in", seed=0, heads=H, **options):
    """Return a layer whose weights are all drawn, biases too."""
    torch.manual_seed(seed)
    layer = TORCH[kind](D, heads, batch_first=True, **options).eval()
    for weight in layer.parameters():
        nn.init.normal_(weight)
    return layer


def make_flax(kind="drop-in", seed=0, heads=H, **options):
    """Return a layer whose weights are all drawn, biases too."""
    draw = nnx.initializers.normal(1.0)
    return FLAX[kind](heads, D, decode=False, bias_init=draw, rngs=nnx.Rngs(seed), **options)


def outputs(torch_layer, flax_layer):
    """Return the outputs of both for the same inputs."""
    rng = np.random.default_rng(0)
    width = torch_layer.kdim
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (B, S, width), (B, S, width)))
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        ours = torch_layer(*map(torch.from_numpy, (q, k, v)))[0].numpy()
        return ours, np.asarray(flax_layer(*map(jnp.asarray, (q, k, v))))


def bits(arrays):
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def torch_bits(layer):
    return bits({name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()})


def flax_bits(layer):
    return bits({".".join(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))})


@every_pair
@every_size
def test_attention_layers_cross_without_rules(ours, theirs, size):
    options = SIZES[size]
    torch_layer, flax_layer = make_torch(ours, **options[0]), make_flax(theirs, **options[1])
    report = transfer(torch_layer, flax_layer)
    assert len(report) == (4 if size == "no biases" else 8)
    expected, got = outputs(torch_layer, flax_layer)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    back = make_torch(ours, 1, **options[0])
    transfer(flax_layer, back)
    assert torch_bits(back) == torch_bits(torch_layer)


@every_pair
@every_size
def test_attention_layers_of_flax_return_to_the_last_bit(ours, theirs, size):
    options = SIZES[size]
    flax_layer, torch_layer = make_flax(theirs, **options[1]), make_torch(ours, **options[0])
    transfer(flax_layer, torch_layer)
    back = make_flax(theirs, 1, **options[1])
    transfer(torch_layer, back)
    assert flax_bits(back) == flax_bits(flax_layer)


def test_the_report_names_the_parts_of_a_packed_weight():
    rows = transfer(make_flax(), make_torch()).tensors
    assert ("query.kernel, key.kernel, value.kernel", "in_proj_weight", (3 * D, D), "float32") in rows
    rows = transfer(make_torch(), make_flax()).tensors
    assert ("in_proj_weight", "key.kernel", (D, H, D // H), "float32") in rows


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([make_torch("stock", 1), make_torch("drop-in", 2)])


class FlaxModel(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([make_flax("drop-in", 1), make_flax("stock", 2)])


def test_attention_layers_inside_larger_modules_cross():
    torch_model, flax_model = TorchModel(), FlaxModel()
    transfer(torch_model, flax_model)
    for pair in zip(torch_model.blocks, flax_model.blocks, strict=True):
        np.testing.assert_allclose(*outputs(*pair), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("to_flax", [True, False])
def test_a_dtype_of_the_source_crosses_with_its_bits(to_flax):
    torch_layer, flax_layer = make_torch().bfloat16(), make_flax(param_dtype=jnp.bfloat16)
    target = make_flax() if to_flax else make_torch()
    report = transfer(torch_layer if to_flax else flax_layer, target)
    assert {row[3] for row in report.tensors} == {"bfloat16"}
    assert len(report.redtyped) == len(report)


REFUSED = {
    "num_heads is 4 in the source and 2 in the target": ({}, {"heads": 4}),
    "num_kv_heads is 1 in the source and 2 in the target": ({}, {"num_kv_heads": 1}),
    "bias is True in the source and False in the target": ({"bias": False}, {}),
    "normalize_qk is True in the source and False in the target": ({}, {"normalize_qk": True}),
    "add_bias_kv is False in the source and True in the target": ({"add_bias_kv": True}, {}),
    "add_zero_attn is False in the source and True in the target": ({"add_zero_attn": True}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_layers_of_another_meaning_are_refused(message):
    of_torch, of_flax = REFUSED[message]
    target, before = make_torch(**of_torch), torch_bits(make_torch(**of_torch))
    with pytest.raises(ValueError, match=rf"^configs differ: {message}$"):
        transfer(make_flax(**of_flax), target)
    assert torch_bits(target) == before


def test_values_of_another_width_are_refused():
    with pytest.raises(WeightsMismatchError, match=r"misshapen: value.kernel: expected \(6, 2, 4\), got \(4, 2, 4\)$"):
        transfer(make_torch(kdim=6, vdim=4), make_flax(in_kv_features=6))


class TorchStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
        self.register_buffer("mask", torch.ones(2, 2))


class FlaxStack(nnx.Module):
    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.zeros((3, 3, 4))), nnx.Param(jnp.zeros((3, 4)))


RULES = [
    Rule("layers.{i}.weight", "kernel", "o i -> s i o", stack="s"),
    Rule("layers.{i}.bias", "bias", "o -> s o", stack="s"),
    Rule(torch="mask", drop="the causal mask"),
]


def test_joint_rules_cross_both_ways_and_leave_dropped_tensors():
    source, middle, target = TorchStack(), FlaxStack(), TorchStack()
    target.mask.mul_(5)
    transfer(source, middle, RULES)
    np.testing.assert_array_equal(middle.kernel[1], source.layers[1].weight.detach().numpy().T)
    transfer(middle, target, RULES)
    after = torch_bits(target)
    assert torch.equal(target.mask, torch.full((2, 2), 5.0))
    del after["mask"]
    assert after == {name: value for name, value in torch_bits(source).items() if name != "mask"}
