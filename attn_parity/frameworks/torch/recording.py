"""Record the arguments, the outputs and the output gradients of every submodule call.

Forward hooks see the calls. A checkpoint runs them again in the backward pass: both runs count as the same call, and
where the first left no graph (``use_reentrant=True``) the second has the gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_attn.functional import dtype_name

from ...sides.subject import Arguments, Array, Call, DtypeCall
from ...sides.trees import flatten, replace
from .running.replicas import cut_of, read
from .weights import is_tensor, unreadable

Hook = Callable[..., object]


@dataclasses.dataclass
class _Recorded:
    path: str
    order: int
    arguments: Arguments
    outputs: list[Array] = dataclasses.field(default_factory=list)
    gradients: dict[int, Array] = dataclasses.field(default_factory=dict)
    has_graph: list[bool] = dataclasses.field(default_factory=list)
    repeated: bool = False


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Hook, Hook]]) -> Iterator[None]:
    """Hold a hook before and one after the calls of each module; both get the keyword arguments, too."""
    with contextlib.ExitStack() as stack:
        for module, before, after in hooks:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


class DtypeRecorder:
    """Records the dtypes of the arguments and outputs of submodule calls inside `recording`.

    Args:
        modules: path -> submodule.

    Attributes:
        calls: the calls, in the order in which they ended.
    """

    def __init__(self, modules: dict[str, nn.Module]):
        self._modules = modules
        self._began: dict[int, list[int]] = {}
        self.count = 0
        self.calls: list[DtypeCall] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the hooks."""
        with hooked((child, self._before, self._after(path)) for path, child in self._modules.items() if path):
            yield

    def _before(self, child: nn.Module, args: object, kwargs: object) -> None:
        self._began.setdefault(id(child), []).append(self.count)
        self.count += 1

    def _after(self, path: str) -> Callable[[nn.Module, object, object, object], None]:
        def hook(child: nn.Module, args: object, kwargs: object, result: object) -> None:
            start = self._began[id(child)].pop()
            inputs, outputs = (tuple(map(dtype_name, _tensors(tree))) for tree in ((args, kwargs), result))
            self.calls.append(DtypeCall(path, start, self.count, inputs, outputs))

        return hook


class CallRecorder:
    """Records the calls of submodules inside `recording`.

    Args:
        modules: path -> submodule.
        mesh: the devices that share the weights; None for a single device.

    Attributes:
        parts: path -> for each array argument of the submodule, the sharded array that was passed.
    """

    def __init__(self, modules: dict[str, nn.Module], mesh: DeviceMesh | None = None):
        self._modules = modules
        self._mesh = mesh
        self._calls: list[_Recorded] = []
        self._began: dict[int, list[_Recorded | None]] = {}
        self._count = 0
        self.parts: dict[str, list[Tensor | None]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the hooks."""
        with hooked((child, self._before(path), self._after) for path, child in self._modules.items() if path):
            yield

    def calls(self) -> list[Call]:
        """Return the recorded calls, in the order in which they began."""
        numbers: dict[str, int] = {}
        calls = []
        for call in sorted(self._calls, key=lambda call: call.order):
            cotangents = [
                call.gradients.get(place, np.zeros_like(output)) if has_graph else None
                for place, (output, has_graph) in enumerate(zip(call.outputs, call.has_graph, strict=True))
            ]
            number = numbers[call.path] = numbers.get(call.path, -1) + 1
            calls.append(Call(call.path, number, call.order, call.arguments, call.outputs, cotangents))
        return calls

    def _before(self, path: str) -> Callable[..., object]:
        def hook(child: nn.Module, args: object, kwargs: object) -> None:
            tensors = _tensors((args, kwargs))
            begun = None
            if all(map(_is_plain, tensors)):
                begun = _Recorded(
                    path, self._count, Arguments(*replace((args, kwargs), is_tensor, self._copies(tensors)))
                )
                if not _is_backward():
                    self._count += 1
                    self.parts[path] = [one.detach() if cut_of(one).is_cut else None for one in tensors]
            self._began.setdefault(id(child), []).append(begun)

        return hook

    def _after(self, child: nn.Module, args: object, kwargs: object, result: object) -> None:
        call = self._began[id(child)].pop()
        results = _tensors(result)
        if call is None or not all(map(_is_plain, results)):
            return
        if _is_backward():
            first = self._first_run(call)
            if first is not None:
                self._listen(first, results)
            return
        call.outputs = self._copies(results)
        self._calls.append(call)
        self._listen(call, results)

    def _first_run(self, call: _Recorded) -> _Recorded | None:
        """Return the recorded call that a checkpoint is repeating, if it has no gradients."""
        for recorded in self._calls:
            if recorded.path == call.path and not recorded.repeated and not any(recorded.has_graph):
                pairs = zip(recorded.arguments.leaves, call.arguments.leaves, strict=False)
                if all(np.array_equal(ours, theirs) for ours, theirs in pairs):
                    recorded.repeated = True
                    return recorded
        return None

    def _copies(self, tensors: list[Tensor]) -> list[Array]:
        with torch._C.DisableTorchFunction():  # our own way to NumPy is not the module's
            return [np.array(read(one, "", self._mesh)[0], copy=True) for one in tensors]

    def _listen(self, call: _Recorded, results: list[Tensor]) -> None:
        call.has_graph = [one.requires_grad for one in results]
        for position, tensor in enumerate(results):
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient, position=position: call.gradients.update({position: self._copies([gradient])[0]})
                )


def _tensors(tree: object) -> list[Tensor]:
    return [tensor for _, tensor in flatten(tree, is_tensor)]


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be read as an array; torch.func.vmap and grad pass wrappers, which cannot."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not unreadable(tensor)
