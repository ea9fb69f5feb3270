"""A report in a terminal: short, within its width, and the first divergence in view."""

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

from attn_parity.rendering import branch, terminal, text
from attn_parity.rendering.html import as_html
from attn_parity.rendering.junit import as_junit
from attn_parity.results.changes import Changes
from attn_parity.results.findings import Allowance, Candidate, ModuleNode, Worst
from attn_parity.results.report import Report
from parity_tests.support.judging.reports import (
    COMMAND,
    different_report,
    equal_report,
    equal_tensor,
    hostile_report,
    inconclusive_report,
)

from .renderings import EMPTY, printed


def test_a_report_is_text_in_jupyter_too(monkeypatch):
    report = different_report()
    wanted = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == wanted
    assert wanted.startswith("different: ")


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("make", [different_report, equal_report, hostile_report])
def test_no_line_is_wider_than_the_terminal(make, width):
    lines = printed(make(), width).splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("again: ")] == []


@pytest.mark.parametrize("show", [printed, as_html, lambda report: str(report.first_divergence)])
def test_other_places_that_are_not_excluded_are_shown(show):
    report = different_report()
    others = Candidate("blocks.3", "layers.3", ("blocks.3.gate", "blocks.3")), Candidate("conv1d", "conv1d")
    first = dataclasses.replace(report.first_divergence, candidates=others)
    flat = " ".join(show(dataclasses.replace(report, first_divergence=first)).split())
    assert "ot excluded: between blocks.3.gate and the outputs, in blocks.3; in conv1d" in flat


@pytest.mark.parametrize("width", [80, 110])
def test_a_terminal_shows_differences_their_place_and_the_command(width):
    shown = printed(different_report(), width)
    flat = " ".join(shown.split())
    assert flat.startswith("different: GPTModel (torch) and GPTModel (Flax), 54 tensors, 9 runs (3 seeds)")
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
        "not covered: dropout 0.1 in blocks.*.drop: both sides are in eval mode",
        "--full shows every tensor, modules, pairing, noise, environment",
    ):
        assert line in flat
    assert not re.search("python 3.11|run twice|W_query.kernel", flat)


def test_printing_a_report_matches_the_command():
    for make in (different_report, equal_report, inconclusive_report, hostile_report):
        assert str(make()) == printed(make(), 80).rstrip("\n")


def test_an_equal_report_shows_the_remaining_margin():
    report = equal_report()
    report.tensors[7] = dataclasses.replace(report.tensors[7], second_used=0.87, sample="random weights, seed 3")
    lines = str(report).splitlines()
    place = lines.index("largest errors, in % of what is allowed (100 % fails):")
    assert lines[place + 1].split("  ") == ["", report.tensors[7].name, " 87%", "random weights, seed 3"]
    assert re.fullmatch(r"  output +45%  your weights", lines[place + 2])


def test_the_branch_leads_to_the_first_divergence():
    lines = str(different_report()).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("where;"))
    assert lines[start + 1].split() == ["GPTModel", "different", "fwd", "4.1e-03", "bwd", "6.0e-03"]
    assert lines[start + 2] == "  other submodules: 13 equal, 1 torch only, 1 Flax only"
    assert lines[start + 3].startswith("  blocks.3  TransformerBlock ")
    assert lines[start + 4] == "    other submodules: 3 equal; drop not judged"
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
def test_reports_of_large_models_are_short(change, make):
    report = change(make())
    lines = str(report).splitlines()
    assert len(lines) <= (25 if report.passed else 45)
    assert [line for line in lines if len(line) > 80 and not line.startswith("again: ")] == []
    assert all(str(one)[:40] in str(report) for one in report.allowed[:4])


def test_counts_of_one_are_singular():
    report = dataclasses.replace(EMPTY, tensors=[equal_tensor("output")], seeds=1, samples=1)
    assert ", 1 tensor, 1 run (1 seed), " in report.summary()
    assert ", 54 tensors, 9 runs (3 seeds), " in equal_report().summary()


def test_messages_of_tensors_are_not_cut():
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


def test_items_that_did_not_run_are_listed():
    rows = "34 of 50 rows of tok.weight: no gradient reached 0-2, 5, 8-11, 17, ..."
    few = dataclasses.replace(EMPTY, unreached=["7 of 16 rows of pos: no gradient reached 9-15", rows])
    assert f"not covered: {'; '.join(few.unreached)}" in " ".join(str(few).split())
    many = dataclasses.replace(EMPTY, unreached=[f"the Flax module's `{name}` (you gave none)" for name in "abcdefgh"])
    assert re.search(r"not covered: the Flax module's `a`, `b`, `c`, `d` and 4 more \(you gave none\)$", str(many))
    assert "…" not in str(few) + str(many)


def test_a_note_is_shown_whole_or_not_at_all():
    note = f"{'what it says of a fault, ' * 8}and its last word"
    notes = [f"{number} {note}" for number in (1, 2)]
    for report in (equal_report(), different_report()):
        shown = " ".join(str(dataclasses.replace(report, notes=notes)).split())
        assert f"note: 1 {note}" in shown
        assert f"note: 2 {note}" in shown or "--full shows 1 more note" in shown
        assert "…" not in shown


def test_long_text_is_cut_between_words():
    words = grown(different_report()).first_divergence.message.split()
    cut = [line for line in str(grown(different_report())).splitlines() if line.endswith(" …")]
    cut = [line for line in cut if "x" * 60 not in line and "ModelModel" not in line]
    assert cut
    for line in cut:
        assert line.split()[-2] in words


def test_omitted_failures_are_counted():
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
def test_a_tensors_error_names_its_reference(changes, written):
    assert text.measured(equal_tensor("output", **changes), EMPTY) == written


def test_renderings_use_the_reports_side_labels():
    report = dataclasses.replace(different_report(), first_label="first", second_label="second")
    first = dataclasses.replace(report.first_divergence, second_label="second")
    report = dataclasses.replace(report, first_divergence=first)
    body = as_html(report)
    for shown in (str(report), printed(report, full=True), body, as_junit(report)):
        assert "second" in shown
        assert not re.search(r"\(Flax\)|\(torch\)|torch 0\.7|Flax only|Flax: layers|>Flax<", shown)


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
