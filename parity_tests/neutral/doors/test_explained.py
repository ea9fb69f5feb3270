"""One tensor or submodule explained to an agent: a witness, causes, what agrees around it, and a step that works."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from attn_parity.agents import answers, steps
from attn_parity.hints.evidence import Evidence
from attn_parity.hints.witness import witness
from attn_parity.results.findings import Candidate, Worst

from ...support.judging.reports import SUSPECT, different_report, equal_report, equal_tensor, inconclusive_report

REPORT = different_report()
SEEN = "output at (0, 4): torch 1.5, Flax 1.25; input 0 at (0): 0.1, 0.2"


def told(path, report=REPORT):
    return answers.on_path(report.to_json(), "r1", path)


def last(text):
    return text.splitlines()[-1].removeprefix("next: ")


# ---- explain


def test_the_first_divergence_comes_with_witness_causes_and_what_agrees_around_it():
    other = Candidate("blocks.3.attn", "layers.3.attn")
    first = dataclasses.replace(REPORT.first_divergence, witness=SEEN, candidates=(other,))
    text = told(SUSPECT, dataclasses.replace(REPORT, first_divergence=first))
    lines = text.splitlines()
    assert lines[0] == (
        "submodule blocks.3.norm1 (LayerNorm): different, fed the same numbers the sides are apart by: "
        "outputs 3.1e-03, gradients 5.2e-03"
    )
    assert f"witness: fed the same numbers, {SEEN}" in lines
    assert "cause, as far as the numbers show: both eps differ by a factor of 10" in lines
    assert "not excluded: in blocks.3.attn" in lines
    assert any(
        line.startswith("after it: blocks.3.attn equal, blocks.3.drop not judged, blocks.3.norm2") for line in lines
    )
    assert "gradients of its parameters as the whole ran" not in text  # the report has none of this submodule
    assert (
        last(text) == "compare the code of both sides in blocks.3.norm1, mend the second side, and call compare again"
    )
    assert len(text.encode()) < 2000


def test_a_submodule_around_the_divergence_leads_into_it():
    text = told("layers.3")
    assert "inside: blocks.3.norm1 different, blocks.3.attn equal, " in text
    assert last(text) == f"call explain with report='r1' and path='{SUSPECT}'"


def test_a_submodule_that_is_equal_is_not_to_be_mended():
    text = told("blocks.2")
    assert "first divergence (forward)" not in text
    assert "the sides part first (forward) in blocks.3.norm1 (Flax: layers.3.norm1)" in text
    assert "before it: tok_emb equal, pos_ids not judged, blocks.0 equal, blocks.1 equal" in text
    assert last(text).startswith(
        "blocks.2 computes the same when fed the same numbers: mend nothing in it; call explain"
    )


def test_a_tensor_has_both_numbers_the_exact_value_and_those_that_agree():
    text = told("output")
    assert "  at (1, 7, 12): torch 0.731058578, Flax 0.727935218, on random weights, seed 1\n" in text
    assert "exact (float64) 0.731058579, 412 of 8640 numbers are beyond the limit" in text
    assert "of 53 other tensors agree: output[1]; grad blocks.0.norm1.shift; " in text
    assert "cause, as far as the numbers show: both eps differ by a factor of 10" in text
    assert last(text) == f"begin where the sides part first; call explain with report='r1' and path='{SUSPECT}'"


def test_a_gradient_shows_its_submodule_and_leads_elsewhere_if_that_is_equal():
    bad = equal_tensor("grad head.weight", verdict="different", worst=Worst(0, (0, 1), 1.0, 2.0, 1.0), bad=3)
    tensors = [bad if tensor.name == bad.name else tensor for tensor in REPORT.tensors]
    text = told("grad head.weight", dataclasses.replace(REPORT, tensors=tensors))
    assert "submodule head (Linear): equal, fed the same numbers the sides are apart by: outputs 2.2e-15, " in text
    assert "head.kernel in the second side" in text
    assert last(text).startswith(
        "head computes the same when fed the same numbers: mend nothing in it; call explain with "
    )


def test_weights_that_were_paired_by_a_guess_are_named():
    first = dataclasses.replace(REPORT.first_divergence, path="", second_path="")
    assert "weights that no name paired: head.weight with head.kernel (by probe)" in (
        told("output", dataclasses.replace(REPORT, first_divergence=first))
    )


def test_equal_tensors_have_no_advice_to_mend():
    report = dataclasses.replace(equal_report(), tree=None, unreached=[], unexercised=[])
    for path in ("output", "blocks.3.attn"):
        assert last(told(path, report)) == (
            f"{path} is equal: mend nothing for it; done; call compare with other dtypes or inputs for more evidence"
        )


def test_an_unknown_path_names_those_that_exist():
    with pytest.raises(
        ValueError, match=r"^nope is no tensor or submodule of r1; it has output, output\[1\], grad x, "
    ):
        told("nope")


# ---- steps after compare


def step(report):
    return last(answers.on_comparison(report.to_json(), "r1"))


@pytest.mark.parametrize(
    ("unreached", "unexercised", "expected"),
    [
        (["the torch module's `mask` (you gave none)", "the Flax module's `mask` (you gave none)"], [],
         "where the port will be used so, call compare with an example_inputs() that gives mask by name; else done"),
        (["another ids: 3 everywhere, so that a side may ignore it"], [], "inputs in which ids differs from place"),
        (["3 of 9 rows of emb.weight: no gradient reached 0, 7-8"], [], "with ids that read all rows of emb.weight"),
        (["dropout of drop (0.1): off in eval mode"], [], "compare --train in a shell, as this tool has no"),
        (["statistics of norm: those of a batch are for train mode"], [], "run attn-bridge compare --train in a shell"),
        (["train mode of net: its code asks which mode it is in"], [], "run attn-bridge compare --train in a shell"),
        ([], ["idle.weight"], "see in the code of both sides whether anything reads idle.weight (an "),
        (["a second call: what a call changes (count) is put back"], [], "done; call compare with "),
        (["hooks on the gradient of w: gradients are compared without them"], [], "done; call compare with "),
        ([], [], "done; call compare with other dtypes or inputs for more evidence"),
    ],
)  # fmt: skip
def test_equal_asks_for_what_can_be_done(unreached, unexercised, expected):
    report = dataclasses.replace(equal_report(), unreached=unreached, unexercised=unexercised)
    assert expected in step(report)
    if unreached and "given" not in expected and "train" in expected:
        assert "inputs" not in step(report)


def test_the_first_side_that_loses_precision_is_no_fault_of_the_port():
    loses = equal_tensor("output", verdict="precision", side="torch", message="torch loses more than its share")
    report = dataclasses.replace(REPORT, verdict="precision", tensors=[loses], first_divergence=None)
    assert step(report).startswith(
        "leave the second side as it is if the first is its original, which loses the precision"
    )
    second = dataclasses.replace(report, tensors=[dataclasses.replace(loses, side="flax")])
    assert (
        step(second) == "call explain with report='r1' and path='output', mend the second side, and call compare again"
    )


def test_a_tensor_that_is_allowed_to_differ_is_not_to_be_explained():
    allowed = equal_tensor("output", verdict="different", allowed="norm")
    bad = equal_tensor("grad x", verdict="different")
    report = dataclasses.replace(REPORT, tensors=[allowed, bad], first_divergence=None)
    assert "path='grad x'" in step(report)
    unlike = dataclasses.replace(report, tensors=[equal_tensor("logits")], message="the inputs differ")
    assert (
        step(unlike) == "see the summary for the difference, mend the second side or its inputs, and call compare again"
    )


def test_a_parameter_that_one_side_ignores_is_named_with_the_side():
    message = "the Flax side has this parameter and does not use it"
    idle = equal_tensor("grad fc.bias", verdict="different", message=message, worst=None)
    report = dataclasses.replace(REPORT, tensors=[idle], first_divergence=None)
    assert step(report) == f"{message}: use fc.bias on both sides or on none, and compare again"


def test_inconclusive_follows_the_summary():
    assert step(inconclusive_report()).startswith("change the inputs or the sides as the summary asks")
    assert steps.NAMES == 3


# ---- witness


def test_a_witness_is_the_furthest_element_with_both_numbers_and_its_input():
    x = np.arange(24.0).reshape(2, 3, 4)
    second = 2 * x
    second[1, 2, 3] += 5
    assert witness(Evidence(inputs=[x], first_outputs=[2 * x], second_outputs=[second])) == (
        "output at (1, 2, 3): torch 46, Flax 51; input 0 at (1, 2): 20, 21, 22, 23"
    )


def test_a_witness_of_a_gradient_has_its_name():
    gradients = {"fc.weight": np.ones((2, 2)), "input 0": np.ones(3)}
    other = {"fc.weight": np.ones((2, 2)), "input 0": np.array([1.0, np.nan, 1.0])}
    evidence = Evidence(direction="backward", first_gradients=gradients, second_gradients=other)
    assert witness(evidence) == "gradient of input 0 at (1): torch 1, Flax nan"


def test_equal_or_unlike_results_have_no_witness():
    x = np.ones((2, 3))
    assert witness(Evidence(inputs=[x], first_outputs=[x], second_outputs=[x])) == ""
    assert witness(Evidence(inputs=[x], first_outputs=[x], second_outputs=[x.T])) == ""
    assert witness(Evidence(inputs=[x], first_outputs=[np.full(2, np.nan)], second_outputs=[np.full(2, np.nan)])) == ""


def test_long_inputs_are_cut():
    x = np.arange(40.0).reshape(2, 20)
    line = witness(Evidence(inputs=[x], first_outputs=[x], second_outputs=[x + np.eye(2, 20)]))
    assert re.search(r"input 0 at \(0\): 0, 1, 2, 3, 4, 5, \.\.\. \(20 numbers, rms 11\.1\)$", line)
