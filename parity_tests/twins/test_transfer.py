"""`attn_bridge.transfer` between real modules of both frameworks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import Rule, Rules, TransferReport, WeightsMismatchError, transfer
from jax_attn import backend as jax_backend
from torch_attn import backend as torch_backend

from ..support.calls.bad_calls import D_IN, MODULES

DTYPES = {
    "float64": np.dtype("float64"),
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
every_module = pytest.mark.parametrize("name", MODULES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make_torch(name: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> torch.nn.Module:
    """Return a torch module with drawn weights, biases too."""
    module = getattr(torch_attn, name)(**{**MODULES[name], **changes}).eval()
    rng = np.random.default_rng(seed)
    drawn = {row.rule.torch: rng.normal(size=row.shape).astype(DTYPES[dtype]) for row in module.config.parameters}
    torch_backend.set_weights(module, drawn)
    return module


@functools.cache
def _flax(name: str) -> nnx.Module:
    return getattr(jax_attn, name)(**MODULES[name], rngs=nnx.Rngs(0))


def make_flax(name: str) -> nnx.Module:
    """Return a Flax module with the weights it starts with, which differ from those of `make_torch`."""
    return nnx.clone(_flax(name))


@jax.jit
def call(module: nnx.Module, x: jax.Array) -> jax.Array:
    """Run a Flax module; it is an argument, because ``jax.jit(module)`` would keep the weights of its first call."""
    return module(x)


def snapshot(module: Any) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return name -> shape, dtype, bytes of all weights."""
    backend = torch_backend if isinstance(module, torch.nn.Module) else jax_backend
    return {
        name: (array.shape, array.dtype.name, array.tobytes()) for name, array in backend.get_weights(module).items()
    }


def special_bits(dtype: np.dtype, size: int) -> np.ndarray:
    """Return random bit patterns, preceded by NaNs with payloads, infinities, -0.0, and the smallest denormals."""
    kind = np.dtype(f"u{dtype.itemsize}")
    bits = 8 * dtype.itemsize
    infinity = int(np.asarray(np.inf, dtype).view(kind))
    sign = 1 << (bits - 1)
    values = [infinity, infinity | sign, sign, 1, sign | 1, infinity + 1, infinity + 2, infinity | sign | 3, sign - 1]
    noise = np.random.default_rng(0).integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    noise[: len(values)] = values[:size]
    return noise.view(dtype)


@every_module
@every_dtype
def test_weights_go_there_and_back_to_the_last_bit(name, dtype):
    """NaN payloads, infinities, -0.0 and denormals included."""
    source = make_torch(name)
    arrays = {row.rule.torch: row.shape for row in source.config.parameters}
    bits = special_bits(DTYPES[dtype], sum(map(np.prod, arrays.values())))
    parts = np.split(bits, np.cumsum([np.prod(shape) for shape in arrays.values()])[:-1])
    torch_backend.set_weights(
        source, {key: part.reshape(shape) for (key, shape), part in zip(arrays.items(), parts, strict=True)}
    )
    before = snapshot(source)
    flax, back = make_flax(name), make_torch(name, 1)
    with jax_backend.precision(dtype):
        there = transfer(source, flax)
        again = transfer(flax, back)
    assert snapshot(back) == before
    assert snapshot(source) == before
    assert {entry[1] for entry in snapshot(flax).values()} == {dtype}
    assert (there.direction, again.direction) == ("torch -> flax", "flax -> torch")
    assert len(there) == len(again) == len(arrays)


@every_module
@pytest.mark.parametrize("seed", [0, 1])
def test_twins_give_the_same_after_a_transfer(name, seed):
    source, flax = make_torch(name, seed), make_flax(name)
    flax.eval()
    x = np.random.default_rng(seed).normal(size=(2, 5, D_IN)).astype("float32")
    wanted = source(torch.from_numpy(x)).detach().numpy()
    before = np.asarray(call(flax, x))
    transfer(source, flax)
    assert np.abs(before - wanted).max() > 1e-2
    np.testing.assert_allclose(call(flax, x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@every_module
def test_a_flax_module_gives_its_weights_to_a_torch_one(name):
    flax, target = make_flax(name), make_torch(name)
    transfer(flax, target)
    wanted = jax_backend.get_weights(flax)
    actual = torch_backend.get_weights(target)
    for row in target.config.parameters:
        np.testing.assert_array_equal(
            actual[row.rule.torch].T if row.rule.pattern == "o i -> i o" else actual[row.rule.torch],
            wanted[row.rule.flax],
        )


def test_the_report_lists_every_tensor():
    report = transfer(make_torch("LayerNorm", dtype="float16"), make_flax("LayerNorm"))
    assert report == TransferReport(
        "torch -> flax",
        (("scale", "scale", (4,), "float16"), ("shift", "shift", (4,), "float16")),
        ("scale", "shift"),
    )
    assert str(report) == (
        "torch -> flax: 2 tensors copied bit for bit\n"
        "  scale -> scale (4,) float16, dtype taken from the source\n"
        "  shift -> shift (4,) float16, dtype taken from the source"
    )


def test_the_report_gives_names_and_shapes_of_both_sides():
    report = transfer(make_torch("SelfAttention_v2"), make_flax("SelfAttention_v2"))
    assert report.tensors[:2] == (
        ("W_query.weight", "W_query.kernel", (4, 3), "float32"),
        ("W_query.bias", "W_query.bias", (3,), "float32"),
    )
    assert report.redtyped == ()


def test_gradients_of_another_dtype_do_not_outlive_the_weights():
    target = make_torch("LayerNorm")
    target(torch.ones(2, D_IN)).sum().backward()
    transfer(_half_norm(), target)
    assert {(tensor.dtype, tensor.grad) for tensor in target.parameters()} == {(torch.float16, None)}


def _half_norm() -> nnx.Module:
    return jax_attn.LayerNorm(D_IN, rngs=nnx.Rngs(0), param_dtype=jnp.float16)


# ---- memory


@every_module
def test_flax_weights_do_not_follow_the_torch_module(name):
    source, flax = make_torch(name), make_flax(name)
    transfer(source, flax)
    before = snapshot(flax)
    with torch.no_grad():
        for tensor in source.parameters():
            tensor.add_(1.0)
    assert snapshot(flax) == before


@every_module
def test_torch_weights_can_be_trained_without_touching_flax(name):
    flax, target = make_flax(name), make_torch(name)
    transfer(flax, target)
    before = snapshot(flax)
    with torch.no_grad():
        for tensor in target.parameters():
            tensor.add_(1.0)
    assert snapshot(flax) == before


def test_torch_parameters_stay_the_same_objects():
    """An optimiser that holds them goes on working."""
    target = make_torch("MultiHeadAttention")
    before = dict(target.named_parameters())
    transfer(make_flax("MultiHeadAttention"), target)
    assert all(before[name] is tensor for name, tensor in target.named_parameters())


@pytest.mark.parametrize("to_flax", [True, False], ids=["to flax", "to torch"])
def test_a_compiled_torch_module_takes_part_as_itself(to_flax):
    plain, flax = make_torch("MultiHeadAttention"), make_flax("MultiHeadAttention")
    compiled = torch.compile(plain, backend="eager")
    report = transfer(compiled, flax) if to_flax else transfer(flax, compiled)
    assert len(report) == 8
    np.testing.assert_array_equal(flax.W_query.kernel[...], plain.W_query.weight.detach().numpy().T)


# ---- refusals


def refuse(error: type[Exception], source: Any, target: Any, rules: Any = None) -> Exception:
    """Check that a transfer is refused with that very type and leaves both modules as they were; return the error."""
    before = snapshot(source), snapshot(target)
    with pytest.raises(error) as caught:
        transfer(source, target, rules)
    assert type(caught.value) is error
    assert (snapshot(source), snapshot(target)) == before
    return caught.value


NEITHER = "transfer takes a torch.nn.Module and a flax.nnx.Module, in either order, got "
OF_TORCH, OF_FLAX = "target.load_state_dict(source.state_dict())", "nnx.update(target, nnx.state(source, nnx.Param))"


@pytest.mark.parametrize(
    ("kinds", "source", "target"),
    [
        (f"LayerNorm and LayerNorm, both of torch; use {OF_TORCH}", make_torch, make_torch),
        (f"LayerNorm and LayerNorm, both of flax; use {OF_FLAX}", make_flax, make_flax),
        ("LayerNorm and NoneType", make_torch, lambda name: None),
        ("dict and LayerNorm", lambda name: {"scale": np.ones(4)}, make_flax),
        ("type and LayerNorm", lambda name: torch_attn.LayerNorm, make_flax),
        ("LayerNorm and ModuleMeta", make_torch, lambda name: jax_attn.LayerNorm),
    ],
    ids=["torch twice", "flax twice", "nothing", "a dictionary", "a torch class", "a Flax class"],
)
def test_anything_but_one_module_of_each_framework_is_refused(kinds, source, target):
    with pytest.raises(TypeError) as caught:
        transfer(source("LayerNorm"), target("LayerNorm"))
    assert type(caught.value) is TypeError
    assert str(caught.value) == NEITHER + kinds


def test_missing_unexpected_and_misshapen_weights_come_in_one_error():
    """The source has q, k and v biases, another width and no output projection, which the target wants."""
    source = torch_attn.CausalAttention(D_IN, 3, 6, qkv_bias=True)
    target = jax_attn.MultiHeadAttention(D_IN, 6, 6, num_heads=2, rngs=nnx.Rngs(0))
    error = refuse(WeightsMismatchError, source, target)
    assert error.missing == ["out_proj.bias", "out_proj.kernel"]
    assert error.unexpected == ["W_key.bias", "W_query.bias", "W_value.bias"]
    assert error.misshapen == [
        f"{name}.kernel: expected (4, 6), got (4, 3)" for name in ("W_key", "W_query", "W_value")
    ]
    assert str(error) == (
        "weights do not match: missing: out_proj.bias, out_proj.kernel; "
        "unexpected: W_key.bias, W_query.bias, W_value.bias; "
        "misshapen: W_key.kernel: expected (4, 6), got (4, 3), W_query.kernel: expected (4, 6), got (4, 3), "
        "W_value.kernel: expected (4, 6), got (4, 3)"
    )


def test_the_way_back_refuses_alike():
    source = jax_attn.CausalAttention(D_IN, 3, 6, qkv_bias=True, rngs=nnx.Rngs(0))
    error = refuse(WeightsMismatchError, source, torch_attn.MultiHeadAttention(D_IN, 6, 6, num_heads=2))
    assert error.missing == ["out_proj.bias", "out_proj.weight"]
    assert error.unexpected == ["W_key.bias", "W_query.bias", "W_value.bias"]
    assert error.misshapen == [
        f"{name}.weight: expected (6, 4), got (3, 4)" for name in ("W_key", "W_query", "W_value")
    ]


@pytest.mark.parametrize("to_flax", [True, False], ids=["to flax", "to torch"])
def test_twins_whose_heads_are_split_otherwise_are_refused(to_flax):
    """All shapes fit, but the weights would mean something else."""
    ours = torch_attn.MultiHeadAttention(D_IN, 6, 6, num_heads=3, qkv_bias=True)
    pair = (ours, make_flax("MultiHeadAttention")) if to_flax else (make_flax("MultiHeadAttention"), ours)
    numbers = (3, 2) if to_flax else (2, 3)
    error = refuse(ValueError, *pair)
    assert str(error) == "configs differ: num_heads is {} in the source and {} in the target".format(*numbers)


def test_norms_of_another_eps_are_refused():
    error = refuse(ValueError, make_torch("LayerNorm", eps=1e-6), make_flax("LayerNorm"))
    assert str(error) == "configs differ: eps is 1e-06 in the source and 1e-05 in the target"


def test_variants_with_like_weights_are_refused():
    source = make_torch("SelfAttention_v2")
    error = refuse(ValueError, source, make_flax("CausalAttention"))
    assert str(error) == "configs differ: SelfAttentionV2Config in the source, CausalAttentionConfig in the target"


def test_dropout_and_context_length_may_differ():
    source, target = make_torch("CausalAttention", dropout=0.3, context_length=9), make_flax("CausalAttention")
    transfer(source, target)
    np.testing.assert_array_equal(target.W_key.kernel[...], source.W_key.weight.detach().numpy().T)


def test_double_precision_is_refused_where_jax_would_narrow_it():
    error = refuse(TypeError, make_torch("CausalAttention", dtype="float64"), make_flax("CausalAttention"))
    assert str(error) == ("W_key.bias of dtype float64 would narrow to float32 in JAX; enable jax_enable_x64 first")


def test_a_late_refusal_leaves_the_earlier_tensors_alone():
    """Only the last tensor cannot be taken."""
    source = make_torch("MultiHeadAttention")
    source.W_value.weight.data = source.W_value.weight.data.double()
    refuse(TypeError, source, make_flax("MultiHeadAttention"))


def test_a_target_without_memory_is_refused():
    target = torch_attn.LayerNorm(D_IN, device="meta")
    with pytest.raises(TypeError) as caught:
        transfer(make_flax("LayerNorm"), target)
    assert str(caught.value) == "scale is on the meta device; call module.to_empty(device=...) first"


# ---- modules of one's own


class TorchPair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 6)
        self.heads = torch.nn.Linear(5, 8, bias=False)


class FlaxPair(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 6, rngs=nnx.Rngs(0))
        self.heads = nnx.Param(jnp.zeros((5, 2, 4)))


OWN_RULES = Rules(
    [
        Rule("fc.weight", "dense.kernel", "o i -> i o"),
        Rule("fc.bias", "dense.bias"),
        Rule("heads.weight", "heads", "(h d) e -> e h d", h=2),
    ]
)


@pytest.mark.parametrize("rules", [OWN_RULES, list(OWN_RULES)], ids=["set", "list"])
def test_users_modules_transfer_with_their_rules(rules):
    source, flax, back = TorchPair(), FlaxPair(), TorchPair()
    transfer(source, flax, rules)
    np.testing.assert_array_equal(flax.dense.kernel[...], source.fc.weight.detach().numpy().T)
    np.testing.assert_array_equal(
        flax.heads[...], source.heads.weight.detach().numpy().reshape(2, 4, 5).transpose(2, 0, 1)
    )
    transfer(flax, back, rules)
    assert snapshot(back) == snapshot(source)


def test_layers_at_other_paths_are_refused_with_rules_for_them():
    error = refuse(WeightsMismatchError, TorchPair(), FlaxPair())
    assert error.unexpected == ["fc.bias", "fc.weight", "heads.weight"]
    assert error.missing == ["dense.bias", "dense.kernel", "heads"]
    assert error.advice == (
        "give rules=[Rule('fc.bias', 'dense.bias'), Rule('fc.weight', 'dense.kernel', 'o i -> i o')]"
    )


def test_rules_that_miss_a_weight_are_refused():
    error = refuse(WeightsMismatchError, TorchPair(), FlaxPair(), list(OWN_RULES)[:2])
    assert (error.missing, error.unexpected, error.misshapen) == (["heads"], ["heads.weight"], [])


class TorchModel(torch.nn.Module):
    """Ours inside a larger module: in a list, in a list of lists, and as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.norm = torch_attn.LayerNorm(D_IN)
        self.blocks = torch.nn.ModuleList(
            torch_attn.MultiHeadAttention(**MODULES["MultiHeadAttention"]) for _ in range(2)
        )
        self.wrapper = torch_attn.MultiHeadAttentionWrapper(**MODULES["MultiHeadAttentionWrapper"])


class FlaxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = jax_attn.LayerNorm(D_IN, rngs=rngs)
        self.blocks = nnx.List(
            jax_attn.MultiHeadAttention(**MODULES["MultiHeadAttention"], rngs=rngs) for _ in range(2)
        )
        self.wrapper = jax_attn.MultiHeadAttentionWrapper(**MODULES["MultiHeadAttentionWrapper"], rngs=rngs)


def test_ours_inside_a_larger_module_cross_without_rules():
    source, flax, back = TorchModel(), FlaxModel(), TorchModel()
    report = transfer(source, flax)
    assert ("blocks.1.W_query.weight", "blocks.1.W_query.kernel", (4, 6), "float32") in report.tensors
    assert len(report) == len(source.state_dict()) == 30
    transfer(flax, back)
    assert snapshot(back) == snapshot(source)


def test_our_modules_inside_larger_ones_compare_configs():
    source = TorchModel()
    source.blocks[1] = torch_attn.MultiHeadAttention(D_IN, 6, 6, num_heads=3, qkv_bias=True)
    error = refuse(ValueError, source, FlaxModel())
    assert str(error) == "configs differ: num_heads is 3 in the source and 2 in the target"


class TorchCounter(torch.nn.Module):
    """Parameters beside an integer buffer, as batch normalisation has."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.tensor(2**40 + 1 if dtype == torch.int64 else 7, dtype=dtype))


class FlaxCounter(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.zeros(3))
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))


COUNTER_RULES = Rules([Rule("weight", "weight"), Rule("steps", "steps")])


def test_wide_integers_are_refused_where_jax_would_narrow_them():
    error = refuse(TypeError, TorchCounter(torch.int64), FlaxCounter(), COUNTER_RULES)
    assert str(error) == "steps of dtype int64 would narrow to int32 in JAX; enable jax_enable_x64 first"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integer_buffers_cross_as_they_are(dtype):
    source, flax, back = TorchCounter(dtype), FlaxCounter(), TorchCounter(torch.int16)
    with jax.enable_x64(True):
        transfer(source, flax, COUNTER_RULES)
        transfer(flax, back, COUNTER_RULES)
    assert snapshot(back) == snapshot(source)


def _writes(target):
    return {name: tensor.clone() for name, tensor in target.state_dict().items()}


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda module: setattr(module.W_value, "weight", torch.nn.Parameter(torch.randn(1, 3).expand(4, 3))),
            TypeError,
            "W_value.weight is an expanded tensor, whose elements share memory, and cannot be written",
        ),
        (
            lambda module: setattr(module.W_key, "weight", module.W_query.weight),
            ValueError,
            "W_key.weight and W_query.weight are one tensor in the target and two different ones in the source",
        ),
    ],
)
def test_an_unwritable_target_is_refused_before_any_write(spoil, error, message):
    source = jax_attn.SelfAttention_v2(3, 4, rngs=nnx.Rngs(0))
    target = torch_attn.SelfAttention_v2(3, 4)
    spoil(target)
    before = _writes(target)
    with pytest.raises(error) as caught:
        transfer(source, target)
    assert str(caught.value) == message
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_an_integer_array_is_refused_by_a_parameter_with_gradients():
    source = jax_attn.SelfAttention_v1(3, 4, rngs=nnx.Rngs(0))
    source.W_value = nnx.Param(jnp.ones((3, 4), jnp.int32))
    target = torch_attn.SelfAttention_v1(3, 4)
    before = _writes(target)
    with pytest.raises(TypeError, match="W_value requires gradients and cannot take dtype int32"):
        transfer(source, target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
