"""A report as JSON, in a terminal, as JUnit XML and as an HTML page; what a browser makes of it is tested beside."""

import dataclasses
import io
import json
import re
import stat
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from attn_bridge.parity.compare.results.changes import Changes
from attn_bridge.parity.compare.results.findings import SCHEMA, Allowance, ModuleNode, Worst
from attn_bridge.parity.compare.results.report import Report
from attn_bridge.parity.rendering import branch, files, outline, terminal, text, wording
from attn_bridge.parity.rendering.html import as_html
from attn_bridge.parity.rendering.json import as_json
from attn_bridge.parity.rendering.junit import as_junit
from parity_tests.support.html_outline import Outline
from parity_tests.support.reports import (
    COMMAND,
    HOSTILE,
    SUSPECT,
    different_report,
    equal_report,
    equal_tensor,
    hostile_report,
    inconclusive_report,
    large_report,
)
from parity_tests.support.work import count_calls

EMPTY = Report("equal", [])
WRITERS = {"json": as_json, "html": as_html, "junit": as_junit}


def printed(report: Report, width: int = 110, full: bool = False) -> str:
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width), full)
    return out.getvalue()


def test_a_report_is_text_in_jupyter_too(monkeypatch):
    report = different_report()
    wanted = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == wanted
    assert wanted.startswith("different: ")


# ---- files


@pytest.mark.parametrize("form", WRITERS)
def test_what_is_returned_is_what_is_written(form, tmp_path):
    path = tmp_path / "report"
    returned = WRITERS[form](different_report(), path)
    written = path.read_bytes().decode("utf-8")
    assert (json.loads(written) if form == "json" else written) == returned
    assert written.endswith("\n")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("method", ["str", "Path"])
def test_the_methods_of_a_report_write_the_same(form, method, tmp_path):
    path = tmp_path / "report"
    given = str(path) if method == "str" else path
    report = different_report()
    assert getattr(report, f"to_{form}")(given) == WRITERS[form](report)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("form", WRITERS)
def test_a_folder_in_place_of_a_file_is_one_line(form, tmp_path):
    with pytest.raises(ValueError, match=r"^.*report cannot be written: it is a folder$") as caught:
        WRITERS[form](different_report(), folder := made(tmp_path / "report"))
    assert str(caught.value) == f"{folder} cannot be written: it is a folder"
    assert [list(tmp_path.iterdir()), list(folder.iterdir())] == [[folder], []]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("form", WRITERS)
def test_a_missing_folder_is_one_line_and_costs_no_work(form, tmp_path):
    path = tmp_path / "absent" / "report"
    with pytest.raises(ValueError, match="there is no folder") as caught:
        WRITERS[form](None, path)  # it is found out before the report is looked at
    assert str(caught.value) == f"{path} cannot be written: there is no folder {path.parent}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["loop", "x" * 300], ids=["a link to itself", "a name too long"])
def test_other_bad_paths_are_one_line(path, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"cannot be written: .+") as caught:
        as_json(EMPTY, tmp_path / path)
    assert str(caught.value).startswith(str(tmp_path / path))
    assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "report"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match="report cannot be written: No space left on device"):
        as_html(EMPTY, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path):
    path = tmp_path / "report"
    path.write_text("before")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    as_junit(EMPTY, link)
    assert link.is_symlink()
    assert path.read_text().startswith("<?xml")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    as_json(EMPTY, "/dev/null")
    assert not Path("/dev/null").is_file()
    assert files.checked(None) is None


# ---- JSON


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
        "message": different_report().first_divergence.message,
        "between": None,
        "hint": different_report().first_divergence.hint,
        "second_label": "flax",
    }
    assert as_json(equal_report())["first_divergence"] is None
    assert as_json(EMPTY)["tree"] is None


def test_json_keeps_the_tree_and_says_how_the_difference_grew():
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


def test_json_holds_former_names_beside_todays():
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


# ---- terminal


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("make", [different_report, equal_report, hostile_report])
def test_no_line_is_wider_than_the_terminal(make, width):
    lines = printed(make(), width).splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("again: ")] == []


@pytest.mark.parametrize("width", [80, 110])
def test_a_terminal_shows_what_differs_where_and_how_to_run_it_again(width):
    shown = printed(different_report(), width)
    flat = " ".join(shown.split())
    assert flat.startswith("different: GPTModel (torch) and GPTModel (Flax), 54 tensors, 3 seeds")
    assert "first divergence (forward) in blocks.3.norm1 (Flax: layers.3.norm1) eps is 1e-05" in flat
    assert "hint: both eps differ by a factor of 10" in flat
    assert f"again: {COMMAND}\n" in shown
    for line in (
        "4 of 54 tensors are not equal",
        "output different 3.1e-03 of the largest value at (1, 7, 12): torch 0.731058578, Flax 0.727935218, on random "
        "weights, seed 1",
        "grad x different 412 of 8640 elements beyond 7.31e-13 at (0, 0, 3): torch 0.25, Flax nan, on your weights",
        "grad head.weight precision Flax: 1.8 x the allowed error",
        "weight probe inconclusive Flax alone returned it",
        "... and 50 equal",
        "note: The Flax side was lifted to float64 in 2 layers",
        "reached by no comparison: blocks.{i}.attn.rel_bias (12); pos_ids.table",
        "the outputs do not depend on: blocks.{i}.attn.W_key.bias (12)",
        "not run: dropout 0.1 in blocks.*.drop: both sides are in eval mode",
        "--full shows every tensor, modules, pairing, noise, environment",
    ):
        assert line in flat
    assert not re.search("python 3.11|run twice|W_query.kernel", flat)


def test_what_takes_long_to_read_is_shown_on_request():
    flat = " ".join(printed(different_report(), 110, full=True).split())
    for line in (
        "first divergence (forward) in blocks.3.norm1 (Flax: layers.3.norm1): eps is 1e-05",
        "hint: both eps differ by a factor of 10",
        "grad head.weight: precision: flax used 180% of its allowance in float32",
        "noise, each side against itself, relative: torch, run twice 0; Flax, eager and jit 2.2e-16",
        "unexercised (no comparison reached them): blocks.{i}.attn.rel_bias (12); pos_ids.table",
        "invariant (the outputs do not depend on them): blocks.{i}.attn.W_key.bias (12)",
        "python 3.11.7, machine x86_64, 2 cores, torch 2.13.0+cpu",
        "peak memory 1.3 GB",
        "pairing of parameters: 48 by names, 1 by probe",
    ):
        assert line in flat


def test_what_is_printed_in_python_is_what_the_command_prints():
    for make in (different_report, equal_report, inconclusive_report, hostile_report):
        assert str(make()) == printed(make(), 80).rstrip("\n")


def test_an_equal_report_shows_how_much_room_there_was():
    report = equal_report()
    report.tensors[7] = dataclasses.replace(report.tensors[7], second_used=0.87, sample="random weights, seed 3")
    lines = str(report).splitlines()
    place = lines.index("closest to the limit, as a share of the allowed error:")
    assert lines[place + 1].split("  ") == ["", report.tensors[7].name, " 87%", "random weights, seed 3"]
    assert re.fullmatch(r"  output +45%  your weights", lines[place + 2])


def test_the_branch_leads_to_the_first_divergence_and_counts_what_is_beside_it():
    lines = str(different_report()).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("where;"))
    assert lines[start + 1].split() == ["GPTModel", "different", "fwd", "4.1e-03", "bwd", "6.0e-03"]
    assert lines[start + 2] == "  beside it: 13 equal, 1 torch only, 1 Flax only"
    assert lines[start + 3].startswith("  blocks.3  TransformerBlock ")
    assert lines[start + 4] == "    beside it: 3 equal, 1 not run"
    assert re.fullmatch(r"    norm1  LayerNorm +different fwd 3\.1e-03 +bwd 5\.2e-03  <- here", lines[start + 5])
    assert not any("blocks.7" in line for line in lines)


def grown(report: Report) -> Report:
    """Return a report of everything that a report can hold, and much of it."""
    first = report.first_divergence
    node = ModuleNode("deep", "deep", "Block", "Block", "different", first=True)
    for level in range(30):
        below = ModuleNode(f"x.{level}", f"x.{level}", "Linear" * 9, "Dense", "equal")
        node = ModuleNode(f"m.{level}", f"m.{level}", "Block" * 9, "Block", "different", children=(node, below))
    long = "a sentence about what happened that goes on and on " * 9
    return dataclasses.replace(
        report,
        tensors=report.tensors * 40,
        tree=node if first else report.tree,
        first_divergence=first and dataclasses.replace(first, message=long, hint=long, path="x" * 300),
        notes=[f"{number} {long}" for number in range(50)],
        unexercised=[f"{'y' * number}.weight" for number in range(90)],
        unreached=[long] * 30,
        allowed=[Allowance(f"blocks.{number}.norm", long, ("output",)) for number in range(40)],
        changes=Changes(("equal", "different"), ("", "fc"), ("output",) * 9, share=("output", 0.1, 4e9)),
        first_name="Model" * 40,
        command="attn-bridge compare " + "a.py " * 90,
    )


@pytest.mark.parametrize("make", [different_report, equal_report, inconclusive_report, hostile_report])
@pytest.mark.parametrize("change", [lambda report: report, grown], ids=["as it is", "grown"])
def test_a_report_is_short_whatever_the_size_of_the_model(change, make):
    report = change(make())
    lines = str(report).splitlines()
    assert len(lines) <= (25 if report.passed else 45)
    assert [line for line in lines if len(line) > 80 and not line.startswith("again: ")] == []
    assert all(str(one)[:40] in str(report) for one in report.allowed[:4])


def test_one_of_something_is_singular():
    report = dataclasses.replace(EMPTY, tensors=[equal_tensor("output")], seeds=1, samples=1)
    assert ", 1 tensor, 1 seed, 1 sample, " in report.summary()
    assert ", 54 tensors, 3 seeds, 9 samples, " in equal_report().summary()


def test_what_is_said_of_a_tensor_is_said_whole():
    held = "992 of 1024 elements that the two sides hold are not the same"
    worst = Worst(2, (12, 7, 12), -0.731058578, -0.727935218, 0.7310585786300049)
    on = "random weights, hard inputs, seed 3"
    tensors = [
        equal_tensor("weight proj.weight", verdict="different", relative=None, message=held, worst=None),
        equal_tensor("output", verdict="different", relative=0.5, worst=worst, sample=on),
    ]
    lines = str(dataclasses.replace(EMPTY, verdict="different", tensors=tensors)).splitlines()
    assert lines[lines.index("2 of 2 tensors are not equal:") + 1 :][:5] == [
        "weight proj.weight  different",
        f"  {held}",
        "output              different  5.0e-01 of the largest value",
        "  at (12, 7, 12): torch -0.731058578, Flax -0.727935218,",
        f"    on {on}",
    ]


def test_what_was_not_run_is_listed_item_by_item():
    rows = "34 of 50 rows of tok.weight: no gradient reached 0-2, 5, 8-11, 17, ..."
    few = dataclasses.replace(EMPTY, unreached=["7 of 16 rows of pos: no gradient reached 9-15", rows])
    assert f"not run: {'; '.join(few.unreached)}" in " ".join(str(few).split())
    many = dataclasses.replace(
        EMPTY, unreached=[f"argument {name} of the Flax module: not given" for name in "abcdefgh"]
    )
    assert re.search(r"argument e of the Flax module: not given; and 3 more$", str(many))
    assert "…" not in str(few) + str(many)


def test_a_note_is_shown_whole_or_left_to_the_full_report():
    note = f"{'what it says of a fault, ' * 8}and its last word"
    notes = [f"{number} {note}" for number in (1, 2)]
    for report in (equal_report(), different_report()):
        shown = " ".join(str(dataclasses.replace(report, notes=notes)).split())
        assert f"note: 1 {note}" in shown
        assert f"note: 2 {note}" in shown or "--full shows 1 more note" in shown
        assert "…" not in shown


def test_what_is_too_long_is_cut_between_words():
    words = grown(different_report()).first_divergence.message.split()
    cut = [line for line in str(grown(different_report())).splitlines() if line.endswith(" …")]
    cut = [line for line in cut if "x" * 60 not in line and "ModelModel" not in line]
    assert cut
    for line in cut:
        assert line.split()[-2] in words


def test_the_whole_tree_marks_one_module_and_folds_equal_neighbours():
    out = io.StringIO()
    Console(file=out, width=110).print(branch.tree(different_report()))
    lines = out.getvalue().splitlines()
    marked = [place for place, line in enumerate(lines) if "<- first divergence here" in line]
    assert len(marked) == 1
    assert re.search(r"norm1 .* different +fwd 3.1e-03 +bwd 5.2e-03 +x3e\+04$", lines[marked[0] - 1])
    tree = "\n".join(lines)
    assert re.search(r"blocks\.0 \.\.\. blocks\.2 .* 3 equal +fwd 3.2e-15 +bwd 5.1e-15", tree)
    assert re.search(r"blocks\.4 \.\.\. blocks\.11 .* 8 equal", tree)
    assert re.search(r"pos_ids .*torch only$", tree, re.M)
    assert re.search(r"probe .*Flax only$", tree, re.M)
    assert re.search(r"drop .*not run$", tree, re.M)
    assert "blocks.7" not in tree


def test_everything_is_shown_on_request():
    shown = printed(different_report(), 120, full=True)
    assert all(f"── blocks.{index} " in shown for index in range(12))
    assert shown.count("grad blocks.") == 49
    assert "layers.11.attn.out_proj.kernel" in shown
    assert "{i}.attn.W_query" not in shown


def test_a_small_tree_is_shown_whole():
    leaves = tuple(ModuleNode(f"a.{i}", f"a.{i}", "Linear", "Linear", "equal") for i in range(5))
    assert [len(run) for run in outline.runs(leaves, collapse=True)] == [5]
    report = dataclasses.replace(EMPTY, tree=ModuleNode("a", "a", "Stack", "Stack", "equal", children=leaves))
    assert re.findall(r"── (\d)  Linear", printed(report, full=True)) == list("01234")


@pytest.mark.parametrize(
    "odd",
    [
        ModuleNode("b", "b", "Linear", "Linear", "different"),
        ModuleNode("b", "b", "Linear", "Linear", "equal", first=True),
        ModuleNode("b", None, "Linear", "Linear", "equal"),
        ModuleNode("b", "b", "Linear", "Linear", "equal", children=(ModuleNode("b.c", "b.c", verdict="precision"),)),
        ModuleNode("b", "b", "Linear", "Linear"),
        ModuleNode("b", "b", "Linear", "Einsum", "equal"),
    ],
    ids=["different", "first", "no counterpart", "differs inside", "not run", "another class"],
)
def test_only_what_is_entirely_equal_and_of_one_class_is_folded(odd):
    same = ModuleNode("a", "a", "Linear", "Linear", "equal")
    assert [len(run) for run in outline.runs([same, same, same, odd, same, same], collapse=True)] == [3, 1, 1, 1]


def test_the_whole_table_has_failures_first():
    shown = printed(different_report(), full=True)
    rows = shown.split("─\n")[1].splitlines()
    names = [match[0] for row in rows if (match := re.match(r"(output|grad|weight)\S*( \S+)?", row))]
    first = ["output", "grad x", "grad head.weight", "weight probe", "output[1]"]
    assert [name.split("  ")[0] for name in names if not name.startswith("weights")][:5] == first
    assert re.match(r"output +different +3\.1e-03 +31% \| 118x +0\.21 \| 5210$", rows[0].rstrip())
    flat = " ".join(" ".join(rows).split())
    assert "at (1, 7, 12): torch 0.731058578, Flax 0.727935218, on random weights, seed 1" in flat


def test_failures_that_are_left_out_are_counted():
    bad = [equal_tensor(f"a{number}", verdict="different", relative=0.5) for number in range(30)]
    shown = str(dataclasses.replace(EMPTY, verdict="different", tensors=[*bad, equal_tensor("b")]))
    assert "30 of 31 tensors are not equal" in shown
    assert "... and 22 more not equal, 1 equal" in shown
    assert shown.count("5.0e-01 of the largest value") == 8


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({"verdict": "different", "relative": 0.012}, "1.2e-02 of the largest value"),
        ({"verdict": "different", "relative": None, "message": "3 of 9 elements; x"}, "3 of 9 elements"),
        ({"verdict": "precision", "side": "first", "first_used": 120.0}, "torch: 120 x the allowed error"),
        ({"verdict": "precision", "side": "second", "second_used": 1.04}, "Flax: 1 x the allowed error"),
        ({"verdict": "precision", "side": "torch", "first_used": 12.0}, "torch: 12 x the allowed error"),
        ({"verdict": "precision", "side": "flax", "second_used": 12.0}, "Flax: 12 x the allowed error"),
        ({"verdict": "equal"}, "45% of the allowed error"),
        ({"verdict": "equal", "meaning_used": 0.99}, "99% of the allowed error"),
    ],
)
def test_a_tensor_has_one_number_that_says_what_it_is_relative_to(changes, written):
    assert wording.measured(equal_tensor("output", **changes), EMPTY) == written


def test_the_sides_are_called_as_the_report_calls_them():
    report = dataclasses.replace(different_report(), first_label="first", second_label="second")
    first = dataclasses.replace(report.first_divergence, second_label="second")
    report = dataclasses.replace(report, first_divergence=first)
    body = as_html(report)
    for shown in (str(report), printed(report, full=True), body, as_junit(report)):
        assert "second" in shown
        assert not re.search(r"\(Flax\)|\(torch\)|torch 0\.7|Flax only|Flax: layers|>Flax<", shown)


# ---- allowed differences, and what has changed


def allowed_report() -> Report:
    report = different_report()
    report.tensors[3] = dataclasses.replace(report.tensors[3], allowed="head")
    return dataclasses.replace(report, allowed=[Allowance("head", "tied on purpose", ("grad head.weight",))])


def test_every_rendering_says_what_is_allowed_and_why():
    report = allowed_report()
    line = "allowed: head: tied on purpose"
    assert line in str(report)
    assert line in printed(report, full=True)
    assert line in report.explain()
    assert line in Outline(as_html(report)).words
    cases = {case.get("name"): case for case in parsed(report).iter("testcase")}
    assert [one.tag for one in cases["grad head.weight"]] == ["skipped"]
    assert cases["grad head.weight"][0].get("message") == line
    assert (parsed(report)[0].get("skipped"), parsed(report)[0].get("failures")) == ("1", "2")
    covers = as_json(report)["allowed"]
    assert covers == [{"path": "head", "reason": "tied on purpose", "covers": ["grad head.weight"], "known": True}]
    assert "3 of 54 tensors are not equal" in str(report)
    assert "grad head.weight" not in str(report).partition("where;")[0].partition("tensors are not equal")[2]


def test_an_allowance_that_allows_nothing_is_said():
    report = dataclasses.replace(equal_report(), allowed=[Allowance("gone", "it was")])
    assert "allowed: gone: it was (nothing there differs)" in str(report)


def test_what_has_changed_since_a_baseline_is_shown_everywhere():
    before, now = equal_report(), different_report()
    report = dataclasses.replace(now, changes=now.changes_since(before))
    line = "since the baseline: verdict equal -> different; 4 newly failing (output, grad x, grad head.weight, ...)"
    flat = " ".join(str(report).split())
    assert line[:70] in flat
    for shown in (printed(report, 130, full=True), Outline(as_html(report)).words):
        assert line in shown
    assert as_json(report)["changes"]["verdict"] == ["equal", "different"]


def test_verdicts_are_coloured():
    out = io.StringIO()
    terminal.render(different_report(), Console(file=out, width=110, force_terminal=True, color_system="standard"))
    assert "\x1b[1;31mdifferent\x1b[0m: GPTModel" in out.getvalue()
    assert "\x1b[31mdifferent   \x1b[0m  3.1e-03" in out.getvalue()


def test_a_hostile_name_cannot_steer_the_terminal():
    shown = printed(hostile_report())
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert r"\x1b[31m\ud800\u202e" in shown
    shown.encode("utf-8")


def test_reports_without_a_tree_or_tensors_are_short():
    assert " ".join(printed(inconclusive_report()).split()) == inconclusive_report().summary()
    assert str(branch.tree(EMPTY).label) == "no module tree was looked for"


# ---- JUnit


def parsed(report: Report) -> ET.Element:
    return ET.fromstring(as_junit(report).encode("utf-8"))


def test_junit_has_a_case_per_tensor_and_counts_them():
    root = parsed(different_report())
    suite = root.find("testsuite")
    assert root.tag == "testsuites"
    assert suite.attrib == {
        "name": "GPTModel (torch) and GPTModel (Flax)",
        "tests": "54",
        "failures": "3",
        "errors": "1",
        "skipped": "0",
        "time": "4.720",
    }
    assert [case.get("name") for case in suite.iter("testcase")] == [one.name for one in different_report().tensors]
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties == different_report().environment
    assert suite.find("system-out").text == different_report().explain()


def test_junit_says_what_failed():
    cases = {case.get("name"): case for case in parsed(different_report()).iter("testcase")}
    assert list(cases["output[1]"]) == []
    (failure,) = cases["output"]
    assert (failure.tag, failure.get("type")) == ("failure", "different")
    assert failure.get("message").startswith("412 of 8640 elements beyond 7.31e-13")
    assert "worst at (1, 7, 12) of sample 2: torch 0.731058578, Flax 0.727935218, float64 0.731058579" in failure.text
    assert f"again: {COMMAND}" in failure.text
    (error,) = cases["weight probe"]
    assert (error.tag, error.get("type"), error.get("message")) == ("error", "inconclusive", "Flax alone returned it")


@pytest.mark.parametrize(
    ("verdict", "tag"), [("different", "failure"), ("precision", "failure"), ("inconclusive", "error")]
)
def test_junit_never_passes_a_report_that_did_not(verdict, tag):
    report = dataclasses.replace(inconclusive_report(), verdict=verdict, tensors=[equal_tensor("output")])
    suite = parsed(report).find("testsuite")
    (problem,) = suite.findall(f"testcase/{tag}")
    assert problem.get("message") == "the Flax side takes no argument attention_mask"
    assert int(suite.get("failures")) + int(suite.get("errors")) == 1
    assert suite.get("tests") == "2"


def test_junit_of_hostile_names_is_well_formed():
    case = parsed(hostile_report()).find("testsuite/testcase")
    assert case.get("name") == text.visible(HOSTILE)
    assert r"]]>" in case.get("name")
    assert parsed(EMPTY).find("testsuite").get("tests") == "0"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\0\x08\x1b\x7f\x9b", r"\x00\x08\x1b\x7f\x9b"),
        ("\ud800\ufffe\u202e\u2066", r"\ud800\ufffe\u202e\u2066"),
        ("a\tb\nc", "a\tb\nc"),
        ("\r", r"\r"),
        ("größe 张 😀 ½", "größe 张 😀 ½"),
    ],
)
def test_control_characters_are_written_out(raw, shown):
    assert text.visible(raw) == shown


# ---- numbers


@pytest.mark.parametrize(
    ("write", "value", "written"),
    [
        (text.relative, None, "-"),
        (text.relative, 0.0, "0"),
        (text.relative, 1.23e-15, "1.2e-15"),
        (text.relative, float("inf"), "inf"),
        (text.share, 0.354, "35%"),
        (text.share, 0.004, "<1%"),
        (text.share, 0.0, "0%"),
        (text.share, 1.8, "180%"),
        (text.share, 118.4, "118x"),
        (text.share, float("nan"), "nan"),
        (text.ulps, 0.314, "0.31"),
        (text.ulps, 5210.4, "5210"),
        (text.ulps, 4e7, "4e+07"),
        (text.ulps, float("inf"), "inf"),
        (text.growth, 1.1, "x1.1"),
        (text.growth, 31000.0, "x3e+04"),
        (text.number, 0.1, "0.1"),
        (text.number, None, "-"),
        (text.index, (np.int64(0), 3), "(0, 3)"),
        (text.shape, (2, 3), "2 x 3"),
        (text.shape, (), "scalar"),
        (text.memory, 1_312_000_000, "1.3 GB"),
        (text.memory, 52_000_000, "52 MB"),
    ],
)
def test_numbers_are_written_for_readers(write, value, written):
    assert write(value) == written


# ---- speed


def test_ten_times_as_many_tensors_take_at_most_ten_times_the_work():
    def render(report):
        return as_html(report), as_json(report), as_junit(report), printed(report)

    report, small = large_report(), large_report(100)
    assert len(report.tensors) == len(report.pictures) == 1000
    render(small)  # what is imported and compiled once
    assert count_calls(lambda: render(report)) < 11 * count_calls(lambda: render(small))
    page, data, xml, shown = render(report)
    assert page.count('<tr><th scope="row"><span class="name">grad') == 1000 + 5
    assert len(data["tensors"]) == xml.count("<testcase") == 1000
    assert "10 of 1000 tensors are not equal" in shown
