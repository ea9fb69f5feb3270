"""What the benchmarks say without measuring: sizes, right answers, ratios, tables, the plot and bad usage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attn_bridge.reference import attention as reference
from attn_bridge.reference import multi_head_attention
from attn_bridge.specs import VARIANTS, MultiHeadAttentionConfig
from attn_parity.laws import LAWS
from benchmarks.agents.catalogue import PORTS
from benchmarks.app import run
from benchmarks.measuring.cells import LINEARS, Cell, Group
from benchmarks.measuring.collectives import traffic
from benchmarks.reporting import page
from benchmarks.reporting.plot import svg
from benchmarks.reporting.report import Report, Row
from benchmarks.sides import oracle

ROOT = Path(__file__).parent.parent.parent

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "flags": ["avx2"],
    "memory_bytes": 8 << 30,
    "system": "Linux",
    "load_average_before": 0.1,
    "versions": {"python": "3.11"},
    "frameworks": {
        "torch": {"versions": {"torch": "2.0"}, "device": "cpu"},
        "jax": {"versions": {"jax": "0.1"}, "device": "cpu"},
    },
}


def row(seconds, framework="torch", contender="ours", kind="ours", mode="eager", cell="1x8x2x4", **changes):
    values = {
        "subject": "attention",
        "cell": cell,
        "dtype": "float32",
        "direction": "forward",
        "framework": framework,
        "contender": contender,
        "kind": kind,
        "mode": mode,
        "picked": kind == "ours",
        "status": "right",
        "reason": None,
        "seconds": tuple(seconds),
        "first_call_s": 0.5,
        "matmul_flops": 1e9,
        "memory_bytes": 3 << 20,
    }
    return Row(**values | changes)


def report(*rows):
    return Report(rows, MACHINE, ("jax left out: it is not here",), 3)


SAMPLE = report(
    row([0.002, 0.001, 0.004]),
    row([0.008], contender="SDPA", kind="stock"),
    row([0.003], contender="SDPA", kind="stock", mode="compiled"),
    row([0.006], contender="other", kind="peer"),
    row([0.001], framework="jax", mode="compiled"),
    row([0.005], framework="jax", contender="jax.nn", kind="stock", mode="compiled"),
    row([0.01], framework="jax", mode="compiled", cell="4x32x2x4"),
)


# ---- what README and docs say


def test_pages_show_the_benchmarks_that_are_stored(tmp_path):
    def run(*options):
        command = [sys.executable, "-m", "benchmarks", "--from", str(ROOT / "docs/benchmarks.json"), *options]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout

    made = tmp_path / "benchmarks.md"
    run("--markdown", str(made))
    assert made.read_text(encoding="utf-8") == (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    attention = [line.split() for line in run("--summary").split("modules, ms")[0].splitlines() if "float32" in line]
    in_torch, in_jax = ([float(cells[place]) for cells in attention] for place in (5, 8))
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert (
        f"our attention is {min(in_torch):.1f} to {max(in_torch):.1f} times as fast as torch's own, and "
        f"{min(in_jax):.1f} to {max(in_jax):.1f} times as fast as JAX's" in readme
    )


# ---- what is counted


def test_causal_attention_counts_half_the_work():
    forward = Group("attention", Cell(2, 16, 3, 4), "float32", "forward")
    assert forward.flops() == 4 * 2 * 3 * 16 * 16 * 4 / 2
    both = Group("attention", Cell(2, 16, 3, 4), "float32", "forward+backward")
    assert both.flops() == 3.5 * forward.flops()


def test_the_work_of_a_module_adds_four_projections():
    cell = Cell(2, 16, 3, 4)
    for direction, factor in (("forward", 1), ("forward+backward", 3)):
        inside = Group("attention", cell, "float32", direction).flops()
        whole = Group("modules", cell, "float32", direction).flops()
        assert whole - inside == factor * 4 * 2 * 2 * 16 * 12 * 12


# ---- the right answer


@pytest.mark.parametrize("tokens", [1, 5, 7])
def test_the_right_answer_is_that_of_the_reference(tokens, monkeypatch):
    monkeypatch.setattr(oracle, "BLOCK", 3)
    group = Group("attention", Cell(2, tokens, 3, 4), "float32", "forward")
    inputs = {name: array.astype(float) for name, array in group.inputs().items()}
    heads = [inputs[name].swapaxes(1, 2) for name in ("query", "key", "value")]
    expected, _ = reference.attend(*heads, scale=0.5, causal=True, attention_mask=None)
    np.testing.assert_allclose(oracle.answer(group)["output"], expected.swapaxes(1, 2), rtol=1e-12, atol=1e-13)


def test_the_oracle_answers_with_the_reference():
    group = Group("modules", Cell(2, 5, 3, 4), "bfloat16", "forward")
    inputs = group.inputs()
    parameters = {name: array.T.astype(float) for name, array in inputs.items() if "." in name}
    config = MultiHeadAttentionConfig(12, 12, 5, 0.0, 3, True)
    expected, _ = multi_head_attention.reference(config, parameters, inputs["x"].astype(float))
    np.testing.assert_allclose(oracle.answer(group)["output"], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("subject", ["attention", "modules"])
def test_its_gradients_are_the_slopes_of_its_output(subject, monkeypatch):
    monkeypatch.setattr(oracle, "BLOCK", 3)
    group = Group(subject, Cell(1, 5, 2, 3), "float32", "forward+backward")
    inputs = {name: array.astype(float) for name, array in group.inputs().items()}
    found = oracle.answer(group)
    names = ("query", "key", "value") if subject == "attention" else ("x", *(f"{n}.weight" for n in LINEARS))
    random = np.random.default_rng(0)
    for name in names:
        step = 1e-6 * random.standard_normal(inputs[name].shape)
        ends = []
        for sign in (1, -1):
            moved = inputs | {name: inputs[name] + sign * step}
            monkeypatch.setattr(Group, "inputs", lambda self, moved=moved: moved)
            ends.append((oracle.answer(group)["output"] * inputs["cotangent"]).sum())
        assert (ends[0] - ends[1]) / 2 == pytest.approx((found[f"grad {name}"] * step).sum(), rel=1e-5)


def test_rounded_answers_are_right_and_an_extra_key_is_wrong():
    group = Group("attention", Cell(1, 64, 2, 8), "float32", "forward")
    right = oracle.answer(group)
    rounded = {"output": right["output"].astype(np.float32).astype(float)}
    assert oracle.wrong(rounded, right, "float32") is None
    query, key, value = (group.inputs()[name][0, :, 1].astype(float) for name in ("query", "key", "value"))
    weights = np.exp(query[62] @ key.T * 8**-0.5)
    rounded["output"][0, 62, 1] = weights @ value / weights.sum()
    assert re.match(
        r"output is off by \S+ of its norm .* its worst row by \S+ ", oracle.wrong(rounded, right, "float32")
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "output has shape nothing, not (1, 4, 1, 2)"),
        ({"output": np.zeros((4, 2))}, "output has shape (4, 2), not (1, 4, 1, 2)"),
        ({"output": np.full((1, 4, 1, 2), np.nan)}, "output is off by nan of its norm"),
    ],
)
def test_an_answer_that_is_none_is_wrong(found, message):
    right = oracle.answer(Group("attention", Cell(1, 4, 1, 2), "float32", "forward"))
    assert oracle.wrong(found, right, "float32").startswith(message)


# ---- the report


def test_ratios_compare_with_peers_of_the_same_framework_and_mode():
    torch_ours, *_, jax_ours, _, _ = SAMPLE.rows
    assert SAMPLE.ratios(torch_ours) == pytest.approx({"peer": 3.0, "stock": 4.0, "torch": 1.5})
    assert SAMPLE.ratios(jax_ours) == pytest.approx({"peer": 5.0, "stock": 5.0, "torch": 3.0})
    assert SAMPLE.ratios(SAMPLE.rows[-1]) == {"peer": None, "stock": None, "torch": None}


def test_a_row_has_the_median_the_quartiles_and_the_rate():
    assert SAMPLE.rows[0].median == 0.002
    assert SAMPLE.rows[0].quartiles == pytest.approx((0.0015, 0.003))
    assert SAMPLE.rows[0].flops == pytest.approx(4 * 2 * 8 * 8 * 4 / 2 / 0.002)


def test_a_report_survives_its_json():
    assert Report.from_json(json.loads(json.dumps(SAMPLE.to_json(), allow_nan=False))) == SAMPLE


def test_a_wrong_answer_hides_its_time_and_fails_ours():
    wrong = row([], status="wrong", reason="output is off")
    assert SAMPLE.numbers(wrong) == ["wrong", *[""] * 8]
    assert not report(wrong).passed
    assert "wrong: torch ours, eager, attention 1x8x2x4 float32 forward: output is off" in list(report(wrong).lines())
    assert report(row([], status="wrong", kind="peer")).passed


def test_groups_that_are_skipped_for_one_reason_share_a_line():
    skipped = [row([], cell=cell, status="skipped", reason="no window") for cell in ("1x8x2x4", "4x32x2x4")]
    lines = list(report(*skipped, row([], mode="compiled", status="skipped", reason="no window")).lines())
    assert [line for line in lines if line.startswith("skipped")] == [
        "skipped: torch ours, eager, 2 groups: no window",
        "skipped: torch ours, compiled, attention 1x8x2x4 float32 forward: no window",
    ]


def test_the_plot_has_a_line_per_contender_and_measure():
    drawing = ET.fromstring(svg(SAMPLE))
    names = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ms per sequence", "MiB per sequence", "torch ours", "jax ours", "SDPA", "jax.nn", "8", "32"} <= set(names)
    lines = [one.get("points").split() for one in drawing.iter("{http://www.w3.org/2000/svg}polyline")]
    assert sum(len(points) == 2 for points in lines) == 2 + 5  # jax ours at two lengths, twice; the legend


def test_a_plot_over_one_length_is_refused():
    with pytest.raises(ValueError, match=r"^a plot over T needs two cells with different numbers of tokens$"):
        svg(report(row([1.0])))


def test_the_page_has_every_row_and_the_machine():
    text = page.markdown(SAMPLE, "plot.svg")
    assert text.count("\n| torch | ") + text.count("\n| jax | ") == len(SAMPLE.rows)
    assert "a processor, 2 cores (avx2), 8 GiB" in text
    assert "torch 2.0" in text
    assert "jax left out: it is not here" in text


# ---- the command


def test_a_saved_report_is_shown_and_written_as_a_page(tmp_path, capsys):
    saved = tmp_path / "bench.json"
    saved.write_text(json.dumps(SAMPLE.to_json()))
    assert run(["--from", str(saved), "--summary"]) == 0
    shown = capsys.readouterr().out
    assert "a processor, 2 cores (avx2)" in shown
    assert "1x8x2x4" in shown
    assert run(["--from", str(saved), "--markdown", str(tmp_path / "bench.md")]) == 0
    assert (tmp_path / "bench.md").read_text() == page.markdown(SAMPLE, "bench.svg")
    assert (tmp_path / "bench.svg").read_text() == svg(SAMPLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "error: subject (nonsense) must be one of attention, modules\n"),
        (["--cells", "4x1024"], "error: cell (4x1024) must be BATCHxTOKENSxHEADSxHEAD_DIM, such as 4x1024x12x64\n"),
        (["--cells", "1x0x1x1"], "error: cell (1x0x1x1) must be BATCHx"),
        (["--dtypes", "float32,int8"], "error: dtype (int8) must be one of float32, bfloat16\n"),
        (["--directions", "up"], "error: direction (up) must be one of forward, forward+backward\n"),
        (["--modes", "fast"], "error: mode (fast) must be one of eager, compiled\n"),
        (["--frameworks", "numpy"], "error: framework (numpy) must be one of torch, jax\n"),
        (["--rounds", "0"], "error: Invalid value for '--rounds': "),
        (["--no-such"], "error: No such option: --no-such"),
        (
            ["--json", "/no/such/folder/x.json"],
            "error: --json /no/such/folder/x.json cannot be written: there is no folder /no/such/folder\n",
        ),
        (["--from", "/no/such.json"], "error: [Errno 2] "),
        (["--from", __file__], f"error: {__file__} is no report of python -m benchmarks: "),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_bad_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_help_gives_an_example(capsys):
    assert run(["--help"]) == 0
    assert "Example: python -m benchmarks attention" in capsys.readouterr().out


PROGRAM = """
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%turn (p: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %held = bf16[2,8]{1,0} get-tuple-element(%p), index=1
  %moved = bf16[2,8]{1,0} collective-permute(%held), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], bf16[2,8]{1,0}) tuple(%i, %moved)
}

ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %whole = (f32[4,4]{1,0}, pred[3]{0}) all-gather(%a, %b), dimensions={0}
  %loop = (s32[], bf16[2,8]{1,0}) while(%start), condition=%c, body=%turn, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %all = f32[4,4]{1,0} all-reduce(%a), to_apply=%add
}
"""


def test_traffic_is_read_from_programs_with_loops():
    found = traffic(PROGRAM)
    assert found.words == "1 all-reduce, 1 all-gather, 7 collective-permute"
    assert found.bytes == 64 + 64 + 3 + 7 * 32


def test_a_loop_without_a_trip_count_is_refused():
    with pytest.raises(ValueError, match="a loop with collectives must say how often it turns: %loop"):
        traffic(PROGRAM.replace("known_trip_count", "no_count"))


def test_ports_of_agents_are_on_their_page():
    assert len(PORTS) == 40
    assert len({port.kind for port in PORTS}) == 12
    assert sum(not port.fault for port in PORTS) == 12
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    for port in PORTS:
        assert (port.text == replace(port, changes=()).text) == (not port.fault)  # each changed line exists once
        assert f"| {port.kind.replace('_', ' ')} | {port.fault or 'none'} | {port.test.about} |" in page


def test_the_page_of_laws_has_a_row_for_each_variant_and_no_broken_law():
    page = (Path(__file__).parents[2] / "docs" / "laws.md").read_text(encoding="utf-8")
    table = page.partition("<!-- made by: python -m benchmarks.laws -->")[2].partition("## Limits")[0]
    assert "BROKEN" not in table
    assert f"| {' | '.join(LAWS)} |" in table
    assert table.count("(foreign) |") >= 10
    for variant in VARIANTS:
        assert f"| {variant.name} |" in table
