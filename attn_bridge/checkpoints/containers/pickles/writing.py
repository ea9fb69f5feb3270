"""Pickles written by hand, so that the same values give the same bytes whatever objects hold them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from ..base import TensorInfo
from ..strided import c_strides
from .calls import STORAGES

CLASSES = {dtype: name for name, dtype in STORAGES.items()}
"""NumPy name of a dtype -> class of its storage."""


class Pickler:
    """Writes values one after the other, in protocol 2 as torch has it. Names are written out once."""

    def __init__(self) -> None:
        self._parts = [b"\x80\x02"]
        self._memo: dict[str, int] = {}

    def finish(self) -> bytes:
        """Return the pickle."""
        return b"".join([*self._parts, b"."])

    def raw(self, code: bytes) -> None:
        """Write operations as they are."""
        self._parts.append(code)

    def remembered(self, code: str) -> None:
        """Write a name (with its module before a dot) or a text without one, which may come again."""
        # BINGET and BINPUT take numbers of one byte, LONG_BINGET and LONG_BINPUT those of four.
        if code in self._memo:
            number = self._memo[code]
            self._parts.append(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
            return
        number = self._memo[code] = len(self._memo)
        module, _, name = code.rpartition(".")
        if module:
            self._parts.append(f"c{module}\n{name}\n".encode())
        else:
            self.text(code)
        self._parts.append(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))

    def text(self, value: str) -> None:
        """Write a text."""
        raw = value.encode("utf-8", "surrogatepass")
        self._parts.append(b"X" + struct.pack("<I", len(raw)) + raw)

    def number(self, value: int) -> None:
        """Write an integer."""
        if -(1 << 31) <= value < 1 << 31:
            self._parts.append(b"J" + struct.pack("<i", value))
            return
        # LONG1: two's complement in as few bytes as leave a bit for the sign.
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self._parts.append(b"\x8a" + bytes([len(raw)]) + raw)

    def numbers(self, values: Sequence[int]) -> None:
        """Write a tuple of integers."""
        self.raw(b"(")
        for value in values:
            self.number(value)
        self.raw(b"t")

    def value(self, value: object) -> None:
        """Write a plain value, as JSON has it, keys in their order."""
        if value is None or isinstance(value, bool):
            self.raw({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif isinstance(value, int):
            self.number(value)
        elif isinstance(value, float):
            self.raw(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, Mapping):
            self.raw(b"}(")
            for key, element in sorted(value.items()):
                self.text(key)
                self.value(element)
            self.raw(b"u")
        elif isinstance(value, Sequence):
            self.raw(b"](")
            for element in value:
                self.value(element)
            self.raw(b"e")
        else:
            raise TypeError(f"a {type(value).__name__} is no plain value")

    def tensor(self, info: TensorInfo, key: str) -> None:
        """Write a tensor in C order that has the storage of that key for itself."""
        count = info.nbytes // info.itemsize
        typed = info.dtype in CLASSES
        self.remembered(f"torch._utils._rebuild_tensor_{'v2' if typed else 'v3'}")
        self.raw(b"((")
        self.remembered("storage")
        self.remembered(f"torch.{CLASSES[info.dtype]}" if typed else "torch.storage.UntypedStorage")
        self.text(key)
        self.remembered("cpu")
        self.number(count if typed else info.nbytes)
        self.raw(b"tQ")
        self.number(0)
        self.numbers(info.shape)
        self.numbers(c_strides(info.shape))
        self.raw(b"\x89")
        self.remembered("collections.OrderedDict")
        self.raw(b")R")
        if not typed:
            self.remembered(f"torch.{info.dtype}")
        self.raw(b"tR")
