"""The config.json of a model: beside a checkpoint, as ours, and as other libraries write it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import specs
from ..models import families
from ..printable import printable
from ..specs import as_json
from ..specs.model import ModelConfig
from . import containers
from .containers.base import CheckpointError
from .planning import Plan

CONFIG = "config.json"
_THEIRS = {"GPTModel": "gpt2", "BertEncoder": "bert"}
MAX_BYTES = 1 << 24
"""Bytes of a config.json."""

SPARE = 10_000
"""Numbers by which a model may be larger than its weights say: what is missing is named when they are loaded."""

OWN = "attn-bridge-"
"""What a config.json of ours has in front of the model's name as its ``model_type``."""


def is_folder(target: Path, format: str) -> bool:
    """Whether a target is a folder with room for a config; an Orbax folder is a container of its own."""
    return format == "safetensors" and target.suffix != ".safetensors"


def beside(path: Path) -> dict[str, Any]:
    """Return the config.json (or Meta's params.json) of a folder, or beside a file; {} where there is none.

    Raises:
        CheckpointError: it is no JSON object.
    """
    folder = path if path.is_dir() else path.parent
    file = next((folder / name for name in (CONFIG, "params.json") if (folder / name).is_file()), None)
    return {} if file is None else _read_object(file)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes; at most {MAX_BYTES} are read")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {printable(error)}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {printable(json.dumps(document), 40)}")
    return document


def is_tied(plan: Plan) -> bool:
    """Return whether the target holds the output head in its token embeddings alone."""
    return not any(one.info.name == "lm_head.weight" for one in plan.targets)


def read_config(model: str, folder: Path) -> Any:
    """Return the config that a model of that class takes, from a folder's config.json: ours, or Hugging Face's.

    Raises:
        CheckpointError: there is none, it is another model's, or it holds sizes that the weights beside it can't have.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}")
    found = _config_for(model, path, _read_object(path))
    _check_size(model, path, found)
    return found


def _config_for(model: str, path: Path, config: dict[str, Any]) -> Any:
    kind = config.get("model_type")
    if kind == OWN + model and model in _WHOLE:
        return _own_whole(model, path, config)
    if kind == OWN + model:
        return {key: value for key, value in config.items() if key != "model_type"}
    if model in _WHOLE:
        try:
            return _WHOLE[model][1](path, config)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    if (model, kind) == ("GPTModel", "gpt2"):
        return _of_gpt2(path, config)
    if (model, kind) == ("BertEncoder", "bert"):
        return config
    known = " or ".join(repr(one) for one in (_THEIRS[model], OWN + model))
    if kind is None:
        raise CheckpointError(f"{path} has no model_type; expected {known}")
    raise CheckpointError(f"{path}: model_type must be {known} for {model}, got {kind!r}")


def _check_size(model: str, path: Path, found: Any) -> None:
    """Refuse sizes far beyond those of the weights beside a config: the model is made before they are read."""
    kind: type[ModelConfig] = type(found) if isinstance(found, ModelConfig) else getattr(specs, f"{model}Config")
    try:
        config = kind.read(found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    with containers.open_reader(path.parent) as reader:
        tensors = len(reader.tensors)
        held = sum(info.nbytes // info.itemsize for info in reader.tensors.values())
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, size in sizes.items():
        most = tensors if name.endswith("layers") else held
        if isinstance(size, int) and size > most + SPARE:
            raise CheckpointError(f"{path}: {name} ({size}) is far too large for weights of {held} numbers")
    made = sum(math.prod(row.shape) for row in config.parameters)
    if made > 2 * held + SPARE:  # tied weights are held once
        raise CheckpointError(f"{path}: its sizes make a model of {made} numbers; the weights beside it have {held}")


def _of_decoder(path: Path, config: Mapping[str, Any]) -> specs.DecoderConfig:
    return families.find_decoder(config)


def _of_encoder_decoder(path: Path, config: Mapping[str, Any]) -> specs.EncoderDecoderConfig:
    with containers.open_reader(path.parent) as reader:
        return families.find_encoder_decoder(config, reader.tensors.keys())


_WHOLE: dict[str, tuple[type[ModelConfig], Callable[[Path, Mapping[str, Any]], ModelConfig]]] = {
    "DecoderModel": (specs.DecoderConfig, _of_decoder),
    "EncoderDecoderModel": (specs.EncoderDecoderConfig, _of_encoder_decoder),
}
"""Model whose config is made of others -> its class, and what makes it of a config.json of `transformers`."""


def _own_whole(model: str, path: Path, config: Mapping[str, Any]) -> Any:
    try:
        found = as_json.from_json(config.get("config"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    kind = _WHOLE[model][0]
    if not isinstance(found, kind):
        raise CheckpointError(f"{path}: config must be a {kind.__name__}, got {type(found).__name__}")
    return found


def _of_gpt2(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the book's config for a ``GPT2Config``."""
    width = config.get("n_embd")
    fixed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "n_inner": (None, 4 * width if isinstance(width, int) else None),
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
    try:
        own = specs.GPTModelConfig.read({key: value for key, value in config.items() if key != "model_type"})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{CONFIG}: {error}") from None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": own.vocab_size,
        "n_positions": own.context_length,
        "n_embd": own.emb_dim,
        "n_head": own.n_heads,
        "n_layer": own.n_layers,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), own.drop_rate),
        "tie_word_embeddings": tied,
    }


def own_config(model: str, config: Any) -> dict[str, Any]:
    """Return what `save_pretrained` writes as config.json."""
    if model in _WHOLE:
        return {"model_type": OWN + model, "config": as_json.as_json(config)}
    return {"model_type": OWN + model, **dataclasses.asdict(config)}
