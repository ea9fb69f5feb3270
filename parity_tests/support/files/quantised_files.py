"""Weights quantised as GPTQ, AWQ and bitsandbytes save them, packed in plain NumPy after their code.

Each function takes a weight (outputs, inputs) and returns what a file holds of it, by ending of the name, and the
weight that it stands for, exact in float64.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
Quantised = tuple[dict[str, Array], Array]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of 8 in the order in which AutoAWQ puts them into a word."""

NF4 = np.float32(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def by_groups(weight: Array, bits: int, group: Array) -> tuple[Array, Array, Array]:
    """Return numbers (inputs, outputs), zero points and float16 scales (groups, outputs)."""
    columns, most = weight.T.astype(np.float64), 2**bits - 1
    count = int(group.max()) + 1
    scales, zeros = np.empty((2, count, columns.shape[1]))
    numbers = np.empty(columns.shape, np.int64)
    for number in range(count):
        part = columns[group == number]
        low, high = np.minimum(part.min(0), -1e-3), np.maximum(part.max(0), 1e-3)
        scales[number] = ((high - low) / most).astype(np.float16)
        zeros[number] = np.clip(np.round(-low / scales[number]), 1, most)
        numbers[group == number] = np.clip(np.round(part / scales[number]) + zeros[number], 0, most)
    return numbers, zeros.astype(np.int64), scales.astype(np.float16)


def words(numbers: Array, bits: int) -> Array:
    """Pack rows into words of 32 bits, the first row lowest."""
    per_word = 32 // bits
    packed = np.zeros((len(numbers) // per_word, numbers.shape[1]), np.uint32)
    for position in range(per_word):
        packed |= numbers[position::per_word].astype(np.uint32) << np.uint32(bits * position)
    return packed.view(np.int32)


def gptq(weight: Array, bits: int = 4, size: int = 8, *, shuffled: bool = False, added: int = 1) -> Quantised:
    """Quantise as GPTQ; `shuffled` gives inputs groups in another order (desc_act)."""
    inputs = weight.shape[1]
    group = np.arange(inputs) // size
    if shuffled:
        group = np.random.default_rng(3).permutation(group)
    numbers, zeros, scales = by_groups(weight, bits, group)
    tensors = {
        "qweight": words(numbers, bits),
        "qzeros": np.ascontiguousarray(words((zeros - added).T, bits).T),
        "scales": scales,
        "g_idx": group.astype(np.int32),
    }
    return tensors, (scales.astype(np.float64)[group] * (numbers - zeros[group])).T


def awq(weight: Array, size: int = 8) -> Quantised:
    """Quantise as AWQ, in the order of its gemm kernel."""
    group = np.arange(weight.shape[1]) // size
    numbers, zeros, scales = by_groups(weight, 4, group)

    def packed(rows: Array) -> Array:
        ordered = rows.reshape(len(rows), -1, 8)[..., list(AWQ_ORDER)].reshape(rows.shape)
        return np.ascontiguousarray(words(ordered.T, 4).T)

    tensors = {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}
    return tensors, (scales.astype(np.float64)[group] * (numbers - zeros[group])).T


def four_bit(weight: Array, size: int = 16, *, nested: bool = False) -> Quantised:
    """Quantise as bitsandbytes to nf4, with scales in float32 or in codes of 8 bits."""
    flat = np.concatenate([weight.reshape(-1).astype(np.float32), np.zeros(-weight.size % size, np.float32)])
    blocks = flat.reshape(-1, size)
    absmax = np.abs(blocks).max(1)
    codes = np.abs((blocks / absmax[:, None])[..., None] - NF4).argmin(-1).astype(np.uint8).reshape(-1)[: weight.size]
    pairs = np.concatenate([codes, np.zeros(weight.size % 2, np.uint8)]).reshape(-1, 2)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None], "weight.quant_map": NF4}
    if nested:
        table = np.sort(np.random.default_rng(5).uniform(-1, 1, 256)).astype(np.float32)
        offset, count = float(absmax.mean()), 4
        rest = np.concatenate([absmax - np.float32(offset), np.zeros(-len(absmax) % count, np.float32)])
        outer = np.abs(rest.reshape(-1, count)).max(1)
        of = np.arange(len(absmax)) // count
        inner = np.abs((rest[: len(absmax)] / outer[of])[:, None] - table).argmin(-1).astype(np.uint8)
        absmax = table[inner] * outer[of] + np.float32(offset)
        tensors |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": count, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    exact = NF4.astype(np.float64)[codes] * absmax.astype(np.float64).repeat(size)[: weight.size]
    return tensors, exact.reshape(weight.shape)


def four_bit_stored(weight: Array) -> Quantised:
    """Quantise to nf4, and store the codes as bfloat16 (``bnb_4bit_quant_storage``)."""
    tensors, exact = four_bit(weight)
    return {**tensors, "weight": tensors["weight"].reshape(-1).view(ml_dtypes.bfloat16)[:, None]}, exact


def eight_bit(weight: Array) -> Quantised:
    """Quantise as bitsandbytes to int8."""
    scales = np.abs(weight).max(1).astype(np.float32)
    numbers = np.round(weight / scales[:, None] * 127).astype(np.int8)
    tensors = {"weight": numbers, "SCB": scales, "weight_format": np.zeros((), np.uint8)}
    return tensors, numbers * scales.astype(np.float64)[:, None] / 127


SCHEMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq 4": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq"}),
    "gptq 8": (lambda weight: gptq(weight, 8), {"quant_method": "gptq", "bits": 8, "group_size": 8, "desc_act": False}),
    "gptq 2": (lambda weight: gptq(weight, 2), {"quant_method": "gptq", "bits": 2, "group_size": 8}),
    "gptq shuffled": (
        lambda weight: gptq(weight, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True},
    ),
    "gptq v2": (
        lambda weight: gptq(weight, added=0),
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"},
    ),
    "gptq whole": (lambda weight: gptq(weight, size=1 << 20), {"quant_method": "gptq", "bits": 4, "group_size": -1}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}),
    "nf4": (four_bit, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4 nested": (
        lambda weight: four_bit(weight, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    ),
    "nf4 stored": (
        four_bit_stored,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "int8": (eight_bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
"""Name of a scheme -> what quantises a weight, and what config.json says of it."""
