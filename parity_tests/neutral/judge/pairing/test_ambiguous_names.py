"""Ambiguous names are settled by runs, or refused with the candidates."""

from __future__ import annotations

import re
import tomllib

import pytest

from attn_parity.pairing import MAX_CANDIDATES, pair_parameters, propose
from attn_parity.pairing.parts import splits
from attn_parity.pairing.settling import MAX_SHOWN
from attn_parity.pairing.tensors import whole

from .parameters import BARE, HIDDEN, D, linear, norm, parameters

SQUARES = (
    parameters({f"{name}.weight": ((4, 4), "Linear") for name in ("alpha", "beta")}),
    parameters({f"{name}.kernel": ((4, 4), "Linear") for name in ("x", "y")}),
)


def test_runs_settle_ambiguous_names():
    def probe(candidate):
        tried.append(candidate)
        return 0.0 if {match.first.name: match.second.name for match in candidate.matches} == wanted else 0.5

    for wanted in (
        {"alpha.weight": "x.kernel", "beta.weight": "y.kernel"},
        {"alpha.weight": "y.kernel", "beta.weight": "x.kernel"},
    ):
        tried = []
        rows = propose(*SQUARES, probe).rows()
        assert {row.torch: row.flax for row in rows} == wanted
        assert {row.how for row in rows} == {"probe"}
        assert {row.pattern for row in rows} == {"a1 a0 -> a0 a1"}
        assert len(tried) == 2, "every candidate is tried, so that two that fit are noticed"


UNLIKE = parameters({"W": ((4, 4), "Own")}), parameters({"M": ((4, 4), "Own")})


@pytest.mark.parametrize("wanted", ["... -> ...", "a1 a0 -> a0 a1"])
def test_runs_settle_the_orientation_of_a_bare_square_matrix(wanted):
    (row,) = propose(*UNLIKE, lambda one: 0.0 if one.matches[0].rule.pattern == wanted else 1.0).rows()
    assert (row.pattern, row.how) == (wanted, "probe")


def test_a_bare_square_matrix_of_equal_name_is_not_transposed():
    (row,) = propose(*BARE, lambda one: 0.0 if one.matches[0].rule.pattern != "... -> ..." else 1.0).rows()
    assert (row.pattern, row.how) == ("... -> ...", "name")


def test_square_matrices_are_oriented_like_others_of_their_kind():
    ours = parameters({"a.w": ((4, 6), ""), "b.w": ((4, 4), "")})
    theirs = parameters({"a.w": ((6, 4), ""), "b.w": ((4, 4), "")})
    assert [row.pattern for row in propose(ours, theirs).rows()] == ["a1 a0 -> a0 a1"] * 2


def test_a_doubt_lists_only_tensors_with_several_candidates():
    ours = parameters(linear("layers.0", D, D, "torch") | linear("layers.2", D, D, "torch")) | UNLIKE[0]
    theirs = parameters(linear("Dense_1", D, D, "flax") | linear("Dense_3", D, D, "flax")) | UNLIKE[1]
    orders = tuple({name: place for place, name in enumerate(side)} for side in (ours, theirs))
    found = propose(ours, theirs, lambda candidate: 1.0, orders=lambda: orders)
    assert "judged is the first: W = M (as it is); if another is right, " in found.doubt


def test_a_doubt_lists_the_layers_that_are_judged():
    found = propose(*SQUARES, lambda candidate: 1.0).doubt
    assert "judged is the first: alpha = x, beta = y; if another is right, " in found, "which is which comes first"


def test_two_fitting_candidates_are_refused_and_listed():
    with pytest.raises(ValueError, match="is ambiguous and 2 make the outputs agree, give rules") as caught:
        propose(*SQUARES, lambda one: 0.0)
    assert "candidates: alpha.weight = x.kernel, beta.weight = y.kernel; " in str(caught.value)
    assert "alpha.weight = y.kernel, beta.weight = x.kernel" in str(caught.value)
    (line,) = re.findall(r"rule = \[.*\]", str(caught.value))
    pairing = pair_parameters(*SQUARES, rules=tomllib.loads(line)["rule"])
    assert [(row.first, row.second, row.how) for row in pairing.rows()] == [
        ("alpha.weight", "x.kernel", "rule"),
        ("beta.weight", "y.kernel", "rule"),
    ]


def test_ambiguous_names_are_refused_without_a_run():
    with pytest.raises(ValueError, match=r"is ambiguous, give rules; candidates: alpha\.weight = x\.kernel"):
        propose(*SQUARES)


@pytest.mark.parametrize("distance", [1.0, float("nan")])
def test_declaration_order_pairs_parameters_where_nothing_fits(distance):
    pairing = propose(*SQUARES, lambda one: distance)
    assert [(row.torch, row.flax, row.how) for row in pairing.rows()] == [
        ("alpha.weight", "x.kernel", "order"),
        ("beta.weight", "y.kernel", "order"),
    ]
    assert "no pairing makes the outputs agree" in pairing.doubt
    assert "alpha = x, beta = y" in pairing.doubt
    (row,) = propose(*UNLIKE, lambda one: distance).rows()
    assert (row.pattern, row.how) == ("... -> ...", "name")


def test_norms_follow_their_blocks_matrices_where_nothing_fits():
    """Linen keeps names in alphabetical order, so that the last norm comes first."""
    matrices = ("query", "value", "out")
    ours = {"embed.weight": ((9, D), "Embedding")}
    for path in ("layers.0.before", "layers.0.after", "final"):
        ours |= norm(path, "torch")
    for name in matrices:
        ours |= linear(f"layers.0.{name}", D, D, "torch")
    theirs = {"embed.embedding": ((9, D), "Embed")} | norm("a_norm", "flax")
    for path in ("part_0.LayerNorm_0", "part_0.LayerNorm_1"):
        theirs |= norm(path, "flax")
    for name in matrices:
        theirs |= linear(f"part_0.{name}", D, D, "flax")
    pairing = propose(parameters(ours), parameters(theirs), lambda one: 1.0)
    found = {row.torch: row.flax for row in pairing.rows()}
    assert "no pairing makes the outputs agree" in pairing.doubt
    for word, other in (("weight", "scale"), ("bias", "bias")):
        assert found[f"layers.0.before.{word}"] == f"part_0.LayerNorm_0.{other}"
        assert found[f"layers.0.after.{word}"] == f"part_0.LayerNorm_1.{other}"
        assert found[f"final.{word}"] == f"a_norm.{other}"


@pytest.mark.parametrize(
    ("nearest", "others", "is_found"), [(1e-7, 0.3, True), (1e-5, 8e-4, False), (0.02, 5.0, False)]
)
def test_the_one_near_candidate_is_taken(nearest, others, is_found):
    """As outputs do whose sides keep rotary tables in float32, and those of a pair with a small fault."""

    def probe(candidate):
        is_crossed = candidate.matches[0].second.name == "y.kernel"
        return nearest if is_crossed else others

    pairing = propose(*SQUARES, probe)
    assert [row.flax for row in pairing.rows()] == (["y.kernel", "x.kernel"] if is_found else ["x.kernel", "y.kernel"])
    assert bool(pairing.doubt) != is_found


def test_too_many_candidates_are_refused_after_the_usual_ones():
    ours = parameters({f"{name}.weight": ((4, 4), "Linear") for name in "abdegi"})
    theirs = parameters({f"{name}.kernel": ((4, 4), "Linear") for name in "mrstux"})
    tried = []

    def probe(pairing):
        tried.append(pairing)
        return 1.0

    with pytest.raises(ValueError, match=r"is ambiguous, give rules; candidates: a\.weight = m\.kernel"):
        propose(ours, theirs, probe)
    assert len(tried) == MAX_SHOWN < MAX_CANDIDATES


def test_a_bias_is_paired_with_its_matrix():
    ours = parameters(
        {
            "a.zzz.weight": ((4, 6), "Linear"),
            "a.zzz.bias": ((4,), "Linear"),
            "a.yyy.weight": ((4, 4), "Linear"),
            "a.yyy.bias": ((4,), "Linear"),
        }
    )
    theirs = parameters(
        {
            "b.one.kernel": ((4, 4), "Linear"),
            "b.one.bias": ((4,), "Linear"),
            "b.two.kernel": ((6, 4), "Linear"),
            "b.two.bias": ((4,), "Linear"),
        }
    )
    found = {match.first.name: match.second.name for match in propose(ours, theirs).matches}
    assert found == {
        "a.zzz.weight": "b.two.kernel",
        "a.zzz.bias": "b.two.bias",
        "a.yyy.weight": "b.one.kernel",
        "a.yyy.bias": "b.one.bias",
    }


def test_a_layer_is_paired_with_its_bias():
    def layers(names, matrix):
        return parameters(
            {f"{n}.{last}": (shape, "Linear") for n in names for last, shape in ((matrix, (4, 4)), ("bias", (4,)))}
        )

    ours, theirs = layers("abde", "weight"), layers("rstu", "kernel")
    tried = []

    def probe(pairing):
        tried.append(pairing)
        names = {match.first.name: match.second.name for match in pairing.matches}
        assert all(names[f"{n}.bias"][0] == names[f"{n}.weight"][0] for n in "abde")
        return (
            0.0
            if names["a.weight"] == "u.kernel" and names["b.weight"] == "t.kernel" and names["d.bias"] == "s.bias"
            else 1.0
        )

    found = propose(ours, theirs, probe)
    assert [match.second.name for match in found.matches if match.first.name.endswith("bias")] == [
        "u.bias", "t.bias", "s.bias", "r.bias"
    ]  # fmt: skip
    assert len(tried) == 24


def test_numbered_blocks_are_settled_together():
    ours = parameters({f"blocks.{i}.{name}": ((4, 4), "Own") for i in range(5) for name in ("left", "right")})
    theirs = parameters({f"layers.{i}.{name}": ((4, 4), "Own") for i in range(5) for name in ("x", "y")})
    tried = []

    def probe(candidate):
        tried.append(candidate)
        names = {match.first.name: (match.second.name, match.rule.pattern) for match in candidate.matches}
        return (
            0.0
            if all(names[f"blocks.{i}.left"] == (f"layers.{i}.y", "... -> ...") for i in range(5))
            and all(names[f"blocks.{i}.right"] == (f"layers.{i}.x", "a1 a0 -> a0 a1") for i in range(5))
            else 1.0
        )

    assert len(propose(ours, theirs, probe).matches) == 10
    assert len(tried) <= 8


def test_a_bias_leaves_a_like_named_layer_of_another_shape():
    ours = linear("attn.q_proj", D, D, "torch") | linear("attn.k_proj", D, D, "torch")
    ours |= linear("mlp.fc1", D, HIDDEN, "torch") | linear("mlp.fc2", HIDDEN, D, "torch")
    theirs = linear("Dense_0", D, D, "flax") | linear("Dense_1", D, D, "flax")
    theirs |= linear("Dense_2", HIDDEN, D, "flax") | linear("Dense_3", D, HIDDEN, "flax")
    pairing = propose(parameters(ours), parameters(theirs, "flax"), lambda candidate: 0.5)
    rows = {row.first: row.second for row in pairing.rows()}
    assert rows["mlp.fc2.weight"] == "Dense_2.kernel"
    assert rows["mlp.fc2.bias"] == "Dense_2.bias", "fc2 and Dense_1 are the second of their kind, but no kin"


@pytest.mark.parametrize(("count", "orders"), [(3, [6]), (4, [24]), (5, [24, 1]), (6, [24, 2])])
def test_at_most_four_fused_tensors_are_tried_in_every_order(count, orders):
    fused = {f"{name}.qkv.weight": ((3 * D, D), "Linear") for name in "abdegi"[:count]}
    parts = {f"{name}.{part}.weight": ((D, D), "Linear") for name in "mrstux"[:count] for part in ("q", "k", "v")}
    sides = [[whole(*item, "torch") for item in parameters(some).items()] for some in (fused, parts)]
    found = splits(*sides, lambda part, other, axes: {(0, 1): None} if part.shape == other.shape else {})
    assert [len(each) for each in found] == orders


def test_a_scale_goes_where_the_only_bias_of_its_side_went():
    """`ln.scale` is `norm.gamma` by words; but `ln` has a bias, which `norm` lacks."""
    first = {"norm.gamma": ((D,), "RMSNorm"), **norm("maybe_post_ln", "torch")}
    second = {"gamma": ((D,), "Gate"), **norm("ln", "flax")}
    pairing = propose(parameters(first), parameters(second))
    pairs = {match.first.name: match.second.name for match in pairing.matches}
    assert pairs == {"norm.gamma": "gamma", "maybe_post_ln.weight": "ln.scale", "maybe_post_ln.bias": "ln.bias"}


def test_a_matrix_goes_where_the_bias_went_that_another_matrix_settled():
    """Haiku's `w` of the output lies like another layer's of torch, but its bias fits no other layer."""
    own = {"linear_a_p": (5, 4), "linear_a_g": (5, 4), "linear_b_p": (5, 4), "linear_b_g": (5, 4), "linear_g": (5, 5)}
    others = ("left_projection", "left_gate", "right_projection", "right_gate", "gating_linear")
    ours, theirs = linear("linear_z", 4, 5, "torch"), {}
    for (path, sizes), other in zip(own.items(), others, strict=True):
        ours |= linear(path, *sizes, "torch")
        theirs |= {f"{other}.w": (sizes, "Linear"), f"{other}.b": (sizes[1:], "Linear")}
    theirs |= {"output_projection.w": ((4, 5), "Linear"), "output_projection.b": ((5,), "Linear")}
    tried = []

    def probe(candidate):
        names = {match.first.name: match.second.name for match in candidate.matches}
        tried.append(names)
        pairs = zip(own, others, strict=True)
        return float(any(names[f"{path}.weight"] != f"{other}.w" for path, other in pairs))

    propose(parameters(ours, "torch"), parameters(theirs, "flax"), probe)
    assert len(tried) == 24
    assert {names["linear_z.weight"] for names in tried} == {"output_projection.w"}
