"""The options that all modules have in common: initialisers and precision of a constructor, mode of one call."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, TypedDict, TypeVar, Unpack, cast

import jax
from flax import nnx
from jax import Array

from attn_bridge.foreign_names import names_ours
from attn_bridge.sharding.linear_layers import check_bias, misfit

from .random import TorchRngs

__all__ = [
    "Initializer",
    "Layer",
    "LayerOptions",
    "ModeOptions",
    "Precision",
    "Unpack",
    "chosen",
    "matmul_precision",
]

Result = TypeVar("Result")

Precision: TypeAlias = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset
"""A precision of matrix products: a name, or a member of JAX's enumerations."""

Initializer: TypeAlias = Callable[..., Array]
"""An initialiser such as those of `jax.nn.initializers`: it takes a key, a shape and a dtype."""


class LayerOptions(TypedDict, total=False):
    """The arguments that a `Layer` takes in addition to those of its constructor; None keeps the default.

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


_CONSTRUCTOR, _CALL = "__init__", "__call__"


class Layer(nnx.Module):
    """A module whose constructor also takes `LayerOptions`, as the bundle ``layers``, for itself and all its parts.

    The constructor gets none of them: `Linear` reads them by `chosen`. The module keeps `precision`. Its call also
    takes `ModeOptions`, as the layers of NNX do.
    """

    precision: Precision | None

    def __init_subclass__(cls, **options: object) -> None:
        """Have the constructor of a class take the options, if it names the bundle, and its call `ModeOptions`."""
        super().__init_subclass__(**options)
        bundle = inspect.signature(cls.__init__).parameters.get("layers")
        if _CONSTRUCTOR in vars(cls) and bundle is not None and bundle.kind is inspect.Parameter.VAR_KEYWORD:
            setattr(cls, _CONSTRUCTOR, _takes_layer_options(cls.__init__))
        if _CALL in vars(cls):
            setattr(cls, _CALL, names_ours(_takes_mode(vars(cls)[_CALL])))


def _takes_layer_options(constructor: Callable[..., None]) -> Callable[..., None]:
    *parameters, _ = inspect.signature(constructor).parameters.values()  # the last one is the bundle
    names = {parameter.name for parameter in parameters}

    @functools.wraps(constructor)
    def construct(module: Layer, *arguments: object, **options: object) -> None:
        values = {name: options.pop(name, None) for name in _NAMES}
        _check(values)
        changes = cast(LayerOptions, {name: option for name, option in values.items() if option is not None})
        layers = dataclasses.replace(chosen(), **changes)
        module.precision = layers.precision
        token = _CHOSEN.set(layers)
        try:
            constructor(module, *arguments, **options)
        finally:
            _CHOSEN.reset(token)
        # The constructor itself refuses sizes in place of a config, but its bundle takes any other name.
        for name in options.keys() - names:
            raise TypeError(f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}")

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _NAMES]
    construct.__dict__["__signature__"] = inspect.Signature([*parameters, *added])  # shown by `help`
    return construct


def _check(values: Mapping[str, object]) -> None:
    for name in ("kernel_init", "bias_init"):
        if not (values[name] is None or callable(values[name])):
            raise TypeError(
                f"{name} must be a function of a key, a shape and a dtype, got {type(values[name]).__name__}"
            )
    matmul_precision(values["precision"])  # raises for an unknown one


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


DropoutSource: TypeAlias = nnx.Rngs | nnx.RngStream | Array | TorchRngs
"""The sources that `nnx.Dropout` takes as `rngs` in a call, and torch's numbers."""


class ModeOptions(TypedDict, total=False):
    """The arguments that the call of a `Layer` takes in addition to those of its class."""

    deterministic: bool | None
    rngs: DropoutSource | None


_MODE = tuple(ModeOptions.__annotations__)


def _takes_mode(call: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate the call of a module: it also takes ``deterministic`` and ``rngs``, as the layers of NNX do.

    ``deterministic`` overrides the mode of the module and its parts; None keeps it. ``rngs`` replaces their sources of
    dropout masks: streams (``dropout``, else ``default``), a stream, or a key. The module itself is unchanged. All
    products of the call have the ``precision`` of the module.
    """
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.name in _MODE or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return call  # a subclass of a layer, which hands them on to it

    @functools.wraps(call)
    def run(
        module: nnx.Module,
        *arguments: object,
        deterministic: bool | None = None,
        rngs: DropoutSource | None = None,
        **options: object,
    ) -> Result:
        if deterministic is not None or rngs is not None:
            module = _in_mode(module, deterministic, rngs)
        _check_biases(module)
        try:
            with matmul_precision(getattr(module, "precision", None)):
                return call(module, *arguments, **options)
        except TypeError as error:
            reason = _misfit(module, error)
            if reason is None:
                raise
            raise ValueError(reason) from error

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _MODE]
    run.__dict__["__signature__"] = inspect.Signature([*parameters, *added])  # shown by `help`
    return run


_PRODUCTS = (
    "dot_general requires contracting dimensions to have the same shape",
    "add got incompatible shapes for broadcasting",
)
"""Parts of the messages of products and sums of other widths."""


def _check_biases(module: nnx.Module) -> None:
    """Refuse a bias of a single number in a linear layer of the module, which JAX would broadcast."""
    for path, layer in _linear_layers(module):
        if layer.bias is not None and layer.bias.size == 1:
            check_bias(path, 1, layer.kernel.shape[-1])


def _linear_layers(module: nnx.Module, path: str = "") -> Iterator[tuple[str, nnx.Linear]]:
    """Yield paths and linear layers of a module and of its parts; a `Layer` among them checks its own."""
    parts = enumerate(module) if isinstance(module, nnx.List) else vars(module).items()
    for name, part in parts:
        if isinstance(part, nnx.Linear):
            yield f"{path}{name}", part
        elif isinstance(part, nnx.Module) and not isinstance(part, Layer):
            yield from _linear_layers(part, f"{path}{name}.")


def _misfit(module: nnx.Module, error: BaseException) -> str | None:
    """Return which linear layer in a module an error of a product is about; None for other errors."""
    if not any(part in str(error) for part in _PRODUCTS):
        return None
    layers = {
        ".".join(map(str, path)): layer for path, layer in nnx.iter_modules(module) if isinstance(layer, nnx.Linear)
    }
    widths = {path: (*layer.kernel.shape, _length(layer.bias)) for path, layer in layers.items()}
    return misfit(getattr(module, "config", None), widths, str(error))


def _length(bias: nnx.Param | None) -> int | None:
    return None if bias is None else bias.shape[0]


def _in_mode(module: nnx.Module, deterministic: bool | None, rngs: DropoutSource | None) -> nnx.Module:
    """Return a view of a module, with its parameters, in which dropout has another mode or source."""
    # None would be an unused name for modules without dropout, and leave others as they are.
    view = nnx.view(module, deterministic=deterministic, raise_if_not_found=False)
    if rngs is None:
        return view
    if isinstance(rngs, Array):
        rngs = nnx.Rngs(dropout=rngs)
    source = rngs["dropout"] if isinstance(rngs, nnx.Rngs | TorchRngs) else rngs
    for _, part in nnx.iter_modules(view):
        if isinstance(part, nnx.Dropout) and part.rate > 0.0:
            part.rngs = nnx.static(source) if isinstance(source, TorchRngs) else source
    return view
