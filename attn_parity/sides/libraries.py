"""Sides of libraries whose modules are pytrees or keep their arrays elsewhere: Equinox, Haiku and Keras.

In: what a user's factory returns. Out: the same as a `Function`, its weights under the library's own names; any other
value unchanged. A library is only imported once an object of it exists.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_bridge.backends import Framework

from .function import Function

MAX_AXES = 3
"""Most axes of a batch over which an Equinox module, which takes a single example, is mapped."""

EQUINOX, EQUINOX_STATE = ("equinox._module", "Module"), ("equinox.nn._stateful", "State")
HAIKU = (("haiku._src.transform", "Transformed"), ("haiku._src.transform", "TransformedWithState"))
KERAS = ("keras.src.layers.layer", "Layer")

SET_HERE = ("key", "state", "training")
"""Arguments of a call that the adapter gives or leaves out: keys of dropout, which is off, the state and the mode."""

KINDS = "an Equinox module, a Haiku (transformed, parameters), a Keras model"


def as_side(value: Any) -> Any:
    """Return an Equinox module, a Haiku function with its parameters, or a Keras layer as a `Function`.

    Args:
        value: ``module`` or ``(module, state)`` of Equinox; ``(transformed, params)``, ``(transformed, params, state)``
            or ``(transformed, transformed.init(key, inputs))`` of Haiku; a built layer or model of Keras, with JAX or
            torch as its backend. Anything else is returned as it is.

    Raises:
        ValueError: a Haiku function without parameters, or a Keras layer without weights or of another backend.
    """
    head, *rest = value if type(value) is tuple and value else (value,)
    if _is_a(head, *HAIKU):
        return _haiku(head, rest)
    if _is_a(head, EQUINOX) and (not rest or (len(rest) == 1 and _is_a(rest[0], EQUINOX_STATE))):
        return _equinox(head, rest)
    return _keras(value) if _is_a(value, KERAS) else value


def _is_a(value: Any, *kinds: tuple[str, str]) -> bool:
    """Tell whether one of the classes of a value is among these, by module (or a package of it) and name."""
    return any(
        base.__qualname__ == name and (base.__module__ == home or base.__module__.startswith(f"{home}."))
        for base in type(value).__mro__
        for home, name in kinds
    )


def _named(call: Callable[..., Any], name: str, weights: Any, framework: Framework = "flax") -> Function:
    call.__name__ = name
    return Function(call, weights, framework)


def _equinox(model: Any, state: Sequence[Any]) -> Function:
    """Return a module in inference mode; inputs with more axes than one example has are mapped over the first ones."""
    library, jax = importlib.import_module("equinox"), importlib.import_module("jax")
    weights, static = library.partition(library.nn.inference_mode(model), library.is_array)
    depths: dict[Any, int] = {}

    def mapped(weights: Any, depth: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        module = library.combine(weights["model"] if state else weights, static)
        call = (lambda *args, **kwargs: module(*args, weights["state"], **kwargs)[0]) if state else module
        for _ in range(depth):
            call = library.filter_vmap(call)
        return call(*args, **kwargs)

    def called(weights: Any, *args: Any, **kwargs: Any) -> Any:
        key = tuple(getattr(leaf, "shape", None) for leaf in jax.tree.leaves((args, kwargs)))
        if key in depths:
            return mapped(weights, depths[key], args, kwargs)
        first: Exception | None = None
        for depth in range(MAX_AXES + 1):
            try:
                found = mapped(weights, depth, args, kwargs)
            except Exception as error:  # a module that takes one example refuses a batch in its own way
                first = first or error
            else:
                depths[key] = depth
                return found
        assert first is not None, "a call was tried"
        raise first

    called.__signature__ = _with_weights(type(model).__call__)  # type: ignore[attr-defined]
    return _named(called, type(model).__name__, {"model": weights, "state": state[0]} if state else weights)


def _with_weights(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method with the weights in place of the object."""
    try:
        _, *parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return inspect.Signature()
    weights = inspect.Parameter("weights", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([weights, *(one for one in parameters if one.name not in SET_HERE)])


def _haiku(transformed: Any, rest: Sequence[Any]) -> Function:
    has_state = _is_a(transformed, HAIKU[1])
    given = list(rest[0]) if has_state and len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)
    if len(given) != 1 + has_state or not all(isinstance(one, Mapping) for one in given):
        what = "its parameters and state" if has_state else "its parameters"
        raise ValueError(
            f"a Haiku {type(transformed).__name__} is a side with {what}: "
            "give (transformed, transformed.init(key, *inputs))"
        )
    takes_rng = "rng" in list(inspect.signature(transformed.apply).parameters)[1 : 2 + has_state]
    states = {module: set(arrays) for module, arrays in given[-1].items()} if has_state else {}

    def called(weights: Any, *args: Any, **kwargs: Any) -> Any:
        parts: list[Any] = [weights]
        if has_state:
            parts = [
                {module: {n: one for n, one in arrays.items() if (n in states.get(module, ())) == of_state}
                 for module, arrays in weights.items()
                 if of_state or module in given[0]}
                for of_state in (False, True)
            ]  # fmt: skip
        found = transformed.apply(*parts, *([None] if takes_rng else []), *args, **kwargs)
        return found[0] if has_state else found

    merged: dict[str, dict[str, Any]] = {}
    for tree in given:
        for module, arrays in tree.items():
            merged.setdefault(module, {}).update(arrays)
    return _named(called, type(transformed).__name__, merged)


def _keras(layer: Any) -> Function:
    name = type(layer).__name__
    backend = importlib.import_module("keras").backend.backend()
    frameworks: dict[str, Framework] = {"jax": "flax", "torch": "torch"}
    if backend not in frameworks:
        raise ValueError(f"the Keras model {name} must run on JAX or torch, not {backend}: set KERAS_BACKEND=jax")
    if not layer.built:
        raise ValueError(f"the Keras model {name} has no weights yet: call it once, or model.build(shape)")
    trained, others = layer.trainable_variables, layer.non_trainable_variables
    names = [one.path for one in (*trained, *others)]
    names = [name if names.count(name) == 1 else f"{name}/{place}" for place, name in enumerate(names)]

    def called(weights: Any, *args: Any, **kwargs: Any) -> Any:
        values = [weights[name] for name in names]
        mode = {"training": False} if layer._call_has_training_arg else {}
        return layer.stateless_call(values[: len(trained)], values[len(trained) :], *args, **mode, **kwargs)[0]

    called.__signature__ = _with_weights(type(layer).call)  # type: ignore[attr-defined]
    weights = {name: one.value for name, one in zip(names, (*trained, *others), strict=True)}
    return _named(called, name, weights, frameworks[backend])
