"""A number in a name is an order within a class and a container: pairs that only numbers support follow execution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge.parity import compare

WIDTH = 6
X = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)


def linen_side(body):
    class Port(linen.Module):
        @linen.compact
        def __call__(self, x):
            return body(x)

    module = Port()
    return module, module.init(jax.random.key(0), X)


def judge(first, second):
    return compare(first, second, X, seeds=1)


def layers_of(report):
    """Return the layer on the first side -> the layer on the second, and what the pairs rest on."""
    pairs = {one.first.rpartition(".")[0]: one.second.rpartition(".")[0] for one in report.pairing}
    return pairs, {one.how for one in report.pairing}


NORMS = {
    "layer": (nn.LayerNorm, lambda: linen.LayerNorm(epsilon=1e-5), "LayerNorm"),
    "batch": (
        nn.BatchNorm1d,
        lambda: linen.BatchNorm(use_running_average=True, epsilon=1e-5, momentum=0.9),
        "BatchNorm",
    ),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh])
def test_numbers_that_count_activations_do_not_pair_norms(kind, activation):
    own, norm, name = NORMS[kind]
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), own(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), own(WIDTH)).eval()

    def body(x):
        x = activation(norm()(linen.Dense(WIDTH)(x)))
        return norm()(linen.Dense(WIDTH)(x))

    report = judge(first, linen_side(body))
    pairs, how = layers_of(report)
    assert pairs == {"0": "Dense_0", "1": f"{name}_0", "3": "Dense_1", "4": f"{name}_1"}
    is_right = activation is jax.nn.relu
    assert report.verdict == ("equal" if is_right else "different")
    assert how == {"probe" if is_right else "order"}
    assert any("by the order of execution" in note for note in report.notes) != is_right


def test_a_number_that_two_lists_share_by_chance_pairs_no_norm():
    """Of the norms 1, 4 and 6 beside 0, 1 and 2, equal numbers leave the others no choice but a wrong one."""
    layers = [nn.Linear, nn.LayerNorm, None, nn.Linear, nn.LayerNorm, nn.Linear, nn.LayerNorm]
    first = nn.Sequential(*(layer(*[WIDTH] * (1 + (layer is nn.Linear))) if layer else nn.Tanh() for layer in layers))

    def body(x):
        for activation in (jnp.tanh, lambda x: x, lambda x: x):
            x = activation(linen.LayerNorm(epsilon=1e-5)(linen.Dense(WIDTH)(x)))
        return x

    report = judge(first, linen_side(body))
    pairs = {f"{i}": f"{kind}_{j}" for j, (i, kind) in enumerate([(0, "Dense"), (3, "Dense"), (5, "Dense")])}
    norms = {"1": "LayerNorm_0", "4": "LayerNorm_1", "6": "LayerNorm_2"}
    assert (report.verdict, layers_of(report)[0]) == ("equal", pairs | norms)


class Highway(nn.Module):
    """Two lists of layers of one shape, run in turn; the gate of each layer comes first."""

    def __init__(self, count):
        super().__init__()
        self.transforms = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            share = torch.sigmoid(gate(x))
            x = share * torch.tanh(transform(x)) + (1 - share) * x
        return x


@pytest.mark.parametrize("count", [3, 5])
def test_two_lists_of_one_shape_are_paired_in_their_order(count):
    def body(x):
        for _ in range(count):
            inside = jnp.tanh(linen.Dense(WIDTH)(x))
            share = jax.nn.sigmoid(linen.Dense(WIDTH)(x))
            x = share * inside + (1 - share) * x
        return x

    report = judge(Highway(count), linen_side(body))
    wanted = {f"transforms.{i}": f"Dense_{2 * i}" for i in range(count)}
    wanted |= {f"gates.{i}": f"Dense_{2 * i + 1}" for i in range(count)}
    assert (report.verdict, layers_of(report)[0]) == ("equal", wanted)


def test_linen_layers_created_in_another_order_are_paired():
    def body(x):
        head, trunk = linen.Dense(WIDTH), linen.Dense(WIDTH)
        return head(jnp.tanh(trunk(x)))

    report = judge(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), linen_side(body))
    assert (report.verdict, layers_of(report)[0]) == ("equal", {"0": "Dense_1", "2": "Dense_0"})


class Chain(nn.Module):
    def __init__(self, name, count):
        super().__init__()
        self.name = name
        setattr(self, name, nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)]))

    def forward(self, x):
        for layer in getattr(self, self.name):
            x = torch.tanh(layer(x))
        return x


class Port(nnx.Module):
    def __init__(self, order, stem=False, activation=jnp.tanh):
        self.stem = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(9)) if stem else None
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in order])
        self.order, self.activation = order, activation

    def __call__(self, x):
        x = x if self.stem is None else jnp.tanh(self.stem(x))
        for i in self.order:
            x = self.activation(self.layers[i](x))
        return x


@pytest.mark.parametrize(("activation", "verdict"), [(jnp.tanh, "equal"), (jnp.sin, "different")])
def test_a_stack_shifted_by_one_is_paired_in_order(activation, verdict):
    report = judge(Chain("layers", 3), Port([0, 1], stem=True, activation=activation))
    assert report.verdict == verdict
    assert layers_of(report)[0] == {"layers.0": "stem", "layers.1": "layers.0", "layers.2": "layers.1"}


@pytest.mark.parametrize("name", ["layers", "blocks", "net"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_layers_of_a_list_run_in_reverse_are_different(name, order):
    report = judge(Chain(name, 2), Port(order))
    assert report.verdict == ("equal" if order == [0, 1] else "different")
    pairs, how = layers_of(report)
    assert pairs == {f"{name}.{i}": f"layers.{i}" for i in (0, 1)}
    assert how == {"name"}


class Blocks(nn.Module):
    """A block of two norms, and a last norm outside it, all of one size."""

    def __init__(self):
        super().__init__()
        names = ("layernorm_before", "layernorm_after")
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in names})])
        self.layernorm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for norm in self.layers[0].values():
            x = x + torch.tanh(norm(x))
        return self.layernorm(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hf, self.head = Blocks(), nn.Linear(WIDTH, 7)

    def forward(self, x):
        return self.head(self.hf(x))


@pytest.mark.parametrize("has_last", [True, False])
def test_names_in_the_order_of_use_stand_where_no_pairing_agrees(has_last):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(2):
                x = x + jnp.tanh(linen.LayerNorm(epsilon=1e-5)(x))
            return x

    def body(x):
        x = Block(name="encoderblock_0")(x)
        y = linen.LayerNorm(epsilon=1e-5, name="encoder_norm")(x)
        return linen.Dense(7, name="head")(y if has_last else x + 0 * y)

    report = judge(Model(), linen_side(body))
    assert report.verdict == ("equal" if has_last else "different")
    assert layers_of(report)[0] == {
        "hf.layers.0.layernorm_before": "encoderblock_0.LayerNorm_0",
        "hf.layers.0.layernorm_after": "encoderblock_0.LayerNorm_1",
        "hf.layernorm": "encoder_norm",
        "head": "head",
    }


class Stem(torch.nn.Module):
    """Norms around a linear layer, and a last norm whose module is declared in front of them."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))
        self.body = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(6), "fc": torch.nn.Linear(6, 6)})

    def forward(self, x):
        return self.body["norm"](self.body["fc"](self.stem(x)).tanh())


class LinenStem(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(epsilon=1e-5)(linen.Dense(6)(x))
        x = jnp.tanh(linen.Dense(6, name="fc")(x))
        return linen.LayerNorm(epsilon=1e-5, name="final")(x)


def test_a_name_made_of_a_class_pairs_nothing_against_the_order_of_use():
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    port = LinenStem()
    report = compare(Stem(), (port, port.init(jax.random.key(0), x)), x, seeds=1)
    assert report.verdict == "equal", report.pairing


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc(self.norm(x)).tanh()


class OtherResidual(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + jnp.tanh(self.fc(self.norm(x)))


class Residuals(nnx.Module):
    def __init__(self, order):
        self.layers, self.order = nnx.List([OtherResidual(), OtherResidual()]), order

    def __call__(self, x):
        for layer in self.order:
            x = self.layers[layer](x)
        return x


@pytest.mark.parametrize(("order", "verdict"), [((0, 1), "equal"), ((1, 0), "different")])
def test_the_numbers_of_a_sequence_without_a_name_are_those_of_a_list(order, verdict):
    torch.manual_seed(0)
    assert judge(nn.Sequential(Residual(), Residual()), Residuals(order)).verdict == verdict
