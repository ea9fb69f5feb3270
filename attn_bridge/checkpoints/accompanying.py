"""Files that accompany a checkpoint: dropped tensors, the manifest, the model's config, and those of its tokenizer.

`find` lists files of a model's folder besides its weights and config (tokenizer, generation, input processors) when a
conversion is planned, and `copy` writes them next to the target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..printable import printable
from . import adapters, configs, containers, manifest, quantised, rewritten_configs
from .containers.base import CheckpointError, Reader, TensorInfo, Writer
from .containers.files import PIECE, File, bad
from .containers.remote import is_remote
from .containers.sources import inside, open_file
from .containers.writing import open_target, put
from .elements import Elements
from .manifest import DIGEST, new_digest
from .planning import kept_name
from .planning.plans import Plan
from .verification import MIN, cuts, digest_of


def accompany(
    plan: Plan,
    reader: Reader,
    elements: Elements,
    before: manifest.Manifest | None,
    payload: Path,
    where: Path,
    kept: Path,
    digests: dict[str, str],
    config: bytes | None,
    budget: int,
    *,
    is_folder: bool,
) -> None:
    """Write the files that accompany the target: the manifest, tensors kept aside, config.json and copied files.

    Args:
        plan: the plan of the conversion.
        reader: the open source.
        elements: reads the elements of target tensors.
        before: the manifest next to the source.
        payload: the target before it is published.
        where: the manifest's file.
        kept: the file for tensors that the conversion drops.
        digests: name -> digest of each tensor written.
        config: the config.json.
        budget: bytes that tensors may take in memory.
        is_folder: whether the target is a folder that gets a config.json; any other target has it in its manifest.
    """
    aside = _aside(plan, reader, before)
    originals = {one.info.name: one for one in plan.originals}
    kept.unlink(missing_ok=True)
    kept_digests = {}
    if aside or originals:
        writer = _writer_of_kept(plan, aside, kept)
        for info, source, name in aside:
            kept_digests[info.name] = digest_of(source, name)
            for start in range(0, info.nbytes, MIN):
                data = source.read_range(name, start, min(info.nbytes, start + MIN))
                writer.write_range(info.name, start, data)
        for name, original in originals.items():
            digest = new_digest()
            for start, stop in cuts(original, budget):
                array, _ = elements.read(original, start, stop)
                bits = array.view(np.uint8).data
                digest.update(bits)
                writer.write_range(name, start * original.info.itemsize, bits)
                elements.release(array)
            kept_digests[name] = digest.hexdigest()
        writer.finish()
    tensors = {
        one.info.name: {"dtype": one.info.dtype, "shape": list(one.info.shape), DIGEST: digests[one.info.name]}
        for one in plan.targets
    }
    base = reader.base if isinstance(reader, adapters.Merged) else reader
    packed = quantised.dequantised_in(base) if plan.scales else None
    made_of: dict[str, Any] = {
        "layout": plan.source_layout,
        "format": plan.source_format,
        "settings": plan.settings,
        **plan.selection.in_manifest(),
        **({} if packed is None else {"quantised": _digests_of_originals(packed)}),
        **({"adapter": reader.adapter.in_manifest()} if isinstance(reader, adapters.Merged) else {}),
    }
    carried = "" if config is None or is_folder else config.decode("utf-8", "surrogateescape")
    text = manifest.text(
        plan.target_layout, plan.dtype, made_of, tensors, plan.restore, kept_digests, plan.sizes, carried
    )
    put(where, text.encode("ascii"))
    if config is not None and is_folder:
        put(payload / configs.name_of(configs.home_of(reader), config), config)
    copy(configs.home_of(reader), plan.files, payload)


def check_kept_aside(plan: Plan, reader: Reader, before: manifest.Manifest | None, kept: Path) -> None:
    """Refuse tensors to keep aside that their file can't hold, before anything is written; arguments as above."""
    _writer_of_kept(plan, _aside(plan, reader, before), kept, is_share=True)


def _aside(plan: Plan, reader: Reader, before: manifest.Manifest | None) -> list[tuple[TensorInfo, Reader, str]]:
    """Return the tensors that are copied to the kept file: header, reader, and name in the reader."""
    aside: list[tuple[TensorInfo, Reader, str]] = []
    originals = {one.info.name for one in plan.originals}
    if before is not None and before.kept is not None:
        left = {name.partition("/")[0] for name in before.kept.tensors} & plan.restore.keys()
        aside += [
            (info, before.kept, name)
            for name, info in before.kept.tensors.items()
            if name.partition("/")[0] in left or (name in plan.carried and name not in originals)
        ]
    for name in plan.dropped:
        info = reader.tensors[name]
        aside.append((TensorInfo(kept_name(plan.source_layout, name), info.dtype, info.shape), reader, name))
    return aside


def _writer_of_kept(
    plan: Plan, aside: Iterable[tuple[TensorInfo, Reader, str]], kept: Path, *, is_share: bool = False
) -> Writer:
    infos = [info for info, _, _ in aside] + [one.info for one in plan.originals]
    return containers.make_writer("safetensors", kept, infos, {}, is_share=is_share)


def _digests_of_originals(reader: quantised.Dequantised) -> dict[str, dict[str, object]]:
    """Return the manifest entries of the quantised tensors that were read."""
    names = [name for one in reader.quantised.values() for name in (one.numbers, *one.others)]
    infos = [reader.originals.tensors[name] for name in names]
    return {
        info.name: {
            "dtype": info.dtype, "shape": list(info.shape), DIGEST: digest_of(reader.originals, info.name)
        }
        for info in infos
    }  # fmt: skip


def config_beside(plan: Plan, reader: Reader, config: Mapping[str, object] | None, *, is_folder: bool) -> bytes | None:
    """Return the config.json of a target: `config`, the plan's, or that of the source; None without any.

    Meta's params.json is copied to folders; the manifest of any other target carries it as its config.
    """
    written = plan.config if config is None else config
    if written is not None:
        return _dumped(rewritten_configs.with_dtype(written, plan.dtype, plan.target_layout)) if written else None
    is_kept = plan.target_layout in ("", plan.source_layout)
    if reader.format in configs.MADE and is_kept:  # built from the file's metadata, for the source's names
        return None
    is_beside = (reader.format not in configs.MADE or reader.config is None) and bool(reader.files())
    own = configs.text_beside(configs.home_of(reader)) if is_beside else None
    if own is not None and own[0].name == configs.PARAMS:
        return None if is_folder else own[1]
    if own is not None:
        return _adapted(own[1], plan, reader.config)
    made = {} if reader.config is None or is_kept else reader.config
    return _dumped(rewritten_configs.with_dtype(made, plan.dtype, plan.target_layout)) if made else None


def _adapted(data: bytes, plan: Plan, changed: Mapping[str, object] | None) -> bytes:
    """Return the source's config.json, unquantised and with the dtype of a cast; the same bytes if nothing changes.

    Args:
        data: the file.
        plan: the conversion.
        changed: the config of the reader, such as that of an untied model; None for an unchanged file.
    """
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(config, dict):
        return data
    read = config if changed is None else dict(changed)
    plain = quantised.unquantised(read) if plan.scales else read
    adapted = rewritten_configs.with_dtype(plain, plan.dtype, plan.target_layout)
    return data if adapted == config else _dumped(adapted)


def _dumped(config: Mapping[str, object]) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode("ascii")


KNOWN = re.compile(
    r"(special_tokens_map|added_tokens|vocab|normalizer|tekken)\.json|vocab\.txt|merges\.txt"
    r"|tokenizer(_config)?\.json|[\w.-]+\.model(\.v[0-9]+)?|[\w.-]+\.tiktoken|chat_template\.(jinja|json)"
    r"|generation_config\.json|(\w+_)?(pre)?processor_config\.json|attn-bridge-family\.toml"
)
"""Names of the files that are copied."""

MAX_BYTES = 1 << 28
"""Maximum size of a copied file in bytes; the largest published tokenizers have 35 MB."""

MAX_FILES = 100
"""Maximum number of copied files: a tokenizer has a handful."""


def folder_of(source: Path) -> Path:
    """Return the folder of a model: the source itself, or the folder that contains the file."""
    return source if source.is_dir() else source.parent


def find(source: Path, *, is_folder: bool, has_config: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the files to copy, in order, and notes on those that are not copied.

    Args:
        source: file or folder. Files next to a single file are copied only if a config.json shows that the folder is
            a model's.
        is_folder: whether the target is a folder, which can hold them.
        has_config: whether the target gets a config.json; if not, a folder gets Meta's params.json, and a single file
            has neither.
    """
    folder = folder_of(source)
    is_model = source.is_dir()
    if not is_model and not is_remote(source):  # servers of single files may not list a folder
        is_model = any((folder / name).is_file() for name in (configs.CONFIG, configs.PARAMS))
    if not is_model:
        return (), ()
    # Folders of Orbax hold a folder per tensor, of any name.
    names = sorted(path.name for path in folder.iterdir() if KNOWN.fullmatch(path.name) and not path.is_dir())
    if is_folder and not has_config and (folder / configs.PARAMS).is_file():
        names.append(configs.PARAMS)
    if not is_folder and not has_config:  # without its config a model can't be loaded from there
        names = [name for name in (configs.CONFIG, configs.PARAMS) if (folder / name).is_file()] + names
    problems = {name: "the target has no room for files beside its weights" for name in names if not is_folder}
    for name in names[MAX_FILES:]:
        problems[name] = f"there are more than {MAX_FILES} of its kind"
    for name in names:
        if name not in problems:
            try:
                _opened(folder, name).close()
            except CheckpointError as error:
                problems[name] = str(error)
    left_out = [f"left out, as its weights are not the model's: {printable(name)}" for name in _modules(folder)]
    return tuple(name for name in names if name not in problems), (*_notes(problems), *left_out)


def _modules(folder: Path) -> list[str]:
    """Return the folders of sentence-transformers' further modules that have weights, such as ``2_Dense``."""
    if not (folder / "modules.json").is_file():
        return []
    modules = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"[0-9]+_\w+", path.name))
    weights = ("model.safetensors", "pytorch_model.bin")
    return [name for name in modules if any((folder / name / file).is_file() for file in weights)]


def _opened(folder: Path, name: str) -> File:
    """Open a file of the folder; close it after use.

    Raises:
        CheckpointError: a link leads out of the folder, it is not a plain file, or it is too large.
    """
    file = open_file(inside(folder, name, folder), folder)
    if file.size > MAX_BYTES:
        file.close()
        raise bad(file.path, f"has {file.size} bytes; at most {MAX_BYTES} are copied")
    return file


def _notes(problems: dict[str, str]) -> Iterable[str]:
    """Yield a line for each reason."""
    for reason in dict.fromkeys(problems.values()):
        names = [printable(name) for name, why in problems.items() if why == reason]
        listing = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        yield f"not copied: {listing}: {reason}"


def copy(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files of the source's folder into the target's, in memory of one piece, and flush them.

    Raises:
        CheckpointError: one changed since `find`, or can't be read or written.
    """
    folder = folder_of(source)
    for name in names:
        file = _opened(folder, name)
        written = open_target(target / name, file.size)
        try:
            for start in range(0, file.size, PIECE):
                written.write(start, file.read(start, min(PIECE, file.size - start)))
            written.sync()
        finally:
            written.close()
            file.close()
