"""The Flax backend of `attn_bridge`: weights as NumPy arrays, and outputs with every gradient.

The twin is `torch_attn.backend`; `attn_bridge.backends.load` returns either.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jax_attn
from attn_bridge.specs import Config, Variant
from attn_bridge.specs.stock_attention import StockAttention
from attn_bridge.specs.stock_layers import StockLayer
from attn_bridge.weights import LazyArray, Region, everything, slices

Arrays = dict[str, np.ndarray]

WEIGHTS = (nnx.Param, nnx.BatchStat)
"""Kinds of variables that count as weights; random-number and cache state does not."""

_KINDS: dict[type[nnx.Module], str] = {
    nnx.Linear: "linear",
    nnx.Embed: "embedding",
    nnx.LayerNorm: "layer norm",
    nnx.RMSNorm: "RMS norm",
    nnx.GroupNorm: "group norm",
    nnx.BatchNorm: "batch norm",
}
"""Class -> the kind of its layers, as `StockLayer` names it."""

PLACES = "device"
"""The unit in which `held_parts` counts."""


def to_numpy(array: Array) -> np.ndarray:
    """Return an array's elements as a NumPy array, bit for bit; bfloat16 and float8 are `ml_dtypes`.

    Of one that devices share it is all of it.
    """
    return _region(array, everything(array.shape)) if _is_shared(array) else np.asarray(array)


def from_numpy(array: np.ndarray, name: str = "array", *, adopt: bool = False) -> Array:
    """Return a NumPy array as a JAX array, bit for bit, in new memory; `adopt` may keep the array's.

    Raises:
        TypeError: JAX would narrow the dtype, as it does with 64 bits unless ``jax_enable_x64`` is set.
    """
    return _put(array, name, adopt, None)


def _put(array: np.ndarray, name: str, adopt: bool, sharding: object) -> Array:
    """Return a NumPy array as a JAX array on the devices of a sharding, each with its part."""
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=None if adopt else True)
    narrowed = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrowed != array.dtype:
        raise TypeError(f"{name} of dtype {array.dtype} would narrow to {narrowed} in JAX; enable jax_enable_x64 first")
    return jax.device_put(array, sharding)  # `jnp.array` would compile a program per shape


def describe_weights(module: nnx.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype name) of every parameter and batch statistic, reading no data."""
    return {_name(path): (value.shape, value.dtype.name) for path, value in _values(module).items()}


def get_weights(module: nnx.Module) -> Arrays:
    """Return every parameter and batch statistic by name; arrays may share memory with the module."""
    return {_name(path): to_numpy(value) for path, value in _values(module).items()}


def lazy_weights(module: nnx.Module) -> dict[str, LazyArray]:
    """Return the weights of `get_weights` as lazy arrays, read on access from the devices' parts."""
    return {
        _name(path): LazyArray(value.shape, np.dtype(value.dtype), functools.partial(_region, value))
        for path, value in _values(module).items()
    }


def set_weights(module: nnx.Module, arrays: Mapping[str, np.ndarray], *, adopt: bool = False) -> None:
    """Write arrays, of the right names and shapes, into a module; a variable takes its array's dtype.

    Args:
        module: any module; of a sharded array, each device keeps its shard.
        arrays: by name.
        adopt: whether the module may keep the arrays themselves without copying; the caller must not use them
            afterwards.

    Raises:
        TypeError: JAX would narrow a dtype; nothing is written then.
    """
    prepare_weights(module, arrays, adopt=adopt)()


def prepare_weights(
    module: nnx.Module, arrays: Mapping[str, np.ndarray | LazyArray], *, adopt: bool = False
) -> Callable[[], None]:
    """Run the checks of `set_weights`, and return the function that writes; devices read shards of lazy arrays."""
    values = {
        path: _placed(arrays[_name(path)], old, _name(path), adopt)
        for path, old in _values(module).items()
        if _name(path) in arrays
    }
    return functools.partial(nnx.update, module, nnx.from_flat_state(values))


def _placed(array: np.ndarray | LazyArray, old: Array, name: str, adopt: bool) -> Array:
    """Return an array where a module's is, shared as that is."""
    # What is bound to no device stays so: a step compiled for the one would be compiled again for the other.
    sharding = None if isinstance(old, Array) and not old.committed else getattr(old, "sharding", None)
    if not isinstance(array, LazyArray):
        return _put(array, name, adopt, sharding)
    if sharding is None:
        return from_numpy(array.read(everything(array.shape)), name, adopt=True)
    from_numpy(np.empty(0, array.dtype), name)
    parts: dict[Region, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        region = tuple(one.indices(size)[:2] for one, size in zip(index, array.shape, strict=True))
        if region in parts:
            return parts[region].copy()  # a device may keep the memory that it is given
        parts[region] = array.read(region)
        return parts[region]

    return jax.make_array_from_callback(array.shape, sharding, part, dtype=array.dtype)


def shared_names(module: nnx.Module) -> set[str]:
    """Return the names of the weights that devices share."""
    return {_name(path) for path, value in _values(module).items() if _is_shared(value)}


def together(module: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Return the context that every process leaves when all do; here there is one."""
    del module
    return contextlib.nullcontext()


@contextlib.contextmanager
def reading(module: nnx.Module) -> Iterator[Callable[[str, Region], np.ndarray] | None]:
    """Yield a function that reads a region of a weight by name, from the devices that hold some of it.

    Raises:
        ValueError: devices of other processes hold some of a weight.
    """
    arrays = {_name(path): value for path, value in _values(module).items()}
    for name, array in arrays.items():
        if isinstance(array, Array) and not array.is_fully_addressable:
            raise ValueError(f"{name} lies on devices of several processes; gather it in one first")
    yield lambda name, region: _region(arrays[name], region)


Part = tuple[int, Region, Callable[[Region], np.ndarray], int]
"""A place, the region of a weight that it holds, what reads a region of that, and bytes of an element."""


def held_parts(module: nnx.Module) -> dict[str, list[Part]]:
    """Return name -> its parts on each device of this process, if devices share it."""
    parts: dict[str, list[Part]] = {}
    for name, array in {_name(path): value for path, value in _values(module).items()}.items():
        for shard in array.addressable_shards if _is_shared(array) else ():
            region = tuple(one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True))
            read = functools.partial(_part, shard.data)
            parts.setdefault(name, []).append((shard.device.id, region, read, array.dtype.itemsize))
    return parts


def _part(part: Array, region: Region) -> np.ndarray:
    # On an accelerator, a slice is copied to the host, and nothing is kept beside the array itself.
    is_on_cpu = next(iter(part.devices())).platform == "cpu"
    return np.asarray(part)[slices(region)] if is_on_cpu else np.asarray(part[slices(region)])


def gathered(module: nnx.Module, value: object) -> list[object]:
    """Gather a value from every process that shares a module, on all of them; in JAX that is this process alone."""
    del module
    return [value]


def _is_shared(value: object) -> bool:
    sharding = getattr(value, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1


def _region(array: Array, region: Region) -> np.ndarray:
    """Return a region of an array, assembled from the devices' parts; JAX would cache a host copy of all of it."""
    if not _is_shared(array):
        return np.array(np.asarray(array)[slices(region)], order="C")
    array_of_region = np.empty([stop - start for start, stop in region], array.dtype)
    seen: set[Region] = set()
    for shard in array.addressable_shards:
        own = tuple(one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True))
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, region, strict=True))
        if own in seen or any(start >= stop for start, stop in common):
            continue
        seen.add(own)
        target, source = (
            tuple((start - first, stop - first) for (start, stop), (first, _) in zip(common, one, strict=True))
            for one in (own, region)
        )
        # On an accelerator, JAX keeps beside an array what it was once copied to the host as.
        data = shard.data if shard.device.platform == "cpu" else shard.data.copy()
        array_of_region[slices(source)] = np.asarray(data)[slices(target)]
    return array_of_region


def find_configs(module: nnx.Module) -> dict[str, Config]:
    """Return path -> config of our outermost modules inside `module` ("" is the module itself)."""
    configs: dict[str, Config] = {}
    for path, child in sorted(
        ((_name(path), child) for path, child in nnx.iter_modules(module)), key=lambda item: item[0]
    ):
        config = getattr(child, "config", None)
        inside = any(path.startswith(f"{outer}.") or not outer for outer in configs)
        if isinstance(config, Config) and not inside:
            configs[path] = config
    return configs


def find_stock_attention(module: nnx.Module) -> dict[str, StockAttention]:
    """Return path -> description of Flax's own attention layers inside `module`, and of our drop-ins for them."""
    return {
        _name(path): StockAttention(
            num_heads=child.num_heads,
            num_kv_heads=getattr(child, "num_kv_heads", child.num_heads),
            bias=child.use_bias,
            normalize_qk=child.normalize_qk,
        )
        for path, child in nnx.iter_modules(module)
        if isinstance(child, nnx.MultiHeadAttention)
    }


def find_stock_layers(module: nnx.Module) -> dict[str, StockLayer]:
    """Return path -> description of Flax's own layers inside `module` that the other framework has as well."""
    return {
        _name(path): StockLayer(kind, getattr(child, "num_groups", 0), getattr(child, "epsilon", None))
        for path, child in nnx.iter_modules(module)
        if (kind := _kind_of(child))
    }


def module_classes(module: nnx.Module) -> dict[str, str]:
    """Return path -> name of the class of `module` ("") and of every module inside it."""
    return {_name(path): type(child).__name__ for path, child in nnx.iter_modules(module)}


def _kind_of(layer: nnx.Module) -> str:
    """Return the kind of a stock layer as `StockLayer` names it, or ""."""
    if isinstance(layer, nnx.Conv):
        return f"{len(layer.kernel_size)}d convolution"
    return next((kind for base, kind in _KINDS.items() if isinstance(layer, base)), "")


def build(variant: Variant, arguments: Mapping[str, object], dtype: str) -> nnx.Module:
    """Return the twin of a variant, in eval mode, with zeros of `dtype` for parameters; a function becomes a module."""
    if variant.is_function:
        return _FunctionModule(variant.name)
    return _blanked(variant.name, dtype, **arguments)


def build_blank(name: str, config: Config, dtype: str) -> nnx.Module:
    """Return a module of ours in eval mode whose parameters have memory, but no numbers yet; nothing is drawn.

    Raises:
        TypeError: JAX would narrow the dtype.
    """
    from_numpy(np.empty(0, jnp.dtype(dtype)), name)
    return _blanked(name, dtype, config=config)


def call(function: Callable[[Array], Array], array: np.ndarray) -> np.ndarray:
    """Apply a module or method of ours to one array."""
    return to_numpy(function(from_numpy(array)))


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Hold the context in which arrays of `dtype` may be made and used, and float32 products are really float32."""
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        yield


def few_threads() -> contextlib.AbstractContextManager[None]:
    """Return the context for small work; JAX needs none."""
    return contextlib.nullcontext()


class _FunctionModule(nnx.Module):
    """A function of the package as a module without parameters."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, **arguments: object) -> object:
        return getattr(jax_attn, self.name)(**arguments)


def _blanked(name: str, dtype: str, /, **arguments: object) -> nnx.Module:
    # Drawing initial weights would compile one program per shape, only for them to be replaced.
    module: nnx.Module = nnx.eval_shape(
        lambda: getattr(jax_attn, name)(**arguments, rngs=_UnseenRngs(0), param_dtype=jnp.dtype(dtype))
    )
    nnx.update(module, jax.tree.map(_blank, nnx.state(module)))
    module.eval()
    return module


class _UnseenRngs(nnx.Rngs):
    """Equal keys for numbers that are overwritten unseen: counting keys takes longer than the rest of building."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.default = _UnseenStream(seed, tag="default")


class _UnseenStream(nnx.RngStream):
    def __call__(self) -> Array:
        return self.key[...]

    def fork(self, **options: object) -> nnx.RngStream:
        """Return a stream that counts, for a module to keep."""
        return nnx.RngStream(self(), tag=self.tag)


def _blank(leaf: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype))


def _values(module: nnx.Module) -> dict[tuple[str | int, ...], Array]:
    if not isinstance(module, (nnx.Module, nnx.Pytree)):
        raise TypeError(f"module must be a flax.nnx.Module, got {type(module).__name__}")
    state = nnx.state(module, WEIGHTS)
    return {path: _value(leaf) for path, leaf in nnx.to_flat_state(state)}


def _value(leaf: object) -> Array:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _name(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
