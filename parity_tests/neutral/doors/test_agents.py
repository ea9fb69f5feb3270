"""Answers for agents: short, with the next step; and calls that are refused before anything runs."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys

import pytest

from attn_bridge.cli.app import run
from attn_parity.agents import answers
from attn_parity.agents.calls import CallError, Calls
from attn_parity.confinement import process
from attn_parity.confinement.keeper import Ending
from attn_parity.rendering.terminal import as_text

from ...support.judging.reports import SUSPECT, different_report


@pytest.fixture
def calls(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "net.py").write_text("")
    (root / "out").symlink_to(tmp_path)
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    (tmp_path / "other.py").write_text("")
    return Calls(root, 1.0, 1 << 30)


REFUSED = [
    (("compare", "net.py", "net.py:B"), "first (net.py) must read file.py:factory or module:factory"),
    (("compare", "--html=x:B", "net.py:B"), "first (--html=x:B) must read file.py:factory or module:factory"),
    (("compare", "net.py:A", "../other.py:B"), "../other.py is not below the root "),
    (("compare", "net.py:A", "out/other.py:B"), "out/other.py is not below the root "),
    (("compare", "net.py:A", "/etc/x.py:B"), "/etc/x.py is not below the root "),
    (("compare", "net.py:A", "gone.py:B"), "gone.py does not exist below the root "),
    (("compare", "net.py:A", "net.py:B", "pipe"), "pipe is not a file"),
    (("compare", "net.py:A", "net.py:B", "folder"), "folder is not a file"),
    (("laws", "./pipe:B"), "./pipe is not a file"),
    (("compare", "net.py:A", "net.py:B", "../x.npz"), "../x.npz is not below the root "),
    (("compare", "net.py:A", "net.py:B", None, ["x" * 2000]), "is too long"),
    (("convert_plan", "s3://bucket/x", "y"), "s3://bucket/x must be a path below the root"),
    (("convert_plan", "net.py", "../y"), "../y is not below the root "),
    (("laws", "other:\x1b[31m"), "side (other:\\x1b[31m) must read file.py:factory or module:factory"),
    (("explain", "r1", "output"), "report (r1) is not known; reports: none yet"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_call_is_refused_before_anything_runs(call, message, calls, monkeypatch):
    monkeypatch.setattr(process, "run", lambda *_, **__: pytest.fail("it ran"))
    name, *arguments = call
    with pytest.raises(CallError) as error:
        getattr(calls, name)(*arguments)
    assert message in str(error.value)
    assert str(error.value).isprintable()


def answered(calls, monkeypatch, data):
    """Have every command write this report, and return the words of each."""
    asked = []

    def write(words, folder, scratch, **limits):
        assert limits.pop("stop") is None
        asked.append((words[:-1], folder, limits))
        (scratch / "report.json").write_text(json.dumps(data))
        return Ending("exit", 1, "")

    monkeypatch.setattr(process, "run", write)
    return asked


def test_options_are_single_words_and_reports_are_kept(calls, monkeypatch):
    asked = answered(calls, monkeypatch, different_report().to_json())
    text = calls.compare("net.py:A", "m:B", None, ["2,3"], seeds=2, fixed=["--json"], allow={"norm": "eps"})
    options = ["--shape=2,3", "--seeds=2", "--fixed=--json", "--allow=norm=eps"]
    limits = {"seconds": 1.0, "memory": 1 << 30}
    assert asked == [(["compare", "net.py:A", "m:B", *options], calls.root, limits)]
    assert "report: r1 (resource parity://reports/r1)" in text
    assert json.loads(calls.full("r1"))["verdict"] == "different"
    for _ in range(50):
        calls.compare("net.py:A", "m:B")
    with pytest.raises(CallError, match=r"^report \(r1\) is not known; reports: r2, "):
        calls.full("r1")


def test_a_forged_report_is_no_answer(calls, monkeypatch):
    answered(calls, monkeypatch, {"tensors": [1]})
    with pytest.raises(CallError, match="its process ended without a result"):
        calls.compare("net.py:A", "m:B")


def test_answers_fit_and_end_with_the_next_step():
    data = different_report().to_json()
    tensors = [{**data["tensors"][0], "name": f"é{'x' * 280}{number}", "verdict": "different"} for number in range(40)]
    for text in (answers.on_comparison({**data, "tensors": tensors, "notes": ["n" * 999] * 9}, "r1"),
                 answers.on_comparison(data, "r1")):  # fmt: skip
        assert len(text.encode()) <= 2000
        assert text.splitlines()[-1].startswith("next: call explain with report='r1' and path=")
    assert answers.limited(["a\x1b[31m\nb"], "go") == "a\\x1b[31m\\nb\nnext: go"


def test_code_between_two_submodules_is_the_next_step_itself():
    data = different_report().to_json()
    first = {**data["first_divergence"], "path": "", "between": ["norm", "out"], "candidates": []}
    last = answers.on_comparison({**data, "first_divergence": first}, "r1").splitlines()[-1]
    assert last.startswith("next: compare the code of both sides between norm and out")
    assert last.endswith(", mend the second side, and call compare again")


def test_an_answer_has_the_lines_of_the_command():
    report = different_report()
    lines, page = answers.on_comparison(report.to_json(), "r1").splitlines(), as_text(report, width=400).splitlines()
    same = [line for line in page if line.startswith(("different:", "first divergence", "hint:"))]
    assert len(same) == 3
    assert [line for line in lines if line in same] == same
    worst = page[next(i for i, line in enumerate(page) if "tensors are not equal" in line) + 1 :][:2]
    assert worst[1].strip() in {line.strip() for line in lines}
    assert f"first divergence (forward)\ncause, as far as the numbers show: {report.first_divergence.hint}\n" in (
        answers.on_path(report.to_json(), "r1", SUSPECT)
    )


def test_a_broken_law_has_its_witness():
    witness = {"tensor": "output", "index": [0, 1], "expected": 1.0, "got": 2.0, "change": "with another row"}
    broken = {"name": "batch", "status": "broken", "why": "rows mix", "witness": witness}
    text = answers.on_laws({"summary": "1 broken", "laws": [broken, {"name": "causality", "status": "holds"}]}, "r2")
    assert "batch: broken: rows mix: output[0, 1] is 1.0, and 2.0 with another row\ncausality: holds\n" in text
    last = text.splitlines()[-1]
    assert last.startswith("next: if this is an original, leave it as it is: a port of it must break batch alike, ")
    assert last.endswith(
        "; if it is a port, call laws on its original, and mend batch if it holds there; else mend batch"
    )
    meant = {**broken, "name": "gradients", "purpose": "a straight-through estimator"}
    last = answers.on_laws({"summary": "1 broken", "laws": [meant]}, "r2").splitlines()[-1]
    assert last.startswith(
        "next: if this is an original, leave it as it is, above all if it is meant (a straight-through "
    )


def test_without_the_package_the_server_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    monkeypatch.delitem(sys.modules, "attn_parity.agents.server", raising=False)
    monkeypatch.delattr("attn_parity.agents.server", raising=False)
    assert run(["mcp", "--root", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: mcp is not installed (")
    assert line.endswith("): pip install 'attn-bridge[mcp]'\n")
    assert run(["mcp", "--root", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err == f"error: --root {tmp_path / 'gone'} is not a folder\n"


def test_a_submodule_without_a_tree_is_shown_by_its_tensors():
    data = different_report().to_json()
    data["tree"] = None
    inside = next(tensor["name"] for tensor in data["tensors"] if "." in tensor["name"])
    path = inside.removeprefix("grad ").rpartition(".")[0]
    assert inside in answers.on_path(data, "r1", path)


def test_errors_name_the_tools_arguments(calls, monkeypatch):
    failed = Ending("exit", 2, "error: --shape (2,x) must be whole numbers; --from (y) is not known")
    monkeypatch.setattr(process, "run", lambda *_, **__: failed)
    with pytest.raises(CallError, match=r"^shapes \(2,x\) must be whole numbers; from_layout \(y\) is not known$"):
        calls.compare("net.py:A", "net.py:B", None, ["2,x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"side": "net.py:A", "shape": "2,3"}, "laws has no argument shape; it has side, inputs, shapes, only"),
        ({"side": "net.py:A", "shapes": "2,3"}, "laws: shapes ('2,3') should be a valid list"),
        ({"side": 7}, "laws: side (7) should be a valid string"),
        ({"only": ["batch"]}, "laws: side is missing"),
    ],
)
def test_arguments_of_a_tool_are_refused_in_one_line(arguments, message, calls):
    anyio = pytest.importorskip("anyio")
    exceptions = pytest.importorskip("mcp.server.mcpserver.exceptions")
    from attn_parity.agents.server import serve

    with pytest.raises(exceptions.ToolError) as error:
        anyio.run(serve(calls).call_tool, "laws", arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("explain", {"report": "r1", "path": "output"}),
        ("laws", {"side": "net.py:A", "shapes": ["2,3"]}),
        ("convert_plan", {"source": "a", "target": "b", "dtype": "f16"}),
    ],
)
def test_a_tool_answers_what_its_call_returns(tool, arguments, calls, monkeypatch):
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("mcp.server.mcpserver")
    from attn_parity.agents.server import serve

    call = getattr(calls, tool)

    @functools.wraps(call)
    def answered(*words, stop=None, **named):
        given = inspect.signature(call).bind(*words, **named).arguments
        return f"the answer to { {name: value for name, value in given.items() if value is not None} }"

    monkeypatch.setattr(calls, tool, answered)
    assert f"the answer to {arguments}" in str(anyio.run(serve(calls).call_tool, tool, arguments))
