"""Maps each tensor of an adapter to the base tensor that it changes, from names and shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ...printable import printable
from ..containers.base import CheckpointError, TensorInfo
from ..containers.files import bad
from .config import EMBEDDINGS, HEADS, LoraConfig
from .unmerged import FRONT, check_of_peft

ENDINGS = {
    ".lora_A.weight": ("down", ".weight"),
    ".lora_B.weight": ("up", ".weight"),
    ".lora_embedding_A": ("down", ".weight"),
    ".lora_embedding_B": ("up", ".weight"),
    ".lora_B.bias": ("vector", ".bias"),
    ".lora_magnitude_vector": ("magnitude", ".weight"),
    ".lora_magnitude_vector.weight": ("magnitude", ".weight"),
}
"""Ending of a name -> its field of `AdapterChange`, and the ending of the base's tensor."""

OF_TABLES = ".lora_embedding_A"
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")
"""Layers whose matrices `transformers` stores as (inputs, outputs)."""

STORED = {
    "model.language_model.": ("language_model.model.", "model."),
    "model.vision_tower.": ("vision_tower.", "vision_tower.vision_model."),
    "model.": ("",),
    "lm_head.": ("language_model.lm_head.",),
}
"""Beginning of a name in memory of a multimodal model of `transformers` (4.52 and later) -> beginnings of it in files.

Such models rename their tensors as they load and save them; PEFT saves an adapter with the names in memory.
"""

TRIES = 16
"""Names of an adapter to look up in the base to find the difference in prefixes; the first few may be absent."""

FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class AdapterChange:
    """A tensor of the merged model: the base's or its replacement, plus ``scale * up @ down`` or a vector.

    Attributes:
        name: of the base's tensor.
        layer: name of the layer in the adapter.
        replacement: name of the adapter's tensor that replaces the base's; "" for none.
        down: name of the adapter's matrix (rank, inputs); "" for none.
        up: name of the adapter's matrix (outputs, rank).
        vector: name of the adapter's vector (outputs,), for a bias; "" for none.
        magnitude: name of the norms (outputs,) that DoRA gives the sum's rows; "" for none.
        scale: factor of the addition.
        is_transposed: whether the base's matrix is (inputs, outputs).
    """

    name: str
    layer: str
    replacement: str = ""
    down: str = ""
    up: str = ""
    vector: str = ""
    magnitude: str = ""
    scale: float = 1.0
    is_transposed: bool = False


def pair(
    path: Path,
    adapter: Mapping[str, TensorInfo],
    config: LoraConfig,
    base: Mapping[str, TensorInfo],
    model: Mapping[str, object],
    tied: bool,
) -> dict[str, AdapterChange]:
    """Return the changes of an adapter by the names of the base's tensors.

    Args:
        path: of the adapter, for errors.
        adapter: name -> header of its tensors.
        config: its config.
        base: name -> header of the base's tensors.
        model: the base's config.json.
        tied: whether the base's head is its embeddings.

    Raises:
        CheckpointError: a tensor is not LoRA's, has no counterpart in the base, or does not fit it.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in adapter:
        own, field, target = parsed(path, name, config)
        target = stored_name(target, base)
        if field in parts.setdefault(target, {"layer": own}):
            raise bad(path, f"{printable(name)} and {printable(parts[target][field])} are for the same tensor")
        parts[target][field] = name
    if not any("up" in fields for fields in parts.values()):
        raise bad(path, "holds no LoRA: no name ends with .lora_B.weight")
    if tied:
        _check_ties(path, parts)
    vectors = [target for target, fields in parts.items() if "vector" in fields]
    replaced = [target for target, fields in parts.items() if "replacement" in fields]
    strip, add = _front(path, [target for target in parts if target not in vectors], base, replaced, config)
    _check_vectors(path, _missing(vectors, (strip, add), base))
    changes = {}
    for target, fields in parts.items():
        name = add + target.removeprefix(strip)
        layer, replacement, down, up, vector, magnitude = (
            fields.get(field, "") for field in ("layer", "replacement", "down", "up", "vector", "magnitude")
        )
        change = AdapterChange(name, layer, replacement, down, up, vector, magnitude)
        changes[name] = _change(path, change, adapter, config, base[name])
    return _turned(path, changes, adapter, config, base, model)


def parsed(path: Path, name: str, config: LoraConfig) -> tuple[str, str, str]:
    """Return the layer, the field of `AdapterChange`, and the name of the base's tensor for a name of the adapter."""
    own = name.removeprefix(FRONT)
    for ending, (field, of_base) in ENDINGS.items():
        if own.endswith(ending) and len(own) > len(ending):
            return own.removesuffix(ending), field, own.removesuffix(ending) + of_base
    check_of_peft(path, name)
    if any(part.startswith("lora_") or part == "token_adapter" for part in own.split(".")):
        raise bad(path, f"{printable(name)} is of a kind of adapter that is not merged; {config.advice}")
    plain = own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    return plain.rpartition(".")[0], "replacement", plain


def stored_name(name: str, base: Collection[str]) -> str:
    """Return the name in the base's files for a name in a multimodal model; any other name is returned as it is."""
    if name in base:
        return name
    start = next((start for start in STORED if name.startswith(start)), "")
    names = [first + name.removeprefix(start) for first in STORED.get(start, ())]
    return next((other for other in names if other in base), name)


def _front(
    path: Path, targets: list[str], base: Mapping[str, TensorInfo], replaced: Collection[str], config: LoraConfig
) -> tuple[str, str]:
    """Return the prefixes to remove from and to add to the adapter's names to get those of the base.

    Base models lack the part of a whole model's names that leads to them, such as ``transformer.``.

    Args:
        path: of the adapter, for errors.
        targets: names that must be in the base.
        base: name -> header of the base's tensors.
        replaced: those of `targets` that the adapter replaces.
        config: the adapter's config.
    """
    ways = next(filter(None, (_ways(target, base) for target in targets[:TRIES])), [])
    fitting = [way for way in ways if not _missing(targets, way, base)]
    if len(fitting) == 1 or ("", "") in fitting:
        return fitting[0]
    if fitting:
        raise bad(path, f"{printable(targets[0])} may be one of {len(fitting)} tensors of the base; --strip takes one "
                  "model")  # fmt: skip
    missing = min((_missing(targets, way, base) for way in ways), key=len, default=targets)
    _check_trained(path, missing, replaced, len(targets), config)
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise bad(path, f"is for another base: {printable(missing[0])}, which it changes, is not in the base{more}")


def _check_trained(
    path: Path, missing: Collection[str], replaced: Collection[str], count: int, config: LoraConfig
) -> None:
    """Refuse modules that were trained for another task and that the base lacks, such as a classifier."""
    if missing and len(missing) < count and all(name in replaced for name in missing):
        name = next(iter(missing))
        raise bad(path, f"trained {printable(name)} (modules_to_save), which the base lacks: a head of another task "
                  f"is not added to it; {config.advice}")  # fmt: skip


def _check_vectors(path: Path, missing: Collection[str]) -> None:
    """Refuse trained biases of layers that have none."""
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise bad(
            path,
            f"trained biases (lora_bias), and the base has no {printable(next(iter(missing)))}{more}; peft merges none "
            "of them either: load the base with biases of zeros, as attention_bias=True and mlp_bias=True make them in "
            "a Llama, save that, and merge into it",
        )


def _ways(target: str, base: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    """Return the pairs of prefixes to remove and to add that turn a name into one of the base's, ("", "") first."""
    dots = [at + 1 for at, letter in enumerate(target) if letter == "."]
    ways = [("", "")] if target in base else []
    ways += [(target[:at], "") for at in dots if target[at:] in base]
    return ways + [("", name.removesuffix(target)) for name in base if name.endswith(f".{target}")]


def _missing(targets: Collection[str], way: tuple[str, str], base: Mapping[str, TensorInfo]) -> list[str]:
    strip, add = way
    return [name for name in targets if not name.startswith(strip) or add + name.removeprefix(strip) not in base]


def _change(
    path: Path, change: AdapterChange, adapter: Mapping[str, TensorInfo], config: LoraConfig, base: TensorInfo
) -> AdapterChange:
    """Return a change with its factor, after checks of dtypes and shapes up to the order of the base's two axes."""
    used = [
        adapter[name] for name in (change.replacement, change.down, change.up, change.vector, change.magnitude) if name
    ]
    for info in (*used, base):
        if info.dtype not in FLOATS:
            raise bad(path, f"{printable(info.name)} must be floating point to be merged, got {info.dtype}")
    if change.replacement and adapter[change.replacement].shape != base.shape:
        shape = adapter[change.replacement].shape
        is_vocabulary = change.layer.rpartition(".")[2] in (*EMBEDDINGS, *HEADS) and shape[1:] == base.shape[1:]
        resize = f": resize_token_embeddings({shape[0]}) of the base, and save that first" if is_vocabulary else ""
        raise bad(path, f"{printable(change.replacement)} {shape} does not fit {printable(base.name)} {base.shape} of "
                  f"the base{resize}")  # fmt: skip
    if bool(change.down) != bool(change.up):
        raise bad(path, f"{printable(change.down or change.up)} lacks its other matrix (lora_A, lora_B)")
    if change.vector and (len(base.shape) != 1 or adapter[change.vector].shape != base.shape):
        raise bad(path, f"{printable(change.vector)} {adapter[change.vector].shape} does not fit "
                  f"{printable(base.name)} {base.shape} of the base")  # fmt: skip
    if change.down and bool(change.magnitude) != config.is_dora:
        how = (
            "lacks lora_magnitude_vector, which use_dora asks for"
            if config.is_dora
            else "has magnitudes without use_dora"
        )
        raise bad(path, f"{printable(change.layer)} {how}")
    if change.magnitude:
        norms = adapter[change.magnitude]
        if not change.down or change.down.endswith(OF_TABLES) or norms.shape != adapter[change.up].shape[:1]:
            raise bad(path, f"{printable(norms.name)} {norms.shape} must have the norm of each output of a Linear; "
                      f"others are not merged here, {config.advice}")  # fmt: skip
    if not change.down and not change.vector:
        return change
    config.check_layer(path, change.layer)
    if change.down:
        down, up = adapter[change.down], adapter[change.up]
        rank = config.rank_of(change.layer)
        if len(down.shape) > 2:
            raise bad(path, f"{printable(down.name)} {down.shape} is of a convolution, which is not merged here; "
                      f"{config.advice}")  # fmt: skip
        if len(down.shape) != 2 or len(up.shape) != 2 or (down.shape[0], up.shape[1]) != (rank, rank):
            raise bad(path, f"{printable(down.name)} {down.shape} and {printable(up.name)} {up.shape} must be matrices "
                      f"of rank {rank}, as its config has it")  # fmt: skip
        if sorted(base.shape) != sorted((up.shape[0], down.shape[1])) or len(base.shape) != 2:
            raise bad(path, f"{printable(up.name)} {up.shape} @ {printable(down.name)} {down.shape} does not fit "
                      f"{printable(base.name)} {base.shape} of the base")  # fmt: skip
    return dataclasses.replace(change, scale=config.scale_of(change.layer))


def _turned(
    path: Path,
    changes: Mapping[str, AdapterChange],
    adapter: Mapping[str, TensorInfo],
    config: LoraConfig,
    base: Mapping[str, TensorInfo],
    model: Mapping[str, object],
) -> dict[str, AdapterChange]:
    """Return changes with the order of the base's axes: from shapes, or for square matrices from the model or config.

    ``fan_in_fan_out`` of the config describes the last layer alone if layers differ, as in GPT-2 with its head.
    """
    turned, square = {}, []
    for name, change in changes.items():
        if not change.down:
            turned[name] = change
            continue
        shape = adapter[change.up].shape[0], adapter[change.down].shape[1]
        is_square = shape[0] == shape[1] and not change.down.endswith(OF_TABLES)
        is_transposed = change.down.endswith(OF_TABLES) or base[name].shape != shape
        is_conv1d = config.fan_in_fan_out or change.layer.rpartition(".")[2] in CONV1D_LAYERS
        if is_transposed and not is_conv1d and not change.down.endswith(OF_TABLES):
            raise bad(path, f"{printable(change.up)} @ {printable(change.down)} is {shape}, {printable(name)} "
                      f"{base[name].shape} of the base is its transpose, and fan_in_fan_out of its config is "
                      "false")  # fmt: skip
        turned[name] = dataclasses.replace(change, is_transposed=is_transposed)
        square += [name] if is_square else []
    ways = {change.is_transposed for name, change in turned.items() if _is_plain_lora(change) and name not in square}
    for name in square:
        if model.get("model_type") in CONV1D_MODELS:
            way = turned[name].layer.rpartition(".")[2] in CONV1D_LAYERS
        elif ways - {config.fan_in_fan_out}:
            raise bad(path, f"fan_in_fan_out of its config contradicts its shapes, so that the order of the axes of "
                      f"{printable(name)} {base[name].shape} is unknown")  # fmt: skip
        else:
            way = config.fan_in_fan_out
        turned[name] = dataclasses.replace(turned[name], is_transposed=way)
    return turned


def _is_plain_lora(change: AdapterChange) -> bool:
    return bool(change.down) and not change.down.endswith(OF_TABLES)


def _check_ties(path: Path, targets: Iterable[str]) -> None:
    """Refuse to change one of two tied layers: peft has two tensors then, and a file has one."""
    for name in targets:
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith(".weight") and layer in (*EMBEDDINGS, *HEADS):
            other = "head" if layer in EMBEDDINGS else "embeddings"
            raise CheckpointError(
                f"{printable(str(path), 400)} changes {printable(name)}, which the base's config.json ties to the "
                f"{other} (tie_word_embeddings); merge it into a base whose head is a tensor of its own"
            )
