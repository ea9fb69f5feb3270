"""`attn-bridge doctor` with both frameworks, one, or none; what it warns of; and that looking at it costs nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest

from attn_bridge.cli.app import run
from attn_bridge.parity import strict
from attn_parity.settings import doctor, precision

from ..test_house import ROOT, run_python

INSTALLED = precision.modules()
JAX = {"jax", "jaxlib", "flax"}
LACKING = set() if "torch" in INSTALLED else {"torch"}
LACKING |= set() if "jax" in INSTALLED else JAX
"""What a lane of the suite blocks, in this process and in those that its tests start: the four lanes run all sets."""


def lanes(*, both: bool):
    """Mark a test that starts a process `full` where one framework is there, or where both are."""
    return pytest.mark.full if (len(INSTALLED) == 2) is not both and INSTALLED else lambda test: test


def row(state="safe", **changes):
    """Return one setting as a table would show it."""
    known = {"framework": "torch", "name": "a.b", "meaning": "what it does", "value": "tf32", "safe": "ieee"}
    return precision.SettingRow(**(known | {"state": state, "held": True, "key": False, "advice": "do this"} | changes))


def diagnosis(*rows, findings=(), missing=None):
    return doctor.Diagnosis(
        environment={"python": "3"},
        devices={"torch": ["cpu"]} if rows else {},
        missing=missing or {},
        products={"torch": {"cpu": 3e-7}} if rows else {},
        implementations={"torch": {"a": None, "b": "it needs a GPU", "c": None}} if rows else {},
        switches=rows,
        findings=findings,
    )


def texts(findings):
    return [finding.text for finding in findings]


# ---- the command


@lanes(both=True)
def test_a_new_process_on_a_cpu_is_safe():
    present = list(INSTALLED)
    if any(INSTALLED[library].kinds() != {"cpu"} for library in present):
        pytest.skip("not a CPU machine")
    done = run_python("attn_bridge", "doctor", blocked=LACKING)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for library in present:
        assert any(line.startswith(f"{library} devices: cpu") for line in lines)
        assert any(line.startswith(f"{library} float32 product: off by ") for line in lines)
        assert any(line.startswith(f" {library} ") for line in lines)
    for library in {"torch", "jax"} - INSTALLED.keys():
        assert not any(line.startswith((f"{library} devices", f" {library} ")) for line in lines)
        assert any(line.endswith(f"install it with: pip install 'attn-bridge[{library}]'") for line in lines)
    assert lines[-2] == ("nothing unsafe on the devices here" if present else "no framework to examine")


def test_the_settings_and_their_values_are_in_the_table(capsys):
    run(["doctor"])
    table = capsys.readouterr().out
    for library, module in INSTALLED.items():
        for one in precision.rows_of(library, module):
            assert re.search(rf"^ {library} +{re.escape(one.name)} ", table, re.MULTILINE), one.name


def test_json_goes_to_stdout_or_to_a_file(capsys, tmp_path):
    status = run(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert run(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    assert "the devices here" in capsys.readouterr().out or not INSTALLED
    written = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert written.keys() == printed.keys()
    assert printed["schema"] == 1
    assert printed["passed"] is (status == 0)
    assert printed["devices"].keys() == printed["products"].keys() == INSTALLED.keys()
    assert printed["implementations"].keys() == INSTALLED.keys()
    assert all(one["reference"] is None for one in printed["implementations"].values())
    assert printed["missing"].keys() == {"torch", "jax"} - INSTALLED.keys()
    assert {one["framework"] for one in printed["switches"]} == INSTALLED.keys()
    fields = {"framework", "name", "meaning", "value", "safe", "state", "held", "key", "advice"}
    assert all(one.keys() == fields for one in printed["switches"])
    assert str(ROOT) not in json.dumps(printed)


def test_an_unwritable_json_file_is_status_2(capsys):
    assert run(["doctor", "--json", "/no/such/folder/x.json"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --json /no/such/folder/x.json cannot be written: there is no folder /no/such/folder\n"
    )


def test_help_gives_an_example_and_the_statuses(capsys):
    assert run(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: attn-bridge doctor --json doctor.json" in text
    assert "Exit status: 0 = nothing unsafe, 1 = an unsafe setting, 2 = bad usage." in text


@lanes(both=False)
@pytest.mark.skipif("torch" not in INSTALLED, reason="needs torch")
def test_an_environment_that_rounds_fails_the_command_and_is_named():
    variables = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}
    command = [sys.executable, "-m", "attn_bridge", "doctor"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "unsafe: torch float32_matmul_precision is high: " in done.stdout
    assert "unsafe: torch ONEDNN_DEFAULT_FPMATH_MODE is bf16: " in done.stdout


# ---- what it says


def test_only_an_unsafe_row_or_finding_fails():
    assert diagnosis(row(), row("note"), row("no effect here"), row("info")).passed
    assert not diagnosis(row("unsafe")).passed
    assert diagnosis(row(), findings=(doctor.Finding("warning", "a", "b"),)).passed
    assert not diagnosis(row(), findings=(doctor.Finding("unsafe", "a", "b"),)).passed
    assert diagnosis(missing={"torch": "no torch", "jax": "no jax"}).passed


def test_the_lines_say_what_is_wrong_and_what_to_do():
    found = diagnosis(row("unsafe"), row("note", value=""), findings=(doctor.Finding("warning", "w", "a"),))
    assert found.lines() == [
        "python 3",
        "torch devices: cpu",
        "torch float32 product: off by 3.0e-07 on cpu",
        "torch attention: a, c; not b: it needs a GPU",
        "note: torch a.b is not set: what it does; do this",
        "warning: w; a",
        "unsafe: torch a.b is tf32: what it does; do this",
        "1 unsafe on the devices here",
    ]


def switch(**changes):
    known = {
        "name": "a",
        "meaning": "b",
        "safe": "ieee",
        "read": lambda: "tf32",
        "by_hand": "set a",
        "devices": ("gpu",),
    }
    return precision.Switch(**(known | changes))


@pytest.mark.parametrize(
    ("changes", "present", "state"),
    [
        ({}, {"cpu"}, "no effect here"),
        ({}, {"cpu", "gpu"}, "unsafe"),
        ({"fails": False}, {"gpu"}, "note"),
        ({"accepted": ("tf32",)}, {"gpu"}, "safe"),
        ({"safe": "tf32"}, {"gpu"}, "safe"),
        ({"safe": None}, {"gpu"}, "info"),
    ],
)
def test_a_setting_is_judged_for_the_devices_that_are_here(changes, present, state):
    assert switch(**changes).row("torch", present).state == state


def test_advice_names_strict_only_where_it_helps():
    assert switch().row("torch", ()).advice == "set a"
    held = switch(hold=lambda value: None)
    assert held.row("torch", ()).advice == "attn_bridge.parity.strict() holds ieee; by hand: set a"


# ---- what it warns of


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu", "jax": "0.10.2", "flax": "0.12.8"}, []),
        ({"torch": "2.10.0", "jax": "0.11.0.dev3", "flax": "0.12.0"}, []),
        ({"torch": "not installed", "jax": "not installed", "flax": "not installed"}, []),
        (
            {"torch": "2.9.1", "jax": "0.10.2", "flax": "0.12.8"},
            ["torch 2.9.1 is not what the tests were run with (2.10 to 2.13)"],
        ),
        (
            {"torch": "2.14.0a0", "jax": "1.0", "flax": "0.13.0"},
            [
                "torch 2.14.0a0 is not what the tests were run with (2.10 to 2.13)",
                "jax 1.0 is not what the tests were run with (0.10 to 0.12)",
                "flax 0.13.0 is not what the tests were run with (0.12)",
            ],
        ),
    ],
)
def test_versions_out_of_range_are_a_warning(versions, expected):
    assert texts(doctor._judge_versions(versions)) == expected


def test_the_range_begins_where_the_requirements_do():
    required = [re.match(r"([a-z]+)>=([\d.]+);", line) for line in importlib.metadata.requires("attn-bridge")]
    oldest = {found[1]: found[2] for found in required if found}
    assert {package: oldest[package] for package in doctor.TESTED} == {
        package: first for package, (first, _) in doctor.TESTED.items()
    }
    pinned = dict(
        re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert doctor._judge_versions({package: pinned[package] for package in doctor.TESTED}) == []


@pytest.mark.parametrize(
    ("kinds", "variables", "expected"),
    [
        ({"torch": {"cpu"}, "jax": {"cpu"}}, {}, ""),
        ({"torch": {"cpu", "gpu"}}, {}, ""),
        ({"torch": {"cpu", "gpu"}, "jax": {"cpu"}}, {}, "torch sees a GPU and jax does not"),
        ({"torch": {"cpu"}, "jax": {"cpu", "gpu"}}, {}, "jax sees a GPU and torch does not"),
        ({"torch": {"cpu", "gpu"}, "jax": {"cpu", "gpu"}}, {}, "jax takes three quarters of the memory"),
        ({"torch": {"gpu"}, "jax": {"gpu"}}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "jax takes three quarters"),
        ({"torch": {"gpu"}, "jax": {"gpu"}}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, ""),
        ({"torch": {"gpu"}, "jax": {"gpu"}}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, ""),
        ({"torch": {"gpu"}, "jax": {"gpu"}}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, ""),
    ],
)
def test_devices_that_do_not_match_are_a_warning(kinds, variables, expected):
    found = doctor._judge_devices(kinds, variables)
    assert len(found) == bool(expected)
    assert all(finding.text.startswith(expected) and finding.level == "warning" for finding in found)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"OMP_NUM_THREADS": "2"}, []),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, []),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "4"}, ["OMP_NUM_THREADS=2 and MKL_NUM_THREADS=4 disagree"]),
        (
            {"KMP_DUPLICATE_LIB_OK": "TRUE"},
            ["KMP_DUPLICATE_LIB_OK lets two OpenMP libraries run in one process, which can give wrong numbers"],
        ),
    ],
)
def test_threads_that_do_not_match_are_a_warning(variables, expected):
    assert texts(doctor._judge_threads(variables)) == expected


@pytest.mark.parametrize(
    ("dtype", "wide", "count"),
    [("float32", "False", 0), ("float64", "True", 0), ("float64", "False", 1), ("float32", "True", 1)],
)
def test_default_dtypes_that_do_not_match_are_a_warning(dtype, wide, count):
    rows = [row(name="default_dtype", value=dtype), row(framework="jax", name="enable_x64", value=wide)]
    assert len(doctor._judge_dtypes(rows)) == count
    assert doctor._judge_dtypes(rows[:1]) == doctor._judge_dtypes(rows[1:]) == []


def test_a_compiler_that_adds_wrongly_is_a_warning():
    (found,) = doctor._judge_compiled("jax", 0.58)
    assert (found.level, found.text) == (
        "warning",
        "jax compiles some sums of products wrongly: a compiled Jacobian of a norm is off by 5.8e-01",
    )
    assert doctor._judge_compiled("jax", 4e-7) == []


def test_a_product_that_is_not_float32_inside_is_unsafe():
    found = doctor._judge_products("torch", {"cpu": 6.6e-7, "gpu": 3e-4, "mps": float("nan")})
    assert [finding.level for finding in found] == ["unsafe", "unsafe"]
    assert texts(found) == [
        "torch float32 products on gpu are off by 3.0e-04 and not float32 inside",
        "torch float32 products on mps are off by nan and not float32 inside",
    ]
    null = doctor.Diagnosis({}, {}, {}, {"torch": {"mps": float("nan")}}, {}, (), ()).to_json()
    assert null["products"] == {"torch": {"mps": None}}


def test_devices_that_fail_to_start_are_unsafe(monkeypatch):
    class Broken:
        versions = staticmethod(lambda: {"torch": "2.13.0"})

        @staticmethod
        def devices():
            raise RuntimeError("no memory\nand a long story")

    monkeypatch.setattr(doctor, "load_adapter", lambda framework, module: Broken)
    found = doctor.examine()
    assert found.devices == {}
    assert {str(finding) for finding in found.findings if finding.level == "unsafe"} == {
        f"unsafe: {library} cannot start its devices (no memory); run it on its own first"
        for library in ("torch", "jax")
    }
    assert not found.passed
    assert found.summary() == "2 unsafe on the devices here"


# ---- the joint functions


def test_the_record_names_the_key_settings_and_stays_short():
    record = precision.record()
    keys = {f"{one.framework} {one.name}" for one in precision.switches() if one.key}
    assert keys <= record.keys()
    assert all(isinstance(value, str) for value in record.values())
    assert len(record) <= 20
    assert ("torch cuda.matmul.fp32_precision" in record) == ("torch" in INSTALLED)
    with strict():
        held = precision.record()
    expected = {"torch mkldnn.matmul.fp32_precision": "ieee"} if "torch" in INSTALLED else {}
    expected |= {"jax default_matmul_precision": "highest"} if "jax" in INSTALLED else {}
    assert expected.items() <= held.items()


@lanes(both=False)
def test_strict_covers_the_installed_frameworks_alone():
    program = """
from attn_bridge.parity import strict
from attn_parity.settings import precision
with strict():
    print(bool(precision.record()), sorted({row.framework for row in precision.switches()}))
"""
    done = run_python("-c", program, blocked=LACKING)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{bool(INSTALLED)} {sorted(INSTALLED)}"


def test_importing_strict_imports_no_framework():
    done = run_python("-c", "from attn_bridge.parity import strict", blocked=set())
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
