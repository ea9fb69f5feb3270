"""`compare` leaves modules, inputs and both frameworks unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend import core
from torch import nn

from attn_bridge.parity import compare

from ..compare.sides import TABLE, X, judge


class TorchState(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.from_numpy(TABLE.copy()))
        self.fails = fails

    def forward(self, x):
        self.calls += 1
        self.table.add_(0.0)
        if self.fails:
            raise RuntimeError("no")
        return self.norm(self.drop(self.fc(x))) + self.table


class FlaxState(nnx.Module):
    def __init__(self, fails, factor):
        rngs = nnx.Rngs(0)
        self.fc, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis=1, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.calls, self.table = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.asarray(TABLE))
        self.fails, self.factor, self.rngs = fails, factor, rngs

    def __call__(self, x):
        self.calls[...] += 1
        self.rngs.params()
        if self.fails:
            raise RuntimeError("no")
        return self.norm(self.drop(self.fc(x))) * self.factor + self.table


def keep(module):
    """Return everything about a torch module and torch itself that a comparison could change."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        "bits": {name: (id(one), one.detach().clone()) for name, one in tensors},
        "gradients": [None if one.grad is None else one.grad.clone() for one in module.parameters()],
        "requires_grad": [one.requires_grad for one in module.parameters()],
        "training": [one.training for one in module.modules()],
        "hooks": [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in module.modules()],
        "random": torch.get_rng_state(),
        "global": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }


def keep_flax(module):
    """Return the same of a Flax module and JAX itself."""
    values = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        values[path] = (type(variable), np.array(jax.random.key_data(value) if is_key else value))
    config = jax.config
    return {
        "values": values,
        "modes": (module.drop.deterministic, module.norm.use_running_average),
        "config": (config.jax_enable_x64, config.jax_disable_jit, config.jax_default_matmul_precision),
        "code": (core.Primitive.bind, *(vars(kind)["__call__"] for kind in (nnx.Linear, nnx.BatchNorm, FlaxState))),
        "numpy": (np.random.get_state()[1].copy(), np.geterr()),
    }


def assert_same(one, two, where=""):
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_same(one[key], two[key], f"{where} {key}")
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(two), where
        for first, second in zip(one, two, strict=True):
            assert_same(first, second, where)
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        assert np.array_equal(np.asarray(one), np.asarray(two), equal_nan=True), where
    else:
        assert one == two, where


@pytest.mark.parametrize(
    ("fails", "options", "outcome"),
    [
        ("", {}, "equal"),
        ("", {"transfer": False, "strict": False}, "different"),
        ("", {"factor": 1.001}, "different"),
        ("", {"dtypes": ("bfloat16",)}, "equal"),
        ("torch", {}, "raises"),
        ("flax", {}, "raises"),
    ],
    ids=lambda value: str(value) or "works",
)
def test_modules_and_frameworks_are_unchanged(fails, options, outcome):
    ours, theirs = TorchState(fails == "torch"), FlaxState(fails == "flax", options.pop("factor", 1.0))
    ours.train()
    ours.fc.eval()
    ours.norm.running_mean.copy_(torch.rand(5))
    ours.fc(torch.from_numpy(X)).square().sum().backward()
    ours.fc.bias.requires_grad_(False)
    theirs.drop.deterministic = False
    before, flax_before = keep(ours), keep_flax(theirs)
    if outcome == "raises":
        with pytest.raises(ValueError, match="raised RuntimeError: no"):
            compare(ours, theirs, X, seeds=1, **options)
    else:
        assert compare(ours, theirs, X, seeds=1, **options).verdict == outcome
    assert_same(before, keep(ours))
    assert_same(flax_before, keep_flax(theirs))


def test_inputs_are_unchanged():
    given = {"x": X.copy(), "y": torch.from_numpy(X.copy()).requires_grad_()}

    def mutate(m, x, y):
        if isinstance(x, torch.Tensor):
            x = x.clone().mul_(2.0)
            return x * m.w + y
        return 2.0 * x * m.w + y

    assert judge(mutate, inputs=given).verdict == "equal"
    assert np.array_equal(given["x"], X)
    assert given["y"].grad is None
    assert np.array_equal(given["y"].detach().numpy(), X)
