"""The places that are not excluded: branches, submodules whose outputs have other shapes, parents that can't be run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.localisation import search
from attn_parity.localisation.search import find_in_calls
from attn_parity.localisation.sides import SubmoduleRunner, calls_of

from . import planted_places as planted
from .planted_places import WIDTH, TorchLinear, linear
from .test_places_led_astray import Summed


def candidates(divergence):
    return {(one.path, one.between) for one in divergence.candidates}


def places(first, second, *inputs, **more):
    """Return the place and the candidates of a pair, with the first side's names."""
    found = planted.place(first, second, *inputs, **more).divergence
    assert (found.path, found.between) == (found.candidates[0].path, found.candidates[0].between)
    return (found.path, found.direction, found.between), candidates(found)


class Branches(nn.Module):
    """A main path with two layers, a skip connection, an adapter next to it, and gates."""

    def __init__(self, skip=0.5, adapter=2.0, shift=0.0, mixed=1.0, gate=torch.sigmoid):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.fc1, self.fc2, self.out = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.value, self.end = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.skip, self.adapter, self.shift, self.mixed, self.open = skip, adapter, shift, mixed, gate

    def forward(self, x):
        skipped = x * self.skip + self.shift
        adapted = self.up(torch.relu(self.down(x))) * self.adapter
        x = self.out((self.fc2(torch.relu(self.fc1(x))) + skipped + adapted) * self.mixed)
        opened = self.open(self.gate(x))
        return self.end(torch.tanh(self.value(x)) * opened)


class FlaxBranches(nnx.Module):
    def __init__(self, skip=0.5, adapter=2.0):
        self.down, self.up, self.skip, self.adapter = linear(WIDTH, 3), linear(3, WIDTH), skip, adapter
        self.fc1, self.fc2, self.out = linear(WIDTH, 12), linear(12, WIDTH), linear(WIDTH, WIDTH)
        self.gate, self.value, self.end = linear(WIDTH, 5), linear(WIDTH, 5), linear(5, WIDTH)

    def __call__(self, x):
        skipped = x * self.skip
        adapted = self.up(jax.nn.relu(self.down(x))) * self.adapter
        x = self.out(self.fc2(jax.nn.relu(self.fc1(x))) + skipped + adapted)
        opened = jax.nn.sigmoid(self.gate(x))
        return self.end(jnp.tanh(self.value(x)) * opened)


SUM = ("", ("fc2", "out"))
"""The sum of all branches comes behind the last of them, and can't be told from a branch."""

ADDED = {("", ("", "out")), ("", ("up", "out")), ("", ("fc2", "out"))}


@pytest.mark.parametrize(
    ("fault", "between", "others"),
    [
        ({"skip": 0.55}, ("", "out"), {("", ("", "out")), SUM}),
        ({"adapter": 1.9}, ("up", "out"), {("", ("up", "out")), SUM}),
        ({"shift": 1e-3}, ("fc2", "out"), ADDED),
        ({"mixed": 1.01}, ("fc2", "out"), ADDED),
        ({"gate": torch.nn.functional.silu}, ("value", "end"), {("", ("gate", "end")), ("", ("value", "end"))}),
    ],
)
def test_branches_that_are_not_excluded_are_candidates(fault, between, others):
    found, among = places(Branches(), Branches(**fault))
    assert found == ("", "forward", between)
    assert among == others


@pytest.mark.parametrize(("fault", "between"), [({"skip": 0.55}, ("", "out")), ({"adapter": 1.9}, ("up", "out"))])
def test_a_flax_side_names_the_branch_as_well(fault, between):
    found, among = places(Branches(), FlaxBranches(**fault))
    assert (found, among) == (("", "forward", between), {("", between), SUM})


class Inside(nn.Module):
    def __init__(self, **fault):
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), Branches(**fault)

    def forward(self, x):
        return self.inner(torch.tanh(self.before(x)))


def test_a_branch_in_a_nested_module_is_named():
    found, _ = places(Inside(), Inside(skip=0.55))
    assert found == ("inner", "forward", ("inner", "inner.out"))


def test_recorded_numbers_exclude_no_branch():
    sides = planted.sides_of(Branches(), Branches(skip=0.55))
    calls, _ = calls_of(sides, SubmoduleRunner(sides))
    found = find_in_calls(sides, calls).divergence
    assert candidates(found) == ADDED | {("", ("down", "out")), ("", ("fc1", "out"))}


def test_a_lost_gradient_leaves_every_use_as_a_candidate():
    class Uses(nn.Module):
        def __init__(self, lost=False):
            super().__init__()
            self.norm, self.lost = nn.LayerNorm(WIDTH), lost
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.norm(x)
            y = torch.where(x > 0.5, x.detach(), x) if self.lost else x
            return self.a(x) * self.b(torch.sin(y))

    found, among = places(Uses(), Uses(lost=True))
    assert found[:2] == ("", "backward")
    assert among == {("", ("norm", "a")), ("", ("norm", "b"))}


def test_a_gradient_lost_past_a_submodule_leaves_both_ways():
    found, among = places(Summed(), Summed("past"))
    assert found == ("", "backward", ("b", "out"))
    assert among == {("", ("b", "out")), ("", ("norm", "out"))}


# ---- outputs of other shapes


class Causal(nn.Module):
    """torch pads both ends, and what comes too late is cut off behind the convolution."""

    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.conv1d = nn.Conv1d(6, 6, 4, padding=3, groups=6)

    def forward(self, x):
        return self.out(nn.functional.silu(self.conv1d(self.enter(x).swapaxes(1, 2))[..., : x.shape[1]].swapaxes(1, 2)))


class FlaxCausal(nnx.Module):
    def __init__(self, padding=(3, 0), act=jax.nn.silu, gain=1.0):
        self.enter, self.out, self.act, self.gain = linear(WIDTH, 6), linear(6, WIDTH), act, gain
        kind = Reversed if gain != 1.0 else nnx.Conv
        self.conv1d = kind(6, 6, (4,), padding=[padding], feature_group_count=6, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.act(self.conv1d(self.enter(x))))


class Reversed(nnx.Conv):
    def __call__(self, x):
        return super().__call__(x[..., ::-1])


BEHIND, ITSELF = ("", ("conv1d", "out")), ("conv1d", None)


@pytest.mark.parametrize(
    ("fault", "likeliest"),
    [({"act": jax.nn.gelu}, BEHIND), ({"padding": (2, 1)}, BEHIND), ({"gain": 2.0}, ITSELF)],
)
def test_a_submodule_of_other_shapes_is_not_excluded(fault, likeliest):
    report = compare(Causal(), FlaxCausal(**fault), planted.X, seeds=1)
    first = report.first_divergence
    assert (first.path, first.between) == likeliest
    assert candidates(first) == {BEHIND, ITSELF}
    node = next(one for one in report.tree.walk() if one.path == "conv1d")
    assert (node.verdict, "other shapes" in node.message) == (None, True)
    assert "conv1d" in str(report)


# ---- inputs that no call feeds


class Positions(nn.Module):
    def __init__(self, start=0):
        super().__init__()
        self.words, self.positions, self.out = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.start = start

    def forward(self, ids):
        return self.out(self.positions(self.start + torch.arange(ids.shape[1])) + self.words(ids))


def test_positions_that_code_counts_come_from_no_submodule():
    found, among = places(Positions(), Positions(1), IDS)
    assert (found, among) == (("", "forward", ("", "positions")), {("", ("", "positions"))})


# ---- parents that can't be run on both sides


class Bare(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.a, self.b, self.c, self.gain = *(TorchLinear(WIDTH, WIDTH) for _ in range(3)), gain

    def forward(self, x):
        return self.c(self.gain * self.b(torch.tanh(self.a(x))))


class Logits(Bare):
    """Its head is its last layer's weight."""

    def forward(self, x):
        return super().forward(x) @ self.c.weight[:3].T


class Whole(nn.Module):
    def __init__(self, inner, headless):
        super().__init__()
        self.inner, self.headless = inner, headless

    def forward(self, x):
        x = self.inner(x)
        return x @ self.inner.c.weight[:3].T if self.headless else x


def test_code_inside_a_parent_of_other_outputs_is_named():
    found, _ = places(Whole(Bare(), True), Whole(Logits(1.01), False))
    assert found == ("inner", "forward", ("inner.b", "inner.c"))


def test_a_large_tree_is_searched_below_a_parent_of_other_outputs(monkeypatch):
    monkeypatch.setattr(search, "MAX_NODES", 2)
    second = Whole(Logits(), False)
    second.inner.b.faults = {"linear": "scale"}
    found, _ = places(Whole(Bare(), True), second)
    assert found == ("inner.b", "forward", None)


# ---- which direction comes first


class Padded(nn.Module):
    """Token embeddings, and positions from a table that is computed in float32."""

    def __init__(self, padding=None, power=10000.0):
        super().__init__()
        self.table, self.block, self.power = nn.Embedding(9, WIDTH, padding_idx=padding), Positioned(power), power
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.block(self.table(ids)))


class Positioned(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.fc, self.power = nn.Linear(WIDTH, WIDTH), power

    def forward(self, x):
        steps = torch.arange(0, WIDTH, 2) / WIDTH
        angles = torch.arange(x.shape[1])[:, None] * self.power**-steps
        return torch.tanh(self.fc(x + torch.cat([angles.sin(), angles.cos()], -1)))


class FlaxPadded(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(9, WIDTH, rngs=nnx.Rngs(0))
        self.block, self.head = FlaxPositioned(), linear(WIDTH, 3)

    def __call__(self, ids):
        return self.head(self.block(self.table(ids)))


class FlaxPositioned(nnx.Module):
    def __init__(self):
        self.fc = linear(WIDTH, WIDTH)

    def __call__(self, x):
        steps = np.arange(0, WIDTH, 2, dtype=np.float32) / WIDTH
        angles = np.arange(x.shape[1], dtype=np.float32)[:, None] * np.exp(-steps * np.float32(np.log(10000.0)))
        return jnp.tanh(self.fc(x + np.concatenate([np.sin(angles), np.cos(angles)], -1)))


IDS = np.array([[0, 3, 8, 2, 0], [1, 0, 5, 5, 7]])


class Nudged(Positioned):
    def forward(self, x):
        return super().forward(x) * (1 + 8e-10)


def test_a_lost_gradient_comes_before_a_difference_that_the_outputs_do_not_show():
    second = Padded()
    second.block.__class__ = Nudged
    sides = planted.sides_of(Padded(0), second, IDS)
    found = [search.find_on(sides, "meaning", outputs_agree=agree).divergence for agree in (False, True)]
    assert [(one.path, one.direction) for one in found] == [("block", "forward"), ("table", "backward")]


@pytest.mark.parametrize("power", [10000.0, 10000.0 * (1 + 3e-9)])
def test_a_row_without_gradient_comes_before_rounding_of_tables(power):
    report = compare(Padded(0, power), FlaxPadded(), IDS, seeds=1)
    first = report.first_divergence
    assert (report.verdict, first.path, first.direction) == ("different", "table", "backward")


class Table(nn.Module):
    """Adds biases that a layer computes from a square grid of coordinates, whose rows one side may take for columns."""

    def __init__(self, indexing="ij"):
        super().__init__()
        self.value, self.bias, self.indexing = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH), indexing

    def forward(self, x):
        places = torch.arange(3, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(places, places, indexing=self.indexing), -1)
        value = self.value(x)
        return torch.tanh(value + self.bias(grid).flatten(0, 1)[:5])


def test_code_in_front_of_inputs_with_axes_exchanged_is_no_layout():
    """To a layer the grid of the other indexing is the same with its axes exchanged, as a layout may have them."""
    found, among = places(Table(), Table("xy"))
    assert (found, among) == (("", "forward", ("", "bias")), {("", ("", "bias"))})


class Recurrent(nn.Module):
    """A layer before an LSTM, one of whose two biases the other side lacks."""

    def __init__(self):
        super().__init__()
        self.before, self.rnn = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(torch.tanh(self.before(x)))[0]


class FlaxRecurrent(nnx.Module):
    def __init__(self):
        self.before = linear(WIDTH, WIDTH)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, 4, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        return self.rnn(jax.nn.relu(self.before(x)))


def test_candidates_are_excluded_where_biases_are_folded():
    inputs = np.random.default_rng(3).normal(size=(2, 5, WIDTH)).astype(np.float32)
    report = compare(Recurrent(), FlaxRecurrent(), inputs)
    assert candidates(report.first_divergence) == {("", ("before", "rnn"))}
