"""Arrays that a program loads itself as the source of `plan` and `convert`: a mapping, or pairs of name and array."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .. import backends
from ..printable import printable
from . import configs, containers, requests
from .containers import remote
from .containers.base import Array, CheckpointError, TensorInfo
from .containers.files import check_infos
from .options import ConvertOptions, PathLike
from .planning.plans import Plan
from .readers import MemoryReader
from .selection import select
from .workers import conducting
from .workers.jobs import Progress, Result

Arrays = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Name -> array of NumPy, JAX or torch, or pairs of both."""

FOR_FILES = ("source_format", "adapter", "step", "item", "workers", "task_bytes", "resume", "dequantize")
"""Options that need files, which other processes can open as well."""


class GivenReader(MemoryReader):
    """Arrays of a mapping, each taken from it when it is read; of a lazy mapping, one is in memory at a time.

    Args:
        arrays: name -> array.
    """

    def __init__(self, arrays: Mapping[str, object]):
        self._arrays = arrays
        self._last: tuple[str, Array] | None = None
        pairs = ((name, self._array(name)) for name in arrays)
        super().__init__({name: TensorInfo(name, array.dtype.name, array.shape) for name, array in pairs})
        check_infos(self.path, self.tensors.values())

    def _array(self, name: str) -> Array:
        value = backends.as_numpy(self._arrays[name])
        array = np.asarray(value) if hasattr(value, "__array__") else None
        if array is None or array.dtype == object:
            raise TypeError(f"{printable(name)} must be an array, got {type(value).__name__}")
        return array.astype(array.dtype.newbyteorder("<"), copy=False)

    @property
    def config(self) -> Mapping[str, object]:
        """No config: a config.json in the current folder is another model's."""
        return MappingProxyType({})

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        if self._last is None or self._last[0] != name:
            array, info = self._array(name), self.tensors[name]
            if (array.dtype.name, array.shape) != (info.dtype, info.shape):
                raise CheckpointError(
                    f"{printable(name)} was {info.dtype} {info.shape} when it was planned, and is {array.dtype} "
                    f"{array.shape} now"
                )
            self._last = name, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._last[1][start:stop].data


def reader_of(source: PathLike | Arrays, options: ConvertOptions) -> GivenReader:
    """Return the arrays as a checkpoint; pairs are all held in memory.

    Raises:
        TypeError: neither a path, a mapping nor pairs, or something in it is not an array.
        ValueError: an option needs files, or a name comes twice.
    """
    needed = [name for name in FOR_FILES if getattr(options, name)]
    if needed:
        raise ValueError(f"{needed[0]} needs a source in files; this one is in memory")
    if isinstance(source, Mapping):
        return GivenReader(source)
    arrays: dict[str, object] = {}
    for pair in _pairs(source):
        name, array = pair
        if name in arrays:
            raise ValueError(f"{printable(name)} comes twice")
        arrays[name] = array
    return GivenReader(arrays)


def _pairs(source: object) -> Iterator[tuple[str, object]]:
    if not isinstance(source, Iterable):
        raise TypeError(f"source must be a path, a mapping of names to arrays or pairs, got {type(source).__name__}")
    for pair in source:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"source must hold pairs of a name and an array, got {type(pair).__name__}")
        yield pair


@contextlib.contextmanager
def prepared(source: PathLike | Arrays, target: PathLike, options: ConvertOptions) -> Iterator[requests.Prepared]:
    """Plan the conversion of arrays; of mappings, all are looked at once."""
    path = remote.to_path(target)
    remote.check_writable(path)
    keep_wrappers = options.rules is not None or options.to_layout == "same"
    with reader_of(source, options) as opened:
        reader, selection = select(opened, options.strip, options.drop or (), keep_wrappers=keep_wrappers)
        kind, _ = containers.with_settings(containers.format_of(path, options.format), options.settings)
        plan = requests.plan_of(reader, None, path, options, selection)
        plan = requests.with_notes(plan, None)
        yield requests.Prepared(plan, reader, None, path, kind, configs.is_folder(path, kind), options=options)


def convert(
    source: PathLike | Arrays,
    target: PathLike,
    options: ConvertOptions,
    progress: Progress,
    planned: Callable[[Plan], None] | None = None,
) -> Result:
    """Convert arrays as `checkpoints.convert` does a checkpoint, in this process."""
    with prepared(source, target, options) as made:
        if planned is not None:
            planned(made.plan)
        job, budget = conducting.sole_job(made, options.max_memory)
        return conducting.run(made, job, None, True, progress, budget)
