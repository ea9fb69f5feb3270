"""The contents of a torch side: a module or a pure function, its weights by name, its parts, and how to call them.

`ModuleSide` and `TorchFunctionSide` have the same interface; `subject.TorchSubject` runs either. Weights are swapped in
only inside `TorchPart.holding`, so that the user's own tensors and gradients are never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from torch_attn.functional import dtype_name

from ...sides.entries import picked
from ...sides.function import Function
from ...sides.subject import WHOLE, Arguments, ModuleFailedError, Returned, SideWeight, signature_of
from ...sides.trees import flatten, replace

STATISTICS = ("running_mean", "running_var")
"""Buffers that training changes and that Flax keeps as batch statistics; every other buffer is state."""

COUNTER = "num_batches_tracked"
"""The buffer in which torch's norms count batches: no output depends on it in eval mode, and Flax has none."""

Call = Callable[[Arguments], object]


@dataclasses.dataclass(frozen=True)
class TorchPart:
    """The target of a run: the whole module or function, or a submodule.

    Attributes:
        name: its class.
        names: name of a weight inside the part -> its name in the whole.
        trainable: the names inside the part that get gradients.
        tensors: its weights, by their name inside the part; a run shards its own copies in the same way.
        constants: all its other tensors; a run gets copies to write to.
        holding: a context that swaps tensors in, by their name inside the part, and yields how to call the part.
        target: the object that `torch.compile` compiles.
    """

    name: str
    names: dict[str, str]
    trainable: frozenset[str]
    tensors: dict[str, Tensor]
    constants: dict[str, Tensor]
    holding: Callable[[dict[str, Tensor], Callable[..., object]], contextlib.AbstractContextManager[Call]]
    target: Callable[..., object]


class ModuleSide:
    """A torch module."""

    kind = "torch module"
    call = None
    layers: Mapping[str, object] = types.MappingProxyType({})

    def __init__(self, module: nn.Module):
        self.module = module
        self.name = type(module).__name__
        self._carried: frozenset[str] = frozenset()

    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it can be given by position."""
        return signature_of(self.module.forward)

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""
        frozen = self._frozen()
        return {
            name: dataclasses.replace(self._described(name, tensor, role), frozen=id(tensor) in frozen)
            for name, tensor, role in self._named(self.module)
        }

    def state(self) -> dict[str, SideWeight]:
        """Return name -> buffer, without running statistics; those of a state dict are persistent."""
        # The state dict itself may run hooks of the user.
        computed = {
            f"{path}.{name}".lstrip(".")
            for path, child in self.modules().items()
            for name in child._non_persistent_buffers_set
        }
        return {
            name: dataclasses.replace(self._described(name, one, "state"), persistent=name not in computed)
            for name, one in self.module.named_buffers()
            if name.rpartition(".")[2] not in (*STATISTICS, COUNTER) and not unreadable(one)
        }

    def carry(self, names: Collection[str]) -> None:
        """Count the buffers of these names, and no other, among the parameters."""
        self._carried = frozenset(names)

    def _described(self, name: str, tensor: Tensor, role: str) -> SideWeight:
        path, _, _ = name.rpartition(".")
        owners = self.modules()
        owner = _stock_name(owners[path]) if path in owners else ""
        return SideWeight(tuple(tensor.shape), dtype_name(tensor), owner, path, role, "torch")

    def _named(self, module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
        """Yield the `named_weights` of a submodule, and its carried buffers."""
        yield from named_weights(module)
        carried = {id(one) for name, one in self.module.named_buffers() if name in self._carried}
        for name, buffer in module.named_buffers():
            if id(buffer) in carried:
                yield name, buffer, "state"

    def _frozen(self) -> set[int]:
        """Return the ids of the parameters without gradients; none where all are: the module was frozen as a whole."""
        every = [one for one in self.module.parameters() if one.is_floating_point()]
        return {id(one) for one in every if not one.requires_grad} if any(one.requires_grad for one in every) else set()

    def tied(self) -> dict[str, str]:
        """Return further name of a parameter -> the name that it has in `parameters`."""
        first = {id(one): name for name, one in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(one)] for name, one in every if first[id(one)] != name}

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters, running statistics and other buffers by name."""
        weights = {name: tensor for name, tensor, _ in self._named(self.module)}
        return {**weights, **{name: one for name, one in self.module.named_buffers() if name not in weights}}

    def modules(self) -> dict[str, nn.Module]:
        """Return path -> submodule, the module itself first."""
        return dict(self.module.named_modules())

    def part(self, path: str) -> TorchPart:
        """Return the module or a submodule."""
        module = self.module.get_submodule(path)
        whole = {id(tensor): name for name, tensor, _ in self._named(self.module)}
        own = list(self._named(module))
        names = {name: whole[id(tensor)] for name, tensor, _ in own}  # one that is tied elsewhere has its name there
        return TorchPart(
            type(module).__name__,
            names,
            frozenset(name for name, one, role in own if role == "parameter" and id(one) not in self._frozen()),
            {name: tensor for name, tensor, _ in own},
            {name: buffer for name, buffer in module.named_buffers() if name not in names},
            functools.partial(_swapped, module),
            module,
        )


class TorchFunctionSide:
    """A pure function of torch with the tree of its weights."""

    kind = "torch function"

    def __init__(self, function: Function):
        self.function = function
        call = function.call
        while isinstance(call, functools.partial):
            call = call.func
        name = getattr(call, "__name__", type(call).__name__)
        self.name = "function" if name == "<lambda>" else name
        self._root = nn.Module()

    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it may be positional; the first argument, the weights, is left out."""
        return dict(list(signature_of(self.function.call).items())[1:])

    def parameters(self) -> dict[str, SideWeight]:
        """Return the tensors of the tree by dotted name; whole numbers and bools are passed on as they are."""
        return {
            name: SideWeight(tuple(one.shape), dtype_name(one), "", name.rpartition(".")[0], framework="torch")
            for name, one in self.tensors().items()
        }

    def state(self) -> dict[str, SideWeight]:
        """Return nothing: every leaf of a tree is a weight."""
        return {}

    def carry(self, names: Collection[str]) -> None:
        """Do nothing: every leaf of a tree is a weight."""

    def tied(self) -> dict[str, str]:
        """Return an empty dict: each leaf of the tree is a separate weight."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the tree by dotted name."""
        return {dotted(path): one for path, one in flatten(self.function.weights, is_tensor)}

    @property
    def layers(self) -> Mapping[str, object]:
        """The layers of a library's module by path in the tree."""
        return self.function.layers

    def modules(self) -> dict[str, nn.Module]:
        """Return the whole; a function has no submodules."""
        return {"": self._root}

    def part(self, path: str) -> TorchPart:
        """Return the whole."""
        if path:
            raise ModuleFailedError(f"torch function {self.name} has no submodule {path}")
        tensors = self.tensors()
        trained = frozenset(name for name, one in tensors.items() if one.is_floating_point())
        return TorchPart(self.name, {name: name for name in tensors}, trained, tensors, {}, self._holding, self._call)

    @property
    def call(self) -> Callable[..., object]:
        """The function."""
        return self.function.call

    def _call(self, weights: object, *args: object, **kwargs: object) -> object:
        return self.function.call(weights, *args, **kwargs)

    @contextlib.contextmanager
    def _holding(self, tensors: dict[str, Tensor], target: Callable[..., object]) -> Iterator[Call]:
        leaves = [tensors.get(name, one) for name, one in self.tensors().items()]
        weights = replace(self.function.weights, is_tensor, leaves)
        yield lambda arguments: target(weights, *arguments.args, **arguments.kwargs)


@contextlib.contextmanager
def _swapped(module: nn.Module, tensors: dict[str, Tensor], target: Callable[..., object]) -> Iterator[Call]:
    # What torch.func.functional_call does, but until the backward pass is done: checkpoints recompute there.
    with _reparametrize_module(module, tensors, tie_weights=True):
        yield lambda arguments: target(*arguments.args, **arguments.kwargs)


def side_of(value: object) -> ModuleSide | TorchFunctionSide:
    """Return the side of a module or a function.

    Raises:
        ModuleFailedError: it is neither.
    """
    if isinstance(value, torch.jit.ScriptModule):
        raise ModuleFailedError(
            f"{type(value).__name__} is a TorchScript module, whose weights can't be exchanged; give the module that "
            "it was made from"
        )
    if isinstance(value, nn.Module):
        unhashable = _unhashable(value)
        if unhashable:
            raise ModuleFailedError(
                f"{unhashable} defines __eq__ without __hash__, so that torch can't list its submodules; write "
                f"`{unhashable}.__hash__ = torch.nn.Module.__hash__` before"
            )
        for path, child in value.named_modules():
            kept = _keeps_its_weights(child)
            if kept:
                what = f"{path} of {type(value).__name__}" if path else type(value).__name__
                raise ModuleFailedError(f"{what} {kept}")
        return ModuleSide(value)
    if isinstance(value, Function):
        return TorchFunctionSide(value)
    raise ModuleFailedError(
        f"a torch side must be an nn.Module or parity.function(f, weights), got {type(value).__name__}"
    )


def _unhashable(module: nn.Module) -> str:
    """Return the class of the first module inside that has no hash, which torch's lists of modules need; "" if none."""
    if type(module).__hash__ is None:
        return type(module).__name__
    children = (child for child in module._modules.values() if child is not None)
    return next(filter(None, map(_unhashable, children)), "")


_WRAPPERS = {
    "FSDPModule": (
        "is sharded by fully_shard, which keeps the weights itself, so that they can't be exchanged; "
        "give the module before fully_shard"
    ),
    "FullyShardedDataParallel": (
        "keeps its weights in one flat tensor, so that they can't be exchanged; give the module that it was made from"
    ),
    "DistributedDataParallel": "sums gradients of weights that can't be exchanged; give its .module",
}
"""Torch class that distributes a module over processes -> why it cannot be a side, and the replacement to give."""


def _keeps_its_weights(module: nn.Module) -> str:
    """Return why a module that torch has sharded can't be given other weights; "" if it can."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    return next((reason for name, reason in _WRAPPERS.items() if name in names), "")


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yield name, tensor and role of every parameter and running statistic."""
    for name, parameter in module.named_parameters():
        yield name, parameter, "parameter"
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in STATISTICS:
            yield name, buffer, "statistic"


def dotted(path: str) -> str:
    """Return a path of `flatten` with dots: ``['layers'][0].kernel`` is ``layers.0.kernel``; a bare tensor, weights."""
    words, rest = [], path
    while rest:
        if rest.startswith("["):
            word, _, rest = rest[1:].partition("]")
            words.append(word.strip("'\""))
        else:
            word = rest[1:].split(".")[0].split("[")[0]
            words.append(word)
            rest = rest[1 + len(word) :]
    return ".".join(words) or "weights"


def check_readable(tensors: Mapping[str, Tensor], owner: str) -> None:
    """See that weights are plain arrays of numbers.

    Raises:
        ModuleFailedError: one is not; the message names it.
    """
    for name, tensor in tensors.items():
        what = unreadable(tensor)
        if what:
            raise ModuleFailedError(f"weight {name} of {owner} is {what}")


def unreadable(tensor: Tensor) -> str:
    """Return why a tensor cannot be compared as an array, and a remedy; empty if it can."""
    if tensor.is_meta:
        return "on the meta device and holds no numbers; load them first"
    if tensor.is_nested:
        return "a nested tensor; pad it (torch.nested.to_padded_tensor)"
    if tensor.is_quantized:
        return f"quantised ({dtype_name(tensor)}); compare the module before quantisation, or give tensor.dequantize()"
    if tensor.layout != torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')}); give tensor.to_dense()"
    return ""


def device_of(tensors: Mapping[str, Tensor] | nn.Module, wanted: str | None) -> torch.device:
    """Return the requested device; None is that of the first tensor.

    Raises:
        ModuleFailedError: torch does not find the device.
    """
    if wanted is None:
        elements = (
            [*tensors.parameters(), *tensors.buffers()] if isinstance(tensors, nn.Module) else [*tensors.values()]
        )
        return torch.device("cpu") if not elements or elements[0].is_meta else elements[0].device
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "gpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if wanted == "tpu":
        raise ModuleFailedError("device tpu: torch does not run on a TPU here; give --device cpu,tpu for a mixed pair")
    raise ModuleFailedError(f"device {wanted}: torch finds none on this machine")


def outputs_of(result: object, what: str, returned: Returned = WHOLE) -> tuple[list[str], list[Tensor]]:
    """Return the path and the tensor of every output.

    Args:
        result: the return value of a call.
        what: the side, for messages.
        returned: the part that is judged.

    Raises:
        ModuleFailedError: the result holds no tensor, or one that is unreadable as an array.
    """
    leaves = flatten(result, is_tensor)
    if not leaves:
        raise ModuleFailedError(f"the {what} returned {type(result).__name__}, which holds no tensor")
    leaves = leaves if returned.entry is None else picked(leaves, returned.entry, f"the {what}")
    for path, tensor in leaves:
        why = unreadable(tensor)
        if why:
            raise ModuleFailedError(f"output{path} of the {what} is {why}")
    axes = returned.axes
    return [path for path, _ in leaves], [one.permute(axes[path]) if path in axes else one for path, one in leaves]


def is_tensor(value: object) -> bool:
    """Return whether a leaf is a tensor."""
    return isinstance(value, Tensor)


def _stock_name(module: object) -> str:
    """Return the class of a module, or the framework's own class that it is derived from."""
    own = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.")]
    return next((kind.__name__ for kind in own if kind.__name__ != "Module"), type(module).__name__)
