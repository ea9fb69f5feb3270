"""Listen to the calls of NNX and Linen modules that other code makes, compiled ones included."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from flax import linen, nnx

from ...recorded.calls import Recording, attributes_of, bound
from ...sides.libraries import Value
from ...sides.patching import replaced
from ...sides.subject import Arguments
from ...sides.trees import flatten, replace
from .sides.adapter import dotted

_PATH = "attn_bridge_recorded_path"
"""Attribute of a submodule while it is recorded: compiled code calls copies, which keep it."""


@contextlib.contextmanager
def listening(target: Value, recording: Recording) -> Iterator[None]:
    """Hand every call of a module and its submodules, or of all instances of a class, to the recording."""
    kind = target if isinstance(target, type) else type(target)
    inner = _linen if issubclass(kind, linen.Module) else _classes if isinstance(target, type) else _nnx
    with inner(target, recording):
        try:
            yield
        finally:
            jax.effects_barrier()  # callbacks of compiled code have ended


def rebuilt(kind: type, constructor: Mapping[str, Value], random: Sequence[str], call: Arguments) -> Value:
    """Return a new instance of a recorded class; of Linen with variables.

    Args:
        kind: the class.
        constructor: name -> constructor argument.
        random: names of further ones that are sources of random numbers.
        call: a recorded call, which initialises variables of Linen.
    """
    module = kind(**constructor, **{name: nnx.Rngs(0) for name in random})
    if not isinstance(module, linen.Module):
        return module
    keys = {name: jax.random.key(i) for i, name in enumerate(("params", "dropout"))}
    return module, module.init(keys, *call.args, **call.kwargs)


@contextlib.contextmanager
def _nnx(target: nnx.Module, recording: Recording) -> Iterator[None]:
    children = [(dotted(path), child) for path, child in nnx.iter_modules(target)]
    with contextlib.ExitStack() as stack:
        for path, child in children:
            object.__setattr__(child, _PATH, path)
            stack.callback(object.__delattr__, child, _PATH)
        for kind in dict.fromkeys(type(child) for _, child in children):
            if any("__call__" in vars(base) for base in kind.__mro__[:-1]):
                stack.enter_context(replaced(kind, "__call__", _calling(recording, None)))
        yield


@contextlib.contextmanager
def _classes(target: type, recording: Recording) -> Iterator[None]:
    constructors: dict[int, Mapping[str, Value]] = {}

    def build(original: Callable[..., object]) -> Callable[..., object]:
        def construct(self: nnx.Module, *args: Value, **kwargs: Value) -> None:
            original(self, *args, **kwargs)
            constructors[id(self)] = bound(original, (self, *args), kwargs)

        return construct

    with replaced(target, "__init__", build), replaced(target, "__call__", _calling(recording, constructors)):
        yield


def _calling(
    recording: Recording, constructors: Mapping[int, Mapping[str, Value]] | None
) -> Callable[..., Callable[..., Value]]:
    def build(original: Callable[..., Value]) -> Callable[..., Value]:
        def call(self: nnx.Module, *args: Value, **kwargs: Value) -> Value:
            path = vars(self).get(_PATH) if constructors is None else ""
            if path is not None:
                by_id = {} if constructors is None else constructors
                constructor = by_id.get(id(self)) or attributes_of(self)
                _note(recording, path, self, args, kwargs, _is_training(self), constructor)
            return original(self, *args, **kwargs)

        return call

    return build


@contextlib.contextmanager
def _linen(target: Value, recording: Recording) -> Iterator[None]:
    def intercept(call: Value, args: tuple[Value, ...], kwargs: dict[str, Value], context: Value) -> Value:
        module = context.module
        if context.method_name == "__call__" and not module.is_initializing():
            path = "" if isinstance(target, type) else ".".join(module.path)
            if not isinstance(target, type) or isinstance(module, target):
                names = [field.name for field in dataclasses.fields(module) if field.init]
                fields = {name: getattr(module, name) for name in names if name not in ("parent", "name")}
                _note(recording, path, module, args, kwargs, None, fields)
        return call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield


def _note(
    recording: Recording,
    path: str,
    module: Value,
    args: tuple[Value, ...],
    kwargs: Mapping[str, Value],
    training: bool | None,
    constructor: Mapping[str, Value],
) -> None:
    """Store a call at once, or, of code that is traced, when it runs."""
    kind, tree = type(module).__name__, (args, dict(kwargs))
    leaves = [leaf for _, leaf in flatten(tree, _is_jax)]
    if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
        recording.omit(path, "an argument is a random key")
    elif not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        recording.note(path, kind, args, kwargs, training, constructor)
    else:

        def run(*values: Value) -> None:
            positional, keywords = replace(tree, _is_jax, values)
            recording.note(path, kind, positional, keywords, training, constructor)

        jax.debug.callback(run, *leaves)


def _is_jax(value: Value) -> bool:
    return isinstance(value, jax.Array)


def _is_training(module: nnx.Module) -> bool:
    """Return whether dropout or a batch norm of the module is in train mode."""
    for _, child in nnx.iter_modules(module):
        drops = isinstance(child, nnx.Dropout) and not child.deterministic and child.rate > 0.0
        if drops or (isinstance(child, nnx.BatchNorm) and not child.use_running_average):
            return True
    return False
