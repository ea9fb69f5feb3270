"""The config.json of a conversion's target, made from that of its source and completed from the weights."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping

from ..models import families
from ..models.layout import Layout
from ..models.ours import OWN
from ..models.reading import multimodal
from ..specs.model import Shape
from ..whole_files import JsonObject
from . import configs, quantised
from .containers.base import CheckpointError, TensorInfo

OF_TRANSFORMERS = ("hf-", "vllm")
"""Prefixes of the names of layouts whose models have a config.json of `transformers`."""

POSITIONS = "max_position_embeddings"

KEPT = (
    *families.TOKENS,
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "initializer_range",
    "init_std",
    POSITIONS,
    "use_cache",
    "dtype",
    "torch_dtype",
)
"""Keys that do not change a model's computation; they are copied when its config is rewritten."""


def of_target(
    config: Mapping[str, object], layout: Layout, shapes: Mapping[str, Shape], *, is_needed: bool = True
) -> dict[str, object] | None:
    """Return the config.json for weights in a layout, made from that of their source.

    Args:
        config: the source's; {} if missing.
        layout: the target's.
        shapes: name -> shape of the source's tensors.
        is_needed: whether the target is a folder; if not, a config that can't be converted is left out.

    Returns:
        The config to write; {} for no config; None to copy the source's bytes.

    Raises:
        CheckpointError: a config of ours, or of other names, that none of the layout's models has.
    """
    own = str(config.get("model_type"))
    if layout.name.startswith("meta-"):
        return {} if own.startswith(OWN) else None
    if not layout.name.startswith(OF_TRANSFORMERS) or not config:
        return None
    try:
        if own.startswith(OWN):
            return _written_anew(own.removeprefix(OWN), config, layout)
        theirs = configs.as_transformers(config, shapes)
        if theirs is None:
            return None
        kinds = {
            multimodal.registered_type(one) for one in (theirs, theirs.get("text_config")) if isinstance(one, Mapping)
        }
        family = families.FAMILIES.get(str(multimodal.registered_type(theirs)))
        if theirs is not config or (family is not None and not kinds & set(layout.model_types)):
            return _with_kept(_rewritten(theirs, layout, shapes), theirs)
        plain_config = quantised.unquantised(theirs)
        return None if plain_config == config else plain_config
    except (TypeError, ValueError, RecursionError) as error:
        if not is_needed:
            return {}
        is_clear = isinstance(error, families.FamilyError)
        raise CheckpointError(str(error) if is_clear else f"{configs.CONFIG}: {error}") from None


def _rewritten(theirs: Mapping[str, object], layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, object]:
    """Return the config.json of a `transformers` model in the form of another family of a layout."""
    kind = str(theirs["model_type"])
    source = "" if multimodal.registered_type(theirs) in layout.model_types else kind
    return families.write_config(families.find_whole(theirs, shapes), layout, source)


def _written_anew(model: str, config: Mapping[str, object], layout: Layout) -> dict[str, object]:
    """Return the config of one of our models in the form of the layout's library; {} if it has no such model."""
    if model not in configs.OWN_MODELS:
        return {}
    own = configs.OWN_MODELS[model]
    written = own.write(own.read(config), layout)
    return {} if written is None else _with_kept(written, config)


def _with_kept(written: Mapping[str, object], source: Mapping[str, object]) -> dict[str, object]:
    """Return a config with the copied keys (`KEPT`), except a number of positions that would change the model."""
    config = {**written, **{key: source[key] for key in KEPT if source.get(key) is not None}}
    family = families.FAMILIES.get(str(multimodal.registered_type(written)))
    if family is None or families.find_whole(config) == families.find_whole(written):
        return config
    return {**config, POSITIONS: written[POSITIONS]}


def of_text(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config.json of the text model in a multimodal config; any other config unchanged."""
    text_config = multimodal.text_of(config)
    if text_config == config:
        return text_config
    text_config |= {key: config[key] for key in KEPT if key not in text_config and config.get(key) is not None}
    family = families.FAMILIES.get(str(text_config["model_type"]))
    return {
        **text_config,
        **({"architectures": [family.architecture]} if family is not None else {}),
    }


def finished(
    config: dict[str, object], source: Mapping[str, object], *, tied: bool, infos: Iterable[TensorInfo]
) -> JsonObject:
    """Return a rewritten config completed from the weights: tied embeddings, and the dtype if no key names it.

    Args:
        config: as returned by `of_target`.
        source: the config that it was made from.
        tied: whether the head shares the matrix of the embeddings.
        infos: of all tensors; the dtype of most numbers becomes the model's.
    """
    if config["model_type"] == source.get("model_type"):
        return config
    document = dict(config)
    if "tie_word_embeddings" in document:
        document["tie_word_embeddings"] = tied
    sizes: collections.Counter[str] = collections.Counter()
    for info in infos:
        if "float" in info.dtype:
            sizes[info.dtype] += math.prod(info.shape)
    if sizes and not {"dtype", "torch_dtype"} & document.keys():
        document["torch_dtype"] = sizes.most_common(1)[0][0]
    return document


DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of a config.json for the weights' dtype: of `transformers` since 4.56, and before."""


def with_dtype(config: Mapping[str, object], dtype: str, layout: str) -> dict[str, object]:
    """Return a config.json with the dtype of a conversion's cast; `transformers` 5 loads weights in that dtype.

    Args:
        config: that of a model, whose parts (``text_config``) may name a dtype as well.
        dtype: its NumPy name; "" leaves the config as it is.
        layout: name of the target's layout; in one of `transformers` the dtype is added if no key names it.
    """
    if not dtype:
        return dict(config)
    named = [key for key in DTYPE_KEYS if isinstance(config.get(key), str)]
    named = named or ([DTYPE_KEYS[0]] if layout.startswith(OF_TRANSFORMERS) else [])
    document = {**config, **{key: _as_named(config.get(key), dtype) for key in named}}
    for key, part in config.items():
        if isinstance(part, Mapping) and key.endswith("_config") and key != "quantization_config":
            document[key] = with_dtype(part, dtype, "")
    return document


def _as_named(before: object, dtype: str) -> str:
    """Return a dtype's name in the form that the config has, such as the book's ``torch.bfloat16``."""
    return f"torch.{dtype}" if isinstance(before, str) and before.startswith("torch.") else dtype
