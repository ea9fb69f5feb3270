"""The entry of a sharded module: it moves whole inputs onto its devices, and returns outputs that they share.

`parallelize` changes the class of a module to a subclass of the same name (as torch's ``fully_shard`` does), so that it
stays an instance of its class and is called as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

from attn_bridge.masks import Mask

from ..encoder_decoder_model import EncoderDecoderModel
from ..shards import is_sharded, whole
from .classes import same_name, tokens_cut
from .devices import Devices
from .modules.products import Products

Result = TypeVar("Result")

SEQUENCES = ("x", "tokens", "ids", "source", "context")
"""Names of arguments that are sequences; those of a context need not divide."""


def enter_by(module: nn.Module, sharding: Devices) -> None:
    """Make a module one that takes whole inputs and gives outputs that devices share."""
    if not hasattr(module, "sharding"):  # a module of somebody else's, which has some of ours inside
        module.sharding = sharding
    module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]  # a class can be hashed


@functools.cache
def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module's class whose calls put inputs and outputs on the devices of `sharding`."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    order = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]
    takes_frames = issubclass(kind, EncoderDecoderModel)

    def forward(self: nn.Module, *arguments: object, **options: object) -> object:
        sharding: Devices = self.sharding
        named = dict(zip(order, arguments, strict=False)) | options
        if len(named) < len(arguments) + len(options):
            return kind.forward(self, *arguments, **options)  # which says what is wrong
        is_free = named.get("cache") is not None or bool(_WHOLE)
        with _entered(sharding):
            for name, argument in named.items():
                if takes_frames and name == "source" and isinstance(argument, Tensor) and argument.is_floating_point():
                    named[name] = sharding.shared(argument)  # (B, C, F), which are tokens behind the convolutions only
                    continue
                must_divide = not is_free and name in SEQUENCES and name != "context"
                named[name] = enter(sharding, argument, must_divide=must_divide, is_sequence=name in SEQUENCES)
            return leave(sharding, kind.forward(self, **named))

    members: dict[str, object] = {"forward": functools.wraps(kind.forward)(forward)}
    for name in ("generate", "generate_greedy"):
        if hasattr(kind, name):
            members[name] = _in_whole_outputs(getattr(kind, name))
    if hasattr(kind, "stream"):
        members["stream"] = _in_whole_steps(kind.stream)
    return same_name(kind, members)


def enter(sharding: Devices, value: object, *, must_divide: bool, is_sequence: bool = True) -> Any:
    """Return an argument of a call on the devices: sequences of vectors cut by tokens, all else whole.

    Raises:
        ValueError: tokens that do not divide.
    """
    if isinstance(value, Mask):
        return value.with_arrays(lambda array: whole(array) if isinstance(array, Tensor) else array)
    if not isinstance(value, Tensor):
        return value
    if not is_sequence or not 2 <= value.ndim <= 3:
        return value
    if not value.is_floating_point():
        if must_divide:
            sharding.plan.check_tokens(value.shape[-1])
        return whole(value)
    if must_divide:
        sharding.plan.check_tokens(value.shape[-2])
    return sharding.cut(value, tokens_cut(sharding, value))


def leave(sharding: Devices, result: object) -> Any:
    """Return the result of a call, its output cut by tokens."""
    if isinstance(result, tuple):
        return (leave(sharding, result[0]), *result[1:])
    if not is_sharded(result) or result.ndim < 2:
        return whole(result) if _WHOLE else result
    if _WHOLE:
        return result.full_tensor()
    placements = list(result.placements)
    axis = sharding.axis("context")
    if axis is not None and sharding.divides("context", result.shape[-2]):
        placements[axis] = sharding.placements({"context": result.ndim - 2})[axis]
    kept = [one if not one.is_partial() else sharding.placements({})[0] for one in placements]
    return result if tuple(kept) == result.placements else result.redistribute(sharding.mesh, kept)


_ENTERED: list[bool] = []
_WHOLE: list[bool] = []


@contextlib.contextmanager
def _entered(sharding: Devices) -> Iterator[None]:
    """Enter the context of a call: plain tensors that meet shared ones are replicated on every device."""
    if _ENTERED:
        yield
        return
    _ENTERED.append(True)
    try:
        with implicit_replication(), Products(sharding):
            yield
    finally:
        _ENTERED.pop()


def _in_whole_outputs(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return a method during which outputs are whole on every device, as tokens are drawn from them."""

    @functools.wraps(method)
    def run(self: object, *arguments: object, **options: object) -> Result:
        _WHOLE.append(True)
        try:
            with torch.no_grad():
                return method(self, *arguments, **options)
        finally:
            _WHOLE.pop()

    return run


def _in_whole_steps(method: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
    """Return a method that gives an iterator, each step of which runs in whole outputs; those between do not."""
    step = _in_whole_outputs(next)

    @functools.wraps(method)
    def run(self: nn.Module, *arguments: object, **options: object) -> Iterator[Tensor]:
        tokens = _in_whole_outputs(method)(self, *arguments, **options)

        def steps() -> Iterator[Tensor]:
            while (token := step(tokens, None)) is not None:
                yield token

        return steps()

    return run
