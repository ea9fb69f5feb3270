"""Pickled trees of NumPy and JAX arrays, such as parameters of Haiku: read whole, and nothing of them is executed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ....printable import printable
from ..files import bad, check_count, check_name
from ..sources import OrderedReader
from ..strided import StridedTensor
from .calls import Record, holds_data
from .flat import MAX_DEPTH, SHOWN, STEPS_PER_BYTE, NotPlainError, PlainValues
from .machine import Machine
from .ndarrays import Pickled, UnreadableError, array_of, loaded

MAX_BYTES = 1 << 31
"""Bytes of a file: all of it is in memory while it is read."""

MAX_HEAD = 1 << 16
"""Bytes at the beginning of a file that name the library that wrote it."""

MAPPINGS = (
    *(f"haiku._src.data_structures.{name}" for name in ("FlatMapping", "FlatMap", "frozendict")),
    "flax.core.frozen_dict.FrozenDict",
)
"""Classes of dicts that can't be changed, which are pickled as a call with a dict."""


class PickledReader(OrderedReader[StridedTensor]):
    """One file; names are the keys joined by dots, lists and tuples are numbered. `metadata` has plain values."""

    format: ClassVar[str] = "pickle"

    def _read_headers(self) -> None:
        path, file = self.path, self._file
        if file.size > MAX_BYTES:
            raise bad(path, f"has {file.size} bytes; pickles of at most {MAX_BYTES} are read")
        data = bytes(file.read(0, file.size))
        if data[:1] != b"\x80":  # every protocol since 2
            from ..mistaken import kind_of

            other = kind_of(file, self.format)
            if other:
                raise bad(path, other)
        file.close()
        if b"joblib.numpy_pickle" in data[:MAX_HEAD]:  # arrays lie between the operations of its pickle
            raise bad(path, "is of joblib.dump: save the dict of arrays that joblib.load makes of it by numpy.savez")
        self._plain, self._steps = PlainValues(path, len(data)), len(data) * STEPS_PER_BYTE
        skipped: dict[str, str] = {}
        for name, value in self._leaves(Machine(data, path, placeholders=True).run(), "", 0):
            pickled = array_of(value)
            if pickled is not None and not name:
                raise bad(path, "is a single array without a name; save a dict of arrays, and convert that")
            if pickled is not None:
                self._place(check_name(path, name), pickled)
                continue
            try:
                self.metadata[name] = self._plain.value(value, name)
            except NotPlainError as error:
                skipped[name] = error.kind
                if name and self._holds_data(value):
                    kind = printable(error.kind)
                    self._unread[check_name(path, name)] = (
                        f"it is an object of {kind}, with arrays; save a dict of them"
                    )
        check_count(path, len(self._stored))
        unreadable = [name for name in self._unread if name not in skipped]
        if unreadable and not self._stored:
            raise bad(path, f"{printable(unreadable[0])} {self._unread[unreadable[0]].removeprefix('it ')}")
        if not self._stored:
            first = next((f"; {printable(name) or 'it'} is {printable(kind)}" for name, kind in skipped.items()), "")
            of_torch = any(kind.startswith("torch.") for kind in skipped.values())
            of_nnx = any(kind.startswith("flax.nnx.") for kind in skipped.values())
            remedy = "; torch.save saves tensors" if of_torch else "; save its flax.nnx.to_pure_dict" if of_nnx else ""
            raise bad(path, f"holds no array of NumPy or JAX{first}{remedy}")
        skipped = {name: kind for name, kind in skipped.items() if name not in self._unread}
        if skipped:
            listing = ", ".join(
                f"{printable(name)} ({printable(kind)})" for name, kind in list(skipped.items())[:SHOWN]
            )
            more = f" and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
            self.notes = (f"skipped, as they are neither arrays nor plain values: {listing}{more}",)

    def _leaves(self, value: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
        """Yield dotted name and value of all leaves; a list or tuple without arrays is a leaf."""
        value = _plain_dict(value)
        self._plain.count(name, depth)
        if depth > MAX_DEPTH:
            raise bad(self.path, f"{printable(name)} is nested too deeply")
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        if not items or (isinstance(value, list | tuple) and not any(map(self._may_hold_arrays, value))):
            yield name, value
            return
        for key, inner in items:
            if not isinstance(key, str | int):
                raise bad(self.path, f"{printable(name)} has a key that is neither text nor a number")
            yield from self._leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)

    def _may_hold_arrays(self, value: object) -> bool:
        return isinstance(_plain_dict(value), dict | list | tuple) or self._holds_data(value)

    def _holds_data(self, value: object) -> bool:
        return holds_data(value, self._count)

    def _count(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise bad(self.path, "its pickle repeats values too often")

    def _place(self, name: str, pickled: Pickled) -> None:
        if name in self._stored or name in self._unread:
            raise bad(self.path, f"{printable(name)} comes twice")
        try:
            self._stored[name] = loaded(self.path, name, pickled)
        except UnreadableError as error:
            self._unread[name] = f"it {error}"


def _plain_dict(value: Any) -> object:
    """Return the dict that a class of `MAPPINGS` would be made of, and any other value as it is."""
    is_mapping = isinstance(value, Record) and value.name in MAPPINGS and value.state is None and not value.items
    if is_mapping and len(value.arguments) == 1 and isinstance(value.arguments[0], dict):
        return value.arguments[0]
    return value
