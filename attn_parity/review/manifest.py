"""The manifest of a repository, ``parity.toml``: the pairs that a review judges.

In: a text and the folder of the repository. Out: `ManifestPair` objects, whose paths are inside that folder.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path, PurePosixPath, PureWindowsPath

from attn_bridge.printable import printable

from ..results import allowances
from ..results.changes import Data
from ..samples.limits import MAX_SEEDS
from ..sides.arrays import DTYPES

NAME = "parity.toml"

MAX_BYTES = 1 << 20
"""Bytes of the largest manifest."""

MAX_PAIRS = 1000
"""Pairs of the largest manifest."""

MAX_LINE = 4000
"""Characters of the longest line: a key with more dots keeps the parser busy for minutes."""

MAX_TEXT = 1000
"""Characters of a value; all values of a pair become words of one command line."""

MAX_VALUES = 500
"""Values of a list or a table."""

_LFS = "version https://git-lfs.github.com/spec/"

_PAIR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of pairs, which are names of files, too."""

_SHAPE = re.compile(r"[1-9][0-9]*(,[1-9][0-9]*)*")
_SIDE = re.compile(r"[^\s:-][^:\0]*:[^\W\d][\w.]*")


class ManifestError(ValueError):
    """The manifest is malformed, or names something outside of its repository."""


@dataclasses.dataclass(frozen=True)
class ManifestPair:
    """One pair of a manifest; the attributes are the keys of its ``[[pair]]`` table.

    Attributes:
        name: unique name.
        first: the first side, ``file.py:factory`` or ``module:factory``.
        second: the second side.
        inputs: file of the inputs, None for `shapes` or ``example_inputs()``.
        shapes: shapes of drawn inputs.
        dtypes: precisions; empty for the modules' own.
        seeds: number of draws; None for the default of `compare`.
        rules: rules file.
        fixed: inputs that are never drawn.
        vary: inputs of whole numbers that are drawn.
        allow: path -> why it may differ.
    """

    name: str
    first: str
    second: str
    inputs: str | None = None
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    seeds: int | None = None
    rules: str | None = None
    fixed: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    allow: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The command line of its comparison, behind ``attn-bridge``; a value never reads as an option."""
        words = ["compare", self.first, self.second]
        options: dict[str, Sequence[object]] = {
            "--inputs": [self.inputs] if self.inputs else [],
            "--shape": self.shapes,
            "--dtype": self.dtypes,
            "--seeds": [self.seeds] if self.seeds else [],
            "--rules": [self.rules] if self.rules else [],
            "--fixed": self.fixed,
            "--vary": self.vary,
            "--allow": [f"{path}={reason}" for path, reason in self.allow.items()],
        }
        return [*words, *(f"{option}={value}" for option, values in options.items() for value in values)]

    @property
    def files(self) -> Iterator[str]:
        """The paths that it names."""
        for path in (self.inputs, self.rules, *map(file_of, (self.first, self.second))):
            if path is not None:
                yield path


def file_of(side: str) -> str | None:
    """Return the file of ``file.py:factory``; None for ``module:factory``."""
    where = side.rpartition(":")[0]
    return where if where.endswith(".py") or "/" in where else None


def read(path: Path) -> tuple[ManifestPair, ...]:
    """Return the pairs of a manifest file; its folder is the repository.

    Raises:
        ManifestError: it is missing or malformed, or names something outside of the repository or missing.
    """
    if path.is_symlink() or not path.is_file():
        raise ManifestError(f"{path.name} does not exist, or is not a file")
    if path.stat().st_size > MAX_BYTES:
        raise ManifestError(f"{path.name} has more than {MAX_BYTES} bytes")
    try:
        pairs = parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ManifestError(f"{path.name} is not UTF-8 text") from None
    root = path.parent.resolve()
    for pair in pairs:
        for file in pair.files:
            _check_inside(pair.name, file, root)
    return pairs


def parse(text: str) -> tuple[ManifestPair, ...]:
    """Return the pairs of a manifest's text; see `read`.

    Raises:
        ManifestError: it is malformed.
    """
    if text.startswith(_LFS):
        raise ManifestError(f"{NAME} is a pointer of Git LFS, and not the file; commit the file itself")
    longest = max(map(len, text.splitlines()), default=0)
    if longest > MAX_LINE:
        raise ManifestError(f"{NAME} has a line of {longest} characters; at most {MAX_LINE}")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(f"{NAME} is not TOML: {printable(error)}") from None
    for key in data:
        if key != "pair":
            raise ManifestError(f"{NAME} has no key {printable(key)}; it has [[pair]] tables")
    tables = data.get("pair")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ManifestError(f"{NAME} must have at least one [[pair]] table")
    if len(tables) > MAX_PAIRS:
        raise ManifestError(f"{NAME} has {len(tables)} pairs; at most {MAX_PAIRS}")
    pairs = tuple(_pair(table, number) for number, table in enumerate(tables, 1))
    names: set[str] = set()
    for pair in pairs:
        # Names differ in more than case: they are names of files.
        if pair.name.lower() in names:
            raise ManifestError(f"{NAME} names two pairs {pair.name}")
        names.add(pair.name.lower())
    return pairs


def _pair(table: Mapping[str, object], number: int) -> ManifestPair:
    where = f"{NAME}: pair {number}"
    name = table.get("name")
    if not isinstance(name, str) or not _PAIR_NAME.fullmatch(name):
        raise ManifestError(f"{where}: name ({printable(name)}) must be letters, digits, '.', '_' and '-'")
    where = f"{NAME}: pair {name}"
    for key in table:
        if key not in _CHECKS:
            raise ManifestError(f"{where} has no key {printable(key)}; it has {', '.join(_CHECKS)}")
    for key in ("first", "second"):
        if key not in table:
            raise ManifestError(f"{where} needs the key {key}")
    if table.get("inputs") and table.get("shapes"):
        raise ManifestError(f"{where}: inputs and shapes do not go together")
    values: Data = {key: _CHECKS[key](value, f"{where}: {key}") for key, value in table.items()}
    return ManifestPair(**values)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value or not _fits(value):
        raise ManifestError(f"{where} ({printable(value)}) must be a text of at most {MAX_TEXT} characters without NUL")
    return value


def _fits(text: str) -> bool:
    """Return whether a text can be part of a command line, and is short."""
    return len(text) <= MAX_TEXT and "\0" not in text


def _check_count(values: Sized, where: str) -> None:
    if len(values) > MAX_VALUES:
        raise ManifestError(f"{where} has {len(values)} values; at most {MAX_VALUES}")


def _side(value: object, where: str) -> str:
    side = _text(value, where)
    if not _SIDE.fullmatch(side):
        raise ManifestError(f"{where} ({printable(side)}) must read file.py:factory or module:factory")
    file = file_of(side)
    if file is not None:
        _path(file, where)
    return side


def _path(value: object, where: str) -> str:
    path = _text(value, where)
    pure = PurePosixPath(path)
    is_windows = PureWindowsPath(path).drive or "\\" in path
    if pure.is_absolute() or ".." in pure.parts or is_windows or path.startswith(("-", "~")):
        raise ManifestError(
            f"{where} ({printable(path)}) must be a path inside the repository, with '/' and without '..'"
        )
    if ".git" in (part.lower() for part in pure.parts):
        raise ManifestError(f"{where} ({printable(path)}) must not be in .git")
    return path


def _texts(check: Callable[[str], bool], rule: str) -> Callable[[object, str], tuple[str, ...]]:
    def checked(value: object, where: str) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ManifestError(f"{where} ({printable(value)}) must be a list of {rule}")
        _check_count(value, where)
        for each in value:
            if not isinstance(each, str) or not _fits(each) or not check(each):
                raise ManifestError(f"{where} ({printable(each)}) must be {rule}")
        return tuple(value)

    return checked


def _seeds(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SEEDS:
        raise ManifestError(f"{where} ({printable(value)}) must be a whole number from 1 to {MAX_SEEDS}")
    return value


def _allow(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or any("=" in path or not isinstance(reason, str) for path, reason in value.items()):
        raise ManifestError(
            f"{where} ({printable(value)}) must be a table of path = reason, quoted, without '=' in a path"
        )
    _check_count(value, where)
    for text in (text for entry in value.items() for text in entry if not _fits(text)):
        raise ManifestError(
            f"{where} ({printable(text)}) must have paths and reasons of at most {MAX_TEXT} characters without NUL"
        )
    try:
        return allowances.checked(value, where)
    except ValueError as error:
        raise ManifestError(printable(error, 400)) from None


_NAMES = _texts(bool, "names of inputs")

_CHECKS: Mapping[str, Callable[[object, str], object]] = {
    "name": _text,
    "first": _side,
    "second": _side,
    "inputs": _path,
    "shapes": _texts(lambda text: bool(_SHAPE.fullmatch(text)), "whole numbers from 1 with commas, such as 2,7,16"),
    "dtypes": _texts(lambda text: text in DTYPES, f"one of {', '.join(DTYPES)}"),
    "seeds": _seeds,
    "rules": _path,
    "fixed": _NAMES,
    "vary": _NAMES,
    "allow": _allow,
}
"""Key -> function that returns its value, or raises."""


def _check_inside(pair: str, file: str, root: Path) -> None:
    """Check that a file exists in the repository, also after following links."""
    try:
        path = (root / file).resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError):
        is_file = False
    if not is_file:
        raise ManifestError(f"{NAME}: pair {pair}: {printable(file)} does not exist")
    if not path.is_relative_to(root):
        raise ManifestError(f"{NAME}: pair {pair}: {printable(file)} leads out of the repository")
