"""Initialisers of all projections of a module, and the precision of all its products: options of its constructor."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict, TypeVar

import jax
from flax import nnx
from jax import Array

Constructor = TypeVar("Constructor", bound=Callable[..., None])

Precision: TypeAlias = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset
"""A precision of matrix products: a name, or a member of JAX's enumerations."""

Initializer: TypeAlias = Callable[..., Array]
"""An initialiser such as those of `jax.nn.initializers`: it takes a key, a shape and a dtype."""


class LayerOptions(TypedDict, total=False):
    """The arguments that `takes_layer_options` adds to a constructor; None keeps the default.

    `kernel_init` draws the kernels of the projections and `bias_init` their biases, in all parts of the module; norms,
    embeddings and convolutions start as ever. `precision` is that of all products: of projections, of attention, and of
    their gradients. None takes JAX's ``jax_default_matmul_precision``.
    """

    kernel_init: Initializer | None
    bias_init: Initializer | None
    precision: Precision | None


@dataclasses.dataclass(frozen=True)
class ChosenOptions:
    """The options of the modules that are being constructed."""

    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None
    precision: Precision | None = None


_CHOSEN: contextvars.ContextVar[ChosenOptions | None] = contextvars.ContextVar("_CHOSEN", default=None)

_NAMES = tuple(field.name for field in dataclasses.fields(ChosenOptions))


def chosen() -> ChosenOptions:
    """Return the options for the layers of the module that is being constructed."""
    return _CHOSEN.get() or ChosenOptions()


def takes_layer_options(constructor: Constructor) -> Constructor:
    """Decorate the constructor of a module: it also takes `LayerOptions`, for its projections and those of its parts.

    The constructor itself gets none of them: `Linear` reads them by `chosen`. The module keeps `precision`.

    Raises:
        TypeError: an initialiser that can't be called, or a `precision` of another kind.
        ValueError: an unknown `precision`, or a pair of precisions that differ.
    """
    *parameters, _ = inspect.signature(constructor).parameters.values()  # the last one is the bundle
    names = {parameter.name for parameter in parameters}

    @functools.wraps(constructor)
    def construct(module: nnx.Module, *arguments: object, **options: object) -> None:
        given: dict[str, Any] = {name: options.pop(name, None) for name in _NAMES}
        _check(given)
        # The bundle would take any name.
        for name in options.keys() - names:
            raise TypeError(f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}")
        layers = dataclasses.replace(chosen(), **{name: one for name, one in given.items() if one is not None})
        module.precision = layers.precision
        token = _CHOSEN.set(layers)
        try:
            constructor(module, *arguments, **options)
        finally:
            _CHOSEN.reset(token)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _NAMES]
    construct.__dict__["__signature__"] = inspect.Signature([*parameters, *added])  # shown by `help`
    return construct  # type: ignore[return-value] # the wrapper


def _check(given: Mapping[str, object]) -> None:
    for name in ("kernel_init", "bias_init"):
        if not (given[name] is None or callable(given[name])):
            raise TypeError(
                f"{name} must be a function of a key, a shape and a dtype, got {type(given[name]).__name__}"
            )
    matmul_precision(given["precision"])  # raises for an unknown one


def matmul_precision(precision: object) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the products of matrices have a precision; None changes nothing.

    Raises:
        TypeError: a `precision` of another kind.
        ValueError: an unknown name, or a pair of precisions that differ.
    """
    if isinstance(precision, tuple) and len(precision) == 2:
        if precision[0] != precision[1]:
            raise ValueError(f"precision must be the same for both operands of attention, got {precision}")
        precision = precision[0]
    if precision is None:
        return contextlib.nullcontext()
    if not isinstance(precision, (str, jax.lax.Precision, jax.lax.DotAlgorithmPreset)):
        raise TypeError(f"precision must be a name or a jax.lax.Precision, got {type(precision).__name__}")
    name = precision.name if isinstance(precision, jax.lax.DotAlgorithmPreset) else precision
    name = name.name.lower() if isinstance(name, jax.lax.Precision) else name
    try:
        context: contextlib.AbstractContextManager[None] = jax.default_matmul_precision(name)
    except ValueError:
        advice = "a name that jax.default_matmul_precision takes, such as 'highest'"
        raise ValueError(f"precision ({precision!r}) must be {advice}") from None
    return context
