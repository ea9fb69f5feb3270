"""What goes with a checkpoint that was written: what was dropped, the manifest, the model's config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import adapters, configs, containers, manifest, model_files, quantised
from .. import digests as digests_of
from ..containers.base import Reader, TensorInfo
from ..containers.sources import read_file
from ..elements import Elements
from ..planning import kept_name
from ..planning.plans import Plan
from ..staging import put
from .checks import MIN, cuts, digest_of


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
) -> None:
    """Write what goes with the target.

    Args:
        plan: what was written.
        reader: the open source.
        elements: reads what targets are made of.
        before: the manifest beside the source.
        payload: the target, to be.
        where: the manifest's file.
        kept: the file of what was dropped.
        digests: name -> digest of what was written.
        config: a folder's config.json.
        budget: bytes that tensors may take in memory.
    """
    aside: list[tuple[TensorInfo, Reader, str]] = []
    originals = {one.info.name: one for one in plan.originals}
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
    kept.unlink(missing_ok=True)
    kept_digests = {}
    if aside or originals:
        infos = [info for info, _, _ in aside] + [one.info for one in plan.originals]
        writer = containers.make_writer("safetensors", kept, infos, {})
        for info, source, name in aside:
            kept_digests[info.name] = digest_of(source, name)
            for start in range(0, info.nbytes, MIN):
                data = source.read_range(name, start, min(info.nbytes, start + MIN))
                writer.write_range(info.name, start, data)
        for name, one in originals.items():
            digest = digests_of.new()
            for start, stop in cuts(one, budget):
                array, _ = elements.read(one, start, stop)
                bits = array.view(np.uint8).data
                digest.update(bits)
                writer.write_range(name, start * one.info.itemsize, bits)
                elements.release(array)
            kept_digests[name] = digest.hexdigest()
        writer.finish()
    tensors = {
        one.info.name: {"dtype": one.info.dtype, "shape": list(one.info.shape), digests_of.KEY: digests[one.info.name]}
        for one in plan.targets
    }
    packed = quantised.dequantised_in(reader.base if isinstance(reader, adapters.Merged) else reader)
    made_of: dict[str, Any] = {
        "layout": plan.source_layout,
        "format": plan.source_format,
        "settings": plan.settings,
        **plan.selection.in_manifest(),
        **({} if packed is None else {"quantised": _digests_of_originals(packed)}),
        **({"adapter": reader.adapter.in_manifest()} if isinstance(reader, adapters.Merged) else {}),
    }
    text = manifest.text(plan.target_layout, plan.dtype, made_of, tensors, plan.restore, kept_digests)
    put(where, text.encode("ascii"))
    if config is not None:
        put(payload / configs.CONFIG, config)
    model_files.copy(reader.path, plan.files, payload)


def _digests_of_originals(reader: quantised.Dequantised) -> dict[str, dict[str, Any]]:
    """Return the quantised tensors that were read, as a manifest has them."""
    names = [name for one in reader.quantised.values() for name in (one.numbers, *one.others)]
    infos = [reader.originals.tensors[name] for name in names]
    return {
        info.name: {
            "dtype": info.dtype, "shape": list(info.shape), digests_of.KEY: digest_of(reader.originals, info.name)
        }
        for info in infos
    }  # fmt: skip


def config_beside(plan: Plan, reader: Reader, config: Mapping[str, Any] | None) -> bytes | None:
    """Return the config.json of a folder: the given one, the plan's, or the one beside the source; None is none."""
    written = plan.config if config is None else config
    if written is not None:
        return _dumped(configs.with_dtype(written, plan.dtype, plan.target_layout)) if written else None
    if reader.format == "gguf":  # its config is in its header, by names that a change of container keeps
        is_kept = plan.target_layout in ("", plan.source_layout)
        return None if is_kept else _dumped(configs.with_dtype(reader.config or {}, plan.dtype, plan.target_layout))
    if not reader.files():  # weights in memory, which are next to nothing
        return None
    folder = model_files.folder_of(reader.path)
    own = folder / configs.CONFIG
    return _adapted(read_file(own, folder, configs.MAX_BYTES), plan) if own.is_file() else None


def _adapted(data: bytes, plan: Plan) -> bytes:
    """Return the source's config.json without its quantisation and with the dtype of a cast; as it is where it can."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(config, dict):
        return data
    plain = quantised.unquantised(config) if plan.scales else config
    adapted = configs.with_dtype(plain, plan.dtype, plan.target_layout)
    return data if adapted == config else _dumped(adapted)


def _dumped(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode("ascii")
