"""The settings of JAX that decide how its numbers are rounded, and how to hold them at the safe value.

`attn_parity.settings.precision` joins the two.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from ...settings.precision import Switch

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
"""Packages that bring JAX its devices."""


def _reader(name: str) -> Callable[[], object]:
    return lambda: getattr(jax.config, f"jax_{name}")


def _everywhere(name: str) -> object:
    """Return the value for the process, which a context of this thread hides here."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(_reader(name)).result()


def _holder(name: str) -> Callable[[object], AbstractContextManager[None]]:
    """Return a context manager that sets a value, for the process and for a context of this thread."""

    @contextlib.contextmanager
    def hold(value: object) -> Iterator[None]:
        context: Callable[[Any], AbstractContextManager[None]] = getattr(jax, name, contextlib.nullcontext)
        former = _everywhere(name)
        jax.config.update(f"jax_{name}", value)
        try:
            with context(value):
                yield
        finally:
            jax.config.update(f"jax_{name}", former)

    return hold


def _config(name: str, meaning: str, safe: object, **others: Any) -> Switch:
    return Switch(
        name=name,
        meaning=meaning,
        safe=safe,
        read=_reader(name),
        hold=_holder(name),
        by_hand=f"jax.config.update('jax_{name}', {safe!r})",
        **others,
    )


def _remark(name: str, meaning: str, safe: object = None, **others: Any) -> Switch:
    """Return a setting that `strict` leaves alone: it chooses the computation or a way of debugging."""
    by_hand = "" if safe is None else f"jax.config.update('jax_{name}', {safe!r})"
    return Switch(name=name, meaning=meaning, safe=safe, read=_reader(name), by_hand=by_hand, fails=False, **others)


def _xla_flags() -> dict[str, str]:
    """Return the flags in XLA_FLAGS, which names a file of flags unless it starts with a dash."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        path = Path(text)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    pairs = (flag.lstrip("-").partition("=") for flag in shlex.split(text))
    return {name: {"": "true", "1": "true", "0": "false"}.get(value, value.lower()) for name, _, value in pairs}


def _xla(name: str, meaning: str, safe: str, default: str, devices: tuple[str, ...], **others: Any) -> Switch:
    return Switch(
        name=name,
        meaning=meaning,
        safe=safe,
        read=lambda: _xla_flags().get(name, default),
        by_hand=f"add --{name}={safe} to XLA_FLAGS before Python starts",
        devices=devices,
        **others,
    )


SWITCHES: tuple[Switch, ...] = (
    _config(
        "default_matmul_precision",
        "what float32 products and convolutions may be rounded to inside; None is TF32 on a GPU, bfloat16 on a TPU",
        "highest",
        accepted=("float32", "F32_F32_F32", "F64_F64_F64"),
        devices=("gpu", "tpu"),
        key=True,
    ),
    _config("threefry_partitionable", "which random numbers a key gives", True),
    _config("default_prng_impl", "which random numbers a seed gives", "threefry2x32"),
    _config("random_seed_offset", "added to every seed", 0),
    _xla(
        "xla_allow_excess_precision",
        "jit may leave out roundings to 16 bits, so its numbers are not those of eager runs",
        safe="false",
        default="true",
        devices=("cpu", "gpu", "tpu"),
        fails=False,
        key=True,
    ),
    _xla(
        "xla_cpu_enable_fast_math",
        "XLA may reorder float arithmetic and ignore NaNs",
        safe="false",
        default="false",
        devices=("cpu",),
    ),
    _xla(
        "xla_gpu_deterministic_ops",
        "some operations sum in a different order in every run",
        safe="true",
        default="false",
        devices=("gpu",),
        fails=False,
    ),
    Switch(
        name="NVIDIA_TF32_OVERRIDE",
        meaning="0 keeps the libraries of NVIDIA from TF32, in torch, too",
        safe=None,
        read=lambda: os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
    ),
    _remark("enable_x64", "without it float64 arrays become float32; with it new arrays are float64", key=True),
    _remark("softmax_custom_jvp", "another formula for the gradient of softmax, as exact"),
    _remark("numpy_dtype_promotion", "strict raises where dtypes mix"),
    _remark("default_device", "where new arrays go; None is the first device"),
    _remark("disable_jit", "jitted functions run operation by operation", safe=False),
    _remark("debug_nans", "raises where a NaN appears", safe=False),
)
"""Every setting."""


def kinds() -> set[str]:
    """Return the kinds of devices that JAX can use here: ``cpu``, ``gpu``, ``tpu``; it starts them."""
    local = jax.local_devices()
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the processor out
        local = [*local, *jax.local_devices(backend="cpu")]
    return {{"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform) for device in local}


def devices() -> list[str]:
    """Return one line per device that JAX can use here; it starts them."""
    local = [(device.platform, device.id, device.device_kind) for device in jax.local_devices()]
    return [f"{platform}:{index}" + (f", {kind}" if kind != platform else "") for platform, index, kind in local]


def versions() -> dict[str, str]:
    """Return the versions of JAX, jaxlib, the accelerator plugins and Flax."""
    built = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "flax": flax.__version__}
    for plugin in PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            built[plugin] = importlib.metadata.version(plugin)
    return built


def product(left: np.ndarray, right: np.ndarray, kind: str) -> np.ndarray:
    """Return a matrix product of a kind of device, in float64."""
    device = jax.local_devices(backend=kind)[0]
    return np.asarray(jnp.matmul(jax.device_put(left, device), jax.device_put(right, device)), np.float64)


def compiled_error() -> float:
    """Return the relative error of a compiled Jacobian of RMS norm on the first device: 1e-7 where XLA is right.

    Its sums of products share a factor along their first axis; XLA of JAX 0.10.2 adds them wrongly on CPUs (jax#39103).
    """
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16), dtype=np.float32))

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))

    compiled, right = np.asarray(jax.jit(jax.jacrev(norm))(x)), np.asarray(jax.jacfwd(norm)(x))
    return float(np.abs(compiled - right).max() / np.abs(right).max())
