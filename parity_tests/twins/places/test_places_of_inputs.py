"""Faults in what a submodule is given: another array than its counterpart's, or a table with axes exchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import parity

from .planted_places import WIDTH
from .test_candidates import places


class Attention(nn.Module):
    """Attention of one array to another."""

    def __init__(self, power=0.5):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.power = power

    def forward(self, x, context):
        key, value = self.kv(context).chunk(2, -1)
        return self.out(torch.softmax(self.q(x) @ key.swapaxes(1, 2) * WIDTH**-self.power, -1) @ value)


class Resampler(nn.Module):
    """Latents that attend to media and to themselves."""

    def __init__(self, context="both", power=0.5):
        super().__init__()
        self.media, self.latents = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = Attention(power), nn.Linear(WIDTH, WIDTH)
        self.queries, self.context = nn.Parameter(torch.randn(3, WIDTH)), context

    def forward(self, x):
        latents = self.latents(self.queries.expand(len(x), -1, -1))
        media = self.media(x)
        both = torch.cat([media, latents], 1)
        context = {"both": both, "media": media, "late": both[:, 1:], "raw": torch.cat([x, latents], 1)}
        return self.out(torch.relu(self.attention(latents, context[self.context])))


CALL, INSIDE = ("", ("media", "attention")), ("attention", None)


@pytest.mark.parametrize("context", ["media", "late"])
@pytest.mark.parametrize("is_first", [False, True])
def test_code_that_gives_a_submodule_fewer_tokens_is_the_place(context, is_first):
    pair = [Resampler(context), Resampler()]
    found, among = places(*pair[:: 1 if is_first else -1])
    assert (found, among) == (("", "forward", CALL[1]), {CALL, INSIDE})


def test_code_that_gives_a_submodule_other_tokens_is_the_place():
    found, _ = places(Resampler(), Resampler("raw"))
    assert found == ("", "forward", CALL[1])


def test_a_fault_in_a_submodule_of_equal_inputs_is_its_own():
    found, _ = places(Resampler(), Resampler(power=0.25))
    assert found == ("attention", "forward", ("attention.q", "attention.out"))


class Mixer(Resampler):
    """The same without a submodule around the attention."""

    def __init__(self, context="both"):
        super().__init__(context)
        self.q, self.kv = self.attention.q, self.attention.kv
        del self.attention

    def forward(self, x):
        latents, media = self.latents(self.queries.expand(len(x), -1, -1)), self.media(x)
        query = self.q(latents)
        key, value = self.kv(torch.cat([media, latents], 1) if self.context == "both" else media).chunk(2, -1)
        return self.out(torch.relu(torch.softmax(query @ key.swapaxes(1, 2), -1) @ value))


@pytest.mark.parametrize("is_first", [False, True])
def test_code_that_gives_a_projection_fewer_tokens_is_the_place(is_first):
    found, among = places(*[Mixer("media"), Mixer()][:: 1 if is_first else -1])
    assert found == ("", "forward", ("q", "kv"))
    assert {("", ("q", "kv")), ("", ("q", "out"))} <= among


class Padded(nn.Module):
    """A convolution that pads itself, or gets a padded input."""

    def __init__(self, mode=None):
        super().__init__()
        self.first, self.mode = nn.Conv1d(WIDTH, WIDTH, 1), mode
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, padding=0 if mode else 1, padding_mode="zeros" if mode else "reflect")

    def forward(self, x):
        x = torch.tanh(self.first(x.swapaxes(1, 2)))
        return self.second(nn.functional.pad(x, (1, 1), self.mode) if self.mode else x)


def test_code_that_pads_in_front_of_a_convolution_is_a_candidate():
    _, among = places(Padded(), Padded("replicate"))
    assert among == {("second", None), ("", ("first", "second"))}


class Grid(nn.Module):
    """Tokens that a convolution sees as an image."""

    def __init__(self, width=3):
        super().__init__()
        self.first, self.conv, self.width = nn.Linear(WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1), width

    def forward(self, x):
        return self.conv(self.first(x).swapaxes(1, 2).unflatten(-1, (2, self.width))).flatten(2).swapaxes(1, 2)


class FlaxGrid(nnx.Module):
    def __init__(self, height, width, is_turned=False):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.conv, self.grid = nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=nnx.Rngs(1)), (height, width)
        self.is_turned = is_turned

    def __call__(self, x):
        image = self.first(x).reshape(len(x), *self.grid, WIDTH)
        return self.conv(image.swapaxes(1, 2) if self.is_turned else image).reshape(x.shape)


def test_code_that_cuts_tokens_into_an_image_of_the_other_orientation_is_the_place():
    x = np.random.default_rng(0).normal(size=(2, 6, WIDTH)).astype(np.float32)
    assert parity.compare(Grid(), FlaxGrid(2, 3), x, seeds=1).verdict == "equal"
    divergence = parity.compare(Grid(), FlaxGrid(3, 2), x, seeds=1).first_divergence
    assert (divergence.between, divergence.hint) == (("first", "conv"), "")


def test_code_that_turns_a_square_image_is_the_place():
    x = np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)
    divergence = parity.compare(Grid(2), FlaxGrid(2, 2, is_turned=True), x, seeds=1).first_divergence
    assert {(one.path, one.between) for one in divergence.candidates} == {("", ("first", "conv")), ("conv", None)}


class Cell(nn.Module):
    def __init__(self, is_turned=False):
        super().__init__()
        self.gates, self.is_turned = nn.Linear(2 * WIDTH, 3 * WIDTH), is_turned

    def forward(self, x, hidden, state):
        both = torch.cat([hidden, x] if self.is_turned else [x, hidden], -1)
        keep, new, out = self.gates(both).chunk(3, -1)
        state = torch.sigmoid(keep) * state + torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(state), state


class Loop(nn.Module):
    """A recurrent layer whose states are zeros at first."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        hidden = state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            hidden, state = self.cell(x[:, step], hidden, state)
        return hidden


class FlaxCell(nnx.Module):
    def __init__(self):
        self.gates = nnx.Linear(2 * WIDTH, 3 * WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x, hidden, state):
        keep, new, out = jnp.split(self.gates(jnp.concatenate([x, hidden], -1)), 3, axis=-1)
        state = jax.nn.sigmoid(keep) * state + jnp.tanh(new)
        return jax.nn.sigmoid(out) * jnp.tanh(state), state


class FlaxLoop(nnx.Module):
    def __init__(self):
        self.cell = FlaxCell()

    def __call__(self, x):
        hidden = state = jnp.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            _, state = self.cell(x[:, step], hidden, state)
            hidden = state
        return hidden


def test_code_that_gives_a_later_call_one_state_twice_is_the_place():
    x = np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)
    divergence = parity.compare(Loop(Cell()), FlaxLoop(), x, seeds=1).first_divergence
    assert (divergence.path, divergence.between) == ("", ("", "cell"))


def test_a_hint_holds_for_calls_whose_states_are_not_zero():
    x = np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)
    divergence = parity.compare(Loop(Cell()), Loop(Cell(is_turned=True)), x, seeds=1).first_divergence
    assert divergence.path == "cell"
    assert "zeros" not in divergence.hint


LENGTH = 5


class Bias(nn.Module):
    """A table of biases by distance."""

    def __init__(self, order):
        super().__init__()
        self.table, self.order = nn.Parameter(torch.randn(2 * LENGTH - 1, 2)), order

    def forward(self):
        return self.table[distances(self.order) + LENGTH - 1]


def distances(order):
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    return keys - queries if order == "k - q" else queries - keys


class Biased(nn.Module):
    """Attention with two heads and biases by distance from a layer, or from a module without inputs."""

    def __init__(self, kind, order="q - k", added="qkh->hqk", gain=1.0):
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = Bias(order) if kind == "module" else nn.Embedding(2 * LENGTH - 1, 2)
        self.kind, self.order, self.added, self.gain = kind, order, added, gain

    def forward(self, x):
        q, k = (half.unflatten(-1, (2, -1)) for half in self.qk(x).chunk(2, -1))
        v = self.v(x).unflatten(-1, (2, -1))
        bias = self.bias() if self.kind == "module" else self.bias(distances(self.order) + LENGTH - 1)
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) + torch.einsum(self.added, bias)
        return self.out(torch.einsum("bhqk,bkhc->bqhc", torch.softmax(self.gain * scores, -1), v).flatten(-2))


@pytest.mark.parametrize(("kind", "place"), [("layer", ("", ("", "bias"))), ("module", ("bias", None))])
def test_a_table_read_at_exchanged_positions_is_placed_where_it_is_read(kind, place):
    found, among = places(Biased(kind), Biased(kind, "k - q"))
    assert ((found[0], found[2]), among) == (place, {place})


@pytest.mark.parametrize("kind", ["layer", "module"])
def test_a_table_of_another_layout_is_not_blamed_for_a_fault_behind_it(kind):
    """The second side reads its table at exchanged positions, and exchanges the axes of what it reads."""
    found, among = places(Biased(kind), Biased(kind, "k - q", "kqh->hqk", 1.1))
    assert found == ("", "forward", ("bias", "out"))
    assert not {("bias", None), ("", ("", "bias"))} & among
