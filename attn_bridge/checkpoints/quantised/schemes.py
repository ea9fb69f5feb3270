"""Parses config.json's descriptions of quantised weights, and decides which are supported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...printable import printable
from ...whole_files import JsonObject
from ..containers.base import CheckpointError

KEYS = ("quantization_config", "compression_config")
"""Keys of a config.json that describe quantised weights."""

MLX = "quantization"
"""The same in configs that mlx_lm writes."""

TEXT = "text_config"
"""Key of the text model's config in that of a multimodal model."""

TITLES = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "mxfp4": "MXFP4", "fp8": "float8", "mlx": "MLX"}
TITLES |= {title.lower(): title for title in ("EETQ", "EXL2", "EXL3", "HQQ", "AQLM")} | {"modelopt": "ModelOpt"}
"""Name of a method in config.json -> its usual name."""

REMEDIES = {"mlx": "mlx_lm.convert --dequantize makes floating point of it; convert that"}
"""Method that is not dequantised here -> the remedy."""

IN_CALLS = ("bitnet",)
"""Methods whose layers round weights and inputs in each call, from weights that may be floating point in the file."""

FLOAT_FORMATS = ("float-quantized", "naive-quantized", "dense")
"""Formats of compressed-tensors with float8, or without quantisation."""

FORMATS = (*FLOAT_FORMATS, "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision")  # fmt: skip
"""Formats of compressed-tensors that are read."""

FLOAT8 = ("fp8", "fbgemm_fp8", "finegrained_fp8", "mxfp4", "compressed-tensors")
"""Methods whose tensors, numbers and scales, are recognised by their names."""

MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
"""Algorithms of ModelOpt whose tensors are float8 with a scale for all, or for each row, or NVFP4."""

FORMS = {"gptq": 1, "gptq_v2": 0}
"""Form of GPTQ's zero points in a file -> the addend of the stored values."""

PACKED = {"gptq": ((2, 4, 8), "checkpoint_format", tuple(FORMS)), "awq": ((4,), "version", ("gemm",))}
"""Method of packed words -> bits of a number, the key of the order of its numbers or zero points, and its values."""

NOT_SUPPORTED = "this method is not supported"


def scheme_of(config: Mapping[str, Any]) -> JsonObject:
    """Return the part of a config.json that describes quantised weights; {} where it has none."""
    places = [config, config[TEXT]] if isinstance(config.get(TEXT), Mapping) else [config]
    scheme: object = next((part[key] for part in places for key in (*KEYS, MLX) if part.get(key) is not None), {})
    return dict(scheme) if isinstance(scheme, Mapping) else {}


def method_of(scheme: Mapping[str, object]) -> str:
    """Return the method of a scheme in lower case; "" where it names none."""
    method = scheme.get("quant_method")
    if method is None and (scheme.get("load_in_4bit") or scheme.get("load_in_8bit")):
        return "bitsandbytes"
    if method is None and {"group_size", "bits"} <= scheme.keys():
        return "mlx"
    return method.lower() if isinstance(method, str) else ""


def bits_of(scheme: Mapping[str, object]) -> int | None:
    """Return the bits of a number; None if the scheme does not have them."""
    if method_of(scheme) == "bitsandbytes":
        is_4, is_8 = (scheme.get(f"load_in_{bits}bit") is True for bits in (4, 8))
        return 4 if is_4 else 8 if is_8 else None
    bits = scheme.get("bits", scheme.get("w_bit"))
    if bits is None:  # of compressed-tensors
        bits = next((weights.get("num_bits") for weights in weights_of(scheme)), None)
    return bits if type(bits) is int else None


def weights_of(scheme: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the descriptions of weights in compressed-tensors' `config_groups`."""
    groups = scheme.get("config_groups")
    parts = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    return [weights for group in parts if isinstance(weights := group.get("weights"), Mapping)]


def describe(scheme: Mapping[str, object]) -> str:
    """Return the quantisation in words, such as ``GPTQ, 4 bit``; "" if config.json does not name it."""
    method, bits = method_of(scheme), bits_of(scheme)
    parts = [TITLES.get(method, printable(method, 40))] if method else []
    form = scheme.get({"compressed-tensors": "format", "modelopt": "quant_algo"}.get(method, ""))
    parts += [printable(form, 40)] if isinstance(form, str) else []
    return ", ".join([*parts, *([f"{bits} bit"] if bits is not None else [])])


def unsupported(scheme: Mapping[str, object]) -> str:
    """Return why weights of a scheme can't be dequantised; "" if config.json does not rule it out."""
    method, bits = method_of(scheme), bits_of(scheme)
    if method == "compressed-tensors":
        return _unsupported_format(scheme)
    if not method or method in FLOAT8:
        return ""
    if method == "modelopt":
        form = scheme.get("quant_algo")
        return "" if form in MODELOPT else f"quant_algo must be {' or '.join(MODELOPT)}"
    if scheme.get("dynamic"):
        return "its layers differ in bits (dynamic)"
    if method not in PACKED:
        return "" if method in ("bitsandbytes", "torchao") else NOT_SUPPORTED
    choices, key, forms = PACKED[method]
    form = scheme.get(key, forms[0])
    if bits not in choices:
        return f"it must have {' or '.join(map(str, choices))} bit"
    if method == "awq" and isinstance(form, str):
        form = form.lower()
    return "" if form in forms else f"{key} must be {' or '.join(forms)}, got {printable(scheme[key], 40)}"


def _unsupported_format(scheme: Mapping[str, object]) -> str:
    """Return why weights of compressed-tensors can't be dequantised, or ""."""
    sparsity, turns = scheme.get("sparsity_config"), scheme.get("transform_config")
    if scheme.get("format", FORMATS[0]) not in FORMATS:
        return f"format must be one of {', '.join(FORMATS)}"
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return "its weights are sparse (sparsity_config)"
    is_turned = isinstance(turns, Mapping) and bool(turns.get("config_groups"))
    return "its weights are rotated (transform_config)" if is_turned else ""


def is_by_name(scheme: Mapping[str, object]) -> bool:
    """Whether errors of layouts name its tensors, by which alone it is recognised."""
    method = method_of(scheme)
    if method == "compressed-tensors" and scheme.get("format", FORMATS[0]) not in FLOAT_FORMATS:
        return False
    return not unsupported(scheme) and method in ("", "modelopt", *FLOAT8)


def check(path: Path, scheme: Mapping[str, object]) -> None:
    """Refuse a scheme that can't be dequantised.

    Args:
        path: of the checkpoint.
        scheme: from its config.json.

    Raises:
        CheckpointError: the scheme is not supported; the line describes it.
    """
    why = unsupported(scheme)
    if why:
        raise CheckpointError(not_dequantised(path, f"{describe(scheme)} (config.json)", why, method_of(scheme)))


def not_dequantised(path: Path, by: str, why: str, method: str) -> str:
    """Return the error message on weights of a method that is not supported."""
    remedy = REMEDIES.get(method, "convert the model that it was made of")
    return f"{printable(str(path), 400)} is quantised by {by}, which can't be dequantised: {why}; {remedy}"


OF_METHODS = {".qweight": ".qzeros", ".SCB": ".weight", ".absmax": ".quant_map", ".weight_packed": ".weight_scale",
              "_qdata": "_scale"}  # fmt: skip
"""Ending of a name that only files of such a method have -> that of the name next to it."""


def method_name_of(names: Collection[str]) -> str:
    """Return the first name that only checkpoints of such a method have; "" without any."""
    pairs = [(name, ending) for name in sorted(names) for ending in OF_METHODS if name.endswith(ending)]
    return next((name for name, one in pairs if name.removesuffix(one) + OF_METHODS[one] in names), "")


OTHER_METHODS = {
    ".trellis": (".suh", "EXL3"),
    ".q_weight": (".q_scale", "EXL2"),
    ".weight._data": (".weight._scale", "quanto"),
    ".weight._data._data": (".weight._shift", "quanto"),
    ".weight": (".weight_scales", "EETQ"),
    ".W_q": (".zero", "HQQ"),
    ".codebooks": (".codes", "AQLM"),
    ".biases": (".scales", "MLX"),
}
"""Ending of a name that only files of a method have that is not dequantised -> that of the name next to it, and the
method.
"""


def other_method_of(names: Collection[str]) -> tuple[str, str]:
    """Return the first name of a method that is not dequantised, and the method; "" twice without any."""
    for name in names:
        for ending, (other, method) in OTHER_METHODS.items():
            if name.endswith(ending) and name.removesuffix(ending) + other in names:
                return name, method
    return "", ""
