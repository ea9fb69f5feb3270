"""Stand-ins for Equinox, Haiku and Keras, of which the judge uses these names alone, as sides with one linear layer.

The packages are not installed where the tests run; where they are, `test_sides_of_libraries` takes them as well.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class _EquinoxModule:
    def __init_subclass__(cls) -> None:
        data = [name for name in cls.__annotations__ if name != "inference"]
        jax.tree_util.register_dataclass(dataclasses.dataclass(cls), data, ["inference"])


_EquinoxModule.__module__, _EquinoxModule.__qualname__ = "equinox._module._module", "Module"


class EquinoxLinear(_EquinoxModule):
    """Takes one example, and drops everything unless it is in inference mode."""

    weight: jax.Array
    bias: jax.Array
    inference: bool = False

    def __call__(self, x, key=None):
        if x.ndim != 1:
            raise TypeError(f"one example has one axis, got {x.ndim}")
        return (self.weight @ x + self.bias) * self.inference


class UncheckedLinear(_EquinoxModule):
    """Takes one example, and a square batch as another function, as Equinox's own does."""

    weight: jax.Array
    inference: bool = False

    def __call__(self, x, key=None):
        return self.weight @ x


class VmapWrapper(_EquinoxModule):
    """Takes a batch, as what `filter_vmap` makes."""

    layer: UncheckedLinear
    inference: bool = False

    def __call__(self, x, key=None):
        return jax.vmap(self.layer)(x)


VmapWrapper.__module__, VmapWrapper.__qualname__ = "equinox._vmap_pmap", "_VmapWrapper"


def normed(x, weight, bias, eps):
    """Return a layer norm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


class EquinoxNorm(_EquinoxModule):
    """A norm whose eps is Keras's default."""

    weight: jax.Array
    bias: jax.Array
    inference: bool = False
    eps = 1e-3

    def __call__(self, x, key=None):
        return normed(x, self.weight, self.bias, self.eps)


class EquinoxNet(_EquinoxModule):
    """A module that contains a norm."""

    norm: EquinoxNorm
    inference: bool = False

    def __call__(self, x, key=None):
        return self.norm(x)


def fake_equinox() -> ModuleType:
    library: Any = ModuleType("equinox")
    library.is_array = lambda leaf: isinstance(leaf, jax.Array)
    library.partition = lambda model, of_kind: (model, None)
    library.combine = lambda weights, static: weights
    library.filter_vmap = lambda call: jax.vmap(call)
    library.nn = SimpleNamespace(inference_mode=lambda model: dataclasses.replace(model, inference=True))
    return library


class Transformed(NamedTuple):
    init: Any
    apply: Any


class TransformedWithState(NamedTuple):
    init: Any
    apply: Any


Transformed.__module__ = TransformedWithState.__module__ = "haiku._src.transform"


def haiku_linear() -> Transformed:
    def apply(params, rng, x):
        assert rng is None
        return x @ params["linear"]["w"] + params["linear"]["b"]

    return Transformed(lambda rng, x: {"linear": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}}, apply)


def haiku_shifted() -> TransformedWithState:
    """A linear layer behind the mean of a state."""

    def apply(params, state, x):
        return (x - state["linear"]["mean"]) @ params["linear"]["w"] + params["linear"]["b"], state

    params = {"linear": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}}
    return TransformedWithState(lambda rng, x: (params, {"linear": {"mean": jnp.zeros(8)}}), apply)


class _KerasLayer:
    built = True

    def call(self, inputs, training=None):
        raise NotImplementedError


_KerasLayer.__module__, _KerasLayer.__qualname__ = "keras.src.layers.layer", "Layer"


class KerasDense(_KerasLayer):
    _call_has_training_arg = True

    def __init__(self) -> None:
        shapes = {"dense/kernel": (8, 4), "dense/bias": (4,)}
        self.trainable_variables = [SimpleNamespace(path=name, value=jnp.ones(shape)) for name, shape in shapes.items()]
        self.non_trainable_variables: list[Any] = []

    def stateless_call(self, trained, others, x, training):
        assert training is False
        return x @ trained[0] + trained[1], others


class KerasNorm(_KerasLayer):
    """A model of one norm, beside an input without a path."""

    _call_has_training_arg, path, epsilon = False, "norm", 1e-3

    def __init__(self) -> None:
        arrays = {"norm/gamma": jnp.ones(8), "norm/beta": jnp.zeros(8)}
        self.trainable_variables = [SimpleNamespace(path=name, value=array) for name, array in arrays.items()]
        self.non_trainable_variables: list[Any] = []

    def _flatten_layers(self) -> list[Any]:
        return [SimpleNamespace(path=None), self]

    def stateless_call(self, trained, others, x):
        return normed(x, *trained, self.epsilon), others


class KerasModel(_KerasLayer):
    """A functional model: the cumulative sum of a causal layer, which takes no mask unless `supports_masking`.

    It returns `compute_dtype`, whatever dtype its inputs have.
    """

    _call_has_training_arg, path, compute_dtype = False, "model", "float32"

    def __init__(self, supports_masking: bool):
        self.trainable_variables = [SimpleNamespace(path="sum/scale", value=jnp.ones(8))]
        self.non_trainable_variables: list[Any] = []
        self.layers = [SimpleNamespace(path="sum", supports_masking=supports_masking)]

    def call(self, inputs, training=None, mask=None):
        raise NotImplementedError

    def stateless_call(self, trained, others, inputs, mask=None):
        shown = inputs if mask is None or not self.layers[0].supports_masking else inputs * mask[..., None]
        return jnp.cumsum(shown * trained[0], 1).astype(jnp.promote_types(shown.dtype, self.compute_dtype)), others

    def _flatten_layers(self) -> list[Any]:
        return [self, *self.layers]


KerasModel.call.__module__ = "keras.src.models.functional"


def fake_keras(backend: str = "jax") -> ModuleType:
    library: Any = ModuleType("keras")
    library.backend = SimpleNamespace(backend=lambda: backend)
    return library


def install(monkeypatch: Any, library: ModuleType) -> None:
    """Have the judge import a stand-in."""
    monkeypatch.setitem(sys.modules, library.__name__, library)
