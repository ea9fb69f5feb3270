"""The pytest plugin, in pytest runs of its own: with stand-ins for the frameworks and for `compare`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]

FRAMEWORKS = {
    "torch": """
        class cuda:
            is_available = staticmethod(lambda: GPU)
        """,
    "jax": """
        def devices(kind=None):
            if kind not in (None, "cpu") and not (kind == "gpu" and GPU):
                raise RuntimeError(f"Unknown backend: {kind!r} requested, but no platforms\\nare present")
            return [kind]
        """,
    "flax": "",
}

CONFTEST = '''
import json
from pathlib import Path

import attn_bridge.parity
from attn_bridge.parity.compare.results.allowances import accept
from attn_bridge.parity.compare.results.findings import Divergence, ModuleNode, TensorVerdict
from attn_bridge.parity.compare.results.report import Report

class Stub(Report):
    def to_html(self, path):
        path.write_text(f"<title>{self.verdict}</title>")

    def to_json(self, path=None):
        if path is None:
            return super().to_json()
        path.write_text(json.dumps({"verdict": self.verdict}))

def compare(torch_module, flax_module, inputs, *, rules=None, transfer=True, seeds=4, first_seed=0, modes=("eager",),
            dtypes=None, device=None, localise=True, command="", progress=None, **more):
    """Give equal modules the verdict equal, and others the verdict that the Flax one is."""
    asked = {name: value for name, value in locals().items() if name not in ("torch_module", "flax_module", "more")}
    asked |= more
    with Path(__file__).with_name("asked.jsonl").open("a") as file:
        file.write(json.dumps(asked) + "\\n")
    if flax_module == "broken":
        raise ValueError("inputs is not an array")
    if torch_module == flax_module:
        return accept(Stub("equal", [], seeds=seeds), more.get("allow", {}))
    if flax_module == "eps":
        tensors = [TensorVerdict(name, name, "output", (), "float32", "different") for name in ("output", "grad ln2.w")]
        place = Divergence("ln2", "ln2", "forward")
        tree = ModuleNode("", "", children=(ModuleNode("ln2", "ln2", verdict="different", first=True),))
        return accept(Stub("different", tensors, place, tree, first_name="T", notes=["mind the gap"]), more["allow"])
    return Stub(flax_module, [], Divergence("blocks.0", "layers.0", "forward", "100%, a:b,c"), notes=["mind the gap"],
                environment={"torch": "2"}, command=command, first_name="T", second_name="F")

attn_bridge.parity.compare = compare
'''


@dataclasses.dataclass
class Done:
    """What a pytest run gave: exit status, what it printed, and what `compare` was asked."""

    status: int
    out: str
    err: str
    asked: list[dict]


@pytest.fixture
def run(tmp_path):
    """Run pytest on one test file, with all warnings as errors, and with no plugin but ours."""

    def run_pytest(
        source, *options, ini="", gpu=False, without=(), plugin="attn_bridge.parity.plugin", folder=".", **environment
    ) -> Done:
        fakes = tmp_path.parent / f"{tmp_path.name}-frameworks"
        for name, text in FRAMEWORKS.items():
            (fakes / name).mkdir(parents=True, exist_ok=True)
            (fakes / name / "__init__.py").write_text(f"GPU = {gpu}\n{re.sub('^ {8}', '', text, flags=re.MULTILINE)}")
        blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
        (tmp_path / "conftest.py").write_text(f"import sys\n{blocked}{CONFTEST}")
        (tmp_path / "test_it.py").write_text(f"import pytest\n{source}")
        (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{ini}\n")
        asked = tmp_path / "asked.jsonl"
        asked.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB"))}
        kept |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join([str(fakes), str(ROOT)])}
        chosen = ["-p", plugin] if plugin else []
        always = ["-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--strict-config"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *chosen, *always, *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path / folder,
            env=kept | environment,
        )
        lines = asked.read_text().splitlines() if asked.exists() else []
        return Done(done.returncode, done.stdout, done.stderr, [json.loads(line) for line in lines])

    return run_pytest


def ids(done: Done) -> list[str]:
    return re.findall(r"^test_it.py::(\S+)", done.out, re.MULTILINE)


# ---- what it costs those who don't use it


def test_loading_it_imports_nothing_heavy():
    heavy = {"numpy", "torch", "jax", "flax", "rich", "einops", "ml_dtypes", "typer"}
    program = f"import sys, attn_bridge.parity.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_it_is_an_entry_point_of_pytest():
    points = importlib.metadata.entry_points(group="pytest11", name="attn_bridge")
    assert [point.value for point in points] == ["attn_bridge.parity.plugin"]


STRANGERS = """
@pytest.fixture
def number():
    return 1

@pytest.mark.parametrize("parity", [0, 1])
def test_even_and_odd(parity, number):
    assert parity in (0, number)

class TestTheirs:
    @pytest.fixture
    def parity(self):
        return "theirs"

    def test_fixture_of_that_name(self, parity):
        assert parity == "theirs"
"""


def test_tests_that_do_not_use_it_run_as_without_it(run):
    here = run(STRANGERS, "-v", "--parity-dtype=float32", GITHUB_ACTIONS="true")
    gone = run(STRANGERS, "-v", plugin=None)
    assert (here.status, here.err) == (gone.status, gone.err) == (0, "")
    assert ids(here) == ["test_even_and_odd[0]", "test_even_and_odd[1]", "TestTheirs::test_fixture_of_that_name"]
    assert re.sub(r"in .*s|plugins: .*\n", "", here.out) == re.sub(r"in .*s|plugins: .*\n", "", gone.out)


def test_every_public_name_stays_itself_when_its_module_is_imported():
    program = """
import importlib
from attn_bridge import parity
for name, home in parity._HOMES.items():
    importlib.import_module(f"attn_bridge.parity.{home}")
    assert getattr(parity, name).__name__ == name, name
    assert name in parity.__all__
assert set(dir(parity)) == set(parity.__all__) == set(parity._HOMES)
try:
    parity.nonsense
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("module 'attn_bridge.parity' has no attribute 'nonsense'\n", "")


# ---- comparisons


def test_an_equal_pair_returns_the_report(run):
    done = run("def test_same(parity):\n    assert parity('a', 'a', [1]).verdict == 'equal'", "-v", "-rA")
    assert done.status == 0
    assert ids(done) == ["test_same"]
    assert "\nparity: 1 comparison, 1 equal\n" in done.out
    assert "Captured parity" not in done.out
    (asked,) = done.asked
    assert asked == {
        "inputs": [1],
        "rules": None,
        "transfer": True,
        "seeds": 4,
        "first_seed": 0,
        "modes": ["eager"],
        "dtypes": None,
        "device": None,
        "localise": True,
        "command": "pytest test_it.py::test_same",
        "progress": None,
    }


FAILING = """
def test_other(parity):
    parity("a", "a", [1])
    parity("a", "different", [1])  # line 4

def test_lossy(parity):
    with pytest.raises(AssertionError) as caught:
        parity("a", "precision", [1])
    assert type(caught.value).__name__ == "ParityError"
    assert caught.value.report.verdict == "precision"
"""


def test_a_mismatch_fails_with_the_explanation_and_without_our_frames(run):
    done = run(FAILING.replace("  # line 4", ""), "--parity-seeds=7", "--parity-first-seed=3", "--parity-device=cpu")
    assert done.status == 1
    assert "plugin.py" not in done.out
    home = "attn_bridge.parity.compare.results.report.ParityError"
    assert f'\n>       parity("a", "different", [1])\nE       {home}: different: ' in done.out
    assert "\nE       first divergence (forward) in blocks.0 (Flax: layers.0): 100%, a:b,c\n" in done.out
    again = "pytest 'test_it.py::test_other[cpu]' --parity-seeds 7 --parity-first-seed 3 --parity-device cpu"
    assert f"\nE         again: {again}\n" in done.out
    assert "\n---- Captured parity call ----\nnote: mind the gap\ntorch 2\n" in re.sub("-{5,}", "----", done.out)
    assert "\nparity: 3 comparisons, 1 different, 1 precision, 1 equal\n" in done.out
    assert "::error" not in done.out


def test_what_an_allowance_lets_pass_is_said_after_the_tests(run, tmp_path):
    """Of a test that passes there is no other report."""
    source = """
EPS = {"ln2": "eps of flax"}

def test_one(parity):
    parity("a", "eps", [1], allow=EPS)
    parity("a", "eps", [1], allow=EPS | {"drop": "off"})
    parity("a", "a", [1], allow=EPS)

def test_two(parity):
    parity("a", "eps", [1], allow={"output": "rounded", "nosuch": "x"})
"""
    done = run(source, "-q", "--junit-xml=junit.xml")
    summary = done.out[done.out.index("\nparity: ") :].splitlines()[1:6]
    assert summary == [
        "parity: 4 comparisons, 1 different, 3 equal (2 with differences that are allowed)",
        "  allowed: ln2: eps of flax (test_it.py::test_one)",
        "  allowed: drop: off (nothing has that name)",
        "  allowed: output: rounded (test_it.py::test_two)",
        "  allowed: nosuch: x (nothing has that name)",
    ]
    note = "no other submodule than ln2 differs, which may; code of T around it was not judged apart"
    assert f"\n  note: {note}\n" in done.out
    assert "  note: mind the gap" not in done.out
    found = (tmp_path / "junit.xml").read_text()
    assert found.count('<property name="parity_allowed" value="ln2: eps of flax"') == 2


def test_the_command_that_runs_it_again_holds_where_pytest_was_called(run, tmp_path):
    (tmp_path / "inside").mkdir()
    done = run(FAILING, "..", folder="inside")
    assert "\nE         again: pytest ../test_it.py::test_other\n" in done.out


def test_what_compare_refuses_is_the_error_of_the_test(run):
    done = run("def test_it(parity):\n    parity('a', 'broken', [1])")
    assert done.status == 1
    assert "ValueError: inputs is not an array" in done.out
    assert "parity:" not in done.out


def test_junit_has_verdict_and_first_divergence(run, tmp_path):
    run(FAILING, "--junit-xml=junit.xml")
    cases = ElementTree.parse(tmp_path / "junit.xml").iter("testcase")
    found = {
        case.get("name"): [(entry.get("name"), entry.get("value")) for entry in case.iter("property")] for case in cases
    }
    divergence = (
        "parity_first_divergence",
        "first divergence (forward) in blocks.0 (Flax: layers.0): 100%, a:b,c",
    )
    assert found["test_other"] == [("parity_verdict", "equal"), ("parity_verdict", "different"), divergence]
    assert found["test_lossy"] == [("parity_verdict", "precision"), divergence]


def test_a_failing_subtest_counts_once(run):
    source = """
def test_parts(parity, subtests):
    for flax in ("a", "different", "a"):
        with subtests.test(flax):
            parity("a", flax, [1])
"""
    if importlib.util.find_spec("_pytest.subtests") is None:
        pytest.skip("this pytest has no subtests")
    done = run(source, GITHUB_ACTIONS="true")
    assert done.status == 1
    assert "\nparity: 3 comparisons, 1 different, 2 equal\n" in done.out
    assert done.out.count("::error ") == 1


# ---- combinations


GRID = """
@pytest.mark.parity(variant="attention", dtypes=("float32", "bfloat16"), devices="cpu", modes=("eager", "jit"), seeds=5)
def test_grid(parity):
    report = parity("a", "a", [1])
    print(parity.variant, parity.dtype, parity.device, parity.mode, parity.seeds, parity.first_seed)
"""


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


def test_the_call_goes_before_the_marker_the_command_line_and_the_ini_file(run):
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


def test_what_may_differ_is_said_in_the_ini_file_the_command_line_the_marker_or_the_call(run):
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


def test_a_baseline_says_what_has_changed(run, tmp_path):
    source = FAILING
    assert run(source, "--parity-json=before").status == 1
    for path in (tmp_path / "before").iterdir():
        path.write_text('{"verdict": "precision", "tensors": []}')
    done = run(source, "--parity-baseline=before")
    assert "since the baseline: verdict precision -> different" in done.out
    (tmp_path / "other").mkdir()
    assert "since the baseline: it was equal, or not run" in run(source, "--parity-baseline=other").out


def test_the_ini_file_goes_before_the_defaults(run):
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
        "--parity-device=cuda",
        "",
        "--parity-device (cuda) must be one of cpu, gpu, tpu, or two for torch and Flax, such as cpu,tpu",
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


# ---- what a machine lacks


DEVICES = """
@pytest.mark.parity(devices=("cpu", "gpu", ("cpu", "tpu"), "tpu"))
def test_everywhere(parity):
    parity("a", "a", [1])

def test_in_the_call(parity):
    parity("a", "a", [1], device="gpu")

@pytest.mark.parity(device=("gpu", "cpu"))
def test_mixed(parity):
    parity("a", "a", [1])

@pytest.mark.parity(device="tpu")
def test_not_entered(parity):
    raise AssertionError
"""


def test_an_absent_device_is_skipped_and_says_why(run):
    done = run(DEVICES, "-v", "-rs", COLUMNS="300")
    assert done.status == 0
    assert "test_everywhere[cpu] PASSED" in done.out
    assert "6 skipped" in done.out
    reasons = re.findall(r"^SKIPPED \[\d\] .*?: (no .*)", done.out, re.MULTILINE)
    assert set(reasons) == {
        "no gpu: torch.cuda.is_available() is False",
        "no tpu: jax says: Unknown backend: 'tpu' requested, but no platforms are present",
        "no tpu: torch has none; name a pair for torch and Flax, such as cpu,tpu",
    }


def test_a_present_device_is_used(run):
    done = run(DEVICES, "-v", gpu=True)
    assert [asked["device"] for asked in done.asked] == ["cpu", "gpu", "gpu", ["gpu", "cpu"]]
    assert "test_mixed[gpu,cpu] PASSED" in done.out
    assert "\nparity: 4 comparisons, 4 equal\n" in done.out


def test_the_command_line_takes_pairs_of_devices(run):
    done = run("def test_it(parity): parity('a', 'a', [1])", "-v", "--parity-device=cpu,gpu", gpu=True)
    assert ids(done) == ["test_it[cpu,gpu]"]
    assert done.asked[0]["device"] == ["cpu", "gpu"]


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (["torch"], "torch not installed: pip install 'attn-bridge[torch]'"),
        (["jax", "flax"], "jax, flax not installed: pip install 'attn-bridge[jax]'"),
        (["torch", "jax", "flax"], "torch, jax, flax not installed: pip install 'attn-bridge[torch,jax]'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_missing_framework_skips_and_names_the_extra(run, without, reason):
    done = run(GRID, "-rs", without=without, COLUMNS="300")
    assert done.status == 0
    assert "4 skipped" in done.out
    assert reason in done.out


# ---- pages and annotations


def test_pages_are_written_for_failing_comparisons_only(run, tmp_path):
    source = """
@pytest.mark.parametrize("what", ["a/b", "a b", "x" * 300])
def test_it(parity, what):
    parity("a", "a", [1])
    for verdict in ("different", "inconclusive"):
        with pytest.raises(AssertionError):
            parity("a", verdict, [1])
    parity("a", "different", [1])
"""
    done = run(source, "--parity-html=out/pages", "--parity-json", str(tmp_path / "data"))
    pages = sorted(path.name for path in (tmp_path / "out" / "pages").iterdir())
    data = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(pages) == len(data) == 9
    assert [Path(name).stem for name in pages] == [Path(name).stem for name in data]
    assert all(re.fullmatch(r"[\w.-]{1,120}", name, re.ASCII) for name in pages)
    plain = [name for name in pages if name.startswith("test_it.py-test_it-a-b-")]
    assert [re.sub("-[0-9a-f]{8}", "", name) for name in plain] == [
        f"test_it.py-test_it-a-b-{call}.html" for call in (2, 3, 4)
    ] * 2
    assert "<title>inconclusive</title>" in (tmp_path / "out" / "pages" / plain[1]).read_text()
    assert f"\nhtml: out/pages/{plain[2]}\njson: data/{Path(plain[2]).stem}.json\n" in done.out


def test_the_folder_of_the_ini_file_is_relative_to_the_root(run, tmp_path):
    (tmp_path / "inside").mkdir()
    run(FAILING, "..", "-c", "../pyproject.toml", ini="parity_html = 'pages'", folder="inside")
    assert len(list((tmp_path / "pages").iterdir())) == 2


def test_github_gets_one_annotation_per_failed_test(run, tmp_path):
    source = """
@pytest.mark.xfail(strict=True)
def test_expected(parity):
    parity("a", "different", [1])

@pytest.mark.parametrize("odd", ["a:b,c"])
def test_odd(parity, odd):
    parity("a", "different", [1])

def test_unrelated(parity):
    parity("a", "a", [1])
    assert False
"""
    done = run(FAILING + source, GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(tmp_path.parent))
    found = [line for line in done.out.splitlines() if line.startswith("::")]
    file = f"file={tmp_path.name}/test_it.py"
    message = (
        "different: T (torch) and F (Flax), 0 tensors, 0 seeds, 0 samples, 0.0 s%0A"
        "first divergence (forward) in blocks.0 (Flax: layers.0): 100%25, a:b,c%0A"
    )
    assert found == [
        f"::error {file},line=5,title=parity%3A different in test_other::{message}"
        "  again: pytest test_it.py::test_other",
        f"::error {file},line=19,title=parity%3A different in test_odd[a%3Ab%2Cc]::{message}"
        "  again: pytest 'test_it.py::test_odd[a:b,c]'",
    ]


def test_carriage_returns_are_escaped():
    from attn_bridge.parity.plugin.summary import _annotation

    found = _annotation({"verdicts": [], "title": "50%\r\n", "message": "a\r\nb::c"})
    assert found == "::error title=50%25%0D%0A::a%0D%0Ab::c"


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_workers_report_to_the_process_that_prints(run, tmp_path):
    source = FAILING + GRID
    done = run(
        source, "-p", "xdist.plugin", "-n2", "--parity-html=pages", "--junit-xml=junit.xml", GITHUB_ACTIONS="true"
    )
    assert done.status == 1
    assert "\nparity: 7 comparisons, 1 different, 1 precision, 5 equal\n" in done.out
    assert done.out.count("::error file=test_it.py,line=5,title=") == done.out.count("::error") == 1
    assert len(list((tmp_path / "pages").iterdir())) == 2
    assert 'name="parity_verdict" value="different"' in (tmp_path / "junit.xml").read_text()
