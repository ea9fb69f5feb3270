"""Fused, split and stacked weights, and the order of axes: each layout is a bijection of bits."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

from attn_parity.pairing import propose
from attn_parity.pairing.patterns import TensorKind, Way, WayOptions, options

from .parameters import HIDDEN, D, draw, linear, norm, parameters

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


def test_fused_weights_split_into_query_key_value_by_head():
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


def test_gradients_are_aligned_to_the_first_sides_names_and_axes():
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


@pytest.mark.parametrize("gate", [("gate_proj", "up_proj"), ("gate", "up")])
def test_a_fused_gate_is_split(gate):
    ours = parameters({f"layers.{i}.mlp.gate_up_proj.weight": ((12, 4), "Linear") for i in range(2)})
    theirs = parameters(
        {f"layers.{i}.mlp.{name}.kernel": ((4, 6), "Dense") for i in range(2) for name in reversed(gate)}
    )
    found = propose(ours, theirs)
    assert [match.second.name.split(".")[-2] for match in found.matches] == [*gate, *gate]
    assert {match.how for match in found.matches} == {"name"}


def test_parts_of_several_sizes_are_concatenated():
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


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_a_kernel_of_two_pixels_is_cut_along_its_outputs(framework):
    """The axis of two pixels counts no parts."""
    shape, name = ((6, 4, 2), "weight") if framework == "torch" else ((2, 4, 6), "kernel")
    ours = parameters({"both.weight": ((12, 4, 2), "Conv1d"), "both.bias": ((12,), "Conv1d")}, "torch")
    owner = "Conv1d" if framework == "torch" else "Conv"
    parts = {f"{part}.{name}": (shape, owner) for part in ("filter", "gate")}
    theirs = parameters({**parts, "filter.bias": ((6,), owner), "gate.bias": ((6,), owner)}, framework)
    arrays = draw(ours)
    usual = propose(ours, theirs).to_second(arrays)
    bits = arrays["both.weight"][6:].view(np.uint32)
    assert np.array_equal(usual[f"gate.{name}"].view(np.uint32), bits if framework == "torch" else bits.T)


def test_numbered_experts_are_stacked():
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


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("plain", "its_plain", "shape", "its_stack"),
    [
        ("bias", "bias", (2, 12), "gate"),  # by its name
        ("shift", "alpha", (2, 12, 1), "beta"),  # by its shape
        ("shift", "beta", (2, 12, 1), "alpha"),
    ],
)
def test_a_tensor_with_a_counterpart_as_it_is_is_no_stack(plain, its_plain, shape, its_stack, is_before):
    """Two numbered gates of 12, and another tensor of 2 x 12; a norm's has the same name."""
    ours = {f"gating.{i}.weight": ((1, 12), "Linear") for i in range(2)} | {plain: (shape, "")}
    theirs = [(its_plain, (shape, "")), (its_stack, ((2, 12), ""))]
    ours |= {f"norm.{plain}": ((5,), "")}
    theirs += [(f"norm.{its_plain}", ((5,), ""))]
    pairing = propose(parameters(ours), parameters(dict(theirs if is_before else theirs[::-1])), lambda one: 1.0)
    found = {row.torch: row.flax for row in pairing.rows()}
    stacked = {f"gating.{i}.weight": f"{its_stack}[{i}]" for i in range(2)}
    assert found == {plain: its_plain, f"norm.{plain}": f"norm.{its_plain}", **stacked}


def test_slices_of_stacked_experts_go_to_the_expert_of_their_number():
    """Before, order of execution gave all of an expert's layers the first slices of one stack."""
    ours = parameters(
        {
            f"experts.{i}.{name}.weight": (shape, "Linear")
            for i in range(3)
            for name, shape in (("fc1", (6, 4)), ("fc2", (4, 6)))
        }
    )
    theirs = parameters({"up_proj": ((3, 4, 6), ""), "down_proj": ((3, 6, 4), "")})
    torch_uses = {name: time for time, name in enumerate(ours)}
    rows = propose(
        ours, theirs, lambda pairing: 1.0, orders=lambda: (torch_uses, {"up_proj": 0, "down_proj": 1})
    ).rows()
    expected = {
        (f"experts.{i}.{name}.weight", f"{stack}[{i}]")
        for i in range(3)
        for name, stack in (("fc1", "up_proj"), ("fc2", "down_proj"))
    }
    assert {(row.first, row.second) for row in rows} == expected


def test_stacked_fused_layers_are_split_by_layer_and_part():
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


def test_matrices_of_the_width_that_counts_the_norms_are_no_stacks():
    """Five norms and three layers of width 5: each kernel has the shape of five scales, and all are there whole."""
    ours, theirs, wanted = {}, {}, {}
    for kind, scale, width, paths in (("Dense", "kernel", (5, 5), (0, 4, 7)), ("Norm", "scale", (5,), (1, 3, 6, 8, 9))):
        for number, path in enumerate(paths):
            for name, other, shape in (("weight", scale, width), ("bias", "bias", (5,))):
                ours[f"net.{path}.{name}"] = shape, "LayerNorm" if kind == "Norm" else "Linear"
                theirs[f"{kind}_{number}.{other}"] = shape, "LayerNorm" if kind == "Norm" else "Dense"
                wanted[f"net.{path}.{name}"] = f"{kind}_{number}.{other}"

    def probe(candidate):
        return float({match.first.name: match.second.name for match in candidate.matches} != wanted)

    used = {name: int(name.split(".")[1]) for name in ours}
    orders = used, {wanted[name]: when for name, when in used.items()}
    found = propose(parameters(ours), parameters(theirs), probe, orders=lambda: orders)
    assert {row.torch: row.flax for row in found.rows()} == wanted


def test_only_tensors_of_one_class_must_share_an_orientation():
    mixer = TensorKind((4, 6), "torch", "Mixer", "mix")
    assert options(mixer, mixer, False) == WayOptions((Way("... -> ..."),))
    assert len(options(mixer, dataclasses.replace(mixer, shape=(6, 4)), False).ways) > 0
    square = dataclasses.replace(mixer, shape=(4, 4))
    assert options(square, square, False).ways == (Way("... -> ..."),)
    for change in ({"framework": "flax"}, {"owner": "Other"}, {"last": "other"}):
        assert len(options(square, dataclasses.replace(square, **change), False).ways) > 1, change


IDENTITY, TRANSPOSED = Way("... -> ..."), Way("a1 a0 -> a0 a1")
SQUARES = [
    (("torch", "weight"), ("flax", "kernel"), TRANSPOSED),
    (("flax", "kernel"), ("torch", "weight"), TRANSPOSED),
    (("torch", "weight"), ("flax", "mix"), TRANSPOSED),
    (("torch", "mix"), ("flax", "kernel"), TRANSPOSED),
    (("torch", "mix"), ("flax", "mix"), IDENTITY),
    (("torch", "weight"), ("torch", "mix"), IDENTITY),
    (("torch", "mix"), ("torch", "weight"), IDENTITY),
    (("torch", "weight"), ("torch", "kernel"), TRANSPOSED),
    (("torch", "weight"), ("flax", "weight"), IDENTITY),
]


@pytest.mark.parametrize(("first", "second", "usual"), SQUARES)
def test_square_matrices_lie_as_their_names_suggest(first, second, usual):
    kinds = [TensorKind((4, 4), framework, owner, last) for (framework, last), owner in ((first, "A"), (second, "B"))]
    assert options(*kinds, False).ways[0] == usual


def test_a_bias_goes_with_its_matrix_where_pairs_follow_execution():
    """`Dense_0` is created first and runs last, and its norm lies outside of its module: no words tell their biases."""
    ours, theirs, wanted = {}, {}, {}

    def pair(layer, mine, its, *sizes):
        other = layer(its, *sizes, "flax")
        ours.update(layer(mine, *sizes, "torch"))
        theirs.update(other)
        wanted.update(zip(layer(mine, *sizes, "torch"), other, strict=True))

    for number, path in ((0, "ff1"), (2, "ff2")):
        pair(linear, f"{path}.fn.fn.net.0", f"{path}.Dense_1", D, HIDDEN)
        pair(linear, f"{path}.fn.fn.net.3", f"{path}.Dense_0", HIDDEN, D)
        pair(norm, f"{path}.fn.norm", f"LayerNorm_{number}")
    pair(linear, "attn.fn.to_out", "attn.to_out", D, D)
    pair(norm, "attn.norm", "LayerNorm_1")
    pair(norm, "post_norm", "LayerNorm_3")
    run = [f"ff1.fn.{one}" for one in ("norm", "fn.net.0", "fn.net.3")]
    run += ["attn.norm", "attn.fn.to_out", *(one.replace("ff1", "ff2") for one in run)]
    uses = {name: [*run, "post_norm"].index(name.rpartition(".")[0]) for name in ours}
    orders = uses, {wanted[name]: when for name, when in uses.items()}
    found = propose(parameters(ours), parameters(theirs), lambda candidate: 1.0, orders=lambda: orders)
    assert {row.torch: row.flax for row in found.rows()} == wanted


@pytest.mark.parametrize("shapes", [((1,), (3,)), ((2, 4), (6, 4))])
def test_a_list_is_joined_in_its_order(shapes):
    """Were any order tried, a port that reads a `ParameterList` from its end would be equal."""
    ours = parameters({f"scalars.{i}": (shapes[0], "List") for i in range(3)})
    theirs = parameters({"scalars": (shapes[1], "Mix")})

    rows = propose(ours, theirs, lambda candidate: 1.0).rows()
    assert {(row.first, row.second, row.how) for row in rows} == {
        (f"scalars.{i}", f"scalars[{i}]", "name") for i in range(3)
    }
