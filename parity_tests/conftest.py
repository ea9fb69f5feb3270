"""Runs parts of the suite as if a framework were not installed.

``--without torch`` and ``--without jax`` make a framework unimportable, and leave out the tests that need it. With
``--exact``, tests that need fewer frameworks than there are stay out too: ``make test`` runs each folder once, where it
proves most, with nothing but the frameworks that it needs; and ``contract`` once for each framework, alone.
"""

from __future__ import annotations

import gc
import importlib.abc
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring import memory

from . import contexts, costs, products, settings

ROOT = Path(__file__).parent

NEEDS: dict[str, list[set[str]]] = {
    "contract": [{"torch"}, {"jax"}],
    "torch_side": [{"torch"}],
    "jax_side": [{"jax"}],
    "twins": [{"torch", "jax"}],
    "tours": [{"torch", "jax"}],
    "faults": [{"torch", "jax"}],
    "meshes": [{"torch", "jax"}],
    "wild": [{"torch", "jax"}],
    "site": [{"torch", "jax"}],
    "neutral": [set()],
}
"""Folder -> frameworks that its tests import; `contract` runs with each, its tests once per framework that is there."""

EVERYWHERE = {"test_cli.py", "test_doctor.py"}
"""Files whose tests ask what is installed: they run with any frameworks, ``--exact`` or not."""

BLOCKED = {"torch": ("torch",), "jax": ("jax", "jaxlib", "flax", "optax", "orbax")}

KEPT = 100
"""Tests after which a process drops what JAX compiled, if it has grown: all of it together takes more than 4 GiB."""

GROWN = 2 << 30
"""Bytes of memory from which on a process drops what JAX compiled; what it drops is traced and lowered again."""

COLLECTED = (10_000, 10, 10)
"""Thresholds of the garbage collector: with Python's own it takes a twentieth of the suite's time."""

_ran = itertools.count(1)


class _Blocker(importlib.abc.MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked by --without)", name=fullname)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=sorted(BLOCKED),
        help="make a framework unimportable and leave out the tests that need it",
    )
    parser.addoption("--costs", metavar="FILE", help="write what each test costs; see parity_tests/costs.py")
    parser.addoption(
        "--exact", action="store_true", help="leave out the tests that need fewer frameworks than there are"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for framework in config.getoption("--without"):
        loaded = [package for package in BLOCKED[framework] if package in sys.modules]
        assert not loaded, f"{loaded} were imported before they could be blocked"
        sys.meta_path.insert(0, _Blocker(BLOCKED[framework]))
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # machine code of our kernels is kept next to XLA's
        os.environ.setdefault("ATTN_KERNELS_CACHE", f"{folder}/attn_kernels")
    os.fsync = _open_or_refused
    if path := config.getoption("--costs"):
        costs.register(config, path)


def _open_or_refused(descriptor: Any) -> None:
    """Stand for `os.fsync`: what tests write is removed again, so that no disk is waited for, thousands of times.

    A file that is closed is an error all the same. Processes that tests start have their own `os.fsync`.
    """
    os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what imports leave, which stays, and have it run less often than for a script."""
    gc.disable()
    try:
        return (yield)
    finally:
        contexts.share_where_unoptimized()
        gc.freeze()
        gc.set_threshold(*COLLECTED)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    products.mark(items)
    if contexts.is_unoptimized():
        skipped = pytest.mark.skip(reason="XLA_FLAGS keep XLA from optimizing; make test runs it in a process without")
        for item in items:
            if item.get_closest_marker("optimized"):
                item.add_marker(skipped)


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    """Fail a test that leaves a setting changed: the numbers of whichever test comes next would be others."""
    before = settings.read()
    yield
    changed = settings.restore(before)
    assert not changed, f"the test left settings changed (before, after): {changed}"


@pytest.fixture(autouse=True, scope="module")
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give torch one thread, but for kernels: threads that wait for each other cost more than they gain on little."""
    torch = sys.modules.get("torch")
    if torch is None or "kernels" in request.path.relative_to(ROOT).parts:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if next(_ran) % KEPT == 0 and "jax" in sys.modules and memory.resident() > GROWN:
        sys.modules["jax"].clear_caches()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if (
        config.option.markexpr.startswith("optimized") and collection_path.suffix == ".py"
    ):  # most need not even be imported
        return None if "mark.optimized" in collection_path.read_text(encoding="utf-8") else True
    parts = collection_path.relative_to(ROOT).parts if collection_path.is_relative_to(ROOT) else ()
    needs = NEEDS.get(parts[0]) if parts else None
    if needs is None:
        return None
    there = BLOCKED.keys() - set(config.getoption("--without"))
    exactly = config.getoption("--exact") and collection_path.is_file() and collection_path.name not in EVERYWHERE
    runs = any(one == there if exactly else one <= there for one in needs)
    return None if runs else True
