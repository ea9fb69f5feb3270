"""Quantised layers, spectral norms and tables: what they hold beside parameters, right and wrong."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare, function

from ..compare.sides import X

random = np.random.default_rng(7)
WHOLE = random.integers(-127, 127, size=(6, 8)).astype(np.int8)
SCALE = random.uniform(0.01, 0.1, size=6).astype(np.float32)
TABLE = np.sin(np.arange(5)[:, None] / 3.0 ** np.arange(8)).astype(np.float32)


class TorchQuantised(nn.Module):
    """A layer whose matrix is whole numbers and a scale per row, neither of which is a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.from_numpy(WHOLE))
        self.register_buffer("scale", torch.from_numpy(SCALE))
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale[:, None]).T + self.bias


class FlaxQuantised(nnx.Module):
    def __init__(self, factor=1.0):
        self.weight = nnx.Variable(jnp.zeros((6, 8), jnp.int8))
        self.scale = nnx.Variable(jnp.ones(6))
        self.bias = nnx.Param(jnp.zeros(6))
        self._factor = factor

    def __call__(self, x):
        return x @ (self.weight[...].astype(x.dtype) * self._factor * self.scale[...][:, None]).T + self.bias[...]


def quantised(name="kernel"):
    def call(weights, x):
        return x @ (weights[name].astype(x.dtype) * weights["scale"][:, None]).T + weights["bias"]

    return function(call, {name: jnp.zeros((6, 8), jnp.int8), "scale": jnp.ones(6), "bias": jnp.ones(6)})


@pytest.mark.parametrize("second", [FlaxQuantised, quantised, lambda: quantised("weight")])
def test_whole_numbers_and_scales_of_quantised_layers_are_carried(second):
    report = compare(TorchQuantised(), second(), X, seeds=1)
    assert report.verdict == "equal"
    assert len(report.pairing) == 3


def test_a_wrong_use_of_a_scale_is_seen():
    assert compare(TorchQuantised(), FlaxQuantised(1.01), X, seeds=1).verdict == "different"


class FlaxSpectral(nnx.Module):
    """A layer whose kernel is divided by u W v, with u and v as `torch.nn.utils.spectral_norm` holds them."""

    def __init__(self, kind, power=1.0, *, even=False):
        self.kernel, self.bias = nnx.Param(jnp.ones((8, 6))), nnx.Param(jnp.zeros(6))
        some = np.random.default_rng(3)
        first = (np.full(size, size**-0.5) if even else some.normal(size=size) for size in (6, 8))
        self.u, self.v = (kind(jnp.asarray(one, jnp.float32)) for one in first)
        self._power = power

    def __call__(self, x):
        sigma = self.u[...] @ self.kernel[...].T @ self.v[...]
        return x @ (self.kernel[...] / sigma**self._power) + self.bias[...]


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.BatchStat])
def test_vectors_of_a_spectral_norm_are_carried(kind):
    torch.manual_seed(0)
    first = nn.utils.spectral_norm(nn.Linear(8, 6))
    assert compare(first, FlaxSpectral(kind), X, seeds=1).verdict == "equal"
    assert compare(first, FlaxSpectral(kind, 2.0), X, seeds=1).verdict == "different"


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("kind", [nnx.Variable, nnx.BatchStat])
def test_even_unit_vectors_wait_for_those_of_a_spectral_norm(norm, kind):
    torch.manual_seed(0)
    first = norm(nn.Linear(8, 6))
    assert compare(first, FlaxSpectral(kind, even=True), X, seeds=1).verdict == "equal"
    assert compare(first, FlaxSpectral(kind, 2.0, even=True), X, seeds=1).verdict == "different"


class TorchTable(nn.Module):
    def __init__(self, *, persistent, table=TABLE):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.from_numpy(table), persistent=persistent)

    def forward(self, x):
        return x * self.weight + self.table * getattr(self, "scale", 1.0)


class FlaxTable(nnx.Module):
    def __init__(self, kind, factor=1.0, name="table", scale=None):
        self.weight = nnx.Param(jnp.ones(8))
        setattr(self, name, kind(jnp.asarray(TABLE * factor)))
        self.name, self.scale = name, 1.0 if scale is None else kind(jnp.asarray(scale))

    def __call__(self, x):
        scale = self.scale if isinstance(self.scale, float) else self.scale[...]
        return x * self.weight[...] + getattr(self, self.name)[...] * scale


def table_function(kind, factor=1.0, scale=1.0):
    del kind
    weights = {"weight": jnp.ones(8), "table": jnp.asarray(TABLE * factor)}
    weights |= {} if scale == 1.0 else {"scale": jnp.asarray(scale)}
    return function(lambda w, x: x * w["weight"] + w["table"] * w.get("scale", 1.0), weights)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (FlaxTable, nnx.Variable),
        (FlaxTable, nnx.Cache),
        (FlaxTable, nnx.Param),
        (FlaxTable, nnx.BatchStat),
        (table_function, None),
    ],
)
def test_a_right_table_passes_and_a_wrong_one_does_not(second, kind, persistent):
    first = TorchTable(persistent=persistent)
    assert compare(first, second(kind), X, seeds=1).verdict == "equal"
    report = compare(first, second(kind, 1.01), X, seeds=1)
    assert report.verdict == "different"
    assert any("table" in note and "first = " in note for note in report.notes)


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
def test_a_mask_that_hides_other_keys_is_not_overwritten(kind):
    mask = np.tril(np.ones((5, 8), np.float32))
    first, second = TorchTable(persistent=True, table=mask), FlaxTable(kind)
    second.table.set_value(jnp.asarray(np.triu(mask)))
    assert compare(first, second, X, seeds=1).verdict == "different"


def test_a_wrong_first_variance_is_seen_without_transfer():
    first, second = nn.BatchNorm1d(8).eval(), nnx.BatchNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0))
    x = X.reshape(10, 8)
    assert compare(first, second, x, seeds=1, transfer=False).verdict == "equal"
    second.var.set_value(jnp.full(8, 1.01))
    assert compare(first, second, x, seeds=1, transfer=False).verdict == "different"


def test_few_random_numbers_are_carried_and_named():
    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.tensor([0.31428312, -1.2471221, 0.8713314]))

        def forward(self, x):
            return x[..., :3] - self.centre

    class Flax(nnx.Module):
        def __init__(self):
            self.centre = nnx.Variable(jnp.asarray([0.12371193, 0.77191817, 0.91232731]))

        def __call__(self, x):
            return x[..., :3] - self.centre[...]

    report = compare(Torch(), Flax(), X, seeds=1)
    assert report.verdict == "equal"
    assert any(note.startswith("carried, as too few numbers of Flax") and "centre" in note for note in report.notes)


class TorchHeads(nn.Module):
    """Only `out` is used; the pooler runs and its result is dropped, the contact head never runs."""

    def __init__(self):
        super().__init__()
        self.out, self.pooler, self.contact_head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.out(x)
        self.pooler(x)
        return x


class FlaxHead(nnx.Module):
    def __init__(self, *, idle=False, shift=0.0):
        self.out = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        if idle:
            self.extra = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self._shift = shift

    def __call__(self, x):
        return self.out(x) + self._shift


@pytest.mark.parametrize("idle", [False, True])
def test_parameters_that_never_reach_an_output_are_set_aside(idle):
    report = compare(TorchHeads(), FlaxHead(idle=idle), X, seeds=1)
    assert report.verdict == "equal"
    assert (
        "pooler.weight, pooler.bias, contact_head.weight, contact_head.bias of torch are left out: no "
        "effect on the outputs"
    ) in report.notes
    assert idle == any(note.startswith("extra.bias, extra.kernel of Flax are left out") for note in report.notes)


def test_a_fault_beside_idle_parameters_is_seen():
    assert compare(TorchHeads(), FlaxHead(shift=0.01), X, seeds=1).verdict == "different"


class FrozenTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.freqs = nn.Parameter(torch.from_numpy(TABLE), requires_grad=False)

    def forward(self, x):
        return x * self.weight + self.freqs


class ConstantTable(nnx.Module):
    def __init__(self, table):
        self.weight = nnx.Param(jnp.ones(8))
        self.table = nnx.data(jnp.asarray(table))

    def __call__(self, x):
        return x * self.weight[...] + self.table


def test_a_frozen_parameter_beside_a_constant_keeps_its_numbers():
    report = compare(FrozenTable(), ConstantTable(TABLE), X, seeds=1)
    assert report.verdict == "equal"
    assert "freqs of torch is left out: frozen, and Flax has nothing for it" in report.notes
    assert compare(FrozenTable(), ConstantTable(1.01 * TABLE), X, seeds=1).verdict == "different"


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Cache])
@pytest.mark.parametrize("name", ["freqs", "table"])
def test_a_frozen_parameter_is_carried_to_state(kind, name):
    second = FlaxTable(kind, 0.0, name)
    assert compare(FrozenTable(), second, X, seeds=1).verdict == "equal"


@pytest.mark.parametrize("name", ["freqs", "table"])
def test_a_wrong_table_beside_a_frozen_parameter_is_seen(name):
    assert compare(FrozenTable(), FlaxTable(nnx.Variable, 1.0, name), X, seeds=1).verdict == "equal"
    assert compare(FrozenTable(), FlaxTable(nnx.Variable, 1.01, name), X, seeds=1).verdict == "different"


@pytest.mark.parametrize(
    "second",
    [
        lambda: FlaxTable(nnx.Variable, scale=0.126),
        lambda: table_function(None, scale=0.126),
    ],
)
def test_a_wrong_constant_is_not_overwritten(second):
    first = TorchTable(persistent=True)
    first.register_buffer("scale", torch.tensor(0.125))
    assert compare(first, second(), X, seeds=1).verdict == "different"


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "equal"), (1.01, "different")])
def test_vectors_of_a_spectral_norm_are_carried_to_a_tree_of_zeros(power, verdict):
    """Zeros divided by zeros are NaN whatever u and v are, which shows nothing about their effect."""

    def call(weights, x):
        sigma = weights["u"] @ weights["kernel"].T @ weights["v"]
        return x @ (weights["kernel"] / sigma * power) + weights["bias"]

    zeros = {"kernel": jnp.zeros((8, 6)), "bias": jnp.zeros(6), "u": jnp.zeros(6), "v": jnp.zeros(8)}
    report = compare(torch.nn.utils.spectral_norm(nn.Linear(8, 6)).eval(), function(call, zeros), X, seeds=1)
    assert report.verdict == verdict
    assert len(report.pairing) == 4


class TorchClamped(nn.Module):
    """A layer whose drawn weights saturate all outputs, so that these do not depend on its gains."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1e-4 * torch.from_numpy(random.normal(size=(6, 8)).astype(np.float32)))
        self.register_buffer("gain", torch.linspace(0.6, 1.4, 6) ** 3)

    def forward(self, x):
        return (1e3 * self.gain * (x @ self.weight.T)).clamp(-1, 1)


class FlaxClamped(nnx.Module):
    def __init__(self):
        self.weight, self.gain = nnx.Param(jnp.ones((6, 8))), nnx.Variable(jnp.ones(6))

    def __call__(self, x):
        return jnp.clip(1e3 * self.gain[...] * (x @ self.weight[...].T), -1, 1)


def test_state_is_carried_where_drawn_weights_saturate_the_outputs():
    report = compare(TorchClamped(), FlaxClamped(), X, seeds=1)
    assert report.verdict == "equal"
    assert len(report.pairing) == 2
