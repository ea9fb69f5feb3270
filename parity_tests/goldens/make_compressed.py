"""Quantise matrices with compressed-tensors, and keep its numbers: ``python -m parity_tests.goldens.make_compressed``.

It needs `compressed-tensors` (0.20.1 wrote the file), which is not among the requirements of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

ROWS, COLUMNS = 18, 64
GROUPED = {"strategy": "group", "group_size": 16}
FLOAT = {"type": "float", "scale_dtype": "torch.uint8", "strategy": "group", "group_size": 32}
TOKENS = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8 by rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 by rows, zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 as a whole": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8 as a whole, zeros": ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    "int8 by blocks": ("int-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [4, 32]}),
    "packed by rows, zeros": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "packed 4 bit": ("pack-quantized", {"num_bits": 4, **GROUPED}),
    **{
        f"packed {bits} bit, zeros": ("pack-quantized", {"num_bits": bits, "symmetric": False, **GROUPED})
        for bits in (2, 3, 4, 5, 6, 7, 8)
    },
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, **FLOAT}),
    "MXFP6": ("mxfp6-pack-quantized", {"num_bits": 6, **FLOAT}),
    "MXFP8": ("mxfp8-quantized", {"num_bits": 8, **FLOAT}),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": "torch.float8_e4m3fn"},
    ),
}  # fmt: skip
"""Name -> format of compressed-tensors, and its description of the weights."""


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest number of each block."""
    high, wide = args.block_structure or {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS)}.get(
        str(args.strategy), (1, args.group_size)
    )
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % high))
    tiles = padded.reshape(len(padded) // high, high, COLUMNS // wide, wide)
    both = tiles.amin((1, 3)), tiles.amax((1, 3))
    return (both[0].reshape(1), both[1].reshape(1)) if args.strategy == "tensor" else both


def quantised(form: str, described: dict[str, Any], seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a quantised matrix, and the package's own numbers."""
    args = QuantizationArgs(**described)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    overall = generate_gparam(weight.min(), weight.max()).reshape(1) if args.strategy == "tensor_group" else None
    scales, zeros = calculate_qparams(*extremes(weight, args), args, global_scale=overall)
    scales = scales if args.scale_dtype else scales.to(torch.bfloat16)
    tensors = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    if overall is not None:
        tensors["weight_global_scale"] = overall
    compressor = BaseCompressor.get_value_from_registry(form)
    inputs = TOKENS if form == "int-quantized" else None
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=form)
    made = compressor.compress(tensors, scheme)
    return made, compressor.decompress(made, scheme)["weight"]


def write(path: Path) -> None:
    """Write tensors ``SCHEME/NAME``, the numbers as ``SCHEME/exact``, and the configs in the metadata."""
    tensors, configs = {}, {}
    for seed, (name, (form, described)) in enumerate(SCHEMES.items()):
        made, exact = quantised(form, described, seed)
        for ending, tensor in {**made, "exact": exact}.items():
            tensors[f"{name}/{ending}"] = tensor.contiguous()
        groups = {"group_0": {"targets": ["Linear"], "weights": described}}
        configs[name] = json.dumps({"quant_method": "compressed-tensors", "format": form, "config_groups": groups})
    save_file(tensors, path, configs)


if __name__ == "__main__":
    write(Path(__file__).with_name("compressed.safetensors"))
