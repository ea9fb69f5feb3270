"""What a mesh means for the parameters of a module: placements from logical axes, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from attn_bridge.sharding import ShardingPlan, pieces_of, turns
from attn_bridge.specs import (
    GroupedQueryAttentionConfig,
    MultiHeadAttentionConfig,
    RMSNormConfig,
    SelfAttentionV2Config,
)
from attn_bridge.specs.base import Axis, Parameter
from attn_bridge.weights import Rule
from attn_parity.check.mesh.cases import MODELS, mesh_cases

MESH = {"data": 2, "model": 4, "rows": 2}


def placements(config, **roles):
    plan = ShardingPlan.of(MESH, **roles)
    return {row.rule.torch: plan.placement(row) for row in config.parameters}


def test_tensor_sharding_cuts_query_heads_and_output_rows():
    found = placements(MultiHeadAttentionConfig(12, 16, 8, 0.0, 4, True), tensor="model")
    assert found["W_query.weight"] == ("model", None)
    assert found["W_query.bias"] == ("model",)
    assert found["out_proj.weight"] == (None, "model")
    assert found["out_proj.bias"] == (None,)


@pytest.mark.parametrize(("kv_heads", "cut"), [(2, None), (4, "model"), (8, "model")])
def test_key_heads_are_sharded_only_where_they_divide(kv_heads, cut):
    config = GroupedQueryAttentionConfig(12, 8, kv_heads, 4, sinks=True)
    found = placements(config, tensor="model")
    assert found["W_key.weight"] == (cut, None)
    assert found["W_query.weight"] == ("model", None)
    assert found["sinks"] == ("model",)


def test_fsdp_cuts_the_largest_axis_that_is_left():
    found = placements(MultiHeadAttentionConfig(12, 16, 8, 0.0, 4, True), tensor="model", fsdp="data")
    assert found["W_query.weight"] == ("model", "data")
    assert found["out_proj.weight"] == ("data", "model")
    assert found["out_proj.bias"] == ("data",)


def test_context_cuts_no_parameter():
    found = placements(MultiHeadAttentionConfig(12, 16, 8, 0.0, 4, True), context="rows")
    assert all(cut is None for cuts in found.values() for cut in cuts)


def test_whole_models_on_a_mesh_get_their_inputs():
    found = {case.name: sorted(case.numbers.inputs) for case in mesh_cases(tuple(MODELS))}
    kinds = ("", " experts", " hybrid", " shared keys", " streams", " inner norms")
    decoders = {f"DecoderModel{kind}": ["tokens"] for kind in kinds}
    pairs = {f"EncoderDecoderModel{kind}": ["source", "tokens"] for kind in ("", " shared bias")}
    assert found == decoders | pairs | {"GPTModel": ["ids"], "BertEncoder": ["ids"]}


@pytest.mark.parametrize("name", ["EncoderDecoderModel", "GPTModel", "BertEncoder"])
def test_projections_of_some_models_on_a_mesh_have_biases(name):
    (case,) = mesh_cases((name,))
    projections = re.compile(r"(.*\.(W_query|W_key|W_value|out_proj))\.weight")
    found = [match[1] for match in map(projections.fullmatch, case.numbers.weights) if match]
    assert found
    assert {f"{path}.bias" for path in found} <= case.numbers.weights.keys()


def test_every_parameter_names_its_axes():
    for case in mesh_cases():
        for row in case.config.parameters:
            assert len(row.axes) == len(row.shape) == len(row.flax_axes)
            assert sorted(row.axes) == sorted(row.flax_axes)
            assert all(row.axes)


def test_axes_of_the_flax_leaf_follow_its_pattern():
    row = Parameter(Rule("a.weight", "a.kernel", "o i k -> k i o"), (2, 3, 4), ("embed", "channels", "taps"))
    assert row.flax_axes == ("taps", "channels", "embed")
    assert row.flax_shape == (4, 3, 2)


def test_an_axis_in_parts_stays_one_through_copies():
    axis = Axis("heads", 4)
    for other in (copy.deepcopy(axis), pickle.loads(pickle.dumps(axis))):
        assert (other, other.parts) == ("heads", 4)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, "one of tensor, context and fsdp must name an axis of the mesh, all are None"),
        ({"tensor": "tp"}, "tensor ('tp') must be an axis of the mesh, which has 'data', 'model', 'rows'"),
        ({"tensor": "model", "context": "model"}, "context ('model') must be another axis than tensor"),
        (
            {"context": "rows", "method": "star"},
            "method ('star') must be one of 'all_gather', 'ring', 'ulysses'",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(roles, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ShardingPlan.of(MESH, **roles)


@pytest.mark.parametrize("name", ["\u03b2", "a\nb", 'a"b'])
def test_a_name_that_xla_cannot_read_is_one_line(name):
    with pytest.raises(ValueError, match=r"^axis .* of the mesh must have a name of plain ASCII characters$"):
        ShardingPlan.of({**MESH, name: 2}, tensor="model")


def test_a_name_that_is_none_is_refused_by_its_type():
    with pytest.raises(TypeError) as error:
        ShardingPlan.of(MESH, tensor=1)
    assert str(error.value) == "tensor must be the name of an axis of the mesh, got int"


@pytest.mark.parametrize(
    ("config", "roles", "message"),
    [
        (
            MultiHeadAttentionConfig(12, 12, 8, 0.0, 6),
            {"tensor": "model"},
            "num_heads (6) of W_query.weight must be a multiple of the 4 devices of tensor ('model')",
        ),
        (
            MultiHeadAttentionConfig(12, 12, 8, 0.0, 4),
            {"tensor": "model", "context": "rows", "method": "ulysses"},
            "num_heads (4) of MultiHeadAttentionConfig must be a multiple of the 8 devices of tensor and context for "
            "method 'ulysses'",
        ),
        (
            SelfAttentionV2Config(4, 8),
            {"tensor": "model"},
            "tensor ('model') of 4 devices has nothing to cut in SelfAttentionV2Config: it has one head, or heads that "
            "are modules of their own",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_anything_is_moved(config, roles, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ShardingPlan.of(MESH, **roles).check(config)


def test_tokens_that_do_not_divide_are_refused():
    plan = ShardingPlan.of(MESH, context="rows")
    plan.check_tokens(6)
    message = (
        "number of tokens (7) must be a multiple of the 2 devices of context ('rows'); pad the sequence, and hide the "
        "padding with attention_mask"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan.check_tokens(7)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_balanced_pieces_share_the_work_equally(devices):
    pieces = [pieces_of(device, devices, balanced=True) for device in range(devices)]
    assert sorted(number for both in pieces for number in both) == list(range(2 * devices))
    assert len({sum(both) for both in pieces}) == 1


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_ring_devices_meet_every_others_keys_once(devices):
    for device in range(devices):
        assert sorted(turn.owner(device, devices) for turn in turns(devices)) == list(range(devices))
    assert turns(devices)[0].owner(1, devices) == 1


def test_norms_beside_attention_are_no_reason_to_refuse_a_mesh():
    configs = (RMSNormConfig(12), MultiHeadAttentionConfig(12, 16, 8, 0.0, 8))
    ShardingPlan.of(MESH, tensor="model", context="rows", method="ulysses").check(*configs)
    with pytest.raises(ValueError, match="nothing to cut in RMSNormConfig"):
        ShardingPlan.of(MESH, tensor="model").check(configs[0])
    ShardingPlan.of(MESH, context="rows", method="ulysses").check(configs[0])


def test_a_module_without_any_of_ours_is_refused():
    with pytest.raises(ValueError, match=r"^the module has none of ours inside, whose axes are known$"):
        ShardingPlan.of(MESH, context="rows").check()


def test_a_module_that_is_on_a_mesh_is_refused():
    ShardingPlan.of(MESH, context="rows").check_module(None)
    with pytest.raises(ValueError, match="on a mesh already"):
        ShardingPlan.of(MESH, context="rows").check_module(object())
