"""A Linen module with its variables as a side: every call applies it to other variables.

Linen makes submodules while it runs, so they are known only after the first call: each leaves its class, its settings
and a copy of itself, which can run alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array
from jax.typing import ArrayLike

from attn_bridge.printable import listed
from jax_attn.backend import to_numpy

from ....hints.settings import read as read_settings
from ....sides.patching import replaced
from ....sides.subject import Arguments, Arrays, ModuleFailedError, SideWeight, Submodule, signature_of
from ..drawing import drawn_from, setting_of
from ..recording import Tape
from .adapter import Adapter, Setting, cache_off, constant, dotted, home_of, is_numeric, off_in_eval_mode, stock_name
from .linen_template import Path, Template

ROLES = {"params": "parameter", "batch_stats": "statistic"}
"""Collections of variables that count as weights -> their role."""


@dataclasses.dataclass
class _Known:
    """A submodule that a call has shown."""

    type: str
    stock: str
    settings: Mapping[str, object]
    off: list[str]
    caches: list[str]
    template: Template | None


class LinenModule(Adapter):
    """Side of a Linen module: its weights and submodules, and its parts; messages of Linen name the submodule at fault.

    Args:
        module: the module.
        variables: its variables, as `init` returns them.
        wanted: the device; None is the device of its parameters.
        streams: names of the random streams that it draws from, other than ``params`` and ``dropout``.

    Raises:
        ModuleFailedError: `variables` is empty.
    """

    kind = "Linen module"

    def __init__(
        self,
        module: linen.Module,
        variables: Mapping[str, object],
        wanted: str | None = None,
        streams: tuple[str, ...] = (),
    ):
        self.module = module
        self.name = type(module).__name__
        self.streams = streams
        self.variables = _flat(self.name, variables)
        if not self.variables:
            raise ModuleFailedError(
                f"the Linen module {self.name} has no variables; give (module, variables), with variables = "
                "module.init(key, *inputs)"
            )
        self.home = home_of({dotted(path): one for path, one in self.variables.items()}, wanted)
        self.places: dict[str, tuple[str, Path]] = {}  # name -> collection and path
        self._others: dict[str, tuple[str, Path]] = {}  # the same of state
        for is_weight, places in ((True, self.places), (False, self._others)):
            for (collection, path), leaf in self.variables.items():
                name = dotted(path)
                if (collection in ROLES) == is_weight and (is_weight or is_numeric(leaf)):
                    is_ambiguous = name in self.places or name in self._others
                    places[f"{collection}.{name}" if is_ambiguous else name] = collection, path
        self.known: dict[Path, _Known] = {}

    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it can be given by position."""
        return signature_of(self.module.__call__) if hasattr(self.module, "__call__") else {}  # noqa: B004

    def called(self, method: object) -> Any:
        """Return the module's ``__call__``, or the method that is named or given."""
        function = getattr(self.module, method, None) if isinstance(method, str) else method
        return function or getattr(self.module, "__call__", None)  # noqa: B004

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named.

        Owners are guessed until the first call shows them.
        """
        return self._described(self.places)

    def state(self) -> dict[str, SideWeight]:
        """Return the leaves of collections that hold neither parameters nor running statistics by name."""
        return self._described(self._others)

    def carry(self, names: Collection[str]) -> None:
        """Count the leaves of these names, and no other state, among the parameters."""
        weights = {name: place for name, place in self.places.items() if place[0] in ROLES}
        self.places = weights | {name: place for name, place in self._others.items() if name in names}

    def _described(self, places: Mapping[str, tuple[str, Path]]) -> dict[str, SideWeight]:
        described = {}
        for name, (collection, path) in places.items():
            array = self.variables[collection, path]
            owner = self.known[path[:-1]].stock if path[:-1] in self.known else self._guessed(path[:-1])
            described[name] = SideWeight(
                tuple(array.shape), array.dtype.name, owner, dotted(path[:-1]), ROLES.get(collection, "state"), "flax"
            )
        return described

    def _guessed(self, path: Path) -> str:
        if not path:
            return stock_name(self.module)
        match = re.fullmatch(r"([A-Z]\w*)_\d+", path[-1])
        return match[1] if match and hasattr(linen, match[1]) else ""

    def weights(self) -> Arrays:
        """Return copies of the weights among the variables."""
        return {name: np.array(to_numpy(self.variables[place]), copy=True) for name, place in self.places.items()}

    def modules(self) -> list[Submodule]:
        """Return the submodules seen in calls or implied by the variables, the module itself first."""
        types = {path: known.type for path, known in self.known.items()}
        of_variables = [path[:-1] for _, path in self.places.values()]
        for path in [*types, *of_variables]:
            for depth in range(1, len(path) + 1):
                types.setdefault(path[:depth], self._guessed(path[:depth]))
        classes = {dotted(path): kind for path, kind in types.items() if path}
        for name in list(classes):  # of a module named ``blocks.0``
            parent = name.rpartition(".")[0]
            while parent and parent not in classes:
                classes[parent] = ""
                parent = parent.rpartition(".")[0]
        rest = [Submodule(name, kind) for name, kind in classes.items()]
        return [Submodule("", self.name), *sorted(rest, key=lambda module: module.path.count("."))]

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""
        return {"": read_settings(self.module), **{dotted(path): one.settings for path, one in self.known.items()}}

    def switched_off(self) -> list[str]:
        """Describe the behaviour that is off in eval mode."""
        return [text for known in self.known.values() for text in known.off]

    def caches(self) -> list[str]:
        """Describe the caches that are off."""
        return [text for known in self.known.values() for text in known.caches]

    def part(self, path: str) -> LinenPart:
        """Return the submodule at a dotted path.

        Raises:
            ModuleFailedError: no call has shown a submodule there that can run alone.
        """
        if not path:
            return LinenPart(self, (), None)
        where = next((one for one in self.known if dotted(one) == path), None)
        template = None if where is None else self.known[where].template
        if where is None or template is None:
            raise ModuleFailedError(f"the submodule {path} of the {self.label} can't be run by itself")
        return LinenPart(self, where, template)

    def learn(self, module: linen.Module, *, outermost: bool) -> None:
        """Record class, settings and template of a submodule being called; the outermost call sets the template.

        A transformation of a class encloses the class itself, so a path may be recorded twice.
        """
        path = tuple(module.path)
        if not path:
            return
        name = dotted(path)
        before = self.known.get(path)
        template = Template.of(module) if outermost or before is None else before.template
        self.known[path] = _Known(
            type(module).__name__,
            stock_name(module),
            read_settings(module),
            off_in_eval_mode(name, module, averages=getattr(module, "use_running_average", None) is True),
            cache_off(name, module),
            template,
        )

    def complaint(self, arguments: Arguments) -> str:
        """Return a message on variables that the module expects and lacks, or has and does not expect; else ""."""
        keys = {name: jax.random.key(0) for name in ("params", "dropout", *self.streams)}

        def _init(leaves: list[ArrayLike]) -> object:
            call = arguments.with_leaves(leaves)
            kwargs = {name: value for name, value in call.kwargs.items() if name != "mutable"}
            return self.module.init(keys, *call.args, **kwargs)

        try:
            wanted = jax.eval_shape(_init, arguments.leaves)
        except Exception:  # it fails for another reason
            return ""
        expected = {dotted(path) for (collection, path) in _flat(self.name, wanted) if collection in ROLES}
        present = {name for name, (collection, _) in self.places.items() if collection in ROLES}
        missing, extra = sorted(expected - present), sorted(present - expected)
        if not missing:
            return ""
        instead = f", and there are {listed(extra)}" if extra else ""
        return f"its variables are those of another module: it has no {listed(missing)}{instead}"


class LinenPart:
    """The module, or a submodule, to be applied to other variables."""

    def __init__(self, side: LinenModule, path: Path, template: Template | None):
        self._side, self._path, self._template = side, path, template
        self.changed: set[str] = set()
        self._checked: set[Hashable] = set()
        roots = [path, *(template.outside if template else ())]
        self.names = {
            name for name, (_, where) in side.places.items() if any(where[: len(root)] == root for root in roots)
        }
        self.trainable = {
            name
            for name in self.names
            if side.places[name][0] == "params"
            and jnp.issubdtype(side.variables[side.places[name]].dtype, jnp.floating)
        }

    def call(self, weights: Mapping[str, ArrayLike], arguments: Arguments, setting: Setting) -> object:
        """Apply it to other variables."""
        side, kwargs = self._side, dict(arguments.kwargs)
        method = kwargs.pop("method", None) if "method" not in side.signature() else None
        variables = self._variables(weights, setting)
        writable = [name for name in variables if name != "params" and (setting.train or name not in ROLES)]
        mutable = kwargs.pop("mutable", writable) or False
        names = ("params", *(("dropout",) if setting.train else ()), *side.streams)
        keys = {name: jax.random.fold_in(jax.random.key(number), setting.seed) for number, name in enumerate(names)}

        def _apply(scope: object, *args: object, **kwargs: object) -> object:
            template = self._template
            module = side.module.clone(parent=scope, _deep_clone=True) if template is None else template.build(scope)
            return _method(module, method)(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            owners: dict[int, tuple[str, str]] = {}
            stack.enter_context(replaced(flax.core.Scope, "param", self._checked_once))
            stack.enter_context(linen.intercept_methods(_Interceptor(self._side, self._path, setting.tape, owners)))
            if setting.train:
                spaces = {kind.__module__ for kind in type(side.module).__mro__}
                stack.enter_context(drawn_from(setting.source, owners, spaces | {"flax.linen.stochastic"}))
            result = flax.core.apply(_apply, mutable=mutable)(variables, *arguments.args, rngs=keys, **kwargs)
        if mutable is False:
            return result
        before, after = (_leaves(tree) for tree in (variables, result[1]))
        self.changed |= {dotted(path) for path, value in after.items() if before.get(path) is not value}
        return result[0]

    def _checked_once(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return `Scope.param` that traces an initializer for its shape once, as this takes most of a small call."""

        def param(
            scope: flax.core.Scope,
            name: str,
            initialize: object,
            *arguments: Hashable,
            unbox: bool = True,
            **more: object,
        ) -> object:
            shape = getattr(scope.get_variable("params", name), "shape", None)
            key = (scope.path, name, arguments, shape)
            if not arguments or more or not _is_hashable(key) or key not in self._checked:
                value = original(scope, name, initialize, *arguments, unbox=unbox, **more)
                if _is_hashable(key):
                    self._checked.add(key)
                return value
            scope.reserve(name, "params")
            value = scope.get_variable("params", name)
            return flax.core.meta.unbox(value) if unbox else value

        return param

    def _variables(self, weights: Mapping[str, object], setting: Setting) -> dict[str, object]:
        side = self._side
        names = {place: name for name, place in side.places.items()}
        tree: dict[str, Any] = {}
        for location, variable in side.variables.items():
            name = names.get(location)
            number = constant(variable, setting.dtype, setting.seed) if name is None else weights.get(name, variable)
            collection, path = location
            node = tree.setdefault(collection, {})
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = jnp.asarray(number) if isinstance(number, np.ndarray) else number
        return tree


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


class _Interceptor:
    """Sees every call of every method: learns the submodules, names those that drop, and has calls recorded."""

    def __init__(self, side: LinenModule, path: Path, tape: Tape | None, owners: dict[int, tuple[str, str]]):
        self._side, self._path, self._tape, self._owners = side, path, tape, owners
        self._alive: list[linen.Module] = []  # an id stays the module's
        self._running: list[Path] = []

    def __call__(
        self,
        following: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        context: linen.module.InterceptorContext,
    ) -> object:
        module, method = context.module, context.method_name
        if method == "setup" or module.scope is None:
            return following(*args, **kwargs)
        path = tuple(module.path)
        self._alive.append(module)
        self._owners[id(module)] = dotted(path), setting_of(module)
        if not self._path:
            self._side.learn(module, outermost=path not in self._running)
        self._running.append(path)
        try:
            own = callable(getattr(type(module), method, None))  # and no function of a transformation
            if self._tape is None or not path or not own or not self._is_whole(path, module):
                return following(*args, **kwargs)
            return self._tape.call(dotted(path), following, args, kwargs, method)
        finally:
            self._running.pop()

    def _is_whole(self, path: Path, module: linen.Module) -> bool:
        """Whether it can run alone: its variables have the shapes of the tree, so it is not a slice of a stack."""
        submodule = self._side.known.get(path)
        if submodule is None or submodule.template is None:
            return False
        for collection in ROLES:
            variables = {
                where[len(path) :]: one
                for (name, where), one in self._side.variables.items()
                if name == collection and where[: len(path)] == path
            }
            own = module.scope._collection(collection) if variables else {}
            for where, variable in variables.items():
                node: object = own
                for key in where:
                    node = node.get(key) if isinstance(node, Mapping) else None
                if node is not None and jnp.shape(node) != jnp.shape(variable):
                    return False
        return True


def _method(module: linen.Module, method: Any) -> Callable[..., object]:
    if method is None:
        return module.__call__
    if isinstance(method, str):
        called: Callable[..., object] = getattr(module, method)
        return called
    own = getattr(method, "__self__", None)
    function = method.__func__ if isinstance(own, linen.Module) else method
    return lambda *args, **kwargs: function(module, *args, **kwargs)


def _leaves(tree: Mapping[str, object]) -> dict[Path, ArrayLike]:
    """Return path -> array of all variables but running statistics, collections first."""
    leaves: dict[Path, ArrayLike] = {}
    for collection, inner in tree.items():
        if collection not in ROLES:
            for path, leaf in jax.tree_util.tree_flatten_with_path(inner)[0]:
                leaves[collection, *(str(getattr(key, "key", key)) for key in path)] = leaf
    return leaves


def _flat(name: str, variables: object) -> dict[tuple[str, Path], Array | np.ndarray]:
    """Return (collection, path) -> array, boxes opened."""
    if not isinstance(variables, Mapping):
        raise ModuleFailedError(
            f"the variables of the Linen module {name} must be a mapping, got {type(variables).__name__}"
        )
    arrays: dict[tuple[str, Path], Array | np.ndarray] = {}
    for collection, tree in variables.items():
        if collection not in ROLES and not isinstance(tree, Mapping) and not hasattr(tree, "shape"):
            continue
        opened = linen.meta.unbox(tree)
        for path, leaf in jax.tree_util.tree_flatten_with_path(opened)[0]:
            words = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
            if not hasattr(leaf, "dtype"):
                raise ModuleFailedError(
                    f"the variables of the Linen module {name} must be arrays, got {type(leaf).__name__} at "
                    f"{dotted((collection, *words))}"
                )
            if not words:
                raise ModuleFailedError(
                    f"the variables of the Linen module {name} must be {{'params': {{...}}}}, as init returns them; "
                    f"got an array at {collection}"
                )
            arrays[collection, words] = leaf
    if arrays and "params" not in variables and not any(collection in ROLES for collection, _ in arrays):
        raise ModuleFailedError(
            f"the variables of the Linen module {name} must be {{'params': {{...}}}}, as init returns them; "
            f"got {listed(sorted(variables))}"
        )
    return arrays


def of_bridge(module: nnx.bridge.ToNNX, wanted: str | None = None) -> LinenModule:
    """Return the side that a `nnx.bridge.ToNNX` wraps: its Linen module with its variables."""
    attributes = {key: value for key, value in vars(module).items() if not key.startswith(("to_nnx__", "_pytree__"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = nnx.bridge.variables.nnx_attrs_to_linen_vars(attributes)
    streams = () if module.to_nnx__rngs is None else tuple(dict(module.to_nnx__rngs.items()))
    return LinenModule(module.to_nnx__module, variables, wanted, streams)
