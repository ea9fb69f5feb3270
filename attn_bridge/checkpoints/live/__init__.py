"""Digests of live weights, sharded or not, under any layout's names: those of a conversion to that layout.

digests(module) of a torch or Flax module, or of a checkpoint digests(module).compare(other) name -> difference, and the
ranks that hold it
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import backends
from ...weights import Region, overlap
from .. import configs, containers, manifest, modules, planning
from ..containers import remote
from ..containers.base import CheckpointError, Reader
from ..elements import Array, Elements
from ..manifest import new_digest
from ..readers import SharedReader
from ..verification import Verification, check_dropped, check_ties
from . import results, tiles
from .results import Digests, ShardDigest, TensorDigest, read

__all__ = ["Digests", "ShardDigest", "TensorDigest", "compare", "digests", "read", "verify"]

Shards = Mapping[str, Sequence[ShardDigest]]


def digests(
    source: object, *, layout: str | None = None, dtype: str | None = None, settings: Mapping[str, object] | None = None
) -> Digests:
    """Return the digest of every tensor that a conversion of weights to a layout would write.

    Sharded weights are read in order in pieces of at most some MiB from the devices that hold them; every rank of their
    mesh must call this, and all get the same result. In addition, each rank digests its own shards.

    Args:
        source: any torch or Flax module; or a path of a checkpoint, of a manifest or of digests in JSON.
        layout: layout of names and shapes; None keeps the source's own.
        dtype: cast floating-point tensors first: bf16, f16, f32, f64; None never casts.
        settings: values that names and shapes don't determine.

    Raises:
        TypeError: neither a module nor a path, or a tensor that has no plain numbers.
        CheckpointError: (a ValueError) the checkpoint is malformed.
        LayoutError: (a ValueError) the weights do not fit the layout; `WeightsMismatchError` lists names.
    """
    side = backends.framework_of(source)
    if side is not None and not isinstance(source, tuple) and not hasattr(source, "framework"):
        return _of_module(side, source, layout, dtype, settings)
    if not isinstance(source, (str, os.PathLike, remote.RemotePath)):
        raise TypeError(f"digests takes a torch.nn.Module, a flax.nnx.Module or a path, got {type(source).__name__}")
    return _of_path(remote.to_path(source), layout, dtype, settings)


def _of_path(path: Path, layout: str | None, dtype: str | None, settings: Mapping[str, object] | None) -> Digests:
    record = results.read(path)
    if record is None and path.name.endswith(manifest.IN_FOLDER) and path.is_file():
        is_inside = path.name == manifest.IN_FOLDER
        checkpoint = path.parent if is_inside else path.with_name(path.name[: -len(manifest.BESIDE_FILE)])
        file_manifest = manifest.read(checkpoint)
        if file_manifest is not None:
            record = results.of_manifest(file_manifest, str(path))
    if record is not None:
        wide = planning.check_dtype(dtype)
        if layout not in (None, record.layout) or wide not in ("", record.dtype):
            raise CheckpointError(
                f"{path} holds digests of layout {record.layout or 'same'} and dtype {record.dtype or 'as held'}, "
                "which can't be made others; take them anew"
            )
        return record
    with containers.open_reader(path) as reader:
        before = manifest.of(reader, path)
        config = configs.of_reader(reader) if layout not in (None, "same") else None
        plan = planning.make(
            reader,
            target_layout=layout or "same",
            dtype=dtype,
            settings=settings,
            config=config,
            manifest=before,
        )
        own = before.layout if before is not None and layout is None else plan.target_layout
        found_tensors = _tensors(plan, reader, None if before is None else before.kept, {})
        return Digests(own, plan.dtype, found_tensors, source=str(path))


def _of_module(
    side: backends.Framework,
    module: object,
    layout: str | None,
    dtype: str | None,
    settings: Mapping[str, object] | None,
) -> Digests:
    backend = backends.load(side)
    own_digests: Digests | None = None
    with backend.together(module):
        own = {name: [_shard(*one) for one in some] for name, some in backend.held_parts(module).items()}
    shards = _merged(backend.gathered(module, own))
    with backend.together(module), backend.reading(module) as read:
        if read is not None:
            reader = SharedReader(backend.describe_weights(module), read)
            plan, kept = modules.plan_for_digests(side, module, reader, layout or "same", dtype, settings)
            tensors = _tensors(plan, reader, kept, shards)
            own_digests = Digests(plan.target_layout, plan.dtype, tensors, shards, backend.PLACES)
    everywhere: list[Digests | None] = backend.gathered(module, own_digests)
    return next(one for one in everywhere if one is not None)


def _shard(rank: int, region: Region, read: Callable[[Region], Array], itemsize: int) -> ShardDigest:
    """Return the digest of one shard, read piece by piece."""
    digest = new_digest()
    for _, _, box in tiles.boxes([stop - start for start, stop in region], itemsize):
        digest.update(tiles.bytes_of(read(box)))
    return ShardDigest(rank, region, digest.hexdigest())


def _merged(everywhere: Sequence[Shards]) -> dict[str, tuple[ShardDigest, ...]]:
    names = dict.fromkeys(name for one in everywhere for name in one)
    return {
        name: tuple(sorted((one for some in everywhere for one in some.get(name, ())), key=lambda shard: shard.place))
        for name in names
    }


def _tensors(plan: planning.Plan, reader: Reader, kept: Reader | None, shards: Shards) -> dict[str, TensorDigest]:
    """Return the digests of a plan's targets, reading pieces in order."""
    check_ties(plan, reader, tiles.PIECE)
    check_dropped(plan, reader)
    elements = Elements(reader, kept, tiles.PIECE)
    tensor_digests: dict[str, TensorDigest] = {}
    for target in plan.targets:
        info, digest = target.info, tiles.TiledDigest(target.info.shape)
        for start, stop, box in tiles.boxes(info.shape, info.itemsize):
            array, _ = elements.read(target, start, stop)
            digest.update(box, array)
            elements.release(array)
        places, set_indices = _places(target, reader, shards)
        tensor_digests[info.name] = TensorDigest(
            info.dtype, info.shape, digest.hexdigest(), digest.tiles(), places, set_indices
        )
    return tensor_digests


def _places(
    target: planning.TargetTensor, reader: Reader, shards: Shards
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the distinct sets of ranks that hold tiles of a target, and for each tile the index of its set."""
    if target.kept or not any(shards.get(name) for name in target.sources):
        return (), ()
    sets: dict[tuple[int, ...], int] = {}
    set_indices = []
    # If a tensor's tiles can't be separated, each may be on all ranks that hold any of it.
    for part in planning.parts_of(target, tiles.regions(target.info.shape)):
        places: set[int] = set()
        for move in (target if part is None else part).moves:
            if move.source not in shards:
                continue
            source_region = tiles.source_region(move, reader.tensors[move.source].shape)
            places |= {one.place for one in shards[move.source] if overlap(one.region, source_region) is not None}
        set_indices.append(sets.setdefault(tuple(sorted(places)), len(sets)))
    return tuple(sets), tuple(set_indices)


def compare(own: Digests, other: object, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Compare digests with a checkpoint, a manifest, other digests or a module; return name -> difference.

    A checkpoint is read under the names and in the dtype of the digests.
    """
    if isinstance(other, Digests):
        return own.compare(other)
    path = remote.to_path(other) if isinstance(other, (str, os.PathLike, remote.RemotePath)) else None
    is_known = path is not None and (path.name.endswith(manifest.IN_FOLDER) or results.read(path) is not None)
    if is_known:
        return own.compare(digests(other))
    other_digests = digests(other, layout=own.layout or None, dtype=own.dtype or None, settings=settings)
    return own.compare(other_digests if own.layout else dataclasses.replace(other_digests, layout=""))


def verify(own: Digests, other: object, settings: Mapping[str, object] | None = None) -> Verification:
    """Compare digests with another source, see `compare`, and return the result as a `Verification`."""
    problems = compare(own, other, settings)
    return Verification(not problems, len(own.tensors), problems, by_digest=True, by_source=False)
