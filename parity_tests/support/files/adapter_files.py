"""Folders of LoRA adapters as peft 0.21 saves them, and what merging them gives, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

Array = np.ndarray

FRONT = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "fan_in_fan_out": False, "bias": "none",
    "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "modules_to_save": None,
    "target_parameters": None, "layer_replication": None, "trainable_token_indices": None, "lora_bias": False,
}  # fmt: skip
"""The keys of adapter_config.json that change what is merged, with their usual values."""


def save(folder: Path, tensors: dict[str, Array], **config: Any) -> Path:
    """Write an adapter."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    tensors = {FRONT + name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def matrices(layer: str, inputs: int, outputs: int, rank: int = 4, seed: int = 0) -> dict[str, Array]:
    """Return the two matrices of a layer."""
    rng = np.random.default_rng((seed, inputs, outputs, *layer.encode()))
    down, up = rng.normal(size=(rank, inputs)), rng.normal(size=(outputs, rank))
    return {f"{layer}.lora_A.weight": down.astype(np.float32), f"{layer}.lora_B.weight": up.astype(np.float32)}


def product(tensors: dict[str, Array], layer: str, alpha: float = 8, *, is_rslora: bool = False) -> Array:
    """Return what is added to a Linear's weight."""
    down, up = (tensors[f"{layer}.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
    return up @ down * alpha / (math.sqrt(len(down)) if is_rslora else len(down))
