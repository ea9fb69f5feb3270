"""A function with its weights is a side."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_bridge import backends
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.function import Function
from attn_parity.sides.subject import Arguments

from .modules import Twice, X, affine, linen_side, normal

random = np.random.default_rng(4)
TREE = {
    "first": {"w": jnp.asarray(normal(4, 5, random=random))},
    "layers": [jnp.arange(3), jnp.asarray(normal(5, random=random))],
}


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
    assert subject.substituted(subject.weights(), Arguments((X,)), [normal(2, 3, 5)], {})[1] == []
    run = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 5)], dtype="float64")
    assert run.parameter_gradients.keys() == {"first.w", "layers.1"}
    assert subject.unreached(Arguments((X,))) == ["the JAX function's `shift` (you gave none)"]


def test_the_state_of_nnx_gives_a_function_its_names():
    graph, state = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    subject = subject_of(Function(lambda state, x: nnx.merge(graph, state)(x), state))
    assert sorted(subject.parameters()) == ["bias", "kernel"]
    assert subject.run(subject.weights(), Arguments((X,))).outputs[0].shape == (2, 3, 3)


def test_frameworks_are_recognised_without_imports():
    module, variables = linen_side(Twice(), X)
    assert backends.framework_of((module, variables)) == "flax"
    assert backends.framework_of((module, 3)) is None
    assert backends.framework_of((3, {})) is None
    assert backends.framework_of(nnx.Linear(1, 1, rngs=nnx.Rngs(0))) == "flax"
