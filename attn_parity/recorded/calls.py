"""Record the calls of a module and its submodules: copies of the arguments, bounded in number and size."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from attn_bridge import backends

from ..samples.calls import to_numpy
from ..sides.libraries import Value
from ..sides.modes import IN_TRAIN_MODE
from ..sides.subject import Arguments, is_array, load_adapter
from ..sides.trees import flatten

MAX_CALLS = 8
"""Calls of one submodule that are stored by default."""

MAX_BYTES = 1 << 28
"""Bytes of arrays that are stored by default, over all calls."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type)
"""Kinds of arguments that are stored as they are."""


class NotStorableError(ValueError):
    """An argument can't be copied; the message names it."""


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of a module.

    Attributes:
        path: dotted path of the submodule; "" is the module itself.
        type: its class.
        args: the positional arguments; arrays are NumPy copies.
        kwargs: the keyword arguments.
        training: whether it was called in train mode; None if unknown.
        constructor: the constructor arguments that could be found, by name.
    """

    path: str
    type: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    training: bool | None = None
    constructor: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> Arguments:
        """The call as `compare` takes it; keywords that switch modes (``deterministic``) are left out."""
        return Arguments(self.args, {name: value for name, value in self.kwargs.items() if name not in IN_TRAIN_MODE})

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays."""
        return [array.shape for array in self.inputs.leaves]


class Recording:
    """The calls that `record` stores.

    Args:
        name: the class of the module.
        max_calls: most calls of one submodule.
        max_bytes: most bytes of arrays over all calls.

    Attributes:
        calls: the stored calls, in the order in which they began.
    """

    def __init__(self, name: str, max_calls: int = MAX_CALLS, max_bytes: int = MAX_BYTES):
        for option, value in (("max_calls", max_calls), ("max_bytes", max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option} ({value}) must be a whole number from 1")
        self.name = name
        self.calls: list[RecordedCall] = []
        self._limits = max_calls, max_bytes
        self._omitted: dict[tuple[str, str], int] = {}
        self._size = 0
        self._open = True
        self._lock = threading.Lock()

    @property
    def inputs(self) -> Arguments:
        """The first call of the module itself, as `compare` takes it.

        Raises:
            ValueError: no call was stored.
        """
        return self.of("").inputs

    @property
    def constructor(self) -> Mapping[str, Value]:
        """The constructor arguments of the module that could be found, by name."""
        return self.of("").constructor

    @property
    def left_out(self) -> list[str]:
        """The calls that were not stored, with the reason, one line per submodule and reason."""
        lines = []
        for (path, reason), count in self._omitted.items():
            lines.append(f"{path or self.name}: {count} call{'s' * (count > 1)} not stored: {reason}")
        return lines

    def of(self, path: str) -> RecordedCall:
        """Return the first stored call of a submodule.

        Args:
            path: its dotted path; "" is the module itself.

        Raises:
            ValueError: no call of it was stored.
        """
        for call in self.calls:
            if call.path == path:
                return call
        why = "; ".join(line for line in self.left_out if line.startswith(f"{path or self.name}: "))
        stored = ", ".join(dict.fromkeys(call.path or self.name for call in self.calls)) or "none"
        raise ValueError(f"no call of {path or self.name} was stored{f' ({why})' if why else ''}; stored: {stored}")

    def note(
        self,
        path: str,
        kind: str,
        args: Sequence[Value],
        kwargs: Mapping[str, Value],
        training: bool | None = None,
        constructor: Mapping[str, Value] | None = None,
    ) -> None:
        """Store a copy of a call, or count it as left out; nothing after the context has ended."""
        max_calls, max_bytes = self._limits
        with self._lock:
            if not self._open:
                return
            try:
                if sum(call.path == path for call in self.calls) >= max_calls:
                    raise NotStorableError(f"more than {max_calls} (max_calls)")
                tree = (tuple(args), dict(kwargs))
                size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in flatten(tree, _is_sized))
                if self._size + size > max_bytes:
                    raise NotStorableError(f"more than {max_bytes} bytes (max_bytes) with them")
                copied, named = copy_of(tree[0], "argument"), copy_of(tree[1], "argument")
            except NotStorableError as error:
                key = path, str(error)
                self._omitted[key] = self._omitted.get(key, 0) + 1
                return
            self._size += size
            modes = [named[name] is on for name, on in IN_TRAIN_MODE.items() if isinstance(named.get(name), bool)]
            training = any(modes) if modes else training
            self.calls.append(RecordedCall(path, kind, copied, named, training, constructor or {}))

    def omit(self, path: str, reason: str) -> None:
        """Count a call as left out."""
        with self._lock:
            if self._open:
                self._omitted[path, reason] = self._omitted.get((path, reason), 0) + 1

    def close(self) -> None:
        """Store nothing from now on: compiled code may keep the callbacks."""
        with self._lock:
            self._open = False

    def __str__(self) -> str:
        lines = [
            f"{call.path or self.name} ({call.type}): {', '.join(map(str, call.shapes))}"
            + ("; train mode" if call.training else "")
            for call in self.calls
        ]
        return "\n".join([*lines, *self.left_out])

    def __getstate__(self) -> dict[str, Value]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Value]) -> None:
        vars(self).update(state, _lock=threading.Lock())


@contextlib.contextmanager
def record(module: Value, *, max_calls: int = MAX_CALLS, max_bytes: int = MAX_BYTES) -> Iterator[Recording]:
    """Store the calls of a module while other code runs: a context that gives the `Recording`.

    Arguments are copied to NumPy at once, so that nothing keeps a graph or gradients, and later changes in place don't
    count. Calls beyond the limits, and those with an argument that can't be copied (a cache, random streams), are
    counted in ``left_out``.

    Args:
        module: a ``torch.nn.Module``, an ``nnx.Module``, a Linen module, alone or with its variables, whose submodules
            are recorded as well, by path; or a class of those, each of whose instances is recorded as ``""``.
        max_calls: most calls of one submodule.
        max_bytes: most bytes of arrays over all calls.

    Raises:
        TypeError: it is something else.
        ValueError: a limit is not a whole number from 1.
    """
    target = module[0] if isinstance(module, tuple) and module else module
    kind = target if isinstance(target, type) else type(target)
    framework = framework_of(kind)
    if framework is None:
        raise TypeError(
            f"module must be a torch.nn.Module, an nnx.Module, a Linen module or a class of those, got {kind.__name__}"
        )
    recording = Recording(kind.__name__, max_calls, max_bytes)
    try:
        with load_adapter(framework, "listening").listening(target, recording):
            yield recording
    finally:
        recording.close()


def framework_of(kind: type) -> backends.Framework | None:
    """Return the framework of a class of modules; None for any other class."""
    for base in kind.__mro__:
        home = (base.__module__, base.__qualname__)
        if home == ("torch.nn.modules.module", "Module"):
            return "torch"
        if home in (("flax.nnx.module", "Module"), ("flax.linen.module", "Module")):
            return "flax"
    return None


def copy_of(value: Value, where: str) -> Value:
    """Return a deep copy with NumPy arrays.

    Raises:
        NotStorableError: it holds something that is neither an array, a plain value nor a container of them.
    """
    if _is_sized(value):
        try:
            array = to_numpy(value)
            return array if isinstance(array, bool) else np.array(array, copy=True)
        except Exception as error:  # a framework refuses its own arrays in several ways: donated, meta, sharded
            raise NotStorableError(f"{where} is a {type(value).__name__} that can't be read") from error
    if isinstance(value, _PLAIN) or type(value).__module__ == "torch":  # torch.dtype, torch.device
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_of(part, f"{where}.{name}") for name, part in zip(value._fields, value, strict=True)))
    if isinstance(value, (tuple, list)):
        return type(value)(copy_of(part, f"{where}[{i}]") for i, part in enumerate(value))
    if isinstance(value, Mapping):
        return {key: copy_of(part, f"{where}[{key!r}]") for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not flatten(value, _is_sized):
        return value
    raise NotStorableError(f"{where} is a {type(value).__name__}")


def is_random(value: Value) -> bool:
    """Return whether a value is a source of random numbers of NNX."""
    return type(value).__module__.startswith("flax.nnx") and type(value).__name__ in ("Rngs", "RngStream")


def _is_sized(value: Value) -> bool:
    return is_array(value) or (hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value.dtype, "itemsize"))


def bound(function: Callable[..., Value], args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> dict[str, Value]:
    """Return name -> value of the arguments of a method call, without the object; empty if they have no names."""
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    named: dict[str, Value] = {}
    for parameter in list(arguments.signature.parameters.values())[1:]:
        if parameter.name not in arguments.arguments:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            return {}
        value = arguments.arguments[parameter.name]
        named |= value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value}
    return named


def attributes_of(module: Value) -> dict[str, Value]:
    """Return the constructor arguments that an object keeps as plain attributes of the same names."""
    try:
        names = list(inspect.signature(type(module)).parameters)
    except (TypeError, ValueError):
        return {}
    attributes = {name: vars(module)[name] for name in names if name in vars(module)}
    return {name: value for name, value in attributes.items() if isinstance(value, (*_PLAIN, tuple))}
