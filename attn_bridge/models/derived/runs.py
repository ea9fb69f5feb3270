"""Lists of kinds and numbers of layers: GPT-Neo's runs of kinds, and Laguna's heads per layer."""

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
