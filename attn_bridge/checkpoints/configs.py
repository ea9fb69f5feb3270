"""The config.json of a model: beside a checkpoint, as ours, and as other libraries write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .containers.base import CheckpointError
from .planning import Plan

CONFIG = "config.json"
OWN = "attn-bridge-"
"""What a config.json of ours has in front of the model's name as its ``model_type``."""


def is_folder(target: Path, format: str) -> bool:
    """Whether a target is a folder with room for a config; an Orbax folder is a container of its own."""
    return format == "safetensors" and target.suffix != ".safetensors"


def beside(path: Path) -> dict[str, Any]:
    """Return the config.json (or Meta's params.json) of a folder, or beside a file; {} where none can be read."""
    folder = path if path.is_dir() else path.parent
    file = next((folder / name for name in ("config.json", "params.json") if (folder / name).is_file()), folder)
    try:
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def is_tied(plan: Plan) -> bool:
    """Return whether the target holds the output head in its token embeddings alone."""
    return not any(one.info.name == "lm_head.weight" for one in plan.targets)


def read_config(model: str, folder: Path) -> dict[str, Any]:
    """Return the config that a model of that class takes, from a folder's config.json: ours, or Hugging Face's.

    Raises:
        CheckpointError: there is none, or it is another model's.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no object")
    kind = config.get("model_type")
    if kind == OWN + model:
        return {key: value for key, value in config.items() if key != "model_type"}
    if (model, kind) == ("GPTModel", "gpt2"):
        return _of_gpt2(path, config)
    if (model, kind) == ("BertEncoder", "bert"):
        return config
    raise CheckpointError(f"{path}: model_type {kind!r} is no {model}")


def _of_gpt2(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the book's config for a ``GPT2Config``."""
    fixed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "n_inner": (None, 4 * config.get("n_embd", 0)),
    }
    for key, values in fixed.items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(f"{path}: {key} ({config[key]!r}) must be {values[0]!r} for GPTModel")
    names = {
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
        "emb_dim": "n_embd",
        "n_heads": "n_head",
        "n_layers": "n_layer",
    }
    missing = [theirs for theirs in names.values() if theirs not in config]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    found = {ours: config[theirs] for ours, theirs in names.items()}
    return {**found, "drop_rate": config.get("resid_pdrop", 0.1), "qkv_bias": True}


def config_of_layout(config: Mapping[str, Any], layout: str, *, tied: bool) -> dict[str, Any] | None:
    """Return the config.json that goes with a checkpoint in an outside layout, made from ours; None: there is none."""
    if not layout.startswith(("hf-", "meta-")):
        return dict(config)
    if (config.get("model_type"), layout) != (OWN + "GPTModel", "hf-gpt2"):
        return None
    rate = config["drop_rate"]
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config["vocab_size"],
        "n_positions": config["context_length"],
        "n_embd": config["emb_dim"],
        "n_head": config["n_heads"],
        "n_layer": config["n_layers"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), rate),
        "tie_word_embeddings": tied,
    }


def own_config(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `save_pretrained` writes as config.json."""
    return {"model_type": OWN + model, **config}
