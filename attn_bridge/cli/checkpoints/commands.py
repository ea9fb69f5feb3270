"""``attn-bridge convert``, ``inspect`` and ``verify``: checkpoints between layouts and containers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...printable import printable
from .. import collector
from ..output import open_in_browser, temporary_page, write_json
from . import tasks
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
    Memory,
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
    summary,
)
from .page import check_page, write_page
from .places import place

if TYPE_CHECKING:
    from ...checkpoints.planning.plans import Plan

REDRAW = 0.1
"""Seconds between two pictures of a bar."""


def convert(
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, from headers alone; write nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    max_memory: Memory = None,
    workers: Annotated[
        str, typer.Option(metavar="N|auto", help="Processes that share the work; auto: as many as pay, often one.")
    ] = "auto",
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="I/N|auto",
            help="Do share I of N, from 0, of workers on any machines; auto: as torchrun or Slurm says. The last "
            "one to end publishes.",
        ),
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Check and publish what workers wrote, if the last one could not.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Have tasks of Ray do it, on the cluster of that address, or any."),
    ] = None,
    task_bytes: TaskBytes = None,
    json_file: Json = None,
) -> int:
    """Convert a checkpoint to another layout and container, tensor by tensor, without losing a bit.

    Layouts: torch, flax, book, fused-qkv, torch-mha, nnx-mha, linen-mha, hf-gpt2, nanogpt, hf-bert, hf-llama,
    hf-phi3, hf-diffllama, hf-mixtral, hf-gemma, hf-qwen3-moe, hf-afmoe, hf-apertus, hf-arcee, hf-aria-text,
    hf-axk1, hf-bert-decoder, hf-bert-generation, hf-big-bird, hf-bigbird-pegasus, hf-biogpt, hf-bitnet,
    hf-blenderbot, hf-blenderbot-small, hf-codegen, hf-cohere, hf-ctrl, hf-data2vec-text, hf-dots1, hf-electra,
    hf-ernie, hf-ernie4-5-moe, hf-exaone-moe, hf-falcon, hf-flex-olmo, hf-flint, hf-glm, hf-glm4, hf-glm4-moe,
    hf-gpt-bigcode, hf-gpt-neo, hf-gpt-neox, hf-gpt-neox-japanese, hf-gptj, hf-granite-swa, hf-granitemoe,
    hf-granitemoe-swa, hf-granitemoeshared, hf-hunyuan-v1-dense, hf-hunyuan-v1-moe, hf-hy-v3, hf-hyperclovax,
    hf-jais2, hf-kolibri1, hf-laguna, hf-marian, hf-mbart, hf-megatron-bert, hf-minimax-m2, hf-mpt, hf-mvp,
    hf-nanochat, hf-openai-gpt, hf-opt, hf-pegasus, hf-persimmon, hf-phi, hf-phimoe, hf-qwen2-moe, hf-rembert,
    hf-roberta, hf-roberta-prelayernorm, hf-solar-open, hf-stablelm, hf-starcoder2, hf-trocr, hf-vaultgemma,
    hf-whisper-decoder, hf-xglm, hf-xlm-roberta-xl, hf-gpt-oss, hf-olmo, hf-olmo2, hf-deepseek, hf-qwen3-next,
    hf-qwen3-5, hf-mamba2, hf-bamba, hf-mamba, hf-jamba, hf-lfm2, hf-lfm2-moe, hf-lfm3, hf-gemma3n, hf-gemma4,
    hf-gemma4-moe, hf-llama4, hf-cohere2-moe, hf-roformer, hf-granitemoehybrid, hf-granitemoehybrid-dense,
    hf-falcon-h1, hf-nemotron-h, hf-minimax, hf-mimo-v2-flash, hf-modernbert-decoder, hf-kimi-linear,
    hf-olmo-hybrid, hf-dbrx, hf-bloom, hf-bart, hf-whisper, hf-t5, hf-umt5, meta-llama, openai-gpt-oss, book-llama3,
    book-qwen3, book-gemma3, tunix-llama3, tunix-qwen2, tunix-qwen3, tunix-gemma3, gemma-linen, maxtext, vllm,
    gguf-llama, gguf-qwen, gguf-gemma, gguf-gpt2, flax-gpt2, flax-bert, flax-llama, flax-bart, flax-t5, keras-gpt2,
    keras-llama, keras-mistral, keras-qwen2, keras-qwen3, keras-gemma, keras-gemma2, keras-gemma3, keras-bert; same
    leaves it.
    Containers: .safetensors (or a folder of them), .pt .pth .bin, .npz, .msgpack, .orbax, .dcp; .gguf is read.
    Workers: --workers N are processes of this machine, --worker I/N is one of several anywhere, --ray
    are tasks of Ray; the bytes are the same for any number of them.

    Example: attn-bridge convert gpt2/ gpt2-flax/ --dry-run

    Exit status: 0 = written (or a share of it), 2 = bad usage or bad input; nothing is left half-written.
    """
    from ... import checkpoints
    from ...checkpoints import containers

    check_report(json_file, source, target)
    memory = None if max_memory is None else parse_size(max_memory)
    shared = tasks.Sharing.of(workers, worker, finish, ray, task_bytes, dry_run)
    options = checkpoints.ConvertOptions(
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
        max_memory=memory,
        task_bytes=shared.task_bytes,
        workers=shared.workers,
        overwrite=overwrite,
        resume=resume,
    )
    console = make_console()

    def show(plan: Plan) -> None:
        collector.resume()
        if json_file == "-":
            return
        for name, reason in plan.dropped.items():
            console.print(f"kept aside: {name}: {reason}", markup=False, soft_wrap=True)
        for note in plan.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        kind = containers.format_of(target, format)
        if shared.is_many and not containers.writer_class(kind).random_access:
            console.print(f"note: a file of {kind} is written by one worker", markup=False)

    if dry_run:
        planned = checkpoints.plan(source, target, options=options)
        show(planned)
        if json_file is not None:
            write_json(plan_json(planned), json_file)
        if json_file != "-":
            print_plan(planned, console, memory_of(planned, shared.workers or 1, shared.task_bytes, memory))
        return 0
    with contextlib.ExitStack() as bar:
        advance: Callable[[int, int, str], None] | None = None

        def begin(plan: Plan) -> None:
            nonlocal planned, advance
            planned = plan
            show(plan)
            advance = bar.enter_context(_bytes_bar())

        def progress(count: int, total: int, name: str) -> None:
            if advance is not None:
                advance(count, total, name)

        done = tasks.carry_out(shared, source, target, options, begin, progress)
    result = done.result
    if json_file is not None:
        data: dict[str, object] = plan_json(planned)
        if result is not None:
            data["changed"], data["resumed"] = result.changed, result.resumed
            data["digests"], data["restart_reason"] = result.digests, result.restart_reason
        if shared.is_apart:
            data["published"], data["waits_for"] = result is not None, list(done.waits_for)
        write_json(data, json_file)
    if json_file == "-":
        return 0
    if result is None or done.was_there:
        console.print(tasks.said_of(shared, done, target), markup=False, soft_wrap=True)
        return 0
    if result.changed:
        total = sum(result.changed.values())
        console.print(f"the cast changed {total} elements of {len(result.changed)} tensors", markup=False)
    if result.resumed:
        console.print(f"{result.resumed} tensors were there from before", markup=False)
    if result.restart_reason:
        console.print(f"restarted: {result.restart_reason}", markup=False, soft_wrap=True)
    console.print(summary(planned, f"wrote {printable(target, 4096)}:"), markup=False, soft_wrap=True)
    return 0


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or folder, or its URL.", parser=place)],
    format: Annotated[
        str | None,
        typer.Option(metavar="CONTAINER", help="Container of PATH, where its extension says none, or another."),
    ] = None,
    step: Step = None,
    item: Item = None,
    full: Annotated[bool, typer.Option("--full", help="Every tensor, not the first of each kind.")] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="[FILE]", help="Write a page with the tree of names and a histogram of each tensor."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that page in a browser.")] = False,
    json_file: Json = None,
) -> int:
    """Show a checkpoint's container, layout, names, shapes and dtypes, from headers alone.

    The page of --html reads every tensor, one at a time.

    Example: attn-bridge inspect model.safetensors --html model.html

    Exit status: 0 = it can be read, 2 = it can't.
    """
    from rich.table import Table

    from ... import checkpoints

    check_report(json_file, path)
    page = temporary_page() if show and html is None else html
    if page is not None:
        check_page(page, path, json_file)
    collector.resume()
    facts = checkpoints.inspect(path, format=format, step=step, item=item)
    if page is not None:
        with _bytes_bar() as advance, checkpoints.open(path, format=format, step=step, item=item) as checkpoint:
            write_page(path, checkpoint, facts, page, advance)
        if show:
            open_in_browser(page)
    if json_file is not None:
        tensors = {
            name: {"dtype": info.dtype, "shape": list(info.shape), "file": info.file, "bytes": info.nbytes}
            for name, info in facts.tensors.items()
        }
        data = {
            "path": str(path),
            "format": facts.format,
            "layout": facts.layout,
            "tensors": tensors,
            "bytes": facts.nbytes,
            "dtypes": facts.dtypes,
            "metadata": facts.metadata,
            "manifest": facts.has_manifest,
        }
        write_json(data, json_file)
    if json_file == "-":
        return 0
    console = make_console()
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "bytes", "file"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, info in facts.tensors.items():
        kind = name if full else re.sub(r"(?<![^.])[0-9]+(?![^.])", "{i}", name)
        shape = " x ".join(map(str, info.shape)) or "scalar"
        kinds.setdefault((kind, info.blocks or info.dtype, shape, shown_size(info.nbytes)), []).append(name)
    for (kind, *rest), names in kinds.items():
        files = dict.fromkeys(facts.tensors[name].file for name in names)
        file = next(iter(files)) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        table.add_row(f"{kind} (x {len(names)})" if len(names) > 1 else names[0], *rest, file)
    console.print(table)
    for note in facts.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in facts.dtypes.items())
    layout = f"layout {printable(facts.layout)}" if facts.layout else f"no known layout ({facts.why})"
    digests = "digests beside it" if facts.has_manifest else "no digests beside it"
    console.print(
        f"{facts.format}, {layout}, {len(facts.tensors)} tensors, {numbers}, {shown_size(facts.nbytes)}, {digests}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[SRC] DST",
            help="What DST was made of, or digests of it, and DST; or DST alone, by its digests.",
            parser=place,
        ),
    ],
    from_layout: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="Layout of SRC; default: as it was converted.")
    ] = None,
    to_layout: Annotated[
        str | None, typer.Option("--to", metavar="LAYOUT", help="Layout of DST; default: as it was converted.")
    ] = None,
    rules: Rules = None,
    settings: Settings = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="SRC was dequantised; default: as the manifest says.")
    ] = False,
    strip: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="What SRC's names lost; default: as the manifest says.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="What was left out of SRC; default: as the manifest says."),
    ] = None,
    source_format: SourceContainer = None,
    adapter: Adapter = None,
    step: Step = None,
    item: Item = None,
    max_memory: Memory = None,
    json_file: Json = None,
) -> int:
    """Check every bit of a checkpoint: by the digests in its manifest, and by converting SRC again in memory.

    SRC may be a file of digest --json; then DST is a checkpoint, a manifest or another such file.

    Example: attn-bridge verify gpt2/ gpt2-flax/

    Exit status: 0 = every bit is right, 1 = something is wrong, 2 = it can't be read.
    """
    from ... import checkpoints
    from ...checkpoints import live

    if len(paths) > 2:
        raise ValueError(f"verify takes [SRC] DST, got {len(paths)} paths")
    check_report(json_file, *paths)
    memory = None if max_memory is None else parse_size(max_memory)
    source = paths[0] if len(paths) == 2 else None
    live_digests = None if source is None else live.read(source)
    named_settings = parse_settings(settings or [])
    if live_digests is not None:
        options = {
            "--from": from_layout,
            "--to": to_layout,
            "--rules": rules,
            "--dequantize": dequantize or None,
            "--strip": strip,
            "--drop": " ".join(drop) if drop else None,
            "--source-format": source_format,
            "--adapter": adapter,
            "--step": step,
            "--item": item,
        }
        for option, value in {**options, "--max-memory": memory}.items():
            if value is not None:
                raise ValueError(f"{option} ({value}) says how a source was converted; {source} holds digests")
    collector.resume()
    with _bytes_bar() as advance:
        verification = (
            live.verify(live_digests, paths[-1], named_settings)
            if live_digests is not None
            else checkpoints.verify(
                source,
                paths[-1],
                from_layout=from_layout,
                to_layout=to_layout,
                rules=rules,
                settings=named_settings,
                dequantize=dequantize,
                strip=strip,
                drop=drop or None,
                source_format=source_format,
                adapter=adapter,
                step=step,
                item=item,
                max_memory=memory,
                progress=advance,
            )
        )
    if json_file is not None:
        data = {
            "passed": verification.passed,
            "tensors": verification.tensors,
            "problems": verification.problems,
            "by_digest": verification.by_digest,
            "by_source": verification.by_source,
        }
        write_json(data, json_file)
    if json_file != "-":
        console = make_console()
        for name, problem in verification.problems.items():
            console.print(f"{name} {problem}", markup=False, soft_wrap=True)
        ways = [
            way for way, used in (("digests", verification.by_digest), ("the source", verification.by_source)) if used
        ]
        verdict = (
            "every bit is right"
            if verification.passed
            else f"{len(verification.problems)} tensor{'s are' if len(verification.problems) > 1 else ' is'} wrong"
        )
        console.print(f"{paths[-1]}: {verdict} ({verification.tensors} tensors, by {' and '.join(ways)})", markup=False)
    return 0 if verification.passed else 1


@contextlib.contextmanager
def _bytes_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """Show bytes, rate and time left on stderr while the terminal is one; nothing otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as stream,
        # Without a thread that redraws it: a process that has threads is not forked for workers.
        Progress(
            *columns, TimeRemainingColumn(), console=Console(file=stream), transient=True, auto_refresh=False
        ) as bar,
    ):
        task = bar.add_task("reading headers")

        last_update = -1.0

        def advance(done: int, total: int, name: str) -> None:
            nonlocal last_update
            is_due = time.monotonic() - last_update > REDRAW
            last_update = time.monotonic() if is_due else last_update
            bar.update(task, description=name[:40], completed=done, total=total, refresh=is_due)

        yield advance
