"""Checks of a conversion: before and after its run, and of its result, by digests and by converting its source again.

`cuts` and `budget_of` cut tensors so that conversions and checks stay within their memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ..models import layouts
from ..printable import printable, shell_word
from ..weights import WeightsMismatchError
from . import adapters, configs
from .containers import remote
from .containers.base import CheckpointError, Reader, TensorInfo, numpy_dtype
from .elements import Elements
from .manifest import DIGEST, Manifest, new_digest
from .options import ConvertOptions
from .planning.plans import IDLE, Plan, TargetTensor
from .planning.reading import layout_of

MIN = 8 << 20
"""Minimum bytes per piece of a tensor that is too large for the budget."""


def cuts(target: TargetTensor, budget: int) -> Iterator[tuple[int, int]]:
    """Cut a target that is too large for the budget into ranges of elements."""
    size = target.info.nbytes // target.info.itemsize
    width = max(target.info.itemsize, 1)
    if (6 if target.is_changed else 3) * target.info.nbytes <= budget or not size:
        yield 0, size
        return
    step = max(budget // (8 if target.is_changed else 5), MIN) // width
    for start in range(0, size, step):
        yield start, min(size, start + step)


def least_memory() -> int:
    """Return the smallest memory bound in bytes that a conversion accepts."""
    return IDLE + 4 * MIN


def budget_of(plan: Plan, max_memory: int | None) -> int:
    """Return the bytes that tensors may take in memory.

    Raises:
        CheckpointError: the bound is below `least_memory`.
    """
    largest = max((one.info.nbytes for one in plan.targets), default=0)
    if max_memory is None:
        return 3 * max(largest, MIN)
    if max_memory < least_memory():
        raise CheckpointError(f"max-memory ({max_memory}) must be at least {least_memory()} bytes")
    return max_memory - IDLE


def digest_of(reader: Reader, name: str) -> str:
    """Return the digest of a tensor's bytes."""
    digest, size = new_digest(), reader.tensors[name].nbytes
    for start in range(0, size, 2 * MIN):
        digest.update(reader.read_range(name, start, min(size, start + 2 * MIN)))
    return digest.hexdigest()


def check_ties(plan: Plan, reader: Reader, budget: int) -> None:
    """Check that tied tensors are equal before a copy is left out.

    Raises:
        CheckpointError: two tied tensors differ.
    """
    written = {name for target in plan.targets for name in target.sources} if plan.ties else set()
    for original, copy, kept, left_out in plan.ties:
        info = reader.tensors[original.source]
        pair = []
        for move in (original, copy):
            own = reader.tensors[move.source]
            target = TensorInfo(left_out, own.dtype, (move.size,))
            pair.append(TargetTensor(target, own.dtype, (move,), ""))
        reading = Elements(reader, None, budget)
        for bounds in cuts(pair[0], budget):
            first, second = (reading.read(part, *bounds)[0] for part in pair)
            if first.dtype != second.dtype or first.tobytes() != second.tobytes():
                if copy.source in written:
                    raise CheckpointError(
                        f"{printable(copy.source)} must hold the numbers of {printable(original.source)}, to which "
                        "config.json ties it (tie_word_embeddings); set that to false where the head was trained apart"
                    )
                raise CheckpointError(
                    f"{left_out} is not the same as {kept} ({info.dtype}), so it can't be tied to it; "
                    + layouts.find(plan.target_layout).why_tied
                )


def check_dropped(plan: Plan, reader: Reader) -> None:
    """Check that tensors left out as recomputable, or as copies, have the expected numbers.

    Raises:
        CheckpointError: a check fails, a copy differs, or a tensor to be merged has numbers that are not finite.
    """
    reader.check_numbers()
    for name, other in plan.copies.items():
        if digest_of(reader, name) != digest_of(reader, other):
            raise CheckpointError(
                f"{reader.path}: {printable(name)} must hold the numbers of {printable(other)}, which transformers "
                f"reads in its place; --drop {shell_word(name)} leaves it out"
            )
    for name, check in plan.checks.items():
        info = reader.tensors[name]
        for start in range(0, max(info.nbytes, 1), MIN):
            data = reader.read_range(name, start, min(info.nbytes, start + MIN))
            if not check(info.shape, start // info.itemsize, np.frombuffer(data, numpy_dtype(info.dtype))):
                raise CheckpointError(
                    f"{reader.path}: {printable(name)} is not what it would be left out as: {plan.dropped[name]}"
                )


def check_kept(before: Manifest | None) -> None:
    """Check that tensors kept aside are unchanged before they are restored or copied.

    Raises:
        CheckpointError: one is missing or changed.
    """
    for name, problem in ({} if before is None else kept_problems(before)).items():
        raise CheckpointError(f"{name}, which was kept aside, {problem}; remove the manifest to go on without")


def kept_problems(manifest: Manifest) -> dict[str, str]:
    """Return tensor kept aside -> problem, for those that are missing or have other bytes."""
    problems = {}
    for name, digest in manifest.kept_digests.items():
        if manifest.kept is None or name not in manifest.kept.tensors:
            problems[name] = "is missing"
        elif digest_of(manifest.kept, name) != digest:
            problems[name] = "has other bytes than when it was written"
    return problems


def stamps(reader: Reader, *, anew: bool = False) -> list[tuple[str, int, int, int]]:
    """Return path, size, and times of modification and of change of the source's files, to detect changes.

    The second time, which nothing sets back, differs after a write that kept the first. Metadata of stores is that from
    opening the source, or fetched again on request.

    Raises:
        CheckpointError: a file is gone.
    """
    if anew:
        remote.forget(reader.path)
    try:
        status = [(str(path), path.stat()) for path in reader.files()]
        return [(path, one.st_size, one.st_mtime_ns, getattr(one, "st_ctime_ns", 0)) for path, one in status]
    except OSError as error:
        raise CheckpointError(f"{reader.path} changed while it was read: {error.strerror}") from None


Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of a check.

    Attributes:
        passed: whether the check found no problem.
        tensors: number of tensors checked.
        problems: name -> problem.
        by_digest: whether the tensors were compared with a manifest.
        by_source: whether the source was converted again for comparison.
    """

    passed: bool
    tensors: int
    problems: dict[str, str]
    by_digest: bool
    by_source: bool


def as_converted(options: ConvertOptions, manifest: Manifest | None, target: Reader) -> ConvertOptions:
    """Return the options of the target's conversion: the user's, completed from the manifest.

    Args:
        options: from the user.
        manifest: the manifest; without it, the names of the target's tensors determine its layout.
        target: the open target.
    """
    from_layout, to_layout, settings = options.from_layout, options.to_layout, options.settings
    if options.rules is None and manifest is not None:
        made_of = manifest.source.get("layout")
        from_layout = from_layout or (str(made_of) if made_of else None)
        to_layout = to_layout or manifest.layout or "same"
        settings = {**manifest.source.get("settings", {}), **(settings or {})} if to_layout != "same" else settings
    elif options.rules is None and to_layout is None:
        to_layout = layout_of(target.tensors, configs.beside(target.path), None).name
    dtype = manifest.dtype if manifest is not None and manifest.dtype else options.dtype
    return dataclasses.replace(
        options, from_layout=from_layout, to_layout=to_layout, format=target.format, dtype=dtype, settings=settings
    )


def by_digests(reader: Reader, manifest: Manifest, progress: Progress) -> dict[str, str]:
    """Compare every tensor with its digest; return name -> problem."""
    problems = {name: "is not in the manifest" for name in reader.tensors if name not in manifest.tensors}
    problems |= _held_against(reader, manifest.tensors, "was written", progress)
    return problems | {f"{name} (kept aside)": problem for name, problem in kept_problems(manifest).items()}


def by_originals(reader: Reader, manifest: Manifest) -> dict[str, str]:
    """Compare the quantised tensors of a source with the digests of the conversion; return name -> problem."""
    return _held_against(reader, manifest.source.get("quantised", {}), "was converted", lambda done, total, name: None)


def by_adapter(reader: Reader, manifest: Manifest | None, target: Path) -> dict[str, str]:
    """Compare an adapter with the merged one; return name -> problem.

    Raises:
        CheckpointError: an adapter was merged, but none is passed.
    """
    merged = {} if manifest is None else manifest.source.get("adapter", {})
    if not isinstance(reader, adapters.Merged):
        if merged:
            raise CheckpointError(f"{target} was made with an adapter; give it, too, with --adapter")
        return {}
    digests = reader.adapter.in_manifest() if merged else {}
    names = [name for name in {**digests, **merged} if digests.get(name) != merged.get(name)]
    return {f"{name} (adapter)": "is not what was merged" for name in names}


def _held_against(
    reader: Reader, tensors: Mapping[str, Mapping[str, object]], event: str, progress: Progress
) -> dict[str, str]:
    """Compare a checkpoint's tensors with the entries of a manifest."""
    problems = {}
    total, done = sum(info.nbytes for info in reader.tensors.values()), 0
    for name, entry in tensors.items():
        info = reader.tensors.get(name)
        if info is None:
            problems[name] = "is in the manifest and not in the checkpoint"
            continue
        if (info.dtype, list(info.shape)) != (entry.get("dtype"), entry.get("shape")):
            problems[name] = f"is {info.dtype} {info.shape}, and was {entry.get('dtype')} {entry.get('shape')}"
        else:
            try:
                if digest_of(reader, name) != entry[DIGEST]:
                    problems[name] = f"has other bytes than when it {event}"
            except CheckpointError as error:
                problems[name] = f"can't be read: {error}"
        done += info.nbytes
        progress(done, total, name)
    return problems


def by_source(
    plan: Plan, source: Reader, before: Manifest | None, target: Reader, max_memory: int | None, progress: Progress
) -> dict[str, str]:
    """Convert the source again in memory, and compare every byte with the target's; return name -> problem."""
    wanted = {one.info.name: one for one in plan.targets}
    problems = {name: "does not come from the source" for name in target.tensors if name not in wanted}
    budget = budget_of(plan, max_memory)
    elements = Elements(source, None if before is None else before.kept, budget)
    done = 0
    for name, plan_target in wanted.items():
        info = target.tensors.get(name)
        if info is None:
            problems[name] = "is missing"
        elif (info.dtype, info.shape) != (plan_target.info.dtype, plan_target.info.shape):
            problems[name] = (
                f"is {info.dtype} {info.shape}, and the source gives {plan_target.info.dtype} {plan_target.info.shape}"
            )
        else:
            problem = _compare(elements, plan_target, target, min(budget, 12 * MIN))
            if problem:
                problems[name] = problem
        done += plan_target.info.nbytes
        progress(done, plan.nbytes, name)
    return problems


def another_source(source: Path, target: Path, made_of: str, error: ValueError) -> CheckpointError:
    """Return the error for a source that can't be the checkpoint that a target was converted from.

    Args:
        source: the path from the user.
        target: the checkpoint to verify.
        made_of: layout of the checkpoint that the target was converted from.
        error: raised when the source was read in that layout.
    """
    why = str(error)
    if isinstance(error, WeightsMismatchError):
        first, *others = *error.unexpected, *error.missing, *error.misshapen
        why = f"{printable(first)} and {len(others)} more do not fit" if others else f"{printable(first)} does not fit"
    return CheckpointError(
        f"{target} was made of a checkpoint of layout {made_of}, which {source} is not ({why}); verify it against the "
        "very checkpoint that it was made of"
    )


def _compare(elements: Elements, target: TargetTensor, reader: Reader, budget: int) -> str:
    """Return the first difference between a tensor and its conversion from the source, in words; "" if equal."""
    info = target.info
    for start, stop in cuts(target, budget):
        array, _ = elements.read(target, start, stop)
        try:
            data = reader.read_range(info.name, start * info.itemsize, stop * info.itemsize)
        except CheckpointError as error:
            return f"can't be read: {error}"
        bits, other = array.reshape(-1).view(np.uint8), np.frombuffer(data, np.uint8)
        if not np.array_equal(bits, other):
            position = start + int(np.argmax(bits != other)) // info.itemsize
            index = tuple(int(at) for at in np.unravel_index(position, info.shape))
            return f"has other bits than the source, first at {index}"
    return ""
