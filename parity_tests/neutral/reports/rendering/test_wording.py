"""What every rendering gives of a tensor: one number, the worst first, and a line for all of a report."""

from __future__ import annotations

import dataclasses

from attn_parity.rendering.branch import branch
from attn_parity.rendering.html import as_html
from attn_parity.rendering.text import LEGEND, headline, used, worst_first
from attn_parity.results.findings import Divergence, ModuleNode
from attn_parity.results.report import Report
from parity_tests.support.judging.html_outline import Outline
from parity_tests.support.judging.reports import equal_tensor

from .renderings import EMPTY


def differing(*sizes: float | None) -> list:
    return [equal_tensor(f"t{size}", verdict="different", relative=size) for size in sizes]


def test_the_page_lists_the_worst_tensors_first():
    precise = equal_tensor("lost", verdict="precision", side="flax", relative=9.0, second_used=3.0)
    tensors = [*differing(1e-5, 1e-7, 0.5, None, 1e-3, 1e-6, 2.0), precise]
    assert [one.name for one in worst_first(tensors)] == [
        *("tNone", "t2.0", "t0.5", "t0.001", "t1e-05", "t1e-06", "t1e-07", "lost")
    ]
    report = dataclasses.replace(EMPTY, verdict="different", tensors=tensors)
    words = Outline(as_html(report)).words
    listed = words[words.index("the worst 5") :]
    places = [listed.index(name) for name in ("tNone", "t2.0", "t0.5", "t0.001", "t1e-05")]
    assert places == sorted(places)


def test_a_tensor_has_one_share_in_every_rendering():
    """A right port showed 95% of its meaning in one place, and 25% of its precision in another."""
    near = equal_tensor("near", meaning_used=0.95, first_used=0.25, second_used=0.24)
    report = dataclasses.replace(EMPTY, tensors=[near], samples=17, seeds=4)
    page = Outline(as_html(report)).words
    full = str(report), page
    assert all("95%" in text and "25%" not in text for text in full)
    assert f"{LEGEND}:" in str(report)
    assert LEGEND.capitalize() in page
    assert "1 tensor, 17 runs (4 seeds)" in str(report)


def test_no_equal_tensor_shows_more_than_what_fails():
    """A reference is not judged by its precision, which may be far beyond the allowance."""
    reference = equal_tensor("x", meaning_used=0.3, first_used=40.0, second_used=0.5)
    assert used(reference, EMPTY) == 0.5
    lost = dataclasses.replace(reference, verdict="precision", side="flax", second_used=2.0)
    assert used(lost, EMPTY) == 2.0


def test_a_headline_says_what_and_where():
    tensors = [equal_tensor("grad attn.v.bias", verdict="different", relative=0.1), *differing(0.01)]
    place = Divergence("blocks.0.attn", "layers.0.attn", "backward", "long")
    report = dataclasses.replace(EMPTY, verdict="different", tensors=tensors[:1], first_divergence=place)
    assert headline(report) == "different: grad attn.v.bias, first in blocks.0.attn"
    several = dataclasses.replace(report, tensors=tensors)
    assert headline(several) == "different: grad attn.v.bias and 1 more, first in blocks.0.attn"
    between = dataclasses.replace(place, path="", between=("patch", "head"))
    assert headline(dataclasses.replace(report, first_divergence=between)).endswith(", first between patch and head")
    itself = dataclasses.replace(place, path="", second_path="", first_name="LayerNorm", second_name="Norm")
    assert headline(dataclasses.replace(report, first_divergence=itself)).endswith(", first in LayerNorm itself")
    assert str(itself).startswith("first divergence (backward) in LayerNorm itself: ")
    assert "in LayerNorm itself" in str(dataclasses.replace(report, first_divergence=itself))
    unclear = dataclasses.replace(EMPTY, verdict="inconclusive", tensors=[], message="it is random")
    assert headline(unclear) == "inconclusive: it is random"


def report_of(*children: ModuleNode) -> Report:
    first = ModuleNode("norm", "norm", "Norm", "Norm", "different", first=True)
    root = ModuleNode("", "", "Net", "Net", "different", children=(*children, first))
    return dataclasses.replace(
        EMPTY, verdict="different", tree=root, first_divergence=Divergence("norm", "norm", "forward")
    )


def test_submodules_that_were_not_judged_are_named_with_the_reason():
    equal = [ModuleNode(f"fc{i}", f"fc{i}", "Linear", "Linear", "equal") for i in range(3)]
    convolution = ModuleNode("conv1d", "conv", "Conv1d", "Conv", message="its outputs have other shapes")
    (line,) = [str(line) for line in branch(report_of(*equal, convolution), 80) if "other" in str(line)]
    assert line == "  other submodules: 3 equal; conv1d not judged (its outputs have other shapes)"
    many = [dataclasses.replace(convolution, path=f"conv{i}", message="no") for i in range(5)]
    (line,) = [str(line) for line in branch(report_of(*many), 80) if "other" in str(line)]
    assert line == "  other submodules: conv0, conv1, conv2 and 2 more not judged (no)"
    wordy = dataclasses.replace(convolution, message="a long reason " * 9)
    (line,) = [str(line) for line in branch(report_of(wordy), 80) if "other" in str(line)]
    assert line == "  other submodules: conv1d not judged"
