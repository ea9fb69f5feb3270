"""The settings of both frameworks that make equal implementations compute different numbers, and how to fix them.

with attn_bridge.parity.strict(): ...     every setting safe inside, every former value restored afterwards
attn_parity.settings.precision.record()     the values in force, for a report
attn_parity.settings.precision.environment()     the versions and the machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Literal

import numpy as np

from attn_bridge import backends

from ..sides.subject import load_adapter

SwitchState = Literal["safe", "unsafe", "note", "no effect here", "info"]

LABELS: dict[backends.Framework, str] = {framework: extra for framework, (_, extra) in backends.PACKAGES.items()}
"""Framework -> the library whose settings, versions and devices are meant."""


@dataclasses.dataclass(frozen=True)
class SettingRow:
    """One setting with its current value.

    Attributes:
        framework: ``torch`` or ``jax``.
        name: the framework's name of it.
        meaning: the effect of the setting.
        value: the value in force.
        safe: the value under which numbers can be compared; empty if all values are equally good.
        state: ``safe``; ``unsafe`` (numbers differ by more than rounding); ``note`` (worth knowing, and covered by the
            allowance of the judge); ``no effect here`` (not safe, but no present device reads it); ``info``.
        held: whether `strict` sets the safe value.
        key: whether a report names it even when it is safe.
        advice: how to make it safe.
    """

    framework: str
    name: str
    meaning: str
    value: str
    safe: str
    state: SwitchState
    held: bool
    key: bool
    advice: str


@dataclasses.dataclass(frozen=True)
class Switch:
    """One setting of a framework.

    Attributes:
        name: the framework's name of it.
        meaning: its effect.
        safe: the value under which numbers can be compared; None if all values are equally good.
        read: returns the value in force; raises AttributeError if this version of the framework lacks the setting.
        hold: returns a context with a value in force that restores the former one; None where `strict` must not change
            it: it is fixed when the framework starts, or it selects the computation.
        by_hand: the code that makes it safe.
        accepted: values that are equally safe.
        devices: kinds of devices whose numbers it changes.
        fails: whether numbers differ by more than rounding when it is not safe.
        key: whether a report names it even when it is safe.
    """

    name: str
    meaning: str
    safe: object
    read: Callable[[], Any]
    hold: Callable[[Any], AbstractContextManager[None]] | None = None
    by_hand: str = ""
    accepted: tuple[object, ...] = ()
    devices: tuple[str, ...] = ("cpu", "gpu", "tpu")
    fails: bool = True
    key: bool = False

    @property
    def exists(self) -> bool:
        """Whether this version of the framework has it."""
        try:
            self.read()
        except AttributeError:
            return False
        return True

    def row(self, framework: str, present: Collection[str]) -> SettingRow:
        """Return it as it is now, judged for the kinds of devices that are `present`."""
        value = self.read()
        state: SwitchState
        if self.safe is None:
            state = "info"
        elif value == self.safe or value in self.accepted:
            state = "safe"
        elif not set(self.devices) & set(present):
            state = "no effect here"
        else:
            state = "unsafe" if self.fails else "note"
        by_strict = f"attn_bridge.parity.strict() holds {self.safe}" if self.hold else ""
        advice = "; by hand: ".join(part for part in (by_strict, self.by_hand) if part)
        safe = "" if self.safe is None else str(self.safe)
        return SettingRow(
            framework, self.name, self.meaning, str(value), safe, state, bool(self.hold), self.key, advice
        )


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Hold every setting of both frameworks at its safe value; afterwards each former value is back.

    A framework that is not installed is skipped. The settings are those of the process: enter it once around threads,
    not in each of them.
    """
    with contextlib.ExitStack() as stack:
        for module in modules().values():
            stack.enter_context(hold_safe(module))
        yield


@contextlib.contextmanager
def hold_safe(module: ModuleType) -> Iterator[None]:
    """Hold every setting of one framework at its safe value; afterwards each former value is back.

    Args:
        module: the ``precision`` of a room of `frameworks`.
    """
    with contextlib.ExitStack() as stack:
        for switch in module.SWITCHES:
            if switch.hold and switch.exists:
                stack.enter_context(switch.hold(switch.safe))
        yield


def rows_of(label: str, module: ModuleType) -> list[SettingRow]:
    """Return every setting that the installed version of one framework has, as it is now."""
    present = module.kinds()
    return [switch.row(label, present) for switch in module.SWITCHES if switch.exists]


def switches() -> list[SettingRow]:
    """Return every setting of the installed frameworks as it is now."""
    return [row for label, module in modules().items() for row in rows_of(label, module)]


def product_errors(module: ModuleType) -> dict[str, float]:
    """Measure a float32 matrix product on each kind of device: largest error, relative to the largest element."""
    left, right = np.random.default_rng(0).standard_normal((2, 256, 256), dtype=np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    errors = {}
    for kind in sorted(module.kinds()):
        error = np.abs(module.product(left, right, kind) - exact).max()
        errors[kind] = float(error / np.abs(exact).max())
    return errors


def record() -> dict[str, str]:
    """Return the settings that a report should carry: the key ones, and the unsafe ones of the present devices."""
    return {
        f"{row.framework} {row.name}": row.value for row in switches() if row.key or row.state in ("unsafe", "note")
    }


def modules() -> dict[str, ModuleType]:
    """Return ``torch`` and ``jax`` -> the ``precision`` of that room of `frameworks`, those that can be imported."""
    rooms = {}
    for framework, label in LABELS.items():
        with contextlib.suppress(backends.MissingBackendError):
            rooms[label] = load_adapter(framework, "precision")
    return rooms


PACKAGES = ("attn-bridge", "torch", "jax", "flax", "numpy")


def environment() -> dict[str, str]:
    """Return versions, processor and platform, for the head of a report."""
    versions = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
