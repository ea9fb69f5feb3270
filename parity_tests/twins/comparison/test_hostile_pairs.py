"""Pairs that nobody meant to be easy: what a comparison does not look at it says, and what goes wrong it names."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge import parity
from attn_bridge.parity import compare
from attn_parity.frameworks.torch.probes.flash import Flash, LogSumExp
from attn_parity.frameworks.torch.probes.rounding import Rounding
from attn_parity.frameworks.torch.running.tables import _Dataflow

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
IDS = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 2]])


class TorchNet(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self, call=lambda m, x: torch.tanh(m.fc(x)), **children):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.body = nn.Linear(8, 8), call
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


class FlaxNet(nnx.Module):
    """Its twin."""

    def __init__(self, call=lambda m, x: jnp.tanh(m.fc(x)), **children):
        self.fc, self.body = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), call
        for name, child in children.items():
            setattr(self, name, child)

    def __call__(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def judge(ours=None, theirs=None, inputs=X, **options):
    """Compare two modules, or what is done with a layer in them."""
    first = ours if isinstance(ours, nn.Module) else TorchNet(*[ours][: ours is not None])
    second = theirs if isinstance(theirs, (nnx.Module, tuple)) else FlaxNet(*[theirs][: theirs is not None])
    return compare(first, second, inputs, **{"seeds": 1, "localise": False, **options})


# ---- whatever the caller is in


@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), lambda: torch.device("meta")]
)
def test_the_verdict_does_not_depend_on_the_callers_context(around):
    first, second = TorchNet(), FlaxNet()
    with around():
        assert judge(first, second).verdict == "equal"
        assert judge(first, FlaxNet(lambda m, x: jnp.tanh(m.fc(x)) * 1.001)).verdict == "different"
        if around is torch.inference_mode:
            assert judge(TorchNet(), second).verdict == "equal"  # its weights are those of inference mode
            data = [(X, X)]
            assert parity.train(first, second, data, steps=2).verdict == "equal"
    assert not first.fc.weight.is_inference()


# ---- what was not looked at is said


class TorchModes(nn.Module):
    """A layer that drops by a function, and a norm of running statistics."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(nn.functional.dropout(self.fc(x), 0.3, self.training))


class FlaxModes(nnx.Module):
    """Its twin, but for how fast its statistics move."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, epsilon=1e-5, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        return self.norm(self.fc(x)) * (1.0 if self.deterministic else 2.0)


def test_effects_of_train_mode_are_listed_as_unreached():
    report = judge(TorchModes(), FlaxModes())
    assert report.verdict == "equal"
    assert sorted(report.unreached) == [
        "statistics of norm: those of a batch are for train mode",
        "statistics of norm: those of a batch are for train mode",
        "train mode of FlaxModes: its code asks which mode it is in",
        "train mode of TorchModes: its code asks which mode it is in",
    ]
    assert "momentum of norm is 0.1 in torch and 0.01 (written 0.99) in Flax" in report.notes
    trained = judge(TorchModes(), FlaxModes(), train=True)
    assert not any("train mode" in one for one in trained.unreached)


class TorchCounts(nn.Module):
    """Wrong from its second call on."""

    def __init__(self, how):
        super().__init__()
        self.fc, self.how, self.calls = nn.Linear(8, 8), how, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "buffer":
            self.count += 1
        return torch.tanh(self.fc(x)) * (1.0 if self.calls + self.count < 2 else 1.1)


class FlaxCounts(nnx.Module):
    """The same in Flax."""

    def __init__(self):
        self.fc, self.count = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.drop(jnp.tanh(self.fc(x))) * jnp.where(self.count[...] < 2, 1.0, 1.1)


class LinenCounts(linen.Module):
    """The same in Linen, where `init` is a call, too."""

    @linen.compact
    def __call__(self, x):
        count = self.variable("state", "count", lambda: jnp.zeros(()))
        count.value += 1
        return jnp.tanh(linen.Dense(8, name="fc")(x)) * jnp.where(count.value < 3, 1.0, 1.1)


@pytest.mark.parametrize("where", ["attribute", "buffer", "NNX", "Linen"])
def test_state_changed_by_a_call_is_listed_as_unreached(where):
    linens = LinenCounts()
    first = TorchCounts(where)
    second = {"NNX": FlaxCounts, "Linen": lambda: (linens, linens.init(jax.random.key(0), X))}.get(where, FlaxNet)()
    report = judge(first, second)
    assert report.verdict == "equal"
    name = {"attribute": "calls", "buffer": "count", "NNX": "count", "Linen": "state.count"}[where]
    wanted = f"a second call: what a call changes is put back before each and not compared ({name})"
    assert [one for one in report.unreached if one.startswith("a second call")] == [wanted]


GRU = [
    {"first": ["gru.weight_ih_l0", "gru.weight_hh_l0"], "second": "gru", "pattern": "a b -> part a b", "part": "part"},
]


def test_modules_that_keep_nothing_have_no_second_call():
    first = TorchNet(lambda m, x: torch.tanh(m.fc(x)) + 0.0 * m.gru(x)[0], gru=nn.GRU(8, 8, bias=False), cache={})
    report = judge(first, FlaxNet(lambda m, x: jnp.tanh(m.fc(x)), gru=nnx.Param(jnp.ones((2, 24, 8)))), rules=GRU)
    assert not any(one.startswith("a second call") for one in report.unreached)


def test_hooks_on_gradients_are_listed_as_not_run():
    first = TorchNet()
    first.fc.weight.register_hook(lambda gradient: 2.0 * gradient)
    first.fc.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())
    assert judge(first).unreached == [
        f"hooks on the gradient of fc.{name}: gradients are compared without them" for name in ("weight", "bias")
    ]


def test_rows_of_weights_that_no_gradient_reached_are_listed():
    table, twin = nn.Embedding(12, 8, padding_idx=9), nnx.Embed(12, 8, rngs=nnx.Rngs(0))

    def first(m, ids):
        return m.fc(m.table(ids))

    def second(m, ids):
        return m.fc(m.table(jnp.minimum(ids, 7)))  # as long as there are no larger ids

    report = judge(TorchNet(first, table=table), FlaxNet(second, table=twin), IDS)
    assert report.verdict == "equal"
    rows, bound, values = report.unreached
    assert rows == "4 of 12 rows of table.weight: no gradient reached 8-11"
    assert bound.endswith("no number reaches its upper bound")
    assert values == "other values of inputs[0]: taken as given in every sample"
    found = judge(TorchNet(first, table=table), FlaxNet(second, table=twin), np.arange(12).reshape(2, 6))
    assert found.verdict == "different"


def test_columns_and_several_ranges_are_listed_and_samples_are_joined():
    hole = np.ones(8, np.float32)
    hole[[0, 3, 4, 6]] = 0.0
    report = judge(lambda m, x: m.fc(x * torch.from_numpy(hole)), lambda m, x: m.fc(x * hole))
    assert report.unreached == ["4 of 8 columns of fc.weight: no gradient reached 0, 3-4, 6"]
    clipped = judge(lambda m, x: torch.relu(m.fc(x)), lambda m, x: jax.nn.relu(m.fc(x)), X[:1])
    assert "1 of 8 rows of fc.weight: no gradient reached 1" in clipped.unreached
    more = judge(lambda m, x: torch.relu(m.fc(x)), lambda m, x: jax.nn.relu(m.fc(x)), X[:1], seeds=4)
    assert "no gradient reached" not in " ".join(more.unreached)  # each row was reached in some sample


def test_values_that_no_sample_changes_are_listed():
    def call(m, x, mask, steps, factor):
        return m.fc(x * 1.0) * factor

    mask, steps = np.ones(4, bool), np.array(3)
    report = judge(call, call, {"x": X, "mask": mask, "steps": steps, "factor": 2})
    assert report.verdict == "equal"
    assert report.unreached[-2:] == [
        "another mask: True everywhere, so that a side may ignore it",
        "other values of steps, factor: taken as given in every sample",
    ]
    varied = judge(call, call, {"x": X, "mask": np.arange(4) < 3, "steps": np.arange(4), "factor": 2}, vary="steps")
    assert varied.unreached[-1] == "other values of mask, factor: taken as given in every sample"


def test_gradients_of_targets_of_zeros_and_ones_are_not_compared():
    def first(m, x, target):
        return nn.functional.binary_cross_entropy_with_logits(m.fc(x), target)

    def second(m, x, target):
        logits = m.fc(x)
        return -jnp.where(target > 0.5, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)).mean()

    target = (np.arange(len(X) * 8).reshape(len(X), 8) % 3 == 0).astype(np.float32)
    report = judge(first, second, {"x": X, "target": target})
    assert report.verdict == "equal"
    assert "gradient of target: masks and targets, which hold 0 and 1 alone, have none" in report.unreached
    assert judge(first, second, {"x": X, "target": 0.25 + target / 2}).verdict == "different"


class TorchComplex(nn.Module):
    """Complex weights."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.w).abs()


class FlaxComplex(nnx.Module):
    """Its twin."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 8), jnp.complex64))

    def __call__(self, x):
        return jnp.abs(x.astype(jnp.complex64) @ self.w[...])


def test_complex_weights_are_listed_as_without_a_gradient():
    report = judge(TorchComplex(), FlaxComplex())
    assert report.verdict == "equal"
    wanted = "gradient of w: complex64 is taken as held; give real and imaginary parts as two"
    assert report.unreached == [wanted]


def test_a_fault_among_complex_weights_is_placed_as_any_other():
    class First(TorchComplex):
        def __init__(self):
            super().__init__()
            self.v, self.fc = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(super().forward(x)) @ self.v

    class Second(FlaxComplex):
        def __init__(self):
            super().__init__()
            self.v, self.fc = nnx.Param(jnp.ones((8, 8))), nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.fc(super().__call__(x) + 0.01) @ self.v[...]

    report = judge(First(), Second(), localise=None)
    assert report.verdict == "different"
    assert report.first_divergence.between == ("", "fc")


# ---- outputs


@dataclasses.dataclass
class Answer:
    """What a model returns."""

    states: object
    pooled: object = None


def test_a_dataclass_matches_a_mapping_of_the_same_names():
    report = judge(lambda m, x: {"states": m.fc(x)}, lambda m, x: Answer(m.fc(x)))
    assert report.verdict == "equal"
    with pytest.raises(ValueError, match=r"torch returns 1 \(\['state'\] .* Flax returns 1 \(.states"):
        judge(lambda m, x: {"state": m.fc(x)}, lambda m, x: Answer(m.fc(x)))


def test_differing_outputs_that_are_not_arrays_are_noted():
    report = judge(lambda m, x: (m.fc(x), 3.5, "a"), lambda m, x: (m.fc(x), 4.5, "a"))
    assert report.verdict == "equal"
    assert report.notes == ["output[1] is no array and not compared: it is 3.5 in torch and 4.5 in Flax"]
    assert judge(lambda m, x: (m.fc(x), 3.5), lambda m, x: (m.fc(x), 3.5)).notes == []


def test_an_output_of_another_precision_is_noted():
    report = judge(lambda m, x: m.fc(x).double(), lambda m, x: m.fc(x))
    assert report.notes[0] == "output is float64 in torch and float32 in Flax; only its values are compared"
    assert [note.partition(" from ")[0] for note in report.notes[1:]] == ["torch computes in float64"]


def test_a_relatively_small_output_is_noted():
    report = judge(lambda m, x: (m.fc(x), m.fc(x) * 1e-15), lambda m, x: (m.fc(x), m.fc(x) * 1.01e-15))
    assert report.verdict == "equal"
    (note,) = report.notes
    assert note.startswith("judged by the largest of their kind, beside which they are small: output[1] (1e-15); a")
    found = judge(lambda m, x: (m.fc(x), m.fc(x) * 1e-3), lambda m, x: (m.fc(x), m.fc(x) * 1.01e-3))
    assert (found.verdict, found.notes) == ("different", [])


# ---- numbers at the ends of a precision


@pytest.mark.parametrize(("scale", "factor", "verdict"), [(1e-30, 1.0, "equal"), (1e-30, 1.01, "different")])
def test_subnormal_numbers_are_judged_in_meaning_only(scale, factor, verdict):
    report = judge(lambda m, x: m.fc(x) * scale, lambda m, x: m.fc(x) * scale * factor, X * 1e-10)
    assert report.verdict == verdict
    assert any(one.startswith("precision of grad fc.weight: numbers below 1e-31") for one in report.unreached)


def test_overflow_on_both_sides_is_inconclusive():
    report = judge(lambda m, x: m.fc(x) * 1e38 * 10.0, lambda m, x: (m.fc(x) * 10.0) * 1e38)
    assert report.verdict == "inconclusive"
    assert "no element is finite on both sides" in report.message
    assert judge(lambda m, x: m.fc(x) * 1e39 / 1e39).verdict == "different"  # one side only


# ---- messages


class Deep(nn.Module):
    """Two layers, whose widths do not fit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(6, 8))])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


class FlaxDeep(nnx.Module):
    """The same in Flax."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(6, 8, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_wrong_widths_name_the_submodule_and_both_shapes():
    wanted = (
        r"blocks.1.0 \(Linear\) holds weight float32 \(8, 6\), bias float32 \(8,\) and was called with input float32"
    )
    with pytest.raises(
        ValueError, match=rf"^torch module Deep raised .*\(.*test_hostile_pairs.py:\d+; {wanted} \(4, 8\)\)$"
    ):
        compare(Deep(), FlaxDeep(), X)
    wanted = (
        r"blocks.1 \(Linear\) holds bias float32 \(8,\), kernel float32 \(6, 8\) and was called with inputs float32"
    )
    with pytest.raises(
        ValueError, match=rf"^Flax module FlaxDeep raised .*\(.*test_hostile_pairs.py:\d+; {wanted} \(4, 8\)\)$"
    ):
        compare(FlaxDeep(), Deep(), X)
    function = parity.function(lambda weights, x: x @ weights, torch.ones(8, 8))
    with pytest.raises(
        ValueError, match=r"torch function .*\(.*test_hostile_pairs.py:\d+; called with x float32 \(4, 6\)\)$"
    ):
        compare(function, FlaxNet(), X[:, :6])


def test_tied_weights_are_named_where_the_other_side_ties_none():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.out.weight = self.fc.weight

        def forward(self, x):
            return self.out(torch.tanh(self.fc(x)))

    class FlaxTied(nnx.Module):
        def __init__(self, tied):
            rngs = nnx.Rngs(0)
            self.fc, self.out = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2))
            self.out.kernel = self.fc.kernel if tied else self.out.kernel

        def __call__(self, x):
            return self.out(jnp.tanh(self.fc(x)))

    assert compare(Tied(), FlaxTied(True), X, seeds=1).verdict == "equal"
    with pytest.raises(ValueError, match=r"; tied: in torch out.weight is fc.weight$"):
        compare(Tied(), FlaxTied(False), X)
    untied = Tied()
    untied.out = nn.Linear(8, 8, bias=False)
    with pytest.raises(ValueError, match=r"; tied: in Flax out.kernel is fc.kernel$"):
        compare(untied, FlaxTied(True), X)


# ---- functions


@pytest.mark.parametrize("alone", ["", "first", "second"])
def test_integer_weights_of_a_function_are_transferred(alone):
    def call(weights, x):
        return x @ weights["kernel"] * (1 + weights["ids"] if "ids" in weights else 4)

    weights = {"kernel": np.eye(8, dtype=np.float32), "ids": np.full(8, 3)}
    trees = [dict(weights), dict(weights)]
    if alone:
        del trees[alone == "first"]["ids"]
    ours = {name: torch.from_numpy(one) for name, one in trees[0].items()}
    theirs = {name: jnp.asarray(one) for name, one in trees[1].items()}
    assert compare(parity.function(call, ours), parity.function(call, theirs), X, seeds=1).verdict == "equal"


def test_probes_do_not_bring_torchs_compiler_along():
    """It takes seconds to import, and changes the process."""
    for kind in (Rounding, _Dataflow, LogSumExp, Flash):
        assert not hasattr(vars(kind)["__torch_dispatch__"], "_torchdynamo_disable")


def test_outputs_with_permuted_axes_are_refused_with_advice():
    class Moved(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(3, 4, (3, 3), padding=1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.conv(x.transpose(0, 2, 3, 1))

    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    said = r"output is \(2, 4, 5, 6\) in torch and \(2, 5, 6, 4\) in Flax; if its axes lie in another order, wrap one"
    with pytest.raises(ValueError, match=said):
        compare(nn.Conv2d(3, 4, 3, padding=1), Moved(), x)


@pytest.mark.parametrize("fault", ["", "eps", "padding"])
def test_outputs_are_judged_in_the_layout_of_the_inputs(fault):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
            self.conv2 = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = self.conv1(x)
            return x, x + self.conv2(self.norm(x).tanh())

    class Port(nnx.Module):
        def __init__(self):
            pad = ((0, 2), (1, 1)) if fault == "padding" else 1
            self.conv1 = nnx.Conv(3, 4, (3, 3), padding=pad, rngs=nnx.Rngs(0))
            self.norm = nnx.GroupNorm(4, num_groups=2, epsilon=1e-3 if fault == "eps" else 1e-5, rngs=nnx.Rngs(0))
            self.conv2 = nnx.Conv(4, 4, (1, 1), rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = self.conv1(x)
            return x, x + self.conv2(jnp.tanh(self.norm(x)))

    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    report = compare(Block(), Port(), x, x.transpose(0, 2, 3, 1), seeds=1)
    assert report.verdict == ("different" if fault else "equal")
    assert any("has its channels last, as its inputs have" in note for note in report.notes)
    place = {"": None, "eps": "norm", "padding": "conv1"}[fault]
    assert (report.first_divergence and report.first_divergence.path) == place
