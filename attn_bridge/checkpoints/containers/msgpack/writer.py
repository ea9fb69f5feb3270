"""The writer of what ``flax.serialization`` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ....printable import printable
from ..base import Extent, TensorInfo
from ..files import bad, check_infos, check_name
from ..writing import PlacedWriter, dump_json, sync_folder
from . import CHUNKED
from .values import Head, cut, pack, pack_array_head, pack_length

CHUNK = 1 << 30
"""Bytes beyond which Flax cuts an array, since an object of msgpack has at most 2**31 - 1."""


class MsgpackWriter(PlacedWriter):
    """One file that ``flax.serialization.msgpack_restore`` reads: a name's parts are its keys, all of them strings.

    All offsets are fixed in advance. Tensors of one map are contiguous, in any given order. `metadata` are plain leaves
    by dotted name; they are last in their map, or in sorted position if its tensors are sorted, which is Flax's order.
    """

    format: ClassVar[str] = "msgpack"

    def __init__(
        self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool = False
    ):
        super().__init__(path, tensors, metadata, is_share=is_share)
        check_infos(path, tensors)
        tree: dict[str, Any] = {}
        for info in tensors:
            if info.file:
                raise bad(path, "a file of msgpack is one; choose safetensors for several")
            self._put(tree, info.name, info)
        for name, value in sorted(metadata.items()):
            dump_json(path, value)
            self._put(tree, name, (value,))
        self._heads: list[tuple[int, bytearray]] = []
        self._pieces: dict[str, list[Head]] = {}
        self._at = 0
        try:
            self._lay_out(tree)
        except (ValueError, RecursionError) as error:
            raise bad(path, f"can't be written as msgpack: {printable(error)}") from None
        self._begin({"": self._at}, [("", at, bytes(head)) for at, head in self._heads])

    def _put(self, tree: dict[str, Any], name: str, leaf: object) -> None:
        """Put a leaf into nested dicts."""
        *parts, last = check_name(self.path, name).split(".")
        if not last or not all(parts) or CHUNKED in (*parts, last):
            raise bad(self.path, f"{printable(name)} can't be keys of maps: a part of it is empty or reserved")
        for part in parts:
            tree = tree.setdefault(part, {})
            if not isinstance(tree, dict):
                raise bad(self.path, f"{printable(name)} is below a name that is a leaf itself")
        if last in tree:
            raise bad(self.path, f"{printable(name)} is a leaf and has others below it, or comes twice")
        tree[last] = leaf

    def _add(self, data: bytes) -> None:
        if not self._heads or self._heads[-1][0] + len(self._heads[-1][1]) != self._at:
            self._heads.append((self._at, bytearray()))
        self._heads[-1][1].extend(data)
        self._at += len(data)

    def _array(self, info: TensorInfo, shape: Sequence[int], nbytes: int) -> None:
        self._add(pack_array_head(info.dtype, shape, nbytes))
        self._pieces.setdefault(info.name, []).append(Head("bytes", nbytes, self._at))
        self._at += nbytes

    def _lay_out(self, tree: dict[str, Any]) -> None:
        """Assign offsets to everything."""
        self._add(pack_length(len(tree), (0x80, 16), 0xDE, "HI"))
        plain_keys = [key for key, value in tree.items() if not isinstance(value, tuple)]
        for key, value in sorted(tree.items()) if plain_keys == sorted(plain_keys) else tree.items():
            # A map of the source keeps its order; one in Flax's order, sorted, takes its metadata into that order.
            self._add(pack(key))
            if isinstance(value, dict):
                self._lay_out(value)
            elif isinstance(value, tuple):
                self._add(pack(value[0]))
            elif value.nbytes <= CHUNK:
                self._array(value, value.shape, value.nbytes)
            else:
                self._chunks(value)

    def _chunks(self, info: TensorInfo) -> None:
        """Cut an array as Flax does."""
        step = CHUNK // info.itemsize
        count = math.prod(info.shape)
        sizes = {str(axis): size for axis, size in enumerate(info.shape)}
        # 0x83 is a map of three entries, in the order that flax.serialization writes.
        self._add(b"\x83" + pack(CHUNKED) + pack(True) + pack("shape") + pack(sizes) + pack("chunks"))
        self._add(pack_length(-(-count // step), (0x80, 16), 0xDE, "HI"))
        for index, begin in enumerate(range(0, count, step)):
            part = min(step, count - begin)
            self._add(pack(str(index)))
            self._array(info, [part], part * info.itemsize)

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extents of bytes of a tensor."""
        pieces = self._pieces[name]
        return [Extent("", begin, end - begin) for begin, end in cut(pieces, start, stop)] if start < stop else []

    def finish(self) -> None:
        """Flush and close."""
        self.flush()
        sync_folder(self.path.parent)
