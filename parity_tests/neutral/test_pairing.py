"""Which parameter is which, on pure data: names of several libraries, fused and split layouts, and what is refused."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import Rule, WeightsMismatchError
from attn_bridge.parity.compare.pairing import MOST_CANDIDATES, from_rules, propose
from attn_bridge.parity.compare.subject import Parameter

D, HIDDEN = 4, 6


def parameters(shapes):
    """Return the parameters of a table of name -> (shape, class of the owner)."""
    return {
        name: Parameter(tuple(shape), "float32", owner, name.rpartition(".")[0])
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
        path, other = (one.name.rpartition(".")[0] for one in (match.torch, match.flax))
        assert known[path] == others[other], f"{match.torch.name} = {match.flax.name}"
        assert match.torch.name.endswith("bias") == match.flax.name.endswith("bias")
        is_matrix = match.flax.name.endswith("kernel")
        assert match.rule.pattern == ("a1 a0 -> a0 a1" if is_matrix else "... -> ...")
        assert match.how == "names"


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
        (ours, theirs, theirs, pairing.to_flax, pairing.to_torch),
        (theirs, ours, ours, pairing.to_torch, pairing.to_flax),
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
    flax = pairing.to_flax(arrays)
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
    flax = propose(ours, theirs).to_flax(arrays)
    kernel = arrays["conv1.weight"].view(np.uint32)
    assert np.array_equal(flax["Conv_0.kernel"].view(np.uint32), kernel.transpose(2, 3, 1, 0))
    assert np.array_equal(flax["bn.var"].view(np.uint32), arrays["bn.running_var"].view(np.uint32))


def test_gradients_are_aligned_under_torch_names_with_torch_axes():
    pairing = propose(parameters(FUSED), parameters(SPLIT))
    arrays = draw(parameters(FUSED), seed=3)
    ours, theirs = pairing.aligned(arrays, "torch"), pairing.aligned(pairing.to_flax(arrays), "flax")
    assert list(ours) == list(theirs)
    assert ours["in_proj_weight[key]"].shape == (8, 8)
    for name, array in ours.items():
        assert np.array_equal(array.view(np.uint32), np.ascontiguousarray(theirs[name]).view(np.uint32)), name
    assert pairing.aligned({"out_proj.bias": arrays["out_proj.bias"]}, "torch").keys() == {"out_proj.bias"}


def test_bits_of_bfloat16_survive():
    shapes = parameters({"a.weight": ((4, 4), "Linear")}), parameters({"a.kernel": ((4, 4), "Linear")})
    array = np.arange(65520, 65536, dtype=np.uint16).reshape(4, 4).view(ml_dtypes.bfloat16)
    pairing = propose(*shapes)
    flax = pairing.to_flax({"a.weight": array})["a.kernel"]
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
        return 0.0 if {match.torch.name: match.flax.name for match in candidate.matches} == wanted else 0.5

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


@pytest.mark.parametrize("wanted", ["... -> ...", "a1 a0 -> a0 a1"])
def test_which_way_round_a_bare_square_matrix_lies_is_settled_by_trying(wanted):
    (row,) = propose(*BARE, lambda one: 0.0 if one.matches[0].rule.pattern == wanted else 1.0).rows()
    assert (row.pattern, row.how) == (wanted, "probe")


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (None, "is ambiguous, give rules; candidates: "),
        (lambda one: 1.0, "is ambiguous and none makes the outputs agree, give rules; candidates: "),
        (lambda one: 0.0, "is ambiguous and 2 make the outputs agree, give rules; candidates: "),
        (lambda one: float("nan"), "none makes the outputs agree"),
    ],
)
def test_what_stays_open_is_refused_with_the_candidates(probe, why):
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        propose(*SQUARES, probe)
    assert "alpha.weight = x.kernel (a1 a0 -> a0 a1), beta.weight = y.kernel" in str(caught.value)
    assert "alpha.weight = y.kernel (a1 a0 -> a0 a1), beta.weight = x.kernel" in str(caught.value)
    with pytest.raises(ValueError, match=re.escape("W = W (... -> ...); W = W (a1 a0 -> a0 a1)")):
        propose(*BARE, probe)


def test_too_many_candidates_are_not_tried():
    ours = parameters({f"{name}.weight": ((4, 4), "Linear") for name in "abdegi"})
    theirs = parameters({f"{name}.kernel": ((4, 4), "Linear") for name in "mrstux"})
    tried = []
    with pytest.raises(ValueError, match=f"and {MOST_CANDIDATES - 3} more"):
        propose(ours, theirs, tried.append)
    assert tried == []


def test_numbered_blocks_are_decided_once_for_all():
    ours = parameters({f"blocks.{i}.{name}": ((4, 4), "Own") for i in range(5) for name in ("left", "right")})
    theirs = parameters({f"layers.{i}.{name}": ((4, 4), "Own") for i in range(5) for name in ("x", "y")})
    tried = []

    def probe(candidate):
        tried.append(candidate)
        names = {match.torch.name: (match.flax.name, match.rule.pattern) for match in candidate.matches}
        return (
            0.0
            if all(names[f"blocks.{i}.left"] == (f"layers.{i}.y", "... -> ...") for i in range(5))
            and all(names[f"blocks.{i}.right"] == (f"layers.{i}.x", "a1 a0 -> a0 a1") for i in range(5))
            else 1.0
        )

    assert len(propose(ours, theirs, probe).matches) == 10
    assert len(tried) == 8


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


def test_rules_say_which_is_which():
    ours, theirs = BARE
    pairing = from_rules([Rule("W", "W", "a b -> b a")], ours, theirs)
    array = draw(ours)["W"]
    assert np.array_equal(pairing.to_flax({"W": array})["W"].view(np.uint32), array.T.view(np.uint32))
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
