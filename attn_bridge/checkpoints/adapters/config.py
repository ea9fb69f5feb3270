"""An adapter's adapter_config.json: ranks and factors of its layers, and methods that are refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...printable import printable
from ..containers.base import CheckpointError
from ..containers.files import bad, listed, parse_json
from ..containers.remote import is_remote

CONFIG = "adapter_config.json"
MAX_BYTES = 1 << 24
"""Maximum size of the file in bytes, as of a config.json (`configs.MAX_BYTES`)."""

REFUSED = {
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "LoRA of stacked parameters",
    "trainable_token_indices": "single trained tokens",
}
"""Key of the config -> the name of its method, which is merged by PEFT alone."""

UNMERGEABLE = {
    "arrow_config": "Arrow, which chooses between adapters token by token",
    "alora_invocation_tokens": "activated LoRA, which acts from an invocation on",
    "layer_replication": "replicated layers, which share their base's weights",
}
"""Key of the config -> the name of its method, and the reason why PEFT does not merge it either."""

ADDED_INPUTS = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT"),
)
"""Values of ``peft_type`` that add inputs or keys and change no weight."""

UNMERGED_TYPES = ("POLY", "XLORA", "SHADOW", "BEFT", "LILY")
"""Values of ``peft_type`` that depend on the input, which PEFT does not merge."""

INERT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
        *("lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save"),
        *("init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "use_dora", "velora_config", "qalora_group_size", "runtime_config"),
        *("lora_bias", "ensure_weight_tying", "enable_lora", "merge_weights", "lora_dtype"),
        *("lorap_lr_ratio", "lorap_emb_lr"),
    }
)
"""Keys that are read above, or change only the training (peft 0.2 to 0.21, ms-swift).

A later version may add a switch that changes the product as ``use_rslora`` did, without another tensor.
"""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights``, next to true and false, that leave the base as it is.

The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take the adapter's first values out of the base whenever PEFT loads it.
"""

BY_PEFT = "merge_and_unload of peft merges it: save what it returns, and convert that"
"""Advice for adapters that PEFT can merge."""

BY_PEFT_APART = (
    "merge_and_unload of peft merges it only where the base's head and embeddings are not tied, as it changes both of "
    "a tied pair: save what it returns, and convert that"
)
"""The same for adapters that may change the head or the embeddings.

PEFT merges into the memory that tied layers share, without an error (0.21): the model that it returns computes other
outputs than the one with the adapter in it.
"""

EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in", "shared")
HEADS = ("lm_head", "embed_out", "output", "proj_out", "decoder")
"""Names of the layers that a config may tie to each other."""

NARROWER = ("layers_to_transform", "exclude_modules")
"""Keys that exclude layers from those that ``target_modules`` names."""

MAX_PATTERN, MAX_REPEATS, MAX_STEPS = 500, 4, 10**9
"""Characters of a pattern of names, repeats in it, and steps of a match: a hostile one would take for ever.

Repeats that match the same letters take up to the length of a name, to the power of their number, from each dot on.
"""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of a LoRA from adapter_config.json.

    Attributes:
        rank: of a layer that no pattern names.
        alpha: the same.
        ranks: pattern of layers' names -> their rank.
        alphas: pattern of layers' names -> their alpha.
        is_rslora: whether alpha is divided by the square root of the rank.
        fan_in_fan_out: whether the base's matrices are (inputs, outputs).
        is_dora: whether each layer has magnitudes.
        is_biased: whether each LoRA has a trained bias.
        targets: endings of the names of all layers with a LoRA; () if the config selects them in another way.
        saved: modules that were trained whole.
        is_tying: whether a LoRA of a tied head or of the embeddings is also that of the other.
        advice: end of an error, which names how PEFT merges an adapter that is refused here.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rslora: bool
    fan_in_fan_out: bool
    is_dora: bool
    is_biased: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    is_tying: bool
    advice: str

    @classmethod
    def of(cls, path: Path, data: bytes) -> LoraConfig:
        """Read the JSON of a file.

        Raises:
            CheckpointError: a value is of the wrong kind, or the method is not merged.
        """
        document = parse_json(data, path, "config")
        if not isinstance(document, dict):
            raise bad(path, "must hold a JSON object")
        _check_method(path, document)
        return cls(
            _rank(path, "r", document.get("r", 8)),
            _alpha(path, "lora_alpha", document.get("lora_alpha", 8)),
            {key: _rank(path, "rank_pattern", value) for key, value in _patterns(path, document, "rank_pattern")},
            {key: _alpha(path, "alpha_pattern", value) for key, value in _patterns(path, document, "alpha_pattern")},
            _switch(path, document, "use_rslora"),
            _switch(path, document, "fan_in_fan_out"),
            _switch(path, document, "use_dora"),
            _switch(path, document, "lora_bias"),
            () if any(document.get(key) for key in NARROWER) else _texts(document.get("target_modules")),
            _texts(document.get("modules_to_save")),
            _switch(path, document, "ensure_weight_tying"),
            _advice(document),
        )

    def check_layer(self, path: Path, layer: str) -> None:
        """Refuse a layer's name that would take too long to match.

        Raises:
            CheckpointError: the match would take too many steps.
        """
        for pattern in (*self.ranks, *self.alphas):
            if (layer.count(".") + 1) * len(layer) ** _repeats(pattern) > MAX_STEPS:
                raise bad(path, f"{printable(layer, 80)} takes too long to be matched with {printable(pattern, 80)}")

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer."""
        key = _matching(self.ranks, layer)
        return self.rank if key is None else self.ranks[key]

    def scale_of(self, layer: str) -> float:
        """Return the factor of a layer's product."""
        key, rank = _matching(self.alphas, layer), self.rank_of(layer)
        alpha = self.alpha if key is None else self.alphas[key]
        return alpha / math.sqrt(rank) if self.is_rslora else alpha / rank


def _check_method(path: Path, document: Mapping[str, object]) -> None:
    kind = document.get("peft_type")
    if kind in ADDED_INPUTS:
        raise bad(path, f"is an adapter of {kind}, which adds inputs and changes no weight: it can't be merged")
    if kind in UNMERGED_TYPES:
        raise bad(path, f"is an adapter of {kind}, which depends on the input: it can't be merged, by peft neither")
    if kind is None and "fine_tune_type" in document:
        raise bad(path, "is an adapter of mlx_lm and is not merged; mlx_lm.fuse merges it: convert what that writes")
    if kind != "LORA":
        raise bad(path, f"peft_type ({printable(kind, 40)}) must be LORA; {_advice(document)}")
    unmergeable = next((name for key, name in UNMERGEABLE.items() if document.get(key)), None)
    if unmergeable is not None:
        raise bad(path, f"is an adapter with {unmergeable}: it can't be merged, by peft neither")
    start = document.get("init_lora_weights", True)
    names = [name for key, name in REFUSED.items() if document.get(key)]
    if not isinstance(start, bool) and start not in (None, *PLAIN_STARTS):
        names.append(f"init_lora_weights {printable(start, 40)}, which changes the base,")
    keys = (*INERT, *REFUSED, *UNMERGEABLE)
    names += [f"{printable(key, 80)}, which is not known," for key in document if document[key] and key not in keys]
    if names:
        raise bad(path, f"is an adapter with {names[0]} and is not merged; {_advice(document)}")


def advice_for(layers: Iterable[str]) -> str:
    """Return the way to merge an adapter of some layers with PEFT, as the end of an error."""
    is_apart = any(layer.rpartition(".")[2] in (*EMBEDDINGS, *HEADS) for layer in layers)
    return BY_PEFT_APART if is_apart else BY_PEFT


def _advice(document: Mapping[str, object]) -> str:
    """Return the way to merge with PEFT; a pattern of names may name the head or the embeddings, too."""
    targets = document.get("target_modules")
    if isinstance(targets, str):
        return BY_PEFT_APART
    return advice_for((*_texts(targets), *_texts(document.get("modules_to_save"))))


def _switch(path: Path, document: Mapping[str, object], key: str) -> bool:
    value = document.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad(path, f"{key} ({printable(repr(value), 40)}) must be true or false")
    return bool(value)


def _texts(value: object) -> tuple[str, ...]:
    """Return the non-empty texts of a list; other entries are left out, and () is returned for other values."""
    return tuple(item for item in value if isinstance(item, str) and item) if isinstance(value, list) else ()


def _rank(path: Path, key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise bad(path, f"{key} ({printable(value, 40)}) must be a whole number of at least 1")
    return value


def _alpha(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise bad(path, f"{key} ({printable(value, 40)}) must be a number")
    return float(value)


def _patterns(path: Path, document: Mapping[str, object], key: str) -> list[tuple[str, object]]:
    patterns = document.get(key) or {}
    if not isinstance(patterns, dict):
        raise bad(path, f"{key} must map patterns of names to numbers")
    for pattern in patterns:
        _check_pattern(path, pattern)
    return list(patterns.items())


def _check_pattern(path: Path, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN or _repeats(pattern) > MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise bad(path, f"the pattern {printable(pattern, 80)} repeats too much to be matched safely")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise bad(path, f"the pattern {printable(pattern, 80)} is malformed: {printable(error)}") from None


def _repeats(pattern: str) -> int:
    return len(re.findall(r"[*+{]|(?<!\()\?", pattern))


def _matching(patterns: Mapping[str, object], layer: str) -> str | None:
    """Return the first pattern that fits a layer's name, or what follows a dot of it, as PEFT matches them."""
    starts = [0, *(hit.end() for hit in re.finditer(r"\.", layer))]
    for pattern in patterns:
        matches = re.compile(f"(?:{pattern})").fullmatch
        if any(matches(layer, start) for start in starts):
            return pattern
    return None


def check_there(folder: Path) -> None:
    """Refuse a folder without an adapter's config.

    Raises:
        CheckpointError: it has none.
    """
    if (folder / CONFIG).is_file():
        return
    is_listed = not is_remote(folder) and folder.is_dir()
    names = sorted(below.name for below in folder.iterdir() if (below / CONFIG).is_file()) if is_listed else []
    inner = f"; its folders have one: {listed(list(map(printable, names)))}" if names else ""
    raise CheckpointError(
        f"--adapter {printable(str(folder), 400)} must be a folder with {CONFIG}, as peft saves it{inner}"
    )
