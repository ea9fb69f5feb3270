"""Hints on modules with a fault: what both sides compute is recovered from the numbers at the place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import parity
from attn_bridge.parity import compare

LINE = r"\S*test_hints_of_ports.py:\d+"

RANDOM = np.random.default_rng(3)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


class OtherLoss(nnx.Module):
    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)


class Norm(nn.Module):
    """The norm of the Annotated Transformer, with the deviation by n - 1."""

    def __init__(self):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class OtherNorm(nnx.Module):
    def __init__(self):
        self.a_2, self.b_2 = nnx.Param(jnp.ones(8)), nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return self.a_2[...] * (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6) + self.b_2[...]


class Patches(nn.Module):
    """Patches with a table of positions that is resized from 4 x 4 to what the image has."""

    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Linear(12, 16), nn.Linear(16, 3)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 16))

    def forward(self, x):
        size = int(x.shape[1] ** 0.5)
        table = self.pos_embed.reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
        table = nn.functional.interpolate(table, size=(size, size), mode="bicubic", align_corners=False)
        return self.head(self.patch(x) + table.permute(0, 2, 3, 1).reshape(1, -1, 16))


class OtherPatches(nnx.Module):
    def __init__(self):
        self.patch, self.head = nnx.Linear(12, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 3, rngs=nnx.Rngs(1))
        self.pos_embed = nnx.Param(jnp.ones((1, 16, 16)))

    def __call__(self, x):
        size = int(x.shape[1] ** 0.5)
        table = jax.image.resize(self.pos_embed[...].reshape(1, 4, 4, 16), (1, size, size, 16), "bicubic")
        return self.head(self.patch(x) + table.reshape(1, -1, 16))


class Cell(nn.Module):
    """An LSTM written by hand, with the gates i, f, g, o."""

    def __init__(self):
        super().__init__()
        self.i2h, self.h2h = nn.Linear(8, 16), nn.Linear(4, 16)

    def forward(self, x):
        state = memory = x.new_zeros(len(x), 4)
        found = []
        for step in x.unbind(1):
            i, f, g, o = (self.i2h(step) + self.h2h(state)).chunk(4, -1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
            found.append(state)
        return torch.stack(found, 1)


class OtherCell(nnx.Module):
    def __init__(self):
        self.i2h, self.h2h = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(4, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        state = memory = jnp.zeros((len(x), 4))
        found = []
        for step in x.swapaxes(0, 1):
            i, f, o, g = jnp.split(self.i2h(step) + self.h2h(state), 4, -1)
            memory = nnx.sigmoid(f) * memory + nnx.sigmoid(i) * jnp.tanh(g)
            state = nnx.sigmoid(o) * jnp.tanh(memory)
            found.append(state)
        return jnp.stack(found, 1)


class FusedAttention(nn.Module):
    """Queries, keys and values of one product, which no submodule of the port computes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class SplitAttention(nnx.Module):
    def __init__(self, later=0, scale=0.5):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v, self.proj = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))
        self.later, self.scale = later, scale

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], 2, 4) for layer in (self.q, self.k, self.v))
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * self.scale
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool), self.later)
        y = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
        return self.proj(y.reshape(x.shape))


FAULTS = {
    "a causal mask that shows a later token": (
        FusedAttention,
        lambda: SplitAttention(later=1),
        (2, 7, 8),
        "with a diagonal 1 lower in tril in Flax both sides agree",
    ),
    "a causal mask that shows two later tokens": (
        FusedAttention,
        lambda: SplitAttention(later=2),
        (2, 7, 8),
        "in Flax the output at position 4 depends on the token at position 6, in torch only the output "
        "at position 6 does",
    ),
    "no causal mask": (
        FusedAttention,
        lambda: SplitAttention(later=7),
        (2, 7, 8),
        "in Flax the output at position 0 depends on the token at position 6, in torch only the output "
        "at position 6 does",
    ),
    "scores that are not scaled": (
        FusedAttention,
        lambda: SplitAttention(scale=1.0),
        (2, 7, 8),
        "with 0.5 for 1 in Flax both sides agree",
    ),
    "scores that are scaled twice": (
        FusedAttention,
        lambda: SplitAttention(scale=0.25),
        (2, 7, 8),
        "with 0.5 for 0.25 in Flax both sides agree",
    ),
    "scores by the width of both heads": (
        FusedAttention,
        lambda: SplitAttention(scale=8**-0.5),
        (2, 7, 8),
        "with 0.5 for 0.353553 in Flax both sides agree",
    ),
    "a scalar loss times 1.0005": (
        Loss,
        lambda: OtherLoss(lambda x: (x * x).mean() * 1.0005),
        (4, 3),
        "with no multiplication by its number in Flax both sides agree",
    ),
    "a loss that is added up": (
        Loss,
        lambda: OtherLoss(lambda x: (x * x).sum()),
        (4, 3),
        "with a mean for the sum in Flax, or with a sum for the mean in torch both sides agree",
    ),
    "a deviation by n": (
        Norm,
        OtherNorm,
        (3, 5, 8),
        "torch computes (x - mean) / (std by n - 1 + 1e-06) * a_2 + b_2, Flax (x - mean) / (std + 1e-06) * a_2 + b_2",
    ),
    "another filter for a table of positions": (
        Patches,
        OtherPatches,
        (2, 36, 12),
        "torch computes cubic resizing, corners not aligned of pos_embed, Flax cubic resizing of sharpness -0.5 of "
        "pos_embed",
    ),
    "gates exchanged": (
        Cell,
        OtherCell,
        (2, 3, 8),
        "torch computes an LSTM, Flax an LSTM with the gates g and o exchanged",
    ),
}


@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_is_named_by_what_both_sides_compute(label):
    ours, theirs, shape, expected = FAULTS[label]
    report = compare(ours(), theirs(), draw(*shape), seeds=1)
    assert report.verdict == "different"
    assert re.sub(r" \([^ ]*\.py:\d+( `[^`]*`)?\)", "", report.first_divergence.hint) == expected


class CrossAttention(nn.Module):
    """Attention to a memory: each output depends on its own query alone, without any mask."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(6, 16)

    def forward(self, x, memory):
        key, value = self.kv(memory).chunk(2, -1)
        return (self.q(x) @ key.mT).softmax(-1) @ value


class OtherCrossAttention(nnx.Module):
    def __init__(self):
        self.q, self.kv = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(6, 16, rngs=nnx.Rngs(1))

    def __call__(self, x, memory):
        key, value = jnp.split(self.kv(memory), 2, -1)
        return jax.nn.softmax(self.q(x) @ key.mT, axis=-2) @ value


def test_a_softmax_over_queries_is_not_called_a_missing_mask():
    report = compare(CrossAttention(), OtherCrossAttention(), (draw(2, 3, 8), draw(2, 5, 6)), seeds=1)
    assert report.verdict == "different"
    assert "mask" not in report.first_divergence.hint


class Filter(nn.Module):
    """A long convolution by the Fourier transform, padded so that it does not wrap around."""

    def __init__(self):
        super().__init__()
        self.mix, self.filter = nn.Linear(4, 4), nn.Parameter(torch.rand(7, 4))

    def forward(self, x):
        spectra = (torch.fft.rfft(one, n=14, dim=-2) for one in (self.mix(x), self.filter))
        one, two = spectra
        return torch.fft.irfft(one * two, n=14, dim=-2)[:, :7]


class WrappedFilter(nnx.Module):
    def __init__(self):
        self.mix, self.filter = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((7, 4)))

    def __call__(self, x):
        one, two = (jnp.fft.rfft(one, n=7, axis=-2) for one in (self.mix(x), self.filter[...]))
        return jnp.fft.irfft(one * two, n=7, axis=-2)


def test_a_convolution_that_wraps_around_is_not_called_a_mask():
    report = compare(Filter(), WrappedFilter(), draw(2, 7, 4), seeds=1)
    assert report.first_divergence.hint.endswith("in torch only the output at position 6 does")


def test_code_that_refuses_another_token_is_still_judged():
    last = draw(8)

    class Strict(FusedAttention):
        def forward(self, x):
            if x.shape[1] == 7 and not torch.equal(x[:, -1].float(), torch.from_numpy(last).expand(2, 8)):
                raise ValueError("the last token is the end of the text")
            return super().forward(x)

    x = np.concatenate([draw(2, 6, 8), np.broadcast_to(last, (2, 1, 8))], 1)
    report = compare(Strict(), SplitAttention(later=1), x, fixed=(0,), seeds=1)
    assert report.verdict == "different"


class Loop(nn.Module):
    """Adds another row of a table in each step of a loop, which a fault takes from the next step."""

    def __init__(self, late=0):
        super().__init__()
        self.table, self.late = nn.Parameter(torch.randn(6, 8)), late
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.after(self.before(x[:, i]) + self.table[i + self.late]) for i in range(5)], 1)


def test_no_hint_on_code_in_a_loop_holds_for_the_first_step_alone():
    """In one step the difference is the same in every row, which is no bias where the next has another."""
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    found = compare(Loop(), Loop(1), x, seeds=1).first_divergence
    assert found.between == ("before", "after")
    assert found.hint == "with axis 0 of table shifted by 1 in second both sides agree"


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.memory = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, memory):
        memory = self.memory(memory)
        return torch.softmax(self.query(x) @ memory.mT, -1) @ memory


class Decoder(nn.Module):
    """Attends to a memory, which a fault takes from its own tokens."""

    def __init__(self, own=False):
        super().__init__()
        self.norm, self.cross, self.own = nn.LayerNorm(8), Cross(), own

    def forward(self, x, memory):
        normed = self.norm(x)
        return x + self.cross(normed, normed if self.own else memory)


def test_an_array_given_twice_is_a_fault_of_the_call():
    """Inside, both sides compute the same; what would be a mask of attention, or none, is another argument."""
    x, memory = draw(2, 5, 8), draw(2, 7, 8)
    found = compare(Decoder(), Decoder(own=True), (x, memory), seeds=1).first_divergence
    assert (found.path, found.between, found.hint) == ("", ("norm", "cross"), "")
    assert [one.path for one in found.candidates][1] == "cross"


class Named(Cross):
    """The same with a submodule that the other side lacks."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Identity()

    def forward(self, x, memory):
        return super().forward(self.scores(x), memory)


class Layers(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), decoder

    def forward(self, x, memory):
        return self.second(self.first(x), memory)


@pytest.mark.parametrize("path", ["", "second"])
def test_the_tree_marks_the_code_that_calls_and_no_submodule_of_one_side(path):
    first, second = Decoder(), Decoder(own=True)
    second.cross = Named()
    pair = (Layers(first), Layers(second)) if path else (first, second)
    report = compare(*pair, (draw(2, 5, 8), draw(2, 7, 8)), seeds=1)
    assert report.first_divergence.between == tuple(f"{path}.{name}".lstrip(".") for name in ("norm", "cross"))
    assert [part.path for part in report.tree.walk() if part.first] == [report.first_divergence.path] == [path]


class Scaled(nn.Module):
    """A block that runs twice, with another factor in each run."""

    def __init__(self):
        super().__init__()
        self.part = Factor()

    def forward(self, x):
        return self.part(self.part(x, 1.0), 1.0)


class Factor(nn.Module):
    def forward(self, x, times):
        return torch.sin(x) * times


class OtherFactor(nnx.Module):
    def __call__(self, x, times):
        return jnp.sin(x) * times


class OtherScaled(nnx.Module):
    def __init__(self, factors):
        self.part, self.factors = OtherFactor(), factors

    def __call__(self, x):
        return self.part(self.part(x, self.factors[0]), self.factors[1])


def test_a_change_holds_for_every_call_of_a_submodule():
    divergence = compare(Scaled(), OtherScaled((1.7, 2.5)), draw(3, 9)).first_divergence
    assert divergence.path == "part"
    assert divergence.hint.startswith("with no multiplication by its number")


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class OtherConvolution(nnx.Module):
    def __init__(self):
        self.conv = nnx.Conv(3, 4, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.conv(x)


def test_a_padding_mode_is_no_size():
    hint = compare(Convolution(), OtherConvolution(), draw(2, 5, 6, 3)).first_divergence.hint
    assert hint.startswith("padding_mode is 'zeros' in torch and 'circular' in Flax")
    assert "padding is" not in hint


class Bins(nn.Module):
    def forward(self, x):
        return torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)) + 1


class OtherBins(nnx.Module):
    def __call__(self, x):
        return jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), x)


def test_whole_numbers_that_are_counted_otherwise_are_named():
    assert "with 1 added to the result of" in compare(Bins(), OtherBins(), draw(3, 8)).first_divergence.hint


def test_inputs_that_are_exchanged_are_named():
    def divergence(weights, x, y):
        return (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1).mean()

    sides = [parity.function(call, {}, framework="torch") for call in (divergence, lambda w, x, y: divergence(w, y, x))]
    hint = parity.compare(*sides, (draw(4, 5), draw(4, 5)), seeds=1).first_divergence.hint
    assert hint == "with inputs 0 and 1 exchanged in second both sides agree"


def test_what_agrees_is_the_submodule_that_was_run():
    class Sines(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.part, self.last = Sine(function), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.part(x))

    class Sine(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.fc, self.function = nn.Linear(8, 8), function

        def forward(self, x):
            return self.function(self.fc(x)) + x

    hint = compare(Sines(torch.sin), Sines(torch.cos), draw(4, 8), seeds=1).first_divergence.hint
    assert hint.endswith(" both sides agree in part")


def test_a_bound_that_drawn_numbers_do_not_reach_is_not_left_out():
    """Without the narrow bound both agree on numbers below the wide one, and not on larger ones."""
    sides = [
        parity.function(lambda w, x, bound=bound: x.clamp(-bound, bound) * 2 + x.sin(), {}, framework="torch")
        for bound in (9.0, 1.0)
    ]
    hint = parity.compare(*sides, draw(4, 7), seeds=1).first_divergence.hint
    assert "no clamp" not in hint


def test_an_operation_that_is_missing_comes_before_a_number_that_makes_up_for_it():
    """Without the factor in torch, so does four times the number in Flax."""

    def scaled(_, x):
        x = x * 0.5
        return x / torch.sqrt(x * x + 0.1)

    def plain(_, x):
        return x / jnp.sqrt(x * x + 0.1)

    sides = parity.function(scaled, {}, framework="torch"), parity.function(plain, {}, framework="jax")
    hint = parity.compare(*sides, draw(5, 6), seeds=1).first_divergence.hint
    change = "no multiplication by its number"
    assert re.fullmatch(rf"with {change} in torch \({LINE}\) both sides agree", hint), hint
