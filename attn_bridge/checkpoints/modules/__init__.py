"""Loads weights of checkpoints into live modules and saves them, and folders with a model's config.

`torch_attn.checkpoints` and `jax_attn.checkpoints` are the same for each framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ... import backends, specs
from ...models import rules_file
from ...specs.model import ModelConfig
from ...weights import WeightsMismatchError
from .. import configs, containers, manifest, planning, verification
from ..containers.base import Array, CheckpointError, Reader, numpy_dtype
from ..elements import Elements, Parts
from ..options import ConvertOptions
from ..readers import ArraysReader, NumberedReader, SharedReader
from ..requests import Prepared
from ..selection import Selection, check_patterns, select
from ..workers import conducting
from .python_words import advice, advising, python_errors

Side = Literal["torch", "flax"]


WITH_MASKS = ("book", "fused-qkv")
"""Layouts whose classes have a causal mask as a buffer."""


def check_arguments(call: str, wanted: str, kind: type, module: object, path: object) -> None:
    """Check that a module and a path are not swapped.

    Raises:
        TypeError: they are, or an argument is something else.
    """
    if not isinstance(module, kind):
        raise TypeError(f"{call}: module must be a {wanted}, got {type(module).__name__}")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{call}: path must be a path, got {type(path).__name__}")


def load(
    side: Side,
    path: Path,
    module: object,
    from_layout: str | None,
    settings: Mapping[str, object] | None,
    *,
    strip: str | None = None,
    drop: str | Sequence[str] | None = None,
    rules: str | os.PathLike[str] | None = None,
    adopt: bool = False,
) -> None:
    """Write a checkpoint's tensors into a module; see ``torch_attn.checkpoints.load``.

    With `adopt`, the module's tensors take over the memory that was read into, instead of a copy to their own.
    """
    backend = backends.load(side)
    wanted, config = backend.describe_weights(module), getattr(module, "config", None)
    with python_errors(), backend.together(module), containers.open_reader(path) as opened:
        reader, selection = _selected(opened, strip, drop, keep_wrappers=rules is not None)
        if rules is None and from_layout is None and reader.tensors.keys() == wanted.keys():
            before, plan = None, planning.make(reader, target_layout="same")
        else:
            before = manifest.of(reader, path) if strip is None else None
            options = ConvertOptions(from_layout=from_layout, settings=settings, rules=rules)
            with advising(reader.tensors, [wanted, _torch_names(config)]):
                plan = _plan_for(side, reader, config, before, options, selection)
        if side == "torch" and isinstance(config, ModelConfig):
            plan = planning.evened(plan)
        targets = {one.info.name: one for one in plan.targets if not one.kept}
        misshapen = [
            f"{name}: expected {wanted[name][0]}, got {targets[name].info.shape}"
            for name in wanted.keys() & targets.keys()
            if wanted[name][0] != targets[name].info.shape
        ]
        elements = _elements(reader, before, plan)
        tied = config.tied_weights(side) if isinstance(config, ModelConfig) else {}
        for name in config.unread_weights(side) if isinstance(config, ModelConfig) else ():
            targets.pop(name, None)
        for name, other in tied.items():
            if {name, other} <= targets.keys():
                _check_tied(elements, targets.pop(name), targets[other])
        missing, unexpected = wanted.keys() - targets.keys(), targets.keys() - wanted.keys()
        if missing or unexpected or misshapen:
            hint = advice(missing, unexpected, targets.keys(), wanted.keys()) if rules is None else ""
            raise WeightsMismatchError(missing, unexpected, misshapen, hint)
        verification.check_dropped(plan, reader)
        shared, parts = backend.shared_names(module), Parts(reader, None if before is None else before.kept)
        lazy = {name: parts.of(targets[name]) for name in targets if name in shared}
        arrays = _read(elements, {name: one for name, one in targets.items() if name not in shared})
        write = backend.prepare_weights(module, {**arrays, **lazy}, adopt=adopt)
    write()


def _plan_for(
    side: Side,
    reader: Reader,
    config: object,
    before: manifest.Manifest | None,
    options: ConvertOptions,
    selection: Selection | None,
) -> planning.Plan:
    """Plan the conversion of a checkpoint to the weights of a module with that config."""
    is_tied = isinstance(config, ModelConfig) and bool(getattr(config, "tie", False))
    if options.rules is None:
        return planning.make(
            reader,
            source_layout=options.from_layout,
            target_layout=side,
            settings=options.settings,
            config=configs.of_reader(reader),
            manifest=before,
            for_module=True,
            selection=selection,
            tied=is_tied,
        )
    direction = rules_file.direction(options.from_layout, None)
    own = "" if before is None else before.layout
    table = rules_file.read(Path(options.rules), reader.tensors, own, direction)
    return planning.make(
        reader, settings=options.settings, table=table, manifest=before, for_module=True, selection=selection
    )


def _torch_names(config: object) -> list[str]:
    """Return the torch names of a module of ours; [] of any other."""
    return [row.rule.torch for row in config.parameters] if isinstance(config, specs.Config) else []


def _selected(
    reader: Reader, strip: str | None, drop: str | Sequence[str] | None, *, keep_wrappers: bool
) -> tuple[Reader, Selection | None]:
    """Return a checkpoint as `convert` reads it with `strip` and `drop`; without them, as it is."""
    if strip is None and drop is None:
        return reader, None
    return select(reader, strip, check_patterns(drop), keep_wrappers=keep_wrappers)


ARENA, ALIGNED = 1 << 28, 64
"""Bytes of a shared allocation for tensors, which is cheaper than separate ones; and alignment of each tensor."""


def _read(elements: Elements, targets: Mapping[str, planning.TargetTensor]) -> dict[str, Array]:
    """Return the arrays of targets: plain copies in a shared allocation, all others in separate memory."""
    arrays: dict[str, Array] = {}
    room, used = np.empty(0, np.uint8), 0
    plain = {
        name: one
        for name, one in targets.items()
        if len(one.moves) == 1 and one.moves[0].is_plain and one.info.dtype == one.source_dtype
    }
    left = sum(one.info.nbytes + ALIGNED for one in plain.values())
    for name, target in targets.items():
        if name not in plain:
            arrays[name] = elements.read(target)[0].reshape(target.info.shape)
            continue
        size = target.info.nbytes
        if used + size > room.nbytes:
            room, used = _fresh(max(size, min(left, ARENA))), 0
        array = room[used : used + size].view(numpy_dtype(target.info.dtype))
        elements.read_plain(target, array)
        arrays[name] = array.reshape(target.info.shape)
        used, left = used + size + -size % ALIGNED, left - size
    return arrays


def _fresh(size: int) -> Array:
    """Return page-aligned memory with its pages mapped.

    NumPy requests huge pages, for which the system may first move others: 0.2 to 3 s per GiB, against 0.4 to 0.9 for
    small pages mapped at once. Transposed tensors are worth huge pages: they are written to many pages at a time.
    """
    at_once = getattr(mmap, "MAP_POPULATE", None)
    if at_once is None:
        memory = np.empty(size + mmap.PAGESIZE, np.uint8)
        return memory[-memory.ctypes.data % mmap.PAGESIZE :][:size]
    return np.frombuffer(mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | at_once), np.uint8)


def load_part(
    side: Side,
    path: Path,
    module: object,
    prefix: str,
    *,
    rows: tuple[int, int] | None = None,
    numbered: bool = False,
) -> None:
    """Write a part of a model's tensors into a module of that part.

    Args:
        side: framework of the module.
        path: folder of the whole model.
        module: the part.
        prefix: prefix of the part's names in the model; "" for the parameters around the blocks.
        rows: the size of the vocabulary, and how many of its tokens the module has; None is all.
        numbered: replace each element of the checkpoint by its index, in float64.

    Raises:
        WeightsMismatchError: (a ValueError) missing and misshapen names, all of them.
    """
    backend = backends.load(side)
    wanted = backend.describe_weights(module)
    with _planned(side, path, numbered=numbered) as (reader, before, plan):
        targets = {one.info.name: one for one in plan.targets if not one.kept}
        elements = _elements(reader, before, plan)
        missing = [prefix + name for name in wanted if prefix + name not in targets]
        chosen = {name: targets[prefix + name] for name in wanted if prefix + name in targets}
        arrays = {name: _first_rows(array, rows) for name, array in _read(elements, chosen).items()}
        misshapen = [
            f"{prefix}{name}: expected {wanted[name][0]}, got {array.shape}"
            for name, array in arrays.items()
            if array.shape != wanted[name][0]
        ]
        if missing or misshapen:
            raise WeightsMismatchError(missing, (), misshapen)
    backend.set_weights(module, arrays, adopt=rows is None)


def read_part(
    path: Path, prefix: str, *, rows: tuple[int, int] | None = None, numbered: bool = False
) -> dict[str, Array]:
    """Return the checkpoint's tensors, under its own names, for a part of a model; see `load_part`."""
    with _planned("torch", path, numbered=numbered) as (reader, _, plan):
        inside = [
            one
            for one in plan.targets
            if not one.kept and (one.info.name.startswith(prefix) if prefix else not _BLOCK.match(one.info.name))
        ]
        names = dict.fromkeys(source for one in inside for source in one.sources)
        return {name: _first_rows(_whole(reader, name), rows) for name in names}


def _whole(reader: Reader, name: str) -> Array:
    """Return a tensor in memory that the caller may keep."""
    info = reader.tensors[name]
    array = np.empty(info.shape, numpy_dtype(info.dtype))
    reader.read_into(name, 0, array.reshape(-1).view(np.uint8).data)
    return array


_BLOCK = re.compile(r"trf_blocks\.[0-9]+\.")


def _first_rows(array: Array, rows: tuple[int, int] | None) -> Array:
    """Return the rows or columns of the first tokens of a table or a head, whose axes may be in either order."""
    if rows is None or rows[0] == rows[1]:
        return array
    return array[tuple(slice(0, rows[1]) if size == rows[0] else slice(None) for size in array.shape)]


def check_names(side: Side, path: Path, config: specs.DecoderConfig) -> None:
    """Check a folder's names and shapes against a model's; of numbers, only that tied matrices are equal.

    Raises:
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        CheckpointError: (a ValueError) a head that is tied to the embeddings has different numbers.
    """
    wanted = {
        (row.rule.torch if side == "torch" else row.rule.flax): (row.shape if side == "torch" else row.flax_shape)
        for row in config.parameters
    }
    tied = config.tied_weights(side)
    with _planned(side, path) as (reader, before, plan):
        targets = {one.info.name: one for one in plan.targets if not one.kept}
        shapes = {name: one.info.shape for name, one in targets.items()}
        elements = _elements(reader, before, plan)
        for name, other in tied.items():
            if {name, other} <= targets.keys():
                _check_tied(elements, targets[name], targets[other])
    misshapen = [
        f"{name}: expected {wanted[name]}, got {shapes[name]}"
        for name in wanted.keys() & shapes.keys()
        if wanted[name] != shapes[name]
    ]
    missing, unexpected = wanted.keys() - shapes.keys(), shapes.keys() - wanted.keys() - tied.keys()
    if missing or unexpected or misshapen:
        raise WeightsMismatchError(missing, unexpected, misshapen)


@contextlib.contextmanager
def _planned(
    side: Side, path: Path, *, numbered: bool = False
) -> Iterator[tuple[Reader, manifest.Manifest | None, planning.Plan]]:
    """Open a model folder, and plan the conversion of its tensors to a framework's."""
    with containers.open_reader(path) as reader:
        config, before = configs.of_reader(reader), manifest.of(reader, path)
        source = NumberedReader(reader) if numbered else reader
        plan = planning.make(source, target_layout=side, config=config, manifest=before, for_module=True)
        yield source, before, planning.evened(plan) if side == "torch" else plan


def _elements(reader: Reader, before: manifest.Manifest | None, plan: planning.Plan) -> Elements:
    """Return a reader of a plan's targets without a limit on tensors loaded whole."""
    most = max((one.info.nbytes for one in plan.targets), default=0)
    return Elements(reader, None if before is None else before.kept, most)


def _check_tied(elements: Elements, target: planning.TargetTensor, other: planning.TargetTensor) -> None:
    """Refuse a matrix that a config ties to another but whose numbers in the checkpoint differ."""
    if target.sources == other.sources:
        return
    values = elements.read(target)[0].reshape(target.info.shape), elements.read(other)[0].reshape(other.info.shape)
    same = values[0].shape == values[1].shape and np.array_equal(values[0], values[1])
    if not same and not (values[0].shape == values[1].T.shape and np.array_equal(values[0], values[1].T)):
        raise CheckpointError(
            f"{target.sources[0]} must hold the numbers of {other.sources[0]}, to which config.json ties it "
            "(tie_word_embeddings); set that to false where the head was trained apart"
        )


def save(
    side: Side,
    module: object,
    path: Path,
    to_layout: str,
    format: str | None,
    settings: Mapping[str, object] | None,
    overwrite: bool,
    config: Mapping[str, object] | None = None,
) -> None:
    """Write a module's weights to a checkpoint; see ``torch_attn.checkpoints.save``."""
    backend = backends.load(side)
    with python_errors(), contextlib.ExitStack() as stack:
        reader: Reader
        if backend.shared_names(module):
            stack.enter_context(backend.together(module))
            read = stack.enter_context(backend.reading(module))
            if read is None:  # another process writes
                return
            reader, max_memory = SharedReader(backend.describe_weights(module), read), verification.least_memory()
        else:
            reader, max_memory = ArraysReader(backend.get_weights(module)), None
        kind = containers.format_of(path, format)
        is_folder = configs.is_folder(path, kind)
        own = getattr(module, "config", None)
        if config is None and to_layout != "same" and dataclasses.is_dataclass(own):
            # A file has no place for it; then it is asked for settings alone, and may hold what JSON can't say.
            with contextlib.nullcontext() if is_folder else contextlib.suppress(TypeError):
                config = configs.own_config(type(module).__name__, own)
        plan = planning.make(
            reader,
            source_layout=None if to_layout == "same" else side,
            target_layout=to_layout,
            target_format=kind,
            is_folder=is_folder,
            settings=settings,
            config=config,
        )
        plan, kept = _with_masks(side, module, plan, to_layout)
        before = None if kept is None else manifest.Manifest(side, "", {}, {}, {}, kept)
        config = config if plan.config is None else plan.config
        if not is_folder and not _is_json(config):  # it was asked for settings alone
            config = {}
        options = ConvertOptions(overwrite=bool(overwrite))
        prepared = Prepared(plan, reader, before, path, kind, is_folder, config=config, options=options)
        job, budget = conducting.sole_job(prepared, max_memory)
        conducting.run(prepared, job, None, True, lambda done, total, name: None, budget)


def _is_json(config: object) -> bool:
    """Return whether a config can be written as JSON."""
    try:
        json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def plan_for_digests(
    side: Side, module: object, reader: Reader, layout: str, dtype: str | None, settings: Mapping[str, object] | None
) -> tuple[planning.Plan, Reader | None]:
    """Return the plan by which `save` would write a module, and the reader of the masks that go with it."""
    own, config = getattr(module, "config", None), None
    if layout != "same" and dataclasses.is_dataclass(own):
        with contextlib.suppress(TypeError):  # it may have values that JSON lacks
            config = configs.own_config(type(module).__name__, own)
    elif layout != "same" and own is not None and hasattr(own, "to_dict"):  # of `transformers`
        config = own.to_dict()
    plan = planning.make(reader, target_layout=layout, dtype=dtype, settings=settings, config=config)
    return _with_masks(side, module, plan, layout)


def _with_masks(
    side: Side, module: object, plan: planning.Plan, layout: str
) -> tuple[planning.Plan, ArraysReader | None]:
    """Return a plan that also writes the masks of a layout's classes, and the reader of those."""
    masks = _masks(backends.load(side).find_configs(module)) if layout in WITH_MASKS else {}
    kept = ArraysReader(masks) if masks else None
    return plan if kept is None else planning.with_kept(plan, kept), kept


def _masks(module_configs: Mapping[str, object]) -> dict[str, Array]:
    """Return the causal masks that the book's classes hold as buffers, and load strictly, by name.

    Args:
        module_configs: path -> config of our modules.
    """
    masks: dict[str, Array] = {}
    for path, config in module_configs.items():
        if isinstance(config, specs.GPTModelConfig):
            places = [f"trf_blocks.{index}.att." for index in range(config.n_layers)]
        elif isinstance(config, specs.MultiHeadAttentionWrapperConfig):
            places = [f"heads.{index}." for index in range(config.num_heads)]
        elif isinstance(config, specs.CausalAttentionConfig | specs.MultiHeadAttentionConfig):
            places = [""]
        else:
            continue
        hidden = np.triu(np.ones((config.context_length, config.context_length), np.float32), 1)
        masks |= {f"{path}.{place}mask".lstrip("."): hidden for place in places}
    return masks
