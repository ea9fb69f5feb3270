"""Carrying out a plan: write tensor by tensor to a staging directory, then rename it onto the target atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..models import layouts
from ..printable import printable
from . import configs, containers, manifest, quantised
from . import digests as digests_of
from .containers import remote
from .containers.base import CheckpointError, Reader, TensorInfo, Writer, numpy_dtype
from .elements import Elements
from .planning import kept_name
from .planning.plans import IDLE, Plan, Target
from .staging import check_free, check_place, empty, journal, leftovers, locked, note, publish, put, recover
from .threads import Threads

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, all bytes, and the tensor at hand."""

MIN = 8 << 20
"""Bytes of a piece of a tensor that is too large for the budget, at least."""


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
    check_place(reader, target, staging)
    if not staging.exists():
        check_free(target, overwrite)
    with locked(staging):
        identity = f"{plan.identity(reader)} {target_format}"
        done, counts = journal(staging, identity) if resume else ({}, {})
        restart_reason = "no interrupted run of this very conversion was found" if resume and not done else ""
        infos = [one.info for one in plan.targets]
        if recover(staging, target) and done and len(_intact(target, infos, done, target_format)) == len(infos):
            shutil.rmtree(staging, ignore_errors=True)
            return Result(target, done, counts, len(done))
        check_free(target, overwrite)
        payload = staging / "payload"
        with leftovers(staging, identity, containers.writer_class(target_format).random_access):
            if not done:
                empty(staging)
                note(staging, {"plan": identity})
            files = _stamps(reader)
            budget = _budget(plan, max_memory)
            elements = Elements(reader, None if before is None else before.kept, budget)
            check_ties(plan, reader, budget)
            check_dropped(plan, reader)
            _check_kept(before)
            own = _config_beside(plan, reader, config) if is_folder else None
            writer = containers.make_writer(target_format, payload, infos, plan.metadata)
            try:
                if done and not writer.random_access:
                    restart_reason = f"a file of {target_format} is written from its beginning on"
                    done = {}
                elif done:
                    done = _intact(payload, infos, done, target_format)
                    restart_reason = "" if done else "nothing of what was written is intact"
                digests, changed = _write(plan, reader, elements, writer, staging, done, budget, progress)
                changed |= {name: count for name, count in counts.items() if name in done}
                remote.forget(reader.path)  # a store is asked anew
                if _stamps(reader) != files:
                    raise CheckpointError(f"{reader.path} changed while it was read; convert it again")
                writer.finish()
            except BaseException:
                writer.abort()
                raise
            _accompany(plan, reader, elements, before, payload, staging, digests, is_folder, own, budget)
            check_free(target, overwrite)
            publish(staging, payload, target, is_folder)
        shutil.rmtree(staging, ignore_errors=True)
    return Result(target, digests, changed, len(done), restart_reason)


def _write(
    plan: Plan,
    reader: Reader,
    elements: Elements,
    writer: Writer,
    staging: Path,
    done: dict[str, str],
    budget: int,
    progress: Progress,
) -> tuple[dict[str, str], dict[str, int]]:
    """Write all tensors; the next one is made ready while one is hashed and written."""
    digests: dict[str, str] = {}
    changed: dict[str, int] = {}
    total, written = plan.nbytes, 0
    chunks = ((one, *bounds) for one in plan.targets if one.info.name not in done for bounds in _bounds(one, budget))
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
                note(staging, {"name": name, digests_of.KEY: digests[name], "changed": changed[name]})
            progress(written, total, name)
    return digests, {name: count for name, count in changed.items() if count}


_hasher = Threads(1, "hash")


def _bounds(target: Target, budget: int) -> Iterator[tuple[int, int]]:
    """Cut a target that is too large for the budget into ranges of elements."""
    size = target.info.nbytes // target.info.itemsize
    width = max(target.info.itemsize, 1)
    if (6 if target.is_changed else 3) * target.info.nbytes <= budget or not size:
        yield 0, size
        return
    step = max(budget // (8 if target.is_changed else 5), MIN) // width
    for start in range(0, size, step):
        yield start, min(size, start + step)


def _budget(plan: Plan, max_memory: int | None) -> int:
    if max_memory is not None and (isinstance(max_memory, bool) or not isinstance(max_memory, int)):
        raise CheckpointError(f"max_memory ({max_memory!r}) must be a whole number of bytes, or None")
    largest = max((one.info.nbytes for one in plan.targets), default=0)
    if max_memory is None:
        return 3 * max(largest, MIN)
    if max_memory < IDLE + 4 * MIN:
        raise CheckpointError(f"max-memory ({max_memory}) must be at least {IDLE + 4 * MIN} bytes")
    return max_memory - IDLE


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
        for bounds in _bounds(pair[0], budget):
            first, second = (reading.read(part, *bounds)[0] for part in pair)
            if first.dtype != second.dtype or first.tobytes() != second.tobytes():
                raise CheckpointError(
                    f"{left_out} is not the same as {kept} ({info.dtype}), so it can't be tied to it; "
                    + layouts.find(plan.target_layout).why_tied
                )


def check_dropped(plan: Plan, reader: Reader) -> None:
    """Refuse to leave out tensors whose numbers are not what they are left out as.

    Raises:
        CheckpointError: one is not.
    """
    for name, check in plan.checks.items():
        info = reader.tensors[name]
        for start in range(0, max(info.nbytes, 1), MIN):
            data = reader.read_range(name, start, min(info.nbytes, start + MIN))
            if not check(info.shape, start // info.itemsize, np.frombuffer(data, numpy_dtype(info.dtype))):
                raise CheckpointError(
                    f"{reader.path}: {printable(name)} is not what it would be left out as: {plan.dropped[name]}"
                )


def _check_kept(before: manifest.Manifest | None) -> None:
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


def _stamps(reader: Reader) -> list[tuple[str, int, int]]:
    try:
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files()]
    except OSError as error:
        raise CheckpointError(f"{reader.path} changed while it was read: {error.strerror}") from None


def _accompany(
    plan: Plan,
    reader: Reader,
    elements: Elements,
    before: manifest.Manifest | None,
    payload: Path,
    staging: Path,
    digests: dict[str, str],
    is_folder: bool,
    config: bytes | None,
    budget: int,
) -> None:
    """Write what goes with the target: what was dropped, the manifest, the model's config."""
    beside = (payload / manifest.IN_FOLDER, payload / manifest.KEPT_IN_FOLDER)
    where, kept = beside if is_folder else (staging / "manifest", staging / "kept")
    aside: list[tuple[TensorInfo, Reader, str]] = []
    originals = {one.info.name: one for one in plan.originals}
    if before is not None and before.kept is not None:
        left = {name.partition("/")[0] for name in before.kept.tensors} & plan.restore.keys()
        aside += [
            (info, before.kept, name)
            for name, info in before.kept.tensors.items()
            if name.partition("/")[0] in left or (name in plan.carried and name not in originals)
        ]
    for name in plan.dropped:
        info = reader.tensors[name]
        aside.append((TensorInfo(kept_name(plan.source_layout, name), info.dtype, info.shape), reader, name))
    kept.unlink(missing_ok=True)
    kept_digests = {}
    if aside or originals:
        infos = [info for info, _, _ in aside] + [one.info for one in plan.originals]
        writer = containers.make_writer("safetensors", kept, infos, {})
        for info, source, name in aside:
            kept_digests[info.name] = digest_of(source, name)
            for start in range(0, info.nbytes, MIN):
                data = source.read_range(name, start, min(info.nbytes, start + MIN))
                writer.write_range(info.name, start, data)
        for name, one in originals.items():
            digest = digests_of.new()
            for start, stop in _bounds(one, budget):
                array, _ = elements.read(one, start, stop)
                bits = array.view(np.uint8).data
                digest.update(bits)
                writer.write_range(name, start * one.info.itemsize, bits)
                elements.release(array)
            kept_digests[name] = digest.hexdigest()
        writer.finish()
    tensors = {
        one.info.name: {"dtype": one.info.dtype, "shape": list(one.info.shape), digests_of.KEY: digests[one.info.name]}
        for one in plan.targets
    }
    made_of: dict[str, Any] = {
        "layout": plan.source_layout,
        "format": plan.source_format,
        "settings": plan.settings,
        **({"quantised": _digests_of_originals(reader)} if isinstance(reader, quantised.Dequantised) else {}),
    }
    text = manifest.text(plan.target_layout, plan.dtype, made_of, tensors, plan.restore, kept_digests)
    put(where, text.encode("ascii"))
    if config is not None:
        put(payload / configs.CONFIG, config)


def _digests_of_originals(reader: quantised.Dequantised) -> dict[str, dict[str, Any]]:
    """Return the quantised tensors that were read, as a manifest has them."""
    names = [name for one in reader.quantised.values() for name in (one.numbers, one.scales)]
    infos = [reader.originals.tensors[name] for name in names]
    return {
        info.name: {
            "dtype": info.dtype, "shape": list(info.shape), digests_of.KEY: digest_of(reader.originals, info.name)
        }
        for info in infos
    }  # fmt: skip


def _config_beside(plan: Plan, reader: Reader, config: Mapping[str, Any] | None) -> bytes | None:
    """Return the config.json of a folder: the one given, the plan's, or the source's; None: there is none."""
    found = plan.config if config is None else config
    if found is not None:
        return (json.dumps(found, indent=2, sort_keys=True) + "\n").encode("ascii") if found else None
    own = reader.path / configs.CONFIG
    data = own.read_bytes() if reader.path.is_dir() and own.is_file() else None
    return data if data is None or not plan.scales else _unquantised(data)


def _unquantised(data: bytes) -> bytes:
    """Return a config.json without what it says of quantisation."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data
    plain = quantised.unquantised(config) if isinstance(config, dict) else config
    return data if plain == config else (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode("ascii")
