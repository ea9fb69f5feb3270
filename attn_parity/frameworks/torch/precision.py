"""The settings of torch that decide how its numbers are rounded, and how to hold them at the safe value.

`attn_parity.settings.precision` joins the two.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import torch

from ...settings.precision import Switch

Value = TypeVar("Value")
"""The type of a setting."""

MIXED = "decided by fp32_precision"
"""Value of float32_matmul_precision where torch refuses to read it, because the newer settings were used."""


def _holder(
    read: Callable[[], Value], write: Callable[[Value], object], read_own: Callable[[], Value] | None = None
) -> Callable[[Value], AbstractContextManager[None]]:
    """Return a context manager that sets a value if it differs, and restores the one that `read_own` gave before."""
    read_own = read_own or read

    @contextlib.contextmanager
    def hold(value: Value) -> Iterator[None]:
        former = read_own()
        if read() != value:
            write(value)
        try:
            yield
        finally:
            if read_own() != former:
                write(former)

    return hold


def _environment(name: str) -> Callable[[], str]:
    return lambda: os.environ.get(name, "")


# ---- fp32_precision: one for all, one per backend, one per operation; each inherits from the one above it
#
# Setting torch.backends.mkldnn.fp32_precision writes the one for all (torch 2.10 to 2.13), hence the functions of _C.


def _get_fp32(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set_fp32(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)


def _own_fp32(backend: str, operation: str) -> str:
    """Return the operation's own setting, without inherited ones."""
    above = [pair for pair in (("generic", "all"), (backend, "all")) if pair != (backend, operation)]
    former = []
    try:
        for pair in above:
            former.append((*pair, _get_fp32(*pair)))
            _set_fp32(*pair, "none")
        return _get_fp32(backend, operation)
    finally:
        for setting in reversed(former):
            _set_fp32(*setting)


def _fp32(
    name: str, backend: str, operation: str, devices: tuple[str, ...], by_hand: str = "", key: bool = False
) -> Switch:
    read = functools.partial(_get_fp32, backend, operation)
    read_own = functools.partial(_own_fp32, backend, operation)
    return Switch(
        name=name,
        meaning="what float32 products and convolutions may be rounded to inside",
        safe="ieee",
        accepted=("none",),
        read=read,
        # What is inherited is left alone: nothing can be written that would make it inherit again in every version.
        hold=_holder(read, functools.partial(_set_fp32, backend, operation), read_own),
        by_hand=by_hand or f"torch.backends.{name} = 'ieee'",
        devices=devices,
        key=key,
    )


def _read_matmul() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return MIXED


@contextlib.contextmanager
def _hold_matmul(value: str) -> Iterator[None]:
    # Writing it writes two of the newer settings, too, and it can be read only while they do not contradict it.
    newer = [("cuda", "matmul"), ("mkldnn", "matmul")]
    former = [_own_fp32(*pair) for pair in newer]
    try:
        for pair in newer:
            _set_fp32(*pair, "ieee")
        with _holder(_read_matmul, lambda value: torch.set_float32_matmul_precision(value))(value):
            yield
    finally:
        for pair, setting in zip(newer, former, strict=True):
            if _own_fp32(*pair) != setting:
                _set_fp32(*pair, setting)


# ---- the others


def _reduction(dtype: str) -> Switch:
    name = f"allow_{dtype}_reduced_precision_reduction"
    products = torch.backends.cuda.matmul

    def read() -> bool:
        return bool(getattr(products, name))

    @contextlib.contextmanager
    def hold(value: bool) -> Iterator[None]:
        # The two are written as one; split_k may be False only where reduced precision is, too.
        former, split_k = read(), getattr(products, f"{name}_split_k")
        setattr(products, name, (value, split_k or value))
        try:
            yield
        finally:
            setattr(products, name, (former, split_k))

    return Switch(
        name=f"cuda.matmul.{name}",
        meaning=f"{dtype} products may add partial sums in {dtype}",
        safe=False,
        read=read,
        hold=hold,
        by_hand=f"torch.backends.cuda.matmul.{name} = False",
        devices=("gpu",),
    )


def _attribute(path: str, meaning: str, safe: bool, fails: bool) -> Switch:
    owner_path, _, name = path.rpartition(".")
    owner = operator.attrgetter(owner_path)(torch.backends)

    def read() -> bool:
        return bool(getattr(owner, name))

    return Switch(
        name=path,
        meaning=meaning,
        safe=safe,
        read=read,
        hold=_holder(read, lambda value: setattr(owner, name, value)),
        by_hand=f"torch.backends.{path} = {safe}",
        devices=("gpu",),
        fails=fails,
    )


def _autocast(device: str, kind: str) -> Switch:
    def read() -> bool:
        return torch.is_autocast_enabled(device)

    return Switch(
        name=f"autocast({device!r})",
        meaning="products of float32 tensors run in a lower precision",
        safe=False,
        read=read,
        hold=_holder(read, lambda value: torch.set_autocast_enabled(device, value)),
        by_hand=f"leave torch.autocast({device!r})",
        devices=(kind,),
    )


_KERNELS = ("flash", "mem_efficient", "cudnn", "math")


def _kernels() -> str:
    """Return the kernels that scaled_dot_product_attention may choose from."""
    enabled = [name for name in _KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    return "any" if len(enabled) == len(_KERNELS) else ", ".join(enabled)


def _enable_kernels(names: str) -> None:
    for name in _KERNELS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(names == "any" or name in names.split(", "))


def _flushes_denormals() -> bool:
    # The mode is that of the processor in this thread, so Python's own numbers show it.
    return sys.float_info.min / 2 == 0.0


SWITCHES: tuple[Switch, ...] = (
    # In this order each is read when those above it are safe already.
    _fp32("fp32_precision", "generic", "all", ("cpu", "gpu")),
    _fp32("cudnn.fp32_precision", "cuda", "all", ("gpu",)),
    _fp32(
        "mkldnn.fp32_precision",
        "mkldnn",
        "all",
        ("cpu",),
        by_hand="torch.backends.mkldnn.set_flags(_fp32_precision='ieee')",
    ),
    _fp32("cuda.matmul.fp32_precision", "cuda", "matmul", ("gpu",), key=True),
    _fp32("cudnn.conv.fp32_precision", "cuda", "conv", ("gpu",), key=True),
    _fp32("cudnn.rnn.fp32_precision", "cuda", "rnn", ("gpu",)),
    _fp32("mkldnn.matmul.fp32_precision", "mkldnn", "matmul", ("cpu",), key=True),
    _fp32("mkldnn.conv.fp32_precision", "mkldnn", "conv", ("cpu",)),
    _fp32("mkldnn.rnn.fp32_precision", "mkldnn", "rnn", ("cpu",)),
    Switch(
        name="float32_matmul_precision",
        meaning="the older name of both matmul.fp32_precision; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets it to high",
        safe="highest",
        accepted=(MIXED,),
        read=_read_matmul,
        hold=_hold_matmul,
        by_hand="torch.set_float32_matmul_precision('highest')",
        devices=("cpu", "gpu"),
        key=True,
    ),
    _reduction("bf16"),
    _reduction("fp16"),
    _attribute(
        "cuda.matmul.allow_fp16_accumulation",
        "float16 products are summed in float16",
        safe=False,
        fails=True,
    ),
    Switch(
        name="cuda.fp16_bf16_reduction_math_sdp",
        meaning="scaled_dot_product_attention without a fused kernel sums 16-bit inputs in 16 bits",
        safe=False,
        read=lambda: torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        hold=_holder(
            lambda: torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
            lambda value: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(value),
        ),
        by_hand="torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)",
        devices=("cpu", "gpu"),
    ),
    Switch(
        name="sdpa_kernel",
        meaning="fused kernels of attention compute the weights twice, and round large scores in two ways",
        safe="math",
        read=_kernels,
        hold=_holder(_kernels, _enable_kernels),
        by_hand="with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        devices=("cpu", "gpu"),
        fails=False,
    ),
    _attribute(
        "cudnn.benchmark",
        "convolutions choose their algorithm by timing, so runs differ in rounding",
        safe=False,
        fails=False,
    ),
    _attribute(
        "cudnn.deterministic",
        "convolutions may sum in a different order in every run",
        safe=True,
        fails=False,
    ),
    Switch(
        name="deterministic_algorithms",
        meaning="some GPU operations sum in a different order in every run; strict leaves it, as True makes some raise",
        safe=True,
        read=lambda: torch.are_deterministic_algorithms_enabled(),
        by_hand="torch.use_deterministic_algorithms(True)",
        devices=("gpu",),
        fails=False,
    ),
    Switch(
        name="CUBLAS_WORKSPACE_CONFIG",
        meaning="products may sum in a different order in every run",
        safe=":4096:8",
        accepted=(":16:8",),
        read=_environment("CUBLAS_WORKSPACE_CONFIG"),
        by_hand="set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment",
        devices=("gpu",),
        fails=False,
    ),
    Switch(
        name="ONEDNN_DEFAULT_FPMATH_MODE",
        meaning="oneDNN may round float32 inputs to what it names, whatever fp32_precision says",
        safe="strict",
        accepted=("",),
        read=lambda: (
            _environment("ONEDNN_DEFAULT_FPMATH_MODE")() or _environment("DNNL_DEFAULT_FPMATH_MODE")()
        ).lower(),
        by_hand="unset ONEDNN_DEFAULT_FPMATH_MODE and DNNL_DEFAULT_FPMATH_MODE before Python starts",
        devices=("cpu",),
    ),
    Switch(
        name="NVIDIA_TF32_OVERRIDE",
        meaning="0 keeps the libraries of NVIDIA from TF32, in JAX, too",
        safe=None,
        read=_environment("NVIDIA_TF32_OVERRIDE"),
    ),
    _autocast("cpu", "cpu"),
    _autocast("cuda", "gpu"),
    Switch(
        name="flush_denormal",
        meaning="numbers below 1.2e-38 become zero on the CPU, in this thread",
        safe=False,
        read=_flushes_denormals,
        hold=_holder(_flushes_denormals, lambda value: torch.set_flush_denormal(value)),
        by_hand="torch.set_flush_denormal(False)",
        devices=("cpu",),
    ),
    Switch(
        name="default_dtype",
        meaning="dtype of new tensors; strict leaves it, as it is a choice of what to compute",
        safe="float32",
        read=lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        by_hand="torch.set_default_dtype(torch.float32), the dtype of new JAX arrays without jax_enable_x64",
        fails=False,
    ),
    Switch(name="num_threads", meaning="threads of CPU kernels", safe=None, read=lambda: torch.get_num_threads()),
)
"""Every setting, those that others inherit from first."""


def kinds() -> set[str]:
    """Return the kinds of devices that torch can use here: ``cpu``, ``gpu``, ``mps``."""
    usable_kinds = {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return {"cpu", *(kind for kind, usable in usable_kinds.items() if usable)}


def devices() -> list[str]:
    """Return one line per device that torch can use here."""
    lines = [f"cpu, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}, {card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
    return [*lines, *(["mps"] if "mps" in kinds() else [])]


def versions() -> dict[str, str]:
    """Return the versions of torch and of the CUDA libraries that it was built with."""
    built = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {name: str(version) for name, version in built.items() if version}


def product(left: np.ndarray, right: np.ndarray, kind: str) -> np.ndarray:
    """Return a matrix product of a kind of device, in float64."""
    device = "cuda" if kind == "gpu" else kind
    result: np.ndarray = (torch.from_numpy(left).to(device) @ torch.from_numpy(right).to(device)).cpu().double().numpy()
    return result
