"""The pytest plugin: the fixture `parity`, its marker, its options, and the output of failing comparisons.

pytest loads it in every run on an installation with this package. So it imports nothing but pytest and one number
before a test asks for the fixture, and leaves other tests alone. A setting is looked up in the call, the marker, the
command line and the ini file, in this order. This module has the hooks and fixtures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import manifest
from .availability import skip_if_absent, skip_if_not_installed
from .comparing import Combination, Parity
from .settings import AXES, SETTINGS, Settings, add_options, read_markers
from .summary import Summary, hand_over

CELL = "_parity_cell"
"""The fixture that holds the combination a test runs in; where a project has its own `parity`, no test asks for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and their ini settings."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check the settings before any test runs."""
    config.addinivalue_line(
        "markers",
        "parity(variants, dtypes, devices, modes, seeds, first_seed): what the fixture parity compares; the test runs "
        "once per combination, with an id such as attention-float32-cpu-eager",
    )
    try:
        config.stash[SETTINGS] = Settings.of(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Summary(config), "attn_bridge_summary")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the manifest where the command line names it: ``pytest --parity-manifest parity.toml::NAME``."""
    is_manifest = file_path == parent.config.rootpath / manifest.NAME and manifest.is_wanted(parent.config)
    if is_manifest and parent.session.isinitpath(file_path):
        return manifest.ManifestFile.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the pairs of the manifest, before ``-k`` and other options select from all tests."""
    if manifest.is_wanted(config):
        manifest.add_items(session, config, items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests that use the fixture by the axes in their markers, the command line and the ini file."""
    if CELL not in metafunc.fixturenames:
        return
    try:
        settings = {**metafunc.config.stash[SETTINGS].values, **read_markers(metafunc.definition)}
    except ValueError as error:
        raise pytest.fail.Exception(f"{metafunc.definition.name}: {error}", pytrace=False) from None
    axes = {one: settings[plural] for plural, one in AXES.items() if plural in settings}
    if axes:
        cells = [Combination(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
        metafunc.parametrize(CELL, cells, indirect=True, ids=map(str, cells))


@pytest.fixture
def _parity_cell(request: pytest.FixtureRequest) -> Combination:
    cell: Combination = getattr(request, "param", Combination())
    return cell


@pytest.fixture
def parity(request: pytest.FixtureRequest, _parity_cell: Combination) -> Parity:
    """Compare any two sides, such as a torch and a Flax module: ``parity(first, second, inputs)``."""
    skip_if_not_installed()
    skip_if_absent(_parity_cell.device)
    return Parity(request.node, _parity_cell)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Hand the verdicts of a test over to its report."""
    outcome: Any = yield
    hand_over(item, call, outcome.get_result())
