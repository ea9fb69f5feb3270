"""Parts of tensors that ranks hold: what torch pickles of a DTensor, read without torch."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

from .calls import Global, Record, Strided

_HOMES = ("torch.distributed.tensor.", "torch.distributed._tensor.")
_KINDS = frozenset(
    {
        *(f"{home}{name}" for home in _HOMES for name in ("DTensor", "api.DTensor", "_api.DTensor")),
        *(f"{home}{name}.DTensorSpec" for home in _HOMES for name in ("_dtensor_spec", "placement_types")),
        *(f"{home}placement_types.{name}" for home in _HOMES for name in ("Shard", "_StridedShard", "Replicate")),
        "torch.distributed.device_mesh.DeviceMesh",
        *(f"torch.distributed._mesh_layout.{name}" for name in ("_MeshLayout", "_FlatLayout")),
    }
)
"""Classes whose attributes are read."""

_PARAMETERS = ("torch.nn.parameter.Parameter", "torch._utils._rebuild_parameter")

MAX_RANKS, MAX_PIECES = 1 << 16, 1 << 10
"""Ranks of a mesh, and pieces of an axis that it cuts before it is shared among ranks, at most."""

Runs = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class MeshPlacement:
    """How a tensor lies along an axis of the mesh.

    Attributes:
        axis: of the tensor, along which each rank has a part; None if each has all of it.
        pieces: into which the axis is cut first, each of which is shared among the ranks (``_StridedShard``).
    """

    axis: int | None
    pieces: int = 1


@dataclasses.dataclass(frozen=True)
class RankPart:
    """The part of a tensor that a rank holds.

    Attributes:
        local: its elements.
        shape: that of the whole tensor.
        mesh: ranks along each axis of the mesh.
        rank: which of them this is, along each axis.
        placements: of the tensor, for each axis of the mesh.
    """

    local: Strided
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    rank: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of the tensor."""
        return all(size == 1 or one.axis is None for size, one in zip(self.mesh, self.placements, strict=True))

    @property
    def number(self) -> int:
        """The rank, counted over the whole mesh."""
        return number_of(self.rank, self.mesh)


class PlacedError(Exception):
    """A DTensor lies over its ranks in a way that is not read, and why."""


def number_of(rank: Sequence[int], mesh: Sequence[int]) -> int:
    """Return the number of a rank of a mesh, in C order."""
    number = 0
    for at, size in zip(rank, mesh, strict=True):
        number = number * size + at
    return number


def is_dtensor(value: object) -> bool:
    """Return whether a pickled object is a DTensor, maybe as a parameter."""
    return _inner(value) is not None


def part_of(value: object) -> RankPart:
    """Return the part that a pickled DTensor is.

    Raises:
        PlacedError: its attributes are not those of torch, or it is placed in another way than by shards and replicas.
    """
    record = _inner(value)
    state = record.arguments[-1] if record is not None else None
    states = state if isinstance(state, tuple) else (state,)  # that of an object with slots is a pair
    attributes = next((one for one in states if isinstance(one, dict) and "_local_tensor" in one), {})
    if not isinstance(attributes.get("_local_tensor"), Strided):
        raise PlacedError("whose own part is no plain tensor")
    spec = _state(attributes.get("_spec"), "DTensorSpec")
    mesh = _state(spec.get("mesh"), "DeviceMesh")
    placements = spec.get("placements")
    if not isinstance(placements, list | tuple):
        raise PlacedError("without placements")
    shape, sizes = _shape(spec, record), _sizes(mesh)
    rank = _naturals(mesh.get("_coordinate_on_dim"))
    if rank is None or not len(rank) == len(sizes) == len(placements) or any(map(operator.ge, rank, sizes)):
        raise PlacedError("whose rank in its mesh is not known")
    _check_order(spec.get("shard_order"))
    placed = tuple(_placement(one, len(shape)) for one in placements)
    # A _StridedShard means that a later axis of the mesh cut first, as where FSDP is over tensor parallelism; two along
    # one axis are not read.
    strided = [one.axis for one in placed if one.pieces > 1]
    if len(set(strided)) < len(strided):
        raise PlacedError("an axis of which is cut into pieces twice")
    return RankPart(attributes["_local_tensor"], shape, sizes, rank, placed)


def runs_of(part: RankPart, rank: Sequence[int]) -> list[Runs]:
    """Return for each axis of the tensor the (start, stop) that a rank of the part's mesh holds, in order.

    As ``torch.chunk`` cuts them: all of one size but the last, which may be smaller, or empty.
    """
    axes: list[Runs] = [[(0, size)] for size in part.shape]
    for at, size, placement in zip(rank, part.mesh, part.placements, strict=True):
        if placement.axis is None or size == 1:
            continue
        whole = axes[placement.axis]
        pieces = [_chunk(whole, number, placement.pieces) for number in range(placement.pieces)]
        axes[placement.axis] = _joined([run for piece in pieces for run in _chunk(piece, at, size)])
    return axes


def _chunk(runs: Runs, number: int, count: int) -> Runs:
    """Return the part with that number of as many parts of some elements."""
    total = sum(stop - start for start, stop in runs)
    # torch.chunk rounds the size up, so that the last parts are short or empty.
    size = -(-total // count)
    first, last = min(number * size, total), min((number + 1) * size, total)
    part, offset = [], 0
    for start, stop in runs:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            part.append((start + low, start + high))
        offset += stop - start
    return part


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _inner(value: object) -> Record | None:
    """Return the pickled DTensor that a value is or, as a parameter, has."""
    if isinstance(value, Record) and value.name in _PARAMETERS and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Record) or not value.arguments:
        return None
    kinds = [one for one in value.arguments if isinstance(one, Global) and one.name.endswith(".DTensor")]
    return value if any(one.name in _KINDS for one in kinds) else None


def _state(record: object, kind: str) -> Mapping[str, object]:
    """Return the attributes of an object of a class."""
    is_one = isinstance(record, Record) and record.name in _KINDS and record.name.endswith(f".{kind}")
    if not is_one or not isinstance(record, Record) or not isinstance(record.state, dict):
        raise PlacedError(f"without its {kind}")
    return record.state


def _naturals(value: object) -> tuple[int, ...] | None:
    is_sizes = isinstance(value, list | tuple) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if is_sizes and isinstance(value, list | tuple) else None


def _shape(spec: Mapping[str, object], record: Record | None) -> tuple[int, ...]:
    """Return the shape of the whole tensor: that of its metadata, which other arguments have to have as well."""
    meta = spec.get("tensor_meta")
    sizes = meta.arguments[0] if isinstance(meta, Record) and meta.arguments else None
    shape = _naturals(sizes)
    if shape is None:
        raise PlacedError("whose shape is not known")
    inner = next((one for one in (record.arguments if record else ()) if isinstance(one, tuple)), ())
    if any(isinstance(one, tuple) for one in inner) and shape not in inner:
        raise PlacedError("that has two shapes")
    return shape


def _sizes(mesh: Mapping[str, object]) -> tuple[int, ...]:
    """Return the sizes of a mesh: of its tensor of ranks, or of its layout."""
    sizes: Sequence[int] | None = None
    layout = mesh.get("_layout")
    if isinstance(ranks := mesh.get("mesh"), Strided):
        sizes = _naturals(ranks.shape)
    elif isinstance(layout, Record):  # of torch since 2.9
        state = _state(layout, "_MeshLayout")
        axes = state.get("axes")
        if isinstance(axes, tuple):
            axes = [_naturals(_state(axis, "_FlatLayout").get("shape")) for axis in axes]
        else:
            shape = state.get("shape")
            shape = (shape,) if isinstance(shape, int) else shape
            axes = [_flat(size) for size in shape] if isinstance(shape, tuple) else None
        # torch leaves sizes of 1 out: an axis of one rank has none.
        sizes = [math.prod(axis) for axis in axes if axis is not None] if axes and None not in axes else None
    if not sizes or not 0 < math.prod(sizes) <= MAX_RANKS:
        raise PlacedError("whose mesh of ranks is not known")
    return tuple(sizes)


def _flat(size: object) -> tuple[int, ...] | None:
    """Return the sizes of an axis, which may be nested."""
    if not isinstance(size, tuple):
        return _naturals((size,))
    parts = [_naturals((one,)) for one in size]
    return None if None in parts else tuple(number for part in parts if part for number in part)


def _placement(record: object, axes: int) -> MeshPlacement:
    if not isinstance(record, Record) or record.name not in _KINDS:
        kind = record.name.rpartition(".")[2] if isinstance(record, Record) else "of an unknown kind"
        raise PlacedError(f"placed as {kind}")
    kind = record.name.rpartition(".")[2]
    if kind == "Replicate":
        return MeshPlacement(None)
    state = record.state if isinstance(record.state, dict) else {}
    axis, pieces = state.get("dim"), state.get("split_factor", 1)
    is_known = type(pieces) is int and 0 < pieces <= MAX_PIECES
    if (
        type(axis) is not int
        or not -axes <= axis < axes
        or not is_known
        or (kind == "_StridedShard" and "split_factor" not in state)
    ):
        raise PlacedError(f"placed as {kind} along no axis of its own")
    return MeshPlacement(axis % axes, pieces)


def _check_order(order: object) -> None:
    """Refuse an order of the mesh's axes that is not its own."""
    for entry in order if isinstance(order, list | tuple) else ():
        axes = entry.arguments[-1] if isinstance(entry, Record) and entry.arguments else ()
        if not isinstance(axes, tuple) or list(axes) != sorted(axes, key=lambda axis: (type(axis) is not int, axis)):
            raise PlacedError("whose shards lie in an order of their own")
