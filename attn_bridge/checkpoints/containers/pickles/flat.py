"""Contents of a pickle of ``torch.save``: tensors by dotted name, and plain values besides them."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from ....printable import printable
from ..base import CheckpointError
from ..files import bad, check_count, check_name
from ..strided import StridedTensor
from .calls import CALLS, GLOBALS, NAMES, Global, Key, Members, Record, Storage, Strided, holds_data
from .dtensors import PlacedError, RankPart, is_dtensor, part_of
from .machine import Machine
from .ndarrays import Pickled, UnreadableError, array_of, loaded

MAX_DEPTH = 64
"""Dicts within dicts."""

STEPS_PER_BYTE = 16
"""Values that are looked at for each byte of the pickle, at most, to see whether they hold tensors."""

SHOWN = 8
"""Skipped values that a note names."""


OTHER_TENSORS = {
    "_rebuild_sparse_tensor": "it is a sparse tensor; save its to_dense()",
    "_rebuild_qtensor": "it is a quantised tensor; save its dequantize()",
    "_rebuild_wrapper_subclass": "it is of a subclass of torch.Tensor, such as torchao's; save its dequantize()",
    "_rebuild_nested_tensor": "it is a nested tensor; save its to_padded_tensor(0)",
    "_rebuild_meta_tensor_no_storage": "it is on the meta device and has no numbers",
    **dict.fromkeys(("_rebuild_tensor_v2", "_rebuild_tensor_v3"), "it is marked as conjugated or negated; save its "
                    "resolve_conj().resolve_neg()"),
}  # fmt: skip
"""Function of ``torch._utils`` that makes a tensor -> the reason why it is not read, and a remedy."""

DTENSOR = "it is a DTensor"
"""How the reasons begin for which such a tensor is not read."""

SHARD = (
    f"{DTENSOR}, of which each rank saves its own part, and the files of the other ranks are not here; save what "
    "get_model_state_dict (of torch.distributed.checkpoint.state_dict) returns with full_state_dict=True, or a "
    "distributed checkpoint"
)
"""Reason why a tensor of FSDP2 or of tensor parallelism is not read alone, and a remedy."""

PLACED = DTENSOR + " {}; save its full_tensor()"
"""Reason why such a tensor is not put together from its ranks, and a remedy."""

KEYS = "a key of its dicts is of the type"
"""Start of the reason why values below such a key are not read."""

MODULE = "; save the state_dict of what was saved as an object"
"""Advice for an object that holds tensors."""


class NotPlainError(CheckpointError):
    """A value of a type that JSON lacks.

    Attributes:
        kind: the class or function that made it, or its type.
        is_object: whether it is a placeholder.
    """

    kind, is_object = "", False


@dataclasses.dataclass
class Contents:
    """Contents of a pickle.

    Attributes:
        tensors: by dotted name, arrays of NumPy too.
        parts: dotted name of a DTensor -> the part of it that the file's rank holds; `unread` has its name, too.
        values: plain values by dotted name.
        unread: dotted name of a value with tensors that can't be read -> the reason.
        skipped: dotted name of another value -> the class or function that it needs, or its type.
    """

    tensors: dict[str, Strided | StridedTensor] = dataclasses.field(default_factory=dict)
    parts: dict[str, RankPart] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    unread: dict[str, str] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """Return a line on the skipped values: the first few names, and the number of the rest."""
        if not self.skipped:
            return ()
        descriptions = [f"{printable(name)} ({printable(kind)})" for name, kind in list(self.skipped.items())[:SHOWN]]
        more = f" and {len(self.skipped) - SHOWN} more" if len(self.skipped) > SHOWN else ""
        return (f"skipped, as they are neither tensors nor plain values: {', '.join(descriptions)}{more}",)


def read_pickle(data: bytes, path: Path) -> Contents:
    """Return the tensors of a pickled dict by dotted name, its plain values, and the entries that are not read.

    Nothing is executed: an object of an unsupported class is skipped by name.

    Args:
        data: the pickle.
        path: named in errors.

    Raises:
        CheckpointError: it is damaged, or has no readable tensor.
    """
    # Each value takes a byte of the pickle, so more values than bytes are the same ones again.
    return _Flattening(path, most=len(data)).of(Machine(data, path, placeholders=True).run())


class PlainValues:
    """Converts values of a pickle to plain values, in a bounded number of steps.

    Args:
        path: named in errors.
        most: maximum number of steps.
    """

    def __init__(self, path: Path, most: int):
        self._path, self._left = path, most

    def count(self, name: str, depth: int) -> None:
        """Count a step."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise bad(self._path, f"{printable(name)} is nested too deeply or repeated too often")

    def value(self, value: object, name: str, depth: int = 0) -> Any:
        """Return a value with its tuples and sets as lists, its dtypes and its keys as strings.

        Raises:
            NotPlainError: it is, or contains, a type that JSON lacks.
            CheckpointError: it is nested too deeply.
        """
        self.count(name, depth)
        if isinstance(value, Strided):
            raise self._not_plain(f"{printable(name)} is a list with tensors; only dicts of them are read", "a tensor")
        if isinstance(value, list | tuple | Members):
            members = value.items if isinstance(value, Members) else value
            return [self.value(one, name, depth + 1) for one in members]
        if isinstance(value, dict):
            for key in value:
                if isinstance(key, Record | Key):
                    kind = kind_of(key)
                    raise self._not_plain(f"{printable(name)} has a key of the type {printable(kind)}", kind)
            whole = {str(key): self.value(one, name, depth + 1) for key, one in value.items()}
            if len(whole) < len(value):
                raise self._not_plain(f"{printable(name)} has a key as a number and as text", "dict")
            return whole
        if isinstance(value, Global) and value.name in NAMES:
            return value.name
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        problem = f"{printable(name)} is neither a tensor nor a plain value: {printable(repr(value), 60)}"
        error = self._not_plain(problem, kind_of(value))
        error.is_object = isinstance(value, Record | Global)
        raise error

    def _not_plain(self, reason: str, kind: str) -> NotPlainError:
        error = NotPlainError(str(bad(self._path, reason)))
        error.kind = kind
        return error


def kind_of(value: object) -> str:
    """Return the class or function that a placeholder represents, or a value's own type."""
    if isinstance(value, Key):
        return kind_of(value.value)
    if isinstance(value, Record) and value.name in CALLS:  # the unsupported part is one of its arguments
        others = [
            one for one in value.arguments if isinstance(one, Record | Global) and one.name not in GLOBALS - NAMES
        ]
        return kind_of(others[0]) if others else value.name
    if isinstance(value, Record | Global):
        return value.name
    if isinstance(value, float):
        return repr(value)
    return {Storage: "a storage", Members: "set"}.get(type(value), type(value).__name__)


class _Flattening:
    """Assigns dotted names to the contents of nested dicts, and numbers to those of lists with tensors."""

    def __init__(self, path: Path, most: int):
        self._path = path
        self._plain = PlainValues(path, most)
        self._steps = most * STEPS_PER_BYTE
        self._contents = Contents()
        self._first: CheckpointError | None = None

    def of(self, root: object) -> Contents:
        """Return the contents of a pickle.

        Raises:
            CheckpointError: it has no readable tensor, but an unreadable one.
        """
        path, contents = self._path, self._contents
        if isinstance(root, Record | Global):
            raise self._refers(root.name, MODULE if isinstance(root, Record) and self._holds_data(root) else "")
        if isinstance(root, Strided):
            raise bad(
                path, 'holds a single tensor, not a dict of them: torch.save({"x": tensor}, FILE) gives it a name'
            )
        is_list = isinstance(root, list | tuple) and self._holds_data(root)
        if not is_list and not isinstance(root, dict):
            raise bad(path, f"holds a {type(root).__name__}, not a dict of tensors")
        self._walk(root, "", 0)
        check_count(path, len(contents.tensors))
        if not contents.tensors and not contents.parts:
            for name, reason in contents.unread.items():
                is_class = reason.startswith("its pickle")
                if reason.startswith(KEYS):
                    raise bad(path, reason)
                raise bad(
                    path,
                    f"{reason}, which is refused{MODULE}"
                    if is_class
                    else f"{printable(name)} {reason.removeprefix('it ')}",
                )
            if self._first is not None:
                raise self._first
        return contents

    def _refers(self, name: str, advice: str = "") -> CheckpointError:
        return CheckpointError(
            str(bad(self._path, f"its pickle refers to {printable(name)}, which is refused{advice}"))
        )

    def _holds_data(self, value: object) -> bool:
        return holds_data(value, self._count)

    def _count(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise bad(self._path, "its pickle repeats values too often")

    def _walk(self, value: object, name: str, depth: int) -> None:
        self._plain.count(name, depth)
        if isinstance(value, dict) and (value or not name):
            for key, element in value.items():
                is_odd = isinstance(key, Record | Key)
                self._enter(f"({kind_of(key)})" if is_odd else str(key), element, name, depth, is_odd=is_odd)
        elif isinstance(value, list | tuple) and self._holds_data(value):
            for number, element in enumerate(value):
                self._enter(str(number), element, name, depth)
        elif isinstance(value, Strided):
            check_name(self._path, name)
            self._check_new(name)
            self._contents.tensors[name] = value
        elif (pickled := array_of(value)) is not None and name:
            self._place(pickled, check_name(self._path, name))
        elif is_dtensor(value):
            self._check_new(check_name(self._path, name))
            self._place_part(value, name)
        elif not isinstance(value, dict) and self._holds_data(value):
            self._check_new(check_name(self._path, name))
            kind = kind_of(value)
            reason = f"its pickle refers to {printable(kind)}"
            if re.fullmatch(r"torch\.[a-z]+[0-9]\w*", kind):
                reason = f"it is of the dtype {printable(kind)}, which is not read; cast it, or view it as bytes"
            reason = OTHER_TENSORS.get(kind.removeprefix("torch._utils."), reason)
            self._contents.unread[name] = reason
        else:
            self._keep(value, name, depth)

    def _place(self, pickled: Pickled, name: str) -> None:
        """Note an array of NumPy, or why its elements can't be those of a tensor."""
        self._check_new(name)
        try:
            self._contents.tensors[name] = loaded(self._path, name, pickled)
        except UnreadableError as error:
            self._contents.unread[name] = str(error)

    def _place_part(self, value: object, name: str) -> None:
        """Note the part of a DTensor that this rank holds: a tensor, if it is all of it."""
        try:
            part = part_of(value)
        except PlacedError as error:
            self._contents.unread[name] = PLACED.format(error)
            return
        if part.is_whole and part.local.shape == part.shape:
            self._contents.tensors[name] = part.local
        else:
            self._contents.parts[name] = part
            self._contents.unread[name] = SHARD

    def _enter(self, part: str, value: object, above: str, depth: int, *, is_odd: bool = False) -> None:
        """Descend into a value; the values of empty or non-string keys get no name, and are skipped or refused."""
        name = f"{above}.{part}" if above else part
        if part and not is_odd:
            self._walk(value, name, depth + 1)
            return
        reason = f"a key in {printable(above) or 'its dict'} is {f'a {part}' if part else 'empty'}"
        if not self._holds_data(value):
            self._skip(name, part.strip("()") or "an empty key", bad(self._path, reason))
        elif part:
            self._contents.unread[name] = f"{KEYS} {part.strip('()')}; save it below text"
        else:
            raise bad(self._path, reason)

    def _keep(self, value: object, name: str, depth: int) -> None:
        """Keep a plain value; a vocabulary's keys may be names that no tensor has."""
        try:
            check_name(self._path, name)
            self._check_new(name)
        except CheckpointError as error:
            self._skip(name, "not a name", error)
            return
        try:
            self._contents.values[name] = self._plain.value(value, name, depth)
        except NotPlainError as error:
            self._skip(name, error.kind, self._refers(error.kind) if error.is_object else error)

    def _skip(self, name: str, kind: str, error: Exception) -> None:
        self._contents.skipped[name] = kind
        if self._first is None:
            self._first = CheckpointError(str(error))

    def _check_new(self, name: str) -> None:
        contents = self._contents
        if any(name in some for some in (contents.tensors, contents.values, contents.unread, contents.skipped)):
            how = "keys are joined by dots, numbers as text; save one under another name"
            raise bad(self._path, f"{printable(name)} comes twice, as {how}")
