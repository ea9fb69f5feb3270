"""What a conversion checks before and after its work, and how it cuts tensors to stay within its memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...models import layouts
from ...printable import printable
from .. import digests as digests_of
from .. import manifest
from ..containers import remote
from ..containers.base import CheckpointError, Reader, TensorInfo, numpy_dtype
from ..elements import Elements
from ..planning.plans import IDLE, Plan, Target

MIN = 8 << 20
"""Bytes of a piece of a tensor that is too large for the budget, at least."""


def cuts(target: Target, budget: int) -> Iterator[tuple[int, int]]:
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
    """Return the bytes of memory that a conversion can stay within."""
    return IDLE + 4 * MIN


def budget_of(plan: Plan, max_memory: int | None) -> int:
    """Return the bytes that tensors may take in memory.

    Raises:
        CheckpointError: the bound is no number, or is too small for anything.
    """
    largest = max((one.info.nbytes for one in plan.targets), default=0)
    if max_memory is None:
        return 3 * max(largest, MIN)
    if max_memory < least_memory():
        raise CheckpointError(f"max-memory ({max_memory}) must be at least {least_memory()} bytes")
    return max_memory - IDLE


def digest_of(reader: Reader, name: str) -> str:
    """Return the digest of a tensor's bytes."""
    digest, size = digests_of.new(), reader.tensors[name].nbytes
    for start in range(0, size, 2 * MIN):
        digest.update(reader.read_range(name, start, min(size, start + 2 * MIN)))
    return digest.hexdigest()


def check_ties(plan: Plan, reader: Reader, budget: int) -> None:
    """Refuse to leave out tensors that are not what they would be tied to.

    Raises:
        CheckpointError: one is not.
    """
    for one, two, kept, left_out in plan.ties:
        info = reader.tensors[one.source]
        pair = []
        for move in (one, two):
            own = reader.tensors[move.source]
            target = TensorInfo(left_out, own.dtype, (move.size,))
            pair.append(Target(target, own.dtype, (move,), ""))
        reading = Elements(reader, None, budget)
        for bounds in cuts(pair[0], budget):
            first, second = (reading.read(part, *bounds)[0] for part in pair)
            if first.dtype != second.dtype or first.tobytes() != second.tobytes():
                raise CheckpointError(
                    f"{left_out} is not the same as {kept} ({info.dtype}), so it can't be tied to it; "
                    + layouts.find(plan.target_layout).why_tied
                )


def check_dropped(plan: Plan, reader: Reader) -> None:
    """Refuse to leave out tensors whose numbers are not what they are left out as.

    Raises:
        CheckpointError: a check fails, or a tensor to be merged has numbers that are not finite.
    """
    reader.check_numbers()
    for name, check in plan.checks.items():
        info = reader.tensors[name]
        for start in range(0, max(info.nbytes, 1), MIN):
            data = reader.read_range(name, start, min(info.nbytes, start + MIN))
            if not check(info.shape, start // info.itemsize, np.frombuffer(data, numpy_dtype(info.dtype))):
                raise CheckpointError(
                    f"{reader.path}: {printable(name)} is not what it would be left out as: {plan.dropped[name]}"
                )


def check_kept(before: manifest.Manifest | None) -> None:
    """Refuse to bring back, or to take along, what is no longer as it was kept."""
    for name, problem in ({} if before is None else kept_problems(before)).items():
        raise CheckpointError(f"{name}, which was kept aside, {problem}; remove the manifest to go on without")


def kept_problems(known: manifest.Manifest) -> dict[str, str]:
    """Return what was kept aside -> what is wrong with it."""
    problems = {}
    for name, digest in known.kept_digests.items():
        if known.kept is None or name not in known.kept.tensors:
            problems[name] = "is missing"
        elif digest_of(known.kept, name) != digest:
            problems[name] = "has other bytes than when it was written"
    return problems


def stamps(reader: Reader, *, anew: bool = False) -> list[tuple[str, int, int]]:
    """Return path, size and time of the source's files: what tells that one changed.

    Stores are asked `anew`, or have said it when the source was opened.

    Raises:
        CheckpointError: one is gone.
    """
    if anew:
        remote.forget(reader.path)
    try:
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files()]
    except OSError as error:
        raise CheckpointError(f"{reader.path} changed while it was read: {error.strerror}") from None
