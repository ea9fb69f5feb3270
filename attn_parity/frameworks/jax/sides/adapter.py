"""The interface of each kind of JAX side for `JaxSubject`: weights by dotted name, submodules, and how to call it.

`nnx_module`, `linen_module` and `function` are the three adapters.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike

from ....sides.dropout_masks import MaskPlan, Masks
from ....sides.modes import names_in
from ....sides.shards import ShardCut, Shares, differing_copies
from ....sides.subject import Arguments, Arrays, ModuleFailedError, SideWeight, Submodule
from ..recording import Tape


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a part is called.

    Attributes:
        dtype: precision of the whole run; None leaves every dtype as given.
        seed: of the random numbers that the part may draw.
        train: whether it runs in train mode.
        source: of the dropout masks, in train mode.
        tape: what records the calls of the submodules; None records nothing.
    """

    dtype: str | None = None
    seed: int = 0
    train: bool = False
    source: Masks | MaskPlan | None = None
    tape: Tape | None = None


class JaxPart(Protocol):
    """The whole module or function, or a submodule alone.

    Attributes:
        names: of the weights in it.
        trainable: those that get gradients.
        changed: names that calls changed, other than weights, running statistics and random state.
    """

    names: set[str]
    trainable: set[str]
    changed: set[str]

    def call(self, weights: Mapping[str, ArrayLike], arguments: Arguments, setting: Setting) -> object:
        """Call the part with these weights; the weights that it holds stay unchanged."""


class Adapter(abc.ABC):
    """One kind of a side; methods with a body fit a side without submodules, modes and state."""

    kind: str
    name: str
    home: Home

    @property
    def label(self) -> str:
        """Name of the side in messages."""
        return f"Flax module {self.name}"

    @abc.abstractmethod
    def signature(self) -> dict[str, bool]:
        """Return argument name -> whether it can be given by position."""

    @abc.abstractmethod
    def called(self, method: object) -> Callable[..., object]:
        """Return the callable to run: the side itself, or its method that the argument `method` names."""

    @abc.abstractmethod
    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""

    def state(self) -> dict[str, SideWeight]:
        """Return the other named numbers: variables of other kinds, leaves of other collections."""
        return {}

    def carry(self, names: Collection[str]) -> None:  # noqa: B027 - without state there is nothing to do
        """Count the state of these names, and no other, among the parameters."""

    @abc.abstractmethod
    def weights(self) -> Arrays:
        """Return copies of the weights that it holds."""

    def tied(self) -> dict[str, str]:
        """Return further name of a weight -> the name that it has in `parameters`."""
        return {}

    @abc.abstractmethod
    def modules(self) -> list[Submodule]:
        """Return the submodules, the whole first."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""

    def switched_off(self) -> list[str]:
        """Describe the behaviour that is off in eval mode."""
        return []

    def caches(self) -> list[str]:
        """Describe the caches that are off."""
        return []

    @abc.abstractmethod
    def part(self, path: str) -> JaxPart:
        """Return the submodule at a dotted path; "" is the whole."""

    def complaint(self, arguments: Arguments) -> str:
        """Return the fault in the side's weights that explains a failed call; "" without one."""
        return ""

    def culprit(self, error: Exception) -> str:
        """Describe the submodule that raised an error, and its arguments; "" if unknown."""
        return ""


def constant(value: Any, dtype: str | None, seed: int) -> Any:
    """Return a value other than a weight, with its floats in `dtype` and its random keys folded with the seed."""
    kind = getattr(value, "dtype", None)
    if kind is None:
        return value
    if jnp.issubdtype(kind, jax.dtypes.prng_key):
        return jax.random.fold_in(value, seed) if seed and value.ndim == 0 else value
    if dtype is not None and jnp.issubdtype(kind, jnp.floating):
        return jnp.asarray(np.asarray(value).astype(jnp.dtype(dtype)))
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a setting is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def stock_name(module: object) -> str:
    """Return the class of a module, or the framework's own class that it is derived from."""
    own = [kind for kind in type(module).__mro__ if kind.__module__.startswith(("flax.nnx.", "flax.linen."))]
    return next((kind.__name__ for kind in own if kind.__name__ not in ("Module", "ModuleBase")), type(module).__name__)


def is_numeric(value: object) -> bool:
    """Return whether a value is an array of numbers or bools; arrays of random keys are not."""
    kind = getattr(value, "dtype", None)
    return kind is not None and hasattr(value, "shape") and not jnp.issubdtype(kind, jax.dtypes.extended)


def is_jax_float(array: Array | np.ndarray) -> bool:
    """Return whether an array holds floating-point numbers."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def off_in_eval_mode(path: str, child: object, *, averages: bool) -> list[str]:
    """Describe the behaviour that a submodule omits in eval mode; `averages`: whether it uses running statistics."""
    name = path or type(child).__name__
    rate = next((getattr(child, key) for key in ("rate", "dropout_rate") if _is_rate(child, key)), 0.0)
    if rate:
        return [f"dropout of {name} ({rate:g}): off in eval mode"]
    return [f"statistics of {name}: those of a batch are for train mode"] if averages else []


_MODES = frozenset({"deterministic", "use_running_average", "training"})
"""Attributes of modules that hold the mode."""


def asks_for_mode(path: str, module: object) -> list[str]:
    """Return a message if the code of a module's class, other than Flax's own, asks for its mode; else nothing."""
    own = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("flax."))
    methods = (value for kind in own for name, value in vars(kind).items() if name != "__init__")
    codes = (code for value in methods if (code := getattr(value, "__code__", None)) is not None)
    asks = any(_MODES & names_in(code) for code in codes)
    return [f"train mode of {path or type(module).__name__}: its code asks which mode it is in"] if asks else []


def cache_off(path: str, child: object) -> list[str]:
    """Return a message if a submodule has a cache that is off; else nothing."""
    off = getattr(child, "decode", None) is False
    return [f"cache of {path or type(child).__name__}: decode is off"] if off else []


def _is_rate(child: object, name: str) -> bool:
    value = getattr(child, name, None)
    return is_number(value) and 0.0 < value <= 1.0


@dataclasses.dataclass(frozen=True)
class Home:
    """Where the operands of a run are put.

    Attributes:
        device: the device of all that is not shared; None leaves it to JAX, which takes it where the rest is.
        shardings: name of a weight that several devices share -> how.
    """

    device: jax.Device | None
    shardings: Mapping[str, Sharding]

    def __str__(self) -> str:
        """Return the device, or how many share the weights."""
        devices = max((len(one.device_set) for one in self.shardings.values()), default=1)
        return f"{devices} devices" if devices > 1 else str(self.device)

    def put(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return weights and whatever else a run takes, put in place."""
        weights, *rest = operands
        placed = {name: jax.device_put(one, self.shardings.get(name, self.device)) for name, one in weights.items()}
        return (placed, *jax.device_put(rest, self.device))


def home_of(weights: Mapping[str, object], wanted: str | None) -> Home:
    """Return the location of the weights; weights on a single device move to the requested device.

    Raises:
        ModuleFailedError: JAX does not find the device.
    """
    arrays = {name: one for name, one in weights.items() if isinstance(one, Array)}
    shared = {name: one.sharding for name, one in arrays.items() if len(one.sharding.device_set) > 1}
    if wanted is None:
        leaf = next(iter(arrays.values()), None)
        device = jax.devices()[0] if leaf is None else next(iter(leaf.devices()))
        return Home(None if shared else device, shared)
    try:
        return Home(None if shared else jax.devices(wanted)[0], shared)
    except RuntimeError:
        raise ModuleFailedError(f"device {wanted}: JAX finds none on this machine") from None


def dotted(path: Iterable[object]) -> str:
    """Return a path as a dotted name."""
    return ".".join(map(str, path))


def shares_of(
    outputs: Sequence[Array | np.ndarray],
    places: Sequence[str],
    gradients: Mapping[str, Array | np.ndarray],
    shardings: Mapping[str, Sharding],
) -> Shares:
    """Return how devices share the results of a run.

    Args:
        outputs: the returned arrays.
        places: path of each in the return value; empty if nothing was traced.
        gradients: of the weights, by name.
        shardings: of the weights that devices share.
    """
    cuts = {name: cut_of(one, gradients[name].ndim) for name, one in shardings.items() if name in gradients}
    named = {f"output{place}": one for place, one in zip(places, outputs, strict=False)}
    named |= {f"grad {name}": one for name, one in gradients.items()}
    apart = [f"{name}: {line}" for name, one in named.items() if (line := _apart(one))]
    return Shares(
        tuple(cut_of(getattr(one, "sharding", None), np.ndim(one)) for one in outputs),
        {name: cut for name, cut in cuts.items() if cut.is_cut},
        tuple(apart),
    )


def cut_of(sharding: object, ndim: int) -> ShardCut:
    """Return how an array of a sharding is cut; uncut if its axes have no names."""
    if not isinstance(sharding, NamedSharding):
        return ShardCut(((),) * ndim)
    sizes = dict(sharding.mesh.shape)
    spec = (*sharding.spec, *(None,) * ndim)[:ndim]
    named = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
    return ShardCut(tuple(tuple((name, sizes[name]) for name in names) for names in named))


def _apart(array: object) -> str:
    """Name the first device whose copy of a part differs from another copy of it; "" if none does."""
    if not isinstance(array, Array) or len(array.sharding.device_set) < 2:
        return ""
    copies_of: dict[str, list[tuple[str, np.ndarray]]] = {}
    for shard in array.addressable_shards:
        copies_of.setdefault(str(shard.index), []).append((f"device {shard.device.id}", np.asarray(shard.data)))
    lines = (differing_copies(copies) for copies in copies_of.values() if len(copies) > 1)
    return next((line for line in lines if line), "")
