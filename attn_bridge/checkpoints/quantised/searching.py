"""Finds the quantised tensors of a checkpoint, of every kind, and their dtype, and refuses incomplete ones.

``--drop`` may not leave out scales and tables alone, since numbers are meaningless without them. Numbers whose scales
are in no file, and a config of quantisation without such tensors, get a note.
"""

from __future__ import annotations

import collections
import math
import shlex
from collections.abc import Collection, Iterable, Mapping

from ...printable import printable
from ..containers.base import CheckpointError, Reader, TensorInfo
from ..containers.files import bad
from . import bitsandbytes, blocks, compressed, packed, pairs, schemes
from .pairs import QuantisedTensor, TiledTensor

CODES = ("int8", "uint8", "int16", "int32", "uint32", "int64", *pairs.FLOAT8)
"""Dtypes that quantised numbers have in files."""

OF_INPUTS = (".pre_quant_scale", "_act_pre_scale")
"""Endings of the names of the factors of a layer's inputs (AWQ, SmoothQuant) of ModelOpt and torchao."""

ENDINGS = {
    **dict.fromkeys((packed.ZEROS, packed.SCALES, packed.GROUPS), packed.NUMBERS),
    **dict.fromkeys(
        (bitsandbytes.ABSMAX, bitsandbytes.TABLE, bitsandbytes.NESTED_ABSMAX, bitsandbytes.NESTED_TABLE), ""
    ),
    bitsandbytes.SCB: ".weight",
    **dict.fromkeys((pairs.BY_BLOCK, pairs.BY_ROW), ""),
    **dict.fromkeys(compressed.OF_NUMBERS, compressed.PLAIN),
}
"""Ending of a name -> the ending of its numbers' name."""


def check_dropped(tensors: Mapping[str, TensorInfo], dropped: Iterable[str]) -> None:
    """Refuse to leave out scales, tables or orders of numbers that stay.

    Args:
        tensors: name -> header of all tensors.
        dropped: names that are left out.

    Raises:
        CheckpointError: the first such name, and that of its numbers.
    """
    gone = set(dropped)
    for name in sorted(gone):
        for numbers in _numbers_of(name):
            if numbers in tensors and numbers not in gone and tensors[numbers].dtype in CODES:
                raise CheckpointError(
                    f"--drop leaves out {printable(name)}, without which {printable(numbers)} are codes that mean "
                    "nothing; --dequantize makes floating point of both"
                )


def notes_on_codes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return a note per dtype of small numbers that are copied as they are: matrices of int8 or float8 without scales.

    Args:
        tensors: name -> header of all tensors of a source that is not dequantised.
    """
    names_by_dtype: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if info.dtype in ("int8", "uint8", *pairs.FLOAT8) and len(info.shape) > 1:
            names_by_dtype.setdefault(info.dtype, []).append(name)
    return [
        f"copied as they are, as nothing beside them scales them: {len(names)} tensors of {dtype}, such as "
        f"{printable(names[0])}"
        for dtype, names in names_by_dtype.items()
    ]


def notes_on_config(config: Mapping[str, object], written: Mapping[str, object] | None) -> list[str]:
    """Return a note on keys of quantisation that the written config.json lacks.

    Args:
        config: of a source without quantised tensors.
        written: the config to write; None: the source's own.
    """
    keys = [key for key in schemes.KEYS if config.get(key) is not None and written is not None and key not in written]
    by = schemes.describe(schemes.scheme_of(config))
    return (
        [f"left out of config.json: {' and '.join(keys)}{f' ({by})' if by else ''}, as no tensor is quantised"]
        if keys
        else []
    )


def _numbers_of(name: str) -> list[str]:
    """Return the names that the numbers of a scale or table may have."""
    endings = [*ENDINGS.items(), *((scales, numbers) for numbers, scales in pairs.ENDINGS)]
    endings += [(ending, compressed.PACKED) for ending in (compressed.SCALE, *compressed.OF_NUMBERS)]
    endings += [(ending, compressed.QDATA) for ending in (compressed.TORCHAO_SCALE, compressed.TORCHAO_ZEROS)]
    names = [name.removesuffix(ending) + numbers for ending, numbers in endings if name.endswith(ending)]
    stem, is_state, _ = name.rpartition(bitsandbytes.STATE)
    return [*names, stem] if is_state else names


FLOATS = ("bfloat16", "float16", "float32", "float64")


def find(reader: Reader, config: Mapping[str, object]) -> list[QuantisedTensor]:
    """Return the quantised tensors, in the order of the numbers.

    Args:
        reader: the checkpoint.
        config: the model's config.json.

    Raises:
        CheckpointError: tensors that don't match each other, a scheme that is not supported, or no quantised tensor.
    """
    schemes.check(reader.path, schemes.scheme_of(config))
    _check_names(reader)
    scaled = next((name for name in reader.tensors if name.endswith(OF_INPUTS)), None)
    if scaled is not None:
        raise bad(reader.path, f"{printable(scaled)} scales the inputs of its layer, without which the weights are "
                  "others; convert the model that it was made of")  # fmt: skip
    grouped = packed.find(reader.path, reader.tensors, config)
    for group in grouped:
        if group.groups:
            packed.check_groups(reader, group.groups, group.shape[1], group.group_size)
    quantised: list[QuantisedTensor] = [
        *grouped,
        *compressed.find(reader, config),
        *bitsandbytes.find(reader),
        *blocks.find(reader),
    ]
    names = {name for tensor in quantised for name in (tensor.numbers, *tensor.others)}
    rest = {name: info for name, info in reader.tensors.items() if name not in names}
    if not quantised or pairs.is_any(rest):
        quantised += pairs.find(reader.path, rest, config)
    stand_for: dict[str, str] = {}  # two kinds of names may mean the same tensor
    for tensor in quantised:
        is_plain = tensor.name != tensor.numbers and tensor.name in reader.tensors
        clash = tensor.name if is_plain else stand_for.get(tensor.name)
        if clash is not None:
            raise bad(reader.path, f"both {printable(clash)} and {printable(tensor.numbers)} are there; only one "
                      "can be")  # fmt: skip
        stand_for[tensor.name] = tensor.numbers
    order = {name: position for position, name in enumerate(reader.tensors)}
    return sorted(quantised, key=lambda tensor: order[tensor.numbers])


def check_plain(reader: Reader, config: Mapping[str, object]) -> None:
    """Refuse quantised weights in a conversion that does not dequantise them, if config.json or names show the method.

    MXFP4 and float8 are left to the layout, which names one of their tensors.

    Raises:
        CheckpointError: the weights are quantised; the line names the method and the option to use.
    """
    scheme = schemes.scheme_of(config)
    if schemes.unsupported(scheme) == "":
        _check_names(reader)
    name, is_described = schemes.method_name_of(reader.tensors), not schemes.is_by_name(scheme)
    if name or (is_described and (_has_codes(reader) or schemes.method_of(scheme) == "mlx")):
        schemes.check(reader.path, scheme)
        by = f"{schemes.describe(scheme)} (config.json)" if is_described else f"the names of its tensors ({name})"
        raise CheckpointError(
            f"{printable(str(reader.path), 400)} is quantised by {printable(by, 400)}; --dequantize makes floating "
            "point of it"
        )


def _check_names(reader: Reader) -> None:
    """Refuse weights whose names show a method that is not dequantised, where config.json does not name it.

    Raises:
        CheckpointError: the first such name, and the method.
    """
    name, method = schemes.other_method_of(reader.tensors)
    if name:
        by = f"{method} (the names of its tensors, {printable(name)})"
        raise CheckpointError(schemes.not_dequantised(reader.path, by, schemes.NOT_SUPPORTED, method.lower()))


def check_blocks(reader: Reader) -> None:
    """Refuse quantised types of GGUF in a conversion that does not dequantise them: no other container supports them.

    Raises:
        CheckpointError: the checkpoint has such tensors.
    """
    kinds = sorted({info.blocks for info in reader.tensors.values() if info.blocks})
    if kinds:
        raise CheckpointError(
            f"{printable(str(reader.path), 400)} is quantised by GGUF, {', '.join(kinds)}; --dequantize makes floating "
            "point of it"
        )


def check_loadable(reader: Reader, config: Mapping[str, object]) -> None:
    """Refuse to make a model of quantised weights.

    Raises:
        CheckpointError: the weights are quantised; the line names the command that dequantises them.
    """
    scheme, name = schemes.scheme_of(config), pairs.first_of(reader.tensors)
    if schemes.method_of(scheme) in schemes.IN_CALLS:
        raise CheckpointError(
            f"{printable(str(reader.path), 400)} is quantised by {schemes.describe(scheme)} (config.json), whose "
            "layers round weights and inputs in each call, which a model here does not"
        )
    if not name and not (schemes.unsupported(scheme) and _has_codes(reader)):
        return
    schemes.check(reader.path, scheme)
    by = "" if schemes.is_by_name(scheme) else f", {schemes.describe(scheme)}"
    raise CheckpointError(
        f"{reader.path} holds quantised weights ({printable(name)}{by}), which a model does not run; attn-bridge "
        f"convert {shlex.quote(str(reader.path))} DST --to same --dequantize makes a folder that it can be loaded from"
    )


def _has_codes(reader: Reader) -> bool:
    return any(info.dtype in CODES and len(info.shape) > 1 for info in reader.tensors.values())


def default_dtype(
    tensors: Mapping[str, TensorInfo], quantised: Mapping[str, QuantisedTensor], config: Mapping[str, object]
) -> str:
    """Return the dtype that quantised tensors become by default.

    Args:
        tensors: of the checkpoint.
        quantised: name of numbers -> how they are quantised.
        config: the model's config.json.

    Returns:
        bfloat16 for MXFP4 and float8. For other kinds the dtype of the model: that of most other numbers, or else that
        of config.json.
    """
    if not any(isinstance(tensor, TiledTensor) for tensor in quantised.values()):
        return FLOATS[0]
    names: Collection[str] = {name for tensor in quantised.values() for name in (tensor.numbers, *tensor.others)}
    counts: collections.Counter[str] = collections.Counter()
    for name, info in tensors.items():
        if name not in names and info.dtype in FLOATS:
            counts[info.dtype] += math.prod(info.shape)
    if counts:
        return counts.most_common(1)[0][0]
    named = config.get("dtype", config.get("torch_dtype"))
    return named if named in FLOATS else FLOATS[0]
