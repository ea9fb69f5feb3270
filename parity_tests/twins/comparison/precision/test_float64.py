"""Meaning is compared in float64: through parts fixed to float32, opaque operations and control flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from ..compare.sides import X, judge, verdicts


@jax.custom_vjp
def low_tanh(x):
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


low_tanh.defvjp(
    lambda x: (low_tanh(x), x.astype(jnp.float32)),
    lambda x, gradient: ((gradient * (1 - jnp.tanh(x) ** 2)).astype(gradient.dtype),),
)


class LowTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().tanh().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient.float() * (1 - x.float().tanh() ** 2)).to(gradient.dtype)


ISLANDS = {
    "none": (lambda m, x: torch.tanh(x * m.w), lambda m, x: jnp.tanh(x * m.w)),
    "both": (
        lambda m, x: torch.tanh((x * m.w).float()).to(x.dtype),
        lambda m, x: jnp.tanh((x * m.w).astype(jnp.float32)).astype(x.dtype),
    ),
    "torch": (lambda m, x: LowTanh.apply(x * m.w), lambda m, x: jnp.tanh(x * m.w)),
    "flax": (lambda m, x: torch.tanh(x * m.w), lambda m, x: low_tanh(x * m.w)),
}


@pytest.mark.parametrize("where", ISLANDS)
def test_parts_fixed_to_float32_are_compared_in_float64(where):
    report = judge(*ISLANDS[where])
    assert report.verdict == "equal"
    assert not report.notes
    assert all(one.relative < 1e-14 for one in report.tensors)
    if where == "both":
        ours, theirs = ISLANDS[where]
        assert judge(ours, lambda m, x: theirs(m, x) * (1 + 2.0**-30)).verdict == "different"


class ThroughNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.float32(2) * x.detach().numpy().astype(np.float32)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@jax.custom_vjp
def through_callback(x):
    return jax.pure_callback(lambda array: np.asarray(array) * np.float32(2), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


through_callback.defvjp(lambda x: (through_callback(x), None), lambda _, gradient: (gradient * 2,))


OPAQUE = {
    "torch": (lambda m, x: ThroughNumPy.apply(x * m.w), lambda m, x: x * m.w * 2),
    "flax": (lambda m, x: x * m.w * 2, lambda m, x: through_callback(x * m.w)),
    "both": (lambda m, x: ThroughNumPy.apply(x * m.w), lambda m, x: through_callback(x * m.w)),
}
REASONS = {
    "torch": "torch has no float64 here: a part of it is computed by NumPy, in lower precision",
    "flax": "Flax has no float64 here: the operation pure_callback has a precision of its own",
}


@pytest.mark.parametrize("side", OPAQUE)
def test_a_side_without_float64_is_judged_by_the_other(side):
    ours, theirs = OPAQUE[side]
    report = judge(ours, theirs)
    assert report.verdict == "equal"
    assert {note for note in report.notes if "no float64 here" in note} == {
        REASONS[one] for one in ("torch", "flax") if side in (one, "both")
    }
    report = judge(ours, lambda m, x: theirs(m, x) * 1.001)
    assert report.verdict == "different"
    assert "the results differ by far more than rounding" in report.tensors[0].message
    assert (report.first_divergence.path, report.first_divergence.direction) == ("", "forward")


def values_looked_at(m, x):
    return x * m.w * 2 if (x * m.w).sum() > 0 else x * m.w


def recurrent(m, x):
    hidden, found = torch.zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        hidden = torch.tanh(x[:, t] @ m.inner + hidden * m.w)
        found.append(hidden)
    return torch.stack(found, 1)


def scanned(m, x):
    def step(hidden, row):
        hidden = jnp.tanh(row @ m.inner[...] + hidden * m.w)
        return hidden, hidden

    return jax.lax.scan(step, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def halved(m, x):
    part = x.detach().abs()
    while part.max() > 1:
        part = part / 2
    return x * m.w * part


def halved_by_xla(m, x):
    part = jax.lax.stop_gradient(jnp.abs(x))
    part = jax.lax.while_loop(lambda part: part.max() > 1, lambda part: part / 2, part)
    return x * m.w * part


CONTROL_FLOW = {
    "if in Python": (values_looked_at, values_looked_at),
    "scan": (recurrent, scanned),
    "while_loop": (halved, halved_by_xla),
    "cond": (
        values_looked_at,
        lambda m, x: jax.lax.cond((x * m.w).sum() > 0, lambda h: h * m.w * 2, lambda h: h * m.w, x),
    ),
    "jit and checkpoint": (
        lambda m, x: torch.tanh(x * m.w),
        lambda m, x: jax.checkpoint(jax.jit(jnp.tanh))(x * m.w),
    ),
}


@pytest.mark.parametrize("kind", CONTROL_FLOW)
def test_control_flow_is_followed(kind):
    ours, theirs = CONTROL_FLOW[kind]
    shapes = {"w": (4,), "inner": (8, 4)} if kind == "scan" else {"w": (8,)}
    report = judge(ours, theirs, shapes=shapes)
    assert report.verdict == "equal"
    assert not report.notes
    assert report.tensors[0].relative < 1e-13
    if kind in ("if in Python", "while_loop"):
        report = judge(ours, lambda m, x: theirs(m, x) * (1 + 1e-6), shapes=shapes)
        assert (report.verdict, report.first_divergence.direction) == ("different", "forward")


def test_a_wrong_custom_gradient_is_found():
    @jax.custom_vjp
    def wrong(x):
        return jnp.tanh(x)

    wrong.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda t, gradient: (gradient * (1 - t),))
    report = judge(lambda m, x: torch.tanh(x * m.w), lambda m, x: wrong(x * m.w))
    assert verdicts(report) == {"output": "equal", "grad inputs[0]": "different", "grad w": "different"}
    assert report.first_divergence.direction == "backward"


def test_rounded_tables_are_equal_in_meaning():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.register_buffer("table", torch.sin(torch.arange(5.0)[:, None] * 1.3 / 10 ** torch.arange(8.0)))

        def forward(self, x):
            return x * self.weight + self.table

    class Theirs(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(8))
            self.table = nnx.Variable(jnp.sin(jnp.arange(5.0)[:, None] * 1.3 / 10 ** jnp.arange(8.0)))

        def __call__(self, x):
            return x * self.weight[...] + self.table[...]

    assert compare(Ours(), Theirs(), X, seeds=1).verdict == "equal"
