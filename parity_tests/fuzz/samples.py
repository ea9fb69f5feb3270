"""Checkpoints to write, read and damage: random bits in every dtype that a container holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge.checkpoints.containers import TensorInfo, make_writer, open_reader
from attn_bridge.checkpoints.containers.base import numpy_dtype
from attn_bridge.checkpoints.containers.files import DTYPES
from attn_bridge.checkpoints.containers.orbax.plain import FOREIGN
from attn_bridge.checkpoints.containers.pickles import TORCH_DTYPES
from attn_bridge.checkpoints.containers.safetensors import CODES

Arrays = dict[str, np.ndarray]

HELD = {
    "safetensors": frozenset(CODES),
    "torch": TORCH_DTYPES,
    "npz": DTYPES,
    "msgpack": DTYPES,
    "orbax": frozenset(name for name in DTYPES if numpy_dtype(name).isbuiltin == 1) | FOREIGN,
    "dcp": TORCH_DTYPES,
}
"""Format -> dtypes that it holds."""

ENDINGS = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "npz": ".npz",
    "msgpack": ".msgpack",
    "orbax": ".orbax",
    "dcp": ".dcp",
}

SHAPES = ((3, 5), (), (0, 4), (7,), (2, 1, 3))


def random_array(dtype: str, shape: Iterable[int], rng: np.random.Generator) -> np.ndarray:
    """Return an array of random bits, so that floats have NaNs of all kinds and bools bytes beyond 1."""
    shape = tuple(shape)
    kind = numpy_dtype(dtype)
    return np.frombuffer(rng.bytes(math.prod(shape) * kind.itemsize), kind).reshape(shape)


def random_arrays(
    dtypes: Iterable[str], seed: int = 0, shapes: Iterable[Iterable[int]] = SHAPES, format: str = ""
) -> Arrays:
    """Return arrays of all dtypes and shapes; bools for Orbax are 0 and 1, since it takes no others."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(shape) for shape in shapes]
    return {
        f"{dtype}.s{index}": one.view(np.uint8) % 2 == 1 if (dtype, format) == ("bool", "orbax") else one
        for dtype in sorted(dtypes)
        for index, shape in enumerate(shapes)
        for one in [random_array(dtype, shape, rng)]
    }


def infos(arrays: Arrays, files: Mapping[str, str] | None = None) -> list[TensorInfo]:
    """Return what a writer is told."""
    files = files or {}
    return [TensorInfo(name, one.dtype.name, one.shape, files.get(name, "")) for name, one in arrays.items()]


def write(format: str, path: Path, arrays: Arrays, metadata: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write a checkpoint and return its path."""
    writer = make_writer(format, path, infos(arrays, **options), metadata or {})
    for name in writer.tensors:
        writer.write(name, arrays[name])
    writer.finish()
    return path


def read(path: Path, format: str | None = None) -> Arrays:
    """Return all tensors of a checkpoint."""
    with open_reader(path, format) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def assert_same(found: Mapping[str, Any], wanted: Arrays) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert set(found) == set(wanted)
    for name, one in wanted.items():
        other = np.asarray(found[name])
        assert (name, other.dtype.name, other.shape) == (name, one.dtype.name, one.shape)
        assert other.tobytes() == one.tobytes(), name
