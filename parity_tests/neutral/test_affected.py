"""The selection of `make affected`: by imports, by names of modules in texts, by stored costs."""

from __future__ import annotations

import pytest

from .. import affected

TESTS = "parity_tests/neutral"


@pytest.fixture(scope="module")
def direct():
    return affected.importers()


def test_a_change_in_masks_runs_their_tests_first(direct):
    reach = affected.distances(["attn_bridge/masks/positions.py"], direct)
    chosen = affected.select(reach, 60, dict.fromkeys(reach, 1.0))
    assert f"{TESTS}/test_masks.py" in chosen.nearest
    assert chosen.rest


def test_a_module_loaded_by_name_reaches_the_tests_of_its_loader(direct):
    assert "attn_bridge.backends" in direct["torch_attn.backend"]
    reach = affected.distances(["torch_attn/_parity/precision.py"], direct)
    assert f"{TESTS}/test_doctor.py" in reach


def test_a_changed_test_file_runs_however_long_it_takes(direct):
    file = f"{TESTS}/test_rng.py"
    reach = affected.distances([file], direct)
    assert reach[file] == 0
    assert affected.select(reach, 20, {file: 1e4}).nearest == (file,)


def test_files_that_do_not_fit_the_time_are_left():
    reach = {"near": 1, "far": 2, "dear": 1}
    chosen = affected.select(reach, 20, {"near": 10, "far": 5, "dear": 1e3})
    assert chosen == affected.Selection(("near", "far"), ("dear",))


def test_a_file_that_is_no_module_stands_for_its_folder(direct):
    reach = affected.distances(["attn_bridge/parity/rendering/html/page.css"], direct)
    assert any(file.startswith(f"{TESTS}/reports/") for file in reach)


def test_a_file_outside_of_the_packages_reaches_nothing(direct):
    assert affected.distances(["README.md"], direct) == {}
