"""The selection of `make affected`: by imports, by names of modules in texts, by stored costs."""

from __future__ import annotations

import json

import pytest

from .. import affected, costs
from ..power import ordering

TESTS = "parity_tests/neutral"


@pytest.fixture(scope="module")
def edges():
    return ordering.importers(affected.ROOT)


def test_a_change_in_masks_runs_their_tests_first(edges):
    ordered = affected.nearest_first(["attn_bridge/masks/positions.py"], edges)
    assert f"{TESTS}/reference/test_masks.py" in ordered[:3]
    assert len(ordered) > 50


def test_a_module_loaded_by_name_reaches_the_tests_of_its_loader(edges):
    assert f"{TESTS}/command_line/test_doctor.py" in affected.nearest_first(
        ["attn_parity/frameworks/torch/precision.py"], edges
    )


def test_a_changed_test_file_runs_however_long_it_takes(edges):
    file = f"{TESTS}/reference/test_rng.py"
    ordered = affected.nearest_first([file], edges)
    assert affected.select(ordered, [file], 20, {file: 1e4}) == affected.Selection((file,), ())


def test_files_that_do_not_fit_the_time_are_left():
    chosen = affected.select(["near", "dear", "far"], [], 20, {"near": 10, "far": 5, "dear": 1e3})
    assert chosen == affected.Selection(("near", "far"), ("dear",))


def test_a_style_sheet_stands_for_the_modules_of_its_folder(edges):
    ordered = affected.nearest_first(["attn_parity/rendering/html/page.css"], edges)
    assert any(file.startswith(f"{TESTS}/reports/") for file in ordered[:10])


def test_a_file_outside_of_the_packages_reaches_nothing(edges):
    assert affected.nearest_first(["README.md"], edges) == []


def test_costs_of_other_files_stay_unless_they_are_gone(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(costs, "STORED", tmp_path / "tests" / "costs.json")
    for name in ("kept", "measured"):
        (tmp_path / "tests" / f"{name}.py").touch()
    costs.STORED.write_text(json.dumps({"tests/gone.py": 1.0, "tests/kept.py": 2.0, "tests/measured.py": 3.0}))
    row = [1, 0.25, 0.0, 0.0, 0.0, 0]  # tests and processor seconds first
    (tmp_path / "lane.json").write_text(json.dumps({f"tests/measured.py::{name}": row for name in "ab"}))
    costs.main([str(tmp_path / "lane.json"), "--write"])
    assert json.loads(costs.STORED.read_text()) == {"tests/kept.py": 2.0, "tests/measured.py": 0.5}
