"""Which parameter is which, on pure data: names of several libraries, fused and split layouts, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import Rule, Rules, WeightsMismatchError
from attn_bridge.parity.compare.pairing import MAX_CANDIDATES, from_rules, names, partial, parts, propose, read_rules
from attn_bridge.parity.compare.pairing.patterns import Kind, Options, Way, options
from attn_bridge.parity.compare.pairing.settling import MAX_SHOWN
from attn_bridge.parity.compare.pairing.tensors import whole
from attn_bridge.parity.compare.sides.subject import Parameter
from parity_tests.support.work import count_calls

D, HIDDEN = 4, 6


@dataclasses.dataclass(frozen=True)
class Stated(Parameter):
    """A parameter that says its framework."""

    framework: str = ""


def parameters(shapes, framework=""):
    """Return the parameters of a table of name -> (shape, class of the owner)."""
    return {
        name: Stated(tuple(shape), "float32", owner, name.rpartition(".")[0], framework=framework)
        for name, (shape, owner) in shapes.items()
    }


def linear(path, rows, columns, side):
    if side == "torch":
        return {f"{path}.weight": ((columns, rows), "Linear"), f"{path}.bias": ((columns,), "Linear")}
    return {f"{path}.kernel": ((rows, columns), "Linear"), f"{path}.bias": ((columns,), "Linear")}


def norm(path, side):
    scale = "weight" if side == "torch" else "scale"
    return {f"{path}.{scale}": ((D,), "LayerNorm"), f"{path}.bias": ((D,), "LayerNorm")}


PARTS = ("norm1", "query", "key", "value", "out", "norm2", "up", "down")
STYLES = {
    "torch": ("layers.{}", ("norm1", "attn.q", "attn.k", "attn.v", "attn.out", "norm2", "linear1", "linear2")),
    "gpt": ("h.{}", ("ln_1", "attn.wq", "attn.wk", "attn.wv", "attn.wo", "ln_2", "mlp.fc1", "mlp.fc2")),
    "nnx": ("layers.{}", ("ln1", "attn.query", "attn.key", "attn.value", "attn.out", "ln2", "lin1", "lin2")),
    "linen": (
        "encoderblock_{}",
        (
            "LayerNorm_0",
            *(f"SelfAttention_0.{name}" for name in ("query", "key", "value", "out")),
            "LayerNorm_1",
            "MLP_0.Dense_0",
            "MLP_0.Dense_1",
        ),
    ),
    "underscores": (
        "layers_{}",
        (
            "norm_1",
            *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
            "norm_2",
            "ffn.dense_1",
            "ffn.dense_2",
        ),
    ),
}


def model(style, side, blocks=2):
    """Return a model's parameters in a style, and path -> what it is."""
    prefix, names = STYLES[style]
    shapes, known = {}, {}
    for i in range(blocks):
        for part, name in zip(PARTS, names, strict=True):
            path = f"{prefix.format(i)}.{name}"
            known[path] = (i, part)
            if part.startswith("norm"):
                shapes |= norm(path, side)
            else:
                sizes = {"up": (D, HIDDEN), "down": (HIDDEN, D)}.get(part, (D, D))
                shapes |= linear(path, *sizes, side)
    shapes |= {("wte.weight" if side == "torch" else "embed.embedding"): ((9, D), "Embedding")}
    return parameters(shapes), known | {"wte": "embedding", "embed": "embedding"}


@pytest.mark.parametrize(("torch", "flax"), [*itertools.permutations(STYLES, 2)])
def test_the_names_of_libraries_are_matched(torch, flax):
    ours, known = model(torch, "torch")
    theirs, others = model(flax, "flax")
    pairing = propose(ours, theirs)
    assert len(pairing.matches) == len(ours) == len(theirs)
    for match in pairing.matches:
        path, other = (one.name.rpartition(".")[0] for one in (match.first, match.second))
        assert known[path] == others[other], f"{match.first.name} = {match.second.name}"
        assert match.first.name.endswith("bias") == match.second.name.endswith("bias")
        is_matrix = match.second.name.endswith("kernel")
        assert match.rule.pattern == ("a1 a0 -> a0 a1" if is_matrix else "... -> ...")
        assert match.how == "names"


SANDWICH = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Gemma's norms, as `transformers` and as DeepMind's packages call them."""


def test_norms_before_and_behind_both_halves_of_a_layer_are_told_apart_without_a_run():
    ours = {f"layers.0.{name}.weight": ((D,), "Gemma3RMSNorm") for name in SANDWICH}
    theirs = {f"layer_0.{name}.scale": ((D,), "RMSNorm") for name in sorted(SANDWICH.values())}
    found = propose(parameters(ours, "torch"), parameters(theirs, "flax"))
    assert {match.first.name.split(".")[2]: match.second.name.split(".")[1] for match in found.matches} == SANDWICH


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_parameters_does_not_matter(seed):
    ours, _ = model("gpt", "torch")
    theirs, _ = model("linen", "flax")
    random = np.random.default_rng(seed)
    shuffled = [{name: some[name] for name in random.permutation(list(some))} for some in (ours, theirs)]
    pairs = {(row.torch, row.flax, row.pattern) for row in propose(ours, theirs).rows()}
    assert {(row.torch, row.flax, row.pattern) for row in propose(*shuffled).rows()} == pairs


def draw(shapes, seed=0):
    """Return arrays full of every kind of bits, NaNs and minus zero included."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2**32, size=one.shape, dtype=np.uint32).view(np.float32)
        for name, one in shapes.items()
    }


GENERAL = "LinearGeneral"
SPLIT = {
    **{f"{part}.kernel": ((8, 2, 4), GENERAL) for part in ("query", "key", "value")},
    **{f"{part}.bias": ((2, 4), GENERAL) for part in ("query", "key", "value")},
    "out.kernel": ((2, 4, 8), GENERAL),
    "out.bias": ((8,), GENERAL),
}
FUSED = {
    "in_proj_weight": ((24, 8), "MultiheadAttention"),
    "in_proj_bias": ((24,), "MultiheadAttention"),
    "out_proj.weight": ((8, 8), "NonDynamicallyQuantizableLinear"),
    "out_proj.bias": ((8,), "NonDynamicallyQuantizableLinear"),
}
LAYOUTS = {
    "fused in torch, split in Flax": (FUSED, SPLIT),
    "fused linear in torch": (
        {"attn.qkv.weight": ((12, 4), "Linear"), "attn.qkv.bias": ((12,), "Linear")},
        {
            **{f"attn.{part}_proj.kernel": ((4, 4), "Linear") for part in "qkv"},
            **{f"attn.{part}_proj.bias": ((4,), "Linear") for part in "qkv"},
        },
    ),
    "fused in Flax": (
        {f"{part}.weight": ((4, 4), "Linear") for part in ("wq", "wk", "wv")},
        {"qkv.kernel": ((4, 12), "Linear")},
    ),
    "fused in both": ({"c_attn.weight": ((12, 4), "Linear")}, {"c_attn.kernel": ((4, 12), "Linear")}),
    "other widths of key and value": (
        {
            "q_proj_weight": ((8, 8), "MultiheadAttention"),
            "k_proj_weight": ((8, 6), "MultiheadAttention"),
            "v_proj_weight": ((8, 5), "MultiheadAttention"),
        },
        {
            "query.kernel": ((8, 2, 4), GENERAL),
            "key.kernel": ((6, 2, 4), GENERAL),
            "value.kernel": ((5, 2, 4), GENERAL),
        },
    ),
    "grouped heads": (
        {
            "q_proj.weight": ((16, 8), "Linear"),
            "k_proj.weight": ((8, 8), "Linear"),
            "v_proj.weight": ((8, 8), "Linear"),
            "o_proj.weight": ((8, 16), "Linear"),
        },
        {
            "query.kernel": ((8, 4, 4), GENERAL),
            "key.kernel": ((8, 2, 4), GENERAL),
            "value.kernel": ((8, 2, 4), GENERAL),
            "out.kernel": ((4, 4, 8), GENERAL),
        },
    ),
    "convolutions and batch norm": (
        {
            "conv1.weight": ((4, 3, 5, 2), "Conv2d"),
            "conv2.weight": ((4, 4, 3, 3), "Conv2d"),
            "conv3.weight": ((4, 4, 3), "Conv1d"),
            **{f"bn.{name}": ((4,), "BatchNorm2d") for name in ("weight", "bias", "running_mean", "running_var")},
        },
        {
            "Conv_0.kernel": ((5, 2, 3, 4), "Conv"),
            "Conv_1.kernel": ((3, 3, 4, 4), "Conv"),
            "Conv_2.kernel": ((3, 4, 4), "Conv"),
            **{f"bn.{name}": ((4,), "BatchNorm") for name in ("scale", "bias", "mean", "var")},
        },
    ),
    "bare, of any rank": (
        {"W": ((4, 3), "Own"), "turned": ((5, 4), "Own"), "temperature": ((), "Own"), "token": ((1, 1, 8), "Own")},
        {"W": ((4, 3), "Own"), "turned": ((4, 5), "Own"), "temperature": ((), "Own"), "token": ((1, 1, 8), "Own")},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_a_bijection_of_bits(layout):
    ours, theirs = map(parameters, LAYOUTS[layout])
    pairing = propose(ours, theirs)
    for here, there, shapes, convert, back in (
        (ours, theirs, theirs, pairing.to_second, pairing.to_first),
        (theirs, ours, ours, pairing.to_first, pairing.to_second),
    ):
        arrays = draw(here)
        converted = convert(arrays)
        assert {name: one.shape for name, one in converted.items()} == {name: one.shape for name, one in shapes.items()}
        total = np.concatenate([one.view(np.uint32).ravel() for one in converted.values()])
        assert sorted(total) == sorted(np.concatenate([one.view(np.uint32).ravel() for one in arrays.values()]))
        returned = back(converted)
        assert returned.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(returned[name].view(np.uint32), array.view(np.uint32)), name
        assert there.keys() == converted.keys()


def test_the_parts_of_a_fused_weight_are_query_key_value_and_heads_stay_together():
    pairing = propose(parameters(FUSED), parameters(SPLIT))
    assert [row.flax for row in pairing.rows()][:3] == ["query.kernel", "key.kernel", "value.kernel"]
    arrays = draw(parameters(FUSED))
    flax = pairing.to_second(arrays)
    weight = arrays["in_proj_weight"].view(np.uint32)
    for part, name in enumerate(("query", "key", "value")):
        for head in range(2):
            rows = weight[8 * part + 4 * head : 8 * part + 4 * head + 4]
            assert np.array_equal(flax[f"{name}.kernel"][:, head].view(np.uint32), rows.T)
            bias = arrays["in_proj_bias"].view(np.uint32)[8 * part + 4 * head :][:4]
            assert np.array_equal(flax[f"{name}.bias"][head].view(np.uint32), bias)
    out = arrays["out_proj.weight"].view(np.uint32)
    assert np.array_equal(flax["out.kernel"][1].view(np.uint32), out[:, 4:].T)


def test_convolution_kernels_put_space_first_and_outputs_last():
    ours, theirs = map(parameters, LAYOUTS["convolutions and batch norm"])
    arrays = draw(ours)
    flax = propose(ours, theirs).to_second(arrays)
    kernel = arrays["conv1.weight"].view(np.uint32)
    assert np.array_equal(flax["Conv_0.kernel"].view(np.uint32), kernel.transpose(2, 3, 1, 0))
    assert np.array_equal(flax["bn.var"].view(np.uint32), arrays["bn.running_var"].view(np.uint32))


def test_gradients_are_aligned_under_the_first_sides_names_with_its_axes():
    pairing = propose(parameters(FUSED), parameters(SPLIT))
    arrays = draw(parameters(FUSED), seed=3)
    ours, theirs = pairing.aligned(arrays, "first"), pairing.aligned(pairing.to_second(arrays), "second")
    assert list(ours) == list(theirs)
    assert ours["in_proj_weight[key]"].shape == (8, 8)
    for name, array in ours.items():
        assert np.array_equal(array.view(np.uint32), np.ascontiguousarray(theirs[name]).view(np.uint32)), name
    assert pairing.aligned({"out_proj.bias": arrays["out_proj.bias"]}, "first").keys() == {"out_proj.bias"}


def test_bits_of_bfloat16_survive():
    shapes = parameters({"a.weight": ((4, 4), "Linear")}), parameters({"a.kernel": ((4, 4), "Linear")})
    array = np.arange(65520, 65536, dtype=np.uint16).reshape(4, 4).view(ml_dtypes.bfloat16)
    pairing = propose(*shapes)
    flax = pairing.to_second({"a.weight": array})["a.kernel"]
    assert flax.dtype == array.dtype
    assert np.array_equal(flax.view(np.uint16), array.T.view(np.uint16))


# ---- what is left open


SQUARES = (
    parameters({f"{name}.weight": ((4, 4), "Linear") for name in ("alpha", "beta")}),
    parameters({f"{name}.kernel": ((4, 4), "Linear") for name in ("x", "y")}),
)
BARE = parameters({"W": ((4, 4), "Own")}), parameters({"W": ((4, 4), "Own")})


def test_what_names_leave_open_is_settled_by_trying():
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
def test_which_way_round_a_bare_square_matrix_lies_is_settled_by_trying(wanted):
    (row,) = propose(*UNLIKE, lambda one: 0.0 if one.matches[0].rule.pattern == wanted else 1.0).rows()
    assert (row.pattern, row.how) == (wanted, "probe")


def test_a_bare_square_matrix_of_one_name_lies_as_it_lies_whatever_fits():
    (row,) = propose(*BARE, lambda one: 0.0 if one.matches[0].rule.pattern != "... -> ..." else 1.0).rows()
    assert (row.pattern, row.how) == ("... -> ...", "names")


def test_square_matrices_lie_as_the_others_of_their_kind_do():
    ours = parameters({"a.w": ((4, 6), ""), "b.w": ((4, 4), "")})
    theirs = parameters({"a.w": ((6, 4), ""), "b.w": ((4, 4), "")})
    assert [row.pattern for row in propose(ours, theirs).rows()] == ["a1 a0 -> a0 a1"] * 2


def test_what_fits_twice_is_refused_with_the_candidates():
    with pytest.raises(ValueError, match="is ambiguous and 2 make the outputs agree, give rules") as caught:
        propose(*SQUARES, lambda one: 0.0)
    assert "alpha.weight = x.kernel (a1 a0 -> a0 a1), beta.weight = y.kernel" in str(caught.value)
    assert "alpha.weight = y.kernel (a1 a0 -> a0 a1), beta.weight = x.kernel" in str(caught.value)


def test_without_a_run_what_is_open_is_refused():
    with pytest.raises(ValueError, match=r"is ambiguous, give rules; candidates: alpha\.weight = x\.kernel"):
        propose(*SQUARES)


@pytest.mark.parametrize("distance", [1.0, float("nan")])
def test_where_nothing_fits_the_order_of_declaration_goes_on_and_says_so(distance):
    pairing = propose(*SQUARES, lambda one: distance)
    assert [(row.torch, row.flax, row.how) for row in pairing.rows()] == [
        ("alpha.weight", "x.kernel", "order"),
        ("beta.weight", "y.kernel", "order"),
    ]
    assert "no pairing makes the outputs agree" in pairing.doubt
    assert "beta.weight = x.kernel" in pairing.doubt
    (row,) = propose(*UNLIKE, lambda one: distance).rows()
    assert (row.pattern, row.how) == ("... -> ...", "convention")


def test_where_nothing_fits_a_norm_goes_with_the_block_whose_matrices_are_settled():
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
def test_one_that_nearly_fits_is_taken_where_the_others_are_far_from_it(nearest, others, is_found):
    """As outputs do whose sides keep rotary tables in float32, and those of a pair with a small fault."""

    def probe(candidate):
        is_crossed = candidate.matches[0].second.name == "y.kernel"
        return nearest if is_crossed else others

    pairing = propose(*SQUARES, probe)
    assert [row.flax for row in pairing.rows()] == (["y.kernel", "x.kernel"] if is_found else ["x.kernel", "y.kernel"])
    assert bool(pairing.doubt) != is_found


def test_more_than_can_be_tried_is_refused_after_the_usual_ones():
    ours = parameters({f"{name}.weight": ((4, 4), "Linear") for name in "abdegi"})
    theirs = parameters({f"{name}.kernel": ((4, 4), "Linear") for name in "mrstux"})
    tried = []

    def probe(pairing):
        tried.append(pairing)
        return 1.0

    with pytest.raises(ValueError, match=r"is ambiguous, give rules; candidates: a\.weight = m\.kernel"):
        propose(ours, theirs, probe)
    assert len(tried) == MAX_SHOWN < MAX_CANDIDATES


def test_a_bias_goes_where_its_matrix_went():
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


def test_a_layer_goes_with_its_bias():
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


def test_numbered_blocks_are_decided_once_for_all():
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


def test_a_name_of_another_kind_is_not_taken_for_its_shape():
    ours = parameters({"norm.weight": ((4,), "LayerNorm"), "norm.bias": ((4,), "LayerNorm")})
    theirs = parameters({"norm.bias": ((4,), "LayerNorm"), "norm.scale": ((4,), "LayerNorm")})
    assert [(row.torch, row.flax) for row in propose(ours, theirs).rows()] == [
        ("norm.weight", "norm.scale"),
        ("norm.bias", "norm.bias"),
    ]


# ---- what is refused


def test_everything_without_a_counterpart_is_listed():
    ours = parameters({"a.weight": ((4, 4), "Linear"), "b.weight": ((5, 4), "Linear"), "c.bias": ((3,), "Linear")})
    theirs = parameters({"a.kernel": ((4, 4), "Linear"), "d.kernel": ((4, 6), "Linear"), "e": ((2,), "Own")})
    with pytest.raises(WeightsMismatchError) as caught:
        propose(ours, theirs)
    assert caught.value.missing == [
        "d.kernel (4, 6) (Flax, no torch parameter left for it)",
        "e (2,) (Flax, no torch parameter left for it)",
    ]
    assert caught.value.unexpected == [
        "b.weight (5, 4) (torch, no Flax parameter left for it)",
        "c.bias (3,) (torch, no Flax parameter left for it)",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "left"),
    [
        (
            {"a.weight": ((4, 4), "Linear"), "b.weight": ((4, 4), "Linear")},
            {"a.kernel": ((4, 4), "Linear")},
            "b.weight",
        ),
        ({"a.weight": ((4, 4), "Linear")}, {"a.kernel": ((4, 4), "Linear"), "z": ((1,), "Own")}, "z"),
        ({"a.weight": ((4, 3), "Linear")}, {"a.kernel": ((4, 3), "Dropout")}, None),
        ({}, {"z": ((1,), "Own")}, "z"),
    ],
)
def test_counts_that_differ_are_never_cut_to_fit(ours, theirs, left):
    if left is None:  # a matrix that lies the other way round than kernels do is still one
        (row,) = propose(parameters(ours), parameters(theirs)).rows()
        assert row.pattern == "... -> ..."
        return
    with pytest.raises(WeightsMismatchError, match=re.escape(f"{left} (")):
        propose(parameters(ours), parameters(theirs))


def test_nothing_is_paired_with_nothing():
    assert propose({}, {}).matches == ()


# ---- rules


@pytest.fixture
def sides():
    ours = parameters(
        {
            **{f"layers.{i}.{name}.weight": ((4, 4), "Linear") for i in range(3) for name in ("q", "k", "up")},
            "odd.weight": ((4, 6), "Linear"),
            "embed.weight": ((9, 4), "Embedding"),
            "mask": ((5, 5), "Own"),
        },
        "torch",
    )
    theirs = parameters(
        {
            "blocks.both.kernel": ((3, 4, 2, 4), "Own"),
            **{f"mlp_{i}.kernel": ((4, 4), "Dense") for i in range(3)},
            "strange.kernel": ((3, 2, 4), "Own"),
            "embed.embedding": ((9, 4), "Embed"),
        },
        "flax",
    )
    return ours, theirs


TABLES = [
    {
        "torch": ["layers.{i}.q.weight", "layers.{i}.k.weight"],
        "flax": "blocks.both.kernel",
        "pattern": "o d -> l d part o",
        "part": "part",
        "stack": "l",
    },
    {"torch": "odd.weight", "flax": "strange.kernel", "pattern": "o (a b) -> a b o", "a": 3},
    {"torch": "layers.{i}.up.weight", "flax": "mlp_{i}.kernel", "pattern": "o i -> i o"},
    {"torch": "mask", "drop": "computed"},
]


@pytest.mark.parametrize("given", ["tables", "rules", "file", "set"])
def test_rules_for_some_leave_the_rest_to_names(sides, tmp_path, given):
    rules = TABLES
    if given == "rules":
        rules = [Rule(**table) for table in TABLES]
    elif given == "set":
        rules = Rules(Rule(**table) for table in TABLES)
    elif given == "file":
        rules = tmp_path / "rules.toml"
        rules.write_text(
            "\n".join(
                "[[rule]]\n" + "\n".join(f"{key} = {value!r}" for key, value in table.items()) for table in TABLES
            )
        )
    ours, theirs = sides
    found = propose(ours, theirs, None, partial(rules, ours, theirs))
    assert {row.torch: row.how for row in found.rows()} == {
        **{name: "rules" for name in ours if name not in ("embed.weight", "mask")},
        "embed.weight": "names",
    }
    assert found.dropped == (("first", "mask", "computed"),)
    arrays = draw(ours)
    flax = found.to_second(arrays)
    assert {name: one.shape for name, one in flax.items()} == {name: one.shape for name, one in theirs.items()}
    for i, part in itertools.product(range(3), range(2)):
        name = f"layers.{i}.{'qk'[part]}.weight"
        bits = arrays[name].view(np.uint32)
        assert np.array_equal(flax["blocks.both.kernel"].view(np.uint32)[i, :, part], bits.T)
        aligned = found.aligned(flax, "second")[name]
        assert np.array_equal(np.ascontiguousarray(aligned).view(np.uint32), bits)
    back = found.to_first(flax)
    assert back.keys() == arrays.keys() - {"mask"}
    assert all(np.array_equal(back[name].view(np.uint32), arrays[name].view(np.uint32)) for name in back)


def test_torch_and_flax_in_rules_are_frameworks_first_and_second_are_sides(sides):
    ours, theirs = sides
    turned = propose(theirs, ours, None, partial(TABLES, theirs, ours))
    straight = propose(ours, theirs, None, partial(TABLES, ours, theirs))
    arrays = {name: one for name, one in draw(ours).items() if name != "mask"}
    one, two = straight.to_second(arrays), turned.to_first(arrays)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name].view(np.uint32), two[name].view(np.uint32)) for name in one)
    rule = {"first": "W", "second": "V", "pattern": "a b -> b a"}
    for frameworks in itertools.product(("torch", "flax"), repeat=2):
        shapes = {"W": ((2, 3), "")}, {"V": ((3, 2), "")}
        sides = [parameters(one, framework) for one, framework in zip(shapes, frameworks, strict=True)]
        assert partial([rule], *sides).matches[0].rule.pattern == "a b -> b a"
    other = {"torch": "W", "flax": "V", "pattern": "a b -> b a"}
    sides = parameters({"W": ((2, 3), "")}, "flax"), parameters({"V": ((3, 2), "")}, "flax")
    assert partial([other], *sides).matches[0].first.name == "W"


def test_parts_may_be_on_either_side():
    fused = parameters({"c_attn.weight": ((4, 12), "Conv1D")}, "torch")
    apart = parameters({f"{name}.kernel": ((4, 4), "Dense") for name in ("a", "b", "c")}, "flax")
    rule = Rule("c_attn.weight", ["b.kernel", "a.kernel", "c.kernel"], "i o -> i o", along="o")
    arrays = draw(fused)
    found = from_rules([rule], fused, apart).to_second(arrays)
    bits = arrays["c_attn.weight"].view(np.uint32)
    for i, name in enumerate("bac"):
        assert np.array_equal(found[f"{name}.kernel"].view(np.uint32), bits[:, 4 * i : 4 * i + 4])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"torch": "q"}, "rule 1: a rule needs the keys torch and flax, got torch"),
        ({"first": "q", "flax": "k"}, "rule 1: a rule needs the keys first and second, got first, flax"),
        (
            {"torch": ["a", "b"], "flax": "c"},
            "rule 1: Rule(['a', 'b'], 'c', '... -> ...'): c: several parts need either the axis that counts them or "
            "one they lie along",
        ),
        (
            {"torch": "a", "flax": "b", "drop": "no"},
            "rule 1: a rule that drops has one name, torch or flax, and the reason",
        ),
        ({"torch": "a", "flax": ["b", 3]}, "rule 1: flax must be a string or a list of strings, got a list with int"),
    ],
)
def test_a_table_that_is_no_rule_is_named_by_its_number(table, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_rules([table])


def test_rules_that_do_not_fit_name_their_line(tmp_path, sides):
    path = tmp_path / "rules.toml"
    path.write_text(
        '# mine\n[[rule]]\ntorch = ["layers.{i}.q.weight", "layers.{i}.k.weight"]\nflax = "blocks.both.kernel"\n'
        'pattern = "o d -> l d (part o)"\npart = "part"\nstack = "l"\n'
    )
    with pytest.raises(WeightsMismatchError) as caught:
        partial(path, *sides)
    assert f"{path}, line 2: blocks.both.kernel (3, 4, 2, 4) has 4 axes, expected 3" in str(caught.value)
    with pytest.raises(WeightsMismatchError, match=r"missing: rule 1: nowhere"):
        partial([{"torch": ["nowhere", "none"], "flax": "nowhere", "along": "o", "pattern": "o -> o"}], *sides)


# ---- any two sides


def test_labels_name_the_sides():
    with pytest.raises(WeightsMismatchError, match=re.escape("a (2,) (first, no second parameter left for it)")):
        propose(parameters({"a": ((2,), "")}, "torch"), {}, labels=("first", "second"))
    one, two = parameters({"fc.weight": ((4, 3), "Linear")}), parameters({"fc.kernel": ((4, 3), "Linear")})
    with pytest.raises(
        WeightsMismatchError, match=re.escape("fc.weight is (4, 3) in torch and fc.kernel is (4, 3) in Flax")
    ):
        propose(one, two)


@pytest.mark.parametrize("gate", [("gate_proj", "up_proj"), ("gate", "up")])
def test_a_fused_gate_is_taken_apart(gate):
    ours = parameters({f"layers.{i}.mlp.gate_up_proj.weight": ((12, 4), "Linear") for i in range(2)})
    theirs = parameters(
        {f"layers.{i}.mlp.{name}.kernel": ((4, 6), "Dense") for i in range(2) for name in reversed(gate)}
    )
    found = propose(ours, theirs)
    assert [match.second.name.split(".")[-2] for match in found.matches] == [*gate, *gate]
    assert {match.how for match in found.matches} == {"names"}


def test_parts_of_several_sizes_lie_one_after_the_other():
    ours = parameters({"attn.qkv_proj.weight": ((16 + 8 + 8, 6), "Linear")})
    theirs = parameters(
        {
            "attn.query.kernel": ((6, 4, 4), GENERAL),
            "attn.key.kernel": ((6, 2, 4), GENERAL),
            "attn.value.kernel": ((6, 2, 4), GENERAL),
        }
    )
    arrays = draw(ours)
    found = propose(ours, theirs).to_second(arrays)
    bits = arrays["attn.qkv_proj.weight"].view(np.uint32)
    assert np.array_equal(found["attn.value.kernel"].view(np.uint32), bits[24:].T.reshape(6, 2, 4))


def test_experts_that_are_numbered_are_a_stack():
    ours = parameters(
        {
            f"layers.{i}.experts.{j}.{name}.weight": ((6, 4), "Linear")
            for i in range(2)
            for j in range(5)
            for name in ("w1", "w3")
        }
    )
    theirs = parameters({f"layers_{i}.moe.{name}": ((5, 4, 6), "MoE") for i in range(2) for name in ("w1", "w3")})
    pairing = propose(ours, theirs)
    arrays = draw(ours)
    found = pairing.to_second(arrays)
    for i, j, name in itertools.product(range(2), range(5), ("w1", "w3")):
        bits = arrays[f"layers.{i}.experts.{j}.{name}.weight"].view(np.uint32)
        assert np.array_equal(found[f"layers_{i}.moe.{name}"].view(np.uint32)[j], bits.T)


def test_a_stack_of_fused_layers_is_taken_apart_twice():
    ours = parameters({f"layers.{i}.attn.{name}_proj.weight": ((4, 4), "Linear") for i in range(3) for name in "qkvo"})
    theirs = parameters(
        {"blocks.attn.qkv.kernel": ((3, 4, 12), "Dense"), "blocks.attn.out.kernel": ((3, 4, 4), "Dense")}
    )
    pairing = propose(ours, theirs)
    arrays = draw(ours)
    found = pairing.to_second(arrays)
    bits = arrays["layers.1.attn.v_proj.weight"].view(np.uint32)
    assert np.array_equal(found["blocks.attn.qkv.kernel"].view(np.uint32)[1, :, 8:], bits.T)
    assert all(
        np.array_equal(one.view(np.uint32), arrays[name].view(np.uint32))
        for name, one in pairing.to_first(found).items()
    )


def test_ten_times_as_many_tensors_are_paired_in_at_most_ten_times_the_work():
    def blocks(count, prefix, names, matrix, owner):
        return parameters(
            {
                f"{prefix}{i}.{name}.{last}": (shape, owner)
                for i in range(count)
                for name in names
                for last, shape in ((matrix, (8, 8)), ("bias", (8,)))
            }
        )

    def pair(count):
        ours = blocks(
            count, "model.layers.", ("attn.q", "attn.k", "attn.v", "attn.o", "fc1", "fc2"), "weight", "Linear"
        )
        theirs = blocks(count, "block_", ("query", "key", "value", "out", "Dense_0", "Dense_1"), "kernel", "Dense")
        assert {match.how for match in propose(ours, theirs).matches} == {"names"}

    pair(8)  # what is imported once
    assert count_calls(lambda: pair(80)) < 11 * count_calls(lambda: pair(8))


def test_rules_say_which_is_which():
    ours, theirs = BARE
    pairing = from_rules([Rule("W", "W", "a b -> b a")], ours, theirs)
    array = draw(ours)["W"]
    assert np.array_equal(pairing.to_second({"W": array})["W"].view(np.uint32), array.T.view(np.uint32))
    assert [row.how for row in pairing.rows()] == ["rules"]


def test_rules_that_do_not_fit_are_refused_with_all_that_is_wrong():
    ours = parameters({"a.weight": ((4, 4), "Linear"), "b.weight": ((5, 4), "Linear"), "c.weight": ((2, 2), "Linear")})
    theirs = parameters(
        {"a.kernel": ((4, 4), "Linear"), "b.kernel": ((4, 6), "Linear"), "e.kernel": ((2, 2), "Linear")}
    )
    rules = [Rule("a.weight", "a.kernel", "o i -> i o"), Rule("b.weight", "b.kernel", "o i -> i o"), Rule("x", "y")]
    with pytest.raises(WeightsMismatchError) as caught:
        from_rules(rules, ours, theirs)
    assert caught.value.missing == ["e.kernel", "x"]
    assert caught.value.unexpected == ["c.weight"]
    assert caught.value.misshapen == ["b.kernel: expected (4, 6), the rules give (4, 5)"]


# ---- how axes may lie


def test_tensors_of_one_class_lie_alike_and_others_may_lie_in_other_ways():
    mixer = Kind((4, 6), "torch", "Mixer", "mix")
    assert options(mixer, mixer, False) == Options((Way("... -> ..."),))
    assert len(options(mixer, dataclasses.replace(mixer, shape=(6, 4)), False).ways) > 0
    square = dataclasses.replace(mixer, shape=(4, 4))
    assert options(square, square, False).ways == (Way("... -> ..."),)
    for change in ({"framework": "flax"}, {"owner": "Other"}, {"last": "other"}):
        assert len(options(square, dataclasses.replace(square, **change), False).ways) > 1, change


def test_a_fused_name_speaks_for_the_parts_of_its_own_word():
    """Three layers of one size stand in two sets; what is called qkv holds those of attention."""

    fused = names.read([whole("block.qkv.weight", Parameter((12, 4), "float32", "Linear", "block.qkv"))])
    layers = ("q_proj", "k_proj", "v_proj", "up", "gate", "down")
    others = names.read(
        [whole(f"block.{one}.weight", Parameter((4, 4), "float32", "Linear", f"block.{one}")) for one in layers]
    )
    attention, rest = parts.Bundle((0, 1, 2), layers[:3], "qkv", False), parts.Bundle((3, 4, 5), layers[3:], "", False)
    ((own, other),) = parts._speaks(fused, [attention, rest], others)
    assert own - other > 2.0
