"""Recognises an adapter of peft in a source: alone, next to its model, or in a model that is not merged."""

from __future__ import annotations

import re
from pathlib import Path

from ...printable import printable, shell_word
from ..containers.base import CheckpointError, Reader
from ..containers.files import bad, parse_json
from ..containers.remote import is_there
from ..containers.sources import inside, read_file
from ..readers import Filtered
from .config import CONFIG, MAX_BYTES, LoraConfig, advice_for

FRONT = "base_model.model."
"""Prefix that PEFT adds to the names of the model."""

FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter's tensors, the first of them that exists."""

FILES_OF_MLX = ("adapters.safetensors",)
"""Files of the tensors of mlx_lm's adapters, which are refused by name."""

PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Parts of the names of an adapter's tensors; a model that is not merged has the adapter's name behind them."""

OF_KOHYA = re.compile(r"lora_(unet|te)\w*\.(alpha|lora_(down|up|mid)\.weight|hada_w\w+|lokr_w\w+|dora_scale)")
"""Names of the adapters that Kohya's scripts train, whose layers are named with underscores."""


def check_of_peft(path: Path, name: str) -> None:
    """Refuse a tensor of an adapter for diffusion models.

    Raises:
        CheckpointError: Kohya's scripts name it.
    """
    if OF_KOHYA.fullmatch(name):
        raise bad(path, f"{printable(name)} is of an adapter of Kohya's scripts for a diffusion model and is not "
                  "merged; load_lora_weights and fuse_lora of diffusers merge it")  # fmt: skip


def without_adapter(reader: Reader) -> Reader:
    """Return a base without the files of adapters that are in its folder."""
    names = [name for name, info in reader.tensors.items() if info.file in FILES]
    return Filtered(reader, names, ()) if names and len(names) < len(reader.tensors) else reader


def _is_beside(reader: Reader, source: Path) -> bool:
    """Return whether the source is a folder with an adapter in files that are not read."""
    if not source.is_dir() or not is_there(source / CONFIG) or any(path.name in FILES for path in reader.files()):
        return False
    return any(is_there(source / name) for name in FILES)


def check_base(reader: Reader, source: Path, *, takes_any_names: bool) -> None:
    """Refuse an adapter without its base, and a base in whose files an adapter is not merged.

    Args:
        reader: the open source.
        source: its path, as the user names it.
        takes_any_names: whether the names of the target are those of the source, whatever they are.

    Raises:
        CheckpointError: tensors are an adapter's.
    """
    adapter_path = printable(str(reader.path), 400)
    folder = shell_word(str(reader.path if reader.path.is_dir() else reader.path.parent))
    if without_adapter(reader) is not reader:
        raise CheckpointError(
            f"{adapter_path} holds a model and an adapter of peft for it: --adapter {folder} merges it, and --drop "
            f"{shell_word(FRONT + '*')} leaves it out"
        )
    if _is_beside(reader, source):
        first, *more = reader.files()
        is_whole = not more or first.suffix == ".json"
        choice = f"the path {shell_word(str(first))}" if is_whole else "a folder of the model's files alone"
        raise CheckpointError(
            f"{adapter_path} holds a model and an adapter of peft for it: --adapter {folder} merges it, and {choice} "
            "leaves it out"
        )
    if takes_any_names:
        return
    above = reader.path if reader.path.is_dir() else reader.path.parent
    files = {info.file or reader.path.name for info in reader.tensors.values()}
    if files and files <= {*FILES, *FILES_OF_MLX} and is_there(above / CONFIG):
        config = read_file(inside(above, CONFIG, above), above, MAX_BYTES)
        LoraConfig.of(above / CONFIG, config)  # refuses other methods by name
        model = parse_json(config, above / CONFIG, "config").get("base_model_name_or_path")
        base = f" ({printable(model, 80)})" if isinstance(model, str) and model else ""
        raise CheckpointError(
            f"{adapter_path} is an adapter of peft, without its base{base}; convert the base with --adapter {folder}"
        )
    for name in reader.tensors:
        check_of_peft(reader.path, name)
    if not any(f".{part}." in f"{name}." for name in reader.tensors for part in PARTS):
        return
    layers = {name.partition(".base_layer.")[0] for name in reader.tensors if ".base_layer." in name}
    if layers:
        raise CheckpointError(
            f"{adapter_path} has a model and an adapter of peft that is not merged, without its alpha; "
            f"{advice_for(layers)}"
        )
    if all(name.startswith(FRONT) for name in reader.tensors):
        raise CheckpointError(
            f"{adapter_path} is an adapter of peft, without its base; convert the base with --adapter {folder}"
        )
