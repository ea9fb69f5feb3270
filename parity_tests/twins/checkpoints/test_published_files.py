"""Files as their authors publish them: converted, loaded in both backends, with the logits of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_parity.frameworks.torch.running.promotion import promoted

from ...support.files import adapter_files, gguf_files, quantised_files
from ...support.models import hf_folders

T = transformers
IDS = np.random.default_rng(7).integers(1, 31, (2, 5))


def logits_of(folder: Path, kind: Any) -> np.ndarray:
    """Return the logits of a folder of `transformers`, all of it in float64."""
    with promoted(), torch.no_grad():
        model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        return model.eval()(torch.from_numpy(IDS)).logits.numpy()


def assert_loads(source: Path, wanted: np.ndarray, target: Path, **options: Any) -> None:
    """Convert a source to float64 for each backend, and hold the logits there against the wanted ones."""
    for side, package in (("torch", torch_attn), ("flax", jax_attn)):
        folder = target / side
        checkpoints.convert(source, folder, to_layout=side, dtype="f64", **options)
        assert checkpoints.verify(source, folder).passed
        assert_close(run(package, folder), wanted)


def run(package: Any, folder: Path) -> np.ndarray:
    with jax.enable_x64(True), torch.no_grad():
        model = package.DecoderModel.from_pretrained(folder)
        return np.asarray(model(torch.from_numpy(IDS) if package is torch_attn else IDS))


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-12 * np.abs(wanted).max()


MIXTRAL = {**hf_folders.SLIDING, "num_local_experts": 3, "num_experts_per_tok": 2}


def mixtral(folder: Path, *, fused: bool) -> None:
    model = hf_folders.saved(folder, T.MixtralForCausalLM, T.MixtralConfig, MIXTRAL, "1GB")
    if fused:
        model.save_pretrained(folder, save_original_format=False)


def test_mixtral_with_fused_experts_loads(tmp_path):
    mixtral(tmp_path / "fused", fused=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in checkpoints.read(tmp_path / "fused")
    assert checkpoints.inspect(tmp_path / "fused").layout == "hf-mixtral"
    for package in (torch_attn, jax_attn):
        package.DecoderModel.from_pretrained(tmp_path / "fused")
    assert_loads(tmp_path / "fused", logits_of(tmp_path / "fused", T.MixtralForCausalLM), tmp_path)


def test_mixtral_with_fused_experts_comes_back(tmp_path):
    mixtral(tmp_path / "fused", fused=True)
    mixtral(tmp_path / "apart", fused=False)
    fused, apart = checkpoints.read(tmp_path / "fused"), checkpoints.read(tmp_path / "apart")
    for source in ("fused", "apart"):
        checkpoints.convert(tmp_path / source, tmp_path / f"{source}-flax")
        checkpoints.convert(tmp_path / f"{source}-flax", tmp_path / f"{source}-back", to_layout="hf-mixtral")
        for file in (tmp_path / source).glob("model*"):
            assert (tmp_path / f"{source}-back" / file.name).read_bytes() == file.read_bytes()
        for value, wanted in ((1, fused), (0, apart)):
            there = tmp_path / f"{source}-{value}"
            checkpoints.convert(tmp_path / f"{source}-flax", there, to_layout="hf-mixtral", settings={"fused": value})
            assert hf_folders.equal(checkpoints.read(there), wanted)


def deepseek_v3(folder: Path) -> None:
    """Save a DeepSeek V3 with the layer that predicts further tokens, as every published one has it."""
    _, kind, config, sizes = hf_folders.FAMILIES["deepseek-v3"]
    hf_folders.saved(folder, kind, config, {**sizes, "num_nextn_predict_layers": 1}, "1GB")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    last = {name: one.clone() + 1 for name, one in state.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2.", "layers.3."): one for name, one in last.items()}
    width = state["model.norm.weight"].shape[0]
    more["model.layers.3.eh_proj.weight"] = torch.randn(width, 2 * width)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"model.layers.3.{name}.weight"] = torch.randn(width)
    for name in ("embed_tokens", "shared_head.head"):
        more[f"model.layers.3.{name}.weight"] = torch.randn(31, width)
    safetensors.torch.save_file(state | more, folder / "model.safetensors", {"format": "pt"})


def test_deepseek_v3_loads_without_its_prediction_layer(tmp_path):
    source = tmp_path / "hf"
    deepseek_v3(source)
    assert checkpoints.inspect(source).layout == "hf-deepseek"
    planned = checkpoints.plan(source, tmp_path / "x")
    (note,) = [note for note in planned.notes if note.startswith("left out")]
    assert note.startswith("left out, as it predicts further tokens")
    assert "tensors: " in note
    assert "model.layers.3." in note
    assert planned.selection.count_left_out == sum("layers.3." in name for name in checkpoints.read(source))
    _, kind, *_ = hf_folders.FAMILIES["deepseek-v3"]
    assert_loads(source, logits_of(source, kind), tmp_path)
    for package in (torch_attn, jax_attn):
        package.DecoderModel.from_pretrained(source)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_gemma_loads_without_towers_and_keys_that_no_layer_reads(tmp_path, name):
    source = tmp_path / "hf"
    _, kind, config, sizes = hf_folders.FAMILIES[name]
    hf_folders.saved(source, kind, config, sizes, "1GB")
    wanted = logits_of(source, kind)
    state = safetensors.torch.load_file(source / "model.safetensors")
    state = {key.replace("model.", "model.language_model.", 1): one for key, one in state.items()}
    unread = {
        key.replace(f"layers.{layer}.", f"layers.{layer + 2}."): one.clone() + 1
        for key, one in state.items()
        for layer in (0, 1)
        if f"layers.{layer}.self_attn." in key and any(part in key for part in ("k_proj", "v_proj", "k_norm"))
    }
    assert not state.keys() & unread.keys()
    towers = {
        f"model.{part}.w.weight": torch.ones(2)
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    }
    safetensors.torch.save_file(state | unread | towers, source / "model.safetensors", {"format": "pt"})
    keys = json.loads((source / "config.json").read_text())
    whole = {"model_type": name, "text_config": keys, "vision_config": {}, "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(whole))
    planned = checkpoints.plan(source, tmp_path / "x")
    notes = [note for note in planned.notes if note.startswith("left out")]
    assert [note.partition(":")[0] for note in sorted(notes)] == [
        "left out, as it is no part of the text model, which alone is converted",
        "left out, as its layer reads the keys and values of an earlier one",
    ]
    assert "layers.2.self_attn.k_proj" in "".join(notes)
    assert planned.selection.count_left_out == len(unread) + len(towers)
    assert_loads(source, wanted, tmp_path)
    for package in (torch_attn, jax_attn):
        package.DecoderModel.from_pretrained(source)


GEMMA3 = {
    "text_config": {**hf_folders.SLIDING, "model_type": "gemma3_text", "eos_token_id": 3},
    "vision_config": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}


@pytest.mark.parametrize("spelling", ["model.language_model.", "language_model.model."])
def test_gemma_3_loads_without_its_vision_tower(tmp_path, spelling):
    source = tmp_path / "hf"
    hf_folders.saved(source, T.Gemma3ForConditionalGeneration, T.Gemma3Config, GEMMA3, "1GB")
    wanted = logits_of(source, T.Gemma3ForConditionalGeneration)
    old = {"model.language_model.": "language_model.model.", "model.vision": "vision", "model.multi": "multi"}
    new = {ours: theirs for theirs, ours in old.items()}
    state = safetensors.torch.load_file(source / "model.safetensors")
    swaps = new if spelling.startswith("model.") else old
    for begin, other in swaps.items():
        state = {
            other + name.removeprefix(begin) if name.startswith(begin) else name: one for name, one in state.items()
        }
    assert any(name.startswith(spelling) for name in state)
    safetensors.torch.save_file(state, source / "model.safetensors", {"format": "pt"})
    planned = checkpoints.plan(source, tmp_path / "x")
    (note,) = [note for note in planned.notes if note.startswith("left out")]
    assert note.startswith("left out, as it is no part of the text model")
    assert "vision_tower" in note
    assert "multi_modal_projector" in note
    assert_loads(source, wanted, tmp_path)
    for package in (torch_attn, jax_attn):
        package.DecoderModel.from_pretrained(source)
    for middle in (source, tmp_path / "torch"):
        back = tmp_path / f"back of {middle.name}"
        checkpoints.convert(middle, back, to_layout="hf-gemma")
        assert json.loads((back / "config.json").read_text())["model_type"] == "gemma3_text"
        assert_close(logits_of(back, T.AutoModelForCausalLM), wanted)
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")
    assert len(checkpoints.read(tmp_path / "same.npz")) == len(state)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = {**hf_folders.GROUPED, "hidden_size": 32, "intermediate_size": 48}


@pytest.mark.parametrize("name", ["gptq shuffled", "awq", "nf4 nested", "int8"])
def test_a_quantised_llama_gives_the_logits_of_its_exact_weights(tmp_path, name):
    make, scheme = quantised_files.SCHEMES[name]
    hf_folders.saved(tmp_path / "hf", T.LlamaForCausalLM, T.LlamaConfig, LLAMA, "1GB")
    state = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    exact, packed = {}, {}
    for key, array in state.items():
        stem = key.removesuffix(".weight")
        if stem.rpartition(".")[2] not in PROJECTIONS:
            exact[key] = packed[key] = array
            continue
        tensors, exact[key] = make(array)
        packed |= {f"{stem}.{ending}": tensor for ending, tensor in tensors.items()}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for folder, arrays, more in (("exact", exact, {}), ("packed", packed, {"quantization_config": scheme})):
        (tmp_path / folder).mkdir()
        arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        safetensors.numpy.save_file(arrays, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    wanted = logits_of(tmp_path / "exact", T.LlamaForCausalLM)
    assert_loads(tmp_path / "packed", wanted, tmp_path, dequantize=True)
    for package in (torch_attn, jax_attn):
        with pytest.raises(CheckpointError, match="--to same --dequantize makes a folder"):
            package.DecoderModel.from_pretrained(tmp_path / "packed")


def test_a_llama_with_an_adapter_gives_the_logits_of_the_merged_one(tmp_path):
    model = hf_folders.saved(tmp_path / "hf", T.LlamaForCausalLM, T.LlamaConfig, hf_folders.GROUPED, "1GB")
    state = {name: weight for name, weight in model.state_dict().items() if name.endswith("_proj.weight")}
    tensors = {}
    for name, weight in state.items():
        layer, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
        tensors |= adapter_files.matrices(layer, inputs, outputs)
        weight.data += torch.from_numpy(adapter_files.product(tensors, layer)).to(weight.dtype)
    adapter = adapter_files.save(tmp_path / "adapter", tensors)
    model.save_pretrained(tmp_path / "merged")
    wanted = logits_of(tmp_path / "merged", T.LlamaForCausalLM)
    for side, package in (("torch", torch_attn), ("flax", jax_attn)):
        checkpoints.convert(tmp_path / "hf", tmp_path / side, to_layout=side, dtype="f64", adapter=adapter)
        found = run(package, tmp_path / side)
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_llama_in_gguf_gives_the_logits_of_its_numbers(tmp_path, kind):
    sizes = {**hf_folders.GROUPED, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    model = hf_folders.saved(tmp_path / "hf", T.LlamaForCausalLM, T.LlamaConfig, sizes, "1GB")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    state = {name: weight.float() for name, weight in model.state_dict().items()}
    arrays = {name: weight.numpy() for name, weight in state.items()}
    source = gguf_files.converted(tmp_path / "x.gguf", arrays, config, kind)
    for weight in state.values():
        if kind != "F32" and weight.ndim == 2:
            weight.copy_(torch.from_numpy(gguf_files.through(weight.numpy(), kind)))
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "exact")
    assert_loads(source, logits_of(tmp_path / "exact", T.LlamaForCausalLM), tmp_path, dequantize=kind != "F32")
