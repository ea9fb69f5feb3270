"""The adapter of torch's precision switches: unsafe values of each, and how to see what is in force."""

from __future__ import annotations

from typing import Any

import torch

from attn_parity.frameworks.torch import precision
from attn_parity.settings import precision as joint

LABEL = "torch"
UNSAFE = {
    "fp32_precision": "bf16",
    "cudnn.fp32_precision": "tf32",
    "mkldnn.fp32_precision": "bf16",
    "cuda.matmul.fp32_precision": "tf32",
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "mkldnn.matmul.fp32_precision": "bf16",
    "mkldnn.conv.fp32_precision": "tf32",
    "mkldnn.rnn.fp32_precision": "bf16",
    "float32_matmul_precision": "medium",
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_accumulation": True,
    "cuda.fp16_bf16_reduction_math_sdp": True,
    "sdpa_kernel": "flash, math",
    "cudnn.benchmark": True,
    "cudnn.deterministic": False,
    "autocast('cpu')": True,
    "autocast('cuda')": True,
    "flush_denormal": True,
}
"""Setting that `strict` holds -> a value under which numbers differ."""

SWITCHES = {switch.name: switch for switch in precision.SWITCHES}
ON_CPU = {"fp32_precision", "float32_matmul_precision", "cuda.fp16_bf16_reduction_math_sdp", "flush_denormal"} | {
    name for name in UNSAFE if "mkldnn" in name or "cpu" in name
}
"""Those that are unsafe on a CPU too."""

LACKING = joint.Switch("no_such_thing", "meaning", True, lambda: torch.backends.cuda.matmul.no_such_thing)
"""A setting that this version does not have."""


def values() -> dict[str, Any]:
    """Return every value in force, and what the inherited settings were set to themselves."""
    keys = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
    keys += [(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")]
    found = {name: switch.read() for name, switch in SWITCHES.items()}
    found |= {f"own {backend} {operation}": precision._own_fp32(backend, operation) for backend, operation in keys}
    for dtype in ("bf16", "fp16"):
        name = f"allow_{dtype}_reduced_precision_reduction_split_k"
        found[name] = getattr(torch.backends.cuda.matmul, name)
    return found


def row_of(name: str) -> joint.SettingRow:
    """Return a setting as it is now."""
    (row,) = (row for row in joint.rows_of("torch", precision) if row.name == name)
    return row


def assert_safe() -> None:
    """Check that every setting that `strict` holds is safe."""
    assert [row for row in joint.rows_of("torch", precision) if row.held and row.state != "safe"] == []


def states(name: str) -> set[str]:
    """Return what an unsafe value of a setting may be called on this machine."""
    return {"unsafe"} if name in ON_CPU else {"unsafe", "note", "no effect here"}


def set_unsafe(name: str) -> Any:
    """Return a context in which a setting has its unsafe value."""
    return SWITCHES[name].hold(UNSAFE[name])
