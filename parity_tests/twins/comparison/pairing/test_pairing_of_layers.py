"""Pairing on real layers of both frameworks: the proposed weights make both sides return the same numbers."""

from __future__ import annotations

import collections
import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from torch.func import functional_call

from attn_bridge import Rule, WeightsMismatchError
from attn_parity.pairing import partial, propose
from attn_parity.sides.subject import SideWeight

tnn = torch.nn


@dataclasses.dataclass(frozen=True)
class Stated(SideWeight):
    """A parameter that says its framework."""

    framework: str = ""


def stock_name(module, package):
    own = [kind for kind in type(module).__mro__ if kind.__module__.startswith(package)]
    return next((kind.__name__ for kind in own if kind.__name__ != "Module"), type(module).__name__)


class TorchSide:
    framework = "torch"

    def __init__(self, module):
        self.module = module.eval()

    def parameters(self):
        owners = dict(self.module.named_modules())
        found = {}
        for name, value in self.module.named_parameters():
            path = name.rpartition(".")[0]
            owner = stock_name(owners[path], "torch.nn.") if path in owners else ""
            found[name] = Stated(tuple(value.shape), "float32", owner, path, framework="torch")
        return found

    def run(self, weights, x):
        given = {name: torch.tensor(array) for name, array in weights.items()}
        with torch.no_grad():
            found = functional_call(self.module.double(), given, (torch.tensor(x),))
        return np.asarray(found[0] if isinstance(found, tuple) else found)


class NNXSide:
    framework = "flax"

    def __init__(self, module):
        self.module = module

    def parameters(self):
        owners = {".".join(map(str, path)): child for path, child in nnx.iter_modules(self.module)}
        found = {}
        for path, value in nnx.to_flat_state(nnx.state(self.module, nnx.Param)):
            name = ".".join(map(str, path))
            parent = name.rpartition(".")[0]
            owner = stock_name(owners[parent], "flax.nnx.") if parent in owners else ""
            found[name] = Stated(tuple(value.get_value().shape), "float32", owner, parent, framework="flax")
        return found

    def run(self, weights, x):
        graph, params, rest = nnx.split(self.module, nnx.Param, ...)
        flat = dict(nnx.to_flat_state(params))
        for path, value in flat.items():
            flat[path] = value.replace(jnp.asarray(weights[".".join(map(str, path))]))
        module = nnx.merge(graph, nnx.from_flat_state(list(flat.items())), rest)
        return np.asarray(module(jnp.asarray(x)))


class LinenSide:
    framework = "flax"

    def __init__(self, module, x):
        self.module = module
        self.owners = {}

        def note(call, args, kwargs, context):
            self.owners[".".join(context.module.path)] = type(context.module).__name__
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            self.variables = module.init(jax.random.key(0), jnp.asarray(x))

    def parameters(self):
        found = {}
        for path, value in flatten_dict(self.variables["params"]).items():
            parent = ".".join(path[:-1])
            owner = self.owners.get(parent, "")
            found[".".join(path)] = Stated(value.shape, "float32", owner, parent, framework="flax")
        return found

    def run(self, weights, x):
        params = unflatten_dict({tuple(name.split(".")): jnp.asarray(array) for name, array in weights.items()})
        return np.asarray(self.module.apply({"params": params}, jnp.asarray(x)))


class FunctionSide:
    def __init__(self, call, shapes, framework):
        self.call, self.shapes, self.framework = call, shapes, framework

    def parameters(self):
        return {
            name: Stated(tuple(shape), "float32", "", name.rpartition(".")[0], framework=self.framework)
            for name, shape in self.shapes.items()
        }

    def run(self, weights, x):
        array = jnp.asarray if self.framework == "flax" else torch.tensor
        return np.asarray(self.call({name: array(one) for name, one in weights.items()}, array(x)))


def pair(first, second, x, other=None, rules=None):
    """Return the pairing that is proposed, and how far apart both sides then are, as a share of the largest number."""
    other = x if other is None else other
    ours, theirs = first.parameters(), second.parameters()
    random = np.random.default_rng(1)
    drawn = {name: random.normal(size=one.shape) for name, one in ours.items()}

    def apart(pairing):
        zeros = {name: np.zeros(one.shape) for name, one in theirs.items()}
        with jax.enable_x64(True):
            one = first.run(drawn, x)
            two = second.run({**zeros, **pairing.to_second(drawn)}, other)
        if one.shape != two.shape:  # channels stand elsewhere
            two = np.moveaxis(two, -1, 1)
        return float(np.abs(one - two).max() / np.abs(one).max())

    given = None if rules is None else partial(rules, ours, theirs)
    found = propose(ours, theirs, apart, given)
    back = found.to_first(found.to_second(drawn))
    assert all(np.array_equal(back[name], array) for name, array in drawn.items() if name in back)
    return found, apart(found)


def agrees(*arguments, limit=1e-9, **options):
    found, apart = pair(*arguments, **options)
    assert apart < limit, found.rows()
    return found


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape)


RNGS = nnx.Rngs(0)


# ---- convolutions


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("rank", "kernel", "groups", "inputs", "outputs"),
    [(1, 3, 1, 4, 6), (1, 3, 4, 4, 4), (2, 3, 1, 3, 3), (2, 3, 2, 4, 4), (2, (3, 5), 1, 3, 3), (3, 3, 1, 3, 3)],
)
def test_convolutions_keep_their_axes_of_space_in_order(kind, rank, kernel, groups, inputs, outputs):
    size = (kernel,) * rank if isinstance(kernel, int) else kernel
    ours = (tnn.Conv1d, tnn.Conv2d, tnn.Conv3d)[rank - 1](inputs, outputs, size, groups=groups)
    x = draw(2, inputs, *(5, 6, 7)[:rank])
    other = np.moveaxis(x, 1, -1)
    options = {"padding": "VALID", "feature_group_count": groups}
    if kind == "linen":
        theirs = LinenSide(nn.Conv(outputs, size, **options), other)
    else:
        theirs = NNXSide(nnx.Conv(inputs, outputs, size, **options, rngs=RNGS))
    found = agrees(TorchSide(ours), theirs, x, other)
    assert {match.how for match in found.matches} == {"name"}
    turned = {match.pattern for match in propose(theirs.parameters(), TorchSide(ours).parameters()).matches}
    assert f"{'x y z'[: 2 * rank - 1]} i o -> o i {'x y z'[: 2 * rank - 1]}" in turned


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(1, 3, 5), (2, 3, 5), (2, 4, 4), (3, 2, 3)])
def test_transposed_convolutions_are_read_backwards_as_measured(kind, transpose_kernel, rank, inputs, outputs):
    classes = (tnn.ConvTranspose1d, tnn.ConvTranspose2d, tnn.ConvTranspose3d)
    ours = classes[rank - 1](inputs, outputs, 3, stride=2)
    x = draw(2, inputs, *(4, 3, 2)[:rank])
    other = np.moveaxis(x, 1, -1)
    options = {"padding": "VALID", "transpose_kernel": transpose_kernel, "strides": (2,) * rank}
    if kind == "linen":
        theirs = LinenSide(nn.ConvTranspose(outputs, (3,) * rank, **options), other)
    else:
        theirs = NNXSide(nnx.ConvTranspose(inputs, outputs, (3,) * rank, **options, rngs=RNGS))
    found = agrees(TorchSide(ours), theirs, x, other)
    assert ("backwards" in found.matches[0].pattern) != transpose_kernel


def test_a_convolution_of_one_point_is_a_linear_layer():
    x = draw(2, 4, 5, 6)
    other = np.moveaxis(x, 1, -1)
    theirs = NNXSide(nnx.Linear(4, 4, rngs=RNGS))
    found = agrees(TorchSide(tnn.Conv2d(4, 4, 1)), theirs, x, other)
    assert found.matches[0].pattern == "o i 1 1 -> i o"
    sequence = draw(2, 3, 4)
    found = agrees(TorchSide(tnn.Linear(4, 6)), LinenSide(nn.Conv(6, (1,)), sequence), sequence)
    assert found.matches[0].pattern == "o i -> 1 i o"


@pytest.mark.parametrize("pattern", ["(x y i)", "(i x y)"])
def test_a_convolution_of_patches_is_a_linear_layer_of_them(pattern):
    class Patches(nnx.Module):
        def __init__(self):
            self.proj = nnx.Linear(3 * 2 * 4, 5, rngs=RNGS)

        def __call__(self, x):
            parts = x.reshape(len(x), 3, 2, 2, 4, 3)  # b h p w q c
            parts = parts.transpose((0, 1, 3, 2, 4, 5) if pattern == "(x y i)" else (0, 1, 3, 5, 2, 4))
            return self.proj(parts.reshape(len(x), 3, 2, -1))

    x = draw(2, 3, 6, 8)
    ours = tnn.Sequential(collections.OrderedDict(proj=tnn.Conv2d(3, 5, (2, 4), stride=(2, 4))))
    found = agrees(TorchSide(ours), NNXSide(Patches()), x, np.moveaxis(x, 1, -1))
    assert found.matches[0].pattern == f"o i x y -> {pattern} o"


# ---- recurrent layers


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_gates_of_recurrent_cells_go_where_they_are_named(kind):
    cell, ours = {
        "lstm": (nn.OptimizedLSTMCell, tnn.LSTM),
        "gru": (nn.GRUCell, tnn.GRU),
    }[kind]
    x = draw(2, 5, 4)
    with jax.enable_x64(True):
        theirs = LinenSide(nn.RNN(cell(4, param_dtype=jnp.float64)), x)
    rules = [Rule(flax=name, drop="zero") for name in theirs.parameters() if name.endswith("bias")]
    found = agrees(TorchSide(ours(4, 4, bias=False, batch_first=True)), theirs, x, rules=rules)
    gates = ["i", "f", "g", "o"] if kind == "lstm" else ["r", "z", "n"]
    assert [match.second.name.split(".")[-2] for match in found.matches] == [
        f"{which}{gate}" for which in "ih" for gate in gates
    ]


@pytest.mark.parametrize("kind", ["lstm", "optimized"])
@pytest.mark.parametrize("both", [False, True])
def test_nnx_gates_are_paired_by_name_where_nothing_fits(kind, both):
    """NNX calls a gate ``if_``, and its directions forward and backward; no run helps where the port is wrong."""
    cell = {"lstm": nnx.LSTMCell, "optimized": nnx.OptimizedLSTMCell}[kind]

    made = [nnx.RNN(cell(4, 4, rngs=RNGS)) for _ in range(1 + both)]
    theirs = NNXSide(nnx.Bidirectional(*made, rngs=RNGS) if both else made[0]).parameters()
    ours = TorchSide(tnn.LSTM(4, 4, bias=False, bidirectional=both)).parameters()
    rules = [Rule(flax=name, drop="zero") for name in theirs if name.endswith("bias")]
    found = propose(ours, theirs, lambda candidate: 1.0, partial(rules, ours, theirs))
    for match in found.matches:
        assert ("reverse" in match.first.source) == ("backward" in match.second.source)
        assert ("_ih" in match.first.source) == bool(re.search(r"\.(i.?_?|dense_i)\.kernel", match.second.source))
    if kind == "lstm":
        gates = [match.second.source.split(".")[-2].rstrip("_") for match in found.matches]
        assert gates == ["ii", "if", "ig", "io", "hi", "hf", "hg", "ho"] * (1 + both)


def test_torch_has_a_bias_that_flax_has_not():
    x = draw(2, 5, 4)
    theirs = LinenSide(nn.RNN(nn.OptimizedLSTMCell(4)), x)
    with pytest.raises(WeightsMismatchError, match=r"unexpected: bias_ih_l0 \(16,\)"):
        pair(TorchSide(tnn.LSTM(4, 4, batch_first=True)), theirs, x)


# ---- attention


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_torch_s_fused_attention_is_flax_s_three(kind):
    class Ours(tnn.Module):
        def __init__(self):
            super().__init__()
            self.attention = tnn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    class Theirs(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=RNGS)

        def __call__(self, x):
            return self.attention(x)

    x = draw(2, 5, 8)
    theirs = NNXSide(Theirs()) if kind == "nnx" else LinenSide(nn.MultiHeadDotProductAttention(2), x)
    found = agrees(TorchSide(Ours()), theirs, x, limit=1e-6)  # NNX keeps the scale in float32
    assert {match.how for match in found.matches} == {"name"}


class Conv1D(tnn.Module):
    """As transformers has it: a linear layer whose weight lies the other way round."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = tnn.Parameter(torch.zeros(inputs, outputs))
        self.bias = tnn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class OurAttention(tnn.Module):
    def __init__(self, width, name):
        super().__init__()
        setattr(self, name, Conv1D(3 * width, width))
        self.c_proj = Conv1D(width, width)
        self.name = name

    def forward(self, x):
        q, k, v = getattr(self, self.name)(x).chunk(3, -1)
        return self.c_proj(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class TheirAttention(nnx.Module):
    def __init__(self, width, name):
        if name:
            setattr(self, name, nnx.Linear(width, 3 * width, rngs=RNGS))
        else:
            self.q, self.k, self.v = (nnx.Linear(width, width, rngs=RNGS) for _ in range(3))
        self.proj = nnx.Linear(width, width, rngs=RNGS)
        self.name = name

    def __call__(self, x):
        parts = jnp.split(getattr(self, self.name)(x), 3, -1) if self.name else (self.q(x), self.k(x), self.v(x))
        q, k, v = parts
        return self.proj(nnx.softmax(q @ k.swapaxes(-1, -2)) @ v)


@pytest.mark.parametrize("ours", ["c_attn", "qkv", "in_proj", "query_key_value", "Wqkv"])
@pytest.mark.parametrize("theirs", ["", "c_attn", "qkv", "in_proj", "Wqkv"])
def test_a_fused_layer_is_paired_whole_or_in_three(ours, theirs):
    x = draw(2, 5, 8)
    found = agrees(TorchSide(OurAttention(8, ours)), NNXSide(TheirAttention(8, theirs)), x)
    assert len(found.matches) == (4 if theirs else 8)


def test_pairing_does_not_hide_another_order_of_fused_parts():
    class Wrong(TheirAttention):
        def __call__(self, x):
            return self.proj(nnx.softmax(self.k(x) @ self.q(x).swapaxes(-1, -2)) @ self.v(x))

    _, apart = pair(TorchSide(OurAttention(8, "c_attn")), NNXSide(Wrong(8, "")), draw(2, 5, 8))
    assert apart > 1e-3


class KeysAndValues(nnx.Module):
    """As gemma has it: heads first, keys and values in one."""

    def __init__(self):
        self.q_einsum = nnx.Einsum("btd,ndh->btnh", (4, 8, 3), rngs=RNGS)
        self.kv_einsum = nnx.Einsum("bsd,ckdh->cbskh", (2, 2, 8, 3), rngs=RNGS)
        self.attn_vec_einsum = nnx.Einsum("btnh,nhd->btd", (4, 3, 8), rngs=RNGS)

    def __call__(self, x):
        query, (key, value) = self.q_einsum(x), self.kv_einsum(x)
        key, value = (jnp.repeat(one, 2, 2) for one in (key, value))
        weights = nnx.softmax(jnp.einsum("btnh,bsnh->bnts", query, key))
        return self.attn_vec_einsum(jnp.einsum("bnts,bsnh->btnh", weights, value))


def test_an_einsum_of_keys_and_values_is_two_linear_layers():
    class Ours(tnn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = tnn.Linear(8, 12, bias=False)
            self.k_proj = tnn.Linear(8, 6, bias=False)
            self.v_proj = tnn.Linear(8, 6, bias=False)
            self.o_proj = tnn.Linear(12, 8, bias=False)

        def forward(self, x):
            query = self.q_proj(x).unflatten(-1, (4, 3))
            key, value = (one(x).unflatten(-1, (2, 3)).repeat_interleave(2, 2) for one in (self.k_proj, self.v_proj))
            weights = torch.softmax(torch.einsum("btnh,bsnh->bnts", query, key), -1)
            return self.o_proj(torch.einsum("bnts,bsnh->btnh", weights, value).flatten(2))

    agrees(TorchSide(Ours()), NNXSide(KeysAndValues()), draw(2, 5, 8))


# ---- stacks


class Block(tnn.Module):
    def __init__(self):
        super().__init__()
        self.norm = tnn.LayerNorm(6)
        self.up = tnn.Linear(6, 6)
        self.down = tnn.Linear(6, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(tnn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed = tnn.Linear(6, 6)
        self.layers = tnn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("count", [2, 3, 6])
def test_numbered_blocks_are_a_scanned_stack_of_linen(count):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            hidden = nn.Dense(6, name="up")(nn.LayerNorm(epsilon=1e-5, name="norm")(x))
            return x + nn.Dense(6, name="down")(jnp.tanh(hidden)), None

    class Theirs(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6, name="embed")(x)
            scanned = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=count)
            return scanned(name="layers")(x, None)[0]

    x = draw(2, 6)
    found = agrees(TorchSide(Model(count)), LinenSide(Theirs(), x), x)
    assert len(found.matches) == 2 + 6 * count
    turned = propose(LinenSide(Theirs(), x).parameters(), TorchSide(Model(count)).parameters())
    assert len(turned.matches) == 2 + 6 * count


@pytest.mark.parametrize("count", [3, 6])
def test_numbered_blocks_are_a_stack_of_nnx_made_by_vmap(count):
    class Body(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)
            self.up, self.down = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(self.norm(x))))

    class Theirs(nnx.Module):
        def __init__(self):
            self.embed = nnx.Linear(6, 6, rngs=RNGS)
            self.blocks = nnx.vmap(Body)(nnx.Rngs(0).split(count))

        def __call__(self, x):
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                self.embed(x), self.blocks
            )

    agrees(TorchSide(Model(count)), NNXSide(Theirs()), draw(2, 6))


# ---- names that settle


class Exchanged(nnx.Module):
    def __init__(self, names, order):
        for name in names:
            setattr(self, name, nnx.Linear(6, 6, rngs=RNGS))
        self.order = order

    def __call__(self, x):
        for name in self.order:
            x = jnp.tanh(getattr(self, name)(x))
        return x


class Straight(tnn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, tnn.Linear(6, 6))
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = torch.tanh(getattr(self, name)(x))
        return x


@pytest.mark.parametrize(
    "names", [("fc", "linear"), ("norm", "layer_norm"), ("head", "proj"), ("input_gate", "a_gate"), ("lin1", "lin2")]
)
def test_equal_names_that_are_exchanged_in_use_stay_exchanged(names):
    x = draw(2, 6)
    right = agrees(TorchSide(Straight(names)), NNXSide(Exchanged(names, names)), x)
    found, apart = pair(TorchSide(Straight(names)), NNXSide(Exchanged(names, names[::-1])), x)
    assert apart > 1e-3
    for pairing in (right, found):
        for match in pairing.matches:
            assert match.first.name.split(".")[0] == match.second.name.split(".")[0]
            assert match.how == "name"


def test_meaningless_names_are_paired_by_runs_or_order():
    x = draw(2, 6)
    ours = TorchSide(Straight(("alpha", "beta")))
    found = agrees(ours, NNXSide(Exchanged(("x", "y"), ("y", "x"))), x)
    assert {match.how for match in found.matches} == {"probe"}
    found, apart = pair(ours, NNXSide(Exchanged(("x", "y"), ("x", "x"))), x)
    assert apart > 1e-3
    assert {match.how for match in found.matches} == {"order"}
    assert found.doubt
    assert [match.second.name for match in found.matches if match.first.name.endswith("weight")] == [
        "x.kernel",
        "y.kernel",
    ]


# ---- any two sides


def test_one_framework_lies_as_it_lies():
    x = draw(2, 6)
    found = agrees(TorchSide(Straight(("one", "two"))), TorchSide(Straight(("one", "two"))), x)
    assert {match.pattern for match in found.matches} == {"... -> ..."}

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("one", "two"):
                x = jnp.tanh(nn.Dense(6, name=name)(x))
            return x

    nnx_side = NNXSide(Exchanged(("one", "two"), ("one", "two")))
    found = agrees(LinenSide(Linen(), x), nnx_side, x)
    assert {match.pattern for match in found.matches} == {"... -> ..."}
    found = agrees(nnx_side, TorchSide(Straight(("one", "two"))), x)
    assert {match.pattern for match in found.matches} == {"a1 a0 -> a0 a1", "... -> ..."}


@pytest.mark.parametrize(("weight", "turned"), [("w", True), ("kernel", True), ("weight", False)])
def test_a_function_of_weights_is_paired_with_a_module(weight, turned):
    def call(weights, x):
        for name in ("one", "two"):
            matrix = weights[f"{name}.{weight}"]
            x = jnp.tanh(x @ (matrix if turned else matrix.T) + weights[f"{name}.b"])
        return x

    shapes = {f"{name}.{last}": shape for name in ("one", "two") for last, shape in ((weight, (6, 6)), ("b", (6,)))}
    found = agrees(TorchSide(Straight(("one", "two"))), FunctionSide(call, shapes, "flax"), draw(2, 6))
    assert {match.pattern for match in found.matches} == {"a1 a0 -> a0 a1" if turned else "... -> ...", "... -> ..."}


def test_a_list_of_layers_is_numbered_by_its_weights():
    def call(weights, x):
        for i in range(0, 6, 2):
            x = jnp.tanh(x @ weights[str(i)] + weights[str(i + 1)])
        return x

    shapes = {str(i): (6,) if i % 2 else (6, 6) for i in range(6)}
    ours = tnn.Sequential(*(layer for _ in range(3) for layer in (tnn.Linear(6, 6), tnn.Tanh())))
    agrees(TorchSide(ours), FunctionSide(call, shapes, "flax"), draw(2, 6))
