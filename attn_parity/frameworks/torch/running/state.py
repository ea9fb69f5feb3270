"""State that the user's code may change during a run, and its restoration after success, failure and Ctrl-C.

Covered: attributes of every submodule (modes, hooks, caches, lists and dicts, tensors outside the buffers), random
state of torch, NumPy and Python, default dtype, gradient mode, threads, deterministic flags, and TorchDynamo's stance.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....sides.modes import names_in
from ....sides.subject import ModuleFailedError

ONE_AT_A_TIME = threading.RLock()
"""Held while a module runs: default dtype, modules and random state belong to the process, not to a thread."""

_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
# Levels of containers that are looked into: also the end of one that contains itself.
_MAX_DEPTH = 4
_MISSING = object()


@contextlib.contextmanager
def undisturbed(modules: Iterable[nn.Module], seed: int, train: bool = False) -> Iterator[None]:
    """Put modules in eval or train mode and seed the random generators; restore everything on exit.

    Args:
        modules: the module, then its submodules.
        seed: of the random generators.
        train: the mode.
    """
    listed = list(modules)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        for read, write in _SETTINGS:
            stack.callback(_write_back, read, write, read())
        for module in listed:
            stack.callback(_restorer(module))
        _seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # what the user's code draws from
        listed[0].train(train)
        yield


def _seed_torch(seed: int) -> None:
    """Seed torch's random numbers on devices that are in use; another would keep the seed for its first use."""
    torch.random.default_generator.manual_seed(seed)
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            devices.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _write_back(read: Callable[[], object], write: Callable[[Any], object], former: object) -> None:
    if not _same(read(), former):
        write(former)


def _same(first: object, second: object) -> bool:
    return first is second or (type(first) in (bool, int, torch.dtype) and bool(first == second))


_SETTINGS: tuple[tuple[Callable[[], object], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores a module's present attributes, and their contents."""
    own = module.__dict__
    attributes = dict(own)
    contents: list[tuple[object, object]] = []
    tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
    for name, value in own.items():
        _remember(value, contents, tensors, 0 if name in _REGISTERS else 1)

    def restore() -> None:
        if len(own) != len(attributes) or any(own.get(name, _MISSING) is not one for name, one in attributes.items()):
            own.clear()
            own.update(attributes)
        for container, before in contents:
            _refill(container, before)
        for tensor, version, numbers in tensors.values():
            # Every write in place raises the version: tensors that nothing wrote to are left alone.
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(numbers)

    return restore


_REGISTERS = ("_parameters", "_buffers", "_modules")


class StateChanges:
    """Records which attributes and buffers of a user's modules a call changes, running statistics left out.

    Args:
        modules: path -> submodule, with the weights and buffers that the call gets.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = {path: child for path, child in modules.items() if not _is_torchs(type(child))}
        self._before = {path: _contents(child) for path, child in self._modules.items()}

    def found(self) -> set[str]:
        """Return the dotted names of the attributes that changed."""
        names = set()
        for path, child in self._modules.items():
            before, after = self._before[path], _contents(child)
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            names |= {f"{path}.{name}" if path else name for name in changed - _STATISTICS}
        return names


def asks_for_mode(module: nn.Module) -> bool:
    """Return whether the code of a module's class that is not torch's own asks whether it is in train mode."""
    own = (kind for kind in type(module).__mro__ if not _is_torchs(kind))
    functions = (getattr(value, "__code__", None) for kind in own for value in vars(kind).values())
    return any("training" in names_in(code) for code in functions if code is not None)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def _contents(module: nn.Module) -> dict[str, object]:
    own = [(name, value) for name, value in module.__dict__.items() if name not in _REGISTERS]
    return {name: _content(value) for name, value in (*own, *module._buffers.items())}


def _content(value: Any, depth: int = 0) -> object:
    """Return a comparable snapshot of a value: its identity, and the content that can change in place."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (bool, int, float, str)):
        return type(value), value
    if type(value) in _CONTAINERS and depth < _MAX_DEPTH:
        keys = [id(key) for key in value] if isinstance(value, dict) else []
        elements = value.values() if isinstance(value, dict) else value
        return id(value), keys, [_content(one, depth + 1) for one in elements]
    return id(value)


def _remember(
    value: Any, contents: list[tuple[object, object]], tensors: dict[int, tuple[Tensor, int, Tensor]], depth: int
) -> None:
    if type(value) in _CONTAINERS and depth < _MAX_DEPTH:
        contents.append((value, value.copy()))
        if depth:  # what is registered is swapped, and never written to
            for element in value.values() if isinstance(value, dict) else value:
                _remember(element, contents, tensors, depth + 1)
    elif type(value) is Tensor and not value.is_meta and not value.is_inference() and value.layout == torch.strided:
        tensors[id(value)] = (value, value._version, value.detach().clone())


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        same = list(container) == list(before) and all(container[key] is before[key] for key in before)
    else:
        same = len(container) == len(before) and all(one is two for one, two in zip(container, before, strict=True))
    if not same:
        container.clear()
        (container.extend if hasattr(container, "extend") else container.update)(before)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Enter a context in which code compiled with `torch.compile` runs eagerly."""
    dynamo = "torch._dynamo" in sys.modules  # nothing is compiled as long as it was not imported
    with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
        yield


# ---- weights that are not registered


def unregistered(modules: dict[str, nn.Module], root: str, call: object = None) -> dict[int, str]:
    """Return id -> description of every trainable tensor that is not a registered parameter.

    Swapping cannot reach these: a list of parameters, a module in a list, a tensor in a closure or a global.

    Args:
        modules: path -> submodule.
        root: name of the whole.
        call: the function that is called instead, if it belongs to no module.
    """
    registered = {id(child) for child in modules.values()}
    descriptions: dict[int, str] = {}
    for path, child in modules.items():
        owner = f"{root}.{path}" if path else root
        for name, value in child.__dict__.items():
            if name not in _REGISTERS:
                _find(value, f"{owner}.{name}", descriptions, registered, 0)
        _find(type(child).forward, owner, descriptions, registered, 0)
    _find(call, root, descriptions, registered, 0)
    return descriptions


def _find(value: object, where: str, descriptions: dict[int, str], registered: set[int], depth: int) -> None:
    """Add to `descriptions` the unregistered leaves with gradients that a value, closure or global reaches.

    Args:
        value: any object.
        where: how code reaches it, for the description.
        descriptions: id of a tensor -> the first way to it.
        registered: ids of submodules, whose parameters are known.
        depth: containers around it.
    """
    if depth > _MAX_DEPTH or isinstance(value, (str, int, float, type, types.ModuleType)) or value is None:
        return
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            descriptions.setdefault(id(value), where)
    elif isinstance(value, nn.Module):
        if id(value) not in registered:
            for name, element in value.named_parameters():
                if element.requires_grad:
                    descriptions.setdefault(id(element), f"{where}.{name}")
    elif isinstance(value, dict):
        for key, element in value.items():
            _find(element, f"{where}[{key!r}]", descriptions, registered, depth + 1)
    elif isinstance(value, (list, tuple, set, collections.deque)):
        for position, element in enumerate(value):
            _find(element, f"{where}[{position}]", descriptions, registered, depth + 1)
    elif isinstance(value, functools.partial):
        _find([value.func, value.args, value.keywords], where, descriptions, registered, depth + 1)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                _find(cell.cell_contents, f"{where} ({name})", descriptions, registered, depth + 1)
        for name in value.__code__.co_names:
            element = value.__globals__.get(name)
            if isinstance(element, (Tensor, nn.Module)):
                _find(element, f"{where} ({name})", descriptions, registered, depth + 1)


class Watching(TorchFunctionMode):
    """While it is entered, using a weight that is not registered is an error that names it.

    Args:
        found: the result of `unregistered`.
        owner: name of the code that runs.
    """

    def __init__(self, descriptions: dict[int, str], owner: str):
        super().__init__()
        self.found = descriptions
        self.owner = owner

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        used = [self.found[id(one)] for one in _flat((args, kwargs)) if id(one) in self.found]
        result = func(*args, **kwargs)
        if used and any(isinstance(one, Tensor) and one.is_floating_point() for one in _flat(result)):
            raise ModuleFailedError(
                f"{self.owner} uses {used[0]}, a trainable tensor that torch does not register there (a list, dict or "
                "closure); hold it in an nn.ParameterList, an nn.ModuleList or as an nn.Parameter"
            )
        return result


def _flat(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts, down to a limited depth."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if type(value) in (list, tuple) and depth < _MAX_DEPTH:
        for element in value:
            yield from _flat(element, depth + 1)
    elif isinstance(value, Tensor):
        yield value
