"""Reads and checks the config.json of a model, next to a checkpoint or in our form; `rewritten_configs` rewrites it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .. import specs
from ..models import families, originals, own_models
from ..models.layout import Layout
from ..models.ours import OWN
from ..models.reading import multimodal
from ..models.reading.decoders import check_sizes
from ..models.reading.model_config import ConfigFile as ModelKeys
from ..printable import printable
from ..specs import as_json
from ..specs.model import ModelConfig, Shape
from ..weights import WeightsMismatchError
from ..whole_files import JsonObject
from . import containers, manifest, quantised
from .containers.base import CheckpointError, Reader
from .containers.remote import is_there
from .containers.sources import read_file

Whole = TypeVar("Whole", bound=ModelConfig)

CONFIG = "config.json"
PARAMS = "params.json"
"""File name of the config in checkpoints of Meta and Mistral."""

_THEIRS = {"GPTModel": "gpt2", "BertEncoder": "bert"}
MAX_BYTES = 1 << 24
"""Maximum size of a config.json in bytes."""

SPARE = 10_000
"""Parameters by which a model may exceed its weights; loading the weights then names the missing tensors."""


def is_folder(target: Path, format: str) -> bool:
    """Return whether a target is a folder with room for a config; an Orbax folder is a container itself."""
    return format == "safetensors" and target.suffix != ".safetensors"


def beside(path: Path) -> dict[str, object]:
    """Return the config.json of a checkpoint, or Meta's params.json (`text_beside`); {} if missing.

    Raises:
        CheckpointError: it is not a file, or not a JSON object.
    """
    source = text_beside(path)
    return {} if source is None else _object(*source)


def text_beside(path: Path) -> tuple[Path, bytes] | None:
    """Return the file that has the config.json of a checkpoint, and the text; None if missing.

    Args:
        path: a folder, which has it in itself or in its manifest; or a file, of whose manifest it is, as several files
            may share a folder, or else in its folder.

    Raises:
        CheckpointError: it is not a file.
    """
    file = _file_beside(path)
    carried = manifest.config_of(path) if file is None or not path.is_dir() else None
    if carried is not None and len(carried[1]) > MAX_BYTES:
        raise CheckpointError(
            f"{carried[0]} has a config of {len(carried[1])} characters; at most {MAX_BYTES} are read"
        )
    if carried is not None:
        return carried[0], carried[1].encode("utf-8", "surrogateescape")
    return None if file is None else (file, _read_text(file))


def name_of(path: Path, config: bytes) -> str:
    """Return the name of the file that the config of a target gets: Meta's, where a manifest carries such a text.

    Args:
        path: of the source.
        config: the text to write.
    """
    own = text_beside(path)
    if own is None or own[0].name in (CONFIG, PARAMS):
        return CONFIG
    document = _object(own[0], config)
    return PARAMS if "dim" in document and "model_type" not in document else CONFIG


def notes_on_files(path: Path) -> tuple[str, ...]:
    """Return a note where a file's manifest and its folder have two configs, of which the manifest's is read."""
    carried, file = manifest.config_of(path) if path.is_file() else None, _file_beside(path)
    if carried is None or file is None or _object(file, _read_text(file)) == beside(path):
        return ()
    return (
        f"{file.name} beside the file is not read, as {printable(carried[0].name)} has another: remove it to read that",
    )


def of_reader(reader: Reader) -> dict[str, object]:
    """Return the config.json of an open checkpoint: the one in its container, or that of its folder."""
    return beside(home_of(reader)) if reader.config is None else dict(reader.config)


def home_of(reader: Reader) -> Path:
    """Return the path that has the config.json of a checkpoint: its own, or a run that it is a step or an item of."""
    if not reader.above or text_beside(reader.path) is not None:
        return reader.path
    return next((folder for folder in reader.above if _file_beside(folder) is not None), reader.path)


def checked_of(reader: Reader) -> dict[str, object]:
    """Return the result of `of_reader` after a check that its sizes can be those of a model.

    Raises:
        CheckpointError: a size is not valid.
    """
    config, path = of_reader(reader), home_of(reader)
    kind = config.get("model_type")
    try:
        if kind is not None and not isinstance(kind, str):
            raise TypeError(f"model_type must be text, got {printable(json.dumps(kind), 40)}")
        if isinstance(kind, str) and kind.removeprefix(OWN) in OWN_MODELS and kind.startswith(OWN):
            OWN_MODELS[kind.removeprefix(OWN)].read(config)
        elif kind is not None or "dim" in config:  # of a library, or of Meta; any other has settings for layouts alone
            sizes = multimodal.text_of(config) if kind in multimodal.MODELS else config
            check_sizes(sizes, least=int(isinstance(kind, str) and kind in families.FAMILIES))
    except (TypeError, ValueError, RecursionError) as error:
        source = None if reader.config else text_beside(path)
        raise CheckpointError(f"{path if source is None else source[0]}: {error}") from None
    return config


def _file_beside(path: Path) -> Path | None:
    folder = path if path.is_dir() else path.parent
    return next((folder / name for name in (CONFIG, PARAMS) if is_there(folder / name)), None)


def _read_text(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for, a device read without end
            raise ValueError("it is no file")
        return read_file(path, path.parent, MAX_BYTES)
    except CheckpointError:  # the file itself is refused
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {printable(error)}") from None


def _read_object(path: Path) -> dict[str, object]:
    return _object(path, _read_text(path))


def _object(path: Path, text: bytes) -> dict[str, object]:
    """Return the JSON object in the text of a file."""
    try:
        document = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path} can't be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read as JSON: {printable(error)}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {printable(json.dumps(document), 40)}")
    return document


def read_config(model: str, folder: Path) -> Any:
    """Return the config for a model class from the config.json of a folder: ours, Hugging Face's, or an original's.

    Raises:
        CheckpointError: it is missing, belongs to another model, or has sizes that its weights can't have.
    """
    path = folder / CONFIG
    if model == "DecoderModel" and not path.exists() and (folder / PARAMS).exists():
        path = folder / PARAMS
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}")
    config = _config_for(model, path, _read_object(path))
    _check_size(model, path, config)
    return config


def _config_for(model: str, path: Path, config: dict[str, object]) -> object:
    kind = config.get("model_type")
    if kind == OWN + model and model in _WHOLE:
        return _own_whole(model, path, config)
    if kind == OWN + model:
        return {key: value for key, value in config.items() if key != "model_type"}
    if model in _WHOLE:
        try:
            return _WHOLE[model][1](path, config)
        except WeightsMismatchError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    if (model, kind) == ("GPTModel", "gpt2"):
        return _of_gpt2(path, config)
    if (model, kind) == ("BertEncoder", "bert"):
        return config
    model_types = " or ".join(repr(one) for one in (_THEIRS[model], OWN + model))
    if kind is None:
        raise CheckpointError(f"{path} has no model_type; expected {model_types}")
    raise CheckpointError(f"{path}: model_type must be {model_types} for {model}, got {printable(repr(kind))}")


def _of_original(path: Path, config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the config in the form of `transformers` for an original and its weights; None for any other config."""
    transformers_config = originals.to_transformers(config)
    if transformers_config is None:
        return None
    with containers.open_reader(path.parent) as reader:
        return originals.fitted(transformers_config, {name: info.shape for name, info in reader.tensors.items()})


def _check_size(model: str, path: Path, raw_config: Any) -> None:
    """Refuse sizes far beyond those of the weights next to a config: the model is built before its weights are read."""
    kind: type[ModelConfig] = (
        type(raw_config) if isinstance(raw_config, ModelConfig) else getattr(specs, f"{model}Config")
    )
    try:
        config = kind.read(raw_config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    with containers.open_reader(path.parent) as reader:
        quantised.check_loadable(reader, beside(path.parent))
        tensors = len(reader.tensors)
        num_elements = sum(info.nbytes // info.itemsize for info in reader.tensors.values())
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, size in sizes.items():
        most = tensors if name.endswith("layers") else num_elements
        if isinstance(size, int) and size > most + SPARE:
            raise CheckpointError(
                f"{path}: {name} ({size}) is far too large for weights of {num_elements} numbers{_sizes_left_out(path)}"
            )
    made = config.count
    if made > 2 * num_elements + SPARE:  # tied weights are held once
        raise CheckpointError(
            f"{path}: its sizes make a model of {made} numbers; the weights beside it have {num_elements}"
            f"{_sizes_left_out(path)}"
        )


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Size keys that every decoder's config has."""


def left_out(config: Mapping[str, object], keys: Iterable[str] | None = None) -> dict[str, object]:
    """Return key -> its family's default for the keys that a config of `transformers` leaves out.

    Args:
        config: a config.json; one of another library, or with a nested config of the text model, leaves out nothing.
        keys: keys of `transformers`; those without a default in the family are passed over. None: all.
    """
    kind = multimodal.registered_type(config)
    family = families.FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or "text_config" in config:
        return {}
    defaults = family.description.defaults
    read = ModelKeys(config, str(kind), {}, family.description.aliases)
    wanted = defaults if keys is None else [key for key in keys if key in defaults]
    return {key: defaults[key] for key in wanted if key not in read}


def _sizes_left_out(path: Path) -> str:
    """Return, as the end of an error, the sizes that a config of `transformers` leaves out; "" where it has all."""
    missing = [f"{key} (then {default})" for key, default in left_out(_read_object(path), SIZES).items()]
    return f"; it leaves out {', '.join(missing)}" if missing else ""


def _of_decoder(path: Path, config: Mapping[str, object]) -> specs.DecoderConfig:
    return families.find_decoder(_of_original(path, config) or config)


def _of_encoder_decoder(path: Path, config: Mapping[str, object]) -> specs.EncoderDecoderConfig:
    with containers.open_reader(path.parent) as reader:
        return families.find_encoder_decoder(config, reader.tensors.keys())


_WHOLE: dict[str, tuple[type[ModelConfig], Callable[[Path, Mapping[str, Any]], ModelConfig]]] = {
    "DecoderModel": (specs.DecoderConfig, _of_decoder),
    "EncoderDecoderModel": (specs.EncoderDecoderConfig, _of_encoder_decoder),
}
"""Composite model -> its config class, and the function that builds that config from one of `transformers`."""


def _own_whole(model: str, path: Path, config: Mapping[str, object]) -> object:
    try:
        return _read_whole(_WHOLE[model][0], config)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _of_gpt2(path: Path, config: Mapping[str, object]) -> dict[str, object]:
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
            raise CheckpointError(f"{path}: {key} ({printable(repr(config[key]))}) must be {values[0]!r} for GPTModel")
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
    sizes = {ours: config[theirs] for ours, theirs in names.items()}
    return {**sizes, "drop_rate": config.get("resid_pdrop", 0.1), "qkv_bias": True}


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """Functions that read and write the config.json of one of our whole models.

    Attributes:
        read: from the file to the model's config.
        write: from the config and a layout to that library's config.json; None if the layout is for other models.
    """

    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, Layout], JsonObject | None]


def _read_whole(kind: type[Whole], document: Mapping[str, object]) -> Whole:
    """Return the config of a composite model from a config.json of ours."""
    config = as_json.from_json(document.get("config"))
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__}, got {type(config).__name__}")
    return config


def _plain(document: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in document.items() if key != "model_type"}


OWN_MODELS: dict[str, OwnModel] = {
    **{
        model: OwnModel(functools.partial(_read_whole, kind), families.write_config)
        for model, (kind, _) in _WHOLE.items()
    },
    "GPTModel": OwnModel(lambda document: specs.GPTModelConfig.read(_plain(document)), own_models.write_gpt_model),
    "BertEncoder": OwnModel(
        lambda document: specs.BertEncoderConfig.read(_plain(document)), own_models.write_bert_encoder
    ),
}
"""Name of a class -> how its config is read and written."""

MADE = ("gguf", "keras")
"""Containers whose readers build a config of `transformers` from their metadata, so that no config.json is read."""


def as_transformers(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> Mapping[str, object] | None:
    """Return the config of an original in the form of `transformers`; one of `transformers` unchanged; otherwise None.

    Args:
        config: the source's config.
        shapes: name -> shape of the source's tensors, which supply sizes that an original's config leaves out.
    """
    if isinstance(config.get("model_type"), str):
        return config
    transformers_config = originals.to_transformers(config)
    return None if transformers_config is None else originals.fitted(transformers_config, shapes)


def with_defaults(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a config of `transformers` with that library's defaults for missing keys, which settings need."""
    return {**left_out(config), **config}


def with_sizes(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a config with the sizes of our decoder's attention, if all blocks agree, under keys of `transformers`.

    Layouts look for their settings there, and for whether the head of a whole model is tied.
    """
    model = str(config.get("model_type")).removeprefix(OWN)
    if config.get("model_type") != OWN + model or model not in _WHOLE:
        return config
    try:
        whole = OWN_MODELS[model].read(config)
    except (TypeError, ValueError, RecursionError):
        return config  # the code that builds its model reports the error
    additions: dict[str, object] = {"tie_word_embeddings": whole.tie}
    for ours, theirs in _SIZES.items() if isinstance(whole, specs.DecoderConfig) else ():
        sizes = {getattr(block.attention, ours, None) for block in whole.blocks}
        if len(sizes) == 1:
            additions[theirs] = sizes.pop()
    return {**config, **additions}


_SIZES = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}


def own_config(model: str, config: Any) -> dict[str, object]:
    """Return the config.json of `save_pretrained`."""
    if model in _WHOLE:
        return {"model_type": OWN + model, "config": as_json.as_json(config)}
    return {"model_type": OWN + model, **dataclasses.asdict(config)}
