"""Subjects of the parity matrix from a user's checkpoint: each attention layer of the file, with its own weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from attn_bridge import checkpoints
from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers.sources import read_file
from attn_bridge.models import layouts
from attn_bridge.specs import find_variant

from ..sides.arrays import DTYPES
from ..sides.subject import Arrays
from .cases import TwinCase
from .twin_runs import CheckRow

BATCH, TOKENS = 2, 12
"""Size of the random input that each layer is run on."""

_NUM_HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads")


def subjects_from_file(path: str | Path, layout: str, settings: Mapping[str, int] | None = None) -> list[CheckRow]:
    """Return one subject per attention layer of a checkpoint.

    Args:
        path: a ``.safetensors`` file, or a folder with checkpoints and its ``config.json``.
        layout: name of its layout, such as ``"hf-bert"``.
        settings: ``{"num_heads": 12}``; by default read from ``config.json`` next to the file.

    Raises:
        ValueError: no such file or layout, no tensor of that layout in it, or the number of heads is nowhere given.
    """
    path, table, settings = Path(path), layouts.find(layout), dict(settings or {})
    num_heads = settings.pop("num_heads", None)
    if settings:
        raise ValueError(f"setting ({', '.join(settings)}) must be num_heads")
    arrays = checkpoints.read(path)
    covered = table.select(arrays)
    if not covered:
        raise ValueError(f"{path} holds no tensor of the layout {layout}")
    canonical = table.to_canonical({name: arrays[name] for name in covered})
    folder = path if path.is_dir() else path.parent
    num_heads = _read_num_heads(folder / "config.json") if num_heads is None else num_heads
    variant = find_variant("MultiHeadAttention")
    weights_of_layers = layouts.attention_layers(canonical)
    if not weights_of_layers:
        raise ValueError(f"{path} holds no attention layers of the layout {layout}")
    for name, array in canonical.items():
        if not np.isfinite(array.astype(np.float64)).all():
            raise ValueError(f"{path}: {name} holds NaN or infinity, and nothing can be proven with it")
    # float64 holds every lower precision exactly.
    layers = {
        f"layer-{index}": {name: array.astype(np.float64) for name, array in weights.items()}
        for index, weights in weights_of_layers.items()
    }
    options = ("--weights", str(path), "--layout", layout, "--set", f"num_heads={num_heads}")
    subjects = [
        CheckRow(variant, _case(name, weights, num_heads), weights, options) for name, weights in layers.items()
    ]
    for subject in subjects:
        _check_shapes(path, subject)
    return subjects


def _check_shapes(path: Path, subject: CheckRow) -> None:
    """Refuse a layer whose tensors do not fit each other, naming them."""
    config = subject.case.config_of(subject.variant)
    wanted = {parameter.rule.torch: parameter.shape for parameter in config.parameters}
    shapes = {name: array.shape for name, array in (subject.weights or {}).items()}
    wrong = [
        f"{name} {shapes.get(name, 'missing')}, expected {shape}"
        for name, shape in wanted.items()
        if shapes.get(name) != shape
    ]
    if wrong or shapes.keys() - wanted.keys():
        wrong += [f"{name} unexpected" for name in sorted(shapes.keys() - wanted.keys())]
        keys, queries = (shapes.get(f"W_{part}.weight", (0,))[0] for part in ("key", "query"))
        if 0 < keys < queries and not queries % keys:
            raise ValueError(
                f"{path}, {subject.case.name}: grouped heads: keys have {keys} rows and queries {queries}, which "
                "MultiHeadAttention has not; use --model"
            )
        raise ValueError(f"{path}, {subject.case.name}: {'; '.join(wrong)}")


def _case(name: str, weights: Arrays, num_heads: int) -> TwinCase:
    if weights["W_query.weight"].ndim != 2:
        raise ValueError(f"{name}: W_query.weight must have 2 dimensions, got {weights['W_query.weight'].shape}")
    d_out, d_in = weights["W_query.weight"].shape
    sizes = {"d_in": d_in, "d_out": d_out, "context_length": TOKENS, "num_heads": num_heads}
    sizes["qkv_bias"] = "W_query.bias" in weights
    return TwinCase(name, TOKENS, sizes, batch=BATCH, mask="padding", dtypes=DTYPES)


def _read_num_heads(path: Path) -> int:
    try:
        if not path.exists():
            raise ValueError(f"num_heads is not known: give --set num_heads=N, or put {path.name} beside the file")
        data = read_file(path, path.parent, configs.MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    try:
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    counts = [config[key] for key in _NUM_HEADS_KEYS if isinstance(config, dict) and key in config]
    if not counts:
        raise ValueError(f"{path} names none of {', '.join(_NUM_HEADS_KEYS)}; give --set num_heads=N")
    if isinstance(counts[0], bool) or not isinstance(counts[0], int):
        raise ValueError(f"{path}: the number of heads must be an integer, got {json.dumps(counts[0])}")
    return int(counts[0])
