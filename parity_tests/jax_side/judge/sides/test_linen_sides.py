"""A Linen module with its variables is a side: it runs, its calls are recorded, its submodules run alone."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from attn_parity.frameworks.jax.sides import adapter
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.subject import Arguments, ModuleFailedError

from .modules import Twice, X, linen_side, normal, wide


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


class Both(NamedTuple):
    """Two layers by name."""

    left: linen.Module
    right: linen.Module


class Added(linen.Module):
    """Layers whose outputs are added up, in a container of any kind."""

    layers: Any

    def __call__(self, x):
        layers = self.layers.values() if isinstance(self.layers, Mapping) else self.layers
        return sum(layer(x) for layer in layers)


class Given(linen.Module):
    """Modules that get their layers in containers from the module around them."""

    @linen.compact
    def __call__(self, x):
        for container in (list, tuple, lambda layers: Both(*layers), lambda layers: dict(enumerate(layers))):
            x = jnp.tanh(Added(container([linen.Dense(4), linen.Dense(4)]))(x))
        return x


class Image(linen.Module):
    """Convolutions, a norm of running statistics, pooling, and a squeeze-and-excitation gate."""

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), strides=2, feature_group_count=2)(x)
        x = linen.max_pool(jnp.tanh(linen.BatchNorm(use_running_average=True)(x)), (2, 2), (1, 1), "SAME")
        gate = linen.sigmoid(linen.Dense(4)(x.mean((1, 2))))[:, None, None]
        return linen.avg_pool(linen.ConvTranspose(3, (2, 3), strides=(2, 2))(x * gate), (2, 2), (2, 2))


LINEN = {
    "setup": (Stack(), np.array([[1, 2, 6], [0, 5, 1]])),
    "remat": (Checkpointed(), X),
    "scan": (Scanned(), X),
    "vmap": (Experts(), X),
    "a GRU": (Recurrent(), X),
    "an LSTM": (LSTM(), X),
    "layers in containers": (Given(), X),
    "shared": (Twice(), X),
    "convolutions": (Image(), normal(2, 7, 6, 2, random=np.random.default_rng(4))),
}


def cotangents_of(subject, arguments):
    described = subject.describe_outputs(subject.weights(), arguments)
    return [np.random.default_rng(5).normal(size=shape).astype(np.float32) for _, shape, _ in described]


@pytest.mark.parametrize("case", LINEN)
def test_float64_runs_match_jax_with_x64(case):
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
def test_recorded_calls_of_linen_submodules_can_be_run_alone(case):
    module, x = LINEN[case]
    subject, arguments = subject_of(linen_side(module, x)), Arguments((x,))
    cotangents = cotangents_of(subject, arguments)
    weights = wide(subject.weights())
    whole = subject.run(weights, arguments, cotangents, dtype="float64")
    calls = subject.substituted(subject.weights(), arguments, cotangents, {})[1]
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
    calls = subject.substituted(subject.weights(), Arguments((X,)), [None], {})[1]
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


def test_linen_dropout_uses_the_given_masks_in_train_mode():
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


class Tabulated(linen.Module):
    """A table in a collection that holds neither parameters nor running statistics."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x) * self.variable("tables", "factors", jnp.ones, (4,)).value


def test_a_table_of_a_linen_module_has_the_precision_of_the_run():
    subject = subject_of(linen_side(Tabulated(), X))
    (output,) = subject.run(subject.weights(), Arguments((X,)), dtype="bfloat16").outputs
    assert output.dtype == "bfloat16"


def test_another_method_of_a_linen_module_can_be_called():
    subject = subject_of(linen_side(LINEN["setup"][0], LINEN["setup"][1]))
    table = subject.weights()["embed.embedding"]
    calls = subject.substituted(subject.weights(), Arguments((LINEN["setup"][1],)), [np.ones((2, 3, 7))], {})[1]
    attend = calls[-1]
    assert attend.arguments.kwargs == {"method": "attend"}
    np.testing.assert_allclose(attend.outputs[0], attend.arguments.leaves[0] @ table.T.astype(float), rtol=1e-12)


def test_the_shape_of_an_initial_weight_is_computed_once():
    shapes = []

    def initial(key, shape, dtype=jnp.float32):
        shapes.append(shape)
        return jnp.ones(shape, dtype)

    boxed = linen_side(linen.Dense(3, kernel_init=linen.with_partitioning(initial, (None, None))), X)
    plain = linen_side(linen.Dense(3, kernel_init=initial), X)
    for one in (plain, boxed):
        subject = subject_of(one)
        weights = subject.weights()
        subject.run(weights, Arguments((X,)))
        before = len(shapes)
        for mode in ("eager", "untraced", "jitter"):
            subject.run(weights, Arguments((X,)), mode=mode)
        assert len(shapes) == before > 0


def test_a_weight_of_another_shape_is_refused_by_every_call():
    module, variables = linen_side(linen.Dense(3), X)
    wrong = {"params": {**variables["params"], "kernel": jnp.ones((X.shape[-1], 4))}}
    subject = subject_of((module, wrong))
    for _ in range(2):
        with pytest.raises(ModuleFailedError, match="kernel"):
            subject.run(subject.weights(), Arguments((X,)))


@pytest.mark.parametrize(
    ("value", "is_rate"), [(0.0, False), (1e-3, True), (1.0, True), (1.5, False), (True, False), (None, False)]
)
def test_rates_are_above_0_and_at_most_1(value, is_rate):
    assert adapter._is_rate(types.SimpleNamespace(rate=value), "rate") == is_rate
