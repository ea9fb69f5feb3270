"""The quantised tensors of a checkpoint, of every kind, and the dtype that they become where none is given."""

from __future__ import annotations

import collections
import math
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ...printable import printable
from ..containers.base import CheckpointError, Reader, TensorInfo
from ..containers.files import bad
from . import bitsandbytes, blocks, dropping, packed, pairs, schemes
from .pairs import QuantisedTensor

FLOATS = ("bfloat16", "float16", "float32", "float64")


def find(reader: Reader, config: Mapping[str, Any]) -> list[QuantisedTensor]:
    """Return what is quantised, in the order of the numbers.

    Args:
        reader: the checkpoint.
        config: the model's config.json.

    Raises:
        CheckpointError: tensors that don't go together, a scheme that is not supported, or nothing that is quantised.
    """
    schemes.check(reader.path, schemes.scheme_of(config))
    grouped = packed.find(reader.path, reader.tensors, config)
    for group in grouped:
        packed.check_groups(reader, group)
    quantised: list[QuantisedTensor] = [
        *grouped,
        *bitsandbytes.find(reader),
        *blocks.find(reader),
    ]
    if not quantised:
        return pairs.find(reader.path, reader.tensors, config)
    for tensor in quantised:
        if tensor.name != tensor.numbers and tensor.name in reader.tensors:
            raise bad(reader.path, f"both {printable(tensor.name)} and {printable(tensor.numbers)} are there; only one "
                      "can be")  # fmt: skip
    order = {name: position for position, name in enumerate(reader.tensors)}
    return sorted(quantised, key=lambda tensor: order[tensor.numbers])


def check_plain(reader: Reader, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights by the method that config.json names, where they are not dequantised.

    MXFP4 and float8 are left to the layout, which names a tensor of theirs.

    Raises:
        CheckpointError: the weights are quantised; the line says by what, and what to do.
    """
    scheme = schemes.scheme_of(config)
    name, is_described = pairs.method_name_of(reader.tensors), not schemes.is_by_name(scheme)
    if name or (is_described and _has_codes(reader)):
        schemes.check(reader.path, scheme)
        by = f"{schemes.describe(scheme)} (config.json)" if is_described else f"the names of its tensors ({name})"
        raise CheckpointError(
            f"{printable(str(reader.path), 400)} is quantised by {printable(by, 400)}; --dequantize makes floating "
            "point of it"
        )


def check_loadable(reader: Reader, config: Mapping[str, Any]) -> None:
    """Refuse to make a model of quantised weights.

    Raises:
        CheckpointError: the weights are quantised; the line names the command that dequantises them.
    """
    scheme, name = schemes.scheme_of(config), pairs.first_of(reader.tensors)
    if not name and not (schemes.unsupported(scheme) and _has_codes(reader)):
        return
    schemes.check(reader.path, scheme)
    by = "" if schemes.is_by_name(scheme) else f", {schemes.describe(scheme)}"
    raise CheckpointError(
        f"{reader.path} holds quantised weights ({printable(name)}{by}), which a model does not run; attn-bridge "
        f"convert {shlex.quote(str(reader.path))} DST --to same --dequantize makes a folder that it can be loaded from"
    )


def _has_codes(reader: Reader) -> bool:
    return any(info.dtype in dropping.CODES and len(info.shape) > 1 for info in reader.tensors.values())


def default_dtype(
    tensors: Mapping[str, TensorInfo], quantised: Mapping[str, QuantisedTensor], config: Mapping[str, Any]
) -> str:
    """Return the dtype that quantised tensors become where none is given.

    Args:
        tensors: of the checkpoint.
        quantised: name of numbers -> how they are quantised.
        config: the model's config.json.

    Returns:
        bfloat16 for MXFP4 and float8. For other kinds the dtype of the model: that of most other numbers, or else what
        config.json names.
    """
    kinds = (packed.GroupedTensor, blocks.BlockTensor, *bitsandbytes.TENSORS)
    if not any(isinstance(tensor, kinds) for tensor in quantised.values()):
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
