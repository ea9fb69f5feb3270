"""What FlashAttention's backward pass loses in float64 is no fault, and no fault hides behind it.

Its formula rounds the log-sum-exp and the dot product of output and gradient apart from what they are to cancel. With
peaked rows a gradient that is zero becomes rounding errors, times all that made the rows peaked.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_bridge import parity
from attn_bridge.parity import compare
from attn_parity.dumps import format as dumps
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps
from attn_parity.verdict import probes
from fault_lab.driver import _Subject, find_trial

from ...support.calls import cover

DOUBLE = ("float64",)
"""Judged in float64 alone, nothing but the float64 limit is in force, whatever float32 loses by luck."""

SCALE = 5**-0.5
NOTE = "fused attention recomputes the weights from their log-sum-exp"
FAULTS = ("scale off by 1e-9", "exp off by 1e-10", "mask off by one", "weights of the backward pass off by 1e-10")
X = (60.0 * np.random.default_rng(2).normal(size=(2, 6, 5))).astype(np.float32)


class Attends(nn.Module):
    """Causal attention of one narrow head whose weights are ten times the usual, by torch's fused kernel or not."""

    def __init__(self, fused: bool = True):
        super().__init__()
        self.fused = fused
        drawn = torch.Generator().manual_seed(3)
        for name in ("query", "key", "value"):
            layer = nn.Linear(5, 5)
            layer.weight.data = 10.0 * 5**-0.5 * torch.randn(5, 5, generator=drawn)
            layer.bias.data = 0.5 * torch.randn(5, generator=drawn)
            setattr(self, name, layer)

    def forward(self, x):
        query, key, value = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        if self.fused:  # the judge's settings take the plain formula unless a module asks for a kernel
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)[:, 0]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.mT * SCALE).masked_fill(hidden, -torch.inf)
        return (torch.softmax(scores, -1) @ value)[:, 0]


def weigh(query, key, fault=""):
    """Return softmax of the causal scores, perhaps with a fault."""
    off = fault == "mask off by one"
    shown = np.tril(np.ones((query.shape[1], key.shape[1]), bool), 1 if off else 0)
    scale = SCALE * (1.0 + 1e-9) if fault == "scale off by 1e-9" else SCALE
    scores = jnp.where(shown, query @ key.mT * scale, -jnp.inf)
    shifted = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    powers = jnp.exp(shifted)
    if fault == "exp off by 1e-10":
        powers = powers * (1.0 + 1e-10 * jnp.cos(7.0 * jnp.where(shown, shifted, 0.0)))
    return powers / powers.sum(-1, keepdims=True)


@jax.custom_vjp
def attend_backwards_wrong(query, key, value):
    return weigh(query, key) @ value


def _forward(query, key, value):
    return attend_backwards_wrong(query, key, value), (query, key, value)


def _backward(kept, gradient):
    query, key, value = kept
    weights = weigh(query, key) * (1.0 + 1e-10)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * SCALE
    return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


attend_backwards_wrong.defvjp(_forward, _backward)


class FlaxAttends(nnx.Module):
    """Its twin by the plain formula."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.query, self.key, self.value = (nnx.Linear(5, 5, rngs=nnx.Rngs(i)) for i in range(3))

    def __call__(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.fault.startswith("weights of the backward pass"):
            return attend_backwards_wrong(query, key, value)
        return weigh(query, key, self.fault) @ value


def is_noted(report) -> bool:
    return any(NOTE in one for one in report.notes)


def test_a_right_pair_with_peaked_rows_is_equal():
    report = compare(Attends(), FlaxAttends(), X, dtypes=DOUBLE)
    assert report.verdict == "equal", str(report)
    assert is_noted(report)
    exceeded = [one for one in report.tensors if (one.relative or 0.0) > 1e-12]
    assert exceeded
    assert not any(one.kind == "output" for one in exceeded)
    assert max(one.relative for one in exceeded) < 1e-9


def test_it_is_different_where_nothing_is_allowed(monkeypatch):
    monkeypatch.setattr(probes.Probing, "flash_losses", lambda self, *_: {})
    report = compare(Attends(), FlaxAttends(), X, dtypes=DOUBLE, localise=False)
    assert report.verdict == "different"
    assert not is_noted(report)
    assert all(one.name.startswith("grad ") for one in report.failures)


def test_the_allowance_is_for_gradients_that_the_formula_explains(monkeypatch):
    """A hundredth of what was measured does not do, so that it is this measurement that decides."""
    measured = probes.Probing.flash_losses

    def less(self, *given):
        return {name: 0.01 * lost for name, lost in measured(self, *given).items()}

    monkeypatch.setattr(probes.Probing, "flash_losses", less)
    assert compare(Attends(), FlaxAttends(), X, dtypes=DOUBLE, localise=False).verdict == "different"


@cover.some("fault", list(FAULTS), always=FAULTS[1::2])
def test_the_fused_kernel_hides_no_fault(fault):
    fused, plain = (
        compare(Attends(one), FlaxAttends(fault), X, dtypes=DOUBLE, localise=False) for one in (True, False)
    )
    assert (fused.verdict, plain.verdict) == ("different", "different")
    seen = {one.name for one in plain.failures if one.relative > 1e-11}
    assert seen
    assert seen <= {one.name for one in fused.failures}


def test_a_fault_as_small_as_the_kernels_loss_is_seen():
    """Allowed is what the kernel makes of it: with softmax in its place the sides have to agree as others do."""
    report = compare(Attends(), FlaxAttends("exp off by 1e-10"), X / 2.0, dtypes=DOUBLE, localise=False)
    assert report.verdict == "different"
    assert max(one.relative for one in report.tensors) < 1e-10


@cover.some("fault", list(FAULTS), always=FAULTS[2:3])
def test_a_fault_shows_in_float32_too(fault):
    """On rows that are less peaked: float64 may differ by more the more float32 loses."""
    assert compare(Attends(), FlaxAttends(fault), X / 6.0, seeds=1, localise=False).verdict == "different"


def kernel(off):
    """Return a backward pass of the fused kernel whose weights are off by a part of themselves."""

    def backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
        scores = query @ key.mT * scale
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True)) * (1.0 + off)
        of_scores = weights * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
        return of_scores @ key, of_scores.mT @ query, weights.mT @ grad_out

    return backward


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "equal"), (1e-9, "different")])
def test_a_fault_of_the_kernel_itself_is_different(off, verdict):
    """The probe runs no kernel, so what one does wrong is not what it measures."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", kernel(off), "CPU")
        assert compare(Attends(), FlaxAttends(), X, dtypes=DOUBLE, localise=False).verdict == verdict


def test_nothing_is_allowed_without_a_fused_kernel(monkeypatch):
    """The plain formula on both sides leaves nothing to explain; one that is off is not asked about it."""
    asked = []
    measured = probes.Probing.unfused

    def watch(self, sample):
        asked.append(measured(self, sample))
        return asked[-1]

    monkeypatch.setattr(probes.Probing, "unfused", watch)
    wrong = FlaxAttends("weights of the backward pass off by 1e-10")
    x = X / 600.0  # where what is off is small enough to be asked about
    assert compare(Attends(fused=False), wrong, x, dtypes=DOUBLE, seeds=1, localise=False).verdict == "different"
    assert asked
    assert not any(asked)


def test_a_right_pair_that_is_near_enough_is_not_probed(monkeypatch):
    monkeypatch.setattr(probes.Probing, "unfused", None)
    assert compare(Attends(), FlaxAttends(), X / 600.0, seeds=1).verdict == "equal"


def test_a_pair_whose_output_differs_is_not_probed(monkeypatch):
    monkeypatch.setattr(probes.Probing, "unfused", None)
    wrong = FlaxAttends("scale off by 1e-9")
    report = compare(Attends(), wrong, X / 600.0, dtypes=DOUBLE, seeds=1, localise=False)
    assert next(one for one in report.tensors if one.kind == "output").verdict == "different"


def test_two_torch_sides_and_functions_are_probed_alike():
    plain = compare(Attends(), Attends(fused=False), X, dtypes=DOUBLE, seeds=1)
    assert plain.verdict == "equal", str(plain)
    module = Attends()
    weights = {name: one.detach().clone() for name, one in module.named_parameters()}

    def call(weights, x):
        return torch.func.functional_call(module, weights, (x,))

    report = compare(parity.function(call, weights), Attends(fused=False), X, dtypes=DOUBLE, seeds=1)
    assert report.verdict == "equal", str(report)


def test_the_pair_that_mutate_once_objected_to():
    """`nn.MultiheadAttention`, of a gain of 3 and width 5: whether float32 is exact by luck is up to the processor."""
    drawn = _Subject(find_trial("right:500630"))
    inputs, flax_inputs = dict(drawn.pair.inputs), dict(drawn.pair.flax_inputs)
    report = compare(*drawn.modules, inputs, flax_inputs=flax_inputs, first_seed=drawn.pair.seed)
    assert drawn.described()["kernels"]["torch"] == ["sdpa_flash"]
    assert report.verdict == "equal", str(report)


# ---- from dumps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dumps of the right pair, and of a twin with each fault."""
    found = tmp_path_factory.mktemp("dumps")
    dump(Attends(), X, found / "torch", dtypes=DOUBLE)
    for name in ("", *FAULTS):
        dump(FlaxAttends(name), X, found / (name or "flax"), like=found / "torch")
    return found


def test_dumps_of_it_are_judged_as_the_pair_is(folder):
    live = compare(Attends(), FlaxAttends(), X, dtypes=DOUBLE)
    replayed = compare_dumps(folder / "torch", folder / "flax")
    assert (live.verdict, replayed.verdict) == ("equal", "equal"), str(replayed)
    shared = {one.name: one for one in live.tensors}
    for one in replayed.tensors:
        assert one.meaning_used == pytest.approx(shared[one.name].meaning_used, rel=1e-6, abs=1e-6)
    assert [one for one in live.notes if NOTE in one] == [one for one in replayed.notes if NOTE in one]
    assert is_noted(replayed)


def test_without_what_they_store_they_are_different(folder, monkeypatch):
    read = dumps.parse

    def parse(data):
        manifest = read(data)
        for samples in manifest.probes.values():
            for kinds in samples.values():
                kinds.pop("flash", None)
        return manifest

    stored = dumps.Dump(folder / "torch").manifest.probes["float64"]
    assert all("flash" in one for one in stored.values())
    assert "flash" not in str(dumps.Dump(folder / "flax").manifest.probes)
    monkeypatch.setattr(dumps, "parse", parse)
    assert compare_dumps(folder / "torch", folder / "flax").verdict == "different"


@cover.some("fault", list(FAULTS), always=FAULTS[:2])
def test_a_fault_is_found_from_dumps(folder, fault):
    assert compare_dumps(folder / "torch", folder / fault).verdict == "different"
