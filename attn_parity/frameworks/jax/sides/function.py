"""A pure function with its weights as a side: anything of JAX whose modules are neither NNX nor Linen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jax_attn.backend import to_numpy

from ....hints.settings import read as read_settings
from ....sides.function import Function
from ....sides.libraries import word_of
from ....sides.subject import Arguments, Arrays, ModuleFailedError, SideWeight, Submodule, signature_of
from ..drawing import drawn_from
from .adapter import Adapter, Setting, dotted, home_of


class JaxFunctionSide(Adapter):
    """Side of a pure function: every leaf of its tree is a weight, it has no submodules, and is its own only part.

    Args:
        function: the function and its weights.
        wanted: the device; None is the device of its weights.

    Raises:
        ModuleFailedError: the weights contain a leaf that is not an array.
    """

    kind = "JAX function"

    def __init__(self, function: Function, wanted: str | None = None):
        self._call, self._layers = function.call, function.layers
        self.name = getattr(function.call, "__name__", type(function.call).__name__)
        places, _ = jax.tree_util.tree_flatten_with_path(function.weights, _is_variable)
        leaves, self._tree = jax.tree.flatten(function.weights)  # one leaf for each variable
        self._held: dict[str, jax.Array | np.ndarray] = {
            dotted(map(word_of, path)): leaf for (path, _), leaf in zip(places, leaves, strict=True)
        }
        if len(self._held) < len(leaves):
            raise ModuleFailedError(f"two weights of the JAX function {self.name} have the same dotted name")
        for name, leaf in self._held.items():
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                raise ModuleFailedError(
                    f"the weights of the JAX function {self.name} must be arrays, got {type(leaf).__name__} at "
                    f"{name or 'the top'}; split off what is none, as equinox.partition(model, equinox.is_array) does"
                )
        self.home = home_of(self._held, wanted)
        self.names, self.changed = set(self._held), set[str]()
        self.trainable = {name for name, leaf in self._held.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}

    @property
    def label(self) -> str:
        """Name of the side in messages."""
        return f"JAX function {self.name}"

    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it can be given by position; the weights are left out."""
        return dict(list(signature_of(self._call).items())[1:])

    def called(self, method: object) -> Callable[..., object]:
        """Return the function."""
        return self._call

    def parameters(self) -> dict[str, SideWeight]:
        """Return the weights by name."""
        return {
            name: SideWeight(tuple(leaf.shape), leaf.dtype.name, "", name.rpartition(".")[0], "parameter", "flax")
            for name, leaf in self._held.items()
        }

    def weights(self) -> Arrays:
        """Return copies of the weights that were given."""
        return {name: np.array(to_numpy(leaf), copy=True) for name, leaf in self._held.items()}

    def modules(self) -> list[Submodule]:
        """Return the function itself."""
        return [Submodule("", self.name)]

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the settings of a library's layers; a plain function shows none."""
        return {"": {}, **{path: read_settings(layer) for path, layer in self._layers.items()}}

    def part(self, path: str) -> JaxFunctionSide:
        """Return the function itself."""
        return self

    def call(self, weights: Mapping[str, ArrayLike], arguments: Arguments, setting: Setting) -> object:
        """Call the function with other weights."""
        leaves = [jnp.asarray(weights.get(name, leaf)) for name, leaf in self._held.items()]
        tree = jax.tree.unflatten(self._tree, leaves)
        with drawn_from(setting.source, {}, ()) if setting.train else contextlib.nullcontext():
            return self._call(tree, *arguments.args, **arguments.kwargs)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
