"""Find conditions of this machine that make equal implementations differ: settings, devices, versions, environment."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Literal

import rich.box
import rich.table

from attn_bridge import backends
from attn_bridge.whole_files import JsonObject

from ..sides.subject import load_adapter
from . import precision
from .precision import environment

TESTED = {"torch": ("2.10", "2.13"), "jax": ("0.10", "0.12"), "flax": ("0.12", "0.12")}
"""Package -> the oldest and the newest version that the tests were run with."""

PRODUCT_ERROR = 1e-5
"""A float32 product of 256 x 256 that is further off is not float32 inside: that errs by 3e-7, bfloat16 by 3e-3."""

WRONG_SUMS = (
    "jax.jit(jax.jacrev(...)) may be wrong, jax.grad and jax.jacfwd are right (jax#39103); use JAX 0.12, or "
    "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce"
)

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
COLORS = {"safe": "green", "unsafe": "red", "note": "yellow"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to know: ``unsafe`` (comparisons will fail for a reason that is not the code) or ``warning``."""

    level: Literal["unsafe", "warning"]
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}; {self.advice}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Result of `examine`.

    Attributes:
        environment: versions of Python and of the packages, and the machine.
        devices: library -> one line per device it can use.
        missing: library -> why it cannot be imported, and how to install it.
        products: library -> kind of device -> relative error of a float32 matrix product.
        implementations: library -> implementation of attention, fastest first -> why it can't run here, or None.
        switches: every setting with its current value.
        findings: problems other than the settings.
    """

    environment: dict[str, str]
    devices: dict[str, list[str]]
    missing: dict[str, str]
    products: dict[str, dict[str, float]]
    implementations: dict[str, dict[str, str | None]]
    switches: tuple[precision.SettingRow, ...]
    findings: tuple[Finding, ...]

    @property
    def unsafe(self) -> tuple[str, ...]:
        """Settings and findings that would spoil a comparison on the present devices, one line each."""
        rows = [f"unsafe: {_describe(row)}" for row in self.switches if row.state == "unsafe"]
        return (*rows, *(str(finding) for finding in self.findings if finding.level == "unsafe"))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Settings and findings worth knowing that spoil nothing, one line each."""
        rows = [f"note: {_describe(row)}" for row in self.switches if row.state == "note"]
        return (*rows, *(str(finding) for finding in self.findings if finding.level == "warning"))

    @property
    def passed(self) -> bool:
        """Whether nothing unsafe was found."""
        return not self.unsafe

    def summary(self) -> str:
        """Return the last line of the report."""
        if self.unsafe:
            return f"{len(self.unsafe)} unsafe on the devices here"
        return "nothing unsafe on the devices here" if self.devices else "no framework to examine"

    def table(self) -> rich.table.Table:
        """Return one row per setting."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("library", "setting", "now", "safe", ""):
            table.add_column(heading)
        for row in self.switches:
            state = f"[{COLORS[row.state]}]{row.state}[/]" if row.state in COLORS else row.state
            table.add_row(row.framework, row.name, row.value or "-", row.safe or "-", state)
        return table

    def lines(self) -> list[str]:
        """Return the lines below the table, one fact per line."""
        lines = [", ".join(f"{name} {value}" for name, value in self.environment.items())]
        for library, names in self.devices.items():
            errors = ", ".join(f"{error:.1e} on {kind}" for kind, error in self.products[library].items())
            lines.append(f"{library} devices: {'; '.join(names)}")
            lines.append(f"{library} float32 product: off by {errors}")
            lines.append(f"{library} attention: {_list_implementations(self.implementations[library])}")
        return [*lines, *self.missing.values(), *self.remarks, *self.unsafe, self.summary()]

    def to_json(self) -> JsonObject:
        """Return the diagnosis as JSON-ready data; an infinite error is given as null."""
        from ..rendering.json import as_json

        return as_json(self, schema=1)


def examine() -> Diagnosis:
    """Look at the frameworks that are installed, as they are set up in this process; it starts their devices."""
    versions = environment()
    devices: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    kinds: dict[str, set[str]] = {}
    products: dict[str, dict[str, float]] = {}
    implementations: dict[str, dict[str, str | None]] = {}
    rows: list[precision.SettingRow] = []
    findings: list[Finding] = []
    for framework, library in precision.LABELS.items():
        try:
            module = load_adapter(framework, "precision")
        except backends.MissingBackendError as error:
            missing[library] = str(error)
            continue
        versions |= module.versions()
        try:
            devices[library], kinds[library] = module.devices(), module.kinds()
        except RuntimeError as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            findings.append(
                Finding("unsafe", f"{library} cannot start its devices ({first})", "run it on its own first")
            )
            continue
        rows += precision.rows_of(library, module)
        products[library] = precision.product_errors(module)
        implementations[library] = backends.load(framework, "implementations").unavailable()
        findings += _judge_products(library, products[library])
        findings += _judge_compiled(library, module.compiled_error() if hasattr(module, "compiled_error") else 0.0)
    findings += _judge_versions(versions)
    findings += _judge_devices(kinds, os.environ)
    findings += _judge_threads(os.environ)
    findings += _judge_dtypes(rows)
    return Diagnosis(versions, devices, missing, products, implementations, tuple(rows), tuple(findings))


def _judge_products(library: str, errors: Mapping[str, float]) -> list[Finding]:
    return [
        Finding(
            "unsafe",
            f"{library} float32 products on {kind} are off by {error:.1e} and not float32 inside",
            "attn_bridge.parity.strict() should cure it; if not, look at the environment for TF32 or BF16",
        )
        for kind, error in errors.items()
        if not error <= PRODUCT_ERROR
    ]


def _judge_compiled(library: str, error: float) -> list[Finding]:
    """Return the warning about a compiler that sums products wrongly."""
    if error <= PRODUCT_ERROR:
        return []
    text = f"{library} compiles some sums of products wrongly: a compiled Jacobian of a norm is off by {error:.1e}"
    return [Finding("warning", text, WRONG_SUMS)]


def _judge_versions(versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    for package, (oldest, newest) in TESTED.items():
        version = _release(versions[package])
        if version and not _release(oldest) <= version <= _release(newest):
            tested = oldest if oldest == newest else f"{oldest} to {newest}"
            text = f"{package} {versions[package]} is not what the tests were run with ({tested})"
            findings.append(Finding("warning", text, "a difference may be that of the versions"))
    return findings


def _judge_devices(kinds: Mapping[str, set[str]], variables: Mapping[str, str]) -> list[Finding]:
    with_gpu = [library for library, found in kinds.items() if "gpu" in found]
    if len(with_gpu) == 1 and len(kinds) == 2:
        (other,) = set(kinds) - set(with_gpu)
        return [
            Finding(
                "warning",
                f"{with_gpu[0]} sees a GPU and {other} does not, so a GPU is compared with a CPU",
                f"install the GPU build of {other}, or hide the GPU with CUDA_VISIBLE_DEVICES=",
            )
        ]
    keeps = variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    bounded = variables.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or variables.get("XLA_CLIENT_MEM_FRACTION")
    on_demand = variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if len(with_gpu) == 2 and keeps and not bounded and not on_demand:
        text = "jax takes three quarters of the memory of the GPU at its start, and torch shares that GPU"
        return [Finding("warning", text, "set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment")]
    return []


def _judge_threads(variables: Mapping[str, str]) -> list[Finding]:
    findings = []
    counts = {name: variables[name] for name in THREAD_COUNTS if variables.get(name)}
    if len(set(counts.values())) > 1:
        text = " and ".join(f"{name}={count}" for name, count in counts.items())
        findings.append(Finding("warning", f"{text} disagree", "torch takes either; set them alike or only the first"))
    if variables.get("KMP_DUPLICATE_LIB_OK", "").lower() in ("true", "1"):
        text = "KMP_DUPLICATE_LIB_OK lets two OpenMP libraries run in one process, which can give wrong numbers"
        findings.append(Finding("warning", text, "unset it, and install torch and NumPy from one source"))
    return findings


def _judge_dtypes(rows: list[precision.SettingRow]) -> list[Finding]:
    values = {(row.framework, row.name): row.value for row in rows}
    dtype, wide = values.get(("torch", "default_dtype")), values.get(("jax", "enable_x64"))
    if None in (dtype, wide) or (dtype == "float64") == (wide == "True"):
        return []
    text = f"new torch tensors are {dtype} (default_dtype), new jax arrays {'float64' if wide == 'True' else 'float32'}"
    return [Finding("warning", text, "give both sides their dtypes explicitly, or set the defaults alike")]


def _describe(row: precision.SettingRow) -> str:
    return f"{row.framework} {row.name} is {row.value or 'not set'}: {row.meaning}; {row.advice}"


def _list_implementations(reasons: Mapping[str, str | None]) -> str:
    """Return the implementations that can run here, fastest first, then the others with their reasons."""
    usable = ", ".join(name for name, reason in reasons.items() if reason is None)
    return "; ".join([usable, *(f"not {name}: {reason}" for name, reason in reasons.items() if reason is not None)])


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, empty for other text."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
