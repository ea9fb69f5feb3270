"""GPTQ and AWQ: whole numbers packed into words of 32 bits, with a scale and a zero point for each group of inputs.

The weight of output ``o`` and input ``i`` is ``scale[g, o] * (number[i, o] - zero[g, o])``, in group ``g`` of ``i``.
Files hold it as (inputs, outputs), the transpose of a torch Linear's weight. Sources: GPTQ arXiv 2210.17323, AWQ arXiv
2306.00978.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...printable import printable
from ..containers.base import Array, Reader, TensorInfo
from ..containers.files import bad
from .pairs import TiledTensor, partner
from .schemes import FORMS, TITLES, bits_of, check, method_of, scheme_of
from .source import Source

WORD = 32
"""Bits of a word."""

NUMBERS, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
"""Endings of the names of a quantised layer's tensors."""

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 columns among the 4-bit numbers of a word, the lowest first."""

SCALE_DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class GroupedTensor(TiledTensor):
    """A matrix of packed numbers.

    Attributes:
        method: ``gptq`` or ``awq``.
        bits: of a number.
        zeros: name of the tensor of zero points.
        groups: name of the tensor that has the group of each input; "" where groups follow each other.
        group_size: inputs of a group, where they do.
        added: to the stored zero points.
    """

    method: str
    bits: int
    zeros: str
    groups: str
    group_size: int
    added: int

    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return whole numbers without their zero points, and scales, of a rectangle of inputs and outputs."""
        order = OF_AWQ if self.method == "awq" else IN_ORDER
        if self.method == "awq":
            numbers = self._unpacked(source, self.numbers, rows, left, right, order)
        else:
            numbers = self._unpacked_rows(source, rows, left, right)
        group = self._groups_of(source, rows)
        first, last = int(group.min()), int(group.max())
        zeros = self._unpacked(source, self.zeros, range(first, last + 1), left, right, order)
        zeros = (zeros + self.added) & (2**self.bits - 1)
        scales = source.matrix(self.scales, range(first, last + 1), left, right).astype(np.float64)
        return numbers.astype(np.float64) - zeros[group - first], scales[group - first]

    def _groups_of(self, source: Source, rows: range) -> Array:
        inputs = np.arange(rows.start, rows.stop, rows.step)
        if not self.groups:
            return inputs // self.group_size
        return source.whole(self.groups)[inputs].astype(np.int64)

    def _unpacked_rows(self, source: Source, rows: range, left: int, right: int) -> Array:
        """Return numbers that are packed along a column of words."""
        per_word = WORD // self.bits
        first, last = rows[0] // per_word, rows[-1] // per_word
        words = source.matrix(self.numbers, range(first, last + 1), left, right).view(np.uint32)
        inputs = np.arange(rows.start, rows.stop, rows.step)
        shift = (inputs % per_word * self.bits).astype(np.uint32)
        numbers: Array = words[inputs // per_word - first] >> shift[:, None] & (2**self.bits - 1)
        return numbers.astype(np.int32)

    def _unpacked(self, source: Source, name: str, rows: range, left: int, right: int, order: tuple[int, ...]) -> Array:
        """Return numbers that are packed along a row of words."""
        per_word = WORD // self.bits
        first, last = left // per_word, -(-right // per_word)
        words = source.matrix(name, rows, first, last).view(np.uint32)
        places = order if self.bits == 4 else range(per_word)
        shift = np.array([position * self.bits for position in places], np.uint32)
        numbers: Array = (words[..., None] >> shift & (2**self.bits - 1)).reshape(len(rows), -1)
        return numbers[:, left - first * per_word : right - first * per_word].astype(np.int32)


def find(path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> list[GroupedTensor]:
    """Return the matrices of GPTQ or AWQ, from headers alone.

    Args:
        path: of the checkpoint, for errors.
        tensors: name -> header.
        config: the model's config.json.

    Raises:
        CheckpointError: tensors that don't match each other, or a scheme that is missing or not supported.
    """
    stems = [name.removesuffix(NUMBERS) for name in tensors if name.endswith(NUMBERS)]
    if not stems:
        return []
    scheme = scheme_of(config)
    check(path, scheme)
    method, bits = method_of(scheme), bits_of(scheme)
    if method not in ("gptq", "awq") or bits is None:
        raise bad(path, f"{printable(stems[0] + NUMBERS)} is of GPTQ or AWQ, and the form of its zero points is in a "
                  "config.json's quantization_config, which is missing")  # fmt: skip
    return [_grouped(path, stem, tensors, scheme, method, bits) for stem in stems]


def check_groups(reader: Reader, name: str, inputs: int, size: int) -> None:
    """Refuse groups that no quantiser writes: each group has equally many inputs, the last group the rest.

    A file that assigns all inputs to group 0 is ambiguous: some kernels take it as groups in order.

    Args:
        reader: the checkpoint.
        name: of the tensor with the group of each input.
        inputs: their number.
        size: inputs of a group.

    Raises:
        CheckpointError: the first group that has another number of inputs.
    """
    wanted = np.bincount(np.arange(inputs) // size)
    groups = reader.read(name)
    counts = np.bincount(groups[(groups >= 0) & (groups < len(wanted))], minlength=len(wanted))
    for group in np.flatnonzero(counts != wanted):
        raise bad(
            reader.path,
            f"{printable(name)} must give {wanted[group]} inputs to group {group}, got {counts[group]}",
        )


def _grouped(
    path: Path, stem: str, tensors: Mapping[str, TensorInfo], scheme: Mapping[str, Any], method: str, bits: int
) -> GroupedTensor:
    numbers = tensors[stem + NUMBERS]
    zeros, scales = (partner(path, tensors, stem + ending, numbers.name) for ending in (ZEROS, SCALES))
    for info in (numbers, zeros):
        if info.dtype != "int32" or len(info.shape) != 2:
            raise bad(path, f"{printable(info.name)} must be a matrix of int32 to be {TITLES[method]}, got "
                      f"{info.dtype} {info.shape}")  # fmt: skip
    if scales.dtype not in SCALE_DTYPES or len(scales.shape) != 2:
        raise bad(path, f"{printable(scales.name)} must be a matrix of {', '.join(SCALE_DTYPES)}, got {scales.dtype} "
                  f"{scales.shape}")  # fmt: skip
    per_word = WORD // bits
    inputs, outputs = numbers.shape
    inputs, outputs = (inputs, outputs * per_word) if method == "awq" else (inputs * per_word, outputs)
    count = scales.shape[0]
    size = _group_size(path, scheme, inputs)
    groups = tensors.get(stem + GROUPS) if method == "gptq" else None
    if groups is not None and (groups.dtype not in ("int32", "int64") or groups.shape != (inputs,)):
        raise bad(path, f"{printable(groups.name)} must have one int32 for each of {inputs} inputs, got {groups.dtype} "
                  f"{groups.shape}")  # fmt: skip
    wanted = {scales.name: (-(-inputs // size), outputs), zeros.name: (-(-inputs // size), outputs // per_word)}
    for info in (scales, zeros):
        if info.shape != wanted[info.name] or outputs % per_word or not count:
            raise bad(path, f"{printable(info.name)} must have the shape {wanted[info.name]} to go with "
                      f"{printable(numbers.name)} {numbers.shape} of {bits} bit in groups of {size}, got "
                      f"{info.shape}")  # fmt: skip
    return GroupedTensor(
        stem + ".weight",
        (outputs, inputs),
        numbers.name,
        scales.name,
        method,
        (inputs, outputs),
        (1, outputs),
        (size, 1),
        numbers.file,
        tuple(info.name for info in (scales, zeros, groups) if info is not None),
        f"{TITLES[method]}, {bits} bit",
        method=method,
        bits=bits,
        zeros=zeros.name,
        groups="" if groups is None else groups.name,
        group_size=size,
        added=FORMS[scheme.get("checkpoint_format", "gptq")] if method == "gptq" else 0,
    )


def _group_size(path: Path, scheme: Mapping[str, object], inputs: int) -> int:
    size = scheme.get("group_size", scheme.get("q_group_size", -1))
    if type(size) is not int or (size != -1 and size < 1):
        raise bad(
            path, f"group_size of config.json must be -1 or a whole number from 1 on, got {printable(repr(size), 40)}"
        )
    return max(inputs, 1) if size == -1 else size
