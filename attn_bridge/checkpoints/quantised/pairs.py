"""Pairs quantised numbers with their scales, by the names of a checkpoint's tensors."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...printable import printable
from ..containers.base import Array, TensorInfo
from ..containers.files import bad
from ..containers.strided import c_strides
from .schemes import KEYS, TEXT, method_name_of, scheme_of, weights_of
from .source import Source

MXFP4 = "MXFP4"
# The block size of every format of OCP's Microscaling specification (MX 1.0): 32 numbers, one scale of 8 bits.
GROUP = 32
"""Numbers that share a scale in MXFP4; two of them are in a byte."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
"""Dtypes of the scales of float8, uint8 being exponents (MXFP8): with all of them the product is exact in float64."""

# DeepSeek-V3 quantises weights in tiles of 128 x 128 (arXiv 2412.19437, section 3.3.2).
BLOCK = (128, 128)
"""Rows and columns per scale without a config.json, in DeepSeek's files and in `transformers`."""

MAX_BLOCK = (1 << 31) - 1
"""Largest number of rows or columns per scale: that of any size in a config.json (`model_config.MAX_SIZE`)."""

ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale",
               "input_global_scale", "input_zero_point", "output_zero_point",
               "_weight_act_quant_scale", "_weight_act_quant_zero_point")  # fmt: skip
"""Names of the scales of a matrix's input, or of the keys and values in a cache."""

ENDINGS = {("_blocks", "_scales"): True, (".blocks", ".scales"): False}
"""Names of MXFP4's two tensors, and whether the parameter has its last two axes swapped.

The first are those of `transformers`, whose parameter is (experts, in, out); the second are OpenAI's own.
"""

BY_BLOCK, BY_ROW = "_scale_inv", "_scale"
"""Suffixes of the names of float8's scales; both are factors, in spite of the first name."""


@dataclasses.dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that a file stores as small numbers and scales.

    Attributes:
        name: name of the dequantised tensor.
        shape: its shape.
        numbers: name of the tensor of numbers.
        scales: name of the tensor of scales.
        kind: MXFP4, or the dtype of its numbers.
        file_shape: its shape, with its axes in the order of the numbers in the file.
        strides: of every axis of `shape`, the stride in `file_shape`.
        block: rows and columns per scale.
        file: the file with the numbers.
        others: names of the further tensors that it consists of.
        words: how it is quantised, in words.
    """

    name: str
    shape: tuple[int, ...]
    numbers: str
    scales: str
    kind: str
    file_shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, int]
    file: str
    others: tuple[str, ...]
    words: str


@dataclasses.dataclass(frozen=True)
class TiledTensor(QuantisedTensor, abc.ABC):
    """A tensor of a kind whose scales are fewer or other than those of MXFP4 and float8, so that tables don't pay."""

    @abc.abstractmethod
    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return numbers and scales of a rectangle in the order of the file, whose products are exact in float64.

        Args:
            source: the quantised checkpoint.
            rows: of the file's matrix; they may be a step apart.
            left: the first column.
            right: the end of the columns, exclusive.
        """


def partner(path: Path, tensors: Mapping[str, TensorInfo], name: str, whose: str) -> TensorInfo:
    """Return the header of a tensor without which another one means nothing.

    Raises:
        CheckpointError: the checkpoint lacks it.
    """
    if name not in tensors:
        raise bad(path, f"{printable(whose)} has no {printable(name)} beside it, so it can't be dequantised")
    return tensors[name]


def is_any(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether tensors of MXFP4 or of float8 have their scales among them."""
    names = [name + ending for name, info in tensors.items() if info.dtype in FLOAT8 for ending in (BY_BLOCK, BY_ROW)]
    names += [name.removesuffix(one) + scales for name in tensors for one, scales in ENDINGS if name.endswith(one)]
    return any(name in tensors for name in names)


def find(path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> list[QuantisedTensor]:
    """Return the tensors of MXFP4 and float8, from headers alone.

    Args:
        path: of the checkpoint, for errors.
        tensors: name -> header.
        config: the model's config.json.

    Raises:
        CheckpointError: numbers without scales, scales without numbers, shapes or dtypes that don't match each other,
            or no tensor in a supported quantisation.
    """
    quantised_tensors = []
    paired_names: set[str] = set()
    for name, info in tensors.items():
        for (numbers, scales), swapped in ENDINGS.items():
            ending = next((one for one in (numbers, scales) if name.endswith(one)), "")
            stem = name.removesuffix(ending)
            if not ending or not stem:
                continue
            if name.endswith(scales) and info.dtype != "uint8" and stem + numbers not in tensors:
                raise bad(path, f"{printable(name)} is {info.dtype}, where MXFP4 has uint8: its method is not known; "
                          "convert the model that it was made of")  # fmt: skip
            for other in (stem + numbers, stem + scales):
                partner(path, tensors, other, name)
            if name.endswith(numbers):
                quantised_tensors.append(_mxfp4(path, stem, info, tensors[stem + scales], swapped))
                paired_names |= {name, stem + scales}
    sizes = None
    for name, info in tensors.items():
        if name in paired_names:
            continue
        number = next((name.removesuffix(one) for one in (BY_BLOCK, BY_ROW) if name.endswith(one)), "")
        if name.endswith(BY_ROW) and not (number.endswith("weight") or _is_float8(tensors.get(number))):
            number = ""  # of activations, or nothing of that kind
        if number and number not in tensors:
            raise bad(path, f"{printable(name)} is a scale without {printable(number)}, so nothing can be dequantised")
        if number and not _is_float8(tensors[number]):
            raise bad(path, f"{printable(number)} must be {' or '.join(FLOAT8)} to go with {printable(name)}, "
                      f"got {tensors[number].dtype}")  # fmt: skip
        if _is_float8(info) and name not in paired_names:
            sizes = _block_size(path, config) if sizes is None else sizes
            quantised_tensors.append(_float8(path, info, tensors, sizes, config))
            paired_names |= {name, quantised_tensors[-1].scales}
    if not quantised_tensors:
        raise bad(path, "nothing of it is quantised in a way that is known: MXFP4 (*_blocks, *_scales), float8 with "
                  "*_scale_inv or *.weight_scale, GPTQ or AWQ (*.qweight), bitsandbytes (*.absmax, *.SCB), "
                  "compressed-tensors (*.weight_packed), torchao (*_qdata)")  # fmt: skip
    return quantised_tensors


def first_of(names: Iterable[str]) -> str:
    """Return the first name that only a quantised checkpoint has, or ""."""
    names = set(names)
    method_name = method_name_of(names)
    if method_name:
        return method_name
    for name in sorted(names):
        pairs = [*((numbers, scales) for numbers, scales in ENDINGS), ("", BY_BLOCK), (".weight", ".weight_scale")]
        for numbers, scales in pairs:
            if name.endswith(scales) and name.removesuffix(scales) + numbers in names:
                return name
    return ""


def of_activations(names: Iterable[str], quantised: Iterable[str]) -> dict[str, str]:
    """Return scales of the inputs of quantised matrices -> the reason why they are dropped on dequantisation."""
    stems = {name.removesuffix("weight") for name in quantised if name.endswith(".weight")}
    return {
        name: "a scale of activations, which nothing quantises any more"
        for name in names
        if any(name.endswith(one) and name.removesuffix(one) in stems for one in ACTIVATIONS)
    }


def unquantised(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json without the keys of quantised weights."""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    return {
        key: unquantised(value) if key == TEXT and isinstance(value, dict) else value for key, value in plain.items()
    }


def _is_float8(info: TensorInfo | None) -> bool:
    return info is not None and info.dtype in FLOAT8


def _mxfp4(path: Path, stem: str, numbers: TensorInfo, scales: TensorInfo, swapped: bool) -> QuantisedTensor:
    for info in (numbers, scales):
        if info.dtype != "uint8":
            raise bad(path, f"{printable(info.name)} must be uint8 to be MXFP4, got {info.dtype}")
    axes = ("experts", "rows", "groups", "16")
    if numbers.shape[-1:] != (GROUP // 2,) or len(numbers.shape) < 3 or (swapped and len(numbers.shape) != 4):
        wanted = ", ".join(axes) if swapped else "..., rows, groups, 16"
        raise bad(path, f"{printable(numbers.name)} must have the shape ({wanted}) to be MXFP4, got {numbers.shape}")
    if scales.shape != numbers.shape[:-1]:
        raise bad(path, f"{printable(scales.name)} must have the shape {numbers.shape[:-1]} to go with "
                  f"{printable(numbers.name)} {numbers.shape}, got {scales.shape}")  # fmt: skip
    *leading, rows, groups, _ = numbers.shape
    in_file = (*leading, rows, groups * GROUP)
    strides = c_strides(in_file)
    shape = in_file
    if swapped:
        shape, strides = (*leading, in_file[-1], rows), (*strides[:-2], strides[-1], strides[-2])
    return QuantisedTensor(
        stem, shape, numbers.name, scales.name, MXFP4, in_file, strides, (1, GROUP), numbers.file, (scales.name,), MXFP4
    )


def _float8(
    path: Path,
    info: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    sizes: tuple[int, int] | str,
    config: Mapping[str, object],
) -> QuantisedTensor:
    name = info.name
    names = [name + ending for ending in (BY_BLOCK, BY_ROW) if name + ending in tensors]
    if not names:
        raise bad(path, f"{printable(name)} is {info.dtype} and has no {printable(name + BY_BLOCK)} (or "
                  f"{BY_ROW}) beside it, so it can't be dequantised")  # fmt: skip
    if len(names) > 1 or name + "_zero_point" in tensors:
        more = names[1] if len(names) > 1 else name + "_zero_point"
        raise bad(path, f"{printable(name)} has {printable(names[0])} and {printable(more)}; how they go together is "
                  "not known here")  # fmt: skip
    scales = tensors[names[0]]
    if scales.dtype not in SCALES:
        raise bad(path, f"{printable(scales.name)} must be one of {', '.join(SCALES)}, got {scales.dtype}")
    if len(info.shape) < 2:
        raise bad(path, f"{printable(name)} must have rows and columns to be dequantised, got the shape {info.shape}")
    *leading, rows, columns = info.shape
    if names[0].endswith(BY_BLOCK):
        if isinstance(sizes, str):
            raise bad(path, sizes)
        block = sizes if sizes != (0, 0) else (max(rows, 1), max(columns, 1))
        wanted = [(*leading, -(-rows // block[0]), -(-columns // block[1]))]
        if sizes == (0, 0) and math.prod(leading) == 1:
            wanted += [(), (1,), (1, 1)]
        rule = f"one for each block of {block[0]} x {block[1]}" if sizes != (0, 0) else "one for all"
    else:
        fits = len(scales.shape) >= 2 and scales.shape[-2:] != (1, 1)
        block = (
            (1 if fits and scales.shape[-2] > 1 else max(rows, 1)),
            (1 if fits and scales.shape[-1] > 1 else max(columns, 1)),
        )
        wanted = [(*leading, rows if one else 1, columns if two else 1) for one, two in ((1, 0), (0, 0), (0, 1))]
        if math.prod(leading) == 1:
            wanted += [(), (1,), (1, 1)]
        rule = "one for each row, for each column, or for all"
        structure = None if scales.shape in wanted else block_structure(config, info.shape, scales.shape)
        if structure:
            block, wanted = structure, [scales.shape]
    if scales.shape not in wanted:
        raise bad(path, f"{printable(scales.name)} must have the shape {wanted[0]} to go with {printable(name)} "
                  f"{info.shape}, {rule}, got {scales.shape}")  # fmt: skip
    words = f"{info.dtype} in blocks of {block[0]} x {block[1]}"
    return QuantisedTensor(
        name, info.shape, name, scales.name, info.dtype, info.shape, c_strides(info.shape), block, info.file,
        (scales.name,), words,
    )  # fmt: skip


def _block_size(path: Path, config: Mapping[str, object]) -> tuple[int, int] | str:
    """Return rows and columns of a block, (0, 0) for a single scale, or an error message on config.json."""
    settings = _settings(config)
    if not isinstance(settings, Mapping):
        return f"quantization_config of config.json must be an object, got {printable(repr(settings), 40)}"
    if "weight_block_size" not in settings:
        return BLOCK
    size = settings["weight_block_size"]
    if size is None:
        return 0, 0
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(one) is int and 1 <= one <= MAX_BLOCK for one in size)
    ):
        return f"weight_block_size of config.json must be two whole numbers from 1 on, got {printable(repr(size), 40)}"
    return size[0], size[1]


def block_structure(
    config: Mapping[str, object], shape: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return rows and columns per scale of compressed-tensors' blocks or groups; None unless one size fits.

    Args:
        config: the model's config.json.
        shape: of a matrix.
        scales: shape of its scales.
    """
    *leading, rows, columns = shape
    sizes: set[tuple[int, int]] = set()
    for weights in weights_of(scheme_of(config)):
        block = weights.get("block_structure")
        high, wide = block if isinstance(block, list) and len(block) == 2 else (1, weights.get("group_size"))
        if (
            not isinstance(high, int)
            or not isinstance(wide, int)
            or not 1 <= min(high, wide) <= max(high, wide) <= MAX_BLOCK
        ):
            continue
        if scales == (*leading, -(-rows // high), -(-columns // wide)):
            sizes.add((high, wide))
    return sizes.pop() if len(sizes) == 1 else None


def _settings(config: Mapping[str, Any]) -> object:
    """Return the quantisation of a config.json, {} for plain weights."""
    places = [config, config[TEXT]] if isinstance(config.get(TEXT), dict) else [config]
    return next((one[key] for one in places for key in KEYS if one.get(key) is not None), {})
