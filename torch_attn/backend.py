"""The torch backend of `attn_bridge`: weights as NumPy arrays, and outputs with every gradient.

The twin is `jax_attn.backend`; `attn_bridge.backends.load` returns either.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

import torch_attn
from attn_bridge.specs import Config, Variant
from attn_bridge.specs.stock_attention import StockAttention
from attn_bridge.specs.stock_layers import StockLayer
from attn_bridge.weights import LazyArray, Region, everything, slices

from .checkpoints import shared_weights
from .checkpoints.undrawn import give_memory, undrawn
from .functional import dtype_name
from .shards import cut_as, is_sharded, whole

Value = TypeVar("Value")

Arrays = dict[str, np.ndarray]

_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.uint16)}
"""Integers of an item's size: what NumPy and torch both know, to carry the bits of what only one of them knows."""

_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    nn.LayerNorm: "layer norm",
    nn.RMSNorm: "RMS norm",
    nn.GroupNorm: "group norm",
    nn.modules.batchnorm._BatchNorm: "batch norm",
}
"""Class -> the kind of its layers, as `StockLayer` names it."""

PLACES = "rank"
"""The unit in which `held_parts` counts."""


def to_numpy(array: Tensor) -> np.ndarray:
    """Return a tensor's elements as a NumPy array, bit for bit; bfloat16 and float8 become `ml_dtypes`.

    Of one that devices share it is all of it; every rank of its mesh has to call this.
    """
    array = whole(array).detach().cpu().contiguous()
    name = dtype_name(array)
    if not hasattr(ml_dtypes, name):
        return array.numpy()
    numpy_bits, torch_bits = _BITS[array.element_size()]
    return array.view(torch_bits).numpy().view(numpy_bits).view(getattr(ml_dtypes, name))


def from_numpy(array: np.ndarray, name: str = "array", *, adopt: bool = False) -> Tensor:
    """Return a NumPy array as a tensor, bit for bit, in new memory; `adopt` may keep the array's.

    Raises:
        TypeError: torch has no such dtype.
    """
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=None if adopt else True)
    if not isinstance(getattr(torch, array.dtype.name, None), torch.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}, which torch does not have")
    if not hasattr(ml_dtypes, array.dtype.name):
        return torch.from_numpy(array)
    numpy_bits, _ = _BITS[array.dtype.itemsize]
    return torch.from_numpy(array.view(numpy_bits)).view(getattr(torch, array.dtype.name))


def describe_weights(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype name) of every parameter and persistent buffer, reading no data."""
    return {name: (tuple(tensor.shape), dtype_name(tensor)) for name, tensor in _tensors(module).items()}


def get_weights(module: nn.Module) -> Arrays:
    """Return every parameter and persistent buffer by name; arrays may share memory with the module.

    Raises:
        TypeError: no module, or a tensor that has no plain numbers: quantised, sparse, nested, or on the meta device.
    """
    return {name: to_numpy(_dense(name, tensor)) for name, tensor in _tensors(module).items()}


def lazy_weights(module: nn.Module) -> dict[str, LazyArray]:
    """Return the weights of `get_weights` as lazy arrays, each read whole on access.

    Raises:
        TypeError: no module, or a tensor without plain numbers: quantised, sparse, nested, or on the meta device.
    """
    tensors = {name: _dense(name, tensor) for name, tensor in _tensors(module).items()}
    read = _holding(tensors)
    return {
        name: LazyArray(
            tuple(tensor.shape),
            to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype,
            functools.partial(read, name),
        )
        for name, tensor in tensors.items()
    }


def _holding(tensors: Mapping[str, Tensor]) -> Callable[[str, Region], np.ndarray]:
    """Return a function that reads a region of a tensor by name; it keeps the last tensor in memory."""
    arrays: Arrays = {}

    def read(name: str, region: Region) -> np.ndarray:
        if name not in arrays:
            arrays.clear()
            arrays[name] = to_numpy(tensors[name])
        return np.array(arrays[name][slices(region)], order="C")

    return read


def _dense(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor that has plain numbers; refuse one that is quantised, sparse, nested or on the meta device."""
    kind = "" if tensor.layout == torch.strided else f"sparse ({tensor.layout})"
    if tensor.is_nested:
        kind = "nested"
    elif tensor.is_quantized:
        kind = f"quantised ({tensor.dtype})"
    elif tensor.is_meta:
        kind = "on the meta device"
    if kind:
        raise TypeError(f"{name} must be a dense tensor with numbers, it is {kind}")
    return tensor


def set_weights(module: nn.Module, arrays: Mapping[str, np.ndarray], *, adopt: bool = False) -> None:
    """Write arrays, of the right names and shapes, into a module; a tensor takes its array's dtype.

    Args:
        module: any module; of a sharded tensor, each device keeps its shard.
        arrays: by name.
        adopt: whether the module may keep the arrays themselves without copying; the caller must not use them
            afterwards.

    Raises:
        TypeError: torch lacks a dtype, or a tensor cannot be written; nothing is written then.
        ValueError: two names are one tensor in the module, and their arrays differ; nothing is written then.
    """
    prepare_weights(module, arrays, adopt=adopt)()


def prepare_weights(
    module: nn.Module, arrays: Mapping[str, np.ndarray | LazyArray], *, adopt: bool = False
) -> Callable[[], None]:
    """Run the checks of `set_weights`, and return the function that writes; devices read shards of lazy arrays."""
    targets = _tensors(module)
    values = {name: _value(array, targets[name], name, adopt) for name, array in arrays.items()}
    _check_writable(targets, values)
    return functools.partial(_write, targets, values, adopt)


def _value(array: np.ndarray | LazyArray, target: Tensor, name: str, adopt: bool) -> Tensor:
    """Return an array as a tensor where a module's is, shared as that is."""
    region = shared_weights.region_of(target) if is_sharded(target) else None
    if isinstance(array, LazyArray):
        array, adopt = array.read(everything(array.shape) if region is None else region), True
    elif region is not None:
        array = array[slices(region)]
    value = from_numpy(array, name, adopt=adopt).to(target.device)
    return (
        shared_weights.from_part(value, target) if is_sharded(target) and region is not None else cut_as(value, target)
    )


def _write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], adopt: bool) -> None:
    with torch.no_grad():
        for name, value in values.items():
            target = targets[name]
            if is_sharded(target) and is_sharded(value):
                shared_weights.write(target, value)
            elif target.dtype == value.dtype and not adopt:
                target.copy_(value)
            else:
                target.grad = None
                target.data = value


def _check_writable(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Find out before the first write whether all of them will succeed."""
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, value in values.items():
        target = targets[name]
        if target.is_meta:
            raise TypeError(f"{name} is on the meta device; call module.to_empty(device=...) first")
        if target.is_inference():
            raise TypeError(f"{name} was made in inference mode and cannot be written")
        if target.requires_grad and not (value.is_floating_point() or value.is_complex()):
            raise TypeError(f"{name} requires gradients and cannot take dtype {dtype_name(value)}")
        if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
            raise TypeError(f"{name} is an expanded tensor, whose elements share memory, and cannot be written")
        own = shared_weights.own_part(target)
        owner = owners.setdefault((own.data_ptr(), tuple(target.shape)), name) if own.numel() else name
        if owner != name and not torch.equal(*(_bits(shared_weights.own_part(values[one])) for one in (owner, name))):
            names = " and ".join(sorted((owner, name)))
            raise ValueError(f"{names} are one tensor in the target and two different ones in the source")


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.ndim else value.reshape(1).view(torch.uint8)


def shared_names(module: nn.Module) -> set[str]:
    """Return the names of the weights that devices share."""
    return {name for name, tensor in _tensors(module).items() if is_sharded(tensor)}


def together(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return the context that every rank leaves when all do, with an error on all where one has one."""
    return shared_weights.together(_tensors(module).values())


@contextlib.contextmanager
def reading(module: nn.Module) -> Iterator[Callable[[str, Region], np.ndarray] | None]:
    """Yield a function that reads a region of a weight by name on one process; the others send parts and get None.

    Raises:
        TypeError: a tensor without plain numbers.
    """
    tensors = {name: _dense(name, tensor) for name, tensor in _tensors(module).items()}
    with shared_weights.gathering(tensors) as ask:
        yield None if ask is None else lambda name, region: np.array(to_numpy(ask(name, region)), order="C")


Part = tuple[int, Region, Callable[[Region], np.ndarray], int]
"""A place, the region of a weight that it holds, what reads a region of that, and bytes of an element."""


def held_parts(module: nn.Module) -> dict[str, list[Part]]:
    """Return name -> this rank's parts of it, if ranks share the module; a part with the region () is a whole scalar.

    Raises:
        TypeError: a tensor without plain numbers.
    """
    tensors = {name: _dense(name, tensor) for name, tensor in _tensors(module).items()}
    rank, parts = shared_weights.rank_of(tensors.values()), dict[str, list[Part]]()
    for name, tensor in tensors.items() if rank is not None else ():
        region = shared_weights.region_of(tensor) if is_sharded(tensor) else everything(tuple(tensor.shape))
        if rank is not None and region is not None and all(start < stop for start, stop in region):
            read = functools.partial(_part, shared_weights.own_part(tensor))
            parts[name] = [(rank, region, read, tensor.element_size())]
    return parts


def _part(tensor: Tensor, region: Region) -> np.ndarray:
    return to_numpy(tensor.detach()[slices(region)])


def gathered(module: nn.Module, value: Value) -> list[Value]:
    """Gather a value from every rank that shares a module, on all of them."""
    return shared_weights.gathered(_tensors(module).values(), value)


def find_configs(module: nn.Module) -> dict[str, Config]:
    """Return path -> config of our outermost modules inside `module` ("" is the module itself)."""
    configs: dict[str, Config] = {}
    for path, child in _unwrapped(module).named_modules():
        config = getattr(child, "config", None)
        inside = any(path.startswith(f"{outer}.") or not outer for outer in configs)
        if isinstance(config, Config) and not inside:
            configs[path] = config
    return configs


def find_stock_attention(module: nn.Module) -> dict[str, StockAttention]:
    """Return path -> description of torch's own attention layers inside `module`, and of our drop-ins for them."""
    return {
        path: StockAttention(
            num_heads=child.num_heads,
            num_kv_heads=child.num_heads,
            bias=child.in_proj_bias is not None,
            add_bias_kv=child.bias_k is not None,
            add_zero_attn=bool(child.add_zero_attn),
        )
        for path, child in _unwrapped(module).named_modules()
        if isinstance(child, nn.MultiheadAttention)
    }


def find_stock_layers(module: nn.Module) -> dict[str, StockLayer]:
    """Return path -> description of torch's own layers inside `module` that the other framework has as well."""
    return {
        path: StockLayer(kind, getattr(child, "num_groups", 0), getattr(child, "eps", None))
        for path, child in _unwrapped(module).named_modules(remove_duplicate=False)
        if (kind := _kind_of(child))
    }


def module_classes(module: nn.Module) -> dict[str, str]:
    """Return path -> name of the class of `module` ("") and of every module inside it."""
    return {path: type(child).__name__ for path, child in _unwrapped(module).named_modules(remove_duplicate=False)}


def _kind_of(layer: nn.Module) -> str:
    """Return the kind of a stock layer as `StockLayer` names it, or ""."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return f"{len(layer.kernel_size)}d convolution"
    return next((kind for base, kind in _KINDS.items() if isinstance(layer, base)), "")


def build(variant: Variant, arguments: Mapping[str, object], dtype: str) -> nn.Module:
    """Return the twin of a variant, in eval mode, with parameters of `dtype`; a function becomes a module."""
    target = getattr(torch_attn, variant.name)
    if variant.is_function:
        return _FunctionModule(variant.name)
    module: nn.Module = target(**arguments, dtype=getattr(torch, dtype))
    return module.eval()


def build_blank(name: str, config: Config, dtype: str) -> nn.Module:
    """Return a module of ours in eval mode whose parameters have memory, but no numbers yet; nothing is drawn."""
    with undrawn():
        module: nn.Module = getattr(torch_attn, name)(config, dtype=getattr(torch, dtype))
    give_memory(module)
    return module.eval()


def call(function: Callable[[Tensor], Tensor], array: np.ndarray) -> np.ndarray:
    """Apply a module or method of ours to one array, without gradients."""
    with torch.no_grad():
        return to_numpy(function(from_numpy(array)))


def precision(dtype: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which arrays of `dtype` may be made and used; torch needs none."""
    del dtype
    return contextlib.nullcontext()


class _OneThread:
    """Holds torch to one thread for as long as anyone asks for it: their number belongs to the process."""

    def __init__(self) -> None:
        self._lock, self._holders, self._former = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the context; afterwards there are as many as before the first who held it."""
        with self._lock:
            self._former = self._former if self._holders else torch.get_num_threads()
            self._holders += 1
            torch.set_num_threads(1)
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                torch.set_num_threads(self._former)


_one_thread = _OneThread()


def few_threads() -> contextlib.AbstractContextManager[None]:
    """Return the context for small work: one thread, because several wait for each other more than they work."""
    return _one_thread()


class _FunctionModule(nn.Module):
    """A function of the package as a module without parameters."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, **arguments: object) -> object:
        return getattr(torch_attn, self.name)(**arguments)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    return dict(_unwrapped(module).state_dict(keep_vars=True))


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module behind ``torch.compile``."""
    return getattr(module, "_orig_mod", module)
