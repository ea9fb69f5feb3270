"""Correctness and speed of an accelerator on one page: ``make accelerator``.

python -m benchmarks.accelerator [--markdown docs/accelerators.md] [--only NAME] [--with NAME ARGUMENTS] [--quick]

It runs `attn-bridge doctor`, the matrix of `attn-bridge check`, the suite, the benchmarks of attention, and decoding,
one after the other, each as the command that the page shows. The page is rewritten after each, so that an interrupted
run keeps its measurements. Exit status: 0 = everything passed, 1 = a section failed, 2 = no accelerator.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_bridge.cli.output import check_writable

from .measuring import machine
from .sides import jax_side, torch_side

ROOT = Path(__file__).parent.parent
TAIL = 60
"""Lines of a long output that the page keeps, from its end."""

LENGTHS = (8192, 32768)
"""Tokens in the cache of the decoding benchmark."""


@dataclass(frozen=True)
class Section:
    """One command and its section of the page.

    Attributes:
        name: word for it on the command line.
        title: its heading.
        command: its arguments, after Python's own path.
        quick: further arguments that make it small.
        settings: variables of its environment.
        passes: exit statuses of a successful command.
    """

    name: str
    title: str
    command: tuple[str, ...]
    quick: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    passes: tuple[int, ...] = (0,)


SHARED = "XLA_PYTHON_CLIENT_PREALLOCATE=false"
"""Both frameworks, and all processes of the suite, share the memory of a GPU."""

SECTIONS = (
    Section("doctor", "What is here", ("-m", "attn_bridge", "doctor"), passes=(0, 1)),  # 1: settings are unsafe
    Section(
        "check",
        "The twins",
        ("-m", "attn_bridge", "check"),
        ("LayerNorm", "dot_product_attention", "--case", "one-token", "--case", "windowed", "--seeds", "1"),
    ),
    Section(
        "suite",
        "The suite",
        ("-m", "pytest", "-q", "-n", "4", "parity_tests/contract", "parity_tests/torch_side", "parity_tests/jax_side"),
        ("-k", "LayerNorm and bad_calls"),
        ("JAX_DEFAULT_MATMUL_PRECISION=highest",),  # JAX multiplies float32 in fewer bits on a GPU or TPU
    ),
    Section("attention", "Attention and modules", ("-m", "benchmarks", "--summary"), ("--quick",)),
    *(
        Section(
            f"decoding-{length}",
            f"Decoding with {length:,} tokens in the cache",
            ("-m", "benchmarks.decoding", "--length", str(length)),
            ("--length", "64", "--rounds", "1"),
        )
        for length in LENGTHS
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the page, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", default="docs/accelerators.md", metavar="FILE", help="the page to write")
    names = [one.name for one in SECTIONS]
    parser.add_argument("--only", action="append", choices=names, help="one section; may be repeated")
    more = {"action": "append", "nargs": 2, "metavar": ("NAME", "ARGUMENTS"), "default": []}
    parser.add_argument(
        "--with", dest="more", **more, help="further arguments of a section, such as: check '--seeds 1'"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast it is")
    parser.add_argument("--on-cpu", action="store_true", help="run without an accelerator, to try this command")
    parser.add_argument("--limit", type=int, default=3600, metavar="SECONDS", help="the most that one section takes")
    options = parser.parse_args(arguments)
    further = {name: shlex.split(text) for name, text in options.more}
    unknown = sorted(further.keys() - set(names))
    if unknown:
        parser.error(f"--with {unknown[0]}: there is no such section; they are {', '.join(names)}")
    accelerators = devices()
    if not any(accelerators.values()) and not options.on_cpu:
        print("error: no accelerator: torch and JAX see a processor alone; --on-cpu runs anyway", file=sys.stderr)
        return 2
    try:
        check_writable(options.markdown, "--markdown")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts, passed = [head(accelerators)], True
    for section in SECTIONS:
        if options.only and section.name not in options.only:
            continue
        print(f"{section.title} ...", file=sys.stderr, flush=True)
        status, part = run(section, further.get(section.name, ()), options.quick, options.limit)
        passed = passed and status == 0
        parts.append(part)
        Path(options.markdown).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {options.markdown}: {'all of it passed' if passed else 'something failed'}")
    return 0 if passed else 1


def devices() -> dict[str, str | None]:
    """Return the accelerator that each framework runs on, None for a processor."""
    sides = {"torch": torch_side.describe()["device"], "jax": jax_side.describe()["device"]}
    return {name: None if device == "cpu" else device for name, device in sides.items()}


def head(accelerators: dict[str, str | None]) -> str:
    """Return the beginning of the page: hardware and versions."""
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    lines = machine.sentences({**machine.describe(), "frameworks": sides})
    on = ", ".join(f"{name} on {device or 'a processor'}" for name, device in accelerators.items())
    made = f"Made by `make accelerator` on {time.strftime('%Y-%m-%d')}: {on}."
    return "\n\n".join(["# Accelerators", made, "\n".join(f"- {line}" for line in lines)])


def run(section: Section, further: Sequence[str], quick: bool, limit: int) -> tuple[int, str]:
    """Run a section's command; return its exit status and its part of the page."""
    command = (*section.command, *(section.quick if quick else ()), *further)
    settings = (SHARED, *section.settings)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, timeout=limit, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | dict(one.split("=") for one in settings),
        )  # fmt: skip
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        output = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        status, output = 124, f"{output}\nstopped after {limit} s"
    lines = output.rstrip().splitlines()
    if len(lines) > TAIL:
        lines = [f"({len(lines) - TAIL} lines before)", *lines[-TAIL:]]
    verdict = "passed" if status in section.passes else f"FAILED with status {status}"
    command_line = shlex.join((*settings, "python", *command))
    text = "\n".join(line.rstrip() for line in lines).replace("```", "'''")
    took = time.perf_counter() - start
    part = f"## {section.title}\n\n`{command_line}`: {verdict} in {took:.0f} s\n\n```text\n{text}\n```"
    return 0 if status in section.passes else status, part


if __name__ == "__main__":
    sys.exit(main())
