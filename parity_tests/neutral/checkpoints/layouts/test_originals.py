"""The configs of originals, and the book's layouts: what they say, what they refuse, and no bit lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import numpy_dtype
from attn_bridge.models import families
from attn_bridge.models.originals import to_transformers
from parity_tests.support.models.hf_configs import PUBLISHED

from ..checkpoint_files import bits, write

LLAMA_3 = {"n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "norm_eps": 1e-05, "rope_theta": 500000.0}
MISTRAL = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
}
PARAMS = {
    "Llama-2-7b": {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1},
    "Llama-3-8B": {"dim": 4096, "n_layers": 32, **LLAMA_3, "multiple_of": 1024, "ffn_dim_multiplier": 1.3},
    "Llama-3.1-8B": {
        "dim": 4096,
        "n_layers": 32,
        **LLAMA_3,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
        "use_scaled_rope": True,
    },
    "Llama-3.2-1B": {
        "dim": 2048,
        "n_layers": 16,
        **LLAMA_3,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.5,
        "use_scaled_rope": True,
    },
    "Llama-2-70b": {
        "dim": 8192,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.3,
        "n_heads": 64,
        "n_kv_heads": 8,
        "n_layers": 80,
        "norm_eps": 1e-05,
        "vocab_size": -1,
    },
    "Llama-3.2-3B": {
        "dim": 3072,
        "n_layers": 28,
        **LLAMA_3,
        "n_heads": 24,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.0,
        "use_scaled_rope": True,
    },
    "Mistral-7B-v0.1": {**MISTRAL, "sliding_window": 4096, "vocab_size": 32000},
    "Mistral-7B-v0.3": {**MISTRAL, "vocab_size": 32768, "rope_theta": 1000000.0},
    "Mistral-Nemo": {**MISTRAL, "dim": 5120, "n_layers": 40, "vocab_size": 131072, "rope_theta": 1000000.0},
    "Mixtral-8x7B": {**MISTRAL, "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}},
}
"""``params.json`` of published models: their keys and values."""

WIDTHS = {
    "Llama-2-7b": 11008,
    "Llama-2-70b": 28672,
    "Llama-3-8B": 14336,
    "Llama-3.1-8B": 14336,
    "Llama-3.2-1B": 8192,
    "Llama-3.2-3B": 8192,
}
"""Their ``intermediate_size`` for `transformers`."""

OPENAI = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
"""OpenAI's own ``config.json`` of gpt-oss-20b."""

BOOK = {
    "vocab_size": 128256,
    "context_length": 131072,
    "emb_dim": 2048,
    "n_heads": 32,
    "n_layers": 16,
    "hidden_dim": 8192,
    "n_kv_groups": 8,
    "rope_base": 500000.0,
    "dtype": "bfloat16",
}
FREQUENCIES = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_length": 8192,
}
BOOK_QWEN = {**BOOK, "head_dim": 128, "qk_norm": True}
GEMMA = {
    **BOOK_QWEN,
    "n_layers": 2,
    "rope_local_base": 10000.0,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 256,
}


@pytest.mark.parametrize("name", [name for name in PARAMS if name in PUBLISHED])
def test_the_attention_of_a_published_original_is_that_of_transformers(name):
    found, wanted = to_transformers(PARAMS[name]), PUBLISHED[name]
    assert found["model_type"] == wanted["model_type"]
    assert families.find_layer(found, 3).config == families.find_layer(wanted, 3).config


@pytest.mark.parametrize("name", PARAMS)
def test_a_published_original_is_a_decoder(name):
    params = PARAMS[name]
    decoder = families.find_decoder({**to_transformers(params), "vocab_size": 32000})
    assert (decoder.emb_dim, len(decoder.blocks)) == (params["dim"], params["n_layers"])
    assert decoder.norm.eps == params["norm_eps"]
    feed_forward = decoder.blocks[0].feed_forward
    width = feed_forward.expert.hidden_dim if "moe" in params else feed_forward.hidden_dim
    assert width == WIDTHS.get(name, params.get("hidden_dim"))


@pytest.mark.parametrize(("name", "factor"), [("Llama-3.1-8B", 8.0), ("Llama-3.2-1B", 32.0), ("Llama-3.2-3B", 32.0)])
def test_how_far_positions_are_stretched(name, factor):
    assert to_transformers(PARAMS[name])["rope_scaling"]["factor"] == factor
    assert to_transformers({**PARAMS[name], "rope_scaling_factor": 16})["rope_scaling"]["factor"] == 16.0
    assert "rope_scaling" not in to_transformers({**PARAMS[name], "use_scaled_rope": False})


def test_the_base_where_a_file_leaves_it_out():
    bases = {name: to_transformers(PARAMS[name])["rope_theta"] for name in PARAMS if "rope_theta" not in PARAMS[name]}
    old = dict.fromkeys(("Llama-2-7b", "Llama-2-70b", "Mistral-7B-v0.1"), 1e4)
    assert bases == {**old, "Mixtral-8x7B": 1e6}


def test_a_vocabulary_that_only_the_tokenizer_knows_is_refused_without_weights():
    with pytest.raises(ValueError, match=r"^vocab_size \(-1\) of llama must be at least 1$"):
        families.find_decoder(to_transformers(PARAMS["Llama-2-7b"]))


def test_gpt_oss_is_read():
    decoder = families.find_decoder(to_transformers(OPENAI))
    published = families.find_layer(PUBLISHED["gpt-oss-20b"], 5).config
    assert decoder.blocks[5].attention == published
    assert (len(decoder.blocks), decoder.blocks[0].feed_forward.num_experts) == (24, 32)
    unscaled = families.find_decoder(to_transformers({**OPENAI, "rope_scaling_factor": 1.0}))
    assert unscaled.blocks[0].attention.position.scaling is None


def test_the_books_dicts_are_read():
    llama = to_transformers({**BOOK, "rope_freq": FREQUENCIES})
    assert families.find_layer(llama, 0).config == families.find_layer(PUBLISHED["Llama-3.2-1B"], 0).config
    assert "rope_scaling" not in to_transformers({**BOOK, "rope_freq": None})
    assert families.find_decoder(llama).norm.eps == 1e-5
    qwen = families.find_decoder(to_transformers(BOOK_QWEN))
    assert (qwen.norm.eps, qwen.blocks[0].attention.head_dim, qwen.blocks[0].attention.qk_norm.eps) == (1e-6, 128, 1e-6)
    bare = families.find_decoder(to_transformers({**BOOK_QWEN, "qk_norm": False, "head_dim": None}))
    assert (bare.norm.eps, bare.blocks[0].attention.head_dim, bare.blocks[0].attention.qk_norm) == (1e-6, 64, None)
    gemma = to_transformers(GEMMA)
    first, second = (families.find_layer(gemma, layer).config for layer in (0, 1))
    assert (first.position.base, second.position.base, first.mask.size) == (10000.0, 500000.0, 512)
    assert first.scale == 256**-0.5
    plain = {key: value for key, value in GEMMA.items() if key != "query_pre_attn_scalar"}
    assert families.find_layer(to_transformers(plain), 0).config.scale == 128**-0.5


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", **PARAMS["Llama-3-8B"]},
        {"dim": 8},
        {"emb_dim": 8, "n_heads": 2, "n_layers": 2, "drop_rate": 0.1, "qkv_bias": False, "vocab_size": 9},
        {"hidden_size": 8, "num_attention_heads": 2},
    ],
)
def test_what_is_no_original_is_left_alone(config):
    assert to_transformers(config) is None


def test_the_largest_factor_of_the_width_is_read():
    config = to_transformers({**PARAMS["Llama-3-8B"], "dim": 64, "multiple_of": 8, "ffn_dim_multiplier": 1024})
    assert config["intermediate_size"] == 1024 * 170


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


REFUSED = {
    "missing": (without(PARAMS["Llama-2-7b"], "n_layers"), "params.json lacks n_layers"),
    "text": ({**PARAMS["Llama-2-7b"], "dim": "wide"}, "dim of params.json must be an integer, got str"),
    "bool": ({**PARAMS["Llama-2-7b"], "dim": True}, "dim of params.json must be an integer, got bool"),
    "zero": ({**PARAMS["Llama-2-7b"], "n_heads": 0}, "n_heads (0) of params.json must be at least 1"),
    "vocabulary": ({**PARAMS["Llama-2-7b"], "vocab_size": -2}, "vocab_size (-2) of params.json must be at least 1"),
    "heads": ({**PARAMS["Llama-2-7b"], "n_heads": 7}, "dim (4096) of params.json must be a multiple of n_heads (7)"),
    "huge": ({**PARAMS["Llama-2-7b"], "dim": 2**40}, "dim (1099511627776) of params.json must be at most 2147483647"),
    "deep": ({**PARAMS["Llama-2-7b"], "n_layers": 10**9}, "n_layers (1000000000) of params.json must be at most 4096"),
    "factor": (
        {**PARAMS["Llama-3-8B"], "ffn_dim_multiplier": 1e300},
        "ffn_dim_multiplier (1e+300) of params.json must be at most 1024",
    ),
    "digits": (
        {**PARAMS["Llama-3-8B"], "rope_theta": 10**400},
        "rope_theta of params.json must be finite in float64, got a number of 401 digits",
    ),
    "infinite": ({**PARAMS["Llama-3-8B"], "norm_eps": float("inf")}, "norm_eps of params.json (inf) must be finite"),
    "unknown": (
        {**PARAMS["Llama-3-8B"], "quantization_args": {"group_size": 32}},
        "quantization_args ({'group_size': 32}) of params.json is not known",
    ),
    "windows": (
        {**MISTRAL, "sliding_window": [32, None]},
        "sliding_window of params.json must be an integer, got list",
    ),
    "experts": (
        {**MISTRAL, "vocab_size": 9, "moe": {"num_experts": 8}},
        "moe of params.json lacks num_experts_per_tok",
    ),
    "moe": ({**MISTRAL, "moe": 8}, "moe of params.json must be a mapping, got int"),
    "openai": (without(OPENAI, "head_dim", "num_experts"), "OpenAI's config.json lacks num_experts, head_dim"),
    "openai's own": ({**OPENAI, "alibi": True}, "alibi (True) of OpenAI's config.json is not known"),
    "limit": ({**OPENAI, "swiglu_limit": 0}, "swiglu_limit (0) of OpenAI's config.json must be positive"),
    "book": (without(BOOK, "rope_base"), "config.json of the book's Llama 3 lacks rope_base"),
    "frequencies": (
        {**BOOK, "rope_freq": {"factor": 8.0}},
        "rope_freq of config.json of the book's Llama 3 lacks low_freq_factor, high_freq_factor, "
        "original_context_length",
    ),
    "half": (
        {**BOOK_QWEN, "num_experts": 8},
        "config.json of the book's Qwen 3 lacks num_experts_per_tok, moe_intermediate_size",
    ),
    "hybrid": (
        {**GEMMA, "layer_types": ["linear_attention", "full_attention"]},
        "layer_types of config.json of the book's Gemma 3 must be sliding_attention or full_attention for each of 2 "
        "layers, got 'linear_attention'",
    ),
    "kinds": (
        {**GEMMA, "layer_types": [*GEMMA["layer_types"], "full_attention"]},
        "layer_types of config.json of the book's Gemma 3 must be sliding_attention or full_attention for each of 2 "
        "layers, got 3",
    ),
    "norms": ({**GEMMA, "qk_norm": False}, "qk_norm (False) of config.json of the book's Gemma 3 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case):
    config, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        to_transformers(config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# ---- the book's layouts

SHAPES = {
    "book-llama3": """
        trf_blocks.0.att.W_key.weight 8 16 | trf_blocks.0.att.W_value.weight 8 16
        trf_blocks.0.att.W_query.weight 16 16 | trf_blocks.0.att.out_proj.weight 16 16
        trf_blocks.0.ff.fc1.weight 20 16 | trf_blocks.0.ff.fc2.weight 20 16 | trf_blocks.0.ff.fc3.weight 16 20
        trf_blocks.0.norm1.weight 16 | trf_blocks.0.norm2.weight 16 | final_norm.weight 16
    """,
    "book-qwen3": """
        trf_blocks.0.att.W_query.weight 24 16 | trf_blocks.0.att.W_key.weight 12 16
        trf_blocks.0.att.W_value.weight 12 16 | trf_blocks.0.att.out_proj.weight 16 24
        trf_blocks.0.att.q_norm.scale 6 | trf_blocks.0.att.k_norm.scale 6
        trf_blocks.0.ff.gate.weight 3 16 | trf_blocks.0.ff.fc1.0.weight 5 16 | trf_blocks.0.ff.fc1.1.weight 5 16
        trf_blocks.0.ff.fc1.2.weight 5 16 | trf_blocks.0.ff.fc2.0.weight 5 16 | trf_blocks.0.ff.fc2.1.weight 5 16
        trf_blocks.0.ff.fc2.2.weight 5 16 | trf_blocks.0.ff.fc3.0.weight 16 5 | trf_blocks.0.ff.fc3.1.weight 16 5
        trf_blocks.0.ff.fc3.2.weight 16 5
        trf_blocks.0.norm1.scale 16 | trf_blocks.0.norm2.scale 16 | final_norm.scale 16
    """,
    "book-gemma3": """
        blocks.0.att.W_query.weight 24 16 | blocks.0.att.W_key.weight 12 16 | blocks.0.att.W_value.weight 12 16
        blocks.0.att.out_proj.weight 16 24 | blocks.0.att.q_norm.scale 6 | blocks.0.att.k_norm.scale 6
        blocks.0.ff.fc1.weight 20 16 | blocks.0.ff.fc2.weight 20 16 | blocks.0.ff.fc3.weight 16 20
        blocks.0.input_layernorm.scale 16 | blocks.0.post_attention_layernorm.scale 16
        blocks.0.pre_feedforward_layernorm.scale 16 | blocks.0.post_feedforward_layernorm.scale 16 | final_norm.scale 16
    """,
}
"""Names and shapes of the real models' ``state_dict()``, of one block, as printed by Python.

`Llama3Model` and `Qwen3Model` (with 3 experts) of llms-from-scratch 1.0.19, `Gemma3Model` of the notebook at commit
28c65cdf of rasbt/LLMs-from-scratch; emb_dim 16, 4 heads, 2 groups, hidden_dim 20, and head_dim 6 but in Llama 3.
"""

OTHERS = {"book-llama3": "hf-llama", "book-qwen3": "hf-qwen3-moe", "book-gemma3": "hf-gemma"}


def drawn(name):
    """Return arrays of two blocks under the names of a real model."""
    random = np.random.default_rng(3)
    lines = [one.split() for one in SHAPES[name].replace("\n", "|").split("|") if one.strip()]
    shapes = {"tok_emb.weight": (31, 16), "out_head.weight": (31, 16)}
    for key, *sizes in lines:
        shapes |= {key.replace(".0.", f".{i}.", 1): tuple(map(int, sizes)) for i in range(2)}
    found = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    return found | ({"out_head.weight": found["tok_emb.weight"].copy()} if name == "book-gemma3" else {})


def written(path, arrays):
    return write(path, arrays, {"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_books_models_are_told_by_their_names_and_lose_no_bit(tmp_path, name, dtype):
    arrays = {key: array.astype(numpy_dtype(dtype)) for key, array in drawn(name).items()}
    source = written(tmp_path / "book.safetensors", arrays)
    assert checkpoints.inspect(source).layout == name
    there = checkpoints.convert(source, tmp_path / "hf.safetensors", to_layout=OTHERS[name]).target
    assert checkpoints.inspect(there).layout == OTHERS[name]
    back = checkpoints.convert(there, tmp_path / "back.safetensors", to_layout=name).target
    assert bits(checkpoints.read(back)) == bits(arrays)
    again = checkpoints.convert(back, tmp_path / "again.safetensors", to_layout=OTHERS[name]).target
    assert bits(checkpoints.read(again)) == bits(checkpoints.read(there))
    flax = checkpoints.convert(source, tmp_path / "flax.msgpack").target
    assert checkpoints.inspect(flax).layout == "flax"


def test_a_dense_qwen_3_of_the_book_has_our_names(tmp_path):
    found = {key: array for key, array in drawn("book-gemma3").items() if "layernorm" not in key}
    arrays = {key.replace("blocks.", "trf_blocks.", 1): array for key, array in found.items()}
    arrays |= {f"trf_blocks.{i}.norm{n}.scale": np.float32(range(16)) + i + n for i in (0, 1) for n in (1, 2)}
    source = written(tmp_path / "book.safetensors", arrays)
    assert checkpoints.inspect(source).layout == "torch"
    there = checkpoints.convert(source, tmp_path / "hf.safetensors", to_layout="hf-llama").target
    back = checkpoints.convert(there, tmp_path / "back.safetensors", to_layout="book-qwen3").target
    assert bits(checkpoints.read(back)) == bits(arrays)


@pytest.mark.parametrize("name", SHAPES)
def test_a_hole_in_a_model_of_the_book_is_named(tmp_path, name):
    arrays = drawn(name)
    hole = next(key for key in arrays if ".1.ff.fc2" in key)
    del arrays[hole]
    source = written(tmp_path / "book.safetensors", arrays)
    with pytest.raises(ValueError, match=rf"missing: {hole}"):
        checkpoints.convert(source, tmp_path / "x.safetensors", from_layout=name, to_layout=OTHERS[name])


def test_names_of_one_s_own_below_blocks_stay_ours(tmp_path):
    """They lack what marks the book's Gemma 3, and go through as they are."""
    arrays = {"blocks.0.att.W_query.weight": np.ones((2, 3), np.float32), "blocks.0.norm.scale": np.ones(3, np.float32)}
    arrays |= {f"blocks.0.att.W_{name}.weight": np.ones((2, 3), np.float32) for name in ("key", "value")}
    there = checkpoints.convert(written(tmp_path / "x.safetensors", arrays), tmp_path / "y.safetensors")
    assert checkpoints.inspect(there.target).layout == "flax"
    assert "blocks.0.norm.scale" in checkpoints.read(there.target)
