"""`attn-bridge check` is right about right twins, and turns red for every planted fault."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge.cli.app import run
from attn_bridge.parity import check
from attn_bridge.specs import VARIANTS
from attn_parity import workers
from attn_parity.check import cases, kernels, matrix
from attn_parity.check.cases import CASES
from attn_parity.check.twin_runs import CheckRow

from ..support.calls import cover
from ..twins.mutation.faults import FAULTS


@pytest.mark.full  # make check holds the twins equal in every case and precision but this one's limit
def test_all_variants_are_equal_in_float64_in_every_case():
    report = check(dtypes=["float64"], seeds=3)
    assert report.passed, [cell.explain() for cell in report.failures]
    rows = {cell.variant for cell in report.cells}
    assert {row for row in rows if ":" not in row} == {variant.name for variant in VARIANTS}
    here = {name for library in (torch_attn, jax_attn) for name in library.functional.IMPLEMENTATIONS}
    here -= {"cudnn", "tpu_flash", "flex"} if jax.default_backend() == "cpu" else set()
    here -= {"cpu_flash"}  # which has no float64
    assert {row.removeprefix("dot_product_attention: ") for row in rows if ":" in row} >= here
    cases = {case.name for case in CASES} | {case.name for case in kernels.CASES}
    cases |= {example.name for variant in VARIANTS for example in variant.examples}
    assert {cell.case for cell in report.cells} == cases
    compared = {tensor.name for cell in report.cells if cell.variant == "MultiHeadAttention" for tensor in cell.tensors}
    assert {"output", "weights", "grad x", "grad W_key.bias", "grad out_proj.weight"} <= compared
    assert max(tensor.relative for cell in report.cells for tensor in cell.tensors) <= 1e-12


@cover.some("first_seed", [1000, 2000], always=[1000])
def test_low_precisions_raise_no_false_alarm_on_many_seeds(first_seed, monkeypatch):
    from attn_parity.check import twin_runs

    right = twin_runs.draw
    monkeypatch.setattr(
        twin_runs, "draw", lambda case, variant, seed, weights: right(case, variant, first_seed + seed, weights)
    )
    report = check(
        ["SelfAttention_v1", "MultiHeadAttention", "LayerNorm"], cases=["odd-sizes", "large-scores"], seeds=10
    )
    assert report.passed, [cell.explain() for cell in report.failures]
    assert {"float32", "bfloat16", "float16"} <= {cell.dtype for cell in report.cells}
    assert {"torch inductor vs flax float64", "flax eager vs torch float64"} <= {cell.what for cell in report.cells}


def spoil_a_gradient(framework: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil the gradient of the value alone, in one implementation."""
    if framework == "torch":
        implementation = torch_attn.implementations.IMPLEMENTATIONS[name]
        right = implementation.attend

        def spoilt(call: Any) -> Any:
            call = dataclasses.replace(call, value=1.01 * call.value - 0.01 * call.value.detach())
            return right(call)

        monkeypatch.setattr(implementation, "attend", spoilt)
        return
    implementation = jax_attn.implementations.IMPLEMENTATIONS[name]
    backward = implementation.PASSES.backward

    def spoilt_backward(*arguments: Any) -> Any:
        d_query, d_key, d_value, *others = backward(*arguments)
        return d_query, d_key, 1.01 * d_value, *others

    monkeypatch.setattr(implementation, "PASSES", implementation.PASSES._replace(backward=spoilt_backward))


@pytest.mark.parametrize(
    ("framework", "name"), [("torch", "sdpa"), ("torch", "cpu_flash"), ("flax", "cpu_flash"), ("flax", "blocked")]
)
def test_a_fast_wrong_answer_does_not_win(framework, name, monkeypatch):
    spoil_a_gradient(framework, name, monkeypatch)
    report = check(["dot_product_attention"], cases=["grouped"], seeds=1)
    assert {cell.what.split()[1] for cell in report.failures} == {name}
    # What has no float64 is judged by its rounding alone.
    assert {cell.verdict for cell in report.failures} == {"precision" if name == "cpu_flash" else "different"}
    named = {one.name for cell in report.failures for one in cell.tensors if one.verdict != "equal"}
    assert named == {"grad value"}


@cover.rotated(("fault", "framework"), list(FAULTS), ["torch", "flax"])
def test_a_planted_fault_turns_check_red(fault, framework, monkeypatch):
    variant, verdict, plant = FAULTS[fault]
    plant(monkeypatch, framework)
    case, dtype = ("large-scores", "float32") if verdict == "precision" else ("odd-sizes", "float64")
    report = check([variant], cases=[case], dtypes=[dtype], seeds=2)
    assert not report.passed
    assert {cell.verdict for cell in report.failures} == {verdict}
    named = [cell.what for cell in report.failures]
    if fault == "key-bias-dropped":
        assert [cell.message for cell in report.failures] == [
            "TwinDiffersError: MultiHeadAttention does not use its parameter W_key.bias"
        ]
    if verdict == "precision":
        assert [what.split()[0] for what in named] == [framework]
    else:
        assert any(what.startswith(framework) for what in named), "the twin at fault is named"
        other = {"torch": "flax", "flax": "torch"}[framework]
        assert not any(what.startswith(other) and what.endswith("NumPy reference") for what in named)
    shown, rest = ("Flax", "torch") if framework == "flax" else ("torch", "Flax")
    said = {cell.message for cell in report.failures if not cell.message.startswith("TwinDiffersError")}
    if verdict == "different" and said:
        assert said == {f"{rest} and NumPy reference agree: {shown} is the odd one out"}


def _keys_in_eight_bits(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    """Round the keys of a bfloat16 call to float8, and leave the other precisions alone."""
    functional = {"torch": torch_attn, "flax": jax_attn}[framework].functional
    right = functional.dot_product_attention

    def rounded(key: Any) -> Any:
        if framework == "torch":
            return key.to(torch.float8_e5m2).to(key.dtype) if key.dtype == torch.bfloat16 else key
        return key.astype(jnp.float8_e5m2).astype(key.dtype) if key.dtype == jnp.bfloat16 else key

    monkeypatch.setattr(
        functional,
        "dot_product_attention",
        lambda query, key, value, **arguments: right(query, rounded(key), value, **arguments),
    )


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_quickly_compiled_runs_find_losses_that_users_runs_decide(framework, monkeypatch):
    from attn_parity.check import twin_runs

    modes: list[tuple[str, str]] = []
    right = twin_runs._Twin.run

    def noted(self: Any, numbers: Any, mode: str) -> Any:
        modes.append((self.dtype, mode))
        return right(self, numbers, mode)

    monkeypatch.setattr(twin_runs._Twin, "run", noted)
    _keys_in_eight_bits(monkeypatch, framework)
    report = check(["SelfAttention_v2"], cases=["odd-sizes"], seeds=2)
    assert {(cell.dtype, cell.verdict) for cell in report.failures} == {("bfloat16", "precision")}
    assert {cell.what.split()[0] for cell in report.failures} == {framework}
    ways = [mode for dtype, mode in modes if dtype == "bfloat16" and mode != "eager"]
    assert list(dict.fromkeys(ways)) == ["quick", "jit"]
    assert ("float32", "jit") in modes
    assert ("float32", "quick") not in modes


def test_the_reference_catches_a_fault_of_both_twins(monkeypatch):
    variant, _, plant = FAULTS["scale-sqrt-d_out"]
    plant(monkeypatch, "torch")
    plant(monkeypatch, "flax")
    report = check([variant], cases=["odd-sizes"], dtypes=["float64"], seeds=2)
    assert {cell.what for cell in report.failures} == {"torch eager vs NumPy reference", "flax jit vs NumPy reference"}
    messages = {cell.message for cell in report.failures}
    assert messages == {"torch and Flax agree: NumPy reference is the odd one out"}


def test_a_twin_that_cannot_run_is_inconclusive_and_not_equal(monkeypatch):
    def broken(*arguments, **keywords):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(torch_attn.functional, "dot_product_attention", broken)
    report = check(["SelfAttention_v2"], cases=["one-head"], seeds=1)
    assert not report.passed
    (cell,) = report.cells
    assert (cell.verdict, cell.message) == ("inconclusive", "RuntimeError: no kernel for this")


def test_an_output_in_another_dtype_is_different(monkeypatch):
    right = torch_attn.functional.as_given
    monkeypatch.setattr(
        torch_attn.functional, "as_given", lambda x, context, weights: right(x, context.double(), weights)
    )
    report = check(["simple_self_attention"], cases=["odd-sizes"], dtypes=["float32"], seeds=1)
    (cell,) = report.cells
    assert (cell.verdict, cell.message) == (
        "different",
        "TwinDiffersError: simple_self_attention returns float64 for float32 input",
    )


def test_a_precision_that_is_asked_for_runs_in_every_case():
    report = check(["LayerNorm"], cases=["one-head"], dtypes=["bfloat16"], seeds=1)
    assert {cell.dtype for cell in report.cells} == {"float64", "bfloat16"}


def test_command_line_exits_0_and_prints_a_table_and_json(capsys, tmp_path):
    target = tmp_path / "report.json"
    assert run(["check", "LayerNorm", "--case", "one-head", "--seeds", "2", "--json", str(target)]) == 0
    printed = capsys.readouterr()
    assert "LayerNorm" in printed.out
    assert printed.out.splitlines()[-1].endswith(" s: all equal")
    assert printed.err == ""
    data = json.loads(target.read_text())
    assert data["passed"] is True
    assert data["environment"]["torch"] != "not installed"
    assert {cell["verdict"] for cell in data["cells"]} == {"equal"}
    assert run(["check", "LayerNorm", "--case", "one-head", "--seeds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_unavailable_rows_are_named_with_the_reason(capsys, monkeypatch):
    fails = "its kernels do not load: they know another version of XLA's interface"
    for library in (jax_attn, torch_attn):
        monkeypatch.setattr(library.implementations.cpu_flash, "_fails_to_load", lambda: fails)
    found = jax_attn.implementations.unavailable() | torch_attn.implementations.unavailable()
    found["tpu_flash"] = None  # it is interpreted where there is no TPU
    expected = {f"{kernels.NAME}: {name}": reason for name, reason in found.items() if reason is not None}
    assert expected[f"{kernels.NAME}: cpu_flash"] == fails
    expected[f"{kernels.NAME}: windowed"] = "the mask is no window"
    assert run(["check", kernels.NAME, "--case", "grouped", "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("not run: ")) == sorted(
        f"not run: {row}: {reason}" for row, reason in expected.items()
    )
    assert not any(line.startswith(f" {row} ") for line in lines for row in expected)


def test_cases_that_an_implementation_refuses_are_in_the_json(capsys):
    assert run(["check", kernels.NAME, "--case", "capped", "--case", "grouped", "--seeds", "1", "--json"]) == 0
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    name = f"{kernels.NAME}: sdpa"
    refused = [one for one in left_out if one["variant"] == name]
    assert refused == [{"variant": name, "case": "capped", "reason": "it has no softcap"}]


def test_nothing_is_left_out_of_a_variant():
    assert check(["LayerNorm"], cases=["one-token"], seeds=1).left_out == ()


def test_command_line_exits_1_with_a_message_to_start_from(capsys, tmp_path, monkeypatch):
    FAULTS["norm-eps"][2](monkeypatch, "flax")
    target = tmp_path / "report.json"
    assert run(["check", "LayerNorm", "--case", "odd-sizes", "--dtype", "float64", "--json", str(target)]) == 1
    printed = capsys.readouterr().out
    for part in (
        "different: LayerNorm, odd-sizes, float64, flax jit vs torch float64",
        "output: ",
        "worst at (",
        "torch ",
    ):
        assert part in printed
    assert "again: attn-bridge check LayerNorm --case odd-sizes --dtype float64" in printed
    assert json.loads(target.read_text())["passed"] is False


def test_real_weights_on_the_command_line(capsys, tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    arrays = {}
    for layer in range(2):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            prefix = f"bert.encoder.layer.{layer}.attention.{name}"
            arrays[f"{prefix}.weight"] = rng.normal(size=(12, 12)).astype(np.float32)
            arrays[f"{prefix}.bias"] = rng.normal(size=12).astype(np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    command = ["check", "--weights", str(tmp_path / "model.safetensors"), "--layout", "hf-bert", "--dtype", "float64"]
    assert run(command) == 2
    assert capsys.readouterr().err == (
        "error: num_heads is not known: give --set num_heads=N, or put config.json beside the file\n"
    )
    assert run([*command, "--set", "num_heads=3"]) == 0
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3}))
    assert run(["check", "--weights", str(tmp_path), *command[3:]]) == 0
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": "3"}))
    assert run(command) == 2
    assert capsys.readouterr().err.endswith('the number of heads must be an integer, got "3"\n')
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert run(command) == 2
    assert "is not readable as JSON" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3}))
    assert run(command) == 0
    assert "6 comparisons" in capsys.readouterr().out
    name = "bert.encoder.layer.1.attention.self.key.weight"
    save_file(arrays | {name: np.ones((12, 6), np.float32)}, tmp_path / "model.safetensors")
    assert run(command) == 2
    refusal = f"error: {name} is (12, 6), which does not fit bert.encoder.layer.0.attention.output.dense.bias (12,)"
    assert capsys.readouterr().err == f"{refusal}: the width of the model would be 6 and 12\n"
    save_file(arrays | {name: np.full((12, 12), np.nan, np.float32)}, tmp_path / "model.safetensors")
    assert run(command) == 2
    assert "layers.1.att.W_key.weight holds NaN or infinity" in capsys.readouterr().err


def test_findings_of_the_second_look_are_kept(monkeypatch):
    from attn_parity.check import matrix
    from attn_parity.check.report import Cell

    looks = iter([("float32", "precision"), ("float64", "different")])

    def judge(row, numbers, futures, seeds):
        dtype, verdict = next(looks)
        return [Cell(row.variant.name, row.case.name, dtype, "a run", verdict, ())]

    monkeypatch.setattr(matrix, "run_side", lambda *arguments: None)
    monkeypatch.setattr(matrix, "judge_row", judge)
    report = check(["LayerNorm"], cases=["odd-sizes"], seeds=1)
    assert [cell.verdict for cell in report.cells] == ["different"]
    assert report.notes == (
        "LayerNorm, odd-sizes, float64: beyond the allowance on 1 seed, judged again on 4 new ones",
    )


def test_an_interrupted_check_starts_nothing_more(monkeypatch):
    from attn_parity.check import matrix

    started, told = [], []

    def run_side(framework, row, *arguments):
        started.append((framework, row.case.name))
        if row.case.name != "odd-sizes":
            told.append(arguments[-1].wait(60))

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "run_side", run_side)
    monkeypatch.setattr(matrix, "judge_row", lambda *arguments: [])
    with pytest.raises(KeyboardInterrupt):
        check(["LayerNorm"], seeds=1, progress=interrupt)
    assert all(told), "to stop"
    blocked = [framework for framework, case in started if case != "odd-sizes"]
    assert blocked.count("torch") <= 1, "one thread"
    assert blocked.count("flax") <= 2, "two threads"


def _without_times(report: Any) -> dict[str, Any]:
    found = dict(report if isinstance(report, dict) else report.to_json())
    seconds = found.pop("seconds")
    found["summary"] = found["summary"].replace(f"in {seconds:.0f} s", "")
    return found


FEW = ("LayerNorm", "RMSNorm", "dot_product_attention"), ("one-head", "one-token", "windowed")


def test_one_and_several_processes_give_the_same_report():
    found = []
    for jobs in (1, 2):
        told: list[tuple[str, int, int]] = []
        report = check(FEW[0], cases=FEW[1], seeds=1, jobs=jobs, progress=lambda *said, told=told: told.append(said))
        found.append((_without_times(report), told))
    assert found[0] == found[1]
    assert [row for row, _, _ in found[0][1]] == [
        "LayerNorm one-head",
        "LayerNorm one-token",
        "RMSNorm one-head",
        "RMSNorm one-token",
        "dot_product_attention windowed",
    ]


def test_the_command_says_the_same_with_several_processes(capsys):
    command = ["check", *FEW[0][:2], "--case", "one-head", "--seeds", "1", "--json"]
    assert run(command) == 0
    here = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, "-m", "attn_bridge", *command, "--jobs", "2"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert _without_times(json.loads(done.stdout)) == _without_times(here)


def test_real_weights_are_the_same_from_several_processes():
    (variant,) = (one for one in VARIANTS if one.name == "MultiHeadAttention")
    case = dataclasses.replace(CASES[0], dtypes=("float64",))
    numbers = [cases.draw(case, variant, seed).weights for seed in (1, 2)]
    subjects = [
        CheckRow(variant, dataclasses.replace(case, name=f"layer-{index}"), weights, ("--weights", "x"))
        for index, weights in enumerate(numbers)
    ]
    one, two = (check(subjects=subjects, seeds=1, jobs=jobs) for jobs in (1, 2))
    assert one.passed
    assert len(one.cells) == 6
    assert _without_times(one) == _without_times(two)


def test_a_fault_in_one_process_is_reported_by_the_others(monkeypatch):
    """A worker sees what the environment says, and nothing else of this process."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "no such value")
    with pytest.raises(ValueError, match="JAX_ENABLE_COMPILATION_CACHE") as caught:
        check(FEW[0], cases=FEW[1], seeds=1, jobs=2)
    assert "_judge_part" in str(caught.value.__cause__)


def test_a_worker_that_dies_is_one_line(capsys, monkeypatch):
    def run_none(*arguments):
        raise workers.WorkerDiedError("a worker process was ended by SIGKILL while it ran LayerNorm")

    monkeypatch.setattr(workers, "run", run_none)
    assert run(["check", "LayerNorm", "RMSNorm", "--jobs", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: a worker process was ended by SIGKILL while it ran LayerNorm\n"
    assert printed.out == ""


def test_checks_from_python_stay_in_the_process(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers, "run", refuse)
    monkeypatch.setattr(matrix, "_judge_rows", lambda work: iter([([], [])] * len(work.rows)))
    run(["check", "--json"])
    run(["check", "--json"], is_own=True)  # it holds frameworks, which someone may have changed
    check()
    with pytest.raises(AssertionError, match="a process was started"):
        run(["check", "--jobs", "2"])
