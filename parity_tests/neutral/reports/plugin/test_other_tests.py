"""Tests that do not use the plugin run as without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

from .pytest_runs import ROOT, ids


def test_loading_the_plugin_imports_nothing_heavy():
    heavy = {"numpy", "torch", "jax", "flax", "rich", "einops", "ml_dtypes", "typer"}
    program = f"import sys, attn_parity.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_plugin_is_an_entry_point_of_pytest():
    points = importlib.metadata.entry_points(group="pytest11", name="attn_bridge")
    assert [point.value for point in points] == ["attn_parity.plugin"]


STRANGERS = """
@pytest.fixture
def number():
    return 1

@pytest.mark.parametrize("parity", [0, 1])
def test_even_and_odd(parity, number):
    assert parity in (0, number)

class TestTheirs:
    @pytest.fixture
    def parity(self):
        return "theirs"

    def test_fixture_of_that_name(self, parity):
        assert parity == "theirs"
"""


def test_other_tests_run_as_without_the_plugin(run):
    here = run(STRANGERS, "-v", "--parity-dtype=float32", GITHUB_ACTIONS="true")
    gone = run(STRANGERS, "-v", plugin=None)
    assert (here.status, here.err) == (gone.status, gone.err) == (0, "")
    assert ids(here) == ["test_even_and_odd[0]", "test_even_and_odd[1]", "TestTheirs::test_fixture_of_that_name"]
    assert re.sub(r"in .*s|plugins: .*\n", "", here.out) == re.sub(r"in .*s|plugins: .*\n", "", gone.out)


def test_public_names_survive_imports_of_their_modules():
    program = """
import importlib
from attn_bridge import parity
import attn_parity
for name, home in attn_parity._HOMES.items():
    importlib.import_module(f"attn_parity.{home}")
    assert getattr(parity, name).__name__ == getattr(attn_parity, name).__name__ == name, name
assert set(dir(attn_parity)) == set(attn_parity.__all__) == set(attn_parity._HOMES)
assert set(dir(parity)) == set(parity.__all__) == {*attn_parity.__all__, *parity._PLANTING}
for name in parity._PLANTING:
    assert getattr(parity, name).__name__ == name, name
try:
    parity.nonsense
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("module 'attn_bridge.parity' has no attribute 'nonsense'\n", "")


def test_planting_faults_without_its_package_is_refused_when_called():
    program = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "fault_lab" else find(name, *more)
from attn_bridge.parity import *
assert callable(compare)
from attn_bridge.cli import main
try:
    mutate(3)
except ImportError as error:
    print(error)
main(["mutate", "--configs", "3"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    rule = "planting faults takes the package fault_lab, which only a clone of the repository has: run it there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, rule, f"error: {rule}")
