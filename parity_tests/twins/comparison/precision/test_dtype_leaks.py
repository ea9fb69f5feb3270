"""A side that computes in a wider dtype than its inputs and weights have is named with the deepest submodule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge.parity import compare, function
from attn_parity.compare.prepare import prepare
from attn_parity.verdict.runner import Live

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
TABLE = np.linspace(0.5, 1.5, 4, dtype=np.float32)


class TorchScale(nn.Module):
    """Multiplies by weights and a table, which stays in float32 if it is wide."""

    def __init__(self, *, wide):
        super().__init__()
        self.wide, self.weight = wide, nn.Parameter(torch.ones(4))

    def forward(self, x):
        table = torch.from_numpy(TABLE)
        return x * self.weight * (table if self.wide else table.to(x.dtype))


class TorchModel(nn.Module):
    """Two layers with a part between and a norm in float32; `fault` is the place whose cast is missing."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.first, self.last = fault, nn.Linear(4, 4), nn.Linear(4, 4)
        self.scales = nn.ModuleList([TorchScale(wide=fault == "part"), TorchScale(wide=fault == "end")])
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        wide = self.scales[0](self.first(x)).float()
        wide = nn.functional.layer_norm(wide, (4,), self.norm.weight.float(), self.norm.bias.float())
        x = self.last(wide.to(x.dtype))
        return self.scales[1](x.float() if self.fault == "code" else x)


class FlaxScale(nnx.Module):
    def __init__(self, *, wide):
        self.wide, self.weight = wide, nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return x * self.weight[...] * (jnp.asarray(TABLE) if self.wide else jnp.asarray(TABLE, x.dtype))


class FlaxModel(nnx.Module):
    """The same, with a gate whose layer computes in float32 as well."""

    def __init__(self, fault=""):
        rngs = nnx.Rngs(0)
        self.fault, self.first, self.last = fault, nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.scales = nnx.List([FlaxScale(wide=fault == "part"), FlaxScale(wide=fault == "end")])
        self.norm = nnx.LayerNorm(4, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
        self.gate = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        dtype = x.dtype
        x = self.scales[0](self.first(x))
        x = x * jax.nn.sigmoid(self.gate(x)).astype(x.dtype)
        x = self.norm(x).astype(dtype if self.fault != "code" else jnp.float32)
        x = self.scales[1](self.last(x))
        return x if self.fault == "end" else x.astype(dtype)


class LinenModel(linen.Module):
    fault: str = ""

    @linen.compact
    def __call__(self, x):
        h = linen.LayerNorm(dtype=jnp.float32 if self.fault == "part" else None, name="norm")(x)
        h = linen.Dense(4, name="up")(h)
        return linen.Dense(4, name="down")(h).astype(x.dtype)


def linen_side(fault):
    module = LinenModel(fault)
    return module, module.init(jax.random.key(0), X)


def leaks(side):
    pair = prepare(side, side, X)
    return [(one.path, one.before, one.own, one.returned) for one in Live(pair).dtype_leaks("bfloat16")[:1]]


@pytest.mark.parametrize(
    ("make", "fault", "place"),
    [
        (TorchModel, "end", ("scales.1", "")),
        (TorchModel, "code", ("", "scales.1")),
        (FlaxModel, "part", ("scales.0", "")),
        (FlaxModel, "end", ("scales.1", "")),
        (FlaxModel, "code", ("norm", "")),
        (linen_side, "part", ("norm", "")),
    ],
)
def test_the_deepest_part_that_widens_is_named(make, fault, place):
    assert leaks(make(fault)) == [(*place, "bfloat16", "float32")]


@pytest.mark.parametrize(
    "side", [TorchModel(), TorchModel("part"), FlaxModel(), linen_side("")], ids=["torch", "cast", "nnx", "linen"]
)
def test_float32_that_is_cast_back_is_no_leak(side):
    assert leaks(side) == []


def test_a_function_that_returns_float32_is_named():
    weights = {"w": jnp.ones(4)}
    assert leaks(function(lambda w, x: x * w["w"] * jnp.asarray(TABLE), weights)) == [("", "", "bfloat16", "float32")]
    assert leaks(function(lambda w, x: x * w["w"], weights)) == []


def test_a_report_names_the_leaks_of_both_sides():
    first, second = TorchScale(wide=True).bfloat16(), TorchScale(wide=False).bfloat16()
    report = compare(first, second, X.astype(ml_dtypes.bfloat16), seeds=1)
    (leak,) = report.to_json()["dtype_leaks"]
    assert leak == {"label": "first", "path": "", "before": "", "own": "bfloat16", "returned": "float32"}
    (note,) = [one for one in report.notes if "widens" in one]
    assert note.startswith("first computes in float32 from the module itself, outside its submodules on")
