"""Makes the plan of a conversion from headers alone: every target tensor, its sources, and the memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...models import layouts
from ...models.unknown_names import trees
from ...printable import printable
from ...weights import WeightsMismatchError
from ...weights.placements import NO_STEPS, Placement, Steps, common, refined
from ...whole_files import JsonObject
from .. import configs, rewritten_configs
from ..containers.base import CheckpointError, Reader, TensorInfo
from ..copying import Move, dense, move_of
from ..manifest import Manifest
from ..readers import Filtered
from ..selection import Selection
from . import model_checks, plans, reading
from .plans import Plan, TargetTensor, cast, check_dtype, check_heads, check_nothing_lost, check_settings, notes_on_cast

TWINS = {"flax": "torch", "nnx-mha": "torch", "linen-mha": "torch"}
"""Layout -> default target layout; all others become flax."""


def make(
    reader: Reader,
    *,
    source_layout: str | None = None,
    target_layout: str | None = None,
    target_format: str = "safetensors",
    is_folder: bool = False,
    dtype: str | None = None,
    settings: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    table: tuple[layouts.Layout, layouts.Layout] | None = None,
    manifest: Manifest | None = None,
    for_module: bool = False,
    selection: Selection | None = None,
    tied: bool = False,
) -> Plan:
    """Plan a conversion.

    Args:
        reader: the open source.
        source_layout: layout of the source; None detects it.
        target_layout: layout of the target; None is the twin of the source's.
        target_format: container of the target.
        is_folder: whether the target is a folder, which may contain several files.
        dtype: dtype of a cast of floating-point tensors; None leaves them.
        settings: values that names and shapes don't determine.
        config: the model's config.json.
        table: a user's own pair of layouts, source and target, instead of named ones.
        manifest: of an earlier conversion to the source.
        for_module: whether the target is a module with our plain names, not a checkpoint. The manifest's data for
            restoring a checkpoint (its settings, its order, and names that it lacked) are then ignored.
        selection: which tensors of the source are taken, of a conversion; None: its names may begin with anything.
        tied: whether the embeddings are the head regardless of the config.

    Raises:
        LayoutError: names, shapes or settings that do not fit.
        WeightsMismatchError: names that are missing, and names that no row covers.
        CheckpointError: tensors that can't be combined or cast.
    """
    if not reader.tensors:
        raise CheckpointError(f"{reader.path} holds no tensor")
    reader.check_read(reader.unread)
    wide = check_dtype(dtype)
    if for_module and manifest is not None:
        manifest = dataclasses.replace(manifest, restore={})
    theirs = None
    if table is not None:
        ours, theirs = table
    elif source_layout is not None or target_layout != "same":
        ours = (
            layouts.find(source_layout) if source_layout else reading.layout_of(reader.tensors, config or {}, manifest)
        )
        theirs = layouts.find(target_layout or TWINS.get(ours.name, "flax")) if target_layout != "same" else ours
    excluded = ours.apart(reader.tensors, config) if theirs is not None and table is None else {}
    is_text = False
    if excluded and target_layout != "same":
        reader = Filtered(reader, excluded, ())
        selection = (selection or Selection()).without(excluded)
        is_text = any(part.is_tower for part in excluded.values())
        config = rewritten_configs.of_text(config or {}) if is_text else config
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    is_decorated = for_module and theirs is not None and theirs.is_decorated(reader.tensors)
    if selection is not None and theirs is not None and table is None and not ours.whole:
        trees.check(shapes, ours, source_layout is not None, selection.prefix)
    if theirs is None or (theirs is ours and table is None and not is_decorated and not is_text):
        if settings:
            raise layouts.LayoutError(
                f"--set {printable(next(iter(settings)))}: the layout stays, which takes no settings"
            )
        covered = {} if theirs is None else theirs.match(reader.tensors)[1]
        unexpected = set() if theirs is None else reader.tensors.keys() - covered.keys() - excluded.keys()
        is_whole = theirs is not None and target_layout != "same" and selection is not None
        missing = theirs.missing(covered) if theirs is not None and is_whole else []
        if unexpected or missing:
            raise WeightsMismatchError(missing, unexpected)
        if theirs is not None:
            fitting = {name: info for name, info in reader.tensors.items() if name not in excluded}
            reading.check(theirs, fitting, config or {})
            if table is None and target_layout != "same":
                weights = {name: info.dtype for name, info in fitting.items() if not covered[name][0].reason}
                plans.check_weights(theirs.name, weights)
        same = _same(reader, "" if theirs is None else theirs.name, target_format, is_folder, wide, manifest)
        same = dataclasses.replace(same, selection=selection or Selection())
        if manifest is not None:
            same = dataclasses.replace(same, sizes=manifest.sizes)
        return (
            same
            if theirs is None
            else dataclasses.replace(
                same, config=rewritten_configs.of_target(config or {}, theirs, shapes, is_needed=is_folder)
            )
        )
    back = manifest.restore.get(theirs.name, {}) if manifest else {}
    check_settings(settings or {}, ours, theirs)
    check_settings(back.get("settings", {}), theirs)
    own_settings = ours.read_settings(configs.with_defaults(config or {}))
    check_heads(settings or {}, own_settings, theirs.read_settings(configs.with_sizes(config or {})))
    manifest_sizes: Mapping[str, object] = {}
    if manifest is not None and manifest.layout in ("", ours.name):  # "" where the container alone changed
        manifest_sizes = {
            name: value for name, value in manifest.sizes.items() if name in (*ours.settings, *ours.sizes)
        }
        check_settings(manifest_sizes, ours)
    all_settings = {**manifest_sizes, **own_settings, **(settings or {})}
    is_part = selection is not None and bool(selection.dropped)
    decoded = reading.decode(ours, theirs, reader.tensors, all_settings, config or {}, is_part=is_part)
    head = True if tied else model_checks.tied_by(config or {}, shapes)
    model_checks.check_head(reader.path, (ours, theirs), decoded.placements, head, settings or {}, manifest, selection)
    if table is None and not is_part and selection is not None:
        model_checks.check_parameters(
            config or {}, ours, shapes, decoded.placements, {**all_settings, **decoded.restore}
        )
    written = rewritten_configs.of_target(config or {}, theirs, shapes, is_needed=is_folder)
    if is_text:
        written = _of_text(written, config)
        decoded.restore.pop("prefix", None)  # that of the multimodal model, which is not written again
    wanted = {
        **theirs.read_settings(written or configs.with_sizes(config or {})),
        **back.get("settings", {}),
        **(settings or {}),
    }
    # A file, a folder of Orbax or DCP, and one without config.json: its manifest has those settings.
    own_sizes, sizes = (
        {}
        if is_folder and config
        else {name: value for name, value in taken.items() if name in (*layout.settings, *layout.sizes)}
        for layout, taken in (
            (ours, all_settings),
            (theirs, {**theirs.read_settings(configs.with_sizes(config or {})), **(settings or {})}),
        )
    )
    try:
        encoded = theirs.encode({name: placed.shape for name, placed in decoded.placements.items()}, wanted)
    except WeightsMismatchError as error:
        model_checks.refuse_family(config or {}, theirs, shapes, error)
        raise
    order = {name: position for position, name in enumerate(reader.tensors)}
    targets = []
    originals: dict[Placement, TargetTensor] = {}
    kinds: dict[str, str] = {}
    named: dict[Placement, list[str]] = {}
    for part, source_part in decoded.placements.items():
        named.setdefault(source_part, []).append(part)
    for name, parts in encoded.parts.items():
        moves = []
        for part, target_part in parts.items():
            source_part = decoded.placements[part]
            *further, move = (
                move_of(one.theirs, one.offset, other.offset, refined(one.axes, other.axes))
                for one, other in common(source_part, target_part)
            )
            moves += further
            kinds[part] = plans.kind_of_numbers(theirs.name, target_part.change)
            if source_part.change != target_part.change:
                own, kind = (
                    reader.tensors[source_part.theirs].dtype,
                    plans.kind_of_numbers(ours.name, source_part.change),
                )
                aside, kept_move = plans.original_numbers(named[source_part][0], source_part, kind, own)
                originals.setdefault(source_part, TargetTensor(aside, own, (kept_move,), "keep"))
                original = plans.kept_move(manifest, [part, *named[source_part]], kinds[part], target_part)
                move = dataclasses.replace(move, steps=Steps(source_part.change, target_part.change), original=original)
            moves.append(move)
        moves.sort(key=lambda move: move.target_offset)
        dtypes = {reader.tensors[move.source].dtype for move in moves}
        if len(dtypes) > 1:
            raise CheckpointError(f"{name} would be made of tensors of several dtypes: {', '.join(sorted(dtypes))}")
        own = dtypes.pop()
        if sum(move.size for move in moves) != math.prod(encoded.shapes[name]):
            raise CheckpointError(f"{name} would not be filled by {', '.join(sorted(parts))}")
        info = TensorInfo(name, cast(own, wide), encoded.shapes[name])
        targets.append(TargetTensor(info, own, tuple(moves), _words(moves, own, info.dtype)))
    if table is None:
        plans.check_weights(theirs.name, {move.source: one.source_dtype for one in targets for move in one.moves})
    check_nothing_lost(reader, decoded, targets, [left_out for _, left_out in encoded.ties])
    if written:
        tied = not any("out_head.weight" in parts for parts in encoded.parts.values())
        written = rewritten_configs.finished(written, config or {}, tied=tied, infos=[one.info for one in targets])
    targets = _without_copies(targets, back.get("order", ()))
    targets.sort(key=lambda target: min(order[move.source] for move in target.moves))
    ties = []
    by_config = model_checks.tied_pairs(decoded.placements, encoded.ties) if table is None and head else []
    for kept, left_out in (*encoded.ties, *by_config):
        kept_placement, copy_placement = decoded.placements[kept], decoded.placements[left_out]
        if kept_placement != copy_placement:
            first, second = (
                move_of(placed.theirs, placed.offset, 0, refined(placed.axes, dense(placed.shape)))
                for placed in (kept_placement, copy_placement)
            )
            ties.append((first, second, kept, left_out))
    restore: JsonObject = dict(manifest.restore) if manifest else {}
    consumed = restore.pop(theirs.name, {})
    restore[ours.name] = {
        "settings": {**own_sizes, **decoded.restore},
        "dropped": sorted(decoded.dropped),
        "format": reader.format,
        "metadata": reader.metadata,
        "order": list(reader.tensors),
        "files": {name: info.file for name, info in reader.tensors.items() if info.file},
    }
    targets += _kept_targets(manifest, theirs.name, consumed, {target.info.name for target in targets}, wide)
    metadata = consumed.get("metadata", {}) if consumed.get("format") == target_format else {}
    if consumed.get("format") != target_format == "safetensors":
        metadata = _written_for(theirs.name)
    targets = _in_files(targets, reader, consumed, target_format, is_folder)
    return Plan(
        reader.path,
        reader.format,
        ours.name,
        theirs.name,
        tuple(targets),
        decoded.dropped,
        tuple(ties),
        _in_container(metadata, targets, target_format),
        restore,
        wide,
        (
            *notes_on_cast(reader, wide),
            *_kept_notes(targets),
            *([] if table else reading.notes_on_config(config or {}, shapes)),
        ),
        dict(settings or {}),
        decoded.checks,
        decoded.copies,
        written,
        originals=tuple(originals.values()),
        carried=plans.carried_numbers(manifest, kinds),
        selection=selection or Selection(),
        sizes=sizes,
    )


def _of_text(written: dict[str, object] | None, config: Mapping[str, object] | None) -> dict[str, object] | None:
    """Return the config.json of a text model from a multimodal one, whose own config is not copied."""
    return dict(config) if written is None and config else written


def _without_copies(targets: list[TargetTensor], order: Sequence[str]) -> list[TargetTensor]:
    """Return the targets without tied copies that a restored checkpoint did not have.

    Args:
        targets: all of them.
        order: names of the restored checkpoint; empty if unknown.
    """
    if not order:
        return targets
    sources = {
        (one.moves[0].source, one.info.nbytes) for one in targets if one.info.name in order and len(one.moves) == 1
    }
    return [
        one
        for one in targets
        if one.info.name in order or len(one.moves) > 1 or (one.moves[0].source, one.info.nbytes) not in sources
    ]


def _same(
    reader: Reader, layout: str, target_format: str, is_folder: bool, wide: str, manifest: Manifest | None
) -> Plan:
    """Plan a change of container, with every tensor as it is."""
    targets = []
    for name, info in reader.tensors.items():
        move = move_of(name, 0, 0, [(info.nbytes // info.itemsize, 1, 1)])
        target_info = TensorInfo(name, cast(info.dtype, wide), info.shape)
        targets.append(TargetTensor(target_info, info.dtype, (move,), _words([move], info.dtype, target_info.dtype)))
    files = {name: info.file for name, info in reader.tensors.items() if info.file}
    restore = dict(manifest.restore) if manifest else {}
    key = f"container {reader.format}"
    consumed = restore.pop(f"container {target_format}", {})
    restore[key] = {"metadata": reader.metadata, "files": files, "order": list(reader.tensors)}
    metadata = reader.metadata if reader.format == target_format else consumed.get("metadata", {})
    if layout and target_format == "safetensors" and not consumed and reader.format != target_format:
        metadata = _written_for(layout)
    arranged = _in_files(targets, reader, consumed, target_format, is_folder)
    return Plan(
        reader.path,
        reader.format,
        layout,
        layout,
        tuple(arranged),
        {},
        (),
        _in_container(metadata, arranged, target_format),
        restore,
        wide,
        tuple(notes_on_cast(reader, wide)),
        carried=plans.carried_numbers(manifest, {}),
    )


def _written_for(layout: str) -> dict[str, object]:
    """Return the metadata key with the framework of a safetensors file, without which transformers refuses it."""
    return {"format": "flax" if layout in TWINS or layout.startswith("flax-") else "pt"}


def kept_name(layout: str, name: str) -> str:
    """Return the name under which a dropped tensor is kept aside."""
    return f"{layout}/{name}"


def _kept_targets(
    manifest: Manifest | None, layout: str, consumed: Mapping[str, Any], others: set[str], wide: str
) -> list[TargetTensor]:
    """Return the targets that an earlier conversion kept aside and this conversion restores."""
    if manifest is None or manifest.kept is None:
        return []
    targets = []
    for name in consumed.get("dropped", []):
        info = manifest.kept.tensors.get(kept_name(layout, name))
        if info is not None and name not in others:
            move = move_of(info.name, 0, 0, [(info.nbytes // info.itemsize, 1, 1)])
            target_info = TensorInfo(name, cast(info.dtype, wide), info.shape)
            targets.append(TargetTensor(target_info, info.dtype, (move,), "restore", kept=True))
    return targets


def with_kept(plan: Plan, kept: Reader) -> Plan:
    """Return a plan that also writes tensors that do not come from the source."""
    file = plan.targets[-1].info.file
    more = []
    for name, info in kept.tensors.items():
        move = move_of(name, 0, 0, [(info.nbytes // info.itemsize, 1, 1)])
        more.append(TargetTensor(dataclasses.replace(info, file=file), info.dtype, (move,), "add", kept=True))
    return dataclasses.replace(plan, targets=(*plan.targets, *more))


WHOLE = "model.safetensors"


def _in_files(
    targets: Sequence[TargetTensor], reader: Reader, consumed: Mapping[str, Any], target_format: str, is_folder: bool
) -> list[TargetTensor]:
    """Sort the targets, and assign each to its source's file if both have several."""
    rank = {name: position for position, name in enumerate(consumed.get("order", []))}
    ordered = sorted(targets, key=lambda target: rank.get(target.info.name, len(rank)))
    if not is_folder or target_format != "safetensors":
        return ordered
    names = _safetensors_names(info.file for info in reader.tensors.values())
    before = consumed.get("files", {})
    earlier = _safetensors_names(before.values())
    files: list[str] = []
    for target in ordered:
        own = "" if target.kept else reader.tensors[target.moves[0].source].file
        usual = files[-1] if target.kept and files else names.get(own, WHOLE)
        files.append(earlier.get(before.get(target.info.name, ""), usual))
    first = {file: position for position, file in reversed(list(enumerate(files)))}
    targets_in_files = [
        dataclasses.replace(target, info=dataclasses.replace(target.info, file=file))
        for target, file in zip(ordered, files, strict=True)
    ]
    return sorted(targets_in_files, key=lambda target: first[target.info.file])


def _safetensors_names(files: Iterable[str]) -> dict[str, str]:
    """Return name of a source's file -> that of the file of safetensors which takes its tensors."""
    names = sorted({file for file in files if file})
    if len(names) > 1 and not all(file.endswith(".safetensors") for file in names):
        return {file: f"model-{number:05d}-of-{len(names):05d}.safetensors" for number, file in enumerate(names, 1)}
    return {file: file if file.endswith(".safetensors") else WHOLE for file in names}


def _in_container(
    metadata: Mapping[str, Any], targets: Sequence[TargetTensor], target_format: str
) -> dict[str, object]:
    """Return metadata in the form that the target's container has: one for all, or one for each file."""
    files = list(dict.fromkeys(target.info.file for target in targets if target.info.file))
    per_file = isinstance(metadata.get("files"), Mapping)  # a text of that name is a single file's own
    if target_format != "safetensors":
        return dict(metadata)
    if files and not per_file:
        return {"files": {file: dict(metadata) for file in files}} if metadata else {}
    if not files and per_file:
        every = list(metadata["files"].values())
        return dict(every[0]) if every and all(one == every[0] for one in every) else {}
    return dict(metadata)


def _words(moves: Sequence[Move], own: str, target_dtype: str) -> str:
    words = [] if all(dataclasses.replace(move, steps=NO_STEPS).is_plain for move in moves) else ["rearrange"]
    words += ["scale"] if any(move.steps for move in moves) else []
    if len(moves) > 1:
        words.append(f"fuse {len(moves)}")
    words += [f"{own} to {target_dtype}"] if own != target_dtype else []
    return ", ".join(words) or "copy"


def _kept_notes(targets: Sequence[TargetTensor]) -> list[str]:
    """Return notes on tensors with scaled numbers, and on those restored from the numbers kept before scaling."""
    rounded: list[str] = []
    restored: list[str] = []
    for target in targets:
        if target.is_changed:
            is_kept = all(move.original is not None for move in target.moves if move.steps)
            (restored if is_kept else rounded).append(target.info.name)
    return plans.notes_on_numbers(rounded, restored)
