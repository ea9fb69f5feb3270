"""The mode of one call: whether it drops out, and from which random numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias, TypedDict, TypeVar

from flax import nnx
from jax import Array

from .layer_options import matmul_precision
from .random import TorchRngs

Result = TypeVar("Result")

DropoutSource: TypeAlias = nnx.Rngs | nnx.RngStream | Array | TorchRngs
"""The sources that `nnx.Dropout` takes as `rngs` in a call, and torch's numbers."""


class ModeOptions(TypedDict, total=False):
    """The arguments that `takes_mode` adds to a call."""

    deterministic: bool | None
    rngs: DropoutSource | None


MODE = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ModeOptions.__annotations__]


def takes_mode(call: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate the call of a module: it also takes ``deterministic`` and ``rngs``, as the layers of NNX do.

    ``deterministic`` overrides the mode of the module and its parts; None keeps it. ``rngs`` replaces their sources of
    dropout masks: streams (``dropout``, else ``default``), a stream, or a key. The module itself is unchanged. All
    products of the call have the ``precision`` of the module.
    """

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
        precision = getattr(module, "precision", None)
        if precision is None:
            return call(module, *arguments, **options)
        with matmul_precision(precision):
            return call(module, *arguments, **options)

    parameters = [*inspect.signature(call).parameters.values(), *MODE]
    run.__dict__["__signature__"] = inspect.Signature(parameters)  # shown by `help`
    return run


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
