"""Folders of transformers, every family that a layout is for, to Flax's names and back to the same logits."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

import torch_attn
from attn_bridge import checkpoints
from attn_bridge.cli.app import run
from attn_bridge.models import families, layouts
from attn_bridge.models.layouts import LayoutError
from attn_bridge.specs.decoder_model import Recurrent

from ...support.calls import cover
from ...support.models.hf_folders import FAMILIES, GROUPED, SLIDING, attention_of, equal, saved
from ...support.models.originals import meta, openais, state_of

IDS = torch.arange(14).reshape(2, 7) % 11
OTHER_CONFIGS = ("hf-gpt2", "hf-bert", "hf-t5", "hf-umt5")
"""Layouts whose attention is read from another config: T5's, from that of one stack."""
MODERN = [name for name, (layout, *_) in FAMILIES.items() if layout not in OTHER_CONFIGS]


def result(model):
    with torch.no_grad():
        if model.config.model_type == "whisper":
            sound = torch.randn(2, 5, 14, generator=torch.Generator().manual_seed(5))
            return model(sound, decoder_input_ids=IDS)[0]
        is_t5 = model.config.model_type.endswith("t5")
        return model(IDS, decoder_input_ids=IDS)[0] if is_t5 else model(IDS)[0]


@cover.rotated(("family", "shard"), list(FAMILIES), ["1GB", "4KB"])
def test_a_folder_comes_back_with_the_same_bytes_and_logits(tmp_path, family, shard):
    layout, kind, config, sizes = FAMILIES[family]
    saved(tmp_path / "hf", kind, config, sizes, shard)
    assert checkpoints.inspect(tmp_path / "hf").layout == layout
    flax = checkpoints.convert(tmp_path / "hf", tmp_path / "flax").target
    assert checkpoints.inspect(flax).layout == "flax"
    assert checkpoints.verify(tmp_path / "hf", flax).passed
    back = checkpoints.convert(flax, tmp_path / "back", to_layout=layout).target
    for file in (tmp_path / "hf").glob("model*"):
        assert (back / file.name).read_bytes() == file.read_bytes(), file.name
    before = kind.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(result(kind.from_pretrained(back).eval()), result(before))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_projection_is_where_the_module_has_it(tmp_path, family):
    _, kind, config, sizes = FAMILIES[family]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    found = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "x.npz").target)
    for ours, theirs in (("W_query", "q_proj"), ("W_key", "k_proj"), ("W_value", "v_proj"), ("out_proj", "o_proj")):
        weight = model.model.layers[1].self_attn.get_submodule(theirs).weight.detach().numpy()
        assert (found[f"trf_blocks.1.att.{ours}.kernel"] == weight.T).all()
    assert (found["out_head.kernel"] == model.lm_head.weight.detach().numpy().T).all()


@pytest.mark.parametrize("family", MODERN)
def test_the_attention_of_every_layer_is_what_from_hf_gives(tmp_path, family):
    _, kind, config, sizes = FAMILIES[family]
    saved(tmp_path / "hf", kind, config, sizes, "1GB")
    document = json.loads((tmp_path / "hf" / "config.json").read_text())
    source = checkpoints.read(tmp_path / "hf")
    in_torch = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "t", to_layout="torch").target)
    in_flax = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "f", to_layout="flax").target)
    if family == "olmo-hybrid":  # `transformers` saves its joined kernels in thirds, whatever their widths
        source = checkpoints.read(
            checkpoints.convert(
                tmp_path / "t", tmp_path / "again", to_layout="hf-olmo-hybrid", settings={"resaved": 0}
            ).target
        )
    kinds = document.get("layers_block_type") or []  # of Nemotron-H, which has no other depth
    depth = document.get("decoder_layers", document.get("num_hidden_layers", document.get("n_layer", len(kinds))))
    assert depth == len({name.split("trf_blocks.")[1].split(".")[0] for name in in_torch if "trf_blocks." in name})
    for index in range(depth):
        if "mlp" in kinds and kinds[index] == "mlp":
            continue
        layer = families.find_layer(document, index)
        parts = layer.prefix.rstrip(".").split(".")
        theirs = {name: array for name, array in source.items() if f"{'.'.join(parts[-3:])}." in f".{name}"}
        expected = layer.to_ours(theirs)
        side = "decoder." if "decoder" in layer.prefix else ""
        inner = "cross_att" if parts[-1] == "encoder_attn" else "att"
        inner = "linear_att" if isinstance(layer.config, Recurrent) else inner
        path = f"{side}trf_blocks.{index}.{inner}."
        found = attention_of(in_torch, path)
        assert equal(found, expected)
        rules = layer.config.rules()
        wanted = {rule.flax: rule.convert(expected[rule.torch], "torch") for rule in rules}
        assert equal(attention_of(in_flax, path), wanted)
        module = getattr(torch_attn, layer.variant)(layer.config)
        module.load_state_dict({name: torch.from_numpy(array) for name, array in found.items()}, strict=True)


SAME_NAMES = {"hf-bert": ("hf-bert-decoder", "hf-big-bird")}
"""Layout -> layouts of the same names as a folder with its head, which the config tells apart."""


@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_layout_takes_a_folder_for_its_own(tmp_path, family):
    layout, kind, config, sizes = FAMILIES[family]
    saved(tmp_path, kind, config, sizes, "1GB")
    names = checkpoints.read(tmp_path)
    assert layouts.detect(names).name == layout
    others = [layouts.find(name) for name in layouts.names() if name != layout]
    if layouts.find(layout).form:  # of the same names, told apart by shapes
        others = [one for one in others if not one.form and one.name != "hf-gpt-bigcode"]  # GPT-2's names, one key head
    others = [one for one in others if one.name not in SAME_NAMES.get(layout, ())]
    full = [one.name for one in others if len(one.match(names)[1]) == len(names)]
    assert not [name for name in full if layouts.find(name).is_complete(names)]


def test_experts_of_gpt_oss_are_gates_and_ups_in_turn(tmp_path):
    _, kind, config, sizes = FAMILIES["gpt-oss"]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    found = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "x.npz").target)
    experts = model.model.layers[1].mlp.experts
    for number in range(3):
        path = f"trf_blocks.1.ff.experts.{number}."
        both, bias = experts.gate_up_proj[number].detach().numpy(), experts.gate_up_proj_bias[number].detach().numpy()
        for fc, start in (("fc1", 0), ("fc2", 1)):
            assert (found[f"{path}{fc}.kernel"] == both[:, start::2]).all()
            assert (found[f"{path}{fc}.bias"] == bias[start::2]).all()
        assert (found[f"{path}fc3.kernel"] == experts.down_proj[number].detach().numpy()).all()
        assert (found[f"{path}fc3.bias"] == experts.down_proj_bias[number].detach().numpy()).all()
    assert (found["trf_blocks.1.ff.router.kernel"] == model.model.layers[1].mlp.router.weight.detach().numpy().T).all()


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_experts_in_files_match_the_modules_fused_tensor(tmp_path, family):
    _, kind, config, sizes = FAMILIES[family]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    found = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "x.npz").target)
    feed_forward = model.model.layers[2].mlp
    for number in range(3):
        gate, up = feed_forward.experts.gate_up_proj[number].detach().numpy().reshape(2, 4, 16)
        path = f"trf_blocks.2.ff.experts.{number}."
        assert (found[f"{path}fc1.kernel"] == gate.T).all()
        assert (found[f"{path}fc2.kernel"] == up.T).all()
        assert (found[f"{path}fc3.kernel"] == feed_forward.experts.down_proj[number].detach().numpy().T).all()
    assert (found["trf_blocks.2.ff.router.kernel"] == feed_forward.gate.weight.detach().numpy().T).all()
    torch.save(model.state_dict(), tmp_path / "hf" / "memory.pt")
    fused = checkpoints.read(checkpoints.convert(tmp_path / "hf" / "memory.pt", tmp_path / "memory.npz").target)
    assert equal(fused, found)
    back = checkpoints.convert(tmp_path / "memory.npz", tmp_path / "hf" / "back.pt", to_layout=FAMILIES[family][0])
    assert equal(checkpoints.read(back.target), checkpoints.read(tmp_path / "hf" / "memory.pt"))
    apart = checkpoints.convert(
        tmp_path / "memory.npz", tmp_path / "x.pt", to_layout=FAMILIES[family][0], settings={"fused": 0}
    )
    assert equal(checkpoints.read(apart.target), checkpoints.read(tmp_path / "hf"))


def test_whispers_convolutions_and_attentions_convert_to_flax(tmp_path):
    _, kind, config, sizes = FAMILIES["whisper"]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    found = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "x.npz").target)
    encoder, decoder = model.model.encoder, model.model.decoder
    assert (found["encoder.conv2.kernel"] == encoder.conv2.weight.detach().numpy().transpose(2, 1, 0)).all()
    for ours, module in (
        ("encoder.trf_blocks.1.att", encoder.layers[1].self_attn),
        ("decoder.trf_blocks.2.att", decoder.layers[2].self_attn),
        ("decoder.trf_blocks.2.cross_att", decoder.layers[2].encoder_attn),
    ):
        for name, theirs in (
            ("W_query", "q_proj"),
            ("W_key", "k_proj"),
            ("W_value", "v_proj"),
            ("out_proj", "out_proj"),
        ):
            assert (found[f"{ours}.{name}.kernel"] == module.get_submodule(theirs).weight.detach().numpy().T).all()
        assert f"{ours}.W_key.bias" not in found
    assert (found["decoder.trf_blocks.0.norm2.scale"] == decoder.layers[0].encoder_attn_layer_norm.weight.numpy(
        force=True)).all()  # fmt: skip
    assert (found["out_head.kernel"] == decoder.embed_tokens.weight.detach().numpy().T).all()


def test_metas_own_files_become_those_of_transformers_and_come_back(tmp_path):
    _, kind, config, sizes = FAMILIES["llama"]
    saved(tmp_path / "hf", kind, config, sizes, "1GB")
    (tmp_path / "meta").mkdir()
    torch.save(meta(state_of(tmp_path / "hf"), 4, 2), tmp_path / "meta" / "consolidated.00.pth")
    names = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {"n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "multiple_of": "intermediate_size"}
    params = {ours: sizes[theirs] for ours, theirs in names.items()} | {"norm_eps": 1e-6, "ffn_dim_multiplier": 0.4}
    (tmp_path / "meta" / "params.json").write_text(json.dumps(params))
    source = tmp_path / "meta" / "consolidated.00.pth"
    assert checkpoints.inspect(source).layout == "meta-llama"
    there = checkpoints.convert(source, tmp_path / "there", to_layout="hf-llama").target
    assert equal(checkpoints.read(there), checkpoints.read(tmp_path / "hf"))
    back = checkpoints.convert(there, tmp_path / "back.pth", to_layout="meta-llama", settings={"num_heads": 4}).target
    assert equal(checkpoints.read(back), checkpoints.read(source))
    with pytest.raises(LayoutError, match="needs --set num_heads=N"):
        checkpoints.convert(tmp_path / "bare" / alone(tmp_path / "bare", source), tmp_path / "x")


def alone(folder, source):
    """Put a file into a folder without its config and return its name."""
    folder.mkdir()
    (folder / source.name).write_bytes(source.read_bytes())
    return source.name


def test_the_text_model_of_a_multimodal_gemma_is_taken(tmp_path):
    text = {**SLIDING, "model_type": "gemma3_text"}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"text_config": text, "vision_config": {**vision, "image_size": 28, "patch_size": 14}}
    saved(tmp_path / "hf", transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config, sizes, "1GB")
    assert checkpoints.inspect(tmp_path / "hf").layout == "hf-gemma"
    checkpoints.convert(tmp_path / "hf", tmp_path / "all")
    arrays = {name: array for name, array in checkpoints.read(tmp_path / "hf").items() if "language_model" in name}
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "text.pt")
    there = checkpoints.convert(tmp_path / "text.pt", tmp_path / "flax").target
    assert equal(checkpoints.read(there), checkpoints.read(tmp_path / "all"))
    assert "trf_blocks.1.post_norm2.scale" in checkpoints.read(there)
    back = checkpoints.convert(there, tmp_path / "back.pt", to_layout="hf-gemma").target
    assert equal(checkpoints.read(back), arrays)


def quantised(state, stem, joint):
    """Return a state with the experts of that name in MXFP4."""
    parts = {"blocks": torch.zeros(3, 16, 1, 16).byte(), "scales": torch.zeros(3, 16, 1).byte()}
    rest = {name: tensor for name, tensor in state.items() if name != stem}
    return rest | {f"{stem}{joint}{name}": part for name, part in parts.items()}


def test_quantised_experts_and_float8_scales_are_refused_in_one_line(tmp_path):
    _, kind, config, sizes = FAMILIES["gpt-oss"]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    stem = "model.layers.1.mlp.experts.down_proj"
    torch.save(quantised(model.state_dict(), stem, "_"), tmp_path / "x.pt")
    with pytest.raises(LayoutError, match=rf"^{stem}_(blocks|scales): experts in MXFP4"):
        checkpoints.convert(tmp_path / "x.pt", tmp_path / "flax")
    _, kind, config, sizes = FAMILIES["deepseek-v3"]
    state = dict(saved(tmp_path / "v3", kind, config, sizes, "1GB").state_dict())
    state = {name: torch.from_numpy(array) for name, array in checkpoints.read(tmp_path / "v3").items()}
    state["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
    torch.save(state, tmp_path / "y.pt")
    for given in (None, "hf-deepseek-v3"):
        with pytest.raises(LayoutError, match="weight_scale_inv: a scale of quantised weights"):
            checkpoints.convert(tmp_path / "y.pt", tmp_path / "flax", from_layout=given)


def test_a_model_whose_names_mean_other_things_is_no_llama(tmp_path, capsys):
    saved(tmp_path / "hf", transformers.LlamaForCausalLM, transformers.LlamaConfig, {**GROUPED, "head_dim": 6}, "1GB")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "llama_with_multipliers"}))
    assert run(["convert", str(tmp_path / "hf"), str(tmp_path / "flax")]) == 2
    refusal = capsys.readouterr().err.replace("\n", " ")
    assert "config.json says llama_with_multipliers, which may mean other things" in refusal
    assert not (tmp_path / "flax").exists()
    assert "config.json says llama_with_multipliers" in checkpoints.inspect(tmp_path / "hf").why
    assert run(["convert", str(tmp_path / "hf"), str(tmp_path / "flax"), "--from", "hf-llama"]) == 0
    assert run(["convert", str(tmp_path / "flax"), str(tmp_path / "back"), "--to", "hf-llama"]) == 0
    assert equal(checkpoints.read(tmp_path / "back"), checkpoints.read(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("family", "name"), [("gemma3", "hf-gemma3-text"), ("qwen3-next", "hf-qwen3-next"), ("bloom", "hf-bloom")]
)
def test_the_command_takes_a_folder_there_and_back(tmp_path, capsys, family, name):
    layout, kind, config, sizes = FAMILIES[family]
    saved(tmp_path / "hf", kind, config, sizes, "4KB")
    hf, flax, back = (str(tmp_path / one) for one in ("hf", "flax", "back"))
    assert run(["inspect", hf]) == 0
    assert f"layout {layout}," in capsys.readouterr().out
    assert run(["convert", hf, flax, "--from", name, "--to", "flax"]) == 0
    assert run(["verify", hf, flax]) == 0
    assert run(["convert", flax, back, "--to", name]) == 0
    for file in (tmp_path / "hf").glob("model*"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


def test_openais_own_files_become_those_of_transformers_and_come_back(tmp_path):
    _, kind, config, sizes = FAMILIES["gpt-oss"]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    (tmp_path / "openai").mkdir()
    source = tmp_path / "openai" / "model.pt"
    torch.save(openais(state_of(tmp_path / "hf")), source)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": model.config.head_dim}
    (tmp_path / "openai" / "config.json").write_text(json.dumps(heads))
    assert checkpoints.inspect(source).layout == "openai-gpt-oss"
    there = checkpoints.convert(source, tmp_path / "there", to_layout="hf-gpt-oss").target
    assert equal(checkpoints.read(there), checkpoints.read(tmp_path / "hf"))
    settings = {"head_dim": model.config.head_dim}
    back = checkpoints.convert(there, tmp_path / "back.pt", to_layout="openai-gpt-oss", settings=settings).target
    assert equal(checkpoints.read(back), checkpoints.read(source))
    with pytest.raises(LayoutError, match=r"needs? --set (num_heads|head_dim)=N"):
        checkpoints.convert(tmp_path / "bare" / alone(tmp_path / "bare", source), tmp_path / "x")


def test_openais_quantised_experts_are_refused_in_one_line(tmp_path):
    _, kind, config, sizes = FAMILIES["gpt-oss"]
    stem = "block.1.mlp.mlp1_weight"
    saved(tmp_path / "hf", kind, config, sizes, "1GB")
    torch.save(quantised(openais(state_of(tmp_path / "hf")), stem, "."), tmp_path / "x.pt")
    with pytest.raises(LayoutError, match=rf"^{stem}.(blocks|scales): experts in MXFP4"):
        checkpoints.convert(tmp_path / "x.pt", tmp_path / "flax")


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Phi", {"qk_layernorm": True}, "qk_layernorm (True) of phi is not supported, only False"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm (True) of cohere is not supported, only False"),
        ("OPT", {"word_embed_proj_dim": 8, "ffn_dim": 24}, "word_embed_proj_dim (8) of opt "),
        ("Falcon", {"new_decoder_architecture": True}, "new_decoder_architecture (True) of falcon is not supported"),
    ],
)
def test_the_value_of_the_config_that_changes_a_familys_names_is_named(tmp_path, kind, changes, reason):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{kind}Config")(vocab_size=24, max_position_embeddings=32, **sizes, **changes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / "in")
    with pytest.raises(LayoutError, match=f"^config.json: {re.escape(reason)}.*; the names fit no layout; "):
        checkpoints.convert(tmp_path / "in", tmp_path / "out")
