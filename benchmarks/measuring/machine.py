"""The machine of a measurement: processor, memory and versions, as far as the system reports them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import attn_bridge

FLAGS = ["avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16"]
"""Abilities of a processor that decide how fast matrices are multiplied."""


def describe() -> dict[str, object]:
    """Return the facts that need no framework."""
    info = _cpu_info()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in (info.get("flags") or info.get("Features") or "").split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_before": load(),
        "versions": {
            "python": platform.python_version(),
            "attn-bridge": attn_bridge.__version__,
            "numpy": np.__version__,
        },
    }


def load() -> float | None:
    """Return the number of runnable processes, averaged over the last minute; None if the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def sentences(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines for the foot of a table."""
    flags = f" ({' '.join(facts['flags'])})" if facts["flags"] else ""
    versions = dict(facts["versions"])
    devices, threads = [], None
    for name, framework_facts in facts["frameworks"].items():
        versions |= framework_facts["versions"]
        devices.append(f"{name} on {framework_facts['device']}")
        threads = framework_facts.get("threads", threads)
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    return [
        f"{facts['cpu']}, {facts['cores']} cores{flags}, {memory}, {facts['system']}; {', '.join(devices)}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]


def _cpu_info() -> dict[str, str]:
    """Return Linux's description of the first processor; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
