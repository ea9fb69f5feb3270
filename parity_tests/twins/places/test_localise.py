"""The search for the first divergence where it is easily led astray; `test_first_divergence` has a fault per depth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare, function

WIDTH = 8
X = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(4)


def dense(kind=nnx.Linear):
    return kind(WIDTH, WIDTH, rngs=nnx.Rngs(0))


class Scaled(nnx.Linear):
    """Wrong forward, and so backward."""

    def __call__(self, x):
        return super().__call__(x) * 1.001


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * 1.001,))


class Turned(nnx.Linear):
    """Wrong backward only."""

    def __call__(self, x):
        return wrong_gradient(super().__call__(x))


def found(report):
    first = report.first_divergence
    assert [node.path for node in report.tree.walk() if node.first] == [first.path]
    return first.path, first.flax_path, first.direction


def nodes(report):
    return {node.flax_path if node.path is None else node.path: node for node in report.tree.walk()}


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.softmax(self.query(x) @ x.transpose(-1, -2), -1) @ x)


class TorchStack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln": nn.LayerNorm(WIDTH), "attn": TorchAttention()}) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.h:
            x = x + block["attn"](block["ln"](x))
        return self.head(x)


class FlaxAttention(nnx.Module):
    def __init__(self, query=nnx.Linear, out=nnx.Linear, sharpness=1.0):
        self.query, self.out, self.sharpness = dense(query), dense(out), sharpness

    def __call__(self, x):
        return self.out(jax.nn.softmax(self.query(x) @ x.swapaxes(-1, -2) * self.sharpness) @ x)


class FlaxBlock(nnx.Module):
    def __init__(self, attention, gain):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.attention, self.gain = attention, gain

    def __call__(self, x):
        return x + self.gain * self.attention(self.norm(x))


class FlaxStack(nnx.Module):
    """Block `number` is built with the given faults."""

    def __init__(self, number=0, depth=4, gain=1.0, **faults):
        self.layers = nnx.List(
            [
                FlaxBlock(FlaxAttention(**faults if i == number else {}), gain if i == number else 1.0)
                for i in range(depth)
            ]
        )
        self.head = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        for block in self.layers:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("faults", "path", "direction"),
    [
        ({"number": 0, "query": Turned}, "h.0.attn.query", "backward"),
        ({"number": 3, "out": Scaled, "query": Turned}, "h.3.attn.out", "forward"),
        ({"number": 2, "gain": 1.001}, "", "forward"),
    ],
    ids=["first-leaf", "last-leaf", "between"],
)
def test_a_fault_in_four_blocks_of_other_names_is_found(faults, path, direction):
    flax_path = path.replace("h.", "layers.").replace("attn", "attention")
    report = compare(TorchStack(), FlaxStack(**faults), X, seeds=1)
    assert report.verdict == "different"
    assert found(report) == (path, flax_path, direction)


def test_the_tree_is_in_order_of_execution():
    report = compare(TorchStack(2), FlaxStack(depth=2), X, seeds=1, localise=True)
    assert (report.verdict, report.first_divergence) == ("equal", None)
    assert [child.path for child in report.tree.children if child.path is not None] == ["h", "head"]
    tree = nodes(report)
    assert [child.path for child in tree["h"].children] == ["h.0", "h.1"]
    assert [child.path for child in tree["h.1.attn"].children] == ["h.1.attn.query", "h.1.attn.out"]
    assert "never called by itself in torch" in tree["h.0"].message, "a ModuleDict is no step of the computation"
    for path in ("h.1.attn.query", "h.0.ln", "head", ""):
        node = tree[path]
        assert (node.verdict, node.first) == ("equal", False)
        assert max(node.forward_error, node.backward_error) < 1e-12
    assert tree["h.0.ln"].error_in == 0.0
    assert (tree["h.0.ln"].torch_type, tree["h.0.ln"].flax_type) == ("LayerNorm", "LayerNorm")


def test_submodules_that_take_the_axes_in_another_order_are_matched():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), TorchAttention()

        def forward(self, x):
            return self.b(self.a(x.transpose(0, 1)).transpose(0, 1))

    class Theirs(nnx.Module):
        def __init__(self, a, **faults):
            self.a, self.b = dense(a), FlaxAttention(**faults)

        def __call__(self, x):
            return self.b(self.a(x))

    assert compare(Ours(), Theirs(nnx.Linear), X, seeds=1).verdict == "equal"
    assert found(compare(Ours(), Theirs(Scaled), X, seeds=1)) == ("a", "a", "forward")
    assert found(compare(Ours(), Theirs(Turned), X, seeds=1)) == ("a", "a", "backward")
    report = compare(Ours(), Theirs(nnx.Linear, sharpness=1.01), X, seeds=1)
    assert found(report) == ("b", "b", "forward")
    assert nodes(report)["a"].forward_error < 1e-12


class SometimesScaled(nnx.Linear):
    """Wrong for large inputs only, which the second call gets."""

    def __call__(self, x):
        return super().__call__(x) + 1e-3 * jnp.maximum(jnp.abs(x).max() - 50, 0)


@pytest.mark.parametrize("kind", [Scaled, SometimesScaled, Turned])
def test_both_calls_of_a_submodule_are_compared(kind):
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.out(self.fc(100 * torch.tanh(self.fc(x))) / 100)

    class Theirs(nnx.Module):
        def __init__(self):
            self.fc, self.out = dense(kind), dense()

        def __call__(self, x):
            return self.out(self.fc(100 * jnp.tanh(self.fc(x))) / 100)

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert found(report) == ("fc", "fc", "backward" if kind is Turned else "forward")
    assert nodes(report)["out"].verdict == "equal"


def test_rounding_in_an_innocent_submodule_is_not_blamed():
    class Theirs(FlaxStack):
        def __call__(self, x):
            return super().__call__(x) * 1.001

    report = compare(TorchStack(1), Theirs(depth=1), X + 400, seeds=1)
    assert report.verdict == "different"
    tree = nodes(report)
    assert tree["h.0.ln"].forward_error > 1e-11, "the stock norm of Flax is ill-conditioned on such inputs"
    assert found(report) == ("", "", "forward")


def test_a_fault_in_an_unpaired_submodule_is_its_parents():
    class Act(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x * 1.001)

    class Theirs(nnx.Module):
        def __init__(self):
            self.proj, self.act, self.out = dense(), Act(), dense()

        def __call__(self, x):
            return self.out(self.act(self.proj(x)))

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.out(self.proj(x))

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert found(report) == ("", "", "forward")
    tree = nodes(report)
    assert {path for path, node in tree.items() if node.message.startswith("no counterpart")} == {
        "proj",
        "proj.1",
        "act",
    }
    assert (tree["proj.0"].flax_path, tree["proj.0"].verdict) == ("proj", "equal")
    assert tree["out"].verdict == "equal"


def test_submodules_that_look_at_values_are_recorded():
    def flip(x):
        return x * 2 if x.sum() > 0 else x

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(flip(self.a(x)))

    class Theirs(nnx.Module):
        def __init__(self, **kinds):
            self.a, self.b = dense(kinds.get("a", nnx.Linear)), dense(kinds.get("b", nnx.Linear))

        def __call__(self, x):
            return self.b(flip(self.a(x)))

    for name, kind, direction in (("a", Turned, "backward"), ("b", Scaled, "forward")):
        assert found(compare(Ours(), Theirs(**{name: kind}), X, seeds=1)) == (name, name, direction)


def test_a_fault_is_reported_without_recorded_submodules():
    class Leaking(nnx.Module):
        def __init__(self):
            self.a, self.b = dense(), dense(Scaled)

        def __call__(self, x):
            def body(state):
                return state[0] + 1, jax.lax.stop_gradient(self.a(state[1]))

            return self.b(jax.lax.while_loop(lambda state: state[0] < 1, body, (0, jax.lax.stop_gradient(x)))[1])

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(self.a(x).detach())

    report = compare(Ours(), Leaking(), X, seeds=1)
    assert report.verdict == "different"
    assert report.first_divergence.direction == "forward"
    assert report.first_divergence.path in ("", "b")


class Bfloat16Attention(FlaxAttention):
    def __call__(self, x):
        scores = (self.query(x) @ x.swapaxes(-1, -2)).astype(jnp.bfloat16)
        return self.out(jax.nn.softmax(scores).astype(x.dtype) @ x)


def test_a_loss_of_precision_is_found_in_the_flax_side():
    theirs = FlaxStack(depth=2)
    theirs.layers[1].attention.__class__ = Bfloat16Attention
    report = compare(TorchStack(2), theirs, X, seeds=1)
    assert report.verdict == "precision"
    assert found(report) == ("h.1.attn", "layers.1.attention", "forward")
    assert "the Flax side loses" in report.first_divergence.message


def test_a_variance_that_cancels_is_found_in_its_norm():
    report = compare(TorchStack(1), FlaxStack(depth=1), X + 100, seeds=1)
    assert report.verdict == "precision"
    assert found(report) == ("h.0.ln", "layers.0.norm", "forward")


def test_a_gradient_of_an_argument_has_its_name():
    """The first argument has no gradient, and counts among the arguments."""
    sides = (
        function(lambda _, ids, scores, returns: scores[ids] * returns, {}, framework="torch"),
        function(lambda _, ids, scores, returns: scores[ids] * jax.lax.stop_gradient(returns), {}, framework="jax"),
    )
    inputs = np.array([2, 0, 1]), X[0, :3, :4], X[1, :3, :4]
    message = compare(*sides, inputs, seeds=1).first_divergence.message
    assert "the gradient of returns differs" in message
