"""Families of models: the attention of a layer in ours, from a Hugging Face ``config.json`` and the layer's arrays.

A family is a TOML file. Those of this folder are whole decoders, which ``attn-bridge derive`` writes and
`attn_bridge.models.derived` reads; those of `attn_bridge.models.pairs` are encoders with their decoders. A family goes
from config and layer to an `AttentionLayer`: our class, its config, and the tables of `attn_bridge.weights.rows.Row`
that map to its tensors and back.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...printable import listed, printable
from ...specs.decoder_model import DecoderConfig
from ...specs.encoder_decoder_model import EncoderDecoderConfig
from ..attention_layer import AttentionLayer
from ..derived import known
from ..derived.family import Family, Scoped
from ..derived.reading import DerivedFamily
from ..layout import Layout
from ..pairs.reading import FAMILIES as PAIRS
from ..pairs.reading import PairFamily
from ..parts import OmittedPart
from ..reading import multimodal
from ..reading.differences import differences
from ..reading.model_config import ConfigFile
from ..tables.layers import KEYS_AND_VALUES

__all__ = [
    "AttentionLayer",
    "ConfigFile",
    "Family",
    "find_decoder",
    "find_encoder_decoder",
    "find_layer",
    "find_whole",
    "known_model_types",
    "without_code",
    "write_config",
]

FAMILIES: Mapping[str, Family] = Scoped(
    {name: family for family in (*known.FAMILIES, *PAIRS) for name in family.model_types},
    lambda family: dict.fromkeys(family.model_types, family),
)
"""``model_type`` -> its family."""


class FamilyError(ValueError):
    """A conversion of a model to another family, which has no such model; the message is one line."""


def known_model_types(kind: type[Family] = Family) -> tuple[str, ...]:
    """Return every ``model_type`` of a config.json that has a family, of a kind."""
    return tuple(sorted({multimodal.written_type(name) for name, one in FAMILIES.items() if isinstance(one, kind)}))


def find_layer(config: Mapping[str, object], layer: int) -> AttentionLayer:
    """Return the attention of a layer in ours.

    Args:
        config: the model's ``config.json`` as a dict; of a multimodal model, the one with ``text_config``.
        layer: index of the layer, from 0.

    Raises:
        TypeError: `config` is not a mapping, or a value of it or `layer` has the wrong type.
        ValueError: a ``model_type`` without a family, a layer that the model lacks, or a value that does not fit.
    """
    family, read = _computed(config)
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise TypeError(f"layer must be an integer, got {type(layer).__name__}")
    layer = layer.__index__()
    layers = read.integer(family.depth)
    if not 0 <= layer < layers:
        raise ValueError(f"layer ({layer}) must be at least 0 and below {family.depth} ({layers})")
    return family.attention(read, layer)


def find_decoder(config: Mapping[str, object]) -> DecoderConfig:
    """Return the config of a whole decoder in ours; arguments and errors as of `find_whole`."""
    family, read = _computed(config, DerivedFamily)
    if not isinstance(family, DerivedFamily):
        decoders = ", ".join(known_model_types(DerivedFamily))
        raise ValueError(
            f"model_type ({read.model_type}) is no decoder of ours, which are {decoders}; EncoderDecoderModel runs it"
        )
    return family.model(read)


def find_encoder_decoder(config: Mapping[str, object], names: Collection[str] = ()) -> EncoderDecoderConfig:
    """Return the config of a whole encoder with its decoder in ours; arguments and errors as of `find_whole`."""
    family, read = _computed(config, PairFamily)
    if isinstance(family, PairFamily):
        return family.model(read, names)
    if read.model_type in map(multimodal.decoder_type, multimodal.DECODERS):
        kind = multimodal.written_type(read.model_type)
        raise ValueError(f"a {kind} whose config says that it is a decoder has no encoder; DecoderModel runs it")
    choices = ", ".join(known_model_types(PairFamily))
    raise ValueError(
        f"model_type ({read.model_type}) is no encoder and decoder of ours, which are {choices}; DecoderModel runs it"
    )


def find_whole(config: Mapping[str, object], names: Collection[str] = ()) -> DecoderConfig | EncoderDecoderConfig:
    """Return the config of a whole model in ours, of either kind.

    Args:
        config: the model's ``config.json`` as a dict; of a multimodal model, the one with ``text_config``.
        names: of the model's tensors, which decide cases that the config leaves open.

    Raises:
        TypeError: `config` is not a mapping, or a value of it has the wrong type.
        ValueError: a ``model_type`` without such a model, or a value that we do not compute.
    """
    family, read = _computed(config)
    return family.model(read, names)


def unread_keys(config: Mapping[str, object]) -> tuple[OmittedPart, ...]:
    """Return the projections and norms of keys and values in layers that read those of others: files may have them."""
    try:
        blocks = find_decoder(without_code(config)).blocks
    except (TypeError, ValueError):  # which reading the model refuses
        return ()
    reason = "its layer reads the keys and values of an earlier one"
    return tuple(
        OmittedPart(f"{{prefix}}layers.{number}.self_attn.{name}.", reason, mark="weight")
        for number, block in enumerate(blocks)
        if block.keys_of is not None
        for name in KEYS_AND_VALUES
    )


def ties_head(config: Mapping[str, object]) -> bool | None:
    """Return whether a config.json ties the head of a model to its embeddings; None for an unknown family.

    Raises:
        TypeError: a value of it has the wrong type.
    """
    try:
        _, read = _read(config)
    except ValueError:
        return None
    return read.flag("tie_word_embeddings")


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are written as null: their defaults in `transformers` come from a class, whose vocabulary may differ."""

SHOWN = 3
"""Maximum differences that a refusal names."""


def write_config(config: DecoderConfig | EncoderDecoderConfig, layout: Layout, source: str = "") -> dict[str, Any]:
    """Return the ``config.json`` of a whole model, of the first family of a layout from which it is read back equal.

    Args:
        config: the model's.
        layout: layout of the weights, which selects the families.
        source: ``model_type`` of the config.json that the config was read from; "" for a model of ours.

    Raises:
        ValueError: no family of the layout has such a model; the message names the first differences from the closest
            one.
        FamilyError: (a ValueError) likewise, for a source; the message names the first difference from the family that
            gives the layout its name.
    """
    families = [(name, FAMILIES[name]) for name in layout.model_types if name in FAMILIES]
    candidates = {
        name: family for name, family in families if name == family.model_types[0] and isinstance(config, family.whole)
    }
    # Only an encoder with its decoder is read by the names of its tensors too; a table of experts takes long to list.
    is_pair = isinstance(config, EncoderDecoderConfig)
    names = [parameter.rule.torch for parameter in config.parameters] if is_pair else []
    closest, fewest = "", math.inf
    for name, family in candidates.items():
        try:
            _check_blocks(config)
            keys = {"model_type": name, "architectures": [family.architecture], **dict.fromkeys(TOKENS)}
            written = keys | family.write(config)
            lacking = differences(config, find_whole(written, names))
        except (TypeError, ValueError, OverflowError) as error:
            closest = closest or f"{name}: {error}"
            continue
        if not lacking:
            return written
        kinds = _by_kind(lacking)
        if len(kinds) < fewest:
            closest, fewest = f"{name} has another {listed(kinds, SHOWN)}", len(kinds)
    if source:
        raise FamilyError(_why_another(config, layout, source, candidates, names))
    kind = "decoder" if isinstance(config, DecoderConfig) else "encoder and decoder"
    if not closest:
        raise ValueError(f"{layout.name} is for no {kind} of ours, so that no config.json can be written")
    raise ValueError(f"no config.json of {layout.name} ({', '.join(candidates)}) says all of this {kind}; {closest}")


def _why_another(
    config: DecoderConfig | EncoderDecoderConfig,
    layout: Layout,
    source: str,
    candidates: Mapping[str, Family],
    names: Collection[str],
) -> str:
    """Return the first difference between a model of another family and the family that a layout is named after."""
    start = f"a {source} can't become {layout.name}: "
    own = layout.name.removeprefix("hf-").replace("-", "_")
    name = own if own in candidates else next(iter(candidates), "")
    if not name:
        of_other = next((one for one in layout.model_types if one in FAMILIES), own)
        kinds = ("an encoder and decoder", "a decoder")
        return f"{start}a {source} is {kinds[isinstance(config, DecoderConfig)]}, and a {of_other} is not"
    try:
        written = {"model_type": name, **dict.fromkeys(TOKENS), **candidates[name].write(config)}
        # Rotary positions have no number of positions: any number shows what else differs.
        written |= {key: 1 for key, value in written.items() if value is None and "position" in key}
        lacking = differences(config, find_whole(written, names))
        return f"{start}its {_by_kind(lacking)[0]} differs from that of a {name}"
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        return f"{start}{error}"


def _check_blocks(config: DecoderConfig | EncoderDecoderConfig) -> None:
    """Refuse a stack without blocks, which `transformers` can't build."""
    if isinstance(config, DecoderConfig):
        stacks: dict[str, Sequence[object]] = {"blocks": config.blocks}
    else:
        stacks = {"encoder.blocks": config.encoder.blocks, "decoder.blocks": config.decoder.blocks}
    for path, blocks in stacks.items():
        if not blocks:
            raise ValueError(f"{path} are none")


def _by_kind(differences: Iterable[str]) -> list[str]:
    """Return the first of each kind of difference, with the number of blocks that have it."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for difference in differences:
        kinds[re.sub(r"^(\w+\.)?blocks\[[0-9]+\]", r"\1", difference)].append(difference)
    return [alike[0] + (f" in {len(alike)} blocks" if len(alike) > 1 else "") for alike in kinds.values()]


def _read(config: Mapping[str, object], kind: type[Family] = Family) -> tuple[Family, ConfigFile]:
    """Return the family of a config, and the config with its defaults.

    Args:
        config: the model's.
        kind: of the families to list in the error for an unknown one.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a config.json as a dict, got {type(config).__name__}")
    keys = multimodal.text_of(config)
    name = keys.get("model_type")
    if name is None:
        raise ValueError(f"config has no model_type, which must be one of {', '.join(known_model_types(kind))}")
    if isinstance(name, str) and name in multimodal.DECODERS and name not in FAMILIES:
        raise ValueError(f"is_decoder ({printable(repr(keys.get('is_decoder')))}) of {name} must be True for a decoder")
    if not isinstance(name, str) or name not in FAMILIES:
        choices = ", ".join(known_model_types(kind))
        raise ValueError(
            f"model_type ({printable(name)}) must be one of {choices}; attn-bridge derive FOLDER may derive "
            "that of another decoder from transformers"
        )
    if not keys.get("is_causal", True):  # by which the masks of transformers show later tokens in every family
        raise ValueError(f"is_causal ({printable(repr(keys['is_causal']))}) of {name} is not supported, only True")
    return FAMILIES[name], FAMILIES[name].file(keys, name)


def _computed(config: Mapping[str, object], kind: type[Family] = Family) -> tuple[Family, ConfigFile]:
    """Return the same as `_read`; refuse a folder whose own code may compute something else."""
    family, read = _read(config, kind)
    _refuse_other_code(config, family)
    return family, read


CODE = "auto_map"
"""Key of a config.json that names the classes of code in its folder."""


def without_code(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json without its mention of code, which has no effect on the names and shapes of tensors."""
    return {key: value for key, value in config.items() if key != CODE}


_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
"""Keys of ``auto_map`` that name the class of a model, the one that decides first."""

_ENDINGS = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")


def _refuse_other_code(config: Mapping[str, object], family: Family) -> None:
    """Refuse the config of a folder with code for a model whose class has another name than that of `transformers`.

    Most published folders with code have the class that `transformers` took over, by a name that differs in case or
    underscores at most, or one that is named after the ``model_type`` and whose model `transformers` has as a Llama.
    """
    classes = config.get(CODE)
    if not isinstance(classes, Mapping) or isinstance(config.get("text_config"), Mapping):
        return
    code = next((classes[key] for key in _CLASSES if isinstance(classes.get(key), str)), None)
    if code is None:
        return
    own, *usual = (
        _ENDINGS.sub("", name.rpartition(".")[2]).replace("_", "").replace("-", "").casefold()
        for name in (code, family.architecture, *family.model_types)
    )
    if own not in usual:
        raise ValueError(
            f"{CODE} of {config.get('model_type')} names code of the folder's own ({printable(code)}), which is not "
            f"run; without the key, the model is read as {family.architecture} of transformers"
        )
