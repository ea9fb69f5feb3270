"""Whether a checkpoint holds what it should: by the digests beside it, and by converting its source again in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..printable import printable
from ..weights import WeightsMismatchError
from . import adapters
from .containers.base import CheckpointError, Reader
from .digests import KEY
from .elements import Elements
from .execution import MIN, budget_of, cuts, digest_of, kept_problems
from .manifest import Manifest
from .planning.plans import Plan, Target

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
        passed: whether nothing is wrong.
        tensors: number of tensors looked at.
        problems: name -> what is wrong with it.
        by_digest: whether there was a manifest to hold the tensors against.
        by_source: whether there was a source to convert again.
    """

    passed: bool
    tensors: int
    problems: dict[str, str]
    by_digest: bool
    by_source: bool


def by_digests(reader: Reader, manifest: Manifest, progress: Progress) -> dict[str, str]:
    """Hold every tensor against its digest; return name -> what is wrong."""
    problems = {name: "is not in the manifest" for name in reader.tensors if name not in manifest.tensors}
    problems |= _held_against(reader, manifest.tensors, "was written", progress)
    return problems | {f"{name} (kept aside)": problem for name, problem in kept_problems(manifest).items()}


def by_originals(reader: Reader, manifest: Manifest) -> dict[str, str]:
    """Hold the quantised tensors of a source against what was read of them; return name -> what is wrong."""
    return _held_against(reader, manifest.source.get("quantised", {}), "was converted", lambda done, total, name: None)


def by_adapter(reader: Reader, manifest: Manifest | None, target: Path) -> dict[str, str]:
    """Hold an adapter against the one that was merged; return name -> what is wrong.

    Raises:
        CheckpointError: one was merged and none is given.
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
    reader: Reader, tensors: Mapping[str, Mapping[str, Any]], event: str, progress: Progress
) -> dict[str, str]:
    """Hold a manifest's tensors against a checkpoint's."""
    problems = {}
    total, done = sum(info.nbytes for info in reader.tensors.values()), 0
    for name, known in tensors.items():
        info = reader.tensors.get(name)
        if info is None:
            problems[name] = "is in the manifest and not in the checkpoint"
            continue
        if (info.dtype, list(info.shape)) != (known.get("dtype"), known.get("shape")):
            problems[name] = f"is {info.dtype} {info.shape}, and was {known.get('dtype')} {known.get('shape')}"
        else:
            try:
                if digest_of(reader, name) != known[KEY]:
                    problems[name] = f"has other bytes than when it {event}"
            except CheckpointError as error:
                problems[name] = f"can't be read: {error}"
        done += info.nbytes
        progress(done, total, name)
    return problems


def by_source(
    plan: Plan, source: Reader, before: Manifest | None, target: Reader, max_memory: int | None, progress: Progress
) -> dict[str, str]:
    """Convert the source again in memory and hold every byte against the target's; return name -> what is wrong."""
    wanted = {one.info.name: one for one in plan.targets}
    problems = {name: "does not come from the source" for name in target.tensors if name not in wanted}
    budget = budget_of(plan, max_memory)
    elements = Elements(source, None if before is None else before.kept, budget)
    done = 0
    for name, one in wanted.items():
        info = target.tensors.get(name)
        if info is None:
            problems[name] = "is missing"
        elif (info.dtype, info.shape) != (one.info.dtype, one.info.shape):
            problems[name] = f"is {info.dtype} {info.shape}, and the source gives {one.info.dtype} {one.info.shape}"
        else:
            problem = _compare(elements, one, target, min(budget, 12 * MIN))
            if problem:
                problems[name] = problem
        done += one.info.nbytes
        progress(done, plan.nbytes, name)
    return problems


def another_source(source: Path, target: Path, made_of: str, error: ValueError) -> CheckpointError:
    """Return the error of a source that can't be the checkpoint which a target was made of.

    Args:
        source: the one that was given.
        target: made of another one.
        made_of: layout of the checkpoint that the target was made of.
        error: of reading the source in that layout.
    """
    why = str(error)
    if isinstance(error, WeightsMismatchError):
        first, *others = *error.unexpected, *error.missing, *error.misshapen
        why = f"{printable(first)} and {len(others)} more do not fit" if others else f"{printable(first)} does not fit"
    return CheckpointError(
        f"{target} was made of a checkpoint of layout {made_of}, which {source} is not ({why}); verify it against the "
        "very checkpoint that it was made of"
    )


def _compare(elements: Elements, one: Target, there: Reader, budget: int) -> str:
    """Say where a tensor differs from what the source gives, or nothing."""
    info = one.info
    for start, stop in cuts(one, budget):
        found, _ = elements.read(one, start, stop)
        try:
            data = there.read_range(info.name, start * info.itemsize, stop * info.itemsize)
        except CheckpointError as error:
            return f"can't be read: {error}"
        bits, other = found.reshape(-1).view(np.uint8), np.frombuffer(data, np.uint8)
        if not np.array_equal(bits, other):
            place = start + int(np.argmax(bits != other)) // info.itemsize
            index = tuple(int(at) for at in np.unravel_index(place, info.shape))
            return f"has other bits than the source, first at {index}"
    return ""
