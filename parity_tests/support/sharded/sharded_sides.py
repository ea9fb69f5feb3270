"""Modules whose weights devices share, of either framework, and what scenarios need of them.

torch has a process for each rank, over gloo; JAX one process with several devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from attn_bridge import backends
from attn_bridge.checkpoints.containers.safetensors import SafetensorsReader
from attn_bridge.sharding import ShardingPlan
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    RMSNormConfig,
    Rotary,
)
from attn_bridge.weights import torch_to_flax
from attn_parity.check.mesh.cases import mesh_cases

Arrays = dict[str, np.ndarray]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONTAINERS: tuple[dict[str, Any], ...] = ({"own.npz": {}, "own.pt": {}}, {"own.msgpack": {}})
TRANSFORMERS = {"to_layout": "hf-gpt2", "settings": {"tie": 0}}
MODELS = (("GPTModel", np.float32), ("DecoderModel experts", BFLOAT16))
"""Whole models, and the dtype of their weights."""

MESH = {"tensor": 2, "fsdp": 2}
PLAN = ShardingPlan.of(MESH, tensor="tensor", fsdp="fsdp")


def numbers(name: str, dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Arrays]:
    """Return the config of a model and weights by their torch names."""
    (case,) = (case for case in mesh_cases((name,), seed) if case.name == name)
    return case.config, {key: one.astype(dtype) for key, one in case.numbers.weights.items()}


def wide(seed: int = 0) -> tuple[DecoderConfig, Arrays]:
    """Return a decoder whose matrices are large enough to see who reads what, and float32 weights."""
    attention = GroupedQueryAttentionConfig(1024, 8, 4, 128, position=Rotary())
    block = DecoderBlockConfig(attention, FeedForwardConfig(1024, 1536), RMSNormConfig(1024))
    config = DecoderConfig(vocab_size=512, emb_dim=1024, blocks=(block,), norm=RMSNormConfig(1024))
    random = np.random.default_rng(seed)
    return config, {row.rule.torch: random.random(row.shape, np.float32) + 0.5 for row in config.parameters}


def same(one: Arrays, two: Arrays) -> bool:
    """Tell whether arrays are the same to the last bit."""
    bits = [{name: (array.dtype, array.shape, array.tobytes()) for name, array in side.items()} for side in (one, two)]
    return bits[0] == bits[1]


def files_of(path: Path) -> dict[str, bytes]:
    """Return name -> bytes of all that was written for a checkpoint."""
    found = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}*")
    return {str(one.relative_to(path.parent)): one.read_bytes() for one in found if one.is_file()}


class Torch:
    """Modules of torch, shared by the ranks of this process's group."""

    side = "torch"
    is_first = True

    def __init__(self, rank: int):
        from torch.distributed.device_mesh import init_device_mesh

        self.is_first, self.rank = rank == 0, rank
        self.mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        self.backend: Any = backends.load("torch")
        self.dtypes = ("float32", "bfloat16")

    def names(self, arrays: Arrays, config: Any) -> Arrays:
        """Return weights under the names of this side."""
        return dict(arrays)

    def share(self, module: Any, config: Any) -> None:
        """Cut a module's parameters over the mesh."""
        from torch import nn
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        for row in config.parameters:
            cuts = PLAN.placement(row)
            placements = [Shard(cuts.index(axis)) if axis in cuts else Replicate() for axis in MESH]
            path, _, leaf = row.rule.torch.rpartition(".")
            owner = module.get_submodule(path)
            held = owner._parameters[leaf]
            owner._parameters[leaf] = nn.Parameter(distribute_tensor(held.data, self.mesh, placements))

    def without_memory(self, name: str, config: Any) -> Any:
        """Return a module that is shared, and whose parameters hold whatever was in memory."""
        import torch

        with torch.device("meta"):
            module = getattr(self.package, name)(config)
        self.share(module, config)
        return module.to_empty(device="cpu")

    def parts(self, module: Any) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return name -> how a weight is shared, the shape of a device's part, and bytes of this process's."""
        return {
            name: (str(one.placements), tuple(one.to_local().shape), one.to_local().nbytes)
            for name, one in module.named_parameters()
        }

    def barrier(self) -> None:
        """Wait for all ranks."""
        from torch import distributed

        distributed.barrier()

    def everywhere(self, value: Any) -> list[Any]:
        """Return what each rank says."""
        from torch import distributed

        found: list[Any] = [None] * PLAN.size("tensor") * PLAN.size("fsdp")
        distributed.all_gather_object(found, value)
        return found

    def held(self, module: Any, name: str) -> dict[int, np.ndarray]:
        """Return rank -> what it holds of a weight, on all ranks."""
        array = self.backend.to_numpy(module.get_parameter(name).to_local())
        return dict(enumerate(self.everywhere(array.copy())))

    def put(self, module: Any, name: str, place: int, array: np.ndarray) -> None:
        """Give one rank other numbers."""
        if self.rank == place:
            module.get_parameter(name).to_local().detach().copy_(self.backend.from_numpy(array))

    @contextlib.contextmanager
    def counting(self, moved: list[int]) -> Iterator[None]:
        """List the bytes of all that one rank sends to another, and of what is put together whole."""
        from torch import distributed
        from torch.distributed.tensor import DTensor

        send, full = distributed.send, DTensor.full_tensor

        def sent(tensor: Any, *arguments: Any) -> None:
            moved.append(tensor.nbytes)
            send(tensor, *arguments)

        def gathered(tensor: Any) -> Any:
            moved.append(tensor.nbytes)
            return full(tensor)

        with mock.patch.object(distributed, "send", sent), mock.patch.object(DTensor, "full_tensor", gathered):
            yield


class Flax:
    """Modules of Flax, shared by the devices of this process."""

    side = "flax"
    is_first, rank = True, 0

    def __init__(self) -> None:
        import jax
        from jax.sharding import AxisType

        kinds = (AxisType.Auto,) * len(MESH)
        self.mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), kinds, devices=jax.devices()[:4])
        self.backend: Any = backends.load("flax")

    def names(self, arrays: Arrays, config: Any) -> Arrays:
        """Return weights under the names of this side."""
        return torch_to_flax(arrays, config.rules())

    def share(self, module: Any, config: Any) -> None:
        """Cut a module's parameters over the mesh."""
        import jax
        from flax import nnx
        from jax.sharding import NamedSharding, PartitionSpec

        rows = {row.rule.flax: row for row in config.parameters}
        values = {}
        for path, leaf in nnx.to_flat_state(nnx.state(module)):
            row, spec = rows.get(".".join(map(str, path))), ()
            if row is not None:
                ours, theirs = (one.split() for one in row.rule.pattern.split("->"))
                cuts = dict(zip(ours, PLAN.placement(row), strict=True))
                spec = tuple(cuts[letter] for letter in theirs)
            sharding, value = NamedSharding(self.mesh, PartitionSpec(*spec)), leaf.get_value()
            if isinstance(value, jax.ShapeDtypeStruct):
                values[path] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            else:
                values[path] = jax.device_put(value, sharding)
        nnx.update(module, nnx.from_flat_state(values))

    def without_memory(self, name: str, config: Any) -> Any:
        """Return a module that is shared, and whose parameters are shapes."""
        from flax import nnx

        module = nnx.eval_shape(lambda: getattr(self.package, name)(config, rngs=nnx.Rngs(0)))
        self.share(module, config)
        return module

    def parts(self, module: Any) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return name -> how a weight is shared, the shape of a device's part, and bytes of this process's."""
        return {
            ".".join(map(str, path)): (str(one.sharding), one.sharding.shard_shape(one.shape), one.nbytes)
            for path, one in self.backend._values(module).items()
        }

    def barrier(self) -> None:
        """There is one process."""

    def everywhere(self, value: Any) -> list[Any]:
        """Return what each process says."""
        return [value]

    def held(self, module: Any, name: str) -> dict[int, np.ndarray]:
        """Return device -> what it holds of a weight."""
        return {
            one.device.id: np.array(one.data) for one in self._variable(module, name).get_value().addressable_shards
        }

    def put(self, module: Any, name: str, place: int, array: np.ndarray) -> None:
        """Give one device other numbers."""
        import jax

        variable = self._variable(module, name)
        old = variable.get_value()
        parts = [
            jax.device_put(array, one.device) if one.device.id == place else one.data for one in old.addressable_shards
        ]
        variable.set_value(jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts))

    def _variable(self, module: Any, name: str) -> Any:
        from flax import nnx

        return next(one for path, one in nnx.to_flat_state(nnx.state(module)) if ".".join(map(str, path)) == name)

    @contextlib.contextmanager
    def counting(self, moved: list[int]) -> Iterator[None]:
        """List the bytes of all that is put together of devices' parts."""
        region_of = self.backend._region

        def region(array: Any, region: Any) -> np.ndarray:
            found = region_of(array, region)
            moved.append(found.nbytes)
            return found

        with mock.patch.object(self.backend, "_region", region):
            yield


def build(side: Any, name: str, config: Any, arrays: Arrays, *, shared: bool) -> Any:
    """Return a module with weights of torch names, shared or not."""
    module = side.backend.build_blank(name.split()[0], config, next(iter(arrays.values())).dtype.name)
    side.backend.set_weights(module, side.names(arrays, config))
    if shared:
        side.share(module, config)
    return module


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield the sizes of all that is read from tensors in safetensors files."""
    sizes: list[int] = []
    ranges, into = SafetensorsReader.read_range, SafetensorsReader.read_into

    def read_range(self: Any, name: str, start: int, stop: int) -> Any:
        sizes.append(stop - start)
        return ranges(self, name, start, stop)

    def read_into(self: Any, name: str, start: int, view: memoryview) -> None:
        sizes.append(len(view))
        into(self, name, start, view)

    with mock.patch.multiple(SafetensorsReader, read_range=read_range, read_into=read_into):
        yield sizes


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what a call raises."""
    try:
        function()
    except ValueError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")
