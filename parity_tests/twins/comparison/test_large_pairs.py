"""The cheaper path that large pairs take, on small ones made to take it: what it runs, and what it must find."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import attn_parity.frameworks.torch.subject
from attn_bridge import Rule, transfer
from attn_bridge.parity import compare
from attn_parity import pair
from attn_parity.compare.prepare import prepare
from attn_parity.frameworks.jax.subject import JaxSubject
from attn_parity.frameworks.torch.subject import TorchSubject
from attn_parity.samples import sampling
from attn_parity.verdict import criterion, measures
from attn_parity.verdict.bench import Bench

X = np.random.default_rng(0).normal(size=(4, 9, 16)).astype(np.float32)
X[1, 2, 3] = MARK = 2.625
SUBJECTS = {"torch": TorchSubject, "flax": JaxSubject}


class TorchModel(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        random = np.random.default_rng(1)
        self.weight = nn.Parameter(torch.from_numpy(random.normal(size=(16, 24)).astype(np.float32)))
        if bias:
            self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        out = torch.tanh(x @ self.weight)
        return out + self.bias if hasattr(self, "bias") else out


class FlaxModel(nnx.Module):
    def __init__(self, bias=True):
        self.weight = nnx.Param(jnp.ones((16, 24)))
        if bias:
            self.bias = nnx.Param(jnp.ones(24))

    def __call__(self, x):
        out = jnp.tanh(x @ self.weight[...])
        return out + self.bias[...] if hasattr(self, "bias") else out


class TorchLow(TorchModel):
    def forward(self, x):
        return torch.tanh(x @ self.weight.half().to(x.dtype))


class FlaxLow(FlaxModel):
    def __call__(self, x):
        return jnp.tanh(x @ self.weight[...].astype(jnp.float16).astype(x.dtype))


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Make every pair a large one, and count the runs: (side, dtype or mode) -> how many."""
    monkeypatch.setattr(sampling, "QUICK", -1.0)
    monkeypatch.setattr(sampling, "LARGE", -1.0)
    monkeypatch.setattr(attn_parity.frameworks.torch.subject, "LARGE", 0)
    counted = collections.Counter()
    for side, kind in SUBJECTS.items():

        def run(self, *args, side=side, original=kind.run, **options):
            mode = options.get("mode", "eager")
            kind = mode if mode != "eager" else options.get("dtype") or mode
            backward = len(args) > 2 and args[2] is not None
            counted[side, kind if backward else "forward"] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(kind, "run", run)
    return counted


@pytest.mark.parametrize("seed", range(3))
def test_an_equal_large_pair_runs_once_per_side_in_float64(runs, seed):
    report = compare(TorchModel(), FlaxModel(), X, first_seed=seed)
    assert (report.verdict, report.samples, report.seeds) == ("equal", 2, 1), str(report)
    assert runs == {(side, kind): count for side in SUBJECTS for kind, count in (("float64", 1), ("eager", 2))}


def test_a_fault_visible_only_on_the_given_inputs_is_found(runs):
    class Wrong(FlaxModel):
        def __call__(self, x):
            return super().__call__(x) + jnp.where(x == MARK, 1e-3, 0.0).sum()

    report = compare(TorchModel(), Wrong(), X, localise=False)
    assert report.verdict == "different"
    assert {one.weights for one in report.failures} == {"held"}
    assert runs["torch", "float64"] == runs["flax", "float64"] == 2  # the given ones were looked at closely, too


def test_a_fault_that_only_drawn_weights_show_is_a_difference():
    class Wrong(FlaxModel):
        def __call__(self, x):
            return super().__call__(x) + 1e-9 * jnp.abs(self.bias[...]).sum()  # the held ones are zero

    report = compare(TorchModel(), Wrong(), X, localise=False)
    assert report.verdict == "different"
    assert report.tensors[0].name == "output"
    assert (report.tensors[0].verdict, report.tensors[0].weights) == ("different", "own")


@pytest.mark.parametrize("same", [True, False], ids=["the same", "others"])
def test_held_weights_that_are_not_transferred_are_judged_in_float64(runs, same):
    ours, theirs = TorchModel(), FlaxModel()
    if same:
        transfer(ours, theirs, rules=[Rule("weight", "weight", "i o -> i o"), Rule("bias", "bias", "o -> o")])
    report = compare(ours, theirs, X, transfer=False, localise=False)
    assert runs["torch", "float64"] == runs["flax", "float64"] == 2
    assert report.verdict == ("equal" if same else "different")
    assert same or {one.name for one in report.failures} >= {"weight weight", "weight bias", "output"}


@pytest.mark.parametrize(
    ("side", "ours", "theirs"), [("torch", TorchLow, FlaxModel), ("flax", TorchModel, FlaxLow)], ids=["torch", "flax"]
)
def test_a_loss_of_precision_is_confirmed_on_one_fresh_sample(runs, side, ours, theirs):
    report = compare(ours(bias=False), theirs(bias=False), X, localise=False)
    assert report.verdict == "precision", str(report)
    assert {one.side for one in report.failures} == {side}
    other = "flax" if side == "torch" else "torch"
    assert (runs[other, "jitter"], runs[side, "jitter"]) == (2, 0)  # only what the accused side is judged by
    assert runs["torch", "float64"] == runs["flax", "float64"] == 3  # drawn, given, and drawn afresh


def test_redrawn_roundings_end_a_doubt_without_another_run_in_float64(runs, monkeypatch):
    monkeypatch.setattr(criterion, "RMS_LIMIT", 1.0)  # so that whichever side is the worse one by a hair is in doubt
    for room in (criterion, measures):
        monkeypatch.setattr(room, "FLOOR_ULPS", 0.0)
    monkeypatch.setattr(Bench, "agrees", lambda self, planned: True)
    report = compare(TorchModel(bias=False), FlaxModel(bias=False), X)
    assert report.verdict == "equal", str(report)
    assert sum(runs[side, "jitter"] for side in SUBJECTS) >= 1
    assert max(runs[side, "jitter"] for side in SUBJECTS) == 1
    assert runs["torch", "float64"] == runs["flax", "float64"] == 1


def test_a_sample_of_its_own_is_judged_beside_redrawn_ones(runs):
    """Where given inputs part, they are a second sample, whose roundings were not redrawn."""

    class Wrong(FlaxLow):
        def __call__(self, x):
            return super().__call__(x) + jnp.where(x == MARK, 1e-3, 0.0).sum()

    report = compare(TorchModel(bias=False), Wrong(bias=False), X, localise=False)
    assert report.verdict == "different"
    assert runs["torch", "jitter"] >= 1


def test_probed_measures_replace_only_their_samples():
    bench = Bench.__new__(Bench)
    bench.measures, bench.probed = {("a", "eager"): [1, 2, 3]}, {"second": {("a", "eager"): [9]}}
    assert bench._probed("second", "a", "eager") == [9, 2, 3]
    assert bench._probed("first", "a", "eager") == [1, 2, 3]


class Looks(TorchModel):
    def forward(self, x):
        return super().forward(x if float(x.detach().sum()) < 1e9 else -x)


@pytest.mark.parametrize(("kind", "forward"), [(TorchModel, 0), (Looks, 1)], ids=["plain", "looks at values"])
@pytest.mark.parametrize("fault", [0.0, 1e-6])
def test_outputs_are_described_without_a_run_where_possible(runs, kind, forward, fault):
    class Twin(FlaxModel):
        def __call__(self, x):
            return super().__call__(x) * (1.0 + fault)

    report = compare(kind(), Twin(), X, localise=False)
    assert report.verdict == ("different" if fault else "equal")
    assert runs["torch", "forward"] == forward
    assert runs["flax", "forward"] == 0


class TorchLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, ids, mask):
        return self.embed(ids) * mask[..., None]


class FlaxLookup(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))

    def __call__(self, ids, mask):
        return self.embed(ids) * mask[..., None]


def test_work_counts_every_token_of_a_batch_but_no_mask(monkeypatch):
    monkeypatch.setattr(pair, "MIN_ROWS", 1)
    ids = np.random.default_rng(0).integers(0, 11, (2, 5))
    pairs = [
        (TorchModel(), FlaxModel(), X, (16 * 24 + 24) * 4 * 9),
        (TorchLookup(), FlaxLookup(), {"ids": ids, "mask": np.ones((2, 5), bool)}, 11 * 8 * 2 * 5),
        (TorchLookup(), FlaxLookup(), {"ids": ids[:, :1], "mask": np.ones((7, 1, 1), bool)}, 11 * 8 * 2),
        (TorchLookup(), FlaxLookup(), {"ids": ids[:, :1], "mask": np.ones((7, 1, 1), np.int64)}, 11 * 8 * 2),
    ]
    for torch_module, flax_module, inputs, multiplied in pairs:
        assert prepare(torch_module, flax_module, inputs).effort.work == 6 * multiplied
