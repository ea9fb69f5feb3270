"""Reads a stack: which side runs, in which phase, and at which line of the user's code."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_OWN = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "jax_attn", "torch_attn")
_CALLING = ("attn_bridge", "attn_parity", "fault_lab")
_TORCH = "torch/autograd"
_BACKWARD = (
    (_TORCH, "backward"),
    (_TORCH, "grad"),
    (_TORCH, "_engine_run_backward"),  # called by the judge without the two above
    ("jax/_src", "backward_pass"),
)
_ROOMS = {("attn_parity", "frameworks", "torch"): "torch", ("attn_parity", "frameworks", "jax"): "flax"}
_PATCHES = ("promotion.py", "patching.py")
"""Files of functions that take the place of a framework's while user code runs: that code called them."""

_INTERCEPTOR = "_Interceptor.__call__"
"""Function through which Linen calls the submodules of the code that runs."""

_FORWARD = ("forward", "__call__")
"""Names of the functions that a module computes its results in."""

_MOST_SHOWN = 60
"""Most characters of an expression that are shown."""

_OF_OPERATIONS = (
    *("torch", "functorch", "jax", "jaxlib", "flax", "haiku", "equinox", "keras", "optax", "chex", "jaxtyping"),
    *("numpy", "scipy", "einops", "einx"),
)
"""Installed packages whose lines name no model: their layers and operations are those that all code calls."""

_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackLine(NamedTuple):
    """A line of code that a stack passes through.

    Attributes:
        file: as Python names it.
        number: of the line.
        function: the name of the function.
        frame: of a live stack.
        instruction: the code of the function and the index of the instruction in it, if known.
    """

    file: str
    number: int
    function: str
    frame: FrameType | None = None
    instruction: tuple[CodeType, int] | None = None


class CallSite(NamedTuple):
    """The user's code that calls for an operation.

    Attributes:
        below: the instructions from the operation to the user's line: every run of this code has the same ones.
        lines: the user's line, and those that call its function, up to the forward pass of a module.
        inner: the innermost line of an installed model that the user's line calls, if the operation is in one.
    """

    below: tuple[object, ...]
    lines: tuple[StackLine, ...]
    inner: StackLine | None = None

    @property
    def where(self) -> str:
        """``file:line`` of the user's line."""
        return f"{_shortened(self.lines[0].file)}:{self.lines[0].number}"

    @property
    def instructions(self) -> tuple[object, ...]:
        """Those of the user's lines: runs of one helper function have other ones where other code calls it."""
        return tuple(line.instruction for line in self.lines)


def live(frame: FrameType | None) -> list[StackLine]:
    """Return the lines of a live stack, the innermost first."""
    lines = []
    while frame is not None:
        code, at = frame.f_code, frame.f_lasti
        lines.append(StackLine(code.co_filename, frame.f_lineno, code.co_name, frame, (code, at)))
        frame = frame.f_back
    return lines


def raised_at(error: BaseException) -> str:
    """Return ``file:line`` of the innermost line of user code that an exception passed through; "" for none.

    User code excludes installed code, the standard library and this repository's packages.
    """
    at, lines = error.__traceback__, []
    while at is not None:
        lines.append(StackLine(at.tb_frame.f_code.co_filename, at.tb_lineno, at.tb_frame.f_code.co_name))
        at = at.tb_next
    return written_at(lines[::-1])


def written_at(lines: Sequence[StackLine]) -> str:
    """Return ``file:line`` of the innermost line of user code in a stack; "" for none."""
    line = user_line(lines, {})
    return "" if line is None else f"{_shortened(line.file)}:{line.number}"


def dumped(text: str) -> list[StackLine]:
    """Return the lines of a stack that `faulthandler` wrote, the innermost first (at most 100 of them)."""
    return [StackLine(file, int(number), function) for file, number, function in _DUMPED.findall(text)]


def outermost_call(lines: Sequence[StackLine]) -> StackLine | None:
    """Return the outermost line in a room of `frameworks`: the one call that is under way."""
    return next((line for line in reversed(lines) if _framework(line.file)), None)


def user_line(lines: Sequence[StackLine], sources: Mapping[str, Path]) -> StackLine | None:
    """Return the innermost line of the sides' own code, else of any code except ours and installed code.

    Args:
        lines: of a stack.
        sources: label of a side -> the folder or file of its code.
    """
    lines = _called(lines)
    for line in lines:
        if any(_is_below(line.file, source) for source in sources.values()):
            return line
    return next((line for line in lines if not _is_installed(line.file)), None)


def _called(lines: Sequence[StackLine]) -> Sequence[StackLine]:
    """Return the lines of the code that we called; those behind it called us."""
    ours = (number for number, line in enumerate(lines) if _is_calling(line.file) and not _is_called(line))
    return lines[: next(ours, len(lines))]


def _is_called(line: StackLine) -> bool:
    return Path(line.file).name in _PATCHES or line.function == _INTERCEPTOR


def call_site(lines: Sequence[StackLine]) -> CallSite | None:
    """Return the place in the user's code of an operation with this stack; None if library code alone leads to it."""
    lines = _called(lines)
    own = [at for at, line in enumerate(lines) if not _is_installed(line.file)]
    if not own:
        return None
    names = (lines[at].function.rpartition(".")[2] for at in own)  # JAX has qualified names
    last = next((number for number, name in enumerate(names) if name in _FORWARD), len(own) - 1)
    below = tuple(line.instruction for line in lines[: own[0] + 1])
    inner = next((line for line in lines[: own[0]] if _is_in_model(line.file)), None)
    return CallSite(below, tuple(lines[at] for at in own[: last + 1]), inner)


def located(sites: Sequence[CallSite], alike: Collection[CallSite]) -> str:
    """Return ``file:line`` of operations, with the differences from other operations of their kind.

    An operation inside a model of an installed library has the line there first.

    Those are their expression where the line has several, and the lines of the call where other code calls the helper
    function that has the line.

    Args:
        sites: of the operations.
        alike: of all operations of their kind.
    """
    mine, own = sites[0], {site.instructions for site in sites}
    others = [site for site in alike if site.below == mine.below and site.instructions not in own]
    texts: list[str] = []
    for depth, line in enumerate(mine.lines):
        if depth and not others:
            break
        others = [site for site in others if site.instructions[: depth + 1] == mine.instructions[: depth + 1]]
        same = (site.lines[depth] for site in alike if len(site.lines) > depth)
        beside = (one for one in same if (one.file, one.number) == (line.file, line.number))
        mixed = len({site.lines[depth].instruction for site in sites if len(site.lines) > depth}) > 1
        is_alone = mixed or all(one.instruction == line.instruction for one in beside)
        where = f"{_shortened(line.file)}:{line.number}"
        if not depth and mine.inner is not None and len({site.inner and site.inner[:2] for site in sites}) == 1:
            where = f"{_shortened(mine.inner.file)}:{mine.inner.number}, called at {where}"
        if depth:
            where = f"called in line {line.number}" if line.file == mine.lines[0].file else f"called at {where}"
        texts.append(where if is_alone else f"{where} `{_expression(line)}`")
    return ", ".join(texts)


def _expression(line: StackLine) -> str:
    """Return the source of the expression that an instruction computes, in at most `_MOST_SHOWN` characters."""
    code, at = line.instruction or (None, 0)
    positions = [] if code is None else [*code.co_positions()][at // 2 : at // 2 + 1]
    first, last, start, end = positions[0] if positions else (None,) * 4
    text = linecache.getline(line.file, first or line.number).encode()
    whole = first is not None and first == last
    source = " ".join(text[start : end if whole else None].decode(errors="replace").split())
    return source if whole and len(source) <= _MOST_SHOWN else f"{source[: _MOST_SHOWN - 2]} …"


def is_in_library(lines: Sequence[StackLine]) -> bool:
    """Return whether what runs is a library that is being imported, and not the code that imports it."""
    library = Path(os.__file__).resolve().parent
    files = [Path(line.file) for line in lines if not line.file.startswith("<")]
    inner = next((file for file in files if "site-packages" in file.parts or not file.is_relative_to(library)), None)
    return inner is not None and _is_installed(str(inner))


def side_of(call: StackLine | None, line: StackLine | None, sources: Mapping[str, Path]) -> str:
    """Return the label of the side that runs; "" if the stack does not show it.

    Args:
        call: from `outermost_call`.
        line: from `user_line`.
        sources: label of a side -> the folder or file of its code.
    """
    for label, source in sources.items():
        if label and line is not None and _is_below(line.file, source):
            return label
    return _framework(call.file) if call is not None else ""


def doing(what: str, lines: Sequence[StackLine]) -> str:
    """Return a phase as a sentence names it; ``running`` is a backward pass where the stack has one."""
    calls = {(Path(line.file).as_posix(), line.function) for line in lines}
    is_backward = any(part in file and function == name for file, function in calls for part, name in _BACKWARD)
    return "computing its gradient" if what == "running" and is_backward else what


def place(line: StackLine) -> str:
    """Return file, number, function and text of a line."""
    source = linecache.getline(line.file, line.number).strip()
    return f"{_shortened(line.file)}:{line.number} in {line.function}" + (f": {source}" if source else "")


def _shortened(file: str) -> str:
    """Return a path relative to the working folder, or to the installed packages, if it is below them.

    A cell of a notebook is ``cell In[3]``, and any other path is unchanged.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    if cell is not None:
        return " ".join(cell).replace("Cell", "cell")  # a cell's file is a temporary one that its readers don't know
    path = Path(file)
    with contextlib.suppress(ValueError, OSError):  # OSError: the working folder is gone
        path = path.relative_to(Path.cwd())
    if "site-packages" in path.parts[1:]:  # not a folder of the user's with this name
        return path.as_posix().rpartition("/site-packages/")[2]
    return file if path == Path(file) else path.as_posix()


def _framework(file: str) -> str:
    """Return the label of the side whose room a file is in, "" if it is in none."""
    parts = Path(file).parts
    runs = {parts[start : start + 3] for start in range(len(parts))}
    return next((name for room, name in _ROOMS.items() if room in runs), "")


@functools.lru_cache(maxsize=4096)
def _is_calling(file: str) -> bool:
    """Return whether a file is in one of the packages that call code of users."""
    return any(_is_below(file, _ROOT / package) for package in _CALLING)


def _is_below(file: str, source: Path) -> bool:
    return Path(file).is_relative_to(source)


@functools.lru_cache(maxsize=4096)
def _is_in_model(file: str) -> bool:
    """Return whether a file is in an installed package of models, such as `transformers`."""
    _, folder, inside = file.replace(os.sep, "/").rpartition("/site-packages/")
    return bool(folder) and inside.partition("/")[0] not in _OF_OPERATIONS and not _is_calling(file)


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    if file.startswith("<"):
        return True
    path = Path(file)
    library = Path(os.__file__).resolve().parent
    is_own = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _OWN
    return is_own or path.is_relative_to(library) or "site-packages" in path.parts
