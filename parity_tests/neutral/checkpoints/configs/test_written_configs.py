"""The config.json of a decoder in a layout of `transformers`: what it says, what it refuses, and when it is written."""

from __future__ import annotations

import dataclasses
import json

import pytest
from safetensors.numpy import save_file

from attn_bridge import checkpoints, masks
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run
from attn_bridge.models import families, layouts
from attn_bridge.models.derived import known
from attn_bridge.models.reading import multimodal
from attn_bridge.models.reading.differences import differences
from attn_bridge.specs import BertEncoderConfig, GPTModelConfig
from attn_bridge.specs.as_json import as_json
from attn_bridge.specs.layer_norm import LayerNormConfig
from attn_bridge.specs.position import Alibi, Rotary
from attn_bridge.specs.rope_scaling import LinearScaling, Llama3Scaling, LongRoPEScaling, NTKScaling, YaRNScaling
from parity_tests.support.calls import cover
from parity_tests.support.models.drawn_decoders import draw
from parity_tests.support.models.hf_configs import PUBLISHED

from ..checkpoints import drawn
from ..layouts.test_decoder_families import DECODERS, small

BASE = {**small("llama"), "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 11}


def decoder(**keys):
    return families.find_decoder({**BASE, **keys})


def changed(config, layers=None, **attention):
    """Return a config whose attention, of some layers or all, is another one."""
    blocks = (
        dataclasses.replace(block, attention=dataclasses.replace(block.attention, **attention))
        if layers is None or number in layers
        else block
        for number, block in enumerate(config.blocks)
    )
    return dataclasses.replace(config, blocks=tuple(blocks))


def layout_of(model_type):
    return next(one for one in map(layouts.find, layouts.names()) if model_type in one.model_types)


UNUSUAL = {
    "activation_function": "relu",
    "attention_bias": True,
    "attention_dropout": 0.2,
    "attention_multiplier": 0.3,
    "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.6},
    "attn_logit_softcapping": 5.0,
    "attn_pdrop": 0.15,
    "clip_qkv": 0.5,
    "embd_pdrop": 0.3,
    "embedding_multiplier": 2.5,
    "final_logit_softcapping": 7.0,
    "first_k_dense_replace": 2,
    "hidden_act": "gelu",
    "hidden_activation": "relu",
    "hidden_dropout": 0.1,
    "intermediate_size": 14,
    "layer_norm_epsilon": 3e-3,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 5,
    "logits_scaling": 3.0,
    "mlp_only_layers": [2],
    "moe_intermediate_size": 10,
    "n_inner": 18,
    "n_shared_experts": 3,
    "norm_topk_prob": False,
    "num_local_experts": 6,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 7,
    "query_pre_attn_scalar": 9,
    "resid_pdrop": 0.25,
    "residual_multiplier": 0.4,
    "rms_norm_eps": 3e-4,
    "rope_interleave": False,
    "rope_local_base_freq": 77.0,
    "rope_theta": 321.0,
    "routed_scaling_factor": 1.9,
    "shared_expert_intermediate_size": 12,
    "sliding_window": 3,
    "swiglu_alpha": 1.1,
    "swiglu_limit": 3.0,
    "tie_word_embeddings": None,
    "topk_method": "group_limited_greedy",
    "use_sliding_window": True,
    "v_head_dim": 9,
}
"""Values that are the default of no family, and a head that is tied in none."""

ENCODERS = (
    *("bert-decoder", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
"""Families of encoders that run as decoders, whose heads are tied."""

MAMBAS = ("mamba", "falcon_mamba", "jamba", "mamba2", "bamba", "falcon_h1", "granitemoehybrid")

ONLY = {
    **{name: {"tie_word_embeddings": True} for name in ENCODERS},
    **{name: {"rope_theta": None} for name in ("gpt_neox", "gpt_neox_japanese")},
    **{name: {"attention_bias": False} for name in ("internlm3", "laguna", "lfm3")},
    "emu3_text_model": {"attention_bias": None},
    "afmoe": {"attention_bias": False},
    "aria_text": {"hidden_act": "silu"},
    "olmoe": {"clip_qkv": None},
    "qwen2_moe": {"use_sliding_window": False},
    "apertus": {"partial_rotary_factor": 1.0},
    "cwm": {"partial_rotary_factor": 1.0},
    "ministral3": {"partial_rotary_factor": 1.0},
    "diffllama": {"attention_dropout": 0.0},
    "gpt_oss": {"hidden_act": "silu", "partial_rotary_factor": 1.0},
    **{
        name: {"hidden_act": "silu"}
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax", "olmo_hybrid")
    },
    "kimi_linear": {"hidden_act": "silu", "tie_word_embeddings": False},
    "nemotron_h": {"tie_word_embeddings": False},
    "dbrx": {"tie_word_embeddings": False, "attn_config": {"rope_theta": 321.0, "kv_n_heads": 2, "clip_qkv": 0.7}},
    **{name: {"hidden_act": "silu"} for name in MAMBAS},
}
"""What a family takes one value of."""

READ = (
    {name: small(name) for name in DECODERS}
    | {f"{name}, unusual": {**small(name), **UNUSUAL, **ONLY.get(name, {})} for name in DECODERS}
    | PUBLISHED
)


@pytest.mark.parametrize("name", READ)
def test_what_a_family_reads_it_writes(name):
    config = families.find_decoder(READ[name])
    model_type = READ[name].get("text_config", READ[name])["model_type"]
    written = families.write_config(config, layout_of(model_type))
    assert families.find_decoder(json.loads(json.dumps(written))) == config
    assert written["architectures"] == [families.FAMILIES[multimodal.type_of(written)].architecture]
    assert written["vocab_size"] == config.vocab_size


SCALINGS = {
    "linear": LinearScaling(3.0),
    "dynamic": NTKScaling(2.0, 50),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 60),
    "yarn": YaRNScaling(4.0, 32, 30.0, 2.0, 1.3, truncate=False),
    "yarn-mscale": YaRNScaling(4.0, 32, mscale=0.9, mscale_all_dim=0.7),
    "longrope": LongRoPEScaling((1.1,) * 8, (2.3,) * 8, 40, 2.5),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_is_written(name):
    config = changed(decoder(), position=Rotary(321.0, scaling=SCALINGS[name]))
    written = families.write_config(config, layouts.find("hf-llama"))
    assert written["rope_scaling"]["rope_type"] == name.partition("-")[0]
    assert families.find_decoder(written) == config
    del written["rope_scaling"]
    assert families.find_decoder(written) != config


WINDOW = masks.sliding_window(5)
CHOSEN = {
    "plain": ("llama", decoder()),
    "biases": ("llama", decoder(attention_bias=True, mlp_bias=True)),
    "all of a head turns": ("llama", changed(decoder(), position=Rotary(dim=16))),
    "heads that transformers does not take for Llama": ("mistral", decoder(hidden_size=60, num_attention_heads=8)),
    "a window": ("mistral", changed(decoder(), mask=WINDOW)),
    "biases but for the output": ("qwen2", changed(decoder(), qkv_bias=True, key_bias=True)),
    "a window in some layers": ("ministral", changed(decoder(), [1], mask=WINDOW)),
    "a window in the last layers": ("qwen2", changed(decoder(), [2], mask=WINDOW)),
    "no positions in a layer": ("smollm3", changed(decoder(), [0], position=None)),
    "a scale": ("granite", changed(decoder(), scale=0.3)),
    "a factor of logits": ("granite", dataclasses.replace(decoder(), logit_scale=1.0 / 7.0)),
    "a factor that has no reciprocal": ("granite", dataclasses.replace(decoder(), logit_scale=0.47)),
    "norms of query and key": ("qwen3", families.find_decoder({**BASE, "model_type": "qwen3"})),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_model_type_is_one_that_computes_the_same(case):
    model_type, config = CHOSEN[case]
    if case == "a window in the last layers":
        config = changed(config, qkv_bias=True, key_bias=True)
    written = families.write_config(config, layouts.find("hf-llama"))
    assert written["model_type"] == model_type


def test_a_reciprocal_is_the_shortest_number():
    written = families.write_config(CHOSEN["a factor of logits"][1], layouts.find("hf-llama"))
    assert written["logits_scaling"] == 7.0


OTHERS = f"({', '.join(layouts.find('hf-llama').model_types)}) says all of this decoder; "
ALL = {
    "sinks": (changed(decoder(), sinks=True), "llama has another blocks[0].attention.sinks (True) in 3 blocks"),
    "pairs": (
        changed(decoder(), sinks=True, position=Rotary(pairing="interleaved")),
        "ernie4_5 has another blocks[0].attention.sinks (True) in 3 blocks",
    ),
    "windows": (
        changed(changed(decoder(), [0], mask=WINDOW), [1], mask=masks.sliding_window(6)),
        "ministral has another blocks[1].attention.mask.size (6)",
    ),
    "bases": (
        changed(decoder(), [1, 2], position=Rotary(7.0)),
        "llama has another blocks[1].attention.position.base (7.0) in 2 blocks",
    ),
    "mask": (
        changed(decoder(), mask=masks.chunked(4)),
        "llama has another blocks[0].attention.mask (Chunked(size=4)) in 3 blocks",
    ),
    "ALiBi": (changed(decoder(), position=Alibi()), "llama has another blocks[0].attention.position (Alibi()) in 3"),
    "norm": (
        dataclasses.replace(decoder(), embedding_norm=LayerNormConfig(64)),
        "llama has another embedding_norm (LayerNormConfig(",
    ),
    "scaling": (
        changed(decoder(), position=Rotary(scaling=NTKScaling(2.0))),
        "llama: scaling (NTKScaling(factor=2.0, original_context=None)) has no rope_type",
    ),
    "blocks": (dataclasses.replace(decoder(), blocks=()), "llama: blocks are none"),
}


@pytest.mark.parametrize("case", ALL)
def test_what_no_family_says_is_refused_by_name(case):
    config, message = ALL[case]
    with pytest.raises(ValueError, match=r"^no config.json of hf-llama .*$") as caught:
        families.write_config(config, layouts.find("hf-llama"))
    assert str(caught.value).startswith(f"no config.json of hf-llama {OTHERS}{message}")


def test_a_layout_without_decoders_is_refused():
    with pytest.raises(ValueError, match=r"^hf-bert is for no decoder of ours, so that no config.json can be written$"):
        families.write_config(decoder(), layouts.find("hf-bert"))


def test_a_model_without_attention_is_refused_where_keys_are_scaled():
    config = families.find_decoder({"model_type": "falcon_mamba", "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=r"^no config.json of hf-falcon-h1 \(falcon_h1\) says all of this decoder; "):
        families.write_config(config, layouts.find("hf-falcon-h1"))


def test_what_transformers_passes_over_is_refused():
    config = families.find_decoder({**BASE, "model_type": "gemma3_text"})
    yarn = changed(config, position=Rotary(scaling=YaRNScaling(2.0, 9, truncate=False)))
    with pytest.raises(ValueError, match=r"truncate \(False\) of YaRN is passed over by transformers"):
        families.FAMILIES["gemma3_text"].write(yarn)
    with pytest.raises(ValueError, match=r"^no config.json of hf-gemma"):
        families.write_config(yarn, layouts.find("hf-gemma"))


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_with_a_layout_has_a_writer(name):
    family = families.FAMILIES[name]
    assert family.architecture
    layout_of(name)


TURNS = 4
"""Draws among which the layouts are divided, where a draw is not written in all of them but in that of its family."""

DRAWN = [name for name in DECODERS if name != "gemma3"]
PACKAGED = [description.model_type for description in known.DESCRIPTIONS]
KINDS = ("exaone4", "falcon", "glm4_moe_lite", "gpt_neox", "hy_v3", "kolibri1", "phimoe", "roberta", "stablelm")
"""Families that are data and always run: a cover of their kinds of attention, experts, norms and positions."""


@cover.some("seeds", [range(TURNS), range(40)], always=[range(TURNS)])
@cover.some("name", DRAWN, [name for name in DRAWN if name not in PACKAGED or name in KINDS])
def test_a_drawn_decoder_is_said_or_refused_in_one_line(name, seeds):
    said, refused = 0, []
    words = [word for word in layouts.names() if word.startswith("hf-")]
    for seed in seeds:
        config = draw(name, seed)
        turn = words if len(seeds) > TURNS else dict.fromkeys((layout_of(name).name, *words[seed::TURNS]))
        for layout in map(layouts.find, turn):
            try:
                written = families.write_config(config, layout)
            except ValueError as error:
                refused.append(str(error))
                continue
            assert differences(config, families.find_decoder(json.loads(json.dumps(written)))) == []
            said += 1
    assert 4 * said >= len(seeds)
    assert not [line for line in refused if "\n" in line or not line.startswith(("no config.json of ", "hf-"))]


# ---- beside weights


def folder(path, document, config, dtype="float32"):
    """Write a folder with weights under our names, and a config.json beside them."""
    path.mkdir()
    save_file(drawn({row.rule.torch: row.shape for row in config.parameters}, dtype), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(document))
    return path


def own(config, name="DecoderModel"):
    return {"model_type": f"attn-bridge-{name}", "config": as_json(config)}


def convert(source, target, *more):
    code = run(["convert", str(source), str(target), "--to", *more])
    file = target / "config.json"
    return code, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_ours_becomes_one_of_theirs_and_again_ours(tmp_path, dtype):
    config = decoder(tie_word_embeddings=True)
    source = folder(tmp_path / "ours", own(config), config, dtype)
    code, found = convert(source, tmp_path / "hf", "hf-llama")
    assert code == 0
    assert (found["model_type"], found["torch_dtype"], found["tie_word_embeddings"]) == ("llama", dtype, True)
    assert families.find_decoder(found) == config
    checkpoints.convert(tmp_path / "hf", tmp_path / "back", to_layout="torch")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == found
    assert checkpoints.verify(source, tmp_path / "hf").passed


def test_settings_come_from_our_config(tmp_path):
    config = families.find_decoder({**small("bloom"), "num_hidden_layers": 2, "tie_word_embeddings": False})
    source = folder(tmp_path / "ours", own(config), config)
    code, found = convert(source, tmp_path / "hf", "hf-bloom")
    assert code == 0
    assert (found["n_head"], found["tie_word_embeddings"]) == (4, False)
    assert "lm_head.weight" in checkpoints.inspect(tmp_path / "hf").tensors


def test_layouts_without_such_a_config_find_their_settings_in_ours(tmp_path):
    config = decoder()
    source = folder(tmp_path / "ours", own(config), config)
    assert convert(source, tmp_path / "meta", "meta-llama") == (0, None)
    back = checkpoints.convert(tmp_path / "meta", tmp_path / "x.safetensors", to_layout="torch",
                               settings={"num_heads": 4, "num_kv_heads": 2}).target  # fmt: skip
    assert back.read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_head_that_is_tied_on_the_way_is_said_to_be(tmp_path):
    config = decoder()
    source = folder(tmp_path / "ours", own(config), config)
    arrays = checkpoints.read(source)
    save_file(arrays | {"out_head.weight": arrays["tok_emb.weight"]}, source / "model.safetensors")
    assert convert(source, tmp_path / "one", "hf-llama")[1]["tie_word_embeddings"] is False
    assert convert(source, tmp_path / "two", "hf-llama", "--set", "tie=1")[1]["tie_word_embeddings"] is True


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_refusal_is_one_line_and_writes_nothing(tmp_path, capsys, more):
    config = changed(decoder(), sinks=True)
    plain = decoder()
    source = folder(tmp_path / "ours", own(config), plain)  # names that the layout would take
    code, found = convert(source, tmp_path / "hf", "hf-llama", *more)
    assert (code, found) == (2, None)
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert "blocks[0].attention.sinks (True) in 3 blocks" in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ours"]
    with pytest.raises(CheckpointError, match=r"^config.json: no config.json of hf-llama"):
        checkpoints.plan(source, tmp_path / "hf", to_layout="hf-llama")
    assert checkpoints.plan(source, tmp_path / "x.safetensors", to_layout="hf-llama").config == {}


@pytest.mark.parametrize("config", [None, 3, {"class": "Rotary"}, {"class": "DecoderConfig"}])
def test_a_damaged_config_of_ours_is_one_line(tmp_path, config):
    source = folder(tmp_path / "ours", {"model_type": "attn-bridge-DecoderModel", "config": config}, decoder())
    with pytest.raises(CheckpointError, match=r"/config\.json: [^\n]*(DecoderConfig|class)[^\n]*$"):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-llama")


THEIRS = {**BASE, "eos_token_id": [7, 9], "quantization_config": {"bits": 4}, "a_key_of_theirs": [1]}


@pytest.mark.parametrize("named", ["torch", "hf-llama"])
def test_a_config_of_theirs_loses_its_quantisation_alone(tmp_path, named):
    source = folder(tmp_path / "ours", THEIRS, decoder())
    if named != "torch":
        source = checkpoints.convert(source, tmp_path / named, to_layout="hf-llama").target
        (source / "config.json").write_text(json.dumps(THEIRS))
    _, found = convert(source, tmp_path / "hf", "hf-llama")
    assert found == {key: value for key, value in THEIRS.items() if key != "quantization_config"}
    assert convert(source, tmp_path / "same", "same")[1] == THEIRS


def test_a_config_of_theirs_that_fits_keeps_its_bytes(tmp_path):
    source = folder(tmp_path / "ours", {}, decoder())
    (source / "config.json").write_text('{"model_type" :  "llama"}')
    for layout in ("hf-llama", "flax", "torch", "meta-llama"):
        checkpoints.convert(source, tmp_path / layout, to_layout=layout, settings=None if layout != "meta-llama" else
                            {"num_heads": 4, "num_kv_heads": 2})  # fmt: skip
        assert (tmp_path / layout / "config.json").read_text() == '{"model_type" :  "llama"}'


def test_a_config_of_theirs_in_another_family_s_layout_is_written_anew(tmp_path):
    source = folder(tmp_path / "ours", THEIRS, decoder())
    _, found = convert(source, tmp_path / "hf", "hf-phi3")
    assert (found["model_type"], found["eos_token_id"]) == ("phi3", [7, 9])
    assert not {"quantization_config", "a_key_of_theirs"} & found.keys()
    assert families.find_decoder(found) == decoder()


@pytest.mark.parametrize(("scaling", "positions"), [(SCALINGS["llama3"], 777), (SCALINGS["dynamic"], 50)])
def test_a_number_of_positions_goes_along_unless_others_would_be_scaled(tmp_path, scaling, positions):
    config = changed(decoder(), position=Rotary(scaling=scaling))
    source = folder(tmp_path / "ours", {**own(config), "max_position_embeddings": 777, "eos_token_id": 3}, config)
    _, found = convert(source, tmp_path / "hf", "hf-llama")
    assert (found["max_position_embeddings"], found["eos_token_id"], found["bos_token_id"]) == (positions, 3, None)
    assert families.find_decoder(found) == config


def test_the_other_whole_models_say_theirs(tmp_path):
    gpt = {"vocab_size": 11, "context_length": 7, "emb_dim": 8, "n_heads": 2, "n_layers": 1, "qkv_bias": True}
    config = GPTModelConfig.read(gpt)
    source = folder(tmp_path / "gpt", {"model_type": "attn-bridge-GPTModel", **gpt}, config)
    _, found = convert(source, tmp_path / "hf-gpt2", "hf-gpt2", "--set", "tie=0")
    assert (found["n_positions"], found["tie_word_embeddings"], found["architectures"]) == (
        7,
        False,
        ["GPT2LMHeadModel"],
    )
    bert = BertEncoderConfig(11, 8, 2, 2, 12, 9, layer_norm_eps=1e-3)
    source = folder(tmp_path / "bert", {"model_type": "attn-bridge-BertEncoder", **dataclasses.asdict(bert)}, bert)
    _, found = convert(source, tmp_path / "hf-bert", "hf-bert")
    assert BertEncoderConfig.read(found) == bert
    assert (found["model_type"], found["architectures"]) == ("bert", ["BertModel"])


def test_values_that_a_config_projects_must_be_in_the_source(tmp_path):
    config = families.find_decoder({**small("gemma4_text"), "attention_k_eq_v": False})
    layout = layouts.find("hf-gemma4-moe")
    source = folder(tmp_path / "hf", families.write_config(config, layout), config)
    theirs = layout.from_canonical(drawn({row.rule.torch: row.shape for row in config.parameters}, "float32"))
    save_file(theirs, source / "model.safetensors")
    assert checkpoints.plan(source, tmp_path / "x").source_layout == "hf-gemma4-moe"
    del theirs["model.layers.1.self_attn.v_proj.weight"]
    save_file(theirs, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has model.layers.1.self_attn.v_proj.weight, which the source lacks"):
        checkpoints.plan(source, tmp_path / "x")
