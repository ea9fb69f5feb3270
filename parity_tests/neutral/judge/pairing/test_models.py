"""Which parameter is which where libraries keep a model in other parts: on pure data, in the names of the libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attn_parity.pairing import propose

from .parameters import draw, parameters

D, HIDDEN = 4, 6


def names_of(pairing):
    """Return the first side's names of parts and parameters -> the second side's."""
    return {row.torch: row.flax for row in pairing.rows()}


# ---- settled by trying


def gates():
    ours = parameters({f"{name}.weight": ((D, D), "Linear") for name in ("alpha", "beta")})
    theirs = parameters({f"{name}.kernel": ((D, D), "Linear") for name in ("x", "y")})
    return ours, theirs


CROSSED = {"alpha.weight": "y.kernel", "beta.weight": "x.kernel"}
STRAIGHT = {"alpha.weight": "x.kernel", "beta.weight": "y.kernel"}


@pytest.mark.parametrize(("near", "far"), [(1e-8, 0.3), (3e-5, 0.3), (1e-8, math.nan)])
def test_float32_tables_do_not_hide_the_right_pairing(near, far):
    """Right ones differ by what tables in float32 do, others by all there is."""
    pairing = propose(*gates(), lambda one: near if names_of(one) == CROSSED else far)
    assert names_of(pairing) == CROSSED
    assert pairing.doubt == ""


@pytest.mark.parametrize(("one", "other"), [(0.2, 0.3), (2e-3, 0.3), (math.nan, math.nan)])
def test_candidates_far_from_agreement_settle_nothing(one, other):
    pairing = propose(*gates(), lambda found: one if names_of(found) == CROSSED else other)
    assert names_of(pairing) == STRAIGHT
    assert "no pairing makes the outputs agree" in pairing.doubt


def test_two_equally_near_candidates_are_ambiguous():
    with pytest.raises(ValueError, match="is ambiguous and 2 make the outputs agree"):
        propose(*gates(), lambda one: 1e-8)


def test_orientations_are_not_tried_after_one_agrees():
    ours, theirs = parameters({"W": ((D, D), "Own")}), parameters({"M": ((D, D), "Own")})
    tried = []

    def probe(candidate):
        tried.append(candidate)
        return 0.0

    assert len(propose(ours, theirs, probe).matches) == 1
    assert len(tried) == 1


# ---- fused in one library, several layers in another


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("wi_0", "wi_1", "wo")])
def test_fused_gates_of_experts_are_two_of_three_siblings(names):
    """Mixtral in transformers against experts in a stack, whose ``w2`` is as large as a part."""
    ours = parameters(
        {"mlp.experts.gate_up_proj": ((3, 2 * HIDDEN, D), "Experts"), "mlp.experts.down_proj": ((3, D, HIDDEN), "E")}
    )
    shapes = dict(zip(names, ((3, D, HIDDEN), (3, D, HIDDEN), (3, HIDDEN, D)), strict=True))
    theirs = parameters({f"moe.experts.{name}.kernel": (shapes[name], "Linear") for name in sorted(names)})
    pairing = propose(ours, theirs)
    gate, up, down = names
    assert names_of(pairing) == {
        f"mlp.experts.gate_up_proj[{gate}]": f"moe.experts.{gate}.kernel",
        f"mlp.experts.gate_up_proj[{up}]": f"moe.experts.{up}.kernel",
        "mlp.experts.down_proj": f"moe.experts.{down}.kernel",
    }
    found = pairing.to_second(draw(ours))
    assert np.array_equal(
        found[f"moe.experts.{up}.kernel"], draw(ours)["mlp.experts.gate_up_proj"][:, HIDDEN:].swapaxes(1, 2)
    )


def test_parts_without_known_names_are_numbered():
    """A report, and gradients by name, tell parts by them."""
    ours = parameters({"f.weight": ((2 * HIDDEN, D), "Linear")})
    theirs = parameters({f"f.part{i}.kernel": ((D, HIDDEN), "Linear") for i in (1, 2)})
    pairing = propose(ours, theirs, lambda one: 0.0 if one.matches[0].second.name == "f.part1.kernel" else 1.0)
    assert list(names_of(pairing)) == ["f.weight[part1]", "f.weight[part2]"]


def test_parts_share_an_orientation():
    """The output projection is as large as queries with keys and values are together; its heads are its inputs."""
    ours = parameters(
        {"attention.query_key_value.weight": ((24, 16), "Linear"), "attention.dense.weight": ((16, 16), "Linear")}
    )
    theirs = parameters(
        {
            "kv.kernel": ((16, 2, 4), "DenseGeneral"),
            "o.kernel": ((4, 4, 16), "DenseGeneral"),
            "q.kernel": ((16, 4, 4), "DenseGeneral"),
        }
    )
    pairing = propose(ours, theirs)
    assert names_of(pairing) == {
        "attention.query_key_value.weight[query]": "q.kernel",
        "attention.query_key_value.weight[kv]": "kv.kernel",
        "attention.dense.weight": "o.kernel",
    }


@pytest.mark.parametrize(("heads", "shares"), [(4, (1, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 1))])
def test_runs_find_head_counts_that_shapes_do_not_show(heads, shares):
    """GPT-NeoX, BLOOM and Falcon keep query, key and value head by head; a port splits them."""
    wide = 24
    size = wide // heads // shares[0]
    sizes = dict(zip(("query", "key", "value"), (heads * share * size for share in shares), strict=True))
    total = sum(sizes.values())
    ours = parameters(
        {"query_key_value.weight": ((total, wide), "Linear"), "query_key_value.bias": ((total,), "Linear")}
    )
    theirs = parameters(
        {f"{name}.kernel": ((wide, one), "Linear") for name, one in sizes.items()}
        | {f"{name}.bias": ((one,), "Linear") for name, one in sizes.items()}
    )
    arrays = {name: np.arange(math.prod(one.shape), dtype=np.float32).reshape(one.shape) for name, one in ours.items()}
    ends = np.cumsum((0, *shares))
    right = {}
    for kind, name in (("kernel", "weight"), ("bias", "bias")):
        groups = arrays[f"query_key_value.{name}"].reshape(heads, sum(shares), size, -1)
        for i, part in enumerate(sizes):
            whole = groups[:, ends[i] : ends[i + 1]].reshape(sizes[part], -1)
            right[f"{part}.{kind}"] = whole.T if kind == "kernel" else whole[:, 0]

    def is_right(candidate):
        found = candidate.to_second(arrays)
        return all(np.array_equal(found[name], one) for name, one in right.items())

    assert is_right(propose(ours, theirs, lambda one: 0.0 if is_right(one) else 1.0))
    tried = []
    doubted = propose(ours, theirs, lambda one: tried.append(one) or 1.0)
    assert len(tried) <= 16, "weight and bias are cut alike"
    assert "no pairing makes the outputs agree" in doubted.doubt, "a fault is no reason to refuse"


def test_a_fused_gate_is_paired_with_its_expert():
    """DeepSeek: a shared expert beside numbered ones, which the other side keeps in one tensor."""
    ours = parameters(
        {
            "mlp.experts.gate_up_proj": ((2, 2 * HIDDEN, D), "Experts"),
            "mlp.shared_experts.gate_proj.weight": ((HIDDEN, D), "Linear"),
            "mlp.shared_experts.up_proj.weight": ((HIDDEN, D), "Linear"),
        }
    )
    theirs = parameters(
        {
            f"ffn.{path}.{name}.weight": ((HIDDEN, D), "Linear")
            for path in ("experts.0", "experts.1", "shared_experts")
            for name in ("w1", "w3")
        }
    )

    def is_right(names):
        return all(names[f"mlp.experts.gate_up_proj[{i}][w1]"] == f"ffn.experts.{i}.w1.weight" for i in (0, 1))

    seen = []
    propose(ours, theirs, lambda one: seen.append(names_of(one)) or 1.0)
    assert seen
    assert all(map(is_right, seen))


# ---- names


def test_the_number_of_a_layer_tells_it_from_its_sibling():
    """T5's two gates, below paths with other numbers: names settle them, whatever fits."""
    block = "encoder.block.{}.layer"
    shapes = {}
    for i in (0, 1):
        shapes[f"{block.format(i)}.0.SelfAttention.q.weight"] = (HIDDEN, HIDDEN), "Linear"
        shapes |= {f"{block.format(i)}.1.DenseReluDense.wi_{j}.weight": ((HIDDEN, D), "Linear") for j in (0, 1)}
    theirs = parameters(
        {f"layers.wi_{j}.kernel": ((2, D, HIDDEN), "Dense") for j in (0, 1)}
        | {"layers.query.kernel": ((2, HIDDEN, 2, 3), "DenseGeneral")}
    )
    seen = []
    propose(parameters(shapes), theirs, lambda one: seen.append(names_of(one)) or 1.0)
    for found in seen or [names_of(propose(parameters(shapes), theirs))]:
        assert found["encoder.block.1.layer.1.DenseReluDense.wi_0.weight"] == "layers.wi_0.kernel[1]"


@pytest.mark.parametrize(
    "names",
    [
        ("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm"),
        ("pre_attn_norm", "post_attn_norm", "pre_mlp_norm", "post_mlp_norm"),
    ],
)
def test_norms_before_and_behind_are_settled_by_their_names(names):
    """Gemma 2 and 3 in transformers against DeepMind's names, kept in the order of the alphabet."""
    theirs = parameters({f"blocks.{i}.{name}.scale": ((D,), "RMSNorm") for i in (0, 1) for name in sorted(names)})
    own = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    ours = parameters({f"layers.{i}.{name}.weight": ((D,), "Gemma2RMSNorm") for i in (0, 1) for name in own})
    pairing = propose(ours, theirs)
    assert names_of(pairing) == {
        f"layers.{i}.{mine}.weight": f"blocks.{i}.{its}.scale"
        for i in (0, 1)
        for mine, its in zip(own, names, strict=True)
    }


def test_layers_are_stacked_although_one_has_more_tensors():
    """T5's first layer has the table of positions, which a port keeps beside its scanned layers."""
    ours = parameters(
        {f"block.{i}.attn.{name}.weight": ((HIDDEN, D), "Linear") for i in range(3) for name in "qv"}
        | {f"block.{i}.norm.weight": ((D,), "RMSNorm") for i in range(3)}
        | {"block.0.attn.bias_table.weight": ((8, 2), "Embedding")}
    )
    theirs = parameters(
        {f"layers.{name}.kernel": ((3, D, HIDDEN), "Dense") for name in ("query", "value")}
        | {"layers.norm.scale": ((3, D), "RMSNorm"), "bias_table": ((8, 2), "")}
    )
    pairing = propose(ours, theirs)
    arrays = draw(ours)
    found = pairing.to_second(arrays)
    assert np.array_equal(found["layers.value.kernel"][2], arrays["block.2.attn.v.weight"].T)
    assert np.array_equal(found["bias_table"], arrays["block.0.attn.bias_table.weight"])


# ---- counted in other ways


def residual_stages(counts, widths):
    """Return a ResNet of torchvision and one of Flax's example, whose blocks are counted through all stages."""
    ours, theirs, expected, block = {}, {}, {}, 0

    def layer(name, other, shape, kind, size=3):
        axes = shape if kind == "BatchNorm" else (size, size, *shape[::-1])
        torch_axes = shape if kind == "BatchNorm" else (*shape, size, size)
        ours[f"{name}.weight"] = torch_axes, f"{kind}2d"
        theirs[f"{other}.{'scale' if kind == 'BatchNorm' else 'kernel'}"] = axes, kind
        expected[f"{name}.weight"] = f"{other}.{'scale' if kind == 'BatchNorm' else 'kernel'}"

    before = widths[0]
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True), 1):
        for number in range(count):
            mine, its = f"layer{stage}.{number}", f"ResNetBlock_{block}"
            for k in (1, 2):
                layer(f"{mine}.conv{k}", f"{its}.Conv_{k - 1}", (width, before if k == 1 else width), "Conv")
                layer(f"{mine}.bn{k}", f"{its}.BatchNorm_{k - 1}", (width,), "BatchNorm")
            if before != width:
                layer(f"{mine}.downsample.0", f"{its}.conv_proj", (width, before), "Conv", size=1)
                layer(f"{mine}.downsample.1", f"{its}.norm_proj", (width,), "BatchNorm")
            before, block = width, block + 1
    return parameters(ours), parameters(dict(sorted(theirs.items()))), expected


@pytest.mark.parametrize(
    ("counts", "widths"), [((2, 1), (4, 8)), ((2, 2, 2), (4, 8, 16)), ((2, 2, 2, 2), (4, 8, 16, 32))]
)
def test_blocks_numbered_per_stage_match_consecutive_numbers(counts, widths):
    ours, theirs, expected = residual_stages(counts, widths)
    pairing = propose(ours, theirs, lambda found: 0.0 if names_of(found) == expected else 1.0)
    assert names_of(pairing) == expected
    assert pairing.doubt == ""
