"""How `compare` pairs and transfers weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import Rule, WeightsMismatchError
from attn_bridge.parity import compare

from ..compare.sides import IDS, FlaxSide, TorchSide, X, jnp_or_torch, judge, linear, scale, verdicts


def test_weights_are_transferred_unless_transfer_is_off():
    ours, theirs = linear()
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert report.verdict == "different"
    assert verdicts(report)["weight weight"] == verdicts(report)["weight bias"] == "different"
    assert "weight bias: different: 4 of 4 elements that the two sides hold are not the same" in report.explain()
    theirs.kernel[...] = jnp.asarray(ours.weight.detach().numpy().T)
    theirs.bias[...] = jnp.asarray(ours.bias.detach().numpy())
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert report.verdict == "equal"
    assert verdicts(report)["weight weight"] == "equal"
    theirs.bias[...] = theirs.bias[...].at[1].multiply(1 + 1e-7)
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert {one.name for one in report.failures if one.kind == "weight"} == {"weight bias"}
    assert next(one for one in report.tensors if one.name == "weight bias").bad == 1


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class FlaxChain(nnx.Module):
    def __init__(self):
        self.a, self.b, self.c = (nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(3))

    def __call__(self, x):
        return self.c(self.b(self.a(x)))


def test_a_loader_that_got_some_weights_wrong_is_noted():
    ours, theirs = Chain(), FlaxChain()

    def notes():
        return [note for note in compare(ours, theirs, X, seeds=1).notes if "--no-transfer" in note]

    assert notes() == []
    for name in "abc":
        layer, twin = getattr(ours, name), getattr(theirs, name)
        weight = layer.weight.detach().numpy()
        twin.kernel[...] = jnp.asarray(weight if name == "b" else weight.T)
        twin.bias[...] = jnp.asarray(layer.bias.detach().numpy())
    (note,) = notes()
    assert note.startswith("Flax holds the numbers of torch in 5 of 6 tensors and others in b.weight = b.kernel;")
    theirs.b.kernel[...] = jnp.asarray(ours.b.weight.detach().numpy().T)
    assert notes() == []


def test_rules_pair_parameters():
    def ours(m, x):
        return x @ m.a @ m.b

    def theirs(m, x):
        return x @ m.b.T @ m.a.T

    shapes = {"a": (8, 8), "b": (8, 8)}
    rules = [Rule("a", "b", "i o -> o i"), Rule("b", "a", "i o -> o i")]
    report = judge(ours, theirs, shapes=shapes, rules=rules)
    assert report.verdict == "equal"
    assert [(one.torch, one.flax, one.how) for one in report.pairing] == [("a", "b", "rule"), ("b", "a", "rule")]
    assert judge(ours, theirs, shapes=shapes, rules=[Rule("a", "a"), Rule("b", "b")]).verdict == "different"


def test_all_faults_of_the_rules_are_listed():
    with pytest.raises(WeightsMismatchError) as caught:
        judge(scale, rules=[Rule("w", "v"), Rule("x", "y")])
    assert caught.value.missing == ["x"]
    assert caught.value.unexpected == ["v"]
    with pytest.raises(WeightsMismatchError, match=r"misshapen: w: expected \(8,\), the rules give \(2, 4\)"):
        judge(scale, rules=[Rule("w", "w", "(a b) -> a b", a=2)])


def test_running_settles_ambiguous_names():
    def ours(m, x):
        return jnp_or_torch(x).tanh(x @ m.left) @ m.right

    def theirs(m, x):
        return jnp_or_torch(x).tanh(x @ m.one.T) @ m.two

    report = compare(TorchSide(ours, left=(8, 8), right=(8, 8)), FlaxSide(theirs, two=(8, 8), one=(8, 8)), X, seeds=1)
    assert report.verdict == "equal"
    assert [(one.torch, one.flax, one.pattern, one.how) for one in report.pairing] == [
        ("left", "one", "a1 a0 -> a0 a1", "probe"),
        ("right", "two", "... -> ...", "probe"),
    ]


def test_heads_that_may_be_exchanged_are_named_in_a_note():
    ours = TorchSide(lambda m, x: (x @ m.mu, x @ m.logvar), mu=(8, 4), logvar=(8, 4))
    theirs = FlaxSide(lambda m, x: (x @ m.log_std, x @ m.loc), loc=(8, 4), log_std=(8, 4))
    report = compare(ours, theirs, X, seeds=1)
    assert report.verdict == "equal"
    assert [note for note in report.notes if "mu = log_std, logvar = loc" in note and "rules settle it" in note]


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_numbered_heads_are_named_in_a_note_where_the_order_of_use_is_another(is_exchanged):
    """The order of use supports a pairing as names do; `fc21` and `fc22` are no names."""

    def theirs(m, x):
        first, second = x @ m.loc, x @ m.log_std
        return (second, first) if is_exchanged else (first, second)

    ours = TorchSide(lambda m, x: (x @ m.fc21, x @ m.fc22), fc21=(8, 4), fc22=(8, 4))
    report = compare(ours, FlaxSide(theirs, loc=(8, 4), log_std=(8, 4)), X, seeds=1)
    assert report.verdict == "equal"
    assert any("fc21 = log_std, fc22 = loc" in note for note in report.notes) == is_exchanged


def test_pairs_that_runs_do_not_settle_follow_execution():
    def ours(m, x):
        return x @ m.left + x @ m.right

    report = compare(
        TorchSide(ours, left=(8, 4), right=(8, 4)),
        FlaxSide(lambda m, x: x @ m.two + x @ m.one, one=(8, 4), two=(8, 4)),
        X,
    )
    assert report.verdict == "equal"
    assert [(one.first, one.second) for one in report.pairing] == [("left", "two"), ("right", "one")]


def test_a_parameter_without_a_counterpart_is_refused_and_named():
    with pytest.raises(WeightsMismatchError, match=r"unexpected: bias \(4,\) \(torch, no Flax parameter left for it\)"):
        compare(nn.Linear(8, 4), nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)), X)


def test_tied_weights_are_one_parameter_with_both_gradients():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embed(ids)))

    class Theirs(nnx.Module):
        def __init__(self, tied):
            self.embed, self.tied = nnx.Embed(11, 8, rngs=nnx.Rngs(0)), tied

        def __call__(self, ids):
            hidden = jnp.tanh(self.embed(ids))
            table = self.embed.embedding[...]
            return hidden @ (table if self.tied else jax.lax.stop_gradient(table)).T

    report = compare(Ours(), Theirs(tied=True), IDS, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing}["embed.weight"] == "embed.embedding"
    report = compare(Ours(), Theirs(tied=False), IDS, seeds=1)
    assert {one.name for one in report.failures} == {"grad embed.weight"}
    assert report.first_divergence.direction == "backward"


def test_drawn_weights_reveal_a_dropped_zero_bias():
    class NoBias(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    ours = nn.Linear(8, 4)
    nn.init.zeros_(ours.bias)
    report = compare(ours, NoBias(8, 4, rngs=nnx.Rngs(0)), X, seeds=1)
    assert verdicts(report)["output"] == verdicts(report)["grad bias"] == "different"
    assert verdicts(report)["grad input"] == "equal"
    assert next(one for one in report.failures if one.name == "output").weights == "own"
