"""Configs and tables of model families, without any framework: what is read, what is refused, and both ways."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attn_bridge.checkpoints.containers.base import numpy_dtype
from attn_bridge.masks import causal, sliding_window
from attn_bridge.models import families
from attn_bridge.specs.position import Alibi, Rotary
from attn_bridge.specs.rope_scaling import LinearScaling, Llama3Scaling, YaRNScaling

SMALL = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True}
LLAMA = {"model_type": "llama", **SMALL, "attention_bias": False, "num_hidden_layers": 2}

GROUPED = ("bloom", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "olmo", "olmo2", "olmo3", "qwen2", "qwen3")
LAYERS = [*((name, 1) for name in GROUPED), ("qwen3_next", 3)]


def random_state(layer, library=None, prefix="", seed=0):
    generator = np.random.default_rng(seed)
    shapes = layer.names(library)
    return {prefix + name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def same(one, two):
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


# ---- tables, both ways


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_every_table_leads_to_ours_and_back_to_the_same_bytes(name, index):
    layer = families.find_layer({"model_type": name, **SMALL}, index)
    wanted = {parameter.rule.torch: parameter.shape for parameter in layer.config.parameters}
    for library in layer.tables:
        state = random_state(layer, library)
        ours = layer.to_ours(state)
        assert {key: array.shape for key, array in ours.items()} == wanted
        assert not any(np.shares_memory(ours[key], array) for key in ours for array in state.values())
        assert same(layer.to_theirs(ours, library=library, prefix=""), state)


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_every_parameter_is_some_tensor_of_its_own(name, index):
    layer = families.find_layer({"model_type": name, **SMALL}, index)
    for library in layer.tables:
        count = 0
        state = {}
        for key, shape in layer.names(library).items():
            state[key] = np.arange(count, count + np.prod(shape), dtype=np.float64).reshape(shape)
            count += np.prod(shape)
        numbers = np.concatenate([array.ravel() for array in layer.to_ours(state).values()])
        assert sorted(numbers) == list(range(count))


def test_blooms_projection_holds_query_key_and_value_of_each_head_in_turn():
    layer = families.find_layer({"model_type": "bloom", "hidden_size": 6, "n_head": 3}, 0)
    state = random_state(layer)
    fused = state["query_key_value.weight"].reshape(3, 3, 2, 6)
    bias = state["query_key_value.bias"].reshape(3, 3, 2)
    ours = layer.to_ours(state)
    for part, name in enumerate(("W_query", "W_key", "W_value")):
        assert np.array_equal(ours[f"{name}.weight"], fused[:, part].reshape(6, 6))
        assert np.array_equal(ours[f"{name}.bias"], bias[:, part].reshape(6))


def test_qwen3_nexts_projection_holds_the_query_and_the_gate_of_each_head_in_turn():
    layer = families.find_layer({"model_type": "qwen3_next", **SMALL, "attention_bias": False}, 3)
    state = random_state(layer)
    ours = layer.to_ours(state)
    both = state["q_proj.weight"].reshape(4, 2, 6, 24)
    assert np.array_equal(ours["W_query.weight"], both[:, 0].reshape(24, 24))
    assert np.array_equal(ours["W_gate.weight"], both[:, 1].reshape(24, 24))


def test_openais_projection_holds_all_queries_then_all_keys_then_all_values():
    layer = families.find_layer({"model_type": "gpt_oss", **SMALL}, 0)
    state = random_state(layer, "openai", "block.0.attn.")
    ours = layer.to_ours({**state, "block.0.attn.norm.scale": np.ones(24)})
    rows = np.concatenate([ours[f"W_{name}.weight"] for name in ("query", "key", "value")])
    assert rows.shape == (48, 24)
    assert np.array_equal(rows, state["block.0.attn.qkv.weight"])
    assert same(layer.to_theirs(ours, library="openai", prefix="block.0.attn."), state)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_metas_rows_are_interleaved_in_each_head(name):
    layer = families.find_layer({**LLAMA, "model_type": name}, 1)
    state = random_state(layer, "meta", "layers.1.attention.")
    ours = layer.to_ours(state)
    for theirs, key, heads in (("wq", "W_query", 4), ("wk", "W_key", 2)):
        halves = ours[f"{key}.weight"].reshape(heads, 2, 3, 24)
        turned = state[f"layers.1.attention.{theirs}.weight"].reshape(heads, 3, 2, 24)
        assert np.array_equal(halves, turned.swapaxes(1, 2))
    assert np.array_equal(ours["W_value.weight"], state["layers.1.attention.wv.weight"])


# ---- names


PREFIXES = ["", "self_attn.", "model.layers.1.self_attn.", "model.language_model.layers.1.self_attn.", "layers.1.x.y."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_may_stand_below_any_prefix(prefix):
    layer = families.find_layer(LLAMA, 1)
    assert same(layer.to_ours(random_state(layer, prefix=prefix)), layer.to_ours(random_state(layer)))


def test_names_of_theirs_have_the_prefix_of_transformers_unless_told_otherwise():
    layer = families.find_layer(LLAMA, 1)
    ours = layer.to_ours(random_state(layer))
    assert layer.to_theirs(ours).keys() == {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert layer.to_theirs(ours, prefix="a.").keys() == {f"a.{name}_proj.weight" for name in "qkvo"}


def test_frequencies_that_old_files_hold_are_left_out():
    layer = families.find_layer(LLAMA, 1)
    state = random_state(layer)
    assert same(layer.to_ours({**state, "rotary_emb.inv_freq": np.ones(3)}), layer.to_ours(state))


def test_all_that_does_not_fit_is_one_line():
    layer = families.find_layer(LLAMA, 1)
    state = random_state(layer, prefix="model.layers.1.self_attn.")
    del state["model.layers.1.self_attn.q_proj.weight"]
    state["model.layers.1.self_attn.k_proj.weight"] = np.ones((24, 12))
    state["model.layers.1.self_attn.v_proj.weight"] = np.ones(12)
    state["model.layers.1.self_attn.v_proj.bias"] = np.ones(12)
    state["model.layers.1.mlp.up_proj.weight"] = np.ones((2, 2))
    with pytest.raises(ValueError, match="weights do not match") as caught:
        layer.to_ours(state)
    assert str(caught.value) == (
        "weights do not match: missing: model.layers.1.self_attn.q_proj.weight; "
        "unexpected: model.layers.1.mlp.up_proj.weight, model.layers.1.self_attn.v_proj.bias; "
        "misshapen: model.layers.1.self_attn.k_proj.weight: expected (12, 24), got (24, 12), "
        "model.layers.1.self_attn.v_proj.weight: expected (12, 24), got (12,)"
    )


def test_names_of_two_libraries_do_not_mix():
    layer = families.find_layer(LLAMA, 1)
    state = random_state(layer)
    state["wq.weight"] = state.pop("q_proj.weight")
    with pytest.raises(ValueError, match=r"^weights do not match: missing: q_proj.weight; unexpected: wq.weight$"):
        layer.to_ours(state)


def test_nothing_at_all_misses_everything():
    with pytest.raises(ValueError, match=r"missing: k_proj.weight, o_proj.weight, q_proj.weight, v_proj.weight$"):
        families.find_layer(LLAMA, 1).to_ours({})


def test_the_way_back_checks_names_and_shapes():
    layer = families.find_layer(LLAMA, 1)
    ours = layer.to_ours(random_state(layer))
    ours["W_gate.weight"] = ours.pop("W_query.weight")
    ours["W_key.weight"] = np.ones((3, 3))
    with pytest.raises(ValueError, match="weights do not match") as caught:
        layer.to_theirs(ours)
    assert str(caught.value) == (
        "weights do not match: missing: W_query.weight; unexpected: W_gate.weight; "
        "misshapen: W_key.weight: expected (12, 24), got (3, 3)"
    )


# ---- configs


def read(config, index=0):
    return families.find_layer({**SMALL, "attention_bias": False, **config}, index).config


def test_what_a_config_leaves_out_is_what_transformers_takes():
    spec = families.find_layer({"model_type": "qwen3_next"}, 3).config
    assert (spec.d_in, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2048, 16, 2, 256)
    assert spec.position == Rotary(10000.0, 64)
    spec = families.find_layer({"model_type": "gpt_oss"}, 0).config
    assert spec.position == Rotary(150000.0, scaling=YaRNScaling(32.0, 4096, truncate=False))
    assert (spec.mask, spec.sinks, spec.qkv_bias, spec.out_bias) == (sliding_window(128), True, True, True)
    spec = families.find_layer({"model_type": "mistral"}, 5).config
    assert (spec.num_kv_heads, spec.mask) == (8, sliding_window(4096))


def test_null_heads_and_widths_follow_from_the_others():
    spec = read({"model_type": "llama", "num_key_value_heads": None, "head_dim": None})
    assert (spec.num_kv_heads, spec.head_dim) == (4, 6)


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = Rotary(5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
ROTARY = {
    "nothing": ({}, Rotary(10000.0)),
    "rope_theta": ({"rope_theta": 5e5}, Rotary(5e5)),
    "rope_parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rotary(5e5)),
    "null": ({"rope_scaling": None, "rope_theta": 5e5}, Rotary(5e5)),
    "llama3": ({"rope_scaling": {**ROPE, "original_max_position_embeddings": 8192}, "rope_theta": 5e5}, SCALED),
    "llama3, new": (
        {"rope_parameters": {**ROPE, "original_max_position_embeddings": 8192, "rope_theta": 5e5}},
        SCALED,
    ),
    "llama3, context of the model": ({"rope_parameters": ROPE, "rope_theta": 5e5}, SCALED),
    "type": ({"rope_scaling": {"type": "linear", "factor": 4}}, Rotary(10000.0, scaling=LinearScaling(4.0))),
    "old before new": (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 4}},
        Rotary(10000.0, scaling=LinearScaling(4.0)),
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        Rotary(10000.0, scaling=YaRNScaling(4.0, 16)),
    ),
    "yarn without factor": (
        {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}},
        Rotary(10000.0, scaling=YaRNScaling(8.0, 1024)),
    ),
    "partial where no model is": ({"partial_rotary_factor": 0.5, "head_dim": 8}, Rotary(10000.0)),
    "by kind": (
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "layer_types": ["full_attention"]},
        Rotary(7.0),
    ),
}


@pytest.mark.parametrize("label", ROTARY)
def test_rotary_positions_are_read_from_old_and_new_keys(label):
    keys, expected = ROTARY[label]
    assert read({"model_type": "qwen3", "max_position_embeddings": 8192, **keys}).position == expected


@pytest.mark.parametrize("keys", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_a_part_of_each_head_turns_where_models_do_so(keys):
    assert read({"model_type": "qwen3_next", "head_dim": 8, **keys}, 3).position == Rotary(10000.0, 4)


def test_the_width_of_a_head_follows_from_the_sizes():
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "head_dim": None}
    spec = read({"model_type": "phi3", **sizes, "partial_rotary_factor": 0.5})
    assert (spec.head_dim, spec.position) == (12, Rotary(10000.0, 6))


def test_scaled_positions_scale_the_scores_of_latent_attention():
    """DeepSeek's mscale_all_dim counts with every way of scaling, not with YaRN alone."""
    sizes = {"num_key_value_heads": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "head_dim": None}
    magnitude = 0.1 * 0.6 * math.log(2.5) + 1
    for model, kind in (("deepseek_v2", "linear"), ("deepseek_v3", "linear"), ("deepseek_v3", "yarn")):
        scaling = {"type": kind, "factor": 2.5, "mscale_all_dim": 0.6, "original_max_position_embeddings": 16}
        spec = read({"model_type": model, **sizes, "rope_scaling": scaling})
        assert spec.scale == pytest.approx(10**-0.5 * magnitude**2, rel=1e-15)
    assert read({"model_type": "deepseek_v3", **sizes, "rope_parameters": {"mscale_all_dim": 2.0}}).scale == 10**-0.5


GEMMA = {"model_type": "gemma3_text", "sliding_window": 3, "query_pre_attn_scalar": 16}
OLD = {"rope_theta": 9.0, "rope_local_base_freq": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NEW = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
    }
}


@pytest.mark.parametrize("keys", [OLD, NEW], ids=["old keys", "new keys"])
@pytest.mark.parametrize(
    "pattern", [{"sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"] * 13}]
)
def test_both_kinds_of_gemma_3s_layers(keys, pattern):
    local, whole = (read({**GEMMA, **keys, **pattern}, index) for index in (2, 3))
    assert (local.mask, local.position) == (sliding_window(3), Rotary(5.0))
    assert (whole.mask, whole.position) == (causal(), Rotary(9.0, scaling=LinearScaling(8.0)))
    assert whole.scale == local.scale == 0.25
    assert whole.qk_norm.unit_offset
    assert whole.qk_norm.scope == "head"


WINDOWS = {
    "mistral": ({"sliding_window": 3}, [3, 3, 3, 3]),
    "mistral, null": ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
    "qwen2": ({"sliding_window": 3, "max_window_layers": 0}, [None] * 4),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}, [None, None, 3, 3]),
    "qwen3, null": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        [None] * 4,
    ),
    "gemma2": ({"sliding_window": 3}, [3, None, 3, None]),
    "gemma3_text": ({"sliding_window": 3, "sliding_window_pattern": 3}, [3, 3, None, 3]),
    "gpt_oss": ({"sliding_window": 3}, [3, None, 3, None]),
    "olmo2": ({"sliding_window": 3}, [None] * 4),
    "olmo3": ({"sliding_window": 3}, [3, 3, 3, None]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_which_layers_have_a_window(name):
    keys, expected = WINDOWS[name]
    config = {"model_type": name, "num_hidden_layers": 4, **keys}
    masks = [causal() if window is None else sliding_window(window) for window in expected]
    assert [read(config, index).mask for index in range(4)] == masks


def test_blooms_sizes_have_other_names():
    for keys in ({"n_embed": 24, "n_head": 4, "n_layer": 3}, {"hidden_size": 24, "num_attention_heads": 4}):
        spec = families.find_layer({"model_type": "bloom", **keys}, 1).config
        assert (spec.d_in, spec.num_heads, spec.head_dim, spec.position) == (24, 4, 6, Alibi())
        assert spec.qkv_bias
        assert spec.out_bias


def test_olmo_clips_where_its_config_says_so():
    assert read({"model_type": "olmo", "clip_qkv": 8}).clip == 8.0
    assert read({"model_type": "olmo", "clip_qkv": None}).clip is None


@pytest.mark.parametrize("inner", [{"model_type": "gemma3_text"}, {}], ids=["named", "unnamed"])
def test_a_multimodal_models_text_config_is_the_one_that_counts(inner):
    config = {"model_type": "gemma3", "hidden_size": 7, "text_config": {**GEMMA, **OLD, **SMALL} | inner}
    if not inner:
        del config["text_config"]["model_type"]
    assert families.find_layer(config, 5).config == read({**GEMMA, **OLD, "attention_bias": True}, 5)


def test_the_config_is_left_as_it_is():
    config = {**GEMMA, **{key: dict(value) if isinstance(value, dict) else value for key, value in OLD.items()}}
    before = repr(config)
    families.find_layer(config, 5)
    assert repr(config) == before


NAMES = ", ".join(families.known_model_types())
DERIVED = "; attn-bridge derive FOLDER may derive that of another decoder from transformers"
REFUSED = {
    "no mapping": (["llama"], 0, TypeError, "config must be a config.json as a dict, got list"),
    "no model_type": ({}, 0, ValueError, f"config has no model_type, which must be one of {NAMES}"),
    "model_type": ({"model_type": "lama"}, 0, ValueError, f"model_type (lama) must be one of {NAMES}{DERIVED}"),
    "model_type of no string": (
        {"model_type": ["llama"]},
        0,
        ValueError,
        f"model_type (['llama']) must be one of {NAMES}{DERIVED}",
    ),
    "layer": (LLAMA, 2, ValueError, "layer (2) must be at least 0 and below num_hidden_layers (2)"),
    "layer below 0": (LLAMA, -1, ValueError, "layer (-1) must be at least 0 and below num_hidden_layers (2)"),
    "layer of no integer": (LLAMA, "1", TypeError, "layer must be an integer, got str"),
    "heads": (
        {**LLAMA, "num_key_value_heads": 3},
        0,
        ValueError,
        "num_heads (4) must be a multiple of num_kv_heads (3)",
    ),
    "no heads": (
        {**LLAMA, "num_attention_heads": 0},
        0,
        ValueError,
        "num_attention_heads (0) of llama must be at least 1",
    ),
    "width of no integer": (
        {**LLAMA, "hidden_size": "24"},
        0,
        TypeError,
        "hidden_size of llama must be an integer, got str",
    ),
    "bias of no bool": (
        {**LLAMA, "attention_bias": "no"},
        0,
        TypeError,
        "attention_bias of llama must be a bool, got str",
    ),
    "rope_type": (
        {**LLAMA, "rope_scaling": {"rope_type": "axial"}},
        0,
        ValueError,
        "rope_type (axial) of llama must be one of default, linear, dynamic, yarn, llama3, longrope",
    ),
    "no long_factor": (
        {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}},
        0,
        ValueError,
        "long_factor of llama must be a list of numbers, got None",
    ),
    "long_factor of another length": (
        {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0]}},
        0,
        ValueError,
        "number of long_factors (1) must be that of short_factors (2)",
    ),
    "rope_type of no string": (
        {**LLAMA, "rope_scaling": {"type": ["linear"]}},
        0,
        ValueError,
        "rope_type (['linear']) of llama must be one of default, linear, dynamic, yarn, llama3, longrope",
    ),
    "no scale": (
        {"model_type": "gemma2", "query_pre_attn_scalar": 0},
        0,
        ValueError,
        "query_pre_attn_scalar (0) of gemma2 must be positive",
    ),
    "rope without factor": (
        {**LLAMA, "rope_scaling": {"type": "linear"}},
        0,
        ValueError,
        "rope_parameters of llama must hold factor, got type",
    ),
    "rope of no number": (
        {**LLAMA, "rope_theta": "10000"},
        0,
        TypeError,
        "rope_theta of llama must be a number, got str",
    ),
    "window of null": (
        {"model_type": "gemma2", "sliding_window": None},
        0,
        ValueError,
        "layer 0 of gemma2 is sliding_attention, but sliding_window is null",
    ),
    "kind of layer": (
        {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 26},
        1,
        ValueError,
        "layer 1 of gemma2 is of type chunked_attention, which must be full_attention or sliding_attention",
    ),
    "too few kinds": (
        {"model_type": "gemma2", "layer_types": ["full_attention"]},
        1,
        ValueError,
        "layer_types of gemma2 has 1 entries, none for layer 1",
    ),
    "columns of the rotary table": (
        {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, "head_dim": 4},
        0,
        ValueError,
        "head_dim (4) of deepseek_v3 is not supported, only None or 8",
    ),
    "bidirectional": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        0,
        ValueError,
        "use_bidirectional_attention (True) of gemma3_text is not supported, only None or False",
    ),
}


@pytest.mark.parametrize("label", REFUSED)
def test_what_can_not_be_read_is_one_line(label):
    config, index, kind, message = REFUSED[label]
    with pytest.raises(kind) as caught:
        families.find_layer(config, index)
    assert str(caught.value) == message


def test_a_library_without_a_table_is_refused():
    layer = families.find_layer(LLAMA, 0)
    with pytest.raises(ValueError, match=r"^library \(mlx\) must be one of transformers, meta$"):
        layer.to_theirs(layer.to_ours(random_state(layer)), library="mlx")


def test_arrays_of_another_layer_are_refused():
    layer = families.find_layer(LLAMA, 1)
    message = r"^state holds layer 0 \(model.layers.0.self_attn\), not layer 1$"
    with pytest.raises(ValueError, match=message):
        layer.to_ours(random_state(layer, prefix="model.layers.0.self_attn."))


@pytest.mark.parametrize("front", ["", "wrapped."])
def test_a_layer_is_taken_from_a_whole_models_arrays(front):
    layer = families.find_layer(LLAMA, 1)
    own = random_state(layer, prefix="model.layers.1.self_attn.")
    others = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.10.mlp.weight")
    state = {**dict.fromkeys(others, np.ones((24, 24))), **own}
    found = layer.to_ours({front + name: array for name, array in state.items()})
    wanted = layer.to_ours(own)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(array, wanted[name]) for name, array in found.items())


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_arrays_of_a_dtype_without_attention_are_refused(dtype):
    layer = families.find_layer(LLAMA, 1)
    state = {name: array.astype(numpy_dtype(dtype)) for name, array in random_state(layer).items()}
    with pytest.raises(TypeError, match=rf"^q_proj.weight must be float64, .* or float16, got {dtype}$"):
        layer.to_ours(state)


@pytest.mark.parametrize("state", [None, [np.ones((24, 24))]])
def test_a_state_that_is_no_dict_is_refused(state):
    with pytest.raises(TypeError, match=rf"^state must be a dict of arrays, got {type(state).__name__}$"):
        families.find_layer(LLAMA, 1).to_ours(state)


def test_what_is_no_array_is_refused():
    layer = families.find_layer(LLAMA, 1)
    state = {**random_state(layer), "q_proj.weight": [[1.0]]}
    with pytest.raises(TypeError, match=r"^q_proj.weight must be an array of NumPy, torch or JAX, got list$"):
        layer.to_ours(state)
