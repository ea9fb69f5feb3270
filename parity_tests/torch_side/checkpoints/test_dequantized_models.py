"""Quantised folders of gpt-oss and DeepSeek V3, dequantised: against what `transformers` makes of the same files."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import torch_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints import planning, verification
from attn_bridge.checkpoints.containers.base import CheckpointError

from ...support.models.hf_folders import FAMILIES, equal, saved
from ...support.models.originals import openais

IDS = torch.arange(14).reshape(2, 7) % 11
BLOCK = [8, 4]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


def packed(shape, seed):
    """Return MXFP4 for experts of (experts, rows, columns)."""
    generator = torch.Generator().manual_seed(seed)
    experts, rows, columns = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 127, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def gpt_oss(folder):
    """Save a gpt-oss whose experts are in MXFP4, as it is published; return the model without its experts."""
    _, kind, config, sizes = FAMILIES["gpt-oss"]
    sizes = {**sizes, "hidden_size": 32, "intermediate_size": 64}
    model = saved(folder, kind, config, sizes, "1GB")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for seed, name in enumerate([name for name in state if name.endswith("_proj") and "experts" in name]):
        experts, width, out = state.pop(name).shape
        state[f"{name}_blocks"], state[f"{name}_scales"] = packed((experts, out, width), seed)
    write(folder, state, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    return model


def deepseek(folder):
    """Save a DeepSeek V3 whose projections are float8 with scales, as it is published; return it without them."""
    _, kind, config, sizes = FAMILIES["deepseek-v3"]
    model = saved(folder, kind, config, {**sizes, "q_lora_rank": 8, "kv_lora_rank": 8}, "1GB")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for name, weight in list(state.items()):
        rows, columns = weight.shape[0], weight.shape[-1]
        is_whole = weight.ndim == 2 and not (rows % BLOCK[0] or columns % BLOCK[1])
        if "_proj" in name and name.endswith("weight") and is_whole:
            tiles = weight.reshape(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
            scales = tiles.abs().amax((1, 3)) / 448
            state[name] = (tiles / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = scales
    write(folder, state, {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"})
    return model


def write(folder, state, said):
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))


def official_gpt_oss(folder):
    """Load a gpt-oss in MXFP4 as `transformers` does where there is no GPU for it."""
    said = transformers.Mxfp4Config(dequantize=True)
    return transformers.GptOssForCausalLM.from_pretrained(folder, quantization_config=said, dtype=torch.float32)


def official_deepseek(folder):
    """Load a DeepSeek V3 dequantised by `transformers`, whose own loading needs `accelerate`."""
    step = Fp8Dequantize(None)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for scales in [name for name in state if name.endswith("_scale_inv")]:
        name = scales.removesuffix("_scale_inv")
        state[name] = step.convert({"weight": state[name], "weight_scale_inv": state.pop(scales)})["weight"]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    plain = folder.parent / "official"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, plain / "model.safetensors", {"format": "pt"})
    return transformers.DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32)


MODELS = {"gpt-oss": (gpt_oss, official_gpt_oss), "deepseek-v3": (deepseek, official_deepseek)}


@pytest.mark.parametrize("word", DTYPES)
def test_mxfp4_is_bit_for_bit_what_transformers_unpacks(tmp_path, word):
    blocks, _ = packed((4, 70, 96), 3)
    scales = torch.arange(4 * 70 * 3).remainder(255).to(torch.uint8).reshape(4, 70, 3)  # 255 is NaN, and not there
    torch.save({"a_blocks": blocks, "a_scales": scales}, tmp_path / "x.pt")
    checkpoints.convert(tmp_path / "x.pt", tmp_path / "y.safetensors", to_layout="same", dequantize=True, dtype=word)
    found = safetensors.torch.load_file(tmp_path / "y.safetensors")["a"]
    assert found.dtype == DTYPES[word]
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=DTYPES[word])
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("word", ["f32", "f64"])
def test_float8_is_bit_for_bit_what_torch_multiplies_in_float64(tmp_path, kind, word):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(0, 256, (150, 260), generator=generator, dtype=torch.uint8).view(kind)
    scales = torch.exp(3 * torch.randn(2, 3, generator=generator))
    safetensors.torch.save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "x.safetensors")
    checkpoints.convert(
        tmp_path / "x.safetensors", tmp_path / "y.safetensors", to_layout="same", dequantize=True, dtype=word
    )
    found = safetensors.torch.load_file(tmp_path / "y.safetensors")["w"]
    whole = scales.double().repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :260]
    wanted = (weight.double() * whole).to(DTYPES[word])
    assert found.isnan().any()
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("name", MODELS)
def test_a_dequantised_folder_gives_the_logits_of_transformers(tmp_path, name):
    make, official = MODELS[name]
    make(tmp_path / "hf")
    there = checkpoints.convert(tmp_path / "hf", tmp_path / "x", to_layout="same", dtype="f32", dequantize=True).target
    assert checkpoints.verify(tmp_path / "hf", there).passed
    _, kind, *_ = FAMILIES[name]
    theirs = official(tmp_path / "hf").eval()
    ours = kind.from_pretrained(there, dtype=torch.float32).eval()
    assert not hasattr(ours.config, "quantization_config")
    one, two = ours.state_dict(), theirs.state_dict()
    assert one.keys() == two.keys()
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
    with torch.no_grad():
        wanted = theirs(IDS).logits
        assert torch.equal(ours(IDS).logits, wanted)
        for layout in ("same", "flax", "torch"):
            folder = tmp_path / layout
            checkpoints.convert(tmp_path / "hf", folder, to_layout=layout, dtype="f32", dequantize=True)
            found = torch_attn.DecoderModel.from_pretrained(folder)(IDS)
            assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["flax", "torch"])
def test_one_step_writes_the_bytes_of_two(tmp_path, monkeypatch, name, layout):
    make, _ = MODELS[name]
    make(tmp_path / "hf")
    middle = checkpoints.convert(tmp_path / "hf", tmp_path / "same", to_layout="same", dequantize=True).target
    wanted = checkpoints.convert(middle, tmp_path / "two", to_layout=layout)
    monkeypatch.setattr(verification, "MIN", 512)
    most = planning.IDLE + 4 * 512
    found = checkpoints.convert(tmp_path / "hf", tmp_path / "one", to_layout=layout, dequantize=True, max_memory=most)
    assert found.digests == wanted.digests
    assert checkpoints.verify(tmp_path / "hf", found.target, max_memory=most).passed
    whole = checkpoints.convert(tmp_path / "hf", tmp_path / "whole", to_layout=layout, dequantize=True)
    assert found.changed == whole.changed
    assert bool(whole.changed) == (name == "deepseek-v3")  # MXFP4 is exact in bfloat16


def test_openais_own_files_in_mxfp4_become_those_of_transformers(tmp_path):
    model = gpt_oss(tmp_path / "hf")
    wanted = checkpoints.convert(tmp_path / "hf", tmp_path / "x", to_layout="hf-gpt-oss", dequantize=True).target
    quantised = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    state = openais(model.state_dict())
    for i in range(model.config.num_hidden_layers):
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            own = f"block.{i}.mlp.mlp{number}_weight"
            del state[own]
            for part in ("blocks", "scales"):
                state[f"{own}.{part}"] = quantised[f"model.layers.{i}.mlp.experts.{name}_{part}"]
    (tmp_path / "openai").mkdir()
    safetensors.torch.save_file(
        {key: one.contiguous().clone() for key, one in state.items()}, tmp_path / "openai" / "model.safetensors"
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": model.config.head_dim}
    (tmp_path / "openai" / "config.json").write_text(json.dumps(heads))
    found = checkpoints.convert(tmp_path / "openai", tmp_path / "y", to_layout="hf-gpt-oss", dequantize=True).target
    assert equal(checkpoints.read(found), checkpoints.read(wanted))


def test_model_that_rounds_in_each_call_is_not_run_without_rounding(tmp_path):
    """Such a file has weights in floating point, which BitNet rounds to three values when it is called."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.BitNetForCausalLM(transformers.BitNetConfig(**sizes, **ids, num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    torch_attn.DecoderModel.from_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    scheme = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (tmp_path / "config.json").write_text(json.dumps({**keys, "quantization_config": scheme}))
    with pytest.raises(
        CheckpointError, match=r"is quantised by bitnet \(config.json\), whose layers round weights and "
    ):
        torch_attn.DecoderModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_loading_a_quantised_folder_names_the_command(tmp_path, name):
    MODELS[name][0](tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"holds quantised weights \(.*\).*--to same --dequantize") as caught:
        torch_attn.DecoderModel.from_pretrained(tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert f"attn-bridge convert {tmp_path / 'hf'} DST" in str(caught.value)
