"""A report as JSON."""

import dataclasses
import json

import numpy as np
import pytest

from attn_parity.rendering.json import as_json
from attn_parity.results.findings import SCHEMA, Worst
from attn_parity.results.report import Report
from parity_tests.support.judging.reports import SUSPECT, different_report, equal_report, equal_tensor

from .renderings import EMPTY


def test_json_holds_every_field_but_the_pictures():
    data = as_json(different_report())
    fields = {field.name for field in dataclasses.fields(Report)} - {"pictures"}
    assert set(data) == fields | {"schema", "passed", "summary", "torch_name", "flax_name"}
    assert (data["schema"], data["passed"], data["verdict"]) == (SCHEMA, False, "different")
    assert data["summary"] == different_report().summary()
    names = {"first": "head.weight", "second": "head.kernel", "torch": "head.weight", "flax": "head.kernel"}
    assert data["pairing"][-1] == {"pattern": "o i -> i o", "how": "probe"} | names
    assert data["first_divergence"] == {
        "path": SUSPECT,
        "second_path": "layers.3.norm1",
        "flax_path": "layers.3.norm1",
        "direction": "forward",
        "first_name": "GPTModel",
        "second_name": "GPTModel",
        "message": different_report().first_divergence.message,
        "between": None,
        "hint": different_report().first_divergence.hint,
        "second_label": "flax",
        "candidates": [{"path": SUSPECT, "second_path": "layers.3.norm1", "between": None}],
        "witness": "",
    }
    assert as_json(equal_report())["first_divergence"] is None
    assert as_json(EMPTY)["tree"] is None


def test_json_keeps_the_tree_with_amplifications():
    tree = as_json(different_report())["tree"]
    block = tree["children"][5]
    assert (block["path"], block["children"][0]["path"]) == ("blocks.3", SUSPECT)
    assert block["children"][0]["first"] is True
    assert block["children"][0]["amplification"] == pytest.approx(31000)
    assert [node["path"] for node in tree["children"] if node["flax_path"] is None] == ["pos_ids"]


def test_json_has_no_infinities_and_takes_numpy_numbers(tmp_path):
    worst = Worst(np.int64(1), (np.int64(3),), np.float32(0.5), float("nan"), None)
    tensor = equal_tensor("output", second_used=float("inf"), first_used=np.float64("-inf"), worst=worst)
    report = dataclasses.replace(EMPTY, tensors=[tensor], noise={"torch": float("nan")})
    path = tmp_path / "report.json"
    as_json(report, path)
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = data["tensors"][0]
    assert (found["second_used"], found["first_used"], data["noise"]) == (None, None, {"torch": None})
    values = {"first": 0.5, "second": None, "torch": 0.5, "flax": None}
    assert found["worst"] == {"sample": 1, "index": [3], "oracle": None} | values


def test_json_has_former_and_current_names():
    data = as_json(different_report())
    output, first = data["tensors"][0], data["first_divergence"]
    for former, name in (
        ("flax_name", "second_name"),
        ("torch_used", "first_used"),
        ("flax_used", "second_used"),
        ("torch_ulps", "first_ulps"),
        ("flax_ulps", "second_ulps"),
    ):
        assert output[former] == output[name] is not None
    assert first["flax_path"] == first["second_path"] == "layers.3.norm1"
    assert (data["torch_name"], data["flax_name"]) == (data["first_name"], data["second_name"])
    assert data["pairing"][0]["torch"] == data["pairing"][0]["first"] == "blocks.0.attn.W_query.weight"
    assert data["pairing"][0]["flax"] == data["pairing"][0]["second"] == "layers.0.attn.W_query.kernel"
    node = data["tree"]["children"][1]
    assert (node["flax_path"], node["torch_type"], node["flax_type"]) == (None, "PositionIds", "")
    assert (node["second_path"], node["first_type"], node["second_type"]) == (None, "PositionIds", "")


def test_former_names_are_read_only():
    report = different_report()
    found = [report, report.tensors[0], report.first_divergence, report.tree, report.pairing[0], report.pictures[0]]
    names = ("torch_name", "flax_used", "flax_path", "torch_type", "torch", "flax")
    for one, name in zip(found, names, strict=True):
        with pytest.raises(AttributeError):
            setattr(one, name, None)
    assert report.pictures[0].torch is report.pictures[0].first
    assert report.tensors[0].worst.flax == 0.727935218
