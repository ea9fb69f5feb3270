"""`attn-bridge mutate --gallery` judges a user's pairs, right and with their faults, and counts what it gets wrong."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from attn_bridge.cli.app import run
from attn_bridge.parity import mutate
from fault_lab.driver import find_trial, run_trial
from fault_lab.gallery import Finding, GalleryTrial, load_entries, plan_gallery

GALLERY = """
import torch
from torch import nn

from fault_lab.gallery import Case, Entry, fault, inside


class Pair(nn.Module):
    def __init__(self, wrong=""):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.wrong = wrong

    def forward(self, x):
        x = self.fc(x) * (1.01 if self.wrong == "scaled" else 1.0)
        return self.head(torch.tanh(x))


def build(wrong):
    torch.manual_seed(0)
    if wrong == "refused":
        raise SystemExit("not today")
    return Case(Pair(ALWAYS), Pair(wrong), torch.randn(5, 3))


ALWAYS = ""
entries = {"small": Entry("small", build, {"scaled": fault(*inside("", "fc", "head"))})}


def others():
    return {
        "harmless": Entry("harmless", build, {"nothing": fault("fc")}),
        "misplaced": Entry("misplaced", build, {"scaled": fault("head")}),
        "absent": Entry("absent", build, {}, needs=("no_such_package",)),
    }


def failing():
    return {"failing": Entry("failing", build, {"refused": fault("fc")})}


nothing, unnamed, number = {}, {"other": entries["small"]}, 3
"""


@pytest.fixture
def gallery(tmp_path):
    path = tmp_path / "pairs.py"
    path.write_text(GALLERY)
    return str(path)


@pytest.fixture
def objecting(tmp_path):
    """A gallery whose right pair is not right."""
    path = tmp_path / "objecting.py"
    path.write_text(GALLERY.replace('ALWAYS = ""', 'ALWAYS = "scaled"'))
    return str(path)


ONLY = {"configs": 0, "faults": 0}


def test_each_entry_is_judged_right_and_with_each_fault(gallery, tmp_path):
    report = mutate(**ONLY, gallery=gallery)
    assert report.passed, report.lines()
    assert not report.results
    found = [(one.trial.fault, one.verdict, one.right) for one in report.gallery]
    assert found == [("", "equal", "yes"), ("scaled", "different", "yes")]
    assert report.gallery[1].place == "between fc and head, forward"
    assert "gallery: 1 of 1 right entries equal, 1 of 1 faults seen, 1 placed rightly (100% of all), in " in (
        report.summary()
    )
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [(one["case"], one["seen"], one["placed"]) for one in data["gallery"]] == [
        ("gallery:small", True, True),
        ("gallery:small:scaled", True, True),
    ]
    assert data["command"] == f"attn-bridge mutate --configs 0 --plants 1 --faults 0 --gallery {gallery} --jobs 1"
    text = report.to_markdown(tmp_path / "m.md")
    assert "| small | scaled | different | between fc and head, forward | yes |" in text
    assert f"<!-- made by: {data['command']} -->" in text
    assert "## Gallery\n" in text.partition(f"<!-- gallery made by: {data['command']} -->")[0]


def test_missed_faults_are_status_1_and_misplaced_ones_are_not(gallery, capsys):
    assert run(["mutate", "--configs", "0", "--faults", "0", "--jobs", "1", "--gallery", f"{gallery}:others"]) == 1
    printed = capsys.readouterr().out
    assert "missed: gallery:harmless:nothing: equal" in printed
    assert f"again: attn-bridge mutate --gallery {gallery}:others --case gallery:harmless:nothing" in printed
    assert "2 of 2 right entries equal, 1 of 2 faults seen, 0 placed rightly (0% of all)" in printed
    assert "misplaced:" not in printed
    assert "absent" not in printed


def test_a_false_alarm_is_status_1_and_can_be_rerun(objecting, capsys):
    assert run(["mutate", "--configs", "0", "--faults", "0", "--jobs", "1", "--gallery", objecting, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    wrong = next(one for one in data["gallery"] if one["case"] == "gallery:small")
    assert (wrong["verdict"], wrong["seen"]) == ("different", False)
    assert run(wrong["command"].split()[1:]) == 1
    assert "false alarm: gallery:small: different: " in capsys.readouterr().out


def test_an_entrys_error_is_shown_in_its_row(gallery):
    finding = run_trial(find_trial("gallery:failing:refused", f"{gallery}:failing"))
    assert (finding.verdict, finding.right) == ("refused", "NO")
    assert re.fullmatch(
        r"refused: gallery:failing:refused raised SystemExit: not today \(.*pairs\.py:\d+\)", finding.row()[2]
    )
    again: Finding = pickle.loads(pickle.dumps(finding))
    assert again == finding


def test_a_gallery_is_planned_in_order_without_missing_packages(gallery):
    assert list(load_entries(f"{gallery}:others")) == ["harmless", "misplaced"]
    assert [str(one) for one in plan_gallery(gallery)] == ["gallery:small", "gallery:small:scaled"]
    assert find_trial("gallery:small", gallery) == GalleryTrial(gallery, "small")


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        ("{folder}/none.py", None, "{folder}/none.py does not exist"),
        ("{gallery}:missing", None, "{gallery} has no missing"),
        ("{gallery}:nothing", None, "{gallery}:nothing must give entries, name -> "),
        ("{gallery}:unnamed", None, "{gallery}:unnamed must give entries, name -> "),
        ("{gallery}:number", None, "{gallery}:number must give entries, name -> "),
        ("no_such_module", None, "there is no module no_such_module "),
        ("{gallery}", "gallery:small:other", "case (gallery:small:other) must be one of gallery:small, "),
        (None, "gallery:small", "case (gallery:small) is of a gallery: name it with --gallery"),
    ],
)
def test_an_invalid_gallery_is_one_line_and_status_2(name, case, message, gallery, tmp_path, capsys):
    words = {"gallery": gallery, "folder": tmp_path}
    options = [] if name is None else ["--gallery", name.format(**words)]
    options += [] if case is None else ["--case", case]
    assert run(["mutate", "--jobs", "1", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message.format(**words)}"), printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
