"""Writers whose bytes have fixed places: tensors in extents of files, and headers in front of and between them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar

from .base import Writer
from .files import check_range
from .remote.targets import open_target
from .writing import TargetFile, as_bytes

MAX_OPEN = 32
"""Files that are open at a time, of two descriptors each: a process may have few (often 1,024, 256 on macOS)."""


class PlacedWriter(Writer):
    """A writer with random access, whose subclass knows the extents of all tensors once its constructor has run.

    Its constructor ends with `_begin`. In an object store, which joins parts and has no holes, a share's tensor brings
    along the bytes in front of it.
    """

    random_access: ClassVar[bool] = True

    def _begin(self, sizes: Mapping[str, int], fixed: Iterable[tuple[str, int, bytes]]) -> None:
        """Write the fixed bytes, unless this is a share.

        Args:
            sizes: file, relative to the checkpoint ("" for itself) -> its bytes.
            fixed: (file, offset, bytes) of all that depends on the headers of tensors alone.
        """
        self._sizes = sizes
        self._fixed: dict[str, list[tuple[int, bytes]]] = {}
        for file, start, data in fixed:
            self._fixed.setdefault(file, []).append((start, data))
        self._open: collections.OrderedDict[str, TargetFile] = collections.OrderedDict()
        for file, parts in () if self._is_share else self._fixed.items():
            for start, data in parts:
                self._target(file).fill(start, data)

    def _target(self, file: str) -> TargetFile:
        """Return an open file; of many, those that were not used lately are flushed and closed."""
        if file not in self._open:
            path = self.path / file if file else self.path
            self._open[file] = open_target(path, self._sizes[file], past_cache=not self._is_share)
        self._open.move_to_end(file)
        while len(self._open) > MAX_OPEN:
            oldest = next(iter(self._open))
            self._open[oldest].sync()
            self._open.pop(oldest).close()
        return self._open[file]

    @functools.cached_property
    def _leads(self) -> dict[tuple[str, int], bytes]:
        """(File, offset of the bytes of a tensor) -> the bytes in front of them, back to those of another tensor."""
        extents = [extent for name, info in self.tensors.items() for extent in self.extents(name, 0, info.nbytes)]
        fixed = {file: collections.deque(sorted(parts)) for file, parts in self._fixed.items()}
        ends: collections.Counter[str] = collections.Counter()
        leads = {}
        for extent in sorted(extents, key=lambda extent: (extent.file, extent.offset)):
            end, parts = ends[extent.file], fixed.get(extent.file, ())
            lead = bytearray(extent.offset - end)
            while parts and parts[0][0] < extent.offset:
                start, data = parts.popleft()
                lead[start - end : start - end + len(data)] = data
            if lead:
                leads[extent.file, extent.offset] = bytes(lead)
            ends[extent.file] = extent.offset + extent.count
        return leads

    def place(self, name: str, start: int) -> int:
        """Return the offset in its file of a byte of a tensor."""
        return self.extents(name, start, start + 1)[0].offset if start < self.tensors[name].nbytes else 0

    def write_range(self, name: str, start: int, data: object) -> None:
        """Write bytes of a tensor, in any order."""
        view, done = as_bytes(data), 0
        check_range(self.path, self.tensors[name], start, start + len(view))
        for extent in self.extents(name, start, start + len(view)):
            target = self._target(extent.file)
            if self._is_share and target.joins and (extent.file, extent.offset) in self._leads:
                lead = self._leads[extent.file, extent.offset]
                target.write(extent.offset - len(lead), lead)
            target.write(extent.offset, view[done : done + extent.count])
            done += extent.count

    def flush(self) -> None:
        """Flush all files and close them."""
        for target in self._open.values():
            target.sync()
        self.abort()

    def abort(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
