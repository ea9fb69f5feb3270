"""Make sides of Equinox modules, Haiku functions and Keras models.

Each becomes a `Function` that takes the library's weights under the library's names. A library is imported only after
the user's code has made an object of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from attn_bridge.backends import Framework

from .function import Function

Value: TypeAlias = Any
"""An object of a library, an array, or a tree of arrays: their classes are not imported here."""

MAX_AXES = 3
"""Most axes of a batch over which an Equinox module, which takes a single example, is mapped."""

EQUINOX, EQUINOX_STATE = ("equinox._module", "Module"), ("equinox.nn._stateful", "State")
EQUINOX_VMAP = "equinox", "_VmapWrapper"
HAIKU, HAIKU_WITH_STATE = ("haiku._src.transform", "Transformed"), ("haiku._src.transform", "TransformedWithState")
KERAS, KERAS_INPUT = ("keras.src.layers.layer", "Layer"), ("keras.src.layers.core.input_layer", "InputLayer")
KERAS_MODELS = "keras.src.models."

SAME = 1e-2
"""Most difference between outputs that are the same but for rounding, in any dtype of at least 8 bits of mantissa."""

SET_HERE = ("key", "state", "training")
"""Arguments of a call that the adapter passes or omits: keys of dropout, which is off, the state and the mode."""

KINDS = "an Equinox module, a Haiku (transformed, parameters), a Keras model"


class LibraryCall:
    """A function of weights and inputs with a name and a signature, for messages.

    Args:
        call: the function.
        name: the name of the side.
        signature: the signature; the first parameter is the weights.
    """

    def __init__(self, call: Callable[..., Value], name: str, signature: inspect.Signature):
        self._call = call
        self.__name__, self.__signature__ = name, signature

    def __call__(self, weights: Value, *args: Value, **kwargs: Value) -> Value:
        """Call the function."""
        return self._call(weights, *args, **kwargs)


def as_side(value: Value) -> Value:
    """Return a module of Equinox, Haiku or Keras as a `Function`, any other value unchanged.

    Args:
        value: ``module`` or ``(module, state)`` of Equinox; ``(transformed, params)``, ``(transformed, params, state)``
            or ``(transformed, transformed.init(key, inputs))`` of Haiku; a built layer or model of Keras, with JAX or
            torch as its backend.

    Raises:
        ValueError: a Haiku function without parameters, or a Keras layer without weights or of another backend.
    """
    head, *rest = value if type(value) is tuple and value else (value,)
    if _is_a(head, HAIKU) or _is_a(head, HAIKU_WITH_STATE):
        return _haiku(head, rest)
    if _is_a(head, EQUINOX) and (not rest or (len(rest) == 1 and _is_a(rest[0], EQUINOX_STATE))):
        return _equinox(head, rest)
    return _keras(value) if _is_a(value, KERAS) else value


def _is_a(value: object, kind: tuple[str, str]) -> bool:
    """Tell whether a class of a value has this name, in this module or one below it."""
    home, name = kind
    return any(
        base.__qualname__ == name and f"{base.__module__}.".startswith(f"{home}.") for base in type(value).__mro__
    )


def _equinox(model: Value, state: Sequence[Value]) -> Function:
    """Return a module in inference mode; inputs with more axes than one example has are mapped over the first ones."""
    library, jax = importlib.import_module("equinox"), importlib.import_module("jax")
    arrays, static = library.partition(library.nn.inference_mode(model), library.is_array)
    leaves, structure = jax.tree_util.tree_flatten_with_path((arrays, *state))
    # A plain dict, as a module can't be made again from its fields where its constructor takes other arguments.
    weights = {_name(path, has_state=bool(state)): leaf for path, leaf in leaves}
    names = list(weights)
    assert len(names) == len(leaves), "paths of a tree are different"
    depths: dict[tuple[object, ...], int] = {}

    def mapped(weights: Value, depth: int, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Value:
        arrays, *state = jax.tree.unflatten(structure, [weights[name] for name in names])
        module = library.combine(arrays, static)
        call = (lambda *args, **kwargs: module(*args, *state, **kwargs)[0]) if state else module
        for _ in range(depth):
            call = library.filter_vmap(call)
        return call(*args, **kwargs)

    def is_ambiguous(depth: int, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> bool:
        """Return whether the module gives other numbers of the same shapes if another axis of the inputs is a batch's.

        A square batch meets ``weight @ x`` without an error. Both ways run on drawn inputs and the weights of the
        module, because the arguments may be traced.
        """
        rng = np.random.default_rng(0)
        drawn_args, drawn_kwargs = jax.tree.map(lambda leaf: _drawn_like(leaf, rng), (args, kwargs))
        with jax.ensure_compile_time_eval():
            outputs = jax.tree.leaves(mapped(weights, depth, drawn_args, drawn_kwargs))
            try:
                others = jax.tree.leaves(mapped(weights, depth + 1, drawn_args, drawn_kwargs))
            except Exception:  # an example has fewer axes than the module needs, which each module says in its own way
                return False
            pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(outputs, others, strict=False)]
        are_alike = len(outputs) == len(others) and all(a.shape == b.shape for a, b in pairs)
        return are_alike and not all(np.allclose(a, b, rtol=SAME, atol=SAME, equal_nan=True) for a, b in pairs)

    is_batched = _is_a(model, EQUINOX_VMAP)

    def call(weights: Value, *args: Value, **kwargs: Value) -> Value:
        shapes = tuple(getattr(leaf, "shape", None) for leaf in jax.tree.leaves((args, kwargs)))
        if shapes in depths:
            return mapped(weights, depths[shapes], args, kwargs)
        first: Exception | None = None
        for depth in range(MAX_AXES + 1):
            try:
                outputs = mapped(weights, depth, args, kwargs)
            except Exception as error:  # a module that takes one example refuses a batch in its own way
                first = first or error
            else:
                if not is_batched and is_ambiguous(depth, args, kwargs):
                    raise ValueError(
                        f"the Equinox module {type(model).__name__} takes inputs of these shapes as one example and as "
                        "a batch, with different outputs: give eqx.filter_vmap(module) where they are a batch, else "
                        "parity.function(call, weights); or give another size of the batch"
                    )
                depths[shapes] = depth
                return outputs
        assert first is not None, "a call was tried"
        raise first

    named = LibraryCall(call, type(model).__name__, _signature(type(model).__call__, 1))
    return Function(named, weights, "flax", _equinox_layers(model, jax))


def _equinox_layers(model: Value, jax: Value, path: str = "") -> dict[str, object]:
    """Return path -> module, for all modules in a module."""
    layers: dict[str, object] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda node: node is not model and _is_a(node, EQUINOX)
    )
    for keys, leaf in leaves:
        if _is_a(leaf, EQUINOX):
            inner = ".".join([*filter(None, [path]), *map(word_of, keys)])
            layers |= {inner: leaf, **_equinox_layers(leaf, jax, inner)}
    return layers


def _drawn_like(leaf: Value, rng: np.random.Generator) -> Value:
    """Return an array of the shape and dtype of an argument, drawn; other arguments unchanged."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    drawn = rng.standard_normal(leaf.shape)
    return (drawn if np.issubdtype(leaf.dtype, np.inexact) else drawn > 0).astype(leaf.dtype)


def _name(path: Sequence[Value], *, has_state: bool) -> str:
    """Return the dotted path of a leaf of (arrays, state); "state" is the first word of those of a state."""
    position, *keys = map(word_of, path)
    first = ["state"] if has_state and position != "0" else []
    return ".".join([*first, *keys])


def word_of(key: Value) -> str:
    """Return a key of a path in a tree as a word."""
    return str(next((getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)), key))


def _signature(function: Callable[..., Value], bound: int, left_out: Sequence[str] = ()) -> inspect.Signature:
    """Return the signature of a call whose first parameter is the weights, not the first ones of the function."""
    weights = inspect.Parameter("weights", inspect.Parameter.POSITIONAL_ONLY)
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):
        parameters = []
    hidden = (*SET_HERE, *left_out)
    return inspect.Signature([weights, *(parameter for parameter in parameters if parameter.name not in hidden)])


def _haiku(transformed: Value, rest: Sequence[Value]) -> Function:
    has_state = _is_a(transformed, HAIKU_WITH_STATE)
    trees = rest[0] if has_state and len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    if len(trees) != 1 + has_state or not all(isinstance(tree, Mapping) for tree in trees):
        what = "its parameters and state" if has_state else "its parameters"
        raise ValueError(
            f"a Haiku {type(transformed).__name__} is a side with {what}: "
            "give (transformed, transformed.init(key, *inputs))"
        )
    leading = list(inspect.signature(transformed.apply).parameters)
    rng = (None,) if "rng" in leading[1 : 2 + has_state] else ()
    names = [{module: list(arrays) for module, arrays in tree.items()} for tree in trees]

    def call(weights: Value, *args: Value, **kwargs: Value) -> Value:
        parts = [{module: {name: weights[module][name] for name in some} for module, some in tree.items()}
                 for tree in names]  # fmt: skip
        outputs = transformed.apply(*parts, *rng, *args, **kwargs)
        return outputs[0] if has_state else outputs

    weights: dict[str, dict[str, Value]] = {}
    for tree in trees:
        for module, arrays in tree.items():
            weights.setdefault(module, {}).update(arrays)
    signature = _signature(transformed.apply, 1 + has_state + len(rng))
    return Function(LibraryCall(call, type(transformed).__name__, signature), weights, "flax")


def _keras(layer: Value) -> Function:
    name = type(layer).__name__
    backend = importlib.import_module("keras").backend.backend()
    frameworks: dict[str, Framework] = {"jax": "flax", "torch": "torch"}
    if backend not in frameworks:
        raise ValueError(f"the Keras model {name} must run on JAX or torch, not {backend}: set KERAS_BACKEND=jax")
    if not layer.built:
        raise ValueError(f"the Keras model {name} has no weights yet: call it once, or model.build(shape)")
    trained = len(layer.trainable_variables)
    variables = [*layer.trainable_variables, *layer.non_trainable_variables]
    paths = [variable.path for variable in variables]
    names = [path if paths.count(path) == 1 else f"{path}/{place}" for place, path in enumerate(paths)]
    mode = {"training": False} if layer._call_has_training_arg else {}

    def call(weights: Value, *args: Value, **kwargs: Value) -> Value:
        values = [weights[name] for name in names]
        return layer.stateless_call(values[:trained], values[trained:], *args, **mode, **kwargs)[0]

    weights = {name: variable.value for name, variable in zip(names, variables, strict=True)}
    inside: Sequence[Value] = getattr(layer, "_flatten_layers", list)()
    named = LibraryCall(call, name, _signature(type(layer).call, 1, () if _takes_mask(layer) else ("mask",)))
    layers = {part.path: part for part in inside if isinstance(part.path, str)}  # an input has none
    return Function(named, weights, frameworks[backend], layers)


def _takes_mask(layer: Value) -> bool:
    """Return whether a mask reaches the layers: a model made of layers takes one, and those without support drop it."""
    if not type(layer).call.__module__.startswith(KERAS_MODELS):
        return True
    return all(part.supports_masking for part in layer.layers if not _is_a(part, KERAS_INPUT))
