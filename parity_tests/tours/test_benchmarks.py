"""The benchmarks, measured on tiny sizes in both frameworks: everything is right, and what is wrong can't win."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

import attn_bridge
from benchmarks import accelerator, bfloat16, decoding, meshes, models, options, recurrent
from benchmarks.agents.catalogue import PORTS
from benchmarks.agents.trials import run
from benchmarks.measuring import products
from benchmarks.measuring.bench import Bench
from benchmarks.measuring.cells import Cell, Group
from benchmarks.measuring.session import Plan, Worker, WorkerError, groups, measure
from benchmarks.sides import jax_side, torch_side

from ..support.calls import cover

pytestmark = pytest.mark.usefixtures("own_process")  # the jobs of JAX set its precision
ROOT = Path(attn_bridge.__file__).parent.parent
CELL = Cell(2, 17, 3, 8)
MODE = {"torch": "eager", "jax": "compiled"}
"""The mode that every contender of a framework has, and that is quick to start."""
QUICK = {"rounds": 2, "memory": False, "matmul": 32, "sample": 0.0}


def here(framework, folder):
    del folder
    return Bench(framework)


def plan(*wanted, **changes):
    return Plan(tuple(wanted), **{"modes": ("eager",), **QUICK, **changes})


@cover.rotated(("subject", "dtype"), ["attention", "modules"], ["bfloat16", "float32"])
def test_every_contender_gives_the_right_answer(subject, dtype):
    wanted = tuple(groups([subject], [CELL], [dtype], ["forward", "forward+backward"]))
    torch_rows = measure(plan(*wanted, frameworks=("torch",)), connect=here).rows
    jax_rows = measure(plan(*wanted, frameworks=("jax",), modes=("eager", "compiled")), connect=here).rows
    rows = (*torch_rows, *jax_rows)
    assert [row for row in rows if row.status != "right"] == []
    assert all(len(row.seconds) == 2 and row.median > 0 for row in rows)
    expected = {
        "attention": {"SDPA", "jax.nn", "ours: reference"},
        "modules": {"ours", "book", "torch.nn.MultiheadAttention", "flax.nnx.MultiHeadAttention"},
    }
    for direction in ("forward", "forward+backward"):
        assert expected[subject] <= {row.contender for row in rows if row.direction == direction}


@cover.rotated(
    ("framework", "side", "direction"), [("torch", torch_side), ("jax", jax_side)], ["forward+backward", "forward"]
)
def test_a_wrong_contender_is_shown_as_wrong_without_its_time(framework, side, direction, monkeypatch):
    monkeypatch.setattr(side, "_attend", lambda query, key, value, implementation: value + 0 * query * key)
    wanted = Group("attention", CELL, "float32", direction)
    report = measure(plan(wanted, frameworks=(framework,), modes=(MODE[framework],)), connect=here)
    ours = [row for row in report.rows if row.kind == "ours"]
    assert ours
    assert all((row.status, row.seconds, row.median) == ("wrong", (), None) for row in ours)
    assert all(row.status == "right" for row in report.rows if row.kind == "stock")
    assert not report.passed
    assert any(line.startswith(f"wrong: {framework} ours: ") and "is off by" in line for line in report.lines())


def test_a_wrong_gradient_fails_despite_a_right_output(monkeypatch):
    right = torch_side._attend

    def attend(query, key, value, implementation):
        return right(query, key.detach() + 0 * key, value, implementation)

    monkeypatch.setattr(torch_side, "_attend", attend)
    (wanted,) = groups(["attention"], [CELL], ["float32"], ["forward+backward"])
    report = measure(plan(wanted, frameworks=("torch",)), connect=here)
    assert all("grad key" in row.reason for row in report.rows if row.kind == "ours")


def test_a_contender_that_raises_is_a_row_that_says_so(monkeypatch):
    def attend(query, key, value, implementation):
        raise RuntimeError("it broke\nhere")

    monkeypatch.setattr(torch_side, "_attend", attend)
    (wanted,) = groups(["attention"], [CELL], ["float32"], ["forward"])
    report = measure(plan(wanted, frameworks=("torch",)), connect=here)
    found = {(row.status, row.reason) for row in report.rows if row.kind == "ours"}
    assert found == {("failed", "RuntimeError: it broke here")}
    assert not report.passed


def test_a_contender_that_refuses_a_call_is_skipped(monkeypatch):
    def attend(query, key, value, implementation):
        raise NotImplementedError("not for\nthis")

    monkeypatch.setattr(torch_side, "_attend", attend)
    (wanted,) = groups(["attention"], [CELL], ["float32"], ["forward"])
    report = measure(plan(wanted, frameworks=("torch",)), connect=here)
    assert {(row.status, row.reason) for row in report.rows if row.kind == "ours"} == {("skipped", "not for this")}
    assert report.passed


def test_what_would_not_fit_into_memory_is_not_run(monkeypatch):
    monkeypatch.setattr("benchmarks.measuring.bench.free_memory", lambda: 0)
    (wanted,) = groups(["attention"], [CELL], ["float32"], ["forward"])
    rows = measure(plan(wanted, frameworks=("jax",), modes=("compiled",)), connect=here).rows
    found = {row.contender: (row.status, row.reason) for row in rows}
    assert found["jax.nn"] == ("skipped", "needs 0 GiB or more")


def test_a_quick_run_of_the_command_in_both_frameworks(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "modules", "--quick", "--cells", "1x8x2x4,1x16x2x4"]
    command += ["--modes", "eager", "--directions", "forward", "--rounds", "2"]
    command += ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.svg")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    assert {row["framework"] for row in found["rows"]} == {"torch", "jax"}
    assert {row["status"] for row in found["rows"]} == {"right"}
    assert found["machine"]["frameworks"]["torch"]["versions"]["torch"] in done.stdout
    assert "flax.nnx.MultiHeadAttention" in done.stdout
    assert (tmp_path / "b.svg").read_text().startswith("<svg")


def test_a_missing_framework_is_left_out_with_a_note(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('No module named jax', name='jax')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (wanted,) = groups(["attention"], [CELL], ["float32"], ["forward"])
    report = measure(plan(wanted))
    assert {row.framework for row in report.rows} == {"torch"}
    (note,) = [note for note in report.notes if note.startswith("jax left out: the flax backend cannot be imported (")]
    assert note.endswith("pip install 'attn-bridge[jax]'")
    assert note in list(report.lines())


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_memory_of_a_fresh_process_is_that_of_the_arrays(framework, tmp_path):
    worker = Worker(framework, tmp_path)
    group = Group("attention", Cell(1, 1024, 4, 8), "float32", "forward").to_json()
    found = worker.memory(group, [MODE[framework]], f"ours: reference, {MODE[framework]}")
    worker.close()
    scores = 4 * 4 * 1024 * 1024
    assert scores < found["bytes"] < 12 * scores


def test_a_worker_that_dies_is_one_line_and_starts_again(tmp_path):
    worker = Worker("torch", tmp_path)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^the torch worker ended with status -9: it wrote nothing$"):
        worker.describe()
    assert worker.describe()["device"]
    worker.close()


def test_decoding_is_measured_and_compiles_one_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decoding", "--length", "96", "--rounds", "2"])
    decoding.main()
    printed = capsys.readouterr().out
    assert printed.count("torch, attention") == printed.count("JAX: 1 program for 5 steps") == len(decoding.SIZES)
    # Four operations per channel: a product and a sum with the key, and with the value.
    assert f"products of attention: {4 * 96 * 32 * 128 / 1e9:.2f} GFLOP" in printed


def test_a_recurrent_layer_is_measured_beside_its_matrix_products(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recurrent", "--products", "--rounds", "1"])
    monkeypatch.setattr(recurrent, "SHAPES", [(1, 70, 2, 8)])
    recurrent.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "(1, 70, 2, 8)" in line]
    assert [line.count(" of ") for line in lines] == [2] * 2 * len(recurrent.RULES)


def test_products_of_a_program_are_counted_as_often_as_they_run():
    matrices = jnp.ones((5, 3, 4))

    def program(matrices):
        _, products = jax.lax.scan(lambda carry, matrix: (carry, jax.jit(lambda m: m @ m.T)(matrix)), 0.0, matrices)
        return products, matrices[0] @ matrices[1].T, 2 * matrices

    counted = products.of_jax(program, matrices)()
    assert sorted(product.shape for product in counted) == [(6, 3, 3)]
    tensors = torch.ones(5, 3, 4, requires_grad=True)
    of_gradients = products.of_torch(lambda: (tensors @ tensors.mT).sum().backward())
    with products.Recorder() as recorder:
        of_gradients()
    assert len(recorder.calls) == 3  # the product, and the gradient of each of its operands
    # A sum reads the array and writes it; a view moves nothing.
    assert products.moved_by_torch(lambda: torch.ones(2, 3, dtype=torch.float64).mT + 1.0) == 8 * 6 + 2 * 8 * 6


def test_without_an_accelerator_its_page_is_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "devices", lambda: {"torch": None, "jax": None})
    assert accelerator.main(["--markdown", str(tmp_path / "page.md")]) == 2
    assert "torch and JAX see a processor alone" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


@pytest.mark.full
def test_the_accelerator_page_shows_each_command_and_outcome(tmp_path, monkeypatch, capsys):
    failing = accelerator.Section("failing", "What fails", ("-c", "print('lines\\n' * 99); raise SystemExit(3)"))
    slow = accelerator.Section("slow", "What hangs", ("-c", "import time; time.sleep(999)"))
    decoding = next(one for one in accelerator.SECTIONS if one.name == "decoding-8192")
    monkeypatch.setattr(accelerator, "SECTIONS", (decoding, failing))
    page = tmp_path / "page.md"
    further = ["--with", "decoding-8192", "--batch 2"]
    assert accelerator.main(["--on-cpu", "--quick", "--markdown", str(page), *further]) == 1
    assert "something failed" in capsys.readouterr().out
    text = page.read_text()
    assert "jax on a processor" in text
    assert "2 x 64 tokens in the cache" in text
    assert "JAX: 1 program for 5 steps" in text
    assert "`: passed in" in text
    assert "FAILED with status 3" in text
    assert f"({100 - accelerator.TAIL - 1} lines before)" in text
    status, part = accelerator.run(slow, (), quick=False, limit=1)
    assert (status, "stopped after 1 s" in part) == (124, True)


@pytest.mark.full  # measures with the functions that the quick run of the command covers
def test_what_options_cost_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["options", "--shape", "1,160,2,8", "--rounds", "1"])
    few = ("causal", options.SELF, "sinks", "bias, differentiated", "dropout")
    monkeypatch.setattr(options, "cases", lambda *sizes, all=options.cases: {one: all(*sizes)[one] for one in few})
    options.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:28].strip() for line in lines[3:8]] == list(few)
    assert [line[28:].split()[0] for line in lines[3:8]] == ["sdpa", "windowed", "cpu_flash", "sdpa", "sdpa"]
    assert all("cpu_flash" in line for line in lines[3:8])
    tables = [line for line in lines if line.endswith("jax fwd+bwd")]
    assert len(tables) == 2
    first_rows = [line for line, above in zip(lines[1:], lines, strict=False) if above in tables]
    assert [row.split()[2:] for row in first_rows] == [["1.00"] * 4] * 2
    assert lines[3].split()[3::2][0] == "1.00"


@pytest.mark.full  # as the costs of options
def test_bfloat16_is_measured_next_to_float32(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bfloat16", "--shape", "1,160,2,16", "--rounds", "1"])
    bfloat16.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["torch", "sdpa"],
        ["torch", "cpu_flash"],
        ["jax", "cpu_flash"],
    ]
    assert lines[5] == "1,160,2,16, forward and backward; ms, median of 1"
    assert lines[9].startswith("  torch: cpu_flash takes ")
    monkeypatch.setattr(sys, "argv", ["bfloat16", "--shape", "1,160,2"])
    with pytest.raises(SystemExit):
        bfloat16.main()


@pytest.mark.parametrize("shape", ["4,1024,12", "a,b,c,d", "1,0,2,8"])
def test_a_shape_that_is_none_is_one_line(shape, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["options", "--shape", shape])
    with pytest.raises(SystemExit):
        options.main()
    wanted = f"--shape ({shape}) must be four whole numbers above 0 such as 4,1024,12,64"
    assert capsys.readouterr().err.splitlines()[-1].endswith(wanted)


TINY_MODEL = ["models", "--layers", "2", "--width", "64", "--length", "20", "--rounds", "2"]


def test_whole_models_are_measured_next_to_transformers(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [*TINY_MODEL, "--json", str(tmp_path / "models.json")])
    models.main()
    assert "transformers, static cache" in capsys.readouterr().out
    found = json.loads((tmp_path / "models.json").read_text())["seconds"]
    assert list(found) == ["loading", "a prompt", "a token behind it"]
    assert all(seconds > 0 for ways in found.values() for seconds in ways.values())


def test_a_model_whose_logits_are_wrong_is_not_measured(monkeypatch):
    right = models.torch_attn.DecoderModel.head
    monkeypatch.setattr(models.torch_attn.DecoderModel, "head", lambda self, x: right(self, 1.01 * x) * 1.01)
    monkeypatch.setattr(sys, "argv", TINY_MODEL)
    with pytest.raises(SystemExit, match=r"error: a prompt, torch: logits are off by .*e-02 of the largest"):
        models.main()


TINY_MESHES = ["meshes", "--width", "64", "--tokens", "256", "--devices", "2", "--long", "16384"]


@pytest.mark.full
def test_meshes_are_measured_in_both_frameworks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [*TINY_MESHES, "--json", str(tmp_path / "meshes.json")])
    meshes.main()
    assert "decoding with tensor=2: 5 steps in JAX compile 1 program" in capsys.readouterr().out
    found = json.loads((tmp_path / "meshes.json").read_text())
    for rows in found["tables"].values():
        plain, tensor, fsdp = (rows[name]["flax"] for name in ("1 device", "tensor=2", "fsdp=2"))
        assert max(tensor["weights"], fsdp["weights"]) < 0.51 * plain["weights"]
        assert max(one["flax"]["runs"][1]["temporary"] for one in rows.values()) == plain["runs"][1]["temporary"]
        assert all(one["flax"]["weights"] == one["torch"]["weights"] for one in rows.values())
    sums = [found["tables"][name]["tensor=2"]["flax"]["runs"][0]["counts"] for name in ("one attention", "two layers")]
    assert sums == [{"all-reduce": 1}, {"all-reduce": 5}]
    held = {name: sum(one["plain"]) / sum(one["ring"]) for name, one in found["long"].items()}
    assert min(held.values()) > 4  # of 8 devices; what a device holds beside its tokens does not shrink


@pytest.mark.parametrize(
    ("words", "own", "verdict"),
    [
        (("graph_attention", ""), True, "equal"),
        (("graph_attention", "absent edges"), True, "different"),  # its author only tries full graphs
        (("normed_gru", "epsilon under"), True, "different"),  # no float32 rule can see it
        (("time_embedding", "frequencies rounded"), True, "precision"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_judge_sees_faults_that_the_author_of_a_port_does_not(words, own, verdict):
    kind, fault = words
    port = next(one for one in PORTS if one.kind == kind and fault in one.fault)
    outcome = run(port)
    assert (outcome.own, outcome.report.verdict) == (own, verdict)
    assert (outcome.witness is None) == (verdict == "equal")
