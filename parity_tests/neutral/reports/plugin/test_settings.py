"""Settings of a comparison: call, marker, command line, ini file; wrong ones are one line."""

from __future__ import annotations

import re

import pytest

from .pytest_runs import GRID, ids


def test_ids_read_variant_dtype_device_mode(run):
    done = run(GRID, "-v", "-rP")
    assert ids(done) == [
        "test_grid[attention-float32-cpu-eager]",
        "test_grid[attention-float32-cpu-jit]",
        "test_grid[attention-bfloat16-cpu-eager]",
        "test_grid[attention-bfloat16-cpu-jit]",
    ]
    assert "\nattention bfloat16 cpu jit 5 None\n" in done.out
    assert [(asked["dtypes"], asked["device"], asked["modes"], asked["seeds"]) for asked in done.asked] == [
        ([dtype], "cpu", [mode], 5) for dtype in ("float32", "bfloat16") for mode in ("eager", "jit")
    ]


PRECEDENCE = """
@pytest.mark.parity(seeds=30, dtypes=("float16",), transfer=False)
class TestMarked:
    @pytest.mark.parity(seeds=40, modes=None)
    def test_marked(self, parity):
        parity("a", "a", [1])
        parity("a", "a", [1], seeds=50, dtypes=("float64",), modes=("jit", "eager"))

def test_bare(parity):
    parity("a", "a", [1])
"""


def test_calls_override_markers_the_command_line_and_the_ini_file(run):
    ini = 'parity_seeds = 10\nparity_modes = ["jit"]\nparity_devices = "cpu"\nparity_dtypes = "float32 float64"'
    done = run(PRECEDENCE, "-v", "--parity-seeds=20", "--parity-dtype=bfloat16", ini=ini)
    assert done.status == 0
    assert ids(done) == ["TestMarked::test_marked[float16-cpu-jit]", "test_bare[bfloat16-cpu-jit]"]
    chosen = [(asked["seeds"], asked["dtypes"], asked["modes"], asked["transfer"]) for asked in done.asked]
    assert chosen == [
        (40, ["float16"], ["jit"], False),
        (50, ["float64"], ["jit", "eager"], False),
        (20, ["bfloat16"], ["jit"], True),
    ]


def test_allowances_come_from_every_kind_of_setting(run):
    source = """
import pytest

def test_settings(parity):
    parity('a', 'a', [1])

@pytest.mark.parity(allow={'norm': 'eps'}, fixed=['mask'])
def test_marked(parity):
    parity('a', 'a', [1])
    parity('a', 'a', [1], allow={'head': 'tied'}, vary=[0])
"""
    done = run(source, "--parity-allow=fc=a = b", "--parity-allow", "out=c")
    assert done.status == 0
    assert [one["allow"] for one in done.asked] == [{"fc": "a = b", "out": "c"}, {"norm": "eps"}, {"head": "tied"}]
    assert (done.asked[1]["fixed"], done.asked[2]["vary"]) == (["mask"], [0])
    assert "--parity-allow 'fc=a = b' --parity-allow out=c" in done.asked[0]["command"]


def test_the_ini_file_overrides_the_defaults(run):
    done = run(PRECEDENCE, "-v", "-k", "bare", ini='parity_seeds = 10\nparity_dtypes = "float32 float64"')
    assert ids(done) == ["test_bare[float32]", "test_bare[float64]"]
    assert [(asked["seeds"], asked["dtypes"]) for asked in done.asked] == [(10, ["float32"]), (10, ["float64"])]


WRONG_MARKERS = [
    ("'attention'", "the marker parity takes keywords only, got 'attention'"),
    ("dtypes=('int8',)", "dtypes of the marker parity (int8) must be one of float64, float32, bfloat16, float16"),
    ("mode='fast'", "mode of the marker parity (fast) must be one of eager, jit"),
    ("modes=()", "modes of the marker parity () must have at least one value"),
    ("seeds=0", "seeds of the marker parity (0) must be a whole number from 1"),
    ("seeds=1.5", "seeds of the marker parity (1.5) must be a whole number from 1"),
    ("variants=(1,)", "variants of the marker parity (1) must be a string"),
    ("dtypes=5", "dtypes of the marker parity (5) must be one of float64, float32, bfloat16, float16"),
    ("device=('cpu', 'xpu')", "device of the marker parity (cpu,xpu) must be one of cpu, gpu, tpu, or two for torch "),
    (
        "dtype_='float32'",
        "the marker parity has no dtype_; it takes variants, dtypes, devices, modes, seeds, first_seed, rules, ",
    ),
]


def test_a_wrong_marker_is_one_line_at_collection(run, tmp_path):
    for position, (arguments, _) in enumerate(WRONG_MARKERS):
        text = f"import pytest\n@pytest.mark.parity({arguments})\ndef test_it(parity): pass\n"
        (tmp_path / f"test_wrong_{position}.py").write_text(text)
    done = run("", "-q")
    assert done.status == 2
    said = re.findall(r"^_+ ERROR collecting (\S+) _+\n(.*)\n(?=[_=])", done.out, re.MULTILINE)
    assert len(said) == len(WRONG_MARKERS)
    for (file, line), (position, (_, message)) in zip(said, enumerate(WRONG_MARKERS), strict=True):
        assert file == f"test_wrong_{position}.py"
        assert line.startswith(f"test_it: {message}")


WRONG_OPTIONS = [
    ("--parity-seeds=0", "", "--parity-seeds (0) must be a whole number from 1"),
    ("--parity-seeds=1001", "", "--parity-seeds (1001) must be at most 1000"),
    ("--parity-allow=norm", "", "--parity-allow (norm) must read PATH=REASON, such as blocks.3.norm=eps is 1e-6 on "),
    ("-q", "parity_allow = 'norm'", "parity_allow (norm) must read PATH=REASON"),
    ("--parity-seeds=many", "", "--parity-seeds (many) must be a whole number from 1"),
    ("--parity-first-seed=-1", "", "--parity-first-seed (-1) must be a whole number from 0"),
    ("--parity-dtype=int8", "", "--parity-dtype (int8) must be one of float64, float32, bfloat16, float16"),
    ("--parity-mode=", "", "--parity-mode () must be one of eager, jit"),
    (
        "--parity-device=moon",
        "",
        "--parity-device (moon) must be one of cpu, gpu, tpu, or two for torch and Flax, such as cpu,tpu",
    ),
    ("--parity-html=test_it.py", "", "--parity-html (test_it.py) must be a folder"),
    ("--parity-json=test_it.py", "", "--parity-json (test_it.py) must be a folder"),
    ("-q", "parity_seeds = 'x'", "parity_seeds (x) must be a whole number from 1"),
    ("-q", "parity_devices = 'cpu mps'", "parity_devices (mps) must be one of cpu, gpu, tpu, or two for torch and "),
    ("-q", "parity_html = 'test_it.py'", "parity_html (test_it.py) must be a folder"),
]


@pytest.mark.parametrize(("option", "ini", "message"), WRONG_OPTIONS, ids=lambda value: value[:30])
def test_a_wrong_setting_is_one_line_and_a_usage_error(run, option, ini, message):
    done = run("def test_it(): pass", option, ini=ini)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert done.err.startswith(f"ERROR: {message}")
    assert done.err.strip().count("\n") == 0
