"""Configs made to do harm: each is refused in one bounded line, before much memory or time is taken."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.models import families
from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary
from attn_bridge.specs.rope_scaling import YaRNScaling
from attn_bridge.weights.placements import LayoutError
from parity_tests.fuzz.samples import write
from parity_tests.support.models.hf_configs import LATENT_HEADS
from parity_tests.support.processes.memory import traced_memory

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
EXPERTS = {
    **SIZES,
    **LATENT_HEADS,
    "n_routed_experts": 4,
    "moe_intermediate_size": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LLAMA = families.find_decoder({"model_type": "llama", **SIZES})
HUGE = 10**400
YARN = {"rope_type": "yarn"}
MAX_MEMORY = 1 << 26
"""Bytes that a refusal may cost."""


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", {"hidden_act": "a" * 100_000}, "(100002 characters)) of llama must be one of silu"),
        ("llama\n" + "a" * 100_000, {}, "model_type (llama\\n"),
        ("llama", {"rope_scaling": {"rope_type": "\n" * 10_000}}, "(10000 characters)) of llama must be one of"),
        ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
         "(0.5) of llama must be at least 1"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0] * 2,
                  "original_max_position_embeddings": 0.5}}, "(0.5) of llama must be at least 1"),
        ("llama", {"head_dim": 1 << 31}, "dim of Rotary (2147483648) must be at most 1048576"),
        ("gemma3_text", {"hidden_size": HUGE}, "(401 characters)) of gemma3_text must be at most 9223372036854775807"),
        ("deepseek_v3", {"qk_nope_head_dim": HUGE}, "must be at most 9223372036854775807"),
        ("llama", {"num_attention_heads": -HUGE}, "(402 characters)) of llama must be at least 1"),
        ("deepseek_v3", {"n_routed_experts": (1 << 31) - 4}, "its sizes make a model of"),
        ("deepseek_v3", {"n_routed_experts": 1 << 12, "num_hidden_layers": 1 << 8}, "its sizes make a model of"),
        ("deepseek_v3", {"num_key_value_heads": "a" * 100_000}, "(100002 characters)) of deepseek_v3"),
    ],
)  # fmt: skip
def test_a_config_that_would_take_all_memory_is_one_line(tmp_path, model_type, change, message):
    sizes = EXPERTS if model_type == "deepseek_v3" else SIZES
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **change}))
    write("safetensors", tmp_path / "model.safetensors", {"x": np.arange(3.0)})
    with traced_memory() as peak, pytest.raises(CheckpointError) as caught:
        configs.read_config("DecoderModel", tmp_path)
    assert peak.bytes < MAX_MEMORY
    said = str(caught.value).removeprefix(str(tmp_path))
    assert message in said
    assert said.isprintable()
    assert len(said) < 600 + sum(len(name) + 2 for name in families.FAMILIES)  # it may list all families


def test_what_a_config_of_ours_holds_is_as_bounded():
    with pytest.raises(ValueError, match=r"d_in \(1000.*\(401 characters\)\) must be at most 9223372036854775807"):
        GroupedQueryAttentionConfig(d_in=HUGE, num_heads=1)
    with pytest.raises(ValueError, match=r"pairing \('aaa.*\(100002 characters\)\) must be one of"):
        Rotary(pairing="a" * 100_000)
    with pytest.raises(ValueError, match=r"mscale_all_dim \(-10\.0\) makes a factor of 0"):
        YaRNScaling(np.e, 8, mscale=1.0, mscale_all_dim=-10.0)


BART = {
    "vocab_size": 31,
    "d_model": 16,
    **{f"{side}_{key}": size for side in ("encoder", "decoder")
       for key, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 20))},
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **SIZES},
        {"model_type": "deepseek_v3", **EXPERTS, "num_hidden_layers": 3, "n_shared_experts": 2},
        {"model_type": "bart", **BART},
    ],
)
def test_numbers_are_counted_without_a_list_of_all_parameters(config):
    find = families.find_encoder_decoder if config["model_type"] == "bart" else families.find_decoder
    found = find(config)
    assert found.count == sum(np.prod(row.shape, dtype=int) for row in found.parameters)


def test_an_encoder_with_blocks_beyond_its_weights_is_refused(tmp_path):
    document = {"model_type": "bart", **BART, "encoder_layers": 4096, "decoder_layers": 4096}
    (tmp_path / "config.json").write_text(json.dumps(document))
    write("safetensors", tmp_path / "model.safetensors", {"x": np.arange(3.0)})
    with pytest.raises(CheckpointError, match="its sizes make a model of"):
        configs.read_config("EncoderDecoderModel", tmp_path)


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        (["intermediate_size"], r"the weights beside it have \d+; it leaves out intermediate_size \(then 11008\)$"),
        (["vocab_size"], r"is far too large for weights of \d+ numbers; it leaves out vocab_size \(then 32000\)$"),
        (["hidden_size", "num_hidden_layers"],
         r"; it leaves out hidden_size \(then 4096\), num_hidden_layers \(then 32\)$"),
    ],
)  # fmt: skip
def test_sizes_that_a_config_leaves_out_are_named(tmp_path, missing, error):
    document = {key: value for key, value in {"model_type": "llama", **SIZES}.items() if key not in missing}
    (tmp_path / "config.json").write_text(json.dumps(document))
    write("safetensors", tmp_path / "model.safetensors", {"x": np.arange(3.0)})
    with pytest.raises(CheckpointError, match=error):
        configs.read_config("DecoderModel", tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_config_that_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    write("safetensors", tmp_path / "model.safetensors", {"x": np.arange(3.0)})
    with pytest.raises(CheckpointError, match=r"config\.json can't be read as JSON: it is no file$"):
        configs.read_config("DecoderModel", tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["config.json", "params.json", "attn-bridge.json", "attn-bridge.kept"])
def test_a_file_beside_weights_that_is_none_is_refused_by_convert(tmp_path, name, kind):
    source = tmp_path / "source"
    source.mkdir()
    arrays = {row.rule.torch: np.full(row.shape, 0.5, np.float32) for row in LLAMA.parameters}
    write("safetensors", source / "model.safetensors", arrays)
    if name == "attn-bridge.kept":
        checkpoints.convert(source, tmp_path / "made", to_layout="flax")
        (tmp_path / "made").rename(source := tmp_path / "made")
    path = source / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)}( can't be (read as JSON|used))?:? (it )?is (no|a link out)"
    ):
        checkpoints.convert(source, tmp_path / "y", to_layout="torch" if name == "attn-bridge.kept" else "flax")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": -4}, r"num_attention_heads \(-4\) of llama must be at least 1"),
        ({"num_hidden_layers": 1e308}, "num_hidden_layers of llama must be an integer, got float"),
        (
            {"num_hidden_layers": 10**308},
            r"num_hidden_layers \(10+\.\.\. \(309 characters\)\) of llama must be at most",
        ),
        ({"num_hidden_layers": 5000}, r"num_hidden_layers \(5000\) of llama must be at most 4096"),
        ({"num_key_value_heads": True}, "num_key_value_heads of llama must be an integer, got bool"),
        ({"vocab_size": float("nan")}, "vocab_size of llama must be an integer, got float"),
        ({"hidden_size": "a" * 40_000}, "hidden_size of llama must be an integer, got str"),
        ({"intermediate_size": 0}, r"intermediate_size \(0\) of llama must be at least 1"),
        ({"head_dim": float("inf")}, "head_dim of llama must be an integer, got float"),
        ({"model_type": "gpt2", "n_head": -1}, r"n_head \(-1\) of gpt2 must be at least 1"),
        ({"model_type": "x" * 40_000, "n_layer": 0.5}, r"n_layer of x+\.\.\. \(40000 characters\) must be an integer"),
        ({"text_config": {"num_attention_heads": 1 << 40}}, r"num_attention_heads \(\d+\) of llama must be at most"),
    ],
)
@pytest.mark.parametrize("target", ["flax", "same"])
def test_sizes_that_no_model_has_are_refused_by_convert(tmp_path, target, change, message):
    arrays = {row.rule.torch: np.full(row.shape, 0.5, np.float32) for row in LLAMA.parameters}
    source = write("safetensors", tmp_path / "model.safetensors", arrays)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **change}))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}/config\.json: {message}") as caught:
        checkpoints.convert(source, tmp_path / "y", to_layout=target)
    assert len(str(caught.value)) < 500
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("model_type", ["DecoderModel", "GPTModel"])
def test_sizes_of_our_own_config_are_refused_by_convert(tmp_path, model_type):
    arrays = {row.rule.torch: np.full(row.shape, 0.5, np.float32) for row in LLAMA.parameters}
    source = write("safetensors", tmp_path / "model.safetensors", arrays)
    own = {"model_type": f"attn-bridge-{model_type}", "n_heads": -4, "config": {"n_heads": -4}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=r"/config\.json: "):
        checkpoints.convert(source, tmp_path / "y", to_layout="flax")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3n_text", **SIZES, "intermediate_size": [8, 8]},
        {
            "model_type": "zamba",
            **SIZES,
            "intermediate_size": 0,
            "head_dim": None,
            "time_step_limit": [0.0, float("inf")],
        },
        {"dim": 16, "n_layers": 2, "n_heads": 4, "vocab_size": -1},
        {},
    ],
)
def test_sizes_that_other_families_have_are_not_refused(tmp_path, config):
    source = write("safetensors", tmp_path / "model.safetensors", {"x": np.arange(3.0)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoints.convert(source, tmp_path / "y", to_layout="same").digests.keys() == {"x"}


@pytest.mark.parametrize("name", ["scan", "interleaved", "tie"])
@pytest.mark.parametrize("value", [2, -1, True, "x"])
def test_what_is_yes_or_no_is_0_or_1(tmp_path, name, value):
    config = families.find_decoder({"model_type": "llama", **SIZES})
    arrays = {row.rule.torch: np.full(row.shape, 0.5, np.float32) for row in config.parameters}
    source = write("safetensors", tmp_path / "x.safetensors", arrays)
    settings = {"head_dim": 4, "interleaved": 0, name: value}
    with pytest.raises(LayoutError, match=rf"^{name} \({value}\) must be 0 or 1$"):
        checkpoints.plan(source, tmp_path / "y.npz", to_layout="maxtext", settings=settings)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": ["llama"]}', r'model_type must be text, got \["llama"\]$'),
        ('{"model_type": 5}', "model_type must be text, got 5$"),
        ('{"a":' * 100_000, "can't be read as JSON: it is nested too deeply$"),
    ],
)
def test_kinds_that_are_no_text_and_depth_are_named(tmp_path, text, reason):
    source = tmp_path / "in"
    source.mkdir()
    write("safetensors", source / "model.safetensors", {"model.norm.weight": np.ones(4, np.float32)})
    (source / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        checkpoints.convert(source, tmp_path / "out")
