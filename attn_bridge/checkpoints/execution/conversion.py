"""Carrying out a plan: write tensor by tensor to a staging directory, then rename it onto the target atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .. import containers, manifest, quantised
from .. import digests as digests_of
from ..containers.base import CheckpointError, Reader, TensorInfo, Writer
from ..elements import Elements
from ..planning.plans import Plan, Target
from ..staging import (
    check_free,
    check_place,
    empty,
    journal,
    leftovers,
    locked,
    naming,
    note,
    publish,
    recover,
    remove,
    wait_for_workers,
)
from ..threads import Threads
from .accompanying import accompany, config_beside
from .checks import budget_of, check_dropped, check_kept, check_ties, cuts, digest_of, stamps

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, all bytes, and the tensor at hand."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a conversion did.

    Attributes:
        target: path of what was written.
        digests: name -> digest of its bytes.
        changed: name -> how many of its elements a cast changed.
        resumed: how many tensors an earlier, interrupted run had written.
        restart_reason: why a run that was to go on where an earlier one stopped did not; "" if it did, or was not to.
    """

    target: Path
    digests: dict[str, str]
    changed: dict[str, int]
    resumed: int
    restart_reason: str = ""


def carry_out(
    plan: Plan,
    reader: Reader,
    target: Path,
    target_format: str,
    *,
    before: manifest.Manifest | None = None,
    is_folder: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    max_memory: int | None = None,
    config: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total, name: None,
) -> Result:
    """Write the target; until all of it is written and on disk, nothing stands in its place.

    Args:
        plan: what to write.
        reader: the open source.
        target: file or folder.
        target_format: its container.
        before: the manifest beside the source.
        is_folder: whether the target is a folder.
        resume: go on where an interrupted run of the same plan stopped.
        overwrite: replace what is there.
        max_memory: bytes of memory to stay within; None takes what the largest tensors need.
        config: a model's config.json for a folder; None takes along the source's.
        progress: called as bytes are written.

    Raises:
        CheckpointError: the target exists or can't be written, the source changed under way, or tied tensors differ.
    """
    staging = target.parent / f".{target.name}.partial"
    check_place(reader, target, staging, is_folder)
    if not staging.exists():
        check_free(target, overwrite)
    with locked(staging):
        wait_for_workers(staging)
        identity = f"{plan.identity(reader)} {target_format}"
        done, counts = journal(staging, identity) if resume else ({}, {})
        restart_reason = "no interrupted run of this very conversion was found" if resume and not done else ""
        infos = [one.info for one in plan.targets]
        if recover(staging, target) and done and len(_intact(target, infos, done, target_format)) == len(infos):
            remove(staging)
            return Result(target, done, counts, len(done))
        check_free(target, overwrite)
        payload = staging / "payload"
        with leftovers(staging, identity, containers.writer_class(target_format).random_access):
            if not done:
                empty(staging)
                note(staging, {"plan": identity})
            files = stamps(reader)
            budget = budget_of(plan, max_memory)
            elements = Elements(reader, None if before is None else before.kept, budget)
            check_ties(plan, reader, budget)
            check_dropped(plan, reader)
            check_kept(before)
            own = config_beside(plan, reader, config) if is_folder else None
            with naming(payload, target, plan.target_layout):
                writer = containers.make_writer(target_format, payload, infos, plan.metadata)
            try:
                if done and not writer.random_access:
                    restart_reason = f"a file of {target_format} is written from its beginning on"
                    done = {}
                elif done:
                    done = _intact(payload, infos, done, target_format)
                    restart_reason = "" if done else "nothing of what was written is intact"
                noted = functools.partial(note, staging)
                digests, changed = write_all(plan, reader, elements, writer, done, budget, progress, noted)
                changed |= {name: count for name, count in counts.items() if name in done}
                if stamps(reader, anew=True) != files:
                    raise CheckpointError(f"{reader.path} changed while it was read; convert it again")
                writer.finish()
            except BaseException:
                writer.abort()
                raise
            beside = manifest.places(payload, True) if is_folder else (staging / "manifest", staging / "kept")
            accompany(plan, reader, elements, before, payload, *beside, digests, own, budget)
            check_free(target, overwrite)
            publish(staging, payload, target, is_folder)
        remove(staging)
    return Result(target, digests, changed, len(done), restart_reason)


def write_all(
    plan: Plan,
    reader: Reader,
    elements: Elements,
    writer: Writer,
    done: dict[str, str],
    budget: int,
    progress: Progress,
    noted: Callable[[dict[str, str | int]], None],
) -> tuple[dict[str, str], dict[str, int]]:
    """Write all tensors; the next one is made ready while one is hashed and written, and each is noted then."""
    digests: dict[str, str] = {}
    changed: dict[str, int] = {}
    total, written = plan.nbytes, 0
    chunks = ((one, *bounds) for one in plan.targets if one.info.name not in done for bounds in cuts(one, budget))
    digest = digests_of.new()
    pending: Future[tuple[Any, int]] | None = None

    def read(target: Target, start: int, stop: int) -> tuple[Any, int]:
        place = writer.place(target.info.name, start * target.info.itemsize)
        array, count = elements.read(target, start, stop, place=place)
        if isinstance(reader, quantised.Dequantised):
            count += quantised.rounding_losses(reader, target, start, stop)
        return array, count

    now = next(chunks, None)
    for one in plan.targets:
        if one.info.name in done:
            digests[one.info.name] = done[one.info.name]
            written += one.info.nbytes
    progress(written, total, "")
    with ThreadPoolExecutor(1, "attn-bridge-read") as ahead:
        if now is not None:
            pending = ahead.submit(read, *now)
        while now is not None and pending is not None:
            target, start, stop = now
            array, count = pending.result()
            now = next(chunks, None)
            pending = None if now is None else ahead.submit(read, *now)
            name, width = target.info.name, target.info.itemsize
            data = array.reshape(-1).view(np.uint8).data
            if start == 0:
                digest = digests_of.new()
            hashing = _hasher.submit(digest.update, data)
            writer.write_range(name, start * width, data)
            hashing.result()
            changed[name] = changed.get(name, 0) + count
            written += (stop - start) * width
            del data
            elements.release(array)
            if stop * width == target.info.nbytes:
                digests[name] = digest.hexdigest()
                noted({"name": name, digests_of.KEY: digests[name], "changed": changed[name]})
            progress(written, total, name)
    return digests, {name: count for name, count in changed.items() if count}


_hasher = Threads(1, "hash")


def _intact(payload: Path, infos: list[TensorInfo], done: dict[str, str], format: str) -> dict[str, str]:
    """Return what is still as it was written, by its digest."""
    files = {info.file for info in infos}
    found = {}
    for file in files:
        with (
            contextlib.suppress(CheckpointError),
            containers.open_reader(payload / file if file else payload, format) as reader,
        ):
            for name in reader.tensors.keys() & done.keys():
                if digest_of(reader, name) == done[name]:
                    found[name] = done[name]
    return found
