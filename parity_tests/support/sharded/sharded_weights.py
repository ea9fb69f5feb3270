"""What workers do with modules whose weights devices share: the same scenarios for both frameworks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import numpy as np
import pytest

from attn_bridge import transfer
from attn_bridge.checkpoints import verification
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.safetensors import SafetensorsReader, SafetensorsWriter
from attn_parity import workers

from ... import contexts
from ..processes.memory import peak_memory
from . import sharded_digests
from .sharded_sides import (
    BFLOAT16,
    CONTAINERS,
    MODELS,
    TRANSFORMERS,
    Flax,
    Torch,
    build,
    counted,
    error_of,
    files_of,
    numbers,
    same,
    wide,
)

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
        with counted() as sizes, peak_memory() as peak:
            side.load(folder / f"{layout}.safetensors", module)
        assert held <= whole / (3.9 if side.side == "torch" else 1)
        assert sum(sizes) == held, (layout, sum(sizes), held)
        assert max(sizes) <= largest < max(one.nbytes for one in arrays.values()) / 3, (layout, max(sizes), largest)
        assert peak.bytes < held + 3 * largest, (layout, peak, held, largest)
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
        with mock.patch.object(verification, "MIN", largest >> 5), peak_memory() as peak:
            side.save(module, folder / f"{layout}.safetensors", to_layout=layout)
        assert peak.bytes < (0.6 * largest if side.side == "flax" else 5 * largest), (layout, peak, largest)
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


def what_parallelize_cut_is_loaded_and_saved(side: Any, folder: Path) -> None:
    """Load a model that `parallelize` has cut from a folder, under the other side's names, and save it as a folder."""
    parallelize = importlib.import_module(f"{side.package.__name__}.parallel").parallelize
    config, arrays = numbers("DecoderModel", BFLOAT16)
    plain = build(side, "DecoderModel", config, arrays, shared=False)
    module = build(side, "DecoderModel", config, numbers("DecoderModel", seed=1)[1], shared=False)
    parallelize(module, side.mesh, tensor="tensor", fsdp="fsdp")
    if side.is_first:
        side.save(plain, folder / "twin", to_layout="flax" if side.side == "torch" else "torch")
        (folder / "plain").mkdir()
        plain.save_pretrained(folder / "plain" / "model")
    side.barrier()
    side.load(folder / "twin", module)
    assert same(side.backend.get_weights(module), side.backend.get_weights(plain))
    module.save_pretrained(folder / "model")
    assert files_of(folder / "model") == files_of(folder / "plain" / "model")
    assert len(files_of(folder / "model")) == 3


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
    """Between shared modules of both frameworks, and a plain one on either end; the dtype changes."""
    other = Flax() if side.side == "torch" else None
    assert other is not None
    for name, dtype in MODELS[1:]:
        config, arrays = numbers(name, dtype, seed=1)
        blank = numbers(name)[1]
        sources, targets = (
            {(one.side, shared): build(one, name, config, weights, shared=shared)
             for one in (side, other) for shared in (False, True)}
            for weights in (arrays, blank)
        )  # fmt: skip
        for source_side, target_side in ((side, other), (other, side)):
            for ways in ((False, True), (True, False), (True, True)):
                source, target = sources[source_side.side, ways[0]], targets[target_side.side, ways[1]]
                target_side.backend.set_weights(target, target_side.names(blank, config))
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
    a_sharded_module_saves_what_a_plain_one_does,
    what_parallelize_cut_is_loaded_and_saved,
    a_model_without_memory_is_loaded,
    what_goes_wrong_is_said_by_every_rank,
    what_does_not_fit_is_said_as_of_a_plain_module,
    *sharded_digests.SCENARIOS,
    a_part_is_all_that_is_read,  # last: from here on memory is traced, which is slow
    a_save_holds_little,
)
TORCH = (
    transfers_are_exact_both_ways,
    a_written_tensor_is_the_same_parameter,
    tied_names_must_agree,
    parts_may_be_uneven,
)


RANKS = {"torch": 4, "flax": 1}
"""Processes of a side."""

IMPORTED = {
    "torch": ("torch.distributed.tensor", "torch_attn.parallel", "jax_attn.parallel"),
    "flax": ("jax_attn.parallel",),
}
"""Modules that the ranks of a side need."""

Scenario = Callable[[Any, Path], None]
Outcome = list[dict[str, str]]
"""For each rank, scenario -> what went wrong."""


def outcome(side: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run all scenarios of a side in workers, once for all processes of a pytest run."""
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a folder of its own below the folder of the run.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    stored = shared / f"sharded-{side}.json"
    with filelock.FileLock(f"{stored}.lock"):
        if not stored.exists():
            stored.write_text(json.dumps(_run_all(side, tmp_path_factory.mktemp(side))), encoding="utf-8")
    outcomes: Outcome = json.loads(stored.read_text(encoding="utf-8"))
    return outcomes


def _run_all(side: str, folder: Path) -> Outcome:
    """Run all scenarios of a side in workers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    with mock.patch.dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"):
        (outcome,) = workers.run(run_copies, [(side, str(folder))], jobs=1)
    return outcome


def run_copies(task: tuple[str, str]) -> Outcome:
    """Import what the ranks of a side need, which takes most of the time of a start, and run each in a copy."""
    side, folder = task
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share the cores
    for module in IMPORTED[side]:
        importlib.import_module(module)
    tasks = [(side, rank, folder) for rank in range(RANKS[side])]
    with ProcessPoolExecutor(len(tasks), multiprocessing.get_context("fork")) as copies:
        return list(copies.map(run, tasks))


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
            "gloo", f"file://{folder}/group", timeout=timedelta(minutes=10), rank=rank, world_size=4
        )
        side: Any = Torch(rank)
    else:
        import jax_attn as package

        side = Flax()
    side.package, side.load, side.save = package, package.load, package.save
    contexts.share_where_unoptimized()
    found = {}
    for number, scenario in enumerate((*(TORCH if kind == "torch" else ()), *BOTH)):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        side.barrier()
        try:
            scenario(side, place)
        except Exception:  # the test says which it was, and goes on with the next
            found[scenario.__name__] = traceback.format_exc()
    if kind == "torch":
        side.barrier()
        distributed.destroy_process_group()  # else threads of gloo may hold tensors as the interpreter ends, and crash
    return found
