"""Checkpoints: convert, inspect and verify them in any container and layout, without a framework.

convert("gpt2/", "gpt2-flax/")        to the twin, in bounded memory, without losing a bit
inspect("model.safetensors")          names, shapes, dtypes and layout, from headers alone
verify("gpt2/", "gpt2-flax/")         every byte against digests, and against the source converted again
open("model.safetensors")             a mapping of names to arrays, read when they are asked for
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from ..whole_files import JsonObject
from .options import ConvertKeywords, ConvertOptions, PathLike, ShareKeywords, is_path, options_of
from .readers import Checkpoint, Inspection

if TYPE_CHECKING:
    import numpy as np

    from .hub.publishing import push_to_hub
    from .in_memory import Arrays
    from .planning.plans import Plan
    from .verification import Verification
    from .workers.jobs import Progress, Result
    from .workers.sharing import Worked

__all__ = [
    "Checkpoint",
    "ConvertOptions",
    "Inspection",
    "convert",
    "convert_share",
    "finish",
    "inspect",
    "open",
    "plan",
    "push_to_hub",
    "read",
    "tasks",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load `push_to_hub` on first use: a conversion needs nothing of the hub."""
    if name == "push_to_hub":
        from .hub.publishing import push_to_hub

        return push_to_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(path: PathLike, *, format: str | None = None, step: int | None = None, item: str | None = None) -> Checkpoint:
    """Open a checkpoint in any container as a mapping of names to arrays; for the options see `ConvertOptions`.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or in an unknown container.
    """
    from . import containers
    from .containers import remote

    return Checkpoint(containers.open_reader(remote.to_path(path), format, step=step, item=item))


def read(path: PathLike) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint by name; bfloat16 arrays have the dtype `ml_dtypes.bfloat16`.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or in an unknown container.
    """
    with open(path) as checkpoint:
        return dict(checkpoint)


def inspect(
    path: PathLike, *, format: str | None = None, step: int | None = None, item: str | None = None
) -> Inspection:
    """Return a checkpoint's names, shapes, dtypes, layout and notes, from headers alone; options as for `open`.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or in an unknown container.
    """
    from ..models import layouts
    from ..printable import printable
    from . import configs, containers, manifest, quantised
    from .containers import remote
    from .containers.sources import snapshot_of
    from .planning import reading
    from .readers import Filtered
    from .requests import family_beside
    from .selection import RANDOM_STATE, Selection, random_state_names, unwrap

    path = snapshot_of(remote.to_path(path))
    with family_beside(path), containers.open_reader(path, format, step=step, item=item) as reader:
        layout, why = "", ""
        own_manifest = manifest.of(reader, path)
        selected, selection = reader, Selection()
        try:
            selected, unwrapped = unwrap(reader)
            streams = random_state_names(selected.tensors)
            selection = Selection(unwrapped=unwrapped, parts={RANDOM_STATE: tuple(streams)} if streams else {})
            selected = Filtered(selected, streams, ()) if streams else selected
            if not reader.config:
                quantised.check_plain(selected, configs.of_reader(reader))
            is_own = own_manifest is not None and own_manifest.layout.endswith((".toml torch", ".toml flax"))
            layout = (
                own_manifest.layout
                if own_manifest is not None and is_own
                else reading.layout_of(selected.tensors, configs.of_reader(reader), own_manifest).name
            )
        except (layouts.LayoutError, containers.CheckpointError) as error:
            why = str(error)
        has_manifest = own_manifest is not None
        notes = (
            *reader.notes,
            *selection.notes(),
            *(f"{printable(name)} can't be read: {reason}" for name, reason in reader.unread.items()),
        )
        return Inspection(path, reader.format, layout, why, reader.tensors, reader.metadata, has_manifest, notes)


def plan(
    source: PathLike | Arrays,
    target: PathLike,
    options: ConvertOptions | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Plan:
    """Return the plan of `convert` for the same arguments, from headers alone.

    Raises:
        CheckpointError: (a ValueError) as `convert` does, except for what only the numbers show.
        LayoutError: (a ValueError) names, shapes or settings that don't fit.
    """
    from . import workers
    from .requests import Request

    if not is_path(source):
        from . import in_memory

        with in_memory.prepared(source, target, options_of(options, keywords)) as prepared:
            workers.sole_job(prepared, prepared.options.max_memory)
            workers.check(prepared)
            return prepared.plan
    asked = Request.of(source, target, options_of(options, keywords))
    with asked.opened() as prepared:
        workers.chosen(prepared, asked.workers, asked.task_bytes, asked.max_memory)
        workers.check(prepared)
        return prepared.plan


def tasks(
    source: PathLike,
    target: PathLike,
    options: ConvertOptions | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> list[JsonObject]:
    """Return the tasks of the workers that `convert` would run with the same arguments, from headers alone.

    Args:
        source: file or folder.
        target: file or folder, which is not touched.
        options: as for `convert`. `workers=None` counts as a single worker; with several workers, tasks are smaller, so
            that all shares have about the same size.
        **keywords: options that override those in `options`.

    Returns:
        ``{"bytes", "tensors"}`` for each task. An entry of ``tensors`` is a tensor, or part of one, that the task
        writes: ``{"name", "start", "stop", "bytes", "file", "offset"}``, with elements ``start:stop`` and the file and
        offset of their bytes. The offset is None in containers that are written sequentially.

    Raises:
        CheckpointError: (a ValueError) the source is malformed, or the target can't hold it.
        LayoutError: (a ValueError) names, shapes or settings that don't fit.
    """
    from .requests import Request
    from .workers.jobs import tasks_of

    asked = Request.of(source, target, options_of(options, keywords))
    count = 1 if asked.workers is None else asked.workers
    with asked.opened() as prepared:
        return tasks_of(prepared.plan, prepared.format, count, asked.task_bytes)


def convert(
    source: PathLike | Arrays,
    target: PathLike,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    ray: str | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Result:
    """Convert a checkpoint from one layout and container to another, tensor by tensor, bit for bit.

    The target appears only when all of it is written and on disk. Tensors that the target's layout cannot hold are
    saved next to it, so that a conversion back restores them.

    Args:
        source: file or folder; or arrays of NumPy, JAX or torch in memory. A mapping of names to arrays is read twice
            per array, for its shape and for its data, so that a lazy mapping keeps few arrays in memory; pairs of name
            and array are all kept in memory. Arrays have no config.json and are converted in this process.
        target: file (its extension names the container) or folder.
        options: see `ConvertOptions`.
        progress: called with the bytes done, all bytes, and the current tensor.
        planned: called with the plan before anything is written.
        ray: run the work as Ray tasks on the cluster at this address; "" finds a cluster, or starts one on this
            machine.
        **keywords: options that override those in `options`.

    Returns:
        Digests of the tensors written, and how many elements a cast changed.

    Raises:
        CheckpointError: (a ValueError) the source is malformed or changed, or the target can't be written.
        LayoutError: (a ValueError) names, shapes or settings that don't fit; `WeightsMismatchError` lists names.
    """
    import functools

    from .requests import Request
    from .workers import chosen, early, run, start

    progress = progress or (lambda done, total, name: None)
    if not is_path(source):
        from . import in_memory

        return in_memory.convert(source, target, options_of(options, keywords), progress, planned)
    asked = Request.of(source, target, options_of(options, keywords))
    workers = asked.workers
    with early(asked, workers if ray is None else 1) as nursery, asked.opened() as prepared:
        if planned is not None:
            planned(prepared.plan)
        job, budget = chosen(prepared, workers, asked.task_bytes, asked.max_memory, is_elsewhere=ray is not None)
        if budget is None and ray is not None:
            from .workers.executors.ray_tasks import Cluster

            with Cluster(ray) as cluster:
                job = cluster.job(prepared, workers, asked.task_bytes)
                return run(prepared, job, functools.partial(cluster.start, asked), False, progress)
        if budget is not None and nursery is not None:
            nursery.close()  # nothing can be shared
        begin = functools.partial(start if nursery is None else nursery.start, asked)
        return run(prepared, job, begin, True, progress, budget)


def convert_share(
    source: PathLike,
    target: PathLike,
    index: int,
    workers: int,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    **keywords: Unpack[ShareKeywords],
) -> Worked:
    """Write the share of one of several workers, on any machine that has source and target on its disks.

    Workers communicate only through the target's folder. The last worker publishes; until then the target does not
    exist. A worker that is called again resumes where it stopped, also after publication.

    Args:
        source: file or folder.
        target: file or folder, on a file system that all workers write to.
        index: number of this worker, from 0.
        workers: number of workers.
        options: as for `convert`. `resume` continues from the files of a different number of workers, `max_memory`
            applies to this worker, `task_bytes` must be equal for all workers, and `workers` is the argument above.
        progress: called with the bytes done of this share, all bytes of it, and the current tensor.
        planned: as for `convert`.
        **keywords: options that override those in `options`.

    Raises:
        CheckpointError: (a ValueError) workers have different arguments, the source is malformed or changed, or the
            target can't be written.
        LayoutError: (a ValueError) names, shapes or settings that don't fit.
    """
    from .requests import Request
    from .workers.jobs import job_of
    from .workers.sharing import worker

    asked = Request.of(source, target, options_of(options, keywords))
    with asked.opened() as prepared:
        if planned is not None:
            planned(prepared.plan)
        memory = None if asked.max_memory is None else asked.max_memory * workers
        job = job_of(prepared, workers, asked.task_bytes, memory)
        notify = progress or (lambda done, total, name: None)
        return worker(prepared, job, index, notify)


def finish(
    source: PathLike,
    target: PathLike,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Worked:
    """Check every digest of the workers' output, and publish it; a published target stays as it is.

    The last worker does this automatically. Takes the same arguments as the workers.

    Raises:
        CheckpointError: (a ValueError) something is missing, or its bytes differ from those that were written.
    """
    from .requests import Request
    from .workers.sharing import finish_by_hand

    asked = Request.of(source, target, options_of(options, keywords))
    with asked.opened() as prepared:
        if planned is not None:
            planned(prepared.plan)
        return finish_by_hand(prepared, progress or (lambda done, total, name: None))


def verify(
    source: PathLike | None,
    target: PathLike,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Verification:
    """Check a checkpoint bit by bit: by the digests in its manifest, and by converting its source again in memory.

    Args:
        source: the checkpoint that the target was converted from; or, in the target's own layout, the start of a round
            trip, which is compared with the target directly. None checks the digests alone.
        target: the checkpoint to check.
        options: the options of the conversion; None takes them from the manifest.
        progress: called with the bytes done, all bytes, and the current tensor.
        **keywords: options that override those in `options`.

    Raises:
        CheckpointError: (a ValueError) a checkpoint is malformed, or neither a manifest nor a source is available.
    """
    from ..models import layouts
    from ..weights import WeightsMismatchError
    from . import containers, manifest, requests, verification
    from .containers import remote
    from .containers.base import CheckpointError
    from .containers.sources import chosen_again, snapshot_of
    from .selection import patterns_in, select, without_wrappers

    progress = progress or (lambda done, total, name: None)
    options = options_of(options, keywords)
    origin, target = None if source is None else snapshot_of(remote.to_path(source)), remote.to_path(target)
    with containers.open_reader(target) as target_reader:
        target_manifest = manifest.of(target_reader, target)
        problems: dict[str, str] = {}
        if target_manifest is not None:
            problems |= verification.by_digests(target_reader, target_manifest, progress)
        elif origin is None:
            raise CheckpointError(f"{target} has no manifest beside it; give its source to hold it against")
        if origin is not None:
            if (
                options.rules is None
                and target_manifest is not None
                and target_manifest.layout not in ("", *layouts.names())
            ):
                raise CheckpointError(f"{target} was converted by rules of one's own; give them, too")
            options = verification.as_converted(options, target_manifest, target_reader)
            step, item = options.step, options.item
            if step is None and item is None and target_manifest is not None:
                step, item = chosen_again(origin, target_manifest.source)
            source_format = options.source_format
            if source_format is None and target_manifest is not None and not containers.is_known(origin):
                named = target_manifest.source.get("format")
                source_format = named if isinstance(named, str) else None
            with (
                requests.family_beside(origin),
                containers.open_reader(origin, source_format, step=step, item=item) as opened,
            ):
                strip = options.strip
                if strip is None and target_manifest is not None:
                    prefix = target_manifest.source.get("stripped", "")
                    bare = without_wrappers(opened.tensors)
                    strip = prefix if any(name.startswith(prefix) for name in (*bare, *bare.values())) else None
                strip = strip or None
                patterns = tuple(options.drop) if options.drop is not None else patterns_in(opened, target_manifest)
                keep_wrappers = options.rules is not None or options.to_layout == "same"
                opened, selection = select(opened, strip, patterns, keep_wrappers=keep_wrappers)
                dequantize = options.dequantize
                if target_manifest is not None and target_manifest.source.get("quantised"):
                    dequantize = True
                    problems |= verification.by_originals(opened, target_manifest)
                reader = requests.seen(opened, dequantize, options.dtype, options.adapter)
                problems |= verification.by_adapter(reader, target_manifest, target)
                is_another = strip is not None or selection.unwrapped or options.adapter is not None
                before = None if is_another else manifest.of(reader, origin)
                try:
                    planned = requests.plan_of(reader, before, target, options, selection)
                except (WeightsMismatchError, layouts.LayoutError) as error:
                    made_of = None if target_manifest is None else target_manifest.source.get("layout")
                    if not made_of or options.from_layout != made_of:
                        raise
                    copied = requests.plan_of_copy(
                        reader, target, options.to_layout, target_reader.format, options.dtype
                    )
                    is_shape = isinstance(error, layouts.LayoutError) and layouts.find(made_of).match(reader.tensors)[1]
                    if copied is None and is_shape:
                        raise  # its names are those of the layout
                    if copied is None:
                        raise verification.another_source(origin, target, made_of, error) from None
                    planned, before = copied, None
                source_problems = verification.by_source(
                    planned, reader, before, target_reader, options.max_memory, progress
                )
            problems = {**source_problems, **problems}
    return verification.Verification(
        not problems, len(target_reader.tensors), problems, target_manifest is not None, origin is not None
    )
