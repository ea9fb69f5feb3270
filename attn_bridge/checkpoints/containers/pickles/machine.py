"""Pickles interpreted without executing anything: ``pickletools`` names their operations."""

from __future__ import annotations

import contextlib
import io
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....printable import printable
from ..base import CheckpointError
from ..files import bad
from .calls import (
    CALLS,
    GLOBALS,
    QUANTISED,
    STORAGES,
    Global,
    MarkedError,
    Members,
    Record,
    Refused,
    Storage,
    as_key,
    call,
)

MAX_BITS = 512
"""Bits of an integer."""


class Machine:
    """Executes the operations of a pickle that build dicts of tensors, and refuses all others by name.

    Its memory is bounded by the pickle's length.

    Args:
        data: the pickle.
        path: named in errors.
        inert: further names of classes and functions, whose objects and results become a `Record`.
        placeholders: whether all other names become a `Record` as well, instead of being refused.
    """

    def __init__(self, data: bytes, path: Path, inert: frozenset[str] = frozenset(), *, placeholders: bool = False):
        self._placeholders = placeholders
        self._inert = inert
        self._data = data
        self._path = path
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        # A value is copied by a few bytes that fetch it from the memo: without a bound, each round could double it.
        self._copies = len(data)

    def run(self) -> object:
        """Return the pickled value."""
        stream = io.BytesIO(self._data)
        try:
            for operation, argument, start in pickletools.genops(stream):
                step = STEPS.get(operation.name)
                if step is None:
                    raise self._refused(operation.code)
                if operation.name == "GLOBAL" and start is not None:
                    # pickletools resolves escapes here, which pickle itself does not.
                    argument = self._data[start + 1 : stream.tell() - 1].decode().replace("\n", ".")
                step(self, argument)
        except CheckpointError:
            raise
        except (ValueError, Warning):  # an argument that is damaged, maybe of an operation that is refused anyway
            end = self._end_of_whole_operations()
            code = self._data[end : end + 1].decode("latin-1")
            if not code or code in _CODES:
                raise self.bad("its pickle is damaged or cut off") from None
            raise self._refused(code) from None
        return self.pop()

    def _end_of_whole_operations(self) -> int:
        stream, end = io.BytesIO(self._data), 0
        with contextlib.suppress(ValueError, Warning):
            for _ in pickletools.genops(stream):
                end = stream.tell()
        return end

    def _refused(self, code: str) -> Exception:
        remedy = "; save it again with pickle's protocol 2 or a later one" if code in _OUTDATED else ""
        return self.bad(f"its pickle has the operation {ord(code):#04x}, which is refused{remedy}")

    def bad(self, reason: str) -> Exception:
        """Return an error that names the file."""
        return bad(self._path, reason)

    def push(self, value: object) -> None:
        """Put a value onto the stack."""
        self._stack.append(value)

    def push_long(self, value: int) -> None:
        """Put an integer of any size onto the stack."""
        if value.bit_length() > MAX_BITS:
            raise self.bad(f"its pickle has an integer of more than {MAX_BITS} bits")
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the last value since the last mark."""
        # What is below a mark belongs to the collection around: an operation may not take it.
        if not self._stack or (self._marks and len(self._stack) <= self._marks[-1]):
            raise self.bad("its pickle is damaged")
        return self._stack.pop()

    def top(self) -> object:
        """Return the last value since the last mark."""
        value = self.pop()
        self._stack.append(value)
        return value

    def mark(self) -> None:
        """Remember where the stack ends."""
        self._marks.append(len(self._stack))

    def pop_mark(self) -> list[object]:
        """Take everything since the last mark."""
        if not self._marks:
            raise self.bad("its pickle is damaged")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def push_tuple(self, count: int) -> None:
        """Make a tuple of the last values."""
        self.push(tuple(reversed([self.pop() for _ in range(count)])))

    def set_items(self, items: list[object]) -> None:
        """Put keys and values into the dict on top."""
        into = self.top()
        if isinstance(into, Record):
            into.items.extend(items)
            return
        if not isinstance(into, dict) or len(items) % 2:
            raise self.bad("its pickle is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            try:
                into[as_key(key)] = value
            except Refused:
                raise self.bad(f"a key of its dicts is of the type {type(key).__name__}") from None

    def extend(self, items: list[object]) -> None:
        """Append values to the list, the set or the placeholder on top."""
        into = self.top()
        if isinstance(into, Record | Members):
            into = into.items
        if not isinstance(into, list):
            raise self.bad("its pickle is damaged")
        into.extend(items)

    def memoize(self, index: int | None) -> None:
        """Remember the value on top under a number, the next one if None."""
        self._memo[len(self._memo) if index is None else index] = self.top()

    def get(self, index: int) -> None:
        """Push a value that was remembered."""
        if index not in self._memo:
            raise self.bad("its pickle is damaged")
        self.push(self._memo[index])

    def name(self, qualified_name: str) -> None:
        """Push a name, if it is allowed; Python 2's name of the built-in module is that of Python 3."""
        if qualified_name.startswith("__builtin__."):
            qualified_name = f"builtins.{qualified_name.removeprefix('__builtin__.')}"
        if qualified_name not in GLOBALS and qualified_name not in self._inert and not self._placeholders:
            raise self.bad(f"its pickle refers to {printable(qualified_name)}, which is refused")
        self.push(Global(qualified_name))

    def stack_name(self) -> None:
        """Push the name whose module and name are on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.bad("its pickle is damaged")
        self.name(f"{module}.{name}")

    def storage(self) -> None:
        """Push the storage that the tuple on top describes."""
        fields = self.pop()
        if (
            not isinstance(fields, tuple)
            or len(fields) != 5
            or fields[0] != "storage"
            or not isinstance(fields[1], Global)
            or type(fields[2]) is not str
            or type(fields[4]) is not int
        ):
            raise self.bad("its pickle refers to something outside that is no storage")
        kind = fields[1].name
        if kind in QUANTISED and self._placeholders:
            self.push(Record(kind, ()))
            return
        dtype = "" if kind == "torch.storage.UntypedStorage" else STORAGES.get(kind.removeprefix("torch."))
        if dtype is None:
            raise self.bad(f"its pickle has a storage of the class {printable(kind)}")
        self.push(Storage(dtype, fields[2], fields[4]))

    def reduce(self) -> None:
        """Push the result of an allowed function, or a placeholder for it."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, tuple) or not self._may_call(function):
            raise self.bad("its pickle calls something that is no function")
        self.push(self._made(function, arguments))

    def _may_call(self, function: object) -> bool:
        return isinstance(function, Global) or (self._placeholders and isinstance(function, Record))

    def _made(self, function: Global | Record, arguments: tuple[object, ...]) -> object:
        name = function.name
        if isinstance(function, Record):  # the result of a placeholder: a method, a class of a class
            return Record(name, (function, arguments))
        if name in self._inert or (self._placeholders and name not in GLOBALS):
            return Record(name, arguments)
        try:
            if name in CALLS:
                return call(name, arguments, self._count_copies)
        except Refused as refused:
            # The result of a call on a placeholder is a placeholder.
            is_marked = isinstance(refused, MarkedError)
            if self._placeholders and (is_marked or any(isinstance(one, Record | Global) for one in arguments)):
                return Record(name, arguments)
            if refused.args:
                raise self.bad(f"its pickle {refused}") from None
        raise self.bad(f"its pickle calls {name.rpartition('.')[2]} in a way that is refused")

    def _count_copies(self, values: Any) -> None:
        """Refuse to copy more values than the pickle has bytes: they would be the same ones again."""
        self._copies -= len(values)
        if self._copies < 0:
            raise self.bad("its pickle repeats values too often")

    def new_object(self, keywords: object = None) -> None:
        """Push a placeholder for an object of an allowed class, or its supported equivalent."""
        arguments, kind = self.pop(), self.pop()
        is_class = self._placeholders if isinstance(kind, Record) else isinstance(kind, Global)
        if not is_class or not isinstance(arguments, tuple) or not (self._placeholders or kind.name in self._inert):
            raise self.bad("its pickle makes an object of something that is no class it may use")
        made = self._made(kind, arguments)
        if isinstance(made, Record) and keywords:
            made.items.append(keywords)
        self.push(made)

    def build(self) -> None:
        """Give a placeholder its state; leave out the attributes of an OrderedDict and of a tensor."""
        state, into = self.pop(), self.top()
        if isinstance(into, Record) and into.state is None:
            into.state = state
            return
        if self._placeholders and isinstance(into, Record):
            into.items.append(state)
            return
        if not isinstance(into, dict) or not isinstance(state, dict):
            raise self.bad("its pickle gives attributes to something that is no OrderedDict")

    def freeze(self) -> None:
        """Make a set of the values since the last mark."""
        self.push(Members(self.pop_mark()))


STEPS: dict[str, Callable[[Machine, Any], object]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT"), Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), Machine.push),
    **dict.fromkeys(("LONG1", "LONG4"), Machine.push_long),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "EMPTY_SET": lambda machine, _: machine.push(Members([])),
    "FROZENSET": lambda machine, _: machine.freeze(),
    "ADDITEMS": lambda machine, _: machine.extend(machine.pop_mark()),
    **dict.fromkeys(("SHORT_BINSTRING", "BYTEARRAY8"), Machine.push),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine.get),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.pop_mark(),
    "GLOBAL": Machine.name,
    "STACK_GLOBAL": lambda machine, _: machine.stack_name(),
    "BINPERSID": lambda machine, _: machine.storage(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    "NEWOBJ": lambda machine, _: machine.new_object(),
    "NEWOBJ_EX": lambda machine, _: machine.new_object(machine.pop()),
}
"""Operations that are allowed, by the name that `pickletools` has for them."""

_CODES = {one.code for one in pickletools.opcodes if one.name in STEPS}

_OUTDATED = {one.code for one in pickletools.opcodes if one.proto < 2} - _CODES - set("ioPQ")
"""Operations of values in protocols 0 and 1, which later ones write by others; not those of classes and files."""
