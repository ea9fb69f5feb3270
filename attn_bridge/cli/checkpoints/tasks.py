"""``attn-bridge plan``, and the options that share ``convert`` among workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import collector
from ..output import write_json
from ..processes import AUTO
from .options import (
    Adapter,
    Container,
    Dequantize,
    Destination,
    Drop,
    Dtype,
    FromLayout,
    Item,
    Json,
    Rules,
    Settings,
    Source,
    SourceContainer,
    Step,
    Strip,
    TaskBytes,
    ToLayout,
    check_report,
    make_console,
    memory_of,
    parse_settings,
    parse_size,
    plan_json,
    print_plan,
    shown_size,
)

if TYPE_CHECKING:
    from ...checkpoints import ConvertOptions
    from ...checkpoints.planning.plans import Plan
    from ...checkpoints.workers.sharing import Worked


def plan(
    source: Source,
    target: Destination,
    from_layout: FromLayout = None,
    to_layout: ToLayout = None,
    format: Container = None,
    rules: Rules = None,
    dtype: Dtype = None,
    settings: Settings = None,
    dequantize: Dequantize = False,
    strip: Strip = None,
    drop: Drop = None,
    source_format: SourceContainer = None,
    adapter: Adapter = None,
    step: Step = None,
    item: Item = None,
    task_bytes: TaskBytes = None,
    workers: Annotated[
        int, typer.Option(metavar="N", help="How many share the tasks: many workers have smaller ones.")
    ] = 1,
    json_file: Json = None,
) -> int:
    """Show the plan of convert with the same options, and the tasks for workers, from headers alone.

    For each task: the elements of tensors that it writes, and the files and offsets of their bytes.

    Example: attn-bridge plan gpt2/ gpt2-flax/ --task-bytes 64MiB --workers 4 --json

    Exit status: 0 = planned, 2 = bad usage or bad input; nothing is written.
    """
    from ...checkpoints import ConvertOptions
    from ...checkpoints.requests import Request
    from ...checkpoints.workers import jobs

    check_report(json_file, source, target)
    size = None if task_bytes is None else parse_size(task_bytes, "--task-bytes")
    options = ConvertOptions(
        from_layout=from_layout,
        to_layout=to_layout,
        format=format,
        rules=rules,
        dtype=dtype,
        settings=parse_settings(settings or []),
        dequantize=dequantize,
        strip=strip,
        drop=drop,
        source_format=source_format,
        adapter=adapter,
        step=step,
        item=item,
    )
    collector.resume()
    asked = Request.of(source, target, options)
    with asked.opened() as prepared:
        planned, tasks = prepared.plan, jobs.tasks_of(prepared.plan, prepared.format, workers, size)
    if json_file is not None:
        write_json({**plan_json(planned), "workers": workers, "tasks": tasks}, json_file)
    if json_file != "-":
        console = make_console()
        print_plan(planned, console, memory_of(planned, workers, size))
        largest = max((task["bytes"] for task in tasks), default=0)
        plural = "task" if len(tasks) == 1 else "tasks"
        console.print(f"{len(tasks)} {plural} of at most {shown_size(largest)}, for --workers {workers}", markup=False)
    return 0


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The division of a conversion among workers.

    Attributes:
        workers: number of workers; None: by cores and size.
        index: the number of this process, among workers that were started independently.
        is_finishing: whether only publishing remains.
        ray: address of the Ray cluster that runs it; "" for any cluster, None without Ray.
        task_bytes: maximum bytes of a task.
    """

    workers: int | None
    index: int | None
    is_finishing: bool
    ray: str | None
    task_bytes: int | None

    @property
    def is_apart(self) -> bool:
        """Return whether other workers may still run when this one ends."""
        return self.index is not None or self.is_finishing

    @property
    def is_many(self) -> bool:
        """Return whether several workers were requested, which this process starts."""
        return not self.is_apart and ((self.workers or 1) > 1 or self.ray is not None)

    @classmethod
    def of(
        cls, workers: str, worker: str | None, is_finishing: bool, ray: str | None, task_bytes: str | None, is_dry: bool
    ) -> Sharing:
        """Return the sharing that the options request.

        Raises:
            ValueError: they contradict one another, or a value is not valid.
        """
        from ...checkpoints.workers import parse

        size = None if task_bytes is None else parse_size(task_bytes, "--task-bytes")
        ways = {"--worker": worker is not None, "--finish": is_finishing, "--ray": ray is not None}
        ways["--dry-run"] = is_dry
        used = [option for option, is_used in ways.items() if is_used]
        if workers != AUTO and "--ray" not in used and "--dry-run" not in used:
            used.append("--workers")
        if len(used) > 1:
            raise ValueError(f"{' and '.join(used)} exclude each other")
        if worker is not None:
            index, count = parse(worker)
            return cls(count, index, False, None, size)
        if workers == AUTO:
            return cls(None, None, is_finishing, ray, size)
        if not workers.isdecimal() or not int(workers):
            raise ValueError(f"--workers ({workers}) must be a whole number of at least 1, or {AUTO}")
        return cls(int(workers), None, is_finishing, ray, size)


def carry_out(
    sharing: Sharing,
    source: Path,
    target: Path,
    options: ConvertOptions,
    planned: Callable[[Plan], None],
    progress: Callable[[int, int, str], None],
) -> Worked:
    """Convert, do a worker's share, or publish the workers' output."""
    from ... import checkpoints
    from ...checkpoints.workers.sharing import Worked

    if sharing.is_finishing:
        return checkpoints.finish(source, target, options, progress=progress, planned=planned)
    if sharing.index is not None and sharing.workers is not None:
        return checkpoints.convert_share(
            source, target, sharing.index, sharing.workers, options, progress=progress, planned=planned
        )
    return Worked(checkpoints.convert(source, target, options, ray=sharing.ray, progress=progress, planned=planned))


def said_of(sharing: Sharing, done: Worked, target: Path) -> str:
    """Return the report of a worker that published nothing."""
    from ...checkpoints.containers.files import listed

    if done.was_there:
        return f"{target} is already written"
    share = f"worker {sharing.index}/{sharing.workers} wrote its share of {target}"
    if not done.waits_for:
        return f"{share}; another worker is at its end, too, and publishes"
    return f"{share}; others have yet to write: {listed(done.waits_for, 8)}"
