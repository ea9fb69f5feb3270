"""SHA-256 digests of a comparison's subjects: the code and weights of both sides, inputs, rules, and the judge.

In: factories, sides, a call. Out: plain data, which the report stores as `Report.subjects`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import attn_bridge

from .. import repro
from ..factories import Factory
from ..sides.subject import Array
from ..sides.trees import flatten

JUDGE = ("attn_bridge", "attn_parity", "torch_attn", "jax_attn", "attn_kernels")
"""Packages whose code decides a verdict."""

SIDES = ("first", "second")


def weights(side: object) -> str | None:
    """Return the digest of a side's weights by name, dtype, shape and bytes; None for a side that can't be read."""
    try:
        arrays = repro.weights_of(side)
    except (ValueError, TypeError, NotImplementedError, RuntimeError):
        return None  # modules of other libraries, and weights that no single process holds
    return _of_arrays(sorted(arrays.items()))


def call(inputs: object) -> str:
    """Return the digest of a call: its arrays by position or name, and its other values."""
    from ..samples.calls import as_arguments

    arguments = as_arguments(inputs)
    tree = {"args": arguments.args, "kwargs": arguments.kwargs}
    arrays = flatten(tree, lambda value: isinstance(value, np.ndarray))
    plain = flatten(tree, lambda value: isinstance(value, (bool, int, float, complex, str)))
    return _of_arrays([*arrays, *((path, np.asarray(value)) for path, value in plain)])


def code(factory: Factory, folder: Path) -> dict[str, object]:
    """Return the digests of a side's code: one of everything, one per file, and one per module from elsewhere.

    Args:
        factory: the factory, after its side ran, so that every import has happened.
        folder: the current folder, to which the names of files are relative.
    """
    files = {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in factory.sources().values()}
    own = {path.resolve() for path in files.values()}
    elsewhere = {name: path for name, path in _imported() if path.resolve() not in own}
    elsewhere |= _installed_module(factory)
    own_digests = {name: of_file(path) for name, path in sorted(files.items())}
    modules = {name: of_file(path) for name, path in sorted(elsewhere.items())}
    digest = of_names(own_digests | modules)
    return {"factory": factory.name, "files": own_digests, "modules": modules, "code": digest}


def of_file(path: Path) -> str:
    """Return the digest of a file.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_names(digests: Mapping[str, str]) -> str:
    """Return the digest of digests with names."""
    lines = (f"{digest} {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def judge() -> dict[str, str]:
    """Return the version of the judge, and the digest of its code."""
    root = Path(attn_bridge.__file__).parents[1]
    files = [path for name in JUDGE for path in (root / name).rglob("*") if path.suffix in (".py", ".toml")]
    digests = {path.relative_to(root).as_posix(): of_file(path) for path in files}
    return {"version": attn_bridge.__version__, "code": of_names(digests)}


def _of_arrays(arrays: Sequence[tuple[str, Array]]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays:
        head = f"{name}\0{array.dtype}\0{array.shape}\0"
        digest.update(head.encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _installed_module(factory: Factory) -> dict[str, Path]:
    """Return name -> file of a factory's module if it is installed; empty for a factory in a file of the user."""
    name = getattr(factory.target, "__module__", factory.module.__name__)
    file = getattr(sys.modules.get(name, factory.module), "__file__", None)
    return {} if factory.root is not None or file is None else {str(name): Path(file)}


def _imported() -> Iterator[tuple[str, Path]]:
    """Yield the modules that are neither installed, Python's own nor the judge's, with their files."""
    root = Path(attn_bridge.__file__).parents[1]
    installed = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *site.getsitepackages())
    folders = [*map(Path, installed), Path(site.getusersitepackages()), *(root / name for name in JUDGE)]
    not_own = tuple(str(folder.resolve()) + os.sep for folder in folders)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("__main__", "fault_lab"):
            continue
        path = Path(file).resolve()
        is_own = path.suffix == ".py" and not str(path).startswith(not_own) and path.is_file()
        if is_own and not name.startswith("_attn_bridge_"):
            yield name, path
