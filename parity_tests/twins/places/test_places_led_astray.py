"""Places that are easily named wrong: exchanged inputs, wrappers, other branches, shared and looped submodules."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.localisation.search import find_in_calls, find_on
from attn_parity.localisation.sides import SIDES, SubmoduleRunner, calls_of
from attn_parity.sides.subject import CannotPromoteError

from . import planted_places as planted
from .planted_places import WIDTH, FlaxBlock, TorchBlock, TorchLinear, TorchModel, X, linear
from .test_places import model


def place(first, second, *inputs):
    found = planted.place(first, second, *inputs).divergence
    return None if found is None else (found.path, found.direction, found.between)


class Masked(nn.Module):
    """Attention that is given query, key and value, and a mask of what it may look at."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, value, mask):
        scores = (query @ key.swapaxes(-1, -2)).masked_fill(~mask, -1e9)
        return self.out(torch.softmax(scores, -1) @ value)


class Caller(nn.Module):
    def __init__(self, shift=0, order=(0, 1, 2)):
        super().__init__()
        self.q, self.k, self.attn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Masked()
        self.shift, self.order = shift, order

    def forward(self, x):
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(self.shift)
        given = [self.q(x), self.k(x), x]
        return self.attn(*(given[i] for i in self.order), mask)


@pytest.mark.parametrize("fault", [{"shift": 1}, {"order": (1, 0, 2)}, {"order": (0, 1, 1)}])
def test_a_submodule_given_a_wrong_mask_is_not_blamed(fault):
    assert place(Caller(), Caller(**fault)) == ("", "forward", ("k", "attn"))


class Encoded(nn.Module):
    """Attention whose mask is added to the scores, or multiplies their exponentials."""

    def __init__(self, is_added):
        super().__init__()
        self.out, self.is_added = nn.Linear(WIDTH, WIDTH), is_added

    def forward(self, x, mask):
        scores = x @ x.swapaxes(-1, -2)
        if self.is_added:
            return self.out(torch.softmax(scores + mask, -1) @ x)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask
        return self.out(weights / weights.sum(-1, keepdim=True) @ x)


class Encoding(nn.Module):
    def __init__(self, is_added, scale=1.0):
        super().__init__()
        self.attn, self.head = Encoded(is_added), nn.Linear(WIDTH, WIDTH)
        self.is_added, self.scale = is_added, scale

    def forward(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        mask = (1 - seen) * torch.finfo(torch.float32).min if self.is_added else seen
        return self.head(self.attn(x, mask)) * self.scale


def test_a_mask_of_another_encoding_is_no_fault_of_attention():
    assert place(Encoding(True), Encoding(False, 2.0)) == ("", "forward", ("head", ""))


def test_a_fault_in_a_masked_submodule_is_its_own():
    class Sharp(Masked):
        def forward(self, query, key, value, mask):
            return super().forward(query * 1.01, key, value, mask)

    second = Caller()
    second.attn.__class__ = Sharp
    assert place(Caller(), second) == ("attn", "forward", ("attn", "attn.out"))


class Wrapper(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.inner, self.gain = TorchLinear(WIDTH, WIDTH), gain

    def forward(self, x):
        return self.gain * self.inner(x)


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.a, self.b = first, second

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_of_nested_wrappers_the_pair_that_agrees_is_taken():
    class Doubled(TorchLinear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    class Faulty(TorchLinear):
        def forward(self, x):
            return super().forward(x) * 1.001

    torch.manual_seed(0)
    first = Two(Wrapper(2.0), TorchLinear(WIDTH, WIDTH))
    assert place(first, Two(Doubled(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH))) is None
    assert place(first, Two(Doubled(WIDTH, WIDTH), Faulty(WIDTH, WIDTH))) == ("b", "forward", None)


class Tied(nn.Module):
    """A model whose head is its embedding; `Whole` is one module, and `Head` has the model inside."""

    def __init__(self, layer):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(9, WIDTH), layer, TorchLinear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.second(torch.tanh(self.first(self.table(ids))))


class Whole(Tied):
    def forward(self, ids):
        return super().forward(ids) @ self.table.weight.T


class Head(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.model = Tied(layer)

    def forward(self, ids):
        return self.model(ids) @ self.model.table.weight.T


class Outer(nn.Module):
    def __init__(self, name, inner):
        super().__init__()
        self.name = name
        setattr(self, name, inner)

    def forward(self, ids):
        return getattr(self, self.name)(ids)


class Twice(Tied):
    def forward(self, ids):
        found = super().forward(ids)
        return torch.cat([found, found], -1)


class Half(Outer):
    def forward(self, ids):
        return super().forward(ids)[..., :WIDTH]


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (lambda layer: Outer("lm", Head(layer)), lambda layer: Outer("model", Whole(layer)), "lm.model.first"),
        (lambda layer: Outer("model", Tied(layer)), lambda layer: Half("model", Twice(layer)), "model.first"),
    ],
)
def test_a_wrapper_that_returns_something_else_hides_nothing_inside(first, second, path):
    class Faulty(TorchLinear):
        def forward(self, x):
            return super().forward(x) * 1.001

    report = compare(first(TorchLinear(WIDTH, WIDTH)), second(Faulty(WIDTH, WIDTH)), np.arange(9).reshape(3, 3))
    assert (report.verdict, report.first_divergence.path) == ("different", path)


def test_code_that_compensates_a_submodule_is_not_blamed():
    class Half(TorchLinear):
        def forward(self, x):
            return 0.5 * super().forward(x)

    class Makes(Two):
        def forward(self, x):
            return self.b(torch.tanh(2.0 * self.a(x)))

    class Faulty(TorchLinear):
        def forward(self, x):
            return super().forward(x) * 1.001

    first = Two(TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH))
    assert place(first, Makes(Half(WIDTH, WIDTH), Faulty(WIDTH, WIDTH))) == ("b", "forward", None)


class Acts(nn.Module):
    def __init__(self, act, name):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        setattr(self, name, act)
        self.name = name

    def forward(self, x):
        return self.fc2(getattr(self, self.name)(self.fc1(x)))


def test_activations_of_other_names_are_paired_and_named():
    first, second = Acts(nn.GELU(), "act"), Acts(nn.GELU("tanh"), "activation_fn")
    found = planted.place(first, second)
    assert (found.divergence.path, found.divergence.second_path) == ("act", "activation_fn")


class Looped(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.cell, self.out, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), gain

    def forward(self, x):
        state = x
        for step in range(5):
            state = torch.tanh(self.cell(state)) * (self.gain if step == 3 else 1.0)
        return self.out(state)


class Unrolled(Looped):
    def forward(self, x):
        state = torch.tanh(self.cell(x))
        both = torch.cat([state, state])
        for _ in range(4):
            both = torch.tanh(self.cell(both))
        return self.out(both[: len(x)]) * self.gain


def test_a_fault_in_a_loop_lies_between_two_calls():
    assert place(Looped(), Looped(1.001)) == ("", "forward", ("cell", "cell"))


def test_calls_of_other_shapes_are_not_guessed_at():
    first, second = Looped(), Unrolled(1.001)
    assert place(first, second) == ("", "forward", ("out", ""))


class ChannelsLast(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ChannelsLastNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Image(nn.Module):
    """Convolutions of as many channels as the image has rows, given channels first or last."""

    def __init__(self, conv=nn.Conv2d, norm=nn.BatchNorm2d, gain=1.0, slope=0.0):
        super().__init__()
        self.a, self.norm, self.b, self.c = conv(3, 4, 3, padding=1), norm(4), conv(4, 4, 3, padding=1), conv(4, 2, 1)
        self.last, self.gain, self.slope = conv is not nn.Conv2d, gain, slope
        self.eval()

    def forward(self, x):
        x = self.a(x.permute(0, 2, 3, 1) if self.last else x)
        x = self.norm(x * self.gain)
        x = self.c(nn.functional.leaky_relu(self.b(x), self.slope))
        return x.permute(0, 3, 1, 2) if self.last else x


@pytest.mark.parametrize(
    ("fault", "between"),
    [({"gain": 3.0}, ("a", "norm")), ({"slope": 0.5}, ("b", "c")), ({"gain": -1.0}, ("a", "norm"))],
)
def test_images_of_ambiguous_layout_are_fed_in_each_sides_layout(fault, between):
    image = np.random.default_rng(2).normal(size=(2, 3, 4, 4)).astype(np.float32)
    assert place(Image(), Image(ChannelsLast, ChannelsLastNorm, **fault), image) == ("", "forward", between)


def test_a_norm_over_the_wrong_axis_is_found():
    class WrongAxis(ChannelsLastNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 1, 3, 2)).permute(0, 1, 3, 2)

    image = np.random.default_rng(2).normal(size=(2, 3, 4, 4)).astype(np.float32)
    assert place(Image(), Image(ChannelsLast, WrongAxis), image) == ("norm", "forward", None)


class Summed(nn.Module):
    """A fault in one of two uses of the same numbers, backward only."""

    def __init__(self, which=None):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.which = nn.Linear(WIDTH, WIDTH), which

    def forward(self, x):
        x = self.norm(x)
        given = {name: x.detach() if name == self.which else x for name in ("a", "b", "past")}
        return self.out(torch.tanh(self.a(given["a"])) * self.b(given["b"]) + given["past"])


@pytest.mark.parametrize(("which", "between"), [("a", ("norm", "a")), ("b", ("a", "b")), ("past", ("b", "out"))])
def test_a_branch_with_a_lost_gradient_is_located(which, between):
    path, direction, found = place(Summed(), Summed(which))
    assert (path, direction) == ("", "backward")
    assert found == between


@pytest.mark.parametrize(("block", "other"), [(TorchBlock, TorchBlock), (TorchBlock, FlaxBlock)])
def test_an_earlier_fault_is_narrowed_despite_differing_inputs(block, other):
    first, second = model(block), model(other, "attn start", "scale")
    second.faults = {"model start": "roll"}
    assert place(first, second) == ("blocks.0.attn", "forward", ("blocks.0.attn", "blocks.0.attn.q_proj"))


class Inside:
    """A torch subject that perhaps has no float64."""

    def __init__(self, subject, *, float64=True):
        self.subject, self.float64 = subject, float64

    def __getattr__(self, name):
        return getattr(self.subject, name)

    def run(self, *args, dtype=None, **more):
        if dtype == "float64" and not self.float64:
            raise CannotPromoteError("there is none")
        return self.subject.run(*args, dtype=dtype, **more)

    def substituted(self, weights, arguments, cotangents, substitutes, *, path="", dtype="float64"):
        assert dtype is None or self.float64
        return self.subject.substituted(weights, arguments, cotangents, substitutes, path=path)


def test_without_float64_it_is_looked_for_in_the_working_precision():
    first, second = model(TorchBlock), model(TorchBlock, "linear", "scale")
    sides = planted.sides_of(first, second)
    subjects = {side: Inside(one, float64=side == "second") for side, one in sides.subjects.items()}
    sides = dataclasses.replace(sides, subjects=subjects, lacks={"first": "there is none"})
    found = find_on(sides, "meaning").divergence
    assert (found.path, found.direction) == ("blocks.0.attn.out_proj", "forward")


def test_recorded_numbers_alone_name_code_between_submodules():
    sides = planted.sides_of(model(TorchBlock), model(TorchBlock, "residual", "scale"))
    calls, problems = calls_of(sides, SubmoduleRunner(sides))
    found = find_in_calls(sides, calls).divergence
    assert not problems
    assert (found.path, found.direction, found.between) == (
        "blocks.0",
        "forward",
        ("blocks.0.attn", "blocks.0.norm2"),
    )


def test_submodules_that_can_not_run_alone_are_compared_as_recorded():
    class Needy(TorchLinear):
        ready = False

        def forward(self, x):
            if not self.ready:
                raise RuntimeError("call the model")
            return self.at("linear", nn.functional.linear(x, self.weight, self.bias))

    class Context(TorchModel):
        def forward(self, x):
            self.head.ready = True
            try:
                return super().forward(x)
            finally:
                self.head.ready = False

    def made(faults):
        torch.manual_seed(0)
        found = model(TorchBlock)
        found.__class__, found.head.__class__ = Context, Needy
        found.head.faults = faults
        return found

    first, second = made({}), made({"linear": "scale"})
    found = planted.place(first, second)
    assert found.divergence.path == "head"
    assert "could not be run by itself" in found.divergence.message


def test_tables_excuse_no_submodule_without_any():
    first, second = model(TorchBlock), model(TorchBlock, "linear", "scale")
    second.blocks[0].norm1.eps = 1e-5 * (1 + 1e-3)  # worth about 1e-9
    sides = planted.sides_of(first, second)
    for allowed in (1e-6, 1e-1):
        assert find_on(sides, "meaning", allowed=allowed).divergence.path == "blocks.0.attn.out_proj"


def test_the_numbers_at_the_place_are_handed_on():
    class Theirs(nnx.Module):
        def __init__(self):
            self.fc1, self.fc2 = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

        def __call__(self, x):
            return self.fc2(nnx.gelu(self.fc1(x), approximate=True))

    found = planted.place(Acts(nn.Sigmoid(), "act"), Theirs())
    assert found.divergence.between == ("fc1", "fc2")
    evidence = found.evidence
    x = evidence.inputs[0]
    np.testing.assert_allclose(evidence.first_outputs[0], 1 / (1 + np.exp(-x)), rtol=1e-12)
    assert evidence.second_outputs[0].shape == x.shape
    assert not np.allclose(evidence.first_outputs[0], evidence.second_outputs[0])
    weights = evidence.first_weights, evidence.second_weights
    assert weights[0].keys() == weights[1].keys() == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])
    assert (evidence.first_class, evidence.second_class) == ("Acts", "Theirs")


def test_gradients_in_evidence_have_the_first_sides_axes():
    class Wrong(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 1.5

    class Theirs(nnx.Module):
        def __init__(self):
            self.a, self.b = linear(WIDTH, WIDTH), Wrong(WIDTH, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x)))

    found = planted.place(Two(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)), Theirs())
    evidence = found.evidence
    assert (evidence.path, evidence.between, evidence.first_class) == ("b", None, "Linear")
    assert evidence.first_gradients["b.weight"].shape == (3, WIDTH)
    np.testing.assert_allclose(1.5 * evidence.first_gradients["b.weight"], evidence.second_gradients["b.weight"])
    np.testing.assert_allclose(1.5 * evidence.first_outputs[0], evidence.second_outputs[0])
    assert set(evidence.first_gradients) == {"input 0", "b.weight", "b.bias"}


def test_two_modules_that_agree_have_no_place():
    assert SIDES == ("first", "second")
    assert place(model(TorchBlock), model(TorchBlock), X) is None


class Field(nn.Module):
    """The right-hand side of a differential equation, which gets its time joined to its state, or as a number."""

    def __init__(self):
        super().__init__()
        self.fc = TorchLinear(WIDTH + 1, WIDTH)

    def forward(self, state, time=None):
        joined = state if time is None else torch.cat([state, torch.full_like(state[..., :1], time)], -1)
        return torch.tanh(self.fc(joined))


class Steps(nn.Module):
    def __init__(self, is_joined, size=0.5):
        super().__init__()
        self.field, self.is_joined, self.size = Field(), is_joined, size

    def forward(self, x):
        for step in range(2):
            time = torch.full_like(x[..., :1], float(step))
            slope = self.field(torch.cat([x, time], -1)) if self.is_joined else self.field(x, float(step))
            x = x + self.size * slope
        return x


def test_a_submodule_whose_inputs_cannot_be_fed_is_judged_by_the_calls_that_get_the_same_numbers():
    assert place(Steps(True), Steps(False, 0.6)) == ("", "forward", ("field", ""))


class Pooling(nn.Module):
    """Attention of queries to keys, which may be more or fewer."""

    def __init__(self):
        super().__init__()
        self.query, self.key = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH)

    def forward(self, query, key):
        return torch.softmax(self.query(query) @ self.key(key).swapaxes(-1, -2), -1) @ key


class Pooled(nn.Module):
    def __init__(self, is_wrong=False):
        super().__init__()
        self.fewer, self.same, self.pool, self.is_wrong = Pooling(), Pooling(), Pooling(), is_wrong

    def forward(self, x):
        fewer = self.fewer(x[:, :2], x)
        return self.pool(x[:, :1], self.same(fewer if self.is_wrong else x, fewer))


def test_a_submodule_that_gets_other_numbers_in_other_shapes_is_not_blamed():
    found = planted.place(Pooled(), Pooled(is_wrong=True)).divergence
    assert (found.path, found.between) == ("", ("fewer.key", "same"))
