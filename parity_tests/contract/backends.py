"""Gives the tests of this folder their backends: one adapter per framework that can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from types import ModuleType
from typing import Any

import pytest

FRAMEWORKS = ("torch", "jax")
Adapters = dict[str, ModuleType]


def adapters(kind: str, package: str | None = __package__) -> Adapters:
    """Return the modules ``{framework}_{kind}`` of a package by framework."""
    return {name: importlib.import_module(f"{package}.{name}_{kind}") for name in FRAMEWORKS if _is_importable(name)}


def fixture(found: Adapters) -> Any:
    """Return the fixture that a file of tests calls `backend`: each adapter in turn."""
    return pytest.fixture(scope="session", params=list(found.values()), ids=list(found))(lambda request: request.param)


def called(found: Adapters, labels: Collection[str], enough: Collection[str]) -> Collection[str]:
    """Return the cases of a kernel that always run: all with torch, which compiles nothing beside it, else `enough`.

    The kernels are the same; each framework describes a call to them in its own way.
    """
    return labels if "torch" in found else enough


def each(found: Adapters, argument: str, table: str) -> pytest.MarkDecorator:
    """Parametrize a test by `backend` and the entries of a table that every adapter has of its own."""
    rows = [
        pytest.param(adapter, entry, id=f"{framework}-{entry}")
        for framework, adapter in found.items()
        for entry in sorted(getattr(adapter, table))
    ]
    return pytest.mark.parametrize(("backend", argument), rows)


def _is_importable(framework: str) -> bool:
    try:
        return importlib.util.find_spec(framework) is not None
    except ModuleNotFoundError:  # `--without` blocks it
        return False
