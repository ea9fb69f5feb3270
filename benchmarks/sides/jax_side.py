"""The contenders in JAX and Flax NNX, and how JAX is timed. The twin is `benchmarks.sides.torch_side`."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax import Array

import jax_attn
from attn_bridge.masks import causal

from ..measuring.cells import LINEARS, Group
from .contender import Contender, Work
from .peers_jax import PlainMultiHeadAttention

STOCK = {"attention": "jax.nn", "modules": "flax.nnx.MultiHeadAttention"}
"""The layers of JAX and Flax themselves, by subject."""

_STOCK_NAMES = {"W_query": "query", "W_key": "key", "W_value": "value", "out_proj": "out"}


Result = TypeVar("Result")


def describe() -> dict[str, object]:
    """Return the versions and the device."""
    device = jax.devices()[0]
    facts = {
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "flax": flax.__version__},
        "device": "cpu" if device.platform == "cpu" else device.device_kind,
    }
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return facts | ({"device": f"{device.device_kind}, {limit / 2**30:.0f} GiB"} if limit else {})


def start(group: Group) -> None:
    """Clear compilation caches; compute float32 products in float32, as on the other side."""
    jax.clear_caches()
    jax.config.update("jax_default_matmul_precision", "highest" if group.dtype == "float32" else None)


def contenders(group: Group, modes: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Return the contenders of a group in the modes, and a line for each of ours that can't compute it.

    Eager JAX is measured where it is used: a module that is called forward, as in a notebook.
    """
    rows, notes = (_attention if group.subject == "attention" else _modules)(group)
    if group.subject == "attention" or group.backward:
        modes = [mode for mode in modes if mode != "eager"]
    all_contenders = [
        Contender(name, kind, mode, functools.partial(build, group, mode), **options)
        for name, kind, build, options in rows
        for mode in modes
    ]
    return all_contenders, notes


def elapsed(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds per call, from the first call's start until all results are ready."""
    start_time = time.perf_counter()
    on_cpu = jax.default_backend() == "cpu"  # where a second call would run beside the first one
    for _ in range(repeats):
        result = call()
        if on_cpu:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start_time) / repeats


def wait(result: Result) -> Result:
    """Return a result once it is ready."""
    return jax.block_until_ready(result)


def matmul(size: int, dtype: str) -> Callable[[], object]:
    """Return the product of two square matrices, to call."""
    left, right = (jax.random.normal(jax.random.key(seed), (size, size), jnp.dtype(dtype)) for seed in range(2))
    return functools.partial(jax.jit(jnp.matmul), left, right)


def device_peak(work: Work) -> int | None:
    """Return the bytes that a call takes on a device in addition to those in use before; None on a CPU.

    JAX's allocator keeps one peak per process. If compiling exceeded the peak of the call, the result is the compiler's
    own sum of output and temporary memory.
    """
    device = jax.devices()[0]
    if device.platform == "cpu" or not device.memory_stats():
        return None
    compiled = work.compile() if work.compile else None
    before = device.memory_stats()
    wait(work.call())
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak > before["peak_bytes_in_use"] or compiled is None:
        return int(peak - before["bytes_in_use"])
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


_Row = tuple[str, str, Callable[[Group, str], Work], dict[str, object]]


def _attention(group: Group) -> tuple[list[_Row], list[str]]:
    arrays = [jnp.asarray(array) for name, array in group.inputs().items() if name != "cotangent"]
    reasons = jax_attn.functional.explain(*arrays, mask=causal())
    rows: list[_Row] = []
    for name, reason in reasons.items():
        if reason is None:
            picked = not rows
            attend = functools.partial(_attend, implementation=None if picked else name)
            build = functools.partial(_function, attend=attend)
            rows.append((f"ours: {name}", "ours", build, {"picked": picked, "square": name == "reference"}))
    build = functools.partial(_function, attend=functools.partial(jax.nn.dot_product_attention, is_causal=True))
    rows.append((STOCK["attention"], "stock", build, {"square": True}))
    if jax.default_backend() == "gpu" and group.dtype != "float32":
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        rows.append(("jax.nn: cudnn", "peer", functools.partial(_function, attend=attend), {}))
    return rows, [f"jax ours: {name} left out: {reason}" for name, reason in reasons.items() if reason]


def _attend(query: Array, key: Array, value: Array, implementation: str | None) -> Array:
    return jax_attn.functional.dot_product_attention(query, key, value, mask=causal(), implementation=implementation)


def _function(group: Group, mode: str, attend: Callable[..., Array]) -> Work:
    del mode
    inputs = {name: jnp.asarray(array) for name, array in group.inputs().items()}
    names = ("query", "key", "value")
    arguments = [inputs[name] for name in names]

    def read(result: tuple[Array, Sequence[Array]]) -> dict[str, np.ndarray]:
        output, grads = result
        arrays = {"output": _array(output)}
        return arrays | {f"grad {name}": _array(grad) for name, grad in zip(names, grads, strict=False)}

    function = _both(attend) if group.backward else _forward(attend)
    return _jitted(function, read, inputs["cotangent"], *arguments)


def _modules(group: Group) -> tuple[list[_Row], list[str]]:
    del group
    return [
        ("ours", "ours", _ours, {"picked": True}),
        ("book", "peer", _book, {"square": True}),
        (STOCK["modules"], "stock", _stock, {"square": True}),
    ], []


def _ours(group: Group, mode: str) -> Work:
    cell = group.cell
    module = jax_attn.MultiHeadAttention(
        cell.width, cell.width, cell.tokens, 0.0, cell.heads, True, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(group.dtype)
    )
    return _module(module, {name: name for name in LINEARS}, group, mode)


def _book(group: Group, mode: str) -> Work:
    cell = group.cell
    module = PlainMultiHeadAttention(cell.width, cell.width, cell.tokens, cell.heads, rngs=nnx.Rngs(0))
    return _module(module, {name: name for name in LINEARS}, group, mode)


def _stock(group: Group, mode: str) -> Work:
    cell = group.cell
    module = nnx.MultiHeadAttention(
        cell.heads, cell.width, decode=False, param_dtype=jnp.dtype(group.dtype), rngs=nnx.Rngs(0)
    )
    if "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters:
        return _module(module, _STOCK_NAMES, group, mode, is_causal=True)
    mask = nnx.make_causal_mask(jnp.ones((1, cell.tokens)))
    return _module(module, _STOCK_NAMES, group, mode, mask=mask)


def _module(module: nnx.Module, names: dict[str, str], group: Group, mode: str, **options: object) -> Work:
    """Load the weights into the four linear layers of a module, called `names` there."""
    inputs = group.inputs()
    module.eval()
    shapes = {}
    for name, attribute in names.items():
        layer = getattr(module, attribute)
        for ours, theirs in (("weight", "kernel"), ("bias", "bias")):
            array = inputs[f"{name}.{ours}"]
            shapes[name, ours] = array.shape
            setattr(layer, theirs, nnx.Param(jnp.asarray(array.reshape(getattr(layer, theirs).shape))))
    graph, state = nnx.split(module)
    x, cotangent = jnp.asarray(inputs["x"]), jnp.asarray(inputs["cotangent"])

    def apply(state: nnx.State, x: Array) -> Array:
        return nnx.merge(graph, state)(x, **options)

    def read(result: tuple[Array, Sequence[Array]]) -> dict[str, np.ndarray]:
        output, grads = result
        arrays = {"output": _array(output)}
        if grads:
            arrays["grad x"] = _array(grads[1])
            by_name = nnx.to_pure_dict(grads[0])
            for (name, ours), shape in shapes.items():
                grad = by_name[names[name]]["kernel" if ours == "weight" else "bias"]
                arrays[f"grad {name}.{ours}"] = _array(grad).reshape(shape)
        return arrays

    if mode == "eager":
        return Work(lambda: (module(x, **options), ()), read)
    return _jitted(_both(apply) if group.backward else _forward(apply), read, cotangent, state, x)


def _forward(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda cotangent, *arguments: (function(*arguments), ())


def _both(function: Callable[..., Array]) -> Callable[..., object]:
    def run(cotangent: Array, *arguments: Array) -> object:
        output, pull = jax.vjp(function, *arguments)
        return output, pull(cotangent)

    return run


def _jitted(function: Callable[..., object], read: Callable[[Any], dict[str, np.ndarray]], *arguments: Array) -> Work:
    jitted = jax.jit(function)
    return Work(functools.partial(jitted, *arguments), read, lambda: jitted.lower(*arguments).compile())


def _array(array: Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
