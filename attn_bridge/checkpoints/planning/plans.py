"""The classes of a conversion's plan, and its checks: settings, dtypes, elements that would be lost.

Numbers before a scaling that rounding can't invert are kept in the shape of ours. A kept tensor is named
``numbers-KIND/OURS``: the kind is the layout of these numbers, or ``plain`` for ours.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from ...models import layouts
from ...models.layout import FLAGS
from ...printable import printable
from ...weights import Region
from ...weights.placements import Change, Placement, refined
from ...weights.placements import is_float as is_float_dtype
from ...weights.rows import Check
from ...whole_files import JsonObject
from ..containers.base import CheckpointError, Reader, TensorInfo, numpy_dtype
from ..containers.strided import c_strides
from ..copying import Axis, Move, dense, move_of, pieces
from ..manifest import Manifest, new_digest
from ..selection import Selection

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""Short names of the dtypes that floating-point tensors can be cast to."""

IDLE = 128 << 20
"""Bytes that Python and its libraries take without any tensor."""


@dataclasses.dataclass(frozen=True)
class TargetTensor:
    """A tensor to write.

    Attributes:
        info: name, dtype, shape and file of the target.
        source_dtype: dtype of its source tensors.
        moves: the moves of its elements from the source.
        operation: the conversion of its elements, in words.
        kept: whether it is restored from tensors kept aside, instead of read from the source.
    """

    info: TensorInfo
    source_dtype: str
    moves: tuple[Move, ...]
    operation: str
    kept: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether its numbers differ from its sources'."""
        return any(move.steps for move in self.moves)

    @property
    def sources(self) -> list[str]:
        """Names of the source tensors."""
        return list(dict.fromkeys(move.source for move in self.moves))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion before it runs.

    Attributes:
        source: path of the source.
        source_format: its container.
        source_layout: its layout; "" for a change of container alone.
        target_layout: the same of the target.
        targets: all tensors to be written, in order.
        dropped: source tensor that the target can't hold -> the reason; kept aside.
        ties: moves of two tied tensors, which must have equal numbers, with the names (kept, left out).
        metadata: the target container's.
        restore: the manifest's data to restore the source.
        dtype: dtype of a cast of floating-point tensors; "" leaves them.
        notes: messages for the user.
        settings: from the user.
        checks: dropped source tensor -> function that checks its numbers against the reason.
        copies: dropped source tensor -> the source tensor whose numbers it must repeat.
        config: a folder's config.json instead of the source's; {} for no config, None for the source's own.
        scales: source tensor of quantised numbers -> the further tensors that it needs, such as scales.
        originals: tensors of ours with the source's numbers, kept aside because the target's numbers differ.
        carried: tensors of the same kind kept by earlier conversions that are still of use.
        files: names of the source's accompanying files that are copied, such as its tokenizer's.
        selection: which tensors of the source are taken, and the prefixes that their names lost.
        sizes: settings that names and shapes of the target don't determine, if no config.json will be next to it.
    """

    source: Path
    source_format: str
    source_layout: str
    target_layout: str
    targets: tuple[TargetTensor, ...]
    dropped: dict[str, str]
    ties: tuple[tuple[Move, Move, str, str], ...]
    metadata: JsonObject
    restore: JsonObject
    dtype: str
    notes: tuple[str, ...] = ()
    settings: JsonObject = dataclasses.field(default_factory=dict)
    checks: dict[str, Check] = dataclasses.field(default_factory=dict)
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    config: JsonObject | None = None
    scales: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    originals: tuple[TargetTensor, ...] = ()
    carried: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    selection: Selection = dataclasses.field(default_factory=Selection)
    sizes: dict[str, object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all target tensors."""
        return sum(target.info.nbytes for target in self.targets)

    @property
    def peak(self) -> int:
        """About how much memory the conversion takes without a bound, in bytes."""
        return IDLE + 3 * max((target.info.nbytes for target in self.targets), default=0)

    @functools.cached_property
    def _plain_targets(self) -> list[dict[str, object]]:
        return [dataclasses.asdict(target) for target in self.targets]

    def identity(self, reader: Reader) -> str:
        """Return a digest of the tensors to write, and of the files to read."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files()]
        parts: list[object] = [*self._plain_targets]
        parts += [self.selection.prefix] if self.selection.prefix else []
        parts += [dict(self.selection.dropped)] if self.selection.dropped else []
        parts += [sorted(self.selection.unwrapped)] if self.selection.unwrapped else []
        parts += [dict(self.selection.parts)] if self.selection.parts else []
        text = json.dumps([parts, self.dropped, self.metadata, self.restore, files], sort_keys=True, default=str)
        digest = new_digest()
        digest.update(text.encode())
        return digest.hexdigest()


def check_dtype(dtype: str | None) -> str:
    """Return the whole name of a dtype that floating-point tensors can be cast to; "" for None."""
    wide = DTYPES.get(dtype or "", dtype or "")
    if wide and wide not in DTYPES.values():
        raise CheckpointError(f"dtype ({printable(dtype)}) must be one of {', '.join(DTYPES)}")
    return wide


def check_settings(settings: Mapping[str, object], *pair: layouts.Layout) -> None:
    """Refuse settings that none of the layouts takes, and invalid values."""
    setting_names = {name for layout in pair for name in (*layout.settings, *layout.sizes)}
    setting_names |= {"prefix"} if any(len(layout.prefixes) > 1 for layout in pair) else set()
    for name, value in settings.items():
        if name not in setting_names:
            raise layouts.LayoutError(
                f"--set {printable(name)}: {' and '.join(layout.name for layout in pair)} take "
                + (", ".join(sorted(setting_names)) or "no settings")
            )
        if name == "prefix":
            if not any(value in layout.prefixes for layout in pair):
                choices = [repr(one) for layout in pair if len(layout.prefixes) > 1 for one in layout.prefixes]
                raise layouts.LayoutError(f"prefix ({printable(value)}) must be one of {', '.join(choices)}")
        elif name in FLAGS:
            if type(value) is not int or value not in (0, 1):
                raise layouts.LayoutError(f"{name} ({printable(value)}) must be 0 or 1")
        elif type(value) is not int or value < 1:
            raise layouts.LayoutError(f"{name} ({printable(value)}) must be a whole number of at least 1")


def check_heads(settings: Mapping[str, object], *described: Mapping[str, object]) -> None:
    """Refuse numbers of heads other than the config's: the model's config would not be that of its weights."""
    for name in ("num_heads", "num_kv_heads"):
        values = {given[name] for given in described if name in given} - {settings.get(name)}
        if name in settings and values:
            raise layouts.LayoutError(
                f"--set {name}={printable(settings[name])}: the model's config gives {values.pop()}"
            )


def check_nothing_lost(
    reader: Reader, decoded: layouts.DecodedTensors, targets: Sequence[TargetTensor], tied: Sequence[str]
) -> None:
    """Refuse a plan that leaves out elements of a source tensor, independently of the rows."""
    tied_counts = collections.Counter(decoded.placements[name].theirs for name in tied)
    moved = collections.Counter[str]()
    for target in targets:
        for move in target.moves:
            moved[move.source] += move.size
    for name, info in reader.tensors.items():
        if name not in decoded.dropped and not tied_counts[name] and moved[name] < math.prod(info.shape):
            raise CheckpointError(f"{printable(name)} {info.shape} would lose elements")


NOT_WEIGHTS = frozenset(("bool", "complex64", "complex128", "int16", "int32", "int64", "uint16", "uint32", "uint64"))
"""Dtypes that no weight of a layout has: a module of ours, or of another library, would lose or misread them.

Integers of 8 bits are numbers of schemes that may have their scales elsewhere, which a note names.
"""


def check_weights(layout: str, dtypes: Mapping[str, str]) -> None:
    """Refuse weights that are complex numbers, truth values or integers.

    Args:
        layout: of the target.
        dtypes: name -> dtype of the source's weights; masks and the like, which are kept aside, are not among them.

    Raises:
        CheckpointError: the first of them, and their number.
    """
    odd = [name for name, dtype in dtypes.items() if dtype in NOT_WEIGHTS]
    if odd:
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        raise CheckpointError(
            f"{printable(odd[0])}{more} is {dtypes[odd[0]]}, which no weight of {layout} is; --to same carries it, and "
            "so do rules of your own (--rules, docs/rules.md)"
        )


def cast(dtype: str, wanted: str) -> str:
    """Return a tensor's dtype after a cast of floating-point tensors to `wanted`; "" never casts."""
    return wanted if wanted and is_float(dtype) else dtype


def is_float(dtype: str) -> bool:
    """Return whether tensors of a dtype can be cast."""
    return dtype in DTYPES.values()


def notes_on_cast(reader: Reader, wide: str) -> list[str]:
    """Return notes on the precision and range that a cast loses."""
    notes = []
    for dtype in sorted({info.dtype for info in reader.tensors.values()}):
        if wide and is_float(dtype) and dtype != wide:
            source_info, target_info = (ml_dtypes.finfo(numpy_dtype(name)) for name in (dtype, wide))
            bits = int(source_info.nmant) - int(target_info.nmant)
            lost = [f"{bits} bits of every number"] if bits > 0 else []
            if float(np.log2(float(source_info.max))) > float(np.log2(float(target_info.max))) + 1:
                lost.append(f"what is beyond {float(target_info.max):.3g}")
            notes.append(f"{dtype} to {wide} " + (f"loses {' and '.join(lost)}" if lost else "loses nothing"))
    return notes


LAYERS = (".weight", ".bias", ".scale", ".shift")
"""Endings of our torch names of parameters that are combined with the input, which torch requires to have its dtype."""


def evened(plan: Plan) -> Plan:
    """Return a plan for a torch model whose layers have one floating-point dtype, the widest of those in the file.

    GGUF holds vectors in float32 next to matrices in float16, and torch multiplies equal dtypes only. Every number
    stays the same, as it does where JAX promotes both. Other parameters (sinks, decays) keep their dtype.
    """
    layers = [one for one in plan.targets if one.info.name.endswith(LAYERS) and is_float(one.info.dtype)]
    dtypes = {one.info.dtype for one in layers if not one.kept}
    if len(dtypes) < 2:
        return plan
    wide = max(dtypes - {"float16", "bfloat16"}, key=lambda name: numpy_dtype(name).itemsize, default="float32")
    evened = {one.info.name: dataclasses.replace(one.info, dtype=wide) for one in layers if not one.kept}
    targets = tuple(dataclasses.replace(one, info=evened.get(one.info.name, one.info)) for one in plan.targets)
    return dataclasses.replace(plan, targets=targets)


PREFIX, PLAIN = "numbers-", "plain"


def kind_of_numbers(layout: str, change: Change | None) -> str:
    """Return the kind of a layout's numbers."""
    return PLAIN if change is None else layout


def original_numbers(part: str, placement: Placement, kind: str, dtype: str) -> tuple[TensorInfo, Move]:
    """Return the tensor to keep aside for one of ours with the source's numbers, and its move.

    Raises:
        CheckpointError: its dtype can't be scaled.
    """
    if not is_float_dtype(numpy_dtype(dtype)):
        raise CheckpointError(
            f"{placement.theirs} ({dtype}) would have to be scaled, which takes floating-point numbers"
        )
    move = move_of(placement.theirs, placement.offset, 0, refined(placement.axes, dense(placement.shape)))
    return TensorInfo(f"{PREFIX}{kind}/{part}", dtype, placement.shape), move


def kept_move(manifest: Manifest | None, parts: Iterable[str], kind: str, placement: Placement) -> Move | None:
    """Return the move from kept numbers of that kind to a target, by the first matching name of ours; else None.

    Kept numbers are used only if their shape fits; they are compared with the source's when they are read.
    """
    if manifest is None or manifest.kept is None:
        return None
    for part in parts:
        info = manifest.kept.tensors.get(f"{PREFIX}{kind}/{part}")
        if info is not None and tuple(info.shape) == placement.shape and is_float_dtype(numpy_dtype(info.dtype)):
            return move_of(info.name, 0, placement.offset, refined(dense(placement.shape), placement.axes))
    return None


def carried_numbers(manifest: Manifest | None, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of earlier kept numbers to copy: all whose numbers the target does not have.

    Args:
        manifest: of an earlier conversion.
        kinds: our name -> the kind of the target's numbers.
    """
    if manifest is None or manifest.kept is None:
        return ()
    split = ((name, *name.removeprefix(PREFIX).partition("/")) for name in manifest.kept.tensors)
    return tuple(name for name, kind, _, part in split if name.startswith(PREFIX) and kinds.get(part) != kind)


def notes_on_numbers(rounded: Sequence[str], restored: Sequence[str]) -> list[str]:
    """Return notes on the target's tensors with scaled numbers, if any.

    Args:
        rounded: their names, except those of `restored`.
        restored: names of tensors restored from numbers kept aside.
    """
    notes = []
    if rounded:
        notes.append(
            f"{_first_of(rounded, 'hold')} numbers that are scaled or shifted, and so rounded; those of the source are "
            "kept aside, and the way back takes them"
        )
    if restored:
        notes.append(
            f"{_first_of(restored, 'take')} the numbers that were kept aside, but for those that have changed since, "
            "which are computed and rounded"
        )
    return notes


def _first_of(names: Sequence[str], verb: str) -> str:
    return (
        f"{printable(names[0])} and {len(names) - 1} more {verb}"
        if len(names) > 1
        else f"{printable(names[0])} {verb}s"
    )


def part_of(target: TargetTensor, region: Region) -> TargetTensor | None:
    """Return a target for a region of a target alone; None if the region's elements can't be separated.

    Moves are boxes, and so is the intersection of a region with one, also where tensors are split, fused or transposed.
    """
    return next(parts_of(target, [region]))


def parts_of(target: TargetTensor, regions: Iterable[Region]) -> Iterator[TargetTensor | None]:
    """Yield `part_of` for each region; what lies between the same bounds of an axis is cut once for all regions."""
    shape = target.info.shape
    strides = c_strides(shape)
    axes = [
        # Numbers kept aside lie as the whole does.
        None if move.original is not None or not math.prod(shape) else _by_axis(move, shape, strides)
        for move in target.moves
    ]
    cuts: dict[tuple[int, int, tuple[int, int]], list[Move]] = {}
    for region in regions:
        sizes = tuple(stop - start for start, stop in region)
        info = dataclasses.replace(target.info, shape=sizes)
        if not math.prod(sizes):
            yield dataclasses.replace(target, info=info, moves=())
            continue
        moves: list[Move] = []
        for number, (move, by_axis) in enumerate(zip(target.moves, axes, strict=True)):
            if by_axis is None:
                yield None
                break
            for axis, bounds in enumerate(region):
                if (number, axis, bounds) not in cuts:
                    cuts[number, axis, bounds] = _cut(move, by_axis[axis], bounds, shape[axis], strides[axis])
            along = [cuts[number, axis, bounds] for axis, bounds in enumerate(region)]
            moves += [_joined(move, some, region, sizes) for some in itertools.product(*along)]
        else:
            yield dataclasses.replace(target, info=info, moves=tuple(moves))


def _by_axis(move: Move, shape: Sequence[int], strides: Sequence[int]) -> list[list[Axis]] | None:
    """Return a move's axes by the target's axis that each runs along, with strides in that; None where one does not."""
    axes: list[list[Axis]] = [[] for _ in shape]
    for size, source_stride, target_stride in move.axes:
        while size > 1:
            along = [axis for axis, step in enumerate(strides) if step <= target_stride < step * shape[axis]]
            if not along:
                return None
            axis = along[0]
            room, rest = divmod(strides[axis] * shape[axis], target_stride)
            count = min(size, room)
            if target_stride % strides[axis] or (size > room and (rest or size % room)):
                return None
            axes[axis].append((count, source_stride, target_stride // strides[axis]))
            size, source_stride, target_stride = size // count, source_stride * count, target_stride * count
    for axis, box in enumerate(axes):
        first = move.target_offset // strides[axis] % shape[axis]
        if first + sum((size - 1) * step for size, _, step in box) >= shape[axis]:
            return None
    return axes


def _cut(move: Move, box: Sequence[Axis], bounds: tuple[int, int], size: int, stride: int) -> list[Move]:
    """Return the pieces of a move between two bounds of one of the target's axes; offsets are those along it alone.

    Args:
        move: the whole of it.
        box: the axes that run along the target's axis, with strides in that.
        bounds: where the pieces begin and end.
        size: of the target's axis.
        stride: of the target's axis.
    """
    ordered = tuple(sorted(box, key=lambda axis: -axis[2]))
    return list(pieces(Move(move.source, 0, move.target_offset // stride % size, ordered), *bounds))


def _joined(move: Move, along: Sequence[Move], region: Region, sizes: Sequence[int]) -> Move:
    """Return the part of a move that is a piece of it along each axis of a region."""
    source, target, axes = move.source_offset, 0, []
    for piece, (start, _), stride in zip(along, region, c_strides(sizes), strict=True):
        source += piece.source_offset
        target += (piece.target_offset - start) * stride
        axes += [(size, source_stride, step * stride) for size, source_stride, step in piece.axes]
    joined = move_of(move.source, source, target, axes)
    return dataclasses.replace(joined, steps=move.steps) if move.steps else joined
