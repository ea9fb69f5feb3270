"""What workers do with modules whose weights devices share: the same scenarios for both frameworks.

torch has a process for each rank, over gloo; JAX one process with several devices.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import backends, transfer
from attn_bridge.checkpoints import execution
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.safetensors import SafetensorsReader, SafetensorsWriter
from attn_bridge.parity import workers
from attn_bridge.parity.check.mesh.cases import mesh_cases
from attn_bridge.sharding import Plan
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    RMSNormConfig,
    Rotary,
)
from attn_bridge.weights import torch_to_flax

Arrays = dict[str, np.ndarray]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONTAINERS: tuple[dict[str, Any], ...] = ({"own.npz": {}, "own.pt": {}}, {"own.msgpack": {}})
TRANSFORMERS = {"to_layout": "hf-gpt2", "settings": {"tie": 0}}
MODELS = (("GPTModel", np.float32), ("DecoderModel experts", BFLOAT16))
"""Whole models, and the dtype of their weights."""

MESH = {"tensor": 2, "fsdp": 2}
PLAN = Plan.of(MESH, tensor="tensor", fsdp="fsdp")


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


# ---- scenarios: each is given a side and an empty folder that all ranks have


def written_weights_stay_shared(side: Any, folder: Path) -> None:
    """`set_weights` keeps how a weight is cut, whether its dtype changes or not."""
    config, before = numbers("GPTModel")
    for dtype in (np.float32, BFLOAT16):
        module = build(side, "GPTModel", config, before, shared=True)
        parts = side.parts(module)
        after = side.names(numbers("GPTModel", dtype, seed=1)[1], config)
        assert not same(side.backend.get_weights(module), after)
        side.backend.set_weights(module, after)
        assert same(side.backend.get_weights(module), after), dtype
        found = side.parts(module)
        assert {name: one[:2] for name, one in found.items()} == {name: one[:2] for name, one in parts.items()}
        assert side.backend.shared_names(module) == set(after)


def a_refused_array_leaves_all_as_it_was(side: Any, folder: Path) -> None:
    """One of the names has a dtype that the framework lacks, or that it would narrow: nothing is written."""
    config, before = numbers("GPTModel")
    module = build(side, "GPTModel", config, before, shared=True)
    after = side.names(numbers("GPTModel", seed=1)[1], config)
    wrong = np.float64 if side.side == "flax" else np.longdouble
    last = list(after)[-1]
    with pytest.raises(TypeError, match=last):
        side.backend.set_weights(module, {**after, last: after[last].astype(wrong)})
    assert same(side.backend.get_weights(module), side.names(before, config))


def a_sharded_module_loads_what_a_plain_one_saves(side: Any, folder: Path) -> None:
    """In every container and layout, under both sides' names, bf16 included, and from a folder of transformers."""
    for number, (name, dtype) in enumerate(MODELS):
        config, arrays = numbers(name, dtype, seed=1)
        plain = build(side, name, config, arrays, shared=False)
        want = side.backend.get_weights(plain)
        targets = {
            "own.safetensors": {},
            **CONTAINERS[number],
            "twin": {"to_layout": "torch" if side.side == "flax" else "flax"},
            **({"transformers": TRANSFORMERS} if name == "GPTModel" else {}),
        }
        place = folder / f"{name} {number}"
        if side.is_first:
            place.mkdir()
            for file, options in targets.items():
                side.save(plain, place / file, **options)
        side.barrier()
        for file in targets:
            module = build(side, name, config, numbers(name)[1], shared=True)
            parts = side.parts(module)
            side.load(place / file, module)
            assert same(side.backend.get_weights(module), want), (name, file)
            assert {key: one[:2] for key, one in side.parts(module).items()} == {
                key: one[:2] for key, one in parts.items()
            }


def a_part_is_all_that_is_read(side: Any, folder: Path) -> None:
    """Ranks read a quarter of the file each, JAX each byte once, and neither more at once than a part."""
    config, arrays = wide()
    plain = build(side, "DecoderModel", config, arrays, shared=False)
    want = side.backend.get_weights(plain)
    for layout in ("torch", "flax"):
        if side.is_first:
            side.save(plain, folder / f"{layout}.safetensors", to_layout=layout)
        side.barrier()
        module = build(side, "DecoderModel", config, wide(1)[1], shared=True)
        parts = side.parts(module)
        held = sum(one[2] for one in parts.values())
        whole = sum(one.nbytes for one in arrays.values())
        largest = max(4 * int(np.prod(one[1])) for one in parts.values())
        with counted() as sizes:
            tracemalloc.start()
            side.load(folder / f"{layout}.safetensors", module)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert held <= whole / (3.9 if side.side == "torch" else 1)
        assert sum(sizes) == held, (layout, sum(sizes), held)
        assert max(sizes) <= largest < max(one.nbytes for one in arrays.values()) / 3, (layout, max(sizes), largest)
        assert peak < held + 3 * largest, (layout, peak, held, largest)
        assert same(side.backend.get_weights(module), want)


def a_sharded_module_saves_what_a_plain_one_does(side: Any, folder: Path) -> None:
    """Byte for byte, manifest and all, in every container and layout; each rank returns when it is there."""
    for number, (name, dtype) in enumerate(MODELS):
        config, arrays = numbers(name, dtype)
        plain, shared = (build(side, name, config, arrays, shared=one) for one in (False, True))
        targets = {
            "own.safetensors": {},
            **CONTAINERS[number],
            "twin": {"to_layout": "torch" if side.side == "flax" else "flax"},
            **({"transformers": TRANSFORMERS, "book": {"to_layout": "book"}} if name == "GPTModel" else {}),
            "pretrained": None,
        }
        places = [folder / f"{kind} {name} {number}" for kind in ("plain", "shared")]
        if side.is_first:
            for place in places:
                place.mkdir()
        side.barrier()
        for file, options in targets.items():
            for module, place in ((plain, places[0]), (shared, places[1])):
                if module is shared or side.is_first:
                    if options is None:
                        module.save_pretrained(place / file)
                    else:
                        side.save(module, place / file, **options)
                if module is shared:
                    assert (place / file).exists()
            side.barrier()
            found = files_of(places[1] / file)
            assert found
            assert found == files_of(places[0] / file), (name, file)


def a_save_holds_little(side: Any, folder: Path) -> None:
    """Write a model and hold one tensor of it at a time; of JAX's, a piece of one, whatever becomes of its axes."""
    config, arrays = wide()
    module = build(side, "DecoderModel", config, arrays, shared=True)
    largest = max(one.nbytes for one in arrays.values())
    for layout in ("torch", "flax"):
        with mock.patch.object(execution, "MIN", largest >> 5):
            tracemalloc.start()
            side.save(module, folder / f"{layout}.safetensors", to_layout=layout)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < (0.6 * largest if side.side == "flax" else 5 * largest), (layout, peak, largest)
    plain = build(side, "DecoderModel", config, arrays, shared=False)
    if side.is_first:
        for layout in ("torch", "flax"):
            (folder / "plain").mkdir(exist_ok=True)
            side.save(plain, folder / "plain" / f"{layout}.safetensors", to_layout=layout)
            found, want = (files_of(one / f"{layout}.safetensors") for one in (folder, folder / "plain"))
            assert found
            assert found == want
    side.barrier()


def a_model_without_memory_is_loaded(side: Any, folder: Path) -> None:
    """Make a model whose parameters have shapes alone, cut it, and load it: it is never anywhere whole."""
    config, arrays = numbers("DecoderModel experts", BFLOAT16)
    if side.is_first:
        side.save(build(side, "DecoderModel", config, arrays, shared=False), folder / "model.safetensors")
    side.barrier()
    module = side.without_memory("DecoderModel", config)
    side.load(folder / "model.safetensors", module)
    assert same(side.backend.get_weights(module), side.names(arrays, config))
    assert side.backend.shared_names(module) == set(side.names(arrays, config))


def what_goes_wrong_is_said_by_every_rank(side: Any, folder: Path) -> None:
    """Nothing is half written: a file that is there, a disk that fails under way, a part that can't be read."""
    config, arrays = numbers("GPTModel")
    module = build(side, "GPTModel", config, arrays, shared=True)
    path = folder / "model.safetensors"
    side.save(module, path)
    before = files_of(folder)
    other = build(side, "GPTModel", config, numbers("GPTModel", seed=1)[1], shared=True)
    error = error_of(lambda: side.save(other, path))
    assert "exists; --overwrite" in error[1]
    assert set(side.everywhere(error)) == {error}
    writes = iter(range(1000))

    def fail(self: Any, *_: Any) -> None:
        if next(writes) == 7:
            raise CheckpointError("the disk is gone")
        original(self, *_)

    original = SafetensorsWriter.write_range
    with mock.patch.object(SafetensorsWriter, "write_range", fail) if side.is_first else contextlib.nullcontext():
        error = error_of(lambda: side.save(other, path, overwrite=True))
        assert error[1].startswith("the disk is gone")
        assert set(side.everywhere(error)) == {error}
    side.barrier()
    assert {name: one for name, one in files_of(folder).items() if ".partial" not in name} == before

    want = side.backend.get_weights(other)
    is_last = side.rank == len(side.everywhere(None)) - 1
    reads, read_into = iter(range(1000)), SafetensorsReader.read_into

    def unreadable(self: Any, *_: Any) -> None:
        if next(reads) == 9:
            raise CheckpointError("can't be read here")
        read_into(self, *_)

    with mock.patch.object(SafetensorsReader, "read_into", unreadable) if is_last else contextlib.nullcontext():
        error = error_of(lambda: side.load(path, other))
    assert error == ("CheckpointError", "can't be read here")
    assert same(side.backend.get_weights(other), want)
    side.load(path, other)
    assert same(side.backend.get_weights(other), side.names(arrays, config))


def what_does_not_fit_is_said_as_of_a_plain_module(side: Any, folder: Path) -> None:
    """Missing names, other shapes and a file that is cut off: the same class and text."""
    config, arrays = numbers("GPTModel")
    larger = config.replace(context_length=config.context_length * 2, n_layers=3)
    random = np.random.default_rng(3)
    weights = {row.rule.torch: random.random(row.shape, np.float32) + 0.5 for row in larger.parameters}
    if side.is_first:
        side.save(build(side, "GPTModel", larger, weights, shared=False), folder / "larger.safetensors")
        side.save(build(side, "GPTModel", config, arrays, shared=False), folder / "cut.safetensors")
        data = (folder / "cut.safetensors").read_bytes()
        (folder / "cut.safetensors").write_bytes(data[:-8])
    side.barrier()
    plain, shared = (build(side, "GPTModel", config, arrays, shared=one) for one in (False, True))
    for file in ("larger.safetensors", "cut.safetensors", "nothing.safetensors"):
        errors = [error_of(functools.partial(side.load, folder / file, module)) for module in (plain, shared)]
        assert errors[0] == errors[1]
        assert same(side.backend.get_weights(shared), side.names(arrays, config))


def transfers_are_exact_both_ways(side: Any, folder: Path) -> None:
    """Between plain and shared modules of both frameworks, and a dtype that changes."""
    other = Flax() if side.side == "torch" else None
    assert other is not None
    for name, dtype in MODELS[1:]:
        config, arrays = numbers(name, dtype, seed=1)
        for source_side, target_side in ((side, other), (other, side)):
            for ways in ((False, False), (False, True), (True, False), (True, True)):
                source = build(source_side, name, config, arrays, shared=ways[0])
                target = build(target_side, name, config, numbers(name)[1], shared=ways[1])
                parts = target_side.parts(target) if ways[1] else {}
                report = transfer(source, target)
                assert same(target_side.backend.get_weights(target), target_side.names(arrays, config))
                assert len(report.redtyped) == len(report) == len(arrays)
                after = target_side.parts(target) if ways[1] else {}
                assert {key: one[:2] for key, one in after.items()} == {key: one[:2] for key, one in parts.items()}


def a_written_tensor_is_the_same_parameter(side: Any, folder: Path) -> None:
    """torch: the object stays, its gradient goes where the dtype changes, and it still gets one."""
    config, arrays = numbers("GPTModel")
    module = build(side, "GPTModel", config, arrays, shared=True)
    parameters = dict(module.named_parameters())
    for dtype, kept in ((np.float32, True), (BFLOAT16, False)):
        for one in parameters.values():
            one.sum().backward()
        side.backend.set_weights(module, numbers("GPTModel", dtype, seed=1)[1])
        assert all(one is parameters[name] for name, one in module.named_parameters())
        assert all((one.grad is not None) == kept for one in parameters.values())
    for one in parameters.values():
        (one * one).sum().backward()
        assert one.grad is not None
        assert one.grad.dtype == one.dtype
        assert one.grad.full_tensor().equal(one.detach().full_tensor() * 2)


def tied_names_must_agree(side: Any, folder: Path) -> None:
    """torch: two names of one shared tensor, and arrays that differ, in a part that one rank alone has."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    module = nn.Module()
    module.one = nn.Parameter(distribute_tensor(torch.arange(1.0, 9.0), side.mesh, [Shard(0), Shard(0)]))
    module.two, module.three = module.one, nn.Parameter(module.one.detach() * 2)
    array = np.arange(2, 10, dtype=np.float32)
    other = array.copy()
    side.backend.set_weights(module, {"one": array, "two": array, "three": other * 3})
    assert same(side.backend.get_weights(module), {"one": array, "two": array, "three": other * 3})
    other[-1] = 1.0
    if side.rank == 3:
        error = error_of(lambda: side.backend.set_weights(module, {"one": array, "two": other}))
        assert error[1] == "one and two are one tensor in the target and two different ones in the source"
    side.barrier()


def parts_may_be_uneven(side: Any, folder: Path) -> None:
    """torch: sizes that do not divide, ranks that hold nothing, and one axis that both axes of the mesh cut."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    random = np.random.default_rng(5)
    module, arrays = nn.Module(), {}
    cuts = ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()])
    for number, placements in enumerate(cuts):
        for shape in ((7, 5), (1, 3), (5, 2)):
            name, array = f"w{number}_{shape[0]}", random.normal(size=shape)
            held = distribute_tensor(torch.zeros(shape, dtype=torch.float64), side.mesh, placements)
            module.register_parameter(name, nn.Parameter(held))
            arrays[name] = array
    shapes = {name: one.to_local().shape for name, one in module.named_parameters()}
    side.backend.set_weights(module, arrays)
    assert same(side.backend.get_weights(module), arrays)
    path = folder / "uneven.safetensors"
    side.save(module, path)
    for dtype in (np.float64, np.float32):
        side.backend.set_weights(module, {name: np.zeros_like(one, dtype) for name, one in arrays.items()})
        side.load(path, module)
        assert same(side.backend.get_weights(module), arrays)
        assert {name: one.to_local().shape for name, one in module.named_parameters()} == shapes


BOTH = (
    written_weights_stay_shared,
    a_refused_array_leaves_all_as_it_was,
    a_sharded_module_loads_what_a_plain_one_saves,
    a_part_is_all_that_is_read,
    a_sharded_module_saves_what_a_plain_one_does,
    a_save_holds_little,
    a_model_without_memory_is_loaded,
    what_goes_wrong_is_said_by_every_rank,
    what_does_not_fit_is_said_as_of_a_plain_module,
)
TORCH = (
    transfers_are_exact_both_ways,
    a_written_tensor_is_the_same_parameter,
    tied_names_must_agree,
    parts_may_be_uneven,
)


RANKS = {"torch": 4, "flax": 1}
"""Processes of a side."""

Scenario = Callable[[Any, Path], None]
Outcome = list[dict[str, str]]
"""For each rank, scenario -> what went wrong."""


def outcome(side: str, folder: Path) -> Outcome:
    """Run all scenarios of a side in workers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    tasks = [(side, rank, str(folder)) for rank in range(RANKS[side])]
    with mock.patch.dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"):
        return list(workers.run(run, tasks, jobs=len(tasks)))


def run(task: tuple[str, int, str]) -> dict[str, str]:
    """Run all scenarios of a side, and return name -> what went wrong.

    Args:
        task: the side, the rank, and a folder that all ranks have.
    """
    kind, rank, folder = task
    if kind == "torch":
        from datetime import timedelta

        from torch import distributed

        import torch_attn as package

        distributed.init_process_group(
            "gloo", f"file://{folder}/group", timeout=timedelta(seconds=60), rank=rank, world_size=4
        )
        side: Any = Torch(rank)
    else:
        import jax_attn as package

        side = Flax()
    side.package, side.load, side.save = package, package.load, package.save
    found = {}
    for number, scenario in enumerate((*BOTH, *(TORCH if kind == "torch" else ()))):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        side.barrier()
        try:
            scenario(side, place)
        except Exception:  # the test says which it was, and goes on with the next
            found[scenario.__name__] = traceback.format_exc()
    return found
