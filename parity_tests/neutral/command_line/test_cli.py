"""The command line without any framework: help, usage errors, and one line for each."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from attn_bridge.checkpoints.verification import Verification
from attn_bridge.cli import app, main
from attn_bridge.cli.app import run
from attn_bridge.cli.output import written
from attn_parity.check import matrix
from attn_parity.commands.outputs import Outputs
from attn_parity.results.report import Report

from ...support.judging.reports import different_report

USAGE_ERRORS = [
    ([], "error: Missing command. See attn-bridge --help\n"),
    (["bogus"], "error: No such command 'bogus'. See attn-bridge --help\n"),
    (
        ["check", "Foo"],
        "error: variant (Foo) must be one of simple_self_attention, SelfAttention_v1, SelfAttention_v2, ",
    ),
    (["check", "--case", "x"], "error: case (x) must be one of odd-sizes, "),
    (["check", "--dtype", "int8"], "error: dtype (int8) must be one of float64, float32, bfloat16, float16\n"),
    (["check", "--seeds", "0"], "error: seeds (0) must be at least 1\n"),
    (["check", "--seeds", "1001"], "error: seeds (1001) must be at most 1000\n"),
    (["check", "--jobs", "0"], "error: jobs (0) must be at least 1\n"),
    (["check", "--jobs", "many"], "error: --jobs takes auto or a whole number, got many\n"),
    (["check", "--seeds", "many"], "error: Invalid value for '--seeds': "),
    (["check", "--weights", "x.safetensors"], "error: --weights and --layout go together; layouts: torch, flax, "),
    (
        ["check", "--weights", "x", "--layout", "y"],
        "error: layout (y) is not known; docs/layouts.md lists all layouts",
    ),
    (["check", "--weights", "x", "--layout", "hf-bert"], "error: x: does not exist\n"),
    (
        ["check", "--weights", "x", "--layout", "hf-bert", "--set", "a"],
        "error: --set takes KEY=VALUE with a whole number",
    ),
    (["check", "--set", "num_heads=2"], "error: --set says what the layout of --weights can't"),
    (
        ["check", "--weights", "x", "--layout", "hf-bert", "--set", "num_heads=0"],
        "error: --set takes KEY=VALUE with a ",
    ),
    (
        ["check", "--json", "/no/such/folder/x.json"],
        "error: --json /no/such/folder/x.json cannot be written: there is no ",
    ),
    (["compare", "a:b", "c:d", "--seeds", "0"], "error: --seeds (0) must be at least 1\n"),
    (["compare", "a:b", "c:d", "--first-seed", "-1"], "error: --first-seed (-1) must be at least 0\n"),
    (["compare", "a:b", "c:d", "--mode", "x"], "error: --mode (x) must be one of eager, "),
    (["compare", "a:b", "c:d", "--dtype", "int8"], "error: --dtype (int8) must be one of "),
    (["compare", "a:b", "c:d", "--timeout", "0"], "error: --timeout (0) must be a number of seconds above 0\n"),
    (["dump", "a:b", "new", "--seeds", "0"], "error: --seeds (0) must be at least 1\n"),
    (["verify", "a", "b", "c"], "error: verify takes [SRC] DST, got 3 paths\n"),
    (["mutate", "--jobs", "0"], "error: jobs (0) must be at least 1\n"),
    (["mutate", "--framework", "torch"], "error: --framework (torch) goes with --mesh\n"),
    (["check", "LayerNorm", "--weights", "x", "--layout", "hf-bert"], "error: --weights checks the layers of a file; "),
]


def test_what_check_knows_is_named_to_the_last(capsys):
    assert run(["check", "cpu_flash"]) == 2
    assert capsys.readouterr().err.endswith(
        ", GatedConvolution, GatedDeltaNet, KimiDeltaAttention, LightningAttention, LinearAttention, Mamba, Mamba2, "
        "dot_product_attention\n"
    )


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS, ids=lambda value: " ".join(value)[:30])
def test_bad_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"]])
def test_help_and_version_are_status_0(arguments, capsys):
    assert run(arguments) == 0
    assert capsys.readouterr().out


def test_an_unwritable_file_does_not_stop_other_outputs(tmp_path, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    outputs = Outputs(html=str(gone / "x.html"), json=str(tmp_path / "x.json"), junit=str(gone / "x.xml"))
    gone.rmdir()
    with pytest.raises(ValueError, match=f"^{gone}/x.html cannot be written"):
        outputs.write(different_report())
    assert different_report().summary() in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "x.json").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_every_file_is_tried_and_the_first_error_raised():
    tried = []

    def write(number):
        tried.append(number)
        if number:
            raise OSError(f"no room for {number}")

    shown = []
    with (
        pytest.raises(OSError, match=r"^no room for 2$"),
        written(*(lambda number=number: write(number) for number in (0, 2, 1, 0))),
    ):
        shown += tried
    assert tried == shown == [0, 2, 1, 0]


def test_a_report_that_nobody_reads_is_written_all_the_same(tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("attn_parity.rendering.terminal.render", closed)
    with pytest.raises(BrokenPipeError):
        Outputs(json=str(tmp_path / "x.json")).write(different_report())
    assert (tmp_path / "x.json").stat().st_size


@pytest.mark.parametrize("name", ["html", "junit"])
def test_pages_do_not_go_to_stdout(name):
    with pytest.raises(ValueError, match=f"^--{name} - cannot be written: only --json goes to stdout$"):
        Outputs(**{name: "-"})


def test_check_help_gives_an_example(capsys):
    run(["check", "--help"])
    assert "Example: attn-bridge check" in capsys.readouterr().out


# ---- files to try the commands with


def test_demo_writes_the_same_files_every_time_and_names_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = {path.name + "/" * path.is_dir() for path in Path("demo").iterdir()}
    assert printed[0] == "wrote demo"
    assert {line.split()[0] for line in printed[1 : 1 + len(found)]} == found
    assert run(["demo", "my demo"]) == 0
    assert "  attn-bridge convert 'my demo'/gpt2 gpt2-flax" in capsys.readouterr().out.splitlines()
    for path in Path("demo").rglob("*.*"):
        assert path.read_bytes() == (Path("my demo") / path.relative_to("demo")).read_bytes()


def test_demo_writes_into_an_empty_folder_and_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "."]) == 0
    before = sorted(tmp_path.rglob("*"))
    assert run(["demo", "."]) == 2
    assert run(["demo", "inputs.npz"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: FOLDER . exists and is not empty; give another one",
        "error: FOLDER inputs.npz exists and is no folder",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_checkpoints_of_demo_convert_and_come_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 0
    for name in ("gpt2", "bert"):
        assert run(["convert", f"demo/{name}", f"{name}-flax"]) == 0
        assert run(["convert", f"{name}-flax", f"{name}-back", "--to", f"hf-{name}"]) == 0
        back, source = (folder / "model.safetensors" for folder in (Path(f"{name}-back"), Path("demo", name)))
        assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("is_own", "loaded", "options", "jobs"),
    [
        (True, (), [], None),
        (True, (), ["--jobs", "auto"], None),
        (False, (), [], 1),
        (False, (), ["--jobs", "auto"], 1),
        (True, ("torch",), [], 1),
        (True, ("jax",), [], 1),
        (False, ("torch", "jax"), ["--jobs", "3"], 3),
        (True, (), ["--jobs", "1"], 1),
    ],
)
def test_check_uses_other_processes_only_where_allowed(is_own, loaded, options, jobs, capsys, monkeypatch):
    def tell(*arguments, jobs, **keywords):
        raise ValueError(f"{jobs} processes")

    monkeypatch.setattr(matrix, "check", tell)
    for name in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert run(["check", *options], is_own=is_own) == 2
    assert capsys.readouterr().err == f"error: {jobs} processes\n"


# ---- exit status

SHOWN = {"table": lambda: "", "lines": list, "explanations": list, "summary": lambda: "", "to_json": dict}
PARTS = {
    "missing_rows": {},
    "notes": [],
    "failures": [],
    "environment": {},
    "switches": [],
    "results": [],
    "gallery": [],
}


def outcome(**values):
    """Return the result of a command's work, as far as the command shows it."""
    return types.SimpleNamespace(**SHOWN, **PARTS, **values)


ISOLATION = "attn_parity.commands.isolation"
VERDICTS = {"equal": 0, "precision": 1, "different": 1, "inconclusive": 2}
OUTCOMES = [
    *(
        (command, function, outcome(passed=passed, stopped=False), 0 if passed else 1)
        for passed in (True, False)
        for command, function in (
            ("check", "attn_parity.check.matrix.check"),
            ("check --model x", "attn_parity.check.model.walk.check_model"),
            ("check --mesh tensor=2", "attn_parity.check.mesh.run.check_mesh"),
            ("doctor", "attn_parity.settings.doctor.examine"),
            ("mutate", "fault_lab.driver.mutate"),
            ("mutate --mesh tensor=2", "fault_lab.mesh.driver.mutate_mesh"),
            ("mutate --mesh tensor=2 --case x", "fault_lab.mesh.driver.run_cases"),
        )
    ),
    ("check --model x", "attn_parity.check.model.walk.check_model", outcome(passed=True, stopped=True), 130),
    *(
        ("compare-dumps x y", "attn_parity.dumps.replay.compare_dumps", Report(verdict, []), status)
        for verdict, status in VERDICTS.items()
    ),
    *(
        ("compare x y", "attn_parity.commands.compare.Comparison.judged", (Report(verdict, []), None), status)
        for verdict, status in VERDICTS.items()
    ),
    *(
        (
            "compare x y --separate",
            f"{ISOLATION}.separate.run_separately",
            Report(verdict, []),
            status,
        )
        for verdict, status in VERDICTS.items()
    ),
    *(
        (
            "verify x",
            "attn_bridge.checkpoints.verify",
            Verification(not problems, 3, problems, True, False),
            1 if problems else 0,
        )
        for problems in ({}, {"a": "differs"})
    ),
    *(
        (
            "digest x",
            "attn_bridge.checkpoints.live.digests",
            types.SimpleNamespace(tensors={}, problems=problems, layout="", to_json=dict),
            1 if problems else 0,
        )
        for problems in ({}, {"a": "differs"})
    ),
]


@pytest.mark.parametrize(("command", "function", "result", "status"), OUTCOMES)
def test_the_status_of_a_command_is_its_outcome(command, function, result, status, monkeypatch, capsys):
    module, name = function.rsplit(".", 1)
    owner = importlib.import_module(module.removesuffix(".Comparison"))
    monkeypatch.setattr(owner.Comparison if "Comparison" in module else owner, name, lambda *_, **__: result)
    assert run(command.split()) == status


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_trial_of_mutate_is_status_1(wrong, monkeypatch, capsys):
    trial = types.SimpleNamespace(explanation="", is_wrong=wrong)
    monkeypatch.setattr("fault_lab.driver.find_trial", lambda *_: trial)
    monkeypatch.setattr("fault_lab.driver.run_trial", lambda *_: trial)
    assert run(["mutate", "--case", "right:1"]) == int(wrong)


@pytest.mark.parametrize("error", [ValueError, TypeError, OSError, ImportError, MemoryError])
def test_an_error_of_a_command_is_status_2(error, monkeypatch, capsys):
    def fail():
        raise error("so it is")

    monkeypatch.setattr("attn_parity.settings.doctor.examine", fail)
    assert run(["doctor"]) == 2
    assert capsys.readouterr().err.endswith("so it is\n")


def test_an_interrupt_is_status_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("attn_parity.settings.doctor.examine", interrupt)
    assert run(["doctor"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_the_process_exits_with_the_status(status, monkeypatch):
    monkeypatch.setattr(app, "run", lambda *_, **__: status)
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == status


def test_checkpoint_commands_have_status_0_or_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("demo", "plan demo/gpt2 x", "convert demo/gpt2 x", "inspect x", "verify x", "digest x"):
        assert run(command.split()) == 0, command
    for command in ("plan no x", "convert demo/gpt2 x", "inspect no", "verify no", "digest no"):
        assert run(command.split()) == 2, command


@pytest.mark.parametrize(("arguments", "is_own"), [(None, True), ([], False)])
def test_the_command_owns_a_process_started_with_its_arguments(arguments, is_own, monkeypatch):
    asked = []
    monkeypatch.setattr(app, "run", lambda arguments, is_own: asked.append(is_own) or 0)
    monkeypatch.setattr(sys, "argv", ["attn-bridge"])
    # What ends a command's own process would end this one some seconds later.
    monkeypatch.setattr(f"{ISOLATION}.user_code.end", sys.exit)
    with pytest.raises(SystemExit):
        main(arguments)
    assert asked == [is_own]


def test_a_call_that_ran_user_code_leaves_the_streams_of_the_process_open(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text("def make():\n    return {}\n")
    with pytest.raises(SystemExit):
        main(["digest", "made.py:make"])
    os.write(1, b"after the command")
    assert capfd.readouterr().out.endswith("after the command")


def test_too_little_memory_is_one_line(monkeypatch, capsys):
    def allocate(path, format, step, item):
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr("attn_bridge.checkpoints.inspect", allocate)
    assert run(["inspect", "x"]) == 2
    assert capsys.readouterr().err == "error: not enough memory: Unable to allocate 2.00 TiB\n"
