"""Any JAX side is run, seen and fed alike: NNX modules, Linen modules with variables, functions with their weights."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.extend import core

from attn_bridge import backends
from attn_bridge.parity.compare.sides.function import Function
from attn_bridge.parity.compare.sides.patching import original, replaced
from attn_bridge.parity.compare.sides.subject import Arguments, CannotPromoteError, ModuleFailedError
from jax_attn._parity.running.promotion import promoted
from jax_attn._parity.subject import MODES, subject_of

RANDOM = np.random.default_rng(3)
UNIT = 2.0**-23


def normal(*shape, scale=1.0):
    return (RANDOM.normal(size=shape) * scale).astype(np.float32)


def relative(one, other):
    return float(np.abs(one - other).max() / (np.abs(other).max() or 1.0))


class Feedforward(linen.Module):
    """Two layers with code in between, behind a norm."""

    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(epsilon=1e-5, name="norm")(x)
        return linen.Dense(x.shape[-1])(jnp.tanh(linen.Dense(6)(x)))


class Stack(linen.Module):
    """Layers made in setup, between an embedding and its transpose."""

    def setup(self):
        self.embed = linen.Embed(7, 4)
        self.layers = [Feedforward() for _ in range(2)]

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.embed.attend(x)


class Checkpointed(linen.Module):
    """A layer whose activations are computed again in the backward pass."""

    @linen.compact
    def __call__(self, x):
        return linen.remat(Feedforward)(name="layer")(x) * 2.0


class Scanned(linen.Module):
    """Layers in one stack of weights."""

    @linen.compact
    def __call__(self, x):
        step = linen.scan(
            lambda layer, x, _: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return linen.Dense(3, name="head")(step(Feedforward(name="layers"), x, None)[0])


class Experts(linen.Module):
    """One layer per expert, batched."""

    @linen.compact
    def __call__(self, x):
        batched = linen.vmap(
            linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
        )
        return linen.Dense(2, name="head")(batched(4, name="experts")(x))


class Recurrent(linen.Module):
    """A layer that gets its cell from whom it is made by, so that the cell's weights lie beside its own."""

    dtype: object = jnp.float32

    @linen.compact
    def __call__(self, x):
        return linen.RNN(linen.GRUCell(4, param_dtype=self.dtype))(x)


class LSTM(linen.Module):
    """An LSTM whose gates are one product."""

    dtype: object = jnp.float32

    @linen.compact
    def __call__(self, x):
        return linen.RNN(linen.OptimizedLSTMCell(3, param_dtype=self.dtype))(x)


class Twice(linen.Module):
    """One layer used twice."""

    @linen.compact
    def __call__(self, x):
        layer = linen.Dense(x.shape[-1])
        return layer(jnp.tanh(layer(x)))


class Image(linen.Module):
    """Convolutions, a norm of running statistics, pooling, and a squeeze-and-excitation gate."""

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), strides=2, feature_group_count=2)(x)
        x = linen.max_pool(jnp.tanh(linen.BatchNorm(use_running_average=True)(x)), (2, 2), (1, 1), "SAME")
        gate = linen.sigmoid(linen.Dense(4)(x.mean((1, 2))))[:, None, None]
        return linen.avg_pool(linen.ConvTranspose(3, (2, 3), strides=(2, 2))(x * gate), (2, 2), (2, 2))


X = normal(2, 3, 4)
LINEN = {
    "setup": (Stack(), np.array([[1, 2, 6], [0, 5, 1]])),
    "remat": (Checkpointed(), X),
    "scan": (Scanned(), X),
    "vmap": (Experts(), X),
    "a GRU": (Recurrent(), X),
    "an LSTM": (LSTM(), X),
    "shared": (Twice(), X),
    "convolutions": (Image(), normal(2, 7, 6, 2)),
}


def linen_side(module, *inputs):
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    random = np.random.default_rng(11)
    variables = jax.tree.map(lambda one: jnp.asarray(random.uniform(0.2, 0.9, one.shape), jnp.float32), variables)
    return module, variables


def cotangents_of(subject, arguments):
    described = subject.describe_outputs(subject.weights(), arguments)
    return [np.random.default_rng(5).normal(size=shape).astype(np.float32) for _, shape, _ in described]


def wide(arrays):
    return {name: one.astype(np.float64) for name, one in arrays.items()}


@pytest.mark.parametrize("case", LINEN)
def test_float64_is_that_of_jax(case):
    module, x = LINEN[case]
    module, variables = linen_side(module, x)
    subject, arguments = subject_of((module, variables)), Arguments((x,))
    cotangents = cotangents_of(subject, arguments)
    found = subject.run(subject.weights(), arguments, cotangents, dtype="float64")
    with jax.enable_x64(True):
        module = type(module)(jnp.float64) if hasattr(module, "dtype") else module
        variables = jax.tree.map(lambda one: jnp.asarray(one, jnp.float64), variables)
        x = jnp.asarray(x, jnp.float64) if x.dtype.kind == "f" else x
        output, pull = jax.vjp(lambda params: module.apply({**variables, "params": params}, x), variables["params"])
        (gradients,) = jax.jit(pull)(jnp.asarray(cotangents[0], jnp.float64))
    np.testing.assert_allclose(found.outputs[0], output, rtol=1e-12, atol=1e-13)
    flat = {".".join(key.key for key in path): one for path, one in jax.tree_util.tree_flatten_with_path(gradients)[0]}
    assert found.parameter_gradients.keys() == flat.keys()
    for name, gradient in flat.items():
        np.testing.assert_allclose(found.parameter_gradients[name], gradient, rtol=1e-11, atol=1e-12)


INSIDE = {
    "setup": "embed layers_0 layers_0.norm layers_0.Dense_0 layers_0.Dense_1 layers_1 layers_1.norm layers_1.Dense_0 "
    "layers_1.Dense_1 embed",
    "remat": "layer layer.norm layer.Dense_0 layer.Dense_1",
    "scan": "head",
    "vmap": "head",
    "shared": "Dense_0 Dense_0",
    "convolutions": "Conv_0 BatchNorm_0 Dense_0 ConvTranspose_0",
}


@pytest.mark.parametrize("case", LINEN)
def test_each_recorded_call_of_a_linen_submodule_can_be_run_by_itself(case):
    module, x = LINEN[case]
    subject, arguments = subject_of(linen_side(module, x)), Arguments((x,))
    cotangents = cotangents_of(subject, arguments)
    weights = wide(subject.weights())
    whole = subject.run(weights, arguments, cotangents, dtype="float64")
    calls = subject.record(subject.weights(), arguments, cotangents)
    if case in INSIDE:
        order = INSIDE[case].split()
        assert sorted(call.path for call in calls) == sorted(order)
    gradients = {}
    for call in calls:
        alone = subject.run(weights, call.arguments, call.cotangents, dtype="float64", path=call.path)
        for one, other in zip(alone.outputs, call.outputs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)
        own = {name: one for name, one in alone.parameter_gradients.items() if name.rpartition(".")[0] == call.path}
        for name, gradient in own.items():
            gradients[name] = gradients.get(name, 0.0) + gradient
    assert gradients
    for name, gradient in gradients.items():  # so the recorded cotangents are right
        np.testing.assert_allclose(gradient, whole.parameter_gradients[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert {call.path for call in calls} <= {one.path for one in subject.modules()}


def test_a_linen_side_knows_its_submodules_after_the_first_call():
    subject = subject_of(linen_side(LINEN["setup"][0], LINEN["setup"][1]))
    assert subject.kind == "Linen module"
    assert subject.parameters()["layers_0.Dense_0.kernel"].owner == "Dense"  # by its usual name
    assert subject.parameters()["embed.embedding"].owner == ""
    subject.describe_outputs(subject.weights(), Arguments((LINEN["setup"][1],)))
    assert subject.parameters()["embed.embedding"].owner == "Embed"
    assert subject.parameters()["layers_0.norm.scale"].framework == "flax"
    types = {one.path: one.type for one in subject.modules()}
    assert types[""] == "Stack"
    assert types["layers_1"] == "Feedforward"
    assert types["layers_1.Dense_1"] == "Dense"
    assert subject.settings()["layers_0.norm"]["eps"] == 1e-5


class Dotted(linen.Module):
    """Layers named as torch names those of a list."""

    @linen.compact
    def __call__(self, x):
        for number in range(2):
            x = Feedforward(name=f"blocks.{number}")(x)
        return x


def test_a_name_with_a_dot_has_its_parents():
    subject = subject_of(linen_side(Dotted(), X))
    calls = subject.record(subject.weights(), Arguments((X,)), [None])
    paths = [one.path for one in subject.modules()]
    assert paths[:4] == ["", "blocks", "blocks.0", "blocks.1"]
    assert {call.path for call in calls} <= set(paths)
    alone = subject.run(wide(subject.weights()), calls[-1].arguments, dtype="float64", path=calls[-1].path)
    np.testing.assert_array_equal(alone.outputs[0], calls[-1].outputs[0])
    assert subject.parameters()["blocks.1.Dense_0.kernel"].path == "blocks.1.Dense_0"


def test_a_bridge_is_the_linen_module_that_it_wraps():
    module, x = LINEN["convolutions"]
    bridge = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    subject = subject_of(bridge)
    assert subject.kind == "Linen module"
    assert subject.parameters()["BatchNorm_0.mean"].role == "statistic"
    output = subject.run(subject.weights(), Arguments((x,))).outputs[0]
    np.testing.assert_allclose(output, bridge(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ModuleFailedError, match=r"the Linen module Image has no variables; give \(module, variables\)"):
        subject_of(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)))


class Dropping(linen.Module):
    """Dropout that the caller switches on."""

    @linen.compact
    def __call__(self, x, deterministic=True):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=deterministic)(x)
        return linen.Dropout(0.25)(x, deterministic=deterministic)


def test_linen_in_train_mode_gets_the_masks_that_it_is_given():
    side = linen_side(Dropping(), X)
    subject = subject_of(side, train=True)
    run = subject.run(subject.weights(), Arguments((X,), {"deterministic": False}), [normal(2, 3, 4)], masks=3)
    assert [(one.shape, one.keep, one.path) for one in run.draws] == [((2, 3, 4), 0.75, "Dropout_0")]
    assert not run.foreign
    share = (run.outputs[0] == 0).mean()
    assert 0 < share < 0.7
    again = subject.run(subject.weights(), Arguments((X,), {"deterministic": False}), dtype="float64", masks=3)
    np.testing.assert_array_equal(again.outputs[0] == 0, run.outputs[0] == 0)
    with pytest.raises(ModuleFailedError, match="batch_stats"):
        subject_of(side).run(subject.weights(), Arguments((X,), {"deterministic": False}))


def test_another_method_of_a_linen_module_can_be_called():
    subject = subject_of(linen_side(LINEN["setup"][0], LINEN["setup"][1]))
    table = subject.weights()["embed.embedding"]
    calls = subject.record(subject.weights(), Arguments((LINEN["setup"][1],)), [np.ones((2, 3, 7))])
    attend = calls[-1]
    assert attend.arguments.kwargs == {"method": "attend"}
    np.testing.assert_allclose(attend.outputs[0], attend.arguments.leaves[0] @ table.T.astype(float), rtol=1e-12)


# ---- NNX


class Layer(nnx.Module):
    """A feedforward layer."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Transformed(nnx.Module):
    """Layers behind the transformations of NNX and JAX."""

    def __init__(self, way, rngs):
        self.way = way
        self.scale = nnx.Param(jnp.full(4, 0.7))
        if way == "scan":
            self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Layer))(rngs)
        else:
            self.layer = Layer(rngs)

    def __call__(self, x):
        layer, way, scale = getattr(self, "layer", None), self.way, self.scale[...]
        if way == "remat":
            return nnx.remat(Layer.__call__)(layer, x) * scale
        if way == "scan":
            return nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers) * scale
        if way == "nnx.vmap":
            return nnx.vmap(lambda one, x: one(x), in_axes=(None, 0))(layer, x) * scale
        if way == "nnx.jit":
            return nnx.jit(lambda one, x: one(x))(layer, x) * scale
        if way == "checkpoint":
            return jax.checkpoint(lambda x, scale: jnp.sin(x) * scale)(layer(x), scale)
        if way == "custom_vjp":
            return scaled(layer(x), scale)
        if way == "lax.scan":
            return jax.lax.scan(lambda h, row: (jnp.tanh(h + row * scale), h), x[0], layer(x))[1]
        if way == "while":
            steps = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(0))
            return layer(x) * scale * steps
        if way == "cond":
            return jax.lax.cond(jnp.sum(x) > 0, lambda h: h * scale, jnp.sin, layer(x))
        return jax.vmap(lambda row: layer(row) * scale)(x)


@jax.custom_vjp
def scaled(x, scale):
    return jnp.sin(x) * scale


scaled.defvjp(
    lambda x, scale: (scaled(x, scale), (x, scale)),
    lambda kept, gradient: (gradient * jnp.cos(kept[0]) * kept[1], (gradient * jnp.sin(kept[0])).sum((0, 1))),
)

WAYS = ["remat", "scan", "nnx.vmap", "nnx.jit", "checkpoint", "custom_vjp", "lax.scan", "while", "cond", "vmap"]


@pytest.mark.parametrize("way", WAYS)
def test_transformed_nnx_modules_run_in_every_mode_with_right_gradients(way):
    module = Transformed(way, nnx.Rngs(1))
    subject, arguments = subject_of(module), Arguments((X,))
    weights, cotangent = subject.weights(), normal(2, 3, 4)
    exact = subject.run(weights, arguments, [cotangent], dtype="float64")
    step, name = 1e-6, "scale"
    ends = [
        subject.run({**weights, name: weights[name].astype(float) + sign * step}, arguments, dtype="float64").outputs[0]
        for sign in (1.0, -1.0)
    ]
    slope = ((ends[0] - ends[1]) * cotangent).sum() / (2 * step)
    np.testing.assert_allclose(exact.parameter_gradients[name].sum(), slope, rtol=1e-7)
    for mode in MODES:
        run = subject.run(weights, arguments, [cotangent], mode=mode, seed=2)
        limit = 1e-12 if mode in ("tables", "flash") else 3e-6
        assert relative(run.outputs[0], exact.outputs[0]) < limit, mode
        for one in exact.parameter_gradients:
            assert relative(run.parameter_gradients[one], exact.parameter_gradients[one]) < limit, (mode, one)
        assert run.moved == 0
    calls = subject.record(weights, arguments, [cotangent])
    paths = [call.path for call in calls]
    inside = [] if way in ("scan", "nnx.vmap", "vmap") else ["layer", "layer.up", "layer.down"]
    assert paths == inside
    for call in calls:
        alone = subject.run(wide(weights), call.arguments, call.cotangents, dtype="float64", path=call.path)
        np.testing.assert_allclose(alone.outputs[0], call.outputs[0], rtol=1e-13, atol=1e-15)
    up = next((one for one in calls if one.path == "layer.up"), None)
    if up is not None:
        gradient = np.einsum("btd,bth->dh", up.arguments.leaves[0], up.cotangents[0])
        np.testing.assert_allclose(gradient, exact.parameter_gradients["layer.up.kernel"], rtol=1e-9, atol=1e-12)


# ---- functions


def affine(weights, x, *, shift=0.0):
    return jnp.tanh(x @ weights["first"]["w"] + weights["layers"][1]) + shift


TREE = {"first": {"w": jnp.asarray(normal(4, 5))}, "layers": [jnp.arange(3), jnp.asarray(normal(5))]}


def test_a_function_with_its_weights_is_a_side():
    side = Function(affine, TREE)
    assert backends.framework_of(side) == "flax"
    subject = subject_of(side)
    assert (subject.kind, subject.name, subject.framework) == ("JAX function", "affine", "flax")
    assert subject.argument_names == ["x"]
    found = {name: (one.shape, one.owner, one.path) for name, one in subject.parameters().items()}
    assert found == {
        "first.w": ((4, 5), "", "first"),
        "layers.0": ((3,), "", "layers"),
        "layers.1": ((5,), "", "layers"),
    }
    assert [one.path for one in subject.modules()] == [""]
    assert subject.record(subject.weights(), Arguments((X,)), [normal(2, 3, 5)]) == []
    run = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 5)], dtype="float64")
    assert run.parameter_gradients.keys() == {"first.w", "layers.1"}
    assert subject.unreached(Arguments((X,))) == ["argument shift of the JAX function: not given"]


def test_the_state_of_nnx_gives_a_function_its_names():
    graph, state = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    subject = subject_of(Function(lambda state, x: nnx.merge(graph, state)(x), state))
    assert sorted(subject.parameters()) == ["bias", "kernel"]
    assert subject.run(subject.weights(), Arguments((X,))).outputs[0].shape == (2, 3, 3)


def test_frameworks_are_told_without_importing():
    module, variables = linen_side(Twice(), X)
    assert backends.framework_of((module, variables)) == "flax"
    assert backends.framework_of((module, 3)) is None
    assert backends.framework_of((3, {})) is None
    assert backends.framework_of(nnx.Linear(1, 1, rngs=nnx.Rngs(0))) == "flax"


# ---- errors

BAD = {
    "no variables": (lambda: Twice(), r"the Linen module Twice comes without variables; give \(module, variables\)"),
    "variables empty": (lambda: (Twice(), {}), "the Linen module Twice has no variables"),
    "only params": (
        lambda: (Twice(), {"Dense_0": {"kernel": jnp.ones((4, 4))}}),
        r"must be \{'params': \{...\}\}, as init returns them; got Dense_0",
    ),
    "no arrays": (
        lambda: (Twice(), {"params": {"Dense_0": {"kernel": "a"}}}),
        r"must be arrays, got str at params.Dense_0.kernel",
    ),
    "a function's weights": (
        lambda: Function(affine, {"w": jnp.ones(2), "rate": 0.5}),
        "the weights of the JAX function affine must be arrays, got float at rate",
    ),
    "something else": (lambda: 3, "a JAX side is an NNX module, .* got int"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_side_is_refused_in_a_line(case):
    build, message = BAD[case]
    with pytest.raises(ModuleFailedError, match=message) as caught:
        subject_of(build())
    assert "\n" not in str(caught.value)


def test_variables_of_another_module_are_named():
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((4, 4))}, "other": {"bias": jnp.ones(4)}}}
    message = "its variables are those of another module: it has no Dense_0.bias, and there are other.bias"
    subject = subject_of((Twice(), variables))
    with pytest.raises(ModuleFailedError, match=message):
        subject.describe_outputs(subject.weights(), Arguments((X,)))


def test_widths_that_do_not_fit_are_shown_with_their_arguments():
    subject = subject_of(nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ModuleFailedError, match=r"Flax module Linear raised .*called with inputs float32 \(2, 3, 4\)"):
        subject.describe_outputs(subject.weights(), Arguments((X,)))
    with pytest.raises(CannotPromoteError, match=r"called with inputs float64|called with inputs float32"):
        subject.run(subject.weights(), Arguments((X,)), dtype="float64")


# ---- probes

ANGLES = np.outer(np.arange(6), 10000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)


class Rotary(nnx.Module):
    """Half-split rotary positions, the table as a constant, a variable, or computed in the call."""

    def __init__(self, way):
        self.way, self.proj = way, nnx.Linear(8, 8, rngs=nnx.Rngs(2))
        self.table = nnx.Cache(jnp.stack([jnp.cos(ANGLES), jnp.sin(ANGLES)])) if way == "variable" else None

    def __call__(self, x):
        if self.way == "constant":
            cos, sin = np.cos(ANGLES), np.sin(ANGLES)
        elif self.way == "variable":
            cos, sin = self.table[0], self.table[1]
        else:
            angles = jnp.outer(jnp.arange(6), 10000.0 ** -(jnp.arange(0, 8, 2) / 8))
            cos, sin = jnp.cos(angles), jnp.sin(angles)
        one, two = jnp.split(self.proj(x), 2, -1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


@pytest.mark.parametrize("way", ["constant", "variable", "call"])
def test_tables_move_by_a_unit_of_float32(way):
    subject, arguments = subject_of(Rotary(way)), Arguments((normal(2, 6, 8),))
    weights, cotangents = subject.weights(), [normal(2, 6, 8)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    moved = subject.run(weights, arguments, cotangents, mode="tables", seed=1)
    assert moved.moved > 0
    assert moved.outputs[0].dtype == np.float64
    for one, other in (
        (moved.outputs[0], exact.outputs[0]),
        (moved.input_gradients[0], exact.input_gradients[0]),
        (moved.parameter_gradients["proj.kernel"], exact.parameter_gradients["proj.kernel"]),
    ):
        assert UNIT / 10 < relative(one, other) < 10 * UNIT
    again = subject.run(weights, arguments, cotangents, mode="tables", seed=1)
    np.testing.assert_array_equal(again.outputs[0], moved.outputs[0])
    other = subject.run(weights, arguments, cotangents, mode="tables", seed=2)
    assert not np.array_equal(other.outputs[0], moved.outputs[0])


NO_TABLES = {
    "LayerNorm": lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    "BatchNorm": lambda: nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)),
    "activations": lambda: Function(lambda w, x: jax.nn.gelu(x * w) + jax.nn.silu(x) * 0.1 + 1e-6, jnp.ones(4)),
    "a mask": lambda: Function(lambda w, x: jnp.where(jnp.arange(4) < 2, x * w, -1e9) * jnp.tri(3, 4), jnp.ones(4)),
    "a bucket": lambda: Function(
        lambda w, x: x * w[(jnp.log(jnp.arange(1, 5) / 3.0) * 1.7).astype(jnp.int32) % 4], jnp.arange(1.0, 5.0)
    ),
}


@pytest.mark.parametrize("case", NO_TABLES)
def test_what_holds_no_table_is_not_moved(case):
    subject, arguments = subject_of(NO_TABLES[case]()), Arguments((X,))
    weights, cotangents = subject.weights(), [normal(2, 3, 4)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    moved = subject.run(weights, arguments, cotangents, mode="tables")
    assert moved.moved == 0 or case == "a bucket"  # what picks a bucket may move, the bucket may not
    np.testing.assert_array_equal(moved.outputs[0], exact.outputs[0])
    np.testing.assert_array_equal(moved.input_gradients[0], exact.input_gradients[0])


def test_inputs_named_as_tables_move_and_others_do_not():
    subject = subject_of(Function(lambda w, x, cos: x * w * cos, jnp.ones(4)))
    arguments = Arguments((X, normal(3, 4)))
    assert subject.run(subject.weights(), arguments, mode="tables").moved == 0
    exact = subject.run(subject.weights(), arguments, dtype="float64").outputs[0]
    found = subject.run(subject.weights(), arguments, mode="tables", tables=(1,))
    assert found.moved == 1
    assert 0 < relative(found.outputs[0], exact) < 2 * UNIT


def test_tables_inside_loops_and_branches_move():
    def looped(weights, x):
        table = jnp.sin(jnp.arange(4.0) / 3)

        def step(state, row):
            state = jax.lax.cond(row[0] > 0, lambda h: h * table, lambda h: h + jnp.cos(table), state)
            return state * weights, state

        return jax.lax.scan(jax.checkpoint(step), x[0], x)[1]

    subject, arguments = subject_of(Function(looped, jnp.full(4, 0.8))), Arguments((normal(5, 4),))
    exact = subject.run(subject.weights(), arguments, [np.ones((5, 4))], dtype="float64")
    found = subject.run(subject.weights(), arguments, [np.ones((5, 4))], mode="tables")
    assert found.moved > 0
    assert 0 < relative(found.outputs[0], exact.outputs[0]) < 20 * UNIT
    assert 0 < relative(found.input_gradients[0], exact.input_gradients[0]) < 20 * UNIT


def by_hand(scores):
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_row(row):
    weights = jnp.exp(row - jax.lax.stop_gradient(row.max()))
    return weights / weights.sum()


SHOWN = np.arange(12) < 9
SOFTMAXES = {
    "jax.nn": jax.nn.softmax,
    "nnx": nnx.softmax,
    "by hand": by_hand,
    "row by row": lambda scores: jax.lax.map(by_row, scores),
    "jit": lambda scores: jax.jit(jax.nn.softmax)(scores),
    "vmap": jax.vmap(jax.nn.softmax),
    "checkpoint": lambda scores: jax.checkpoint(by_hand)(scores),
    "cond": lambda scores: jax.lax.cond(scores[0, 0] > 1e9, jnp.sin, by_hand, scores),
    "where": lambda scores: jax.nn.softmax(scores, where=SHOWN),
    "hidden": lambda scores: jax.nn.softmax(jnp.where(SHOWN, scores, -jnp.inf)),
    "zeroed": lambda scores: (
        jnp.where(SHOWN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        / jnp.where(SHOWN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0).sum(-1, keepdims=True)
    ),
    "dot_product_attention": None,
}


def attended(name):
    softmax = SOFTMAXES[name]
    if softmax is None:
        return lambda w, q, k, v: jax.nn.dot_product_attention(
            (q * w)[None, :, None], k[None, :, None], v[None, :, None], scale=0.25
        )[0, :, 0]
    return lambda w, q, k, v: softmax((q * w) @ k.T * 0.25) @ v


@pytest.mark.parametrize("name", sorted(set(SOFTMAXES) - {"zeroed"}))
def test_a_softmax_is_computed_from_its_log_sum_exp(name):
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(n, 16)).astype(np.float32) for n in (4, 12, 12))
    query, key = query * 6, key * 6  # scores of 50 and more
    subject, arguments = subject_of(Function(attended(name), jnp.ones(16))), Arguments((query, key, value))
    weights, cotangents = subject.weights(), [random.normal(size=(4, 16)).astype(np.float32)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    found = subject.run(weights, arguments, cotangents, mode="logsumexp")
    assert found.moved == 1
    largest = np.abs(query @ key.T).max() / 4
    assert largest > 50
    assert relative(found.outputs[0], exact.outputs[0]) < largest * UNIT
    for one, other in zip(found.input_gradients, exact.input_gradients, strict=True):
        assert relative(one, other) < 12 * largest * UNIT
    same = subject.run(weights, arguments, cotangents, mode="logsumexp", dtype="float64")
    assert relative(same.outputs[0], exact.outputs[0]) < 1e-13
    for one, other in zip(same.input_gradients, exact.input_gradients, strict=True):
        assert relative(one, other) < 1e-11


def test_the_log_sum_exp_loses_what_its_size_in_ulps_says():
    """One key far ahead: the weights are 1 and nearly 0, and the plain formula loses next to nothing."""
    scores = (normal(64, 8) * 0.5 + 60.3).astype(np.float32)
    value = normal(8, 5)
    losses = {}
    for mode in ("eager", "logsumexp"):
        subject = subject_of(Function(lambda w, s, v: jax.nn.softmax(s * w) @ v, jnp.ones(8)))
        run = subject.run(subject.weights(), Arguments((scores, value)), [normal(64, 5)], mode=mode)
        exact = subject.run(subject.weights(), Arguments((scores, value)), dtype="float64")
        losses[mode] = relative(run.outputs[0], exact.outputs[0])
    assert losses["eager"] < 4 * UNIT
    assert 6 * UNIT < losses["logsumexp"] < 64 * UNIT


def test_other_uses_of_exp_and_sum_stay():
    def others(weights, x):
        exponentials = jnp.exp(x - x.max())
        wrong_rows = exponentials / exponentials.sum(0)[None, :, None][..., :4, :].reshape(1, 3, 4)[:, :, ::-1]
        return jax.nn.log_softmax(x * weights) + jax.nn.logsumexp(x, keepdims=True) + wrong_rows

    subject = subject_of(Function(others, jnp.ones(4)))
    run = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)], mode="logsumexp")
    plain = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)])
    assert run.moved == 0
    np.testing.assert_array_equal(run.outputs[0], plain.outputs[0])


@pytest.mark.parametrize("layer", ["attention"])
def test_stock_attention_is_found(layer):
    subject = subject_of(NO_TABLES[layer]())
    found = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)], mode="logsumexp")
    assert found.moved == 1


@pytest.mark.parametrize("mode", ["jitter", "logsumexp", "tables"])
def test_a_probe_is_traced_once_for_all_seeds(mode):
    traces = []

    def inner(weights, x):
        traces.append(mode)
        return jax.nn.softmax(weights * x)

    subject = subject_of(Function(inner, jnp.ones(4)))

    def run(seed):
        subject.run(subject.weights(), Arguments((X,)), [normal(*X.shape)], mode=mode, seed=seed)

    run(1)
    once = len(traces)
    run(2)
    assert once > 0
    assert len(traces) == once


def test_float64_inside_a_low_precision_module_moves_by_a_unit_of_float32():
    def inner(weights, x):
        with jax.enable_x64(True):
            return jnp.sin(jax.lax.convert_element_type(x, jnp.float64) * 3.3)

    subject = subject_of(Function(inner, jnp.ones(4)))
    with jax.enable_x64(True):
        exact = subject.run(subject.weights(), Arguments((X,))).outputs[0]
        moved = subject.run(subject.weights(), Arguments((X,)), mode="jitter").outputs[0]
        double = subject.run(wide(subject.weights()), Arguments((X.astype(np.float64),)), mode="jitter").outputs[0]
    assert exact.dtype == np.float64
    assert UNIT / 20 < relative(moved, exact) < 20 * UNIT
    assert 0 < relative(double, exact) < 1e-14


# ---- the user's process


def test_no_barrier_aborts_the_process():
    """XLA ends the process where a barrier asks a batched product for a layout that it can't have."""
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jax_attn._parity.running.execution import barred

        def heads(x, w):
            return jnp.einsum("bhi,hij->bhj", x.reshape(2, 3, 4), w)

        def both(x, w, c):
            y, pull = jax.vjp(heads, x, w)
            return y, *pull(c)

        operands = [np.ones(shape, np.float32) for shape in ((2, 12), (3, 4, 4), (2, 3, 4))]
        closed = jax.make_jaxpr(both)(*operands)
        found = jax.jit(barred(closed))(*operands)
        assert float(found[0][0, 0, 0]) == 4.0

        sizes = dict(a=2, b=2, h=3, i=4, j=5, q=3, k=4, d=2)
        for text in ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "bij,bkj->kbi", "bhi,hij->jhb", "abhi,ahij->bajh"):
            shapes = [[sizes[one] for one in word] for word in text.split("->")[0].split(",")]

            def program(*flat):
                operands = [jnp.sin(one).reshape(shape) for one, shape in zip(flat, shapes)]
                return jnp.tanh(jnp.einsum(text, *operands)).T

            flat = [np.ones((2, int(np.prod(shape)) // 2), np.float32) for shape in shapes]
            closed = jax.make_jaxpr(lambda *flat: jax.vjp(program, *flat)[1](program(*flat)))(*flat)
            jax.jit(barred(closed))(*flat)
        print("done")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.stdout.strip() == "done", found.stderr[-500:]


def test_another_thread_keeps_its_precision():
    began, checked = threading.Event(), threading.Event()
    seen = SimpleNamespace(dtype=None, bits=None)

    def user():
        began.wait(60)
        seen.dtype = jnp.exp(jnp.ones(3, jnp.bfloat16)).dtype
        seen.bits = float(jax.random.bernoulli(jax.random.key(0), 0.5, (64,)).mean())
        checked.set()

    thread = threading.Thread(target=user)
    thread.start()
    bind = core.Primitive.bind
    with promoted(), replaced(jax.random, "bernoulli", lambda _: lambda *args, **kwargs: 1 / 0):
        began.set()
        assert checked.wait(60)
        assert jnp.exp(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float64
    thread.join()
    assert seen.dtype == jnp.bfloat16
    assert 0 < seen.bits < 1
    assert core.Primitive.bind is bind


def test_patches_of_several_threads_end_in_any_order():
    class Home:
        """A place with one function."""

        @staticmethod
        def value():
            return "own"

    own = vars(Home)["value"]
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with replaced(Home, "value", lambda before: lambda: "first of " + before()):
            seen.append(Home.value())
            first_in.set()
            second_in.wait(60)
        first_out.set()

    def second():
        first_in.wait(60)
        with replaced(Home, "value", lambda before: lambda: "second of " + before()):
            second_in.set()
            first_out.wait(60)
            seen.append(Home.value())
            with replaced(Home, "value", lambda before: lambda: "inner of " + before()):
                seen.append(Home.value())
            seen.append(Home.value())

    threads = [threading.Thread(target=one) for one in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == ["first of own", "second of own", "inner of own", "second of own"]
    assert vars(Home)["value"] is own
    assert original(Home, "value") is Home.value


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_stays_after_an_interruption(error):
    class Raising(nnx.Module):
        """It raises inside a submodule's call."""

        def __init__(self):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.raises = False

        def __call__(self, x):
            x = self.inner(x)
            if self.raises:
                raise error("stop")
            return x

    def state():
        return (
            core.Primitive.bind,
            vars(nnx.Linear)["__call__"],
            jax.random.bernoulli,
            jax.config.jax_enable_x64,
            jax.config.jax_disable_jit,
        )

    module = Raising()
    before = state()
    calm = subject_of(module)
    assert calm.record(calm.weights(), Arguments((X,)), [normal(2, 3, 4)])
    assert state() == before
    module.raises = True
    subject = subject_of(module, train=True)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else (ModuleFailedError, CannotPromoteError)
    for attempt in (
        lambda: subject.record(subject.weights(), Arguments((X,)), [normal(2, 3, 4)]),
        lambda: subject.run(subject.weights(), Arguments((X,)), dtype="float64"),
        lambda: subject.run(subject.weights(), Arguments((X,))),
    ):
        with pytest.raises(expected):
            attempt()
        assert state() == before
    assert "attn_bridge_path" not in vars(module.inner)


def test_sides_are_run_in_several_threads_at_once():
    subjects = [subject_of(Layer(nnx.Rngs(seed))) for seed in range(4)]
    expected = [one.run(one.weights(), Arguments((X,)), [X], dtype="float64") for one in subjects]
    low = [one.run(one.weights(), Arguments((X,)), [X]) for one in subjects]
    failures = []

    def work(number):
        try:
            subject = subject_of(subjects[number].module)
            for _ in range(2):
                found = subject.run(subject.weights(), Arguments((X,)), [X], dtype="float64")
                np.testing.assert_array_equal(found.outputs[0], expected[number].outputs[0])
                assert len(subject.record(subject.weights(), Arguments((X,)), [X])) == 2
                assert subject.run(subject.weights(), Arguments((X,)), [X]).outputs[0].dtype == np.float32
        except BaseException as error:
            failures.append(error)

    bind = core.Primitive.bind
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures
    assert core.Primitive.bind is bind
    assert low[0].outputs[0].dtype == np.float32
