"""Keys of few families: GPT-Neo's runs of kinds, Kimi's lists of layers, Laguna's heads per layer, LFM2's width."""

from __future__ import annotations

from collections.abc import Sequence

from ...printable import printable
from ..reading.grouped import KINDS
from ..reading.model_config import ConfigFile

KEY = "attention_types"
"""Key of the runs, such as ``[[["global", "local"], 12]]``."""

EACH = "attention_layers"
"""Key of the name of every layer, which `transformers` makes of the runs, writes, and prefers where a file has it."""

_NAMES = {"global": KINDS[False], "local": KINDS[True]}


def read_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer.

    Raises:
        ValueError: the keys hold neither names nor runs of them, or they are of another number of layers.
    """
    layers, key, runs = config.integer("num_hidden_layers"), KEY, config.get(KEY)
    if config.get(EACH) is not None:
        key, runs = EACH, [[config.get(EACH), 1]]
    kinds: list[str] = []
    for run in runs if isinstance(runs, Sequence) else [runs]:
        if not isinstance(run, Sequence) or len(run) != 2 or not _is_run(*run):
            form = "names, global or local" if key == EACH else "lists of global and local, each with a number"
            raise ValueError(f"{key} of {config.model_type} must be {form}")
        # More of them than layers are refused below; a huge number must not make a huge list.
        kinds += [_NAMES[name] for name in run[0]] * min(run[1], layers + 1)
    if len(kinds) != layers:
        raise ValueError(f"{key} of {config.model_type} must be those of num_layers ({layers})")
    return kinds[layer]


def _is_run(names: object, times: object) -> bool:
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) and name in _NAMES for name in names)
    return is_list and isinstance(times, int) and not isinstance(times, bool)


def write_runs(kinds: Sequence[str]) -> list[list[object]]:
    """Return the kinds of all layers as a single run that occurs once: ``[[[name, ...], 1]]``; `read_kind` reads it."""
    theirs = {ours: name for name, ours in _NAMES.items()}
    return [[[theirs[kind] for kind in kinds], 1]]


def read_number(config: ConfigFile, key: str, layer: int, usual: int) -> int:
    """Return the number of a layer in a list of one per layer; `usual` where a config has no such list.

    Raises:
        ValueError: the list has another length than the model, or a number below 1.
    """
    counts = config.get(key)
    if counts is None:
        return usual
    layers = config.integer("num_hidden_layers")
    if not isinstance(counts, list | tuple) or len(counts) != layers or any(type(one) is not int for one in counts):
        excerpt = printable(repr(counts), 60)
        raise ValueError(f"{key} ({excerpt}) of {config.model_type} must be a list of {layers} integers")
    if counts[layer] < 1:
        raise ValueError(f"{key}[{layer}] ({counts[layer]}) of {config.model_type} must be at least 1")
    return int(counts[layer])


def read_published_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer by ``linear_attn_config``, whose indices begin at 1, or else by the default."""
    published = config.mapping("linear_attn_config")
    listed = {
        kind: published[key]
        for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention"))
        if isinstance(published.get(key), Sequence)
    }
    if len(listed) < 2:
        return "full_attention" if layer and layer % 4 == 0 else "linear_attention"
    kinds = [kind for kind, numbers in listed.items() if layer + 1 in numbers]
    if len(kinds) != 1:
        raise ValueError(
            f"layer {layer} of {config.model_type} must be in full_attn_layers or in kda_layers of linear_attn_config, "
            f"which count from 1; it is in {' and in '.join(kinds) or 'neither'}"
        )
    return kinds[0]


def adjusted_width(config: ConfigFile, width: int) -> int:
    """Return the width of feed-forward layers of LFM2: two thirds of one, times a factor, rounded up."""
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = config.integer("block_multiple_of")
    return -(-int(config.positive("block_ffn_dim_multiplier") * width) // multiple) * multiple
