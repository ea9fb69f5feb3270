"""Modules of a user's own code by name: ``file.py:factory`` or ``module:factory``, imported as they would import it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from attn_bridge import backends
from attn_bridge.printable import listed, printable

from .sides.libraries import KINDS, as_side
from .stack import raised_at

EXAMPLE = "example_inputs"
"""Function in the module of a factory that returns inputs to compare on."""

MAX_TEXT = 300
"""Most characters of a foreign message that are passed on."""

_OWN = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "torch_attn", "jax_attn")
_FRAMEWORKS = ("torch", "jax", "flax", "numpy")
_KINDS = f"a torch.nn.Module, an nnx.Module, (Linen module, variables), {KINDS} or parity.function(f, weights)"

REPLACEABLE = frozenset(
    {"print", "input", "open", "breakpoint", "exit", "quit", "help", "copyright", "credits", "license"}
)
"""Built-in functions that code replaces for its own purposes (`print` on the first of several devices)."""

MAX_NAMES = 5
"""Most names that a message lists."""

MAX_SOURCE = 1 << 20
"""Bytes of the largest file that is parsed for the names that a message offers."""

_BUILTINS = vars(builtins)

_packages: dict[Path, str] = {}
"""Folder -> the package of ours that its files are imported into, so that two of one name don't clash."""

_siblings: dict[str, Path] = {}
"""Module imported by its bare name from the folder of a file -> the folder."""

_left: set[Path] = set()
"""Files of modules that made room for others of their names."""

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Factory:
    """A factory that a user named: its Python module, and the object that makes one side of a comparison.

    Attributes:
        name: as the user wrote it.
        module: the Python module.
        target: a function without arguments, a class whose constructor needs none, or a finished side.
        root: the folder that its own code is imported from; None for installed code.
    """

    name: str
    module: ModuleType
    target: Any
    root: Path | None

    def build(self, seed: int = 0) -> Any:
        """Return the side: a torch or NNX module, a Linen module with its variables, or a function with its weights.

        Args:
            seed: for the random numbers of Python, NumPy and torch while it is built, so that a factory that draws its
                weights gives the same ones again.

        Raises:
            ValueError: it raises, or gives something else.
        """
        side = as_side(self.target)
        if backends.framework_of(side) is None:
            if not callable(side):
                raise ValueError(f"{self.name} is of type {type(side).__name__}, not a factory")
            self._check_arguments()
            with seeded(seed), guarded(self.name):
                side = self.target()
            if inspect.iscoroutine(side):
                side.close()  # else Python warns that it was never awaited
                raise ValueError(f"{self.name} is an async function; a factory returns the side without await")
            side = as_side(side)
        if backends.framework_of(side) is not None:
            return side
        if _is_linen(side):
            raise ValueError(
                f"{self.name} gives the Linen module {type(side).__name__} alone; give it with its variables: "
                "(module, module.init(key, inputs))"
            )
        if isinstance(side, tuple) and side and callable(side[0]):
            raise ValueError(
                f"{self.name} gives a tuple that begins with a function; give attn_bridge.parity.function(f, weights), "
                "which is called as f(weights, *inputs)"
            )
        raise ValueError(f"{self.name} must give {_KINDS}, it gives {type(side).__name__}")

    def _check_arguments(self) -> None:
        """Refuse a factory that needs arguments, with the line that gives them."""
        is_class = isinstance(self.target, type)
        call = self.target.__init__ if is_class else self.target  # NNX's metaclass hides a class's own signature
        try:
            parameters = list(inspect.signature(call).parameters.values())[is_class:]
        except (TypeError, ValueError):  # a callable without a signature, such as one written in C
            return
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]
        if not needed:
            return
        where, _, name = self.name.rpartition(":")
        own = "make" if not hasattr(self.module, "make") else f"make_{name.rpartition('.')[2].lower()}"
        values = ", ".join(f"{each}=nnx.Rngs(0)" if each == "rngs" else f"{each}=..." for each in needed)
        line = f"def {own}(): return {name}({values})"
        # It may be a function to judge, which nothing tells from a factory with arguments.
        function = f"from attn_bridge import parity; return parity.function(lambda _, *x: {name}(*x), {{}})"
        judged = f"; to judge the function itself: def {own}(): {function}"
        raise ValueError(
            f"{self.name} needs arguments ({', '.join(map(printable, needed))}), and a factory is called without any; "
            f"add a line such as: {line}, and give {where}:{own}{'' if is_class else judged}"
        )

    def example_inputs(self) -> Any:
        """Return the result of ``example_inputs()`` in the factory's module, None if it has no such function."""
        example = getattr(self.module, EXAMPLE, None)
        if example is None:
            return None
        where = f"{self.name.rpartition(':')[0]}:{EXAMPLE}"
        if not callable(example):
            raise ValueError(f"{where} must be a function without arguments")
        with guarded(where):
            return example()

    def sources(self) -> dict[str, Path]:
        """Return the files of the user's own code that were imported so far: path below the root -> file."""
        if self.root is None:
            return {}
        files = set(_left)
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if top in _siblings or top == _packages.get(self.root) or module is self.module:
                files |= _files([module])
        return {one.relative_to(self.root).as_posix(): one for one in sorted(files) if one.is_relative_to(self.root)}


def holds_tree(side: object) -> bool:
    """Return whether a side carries its weights as a tree: a Linen module with variables or a function."""
    return isinstance(side, tuple) or (type(side).__name__ == "Function" and callable(getattr(side, "call", None)))


def name_of(side: Any) -> str:
    """Return the name of a side: its class, or the function's name."""
    if isinstance(side, tuple):
        side = side[0]
    call = side.call if holds_tree(side) else None
    return str(getattr(call, "__name__", type(side).__name__))


def labels(sides: tuple[object, object]) -> dict[str, str]:
    """Return the names of two sides: their frameworks if these differ, else ``first`` and ``second``."""
    frameworks = [backends.framework_of(side) for side in sides]
    different = frameworks[0] != frameworks[1] and None not in frameworks
    return {name: str(one) if different else name for name, one in zip(("first", "second"), frameworks, strict=True)}


def _is_linen(value: object) -> bool:
    return any(base.__module__.startswith("flax.linen") for base in type(value).__mro__)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python, NumPy and (if loaded) torch, and restore their former states at the end.

    JAX has no such state: a factory makes its own keys.
    """
    import random

    import numpy as np

    if not 0 <= seed < 2**32:
        raise ValueError(f"--build-seed ({seed}) must be a whole number from 0 to {2**32 - 1}")
    torch = sys.modules.get("torch")
    former = random.getstate(), np.random.get_state(), None if torch is None else torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    if torch is not None:
        torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(former[0])
        np.random.set_state(former[1])
        if torch is not None:
            torch.random.set_rng_state(former[2])


def load(name: str, what: str = "factory") -> Factory:
    """Import the object that ``file.py:factory`` or ``module:factory`` names.

    The file's folder is importable, and so is the current one; a file in a package is imported as a part of it.

    Args:
        name: as the user wrote it.
        what: the kind of object, for messages.

    Raises:
        ValueError: no such file, module or attribute, or importing it raises.
    """
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise ValueError(f"{what} ({name}) must read file.py:factory or module:factory{_offered(_defined_in(name))}")
    path = Path(where)
    is_file = path.suffix == ".py" or os.sep in where or path.is_file()
    module, root = _import_file(path, where) if is_file else _import_module(where)
    target: object = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{where} has no {attribute}{_offered(_public(target), part)}")
        target = getattr(target, part)
    return Factory(name, module, target, root)


def _public(target: object) -> list[str]:
    """Return the names that code defines itself, without a leading underscore."""
    own = getattr(target, "__name__", None)
    return [
        name
        for name, value in getattr(target, "__dict__", {}).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", own) == own
    ]


def _defined_in(name: str) -> list[str]:
    """Return the public functions and classes of a Python file, without running it; empty for other files."""
    path = Path(name)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > MAX_SOURCE:
            return []
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]


def _offered(names: Sequence[str], wanted: str = "") -> str:
    """Return the end of an error message: the name nearest to the wanted one, else the available names."""
    near = difflib.get_close_matches(wanted, names, 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it has {listed([*map(printable, names)], MAX_NAMES)}" if names else ""


@contextlib.contextmanager
def workspace() -> Iterator[None]:
    """Enter the context of one command: re-import modules of an earlier command, and restore ``sys.path`` after it."""
    for name in [*_siblings, *_packages.values()]:
        _forget(name)
    _packages.clear()
    _left.clear()
    former = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = former


class BuiltinsReplacedError(ValueError):
    """User code replaced or deleted built-in functions that the frameworks and the judge compute with."""


class intact_builtins(contextlib.AbstractContextManager[None]):
    """Put back the built-in functions that user code replaces, and refuse it.

    Functions that nothing computes with (`REPLACEABLE`) stay as user code wants them, and so do those that it adds.

    Args:
        what: the user code, for the message.
        everything: put back the replaceable ones as well.

    Raises:
        BuiltinsReplacedError: one was replaced that is not replaceable.
    """

    def __init__(self, what: str, everything: bool = False):
        self._what = what
        self._saved = dict(_BUILTINS)
        self._kept = () if everything else REPLACEABLE

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        after = {**_BUILTINS}  # before it is put back nothing here may call a built-in function
        _BUILTINS.update(self._saved)
        names = sorted(name for name, value in self._saved.items() if name not in after or after[name] is not value)
        _BUILTINS.update({name: after[name] for name in names if name in self._kept and name in after})
        names = [name for name in names if name not in REPLACEABLE]
        if names and not isinstance(error, BuiltinsReplacedError):
            text = listed(names, MAX_NAMES)
            raise BuiltinsReplacedError(
                f"{self._what} replaced Python's builtins ({text}), which the frameworks compute with, too"
            )


class guarded(intact_builtins):
    """Turn whatever user code raises, SystemExit included, into a ValueError of one line that names it.

    Args:
        what: the user code, for the message.

    Raises:
        ValueError: it raises, or replaces functions that everything in this process computes with.
    """

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        intact_builtins.__exit__(self, kind, error, at)  # super() is a built-in function
        if error is None or isinstance(error, (KeyboardInterrupt, BuiltinsReplacedError)):
            return
        line = raised_at(error)
        where = f" ({line})" if line else ""
        raise ValueError(f"{self._what} raised {type(error).__name__}: {text_of(error)}{where}") from error


def text_of(error: BaseException) -> str:
    """Return the message of an exception in one bounded line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's exception whose own text raises
        text = ""
    text = text or "no message"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


def _import_file(path: Path, name: str) -> tuple[ModuleType, Path]:
    try:
        path = path.resolve()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError):
        exists = False
    if not exists:
        raise ValueError(f"{name} does not exist" if not path.is_dir() else f"{name} is a folder, not a Python file")
    root = path.parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    parts = [*path.parent.relative_to(root).parts, *([] if path.stem == "__init__" else [path.stem])]
    package = _package(root)
    for folder in dict.fromkeys((root, path.parent)):
        _offer(folder)
    before = set(sys.modules)
    with guarded(f"importing {name}"), _arguments(str(path)):
        if path.suffix == ".py" and all(part.isidentifier() for part in parts):
            module = importlib.import_module(".".join([package, *parts]))
        else:
            module = _execute(path, f"{package}.{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}")
    _remember(before, (root, path.parent))
    return module, root


def _package(root: Path) -> str:
    """Return the name of a package whose modules are the files of a folder, under which no other folder's stand."""
    if root not in _packages:
        package = ModuleType(f"_attn_bridge_{next(_numbers)}")
        package.__path__ = [str(root)]
        sys.modules[package.__name__] = package
        _packages[root] = package.__name__
    return _packages[root]


def _execute(path: Path, name: str) -> ModuleType:
    from importlib.machinery import SourceFileLoader

    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None, "a loader was given"
    assert spec.loader is not None, "likewise"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> tuple[ModuleType, Path | None]:
    folder = Path.cwd()
    _offer(folder)
    before = set(sys.modules)
    try:
        importable = all(name.split(".")) and importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        importable = False
    if not importable:
        raise ValueError(f"there is no module {name} in the current folder or installed")
    with guarded(f"importing {name}"), _arguments(name):
        module = importlib.import_module(name)
    _remember(before, (folder,))
    return module, folder if _siblings.get(name.partition(".")[0]) == folder else None


def _offer(folder: Path) -> None:
    """Make a folder importable, before all others; forget modules of the same names from another folder."""
    for name in _FRAMEWORKS:
        if _holds(folder, name):  # a side's file may well be called torch.py, and means the real one by that name
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    sys.path.insert(0, str(folder))
    for name, home in list(_siblings.items()):
        if home != folder and _holds(folder, name):
            _forget(name)
    importlib.invalidate_caches()


def _forget(name: str) -> None:
    names = [one for one in sys.modules if one == name or one.startswith(f"{name}.")]
    _left.update(_files([sys.modules.pop(one) for one in names]))
    _siblings.pop(name, None)


def _files(modules: Iterable[ModuleType]) -> set[Path]:
    return {Path(file) for module in modules if (file := getattr(module, "__file__", None))}


def _remember(before: set[str], folders: tuple[Path, ...]) -> None:
    for name in set(sys.modules) - before:
        if "." in name or name in _OWN:
            continue
        file, paths = (getattr(sys.modules[name], one, None) for one in ("__file__", "__path__"))
        for folder in folders:
            if (file and Path(file) == folder / f"{name}.py") or (paths and str(folder / name) in list(paths)):
                _siblings[name] = folder


def _holds(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


@contextlib.contextmanager
def _arguments(name: str) -> Iterator[None]:
    """Hide our command line from code that reads its own when it is imported."""
    former, sys.argv = sys.argv, [name]
    try:
        yield
    finally:
        sys.argv = former
