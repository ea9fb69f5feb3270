"""Weights of live modules from and to checkpoints, and folders that hold a model's config beside them.

`torch_attn.checkpoints` and `jax_attn.checkpoints` are the same for each framework.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from .. import backends
from ..weights import WeightsMismatchError
from . import containers, execution, manifest, planning
from .containers.base import Array, CheckpointError, Reader, TensorInfo
from .elements import Elements

Side = Literal["torch", "flax"]

CONFIG = "config.json"
OWN = "attn-bridge-"
"""What a config.json of ours has in front of the model's name as its ``model_type``."""


class ArraysReader(Reader):
    """Arrays in memory as a checkpoint to be written.

    Args:
        arrays: name -> array.
    """

    format: ClassVar[str] = "memory"

    def __init__(self, arrays: Mapping[str, Array]):
        self.path = Path("<memory>")
        self.tensors = {name: TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()}
        self.metadata: dict[str, Any] = {}
        self._arrays = dict(arrays)

    def files(self) -> list[Path]:
        """Return no file."""
        return []

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        flat = np.ascontiguousarray(self._arrays[name]).reshape(-1).view(np.uint8)
        return flat[start:stop].data


def load(side: Side, path: Path, module: Any, from_layout: str | None, settings: Mapping[str, Any] | None) -> None:
    """Write a checkpoint's tensors into a module; see ``torch_attn.checkpoints.load``."""
    backend = backends.load(side)
    wanted = backend.describe_weights(module)
    with containers.open_reader(path) as reader:
        if from_layout is None and reader.tensors.keys() == wanted.keys():
            plan = planning.make(reader, target_layout="same")
        else:
            from . import _config

            plan = planning.make(
                reader,
                source_layout=from_layout,
                target_layout=side,
                settings=settings,
                config=_config(reader.path),
                manifest=manifest.of(reader, path),
            )
        found = {one.info.name: one for one in plan.targets if not one.kept}
        misshapen = [
            f"{name}: expected {wanted[name][0]}, got {found[name].info.shape}"
            for name in wanted.keys() & found.keys()
            if wanted[name][0] != found[name].info.shape
        ]
        missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        if missing or unexpected or misshapen:
            raise WeightsMismatchError(missing, unexpected, misshapen)
        elements = Elements(reader, None, max(one.info.nbytes for one in plan.targets))
        arrays = {name: elements.read(one)[0].reshape(one.info.shape) for name, one in found.items()}
        backend.set_weights(module, arrays)


def save(
    side: Side,
    module: Any,
    path: Path,
    to_layout: str,
    format: str | None,
    settings: Mapping[str, Any] | None,
    overwrite: bool,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a module's weights to a checkpoint; see ``torch_attn.checkpoints.save``."""
    from . import _is_folder

    reader = ArraysReader(backends.load(side).get_weights(module))
    kind = containers.format_of(path, format)
    is_folder = _is_folder(path, kind)
    plan = planning.make(
        reader,
        source_layout=None if to_layout == "same" else side,
        target_layout=to_layout,
        target_format=kind,
        is_folder=is_folder,
        settings=settings,
    )
    own = getattr(module, "config", None)
    if config is None and is_folder and to_layout != "same" and dataclasses.is_dataclass(own):
        ours = own_config(type(module).__name__, dataclasses.asdict(own))  # type: ignore[arg-type]
        config = config_of_layout(ours, to_layout, tied=is_tied(plan))
    execution.carry_out(plan, reader, path, kind, is_folder=is_folder, overwrite=overwrite, config=config)


def is_tied(plan: planning.Plan) -> bool:
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


def find_folder(name: str | Path) -> Path:
    """Return a folder, downloading a model of the Hugging Face hub where its id is given and no such folder exists.

    Raises:
        CheckpointError: there is no such folder, and no hub to ask.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith("."):
        raise CheckpointError(f"{name} is no folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(f"{name} is no folder; pip install huggingface_hub to get it from the hub") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.safetensors", "*.safetensors.index.json", CONFIG]))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{name} is no folder, and the hub does not give it: {reason}") from None
