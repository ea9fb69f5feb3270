"""Listen to the calls of torch modules that other code makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ...recorded.calls import Recording, attributes_of, bound
from ...sides.libraries import Value
from ...sides.patching import replaced
from ...sides.subject import Arguments


@contextlib.contextmanager
def listening(target: nn.Module | type[nn.Module], recording: Recording) -> Iterator[None]:
    """Hand every call of a module and its submodules, or of all instances of a class, to the recording."""
    with contextlib.ExitStack() as stack:
        if isinstance(target, type):
            constructors: dict[int, Mapping[str, Value]] = {}
            stack.enter_context(replaced(target, "__init__", _constructing(constructors)))
            stack.enter_context(replaced(target, "forward", _calling(constructors, recording)))
        else:
            for path, child in target.named_modules():
                handle = child.register_forward_pre_hook(_hook(path, recording), prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def rebuilt(
    kind: type[nn.Module], constructor: Mapping[str, Value], random: Sequence[str], call: Arguments
) -> nn.Module:
    """Return a new instance of a recorded class.

    Args:
        kind: the class.
        constructor: name -> constructor argument.
        random: names of further ones that are sources of random numbers; torch has none.
        call: a recorded call; torch modules need none.
    """
    del random, call
    return kind(**constructor)


def _hook(path: str, recording: Recording) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
        _note(recording, path, module, args, kwargs, attributes_of(module))

    return hook


def _constructing(constructors: dict[int, Mapping[str, Value]]) -> Callable[..., Callable[..., None]]:
    def build(original: Callable[..., None]) -> Callable[..., None]:
        def construct(self: nn.Module, *args: Value, **kwargs: Value) -> None:
            original(self, *args, **kwargs)
            constructors[id(self)] = bound(original, (self, *args), kwargs)

        return construct

    return build


def _calling(constructors: dict[int, Mapping[str, Value]], recording: Recording) -> Callable[..., Callable[..., Value]]:
    def build(original: Callable[..., Value]) -> Callable[..., Value]:
        def forward(self: nn.Module, *args: Value, **kwargs: Value) -> Value:
            _note(recording, "", self, args, kwargs, constructors.get(id(self), attributes_of(self)))
            return original(self, *args, **kwargs)

        return forward

    return build


def _note(
    recording: Recording,
    path: str,
    module: nn.Module,
    args: tuple[Value, ...],
    kwargs: Mapping[str, Value],
    constructor: Mapping[str, Value],
) -> None:
    if torch.compiler.is_compiling():
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():
        recording.note(path, type(module).__name__, args, kwargs, module.training, constructor)
