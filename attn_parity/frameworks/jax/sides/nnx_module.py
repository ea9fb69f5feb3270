"""An NNX module as a side: it is split, and every call merges a new one around other weights.

So the module keeps its own variables, modes and random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jax_attn.backend import WEIGHTS, to_numpy

from ....hints.settings import read as read_settings
from ....sides.arrays import is_large
from ....sides.patching import replaced
from ....sides.subject import Arguments, Arrays, SideWeight, Submodule, culprit, signature_of
from ..drawing import _prepare, drawing
from ..recording import Tape
from .adapter import (
    Adapter,
    Setting,
    asks_for_mode,
    cache_off,
    constant,
    dotted,
    home_of,
    is_numeric,
    off_in_eval_mode,
    stock_name,
)

METHODS = ("__call__", "attend")
"""Methods of submodules whose calls are recorded."""

_PATH = "attn_bridge_path"

_NO_STATE = (nnx.RngState, nnx.Intermediate)
"""Kinds of variables that hold random streams or intermediate values of a call."""


class NNXModule(Adapter):
    """Side of an NNX module: its weights and submodules, and its parts.

    Args:
        module: the module.
        wanted: the device; None is the device of its parameters.
    """

    kind = "NNX module"

    def __init__(self, module: nnx.Module, wanted: str | None = None):
        self.module = module
        self.name = type(module).__name__
        self._weights = nnx.state(module, WEIGHTS)
        self._carried: frozenset[str] = frozenset()
        self._failed: dict[int, str] = {}  # id of a submodule of the call that has failed -> its path
        flat = nnx.to_flat_state(self._weights)
        self.home = home_of({dotted(path): one.get_value() for path, one in flat}, wanted)

    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it can be given by position."""
        return signature_of(self.module)

    def called(self, method: object) -> Callable[..., object]:
        """Return the module, or the method that is named."""
        return getattr(self.module, method, self.module) if isinstance(method, str) else self.module

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""
        return self._described(self._held())

    def state(self) -> dict[str, SideWeight]:
        """Return the variables that are neither parameters, running statistics, random state nor sown by name."""
        return self._described(self._others())

    def carry(self, names: Collection[str]) -> None:
        """Count the variables of these names, and no other state, among the parameters."""
        self._carried = frozenset(names)

    def _others(self) -> dict[str, nnx.Variable]:
        flat = nnx.to_flat_state(nnx.state(self.module, nnx.Not(nnx.Any(*WEIGHTS, *_NO_STATE))))
        variables = {dotted(path): one for path, one in flat if isinstance(one, nnx.Variable)}
        return {name: one for name, one in variables.items() if is_numeric(one.get_value())}

    def _held(self) -> dict[str, nnx.Variable]:
        """Return name -> variable of the weights and of the state that is carried."""
        variables = {dotted(path): variable for path, variable in nnx.to_flat_state(self._weights)}
        return variables | {name: one for name, one in self._others().items() if name in self._carried}

    def _described(self, variables: Mapping[str, nnx.Variable]) -> dict[str, SideWeight]:
        owners = {dotted(path): child for path, child in nnx.iter_modules(self.module)}
        described = {}
        for name, variable in variables.items():
            parent, _, _ = name.rpartition(".")
            owner = stock_name(owners[parent]) if parent in owners else ""
            value = variable.get_value()
            role = "parameter" if isinstance(variable, nnx.Param) else "state"
            role = "statistic" if isinstance(variable, nnx.BatchStat) else role
            described[name] = SideWeight(tuple(value.shape), value.dtype.name, owner, parent, role, "flax")
        return described

    def weights(self) -> Arrays:
        """Return copies of the weights that the module holds; large ones are its own."""
        arrays = {name: to_numpy(variable.get_value()) for name, variable in self._held().items()}
        return {name: array if is_large(array) else array.copy() for name, array in arrays.items()}

    def tied(self) -> dict[str, str]:
        """Return further name of a weight -> the name that it has in `parameters`."""
        paths_of_weights = {dotted(path) for path, _ in nnx.to_flat_state(self._weights)}
        names: dict[int, list[str]] = {}
        for path, child in nnx.iter_modules(self.module):
            for name, value in vars(child).items():
                if isinstance(value, WEIGHTS):
                    names.setdefault(id(value), []).append(dotted((*path, name)))
        return {
            name: own
            for group in names.values()
            for own in [next((one for one in group if one in paths_of_weights), "")]
            for name in group
            if own and name != own
        }

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""
        modules = [Submodule(dotted(path), type(child).__name__) for path, child in nnx.iter_modules(self.module)]
        return sorted(modules, key=lambda module: module.path.count(".") + bool(module.path))

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""
        return {dotted(path): read_settings(child) for path, child in nnx.iter_modules(self.module)}

    def switched_off(self) -> list[str]:
        """Describe the behaviour that is off in eval mode."""
        children = [(dotted(path), child) for path, child in nnx.iter_modules(self.module)]
        behaviour = []
        for path, child in children:
            behaviour += off_in_eval_mode(path, child, averages=hasattr(child, "use_running_average"))
            behaviour += asks_for_mode(path, child)
        return behaviour

    def caches(self) -> list[str]:
        """Describe the caches that are off."""
        children = [(dotted(path), child) for path, child in nnx.iter_modules(self.module)]
        return [text for path, child in children for text in cache_off(path, child)]

    def part(self, path: str) -> NNXPart:
        """Return the submodule at a dotted path."""
        return NNXPart(self.module, path, self._failed, self._carried)

    def culprit(self, error: Exception) -> str:
        """Describe the submodule that raised an error, and its arguments; "" if unknown."""

        def held_by(owner: object) -> dict[str, Array]:
            variables = {name: one for name, one in vars(owner).items() if isinstance(one, nnx.Variable)}
            return {name: one.get_value() for name, one in variables.items() if isinstance(one, WEIGHTS)}

        return culprit(error, lambda module: self._failed.get(id(module)), held_by)


class NNXPart:
    """A submodule taken apart, to be merged around other weights."""

    def __init__(
        self,
        module: nnx.Module,
        path: str,
        failed: dict[int, str] | None = None,
        carried: Collection[str] = (),
    ):
        self._failed = {} if failed is None else failed
        is_weight = _weights_and(module, carried)
        whole = nnx.to_flat_state(nnx.state(module, is_weight))
        owners = {id(variable.get_value()): dotted(where) for where, variable in whole}
        names = {dotted(where) for where, _ in whole}
        target = _at(module, path)
        self._graphdef, weights, rest = nnx.split(target, is_weight, ...)
        # A submodule that several modules share is known by its path in the first of them.
        owned = {id(child): dotted(where) for where, child in nnx.iter_modules(module)}
        self._paths = {dotted(where): owned[id(child)] for where, child in nnx.iter_modules(target) if where}
        self._weights, self._rest = nnx.to_flat_state(weights), nnx.to_flat_state(rest)
        self.changed: set[str] = set()
        self._names: dict[tuple[str | int, ...], str] = {}
        for where, variable in self._weights:
            name = ".".join(filter(None, (path, dotted(where))))
            # A variable that is tied to one elsewhere has its name there.
            self._names[where] = name if name in names else owners[id(variable.get_value())]
        self.names = set(self._names.values())
        self.trainable = {
            self._names[where]
            for where, variable in self._weights
            if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.get_value().dtype, jnp.floating)
        }

    def merged(self, weights: Mapping[str, object], dtype: str | None, seed: int) -> nnx.Module:
        """Return the submodule, in eval mode, around other weights."""
        flat = [
            (where, variable.replace(jnp.asarray(weights.get(self._names[where], variable.get_value()))))
            for where, variable in self._weights
        ]
        rest = [(where, _constant(leaf, dtype, seed)) for where, leaf in self._rest]
        module: nnx.Module = nnx.merge(self._graphdef, nnx.from_flat_state(flat), nnx.from_flat_state(rest))
        module.eval()
        return module

    def call(self, weights: Mapping[str, ArrayLike], arguments: Arguments, setting: Setting) -> object:
        """Call it around other weights."""
        module = self.merged(weights, setting.dtype, setting.seed)
        if setting.train:
            _prepare(module)
        called, kwargs = module, dict(arguments.kwargs)
        if isinstance(kwargs.get("method"), str) and "method" not in signature_of(module):
            called = getattr(module, kwargs.pop("method"))
        with contextlib.ExitStack() as stack:
            if setting.train:
                stack.enter_context(drawing(setting.source, module))
            if setting.tape is not None:
                stack.enter_context(_tapped(module, self._paths, setting.tape))
            before = _values(module)
            try:
                result = called(*arguments.args, **kwargs)
            except Exception:  # it is raised again; the message names the submodule by what is noted here
                self._failed.clear()
                self._failed.update({id(child): dotted(path) for path, child in nnx.iter_modules(module)})
                raise
        after = _values(module)
        self.changed |= {name for name, value in after.items() if before.get(name) is not value}
        return result


def _weights_and(module: nnx.Module, names: Collection[str]) -> Callable[[object, object], bool]:
    """Return the filter of NNX for weights and the state of these names, which also finds it in submodules."""
    flat = nnx.to_flat_state(nnx.state(module)) if names else ()
    variables = {dotted(path): one for path, one in flat if isinstance(one, nnx.Variable)}
    carried = {id(one.get_value()) for name, one in variables.items() if name in names}

    def is_weight(path: object, value: object) -> bool:
        del path
        return isinstance(value, WEIGHTS) or (isinstance(value, nnx.Variable) and id(value.get_value()) in carried)

    return is_weight


def _values(module: nnx.Module) -> dict[str, object]:
    """Return the values of a module's variables that are neither running statistics nor random state."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.BatchStat, nnx.RngState))))
    return {dotted(path): variable.get_value() for path, variable in flat if isinstance(variable, nnx.Variable)}


@contextlib.contextmanager
def _tapped(module: nnx.Module, paths: Mapping[str, str], tape: Tape) -> Iterator[None]:
    """Have the calls of all submodules recorded under their whole paths, those of transformations' copies as well."""
    children = [(paths[dotted(path)], child) for path, child in nnx.iter_modules(module) if path]
    shapes = {path: _shapes(child) for path, child in children}
    for path, child in children:
        setattr(child, _PATH, path)
    classes = {type(child) for _, child in children}
    homes = {
        (next(base for base in kind.__mro__ if method in vars(base)), method)
        for kind in classes
        for method in METHODS
        if any(method in vars(base) for base in kind.__mro__)
    }

    def _build(method: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def build(original: Callable[..., object]) -> Callable[..., object]:
            def call(self: nnx.Module, *args: object, **kwargs: object) -> object:
                path = getattr(self, _PATH, None)
                if path not in shapes or _shapes(self) != shapes[path]:  # one of a stack has no weights of its own
                    return original(self, *args, **kwargs)
                return tape.call(path, lambda *some, **others: original(self, *some, **others), args, kwargs, method)

            return call

        return build

    with contextlib.ExitStack() as stack:
        for home, method in sorted(homes, key=str):
            stack.enter_context(replaced(home, method, _build(method)))
        yield


def _shapes(module: nnx.Module) -> list[tuple[tuple[str | int, ...], tuple[int, ...]]]:
    flat = nnx.to_flat_state(nnx.state(module, WEIGHTS))
    return [(path, jnp.shape(variable.get_value())) for path, variable in flat]


def _constant(leaf: object, dtype: str | None, seed: int) -> object:
    """Return a variable other than a weight, with its floats in `dtype` and its random keys folded with the seed."""
    if not isinstance(leaf, nnx.Variable):
        return constant(leaf, dtype, seed)
    value = leaf.get_value()
    changed = constant(value, dtype, seed)
    return leaf if getattr(value, "dtype", None) is None else leaf.replace(changed)


def _at(module: nnx.Module, path: str) -> nnx.Module:
    node: Any = module
    for key in path.split(".") if path else ():
        is_index = key.isdigit() and not hasattr(node, key)
        node = node[int(key)] if is_index else node[key] if isinstance(node, Mapping) else getattr(node, key)
    return node
