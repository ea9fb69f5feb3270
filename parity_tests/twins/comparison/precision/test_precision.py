"""Low precision, compiled runs, and losses of precision, which name the side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.results.findings import shown

from ..compare.sides import TABLE, X, verdicts


def test_modules_in_bfloat16_are_judged_in_bfloat16():
    ours, theirs = (
        nn.Linear(8, 4).bfloat16(),
        nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
    )
    report = compare(ours, theirs, X, seeds=1)
    assert report.verdict == "equal"
    assert {one.dtype for one in report.tensors} == {"bfloat16"}
    assert all(one.relative < 1e-14 for one in report.tensors)

    class Wrong(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 1.001

    theirs = Wrong(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert compare(ours, theirs, X, seeds=1).verdict == "different"


def test_dtypes_selects_other_precisions():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.register_buffer("table", torch.from_numpy(TABLE))

        def forward(self, x):
            return self.fc(x + self.table)

    class Theirs(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.table = nnx.Variable(jnp.asarray(TABLE))

        def __call__(self, x):
            return self.fc(x + self.table[...])

    report = compare(Ours(), Theirs(), X, seeds=1, dtypes=("bfloat16", "float64"))
    assert report.verdict == "equal"
    assert [one.dtype for one in report.tensors] == ["bfloat16"] * 4 + ["float64"] * 4


def test_compiled_runs_are_judged_and_leave_buffers_unchanged():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    ours = Counting()
    report = compare(ours, nnx.Linear(8, 4, rngs=nnx.Rngs(0)), X, seeds=1, modes=("eager", "jit"))
    assert report.verdict == "equal"
    assert ours.calls == 0
    assert "float32, torch, eager or compiled" in report.noise

    class OnlyCompiled(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * (1.001 if COMPILED[0] else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", compiling(jax.jit))
        wrong = compare(nn.Linear(8, 4), OnlyCompiled(8, 4, rngs=nnx.Rngs(0)), X, seeds=1, modes=("jit",))
    assert wrong.verdict != "equal"


COMPILED = [False]


def compiling(jit):
    def wrapped(function, *args, **kwargs):
        def traced(*operands):
            COMPILED[0] = True
            try:
                return function(*operands)
            finally:
                COMPILED[0] = False

        return jit(traced, *args, **kwargs)

    return wrapped


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 4)

    def softmax(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        return self.softmax(self.query(x) @ x.transpose(-1, -2)) @ self.value(x)


class FlaxAttention(nnx.Module):
    def __init__(self):
        self.query, self.value = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def softmax(self, scores):
        return jax.nn.softmax(scores)

    def __call__(self, x):
        return self.softmax(self.query(x) @ x.swapaxes(-1, -2)) @ self.value(x)


class TorchSoftmaxInBfloat16(TorchAttention):
    def softmax(self, scores):
        return scores.bfloat16().softmax(-1).to(scores.dtype)


class FlaxSoftmaxInBfloat16(FlaxAttention):
    def softmax(self, scores):
        return jax.nn.softmax(scores.astype(jnp.bfloat16)).astype(scores.dtype)


class TorchTensorFloat32(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(self.short(x), self.short(self.weight), self.bias)

    def short(self, array):
        return array.half().to(array.dtype)  # as many digits as TF32 has


class FlaxTensorFloat32(nnx.Linear):
    def __call__(self, x):
        return self.short(x) @ self.short(self.kernel[...]) + self.bias[...]

    def short(self, array):
        return jax.lax.reduce_precision(array, 8, 10)


class TorchHalfWeights(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.half().to(x.dtype), self.bias)


class FlaxHalfWeights(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...].astype(jnp.float16).astype(x.dtype) + self.bias[...]


class TorchFastVariance(nn.LayerNorm):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def layer_norm(**options):
    return nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0), **options)


def flax_linear(kind):
    return kind(8, 4, rngs=nnx.Rngs(0))


LOSSES = {
    "torch: softmax in bfloat16": (TorchSoftmaxInBfloat16, FlaxAttention, X),
    "flax: softmax in bfloat16": (TorchAttention, FlaxSoftmaxInBfloat16, X),
    "torch: as in TF32": (lambda: TorchTensorFloat32(8, 4), lambda: flax_linear(nnx.Linear), X),
    "flax: as in TF32": (lambda: nn.Linear(8, 4), lambda: flax_linear(FlaxTensorFloat32), X),
    "torch: weights in float16": (lambda: TorchHalfWeights(8, 4), lambda: flax_linear(nnx.Linear), X),
    "flax: weights in float16": (lambda: nn.Linear(8, 4), lambda: flax_linear(FlaxHalfWeights), X),
    "torch: fast variance": (lambda: TorchFastVariance(8), lambda: layer_norm(use_fast_variance=False), X + 100),
    "flax: fast variance": (lambda: nn.LayerNorm(8), layer_norm, X + 100),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_precision_names_the_side(loss):
    ours, theirs, x = LOSSES[loss]
    side = loss.partition(":")[0]
    report = compare(ours(), theirs(), x, seeds=1, localise=False)
    assert report.verdict == "precision", str(report)
    assert {one.side for one in report.failures} == {side}
    assert f"output: precision: {shown(side)} loses more than its share: its rounding error is " in report.explain()
    output = report.tensors[0]
    assert (output.torch_used > 1, output.flax_used > 1) == (side == "torch", side == "flax")


def test_flax_norms_are_equal_on_ordinary_inputs():
    x = np.random.default_rng(10).normal(size=(2, 6, 8)).astype(np.float32)
    report = compare(nn.LayerNorm(8), layer_norm(), x, seeds=2, first_seed=100)
    assert report.verdict == "equal", str(report)
    assert any(note.startswith("on hard inputs (") and "the Flax side loses" in note for note in report.notes)
    assert compare(nn.RMSNorm(8, eps=1e-6), nnx.RMSNorm(8, rngs=nnx.Rngs(0)), x, seeds=1).verdict == "equal"


def test_two_pass_norms_of_large_means_are_equal():
    assert compare(nn.LayerNorm(8), layer_norm(use_fast_variance=False), X + 100, seeds=1).verdict == "equal"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda square: square * (1 + 1e-4),
        lambda square: square + 1e-7,
        lambda square: square * 8 / 7,
    ],
)
def test_a_small_fault_of_scale_is_a_difference(wrong):
    class Theirs(nnx.RMSNorm):
        def __call__(self, x):
            return x * jax.lax.rsqrt(wrong((x * x).mean(-1, keepdims=True)) + self.epsilon) * self.scale[...]

    report = compare(nn.RMSNorm(8, eps=1e-6), Theirs(8, rngs=nnx.Rngs(0)), X, seeds=1, localise=False)
    assert verdicts(report)["output"] == "different"


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8, eps=1e-6), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.norm(x))


class FlaxNormed(nnx.Module):
    """Loses 8 bits in front of its linear layer; its norm loses more than that, but on hard inputs alone."""

    def __init__(self):
        self.norm, self.fc = nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.fc(self.norm(x) + 256.0 - 256.0)


def test_a_loss_of_precision_on_hard_inputs_does_not_place_another():
    report = compare(Normed(), FlaxNormed(), X)
    assert (report.verdict, report.first_divergence.between) == ("precision", ("norm", "fc"))
