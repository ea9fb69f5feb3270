"""Folders in the layouts of JAX libraries, read by `from_pretrained` of both twins: the logits of `transformers`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints

from ...support.calls import cover

T = transformers
IDS = np.random.default_rng(3).integers(1, 31, size=(2, 11))
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GEMMA = {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 9}
MODELS = {
    "llama": (T.LlamaForCausalLM, T.LlamaConfig, SIZES),
    "llama-3.1": (T.LlamaForCausalLM, T.LlamaConfig, {**SIZES, "rope_scaling": LLAMA31}),
    "qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config, {**SIZES, "tie_word_embeddings": True}),
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig, {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config, GEMMA),
    "gemma3": (T.Gemma3ForCausalLM, T.Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7}),
}
CASES = [
    *((name, "maxtext", {"scan": scan}) for name in MODELS for scan in (0, 1)),
    *((name, "gemma-linen", {"flat": flat}) for name in ("gemma2", "gemma3") for flat in (0, 1)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return word -> folder of transformers, and its logits."""
    found = {}
    for name, (kind, config, sizes) in MODELS.items():
        model = kind(config(**sizes)).eval()
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            path = tmp_path_factory.mktemp(name) / "hf"
            model.save_pretrained(path)
            found[name] = path, model(torch.from_numpy(IDS)).logits.numpy()
    return found


@cover.rotated(
    ("name", "layout", "settings", "package"),
    [*CASES[::2], *CASES[:0:-2]],  # so that each package reads both forms
    [torch_attn, jax_attn],
)
def test_a_folder_is_read_as_it_is(tmp_path, folders, name, layout, settings, package):
    source, wanted = folders[name]
    there = checkpoints.convert(source, tmp_path / "there", to_layout=layout, settings=settings).target
    assert json.loads((there / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    more = {} if package is torch_attn else {"rngs": nnx.Rngs(0)}
    weights = {}
    for path in (source, there):
        model = package.DecoderModel.from_pretrained(path, **more)
        checkpoint = package.save(model, tmp_path / f"{path.name}.npz") or tmp_path / f"{path.name}.npz"
        weights[path] = {key: array.tobytes() for key, array in checkpoints.read(checkpoint).items()}
    assert weights[there] == weights[source]  # bit for bit, whatever was scaled on the way
    logits = model(torch.from_numpy(IDS)).detach().numpy() if package is torch_attn else np.asarray(model(IDS))
    assert np.abs(logits - wanted).max() < 2e-5 * np.abs(wanted).max()
    (there / "attn-bridge.json").unlink()
    model = package.DecoderModel.from_pretrained(there, **more)  # as the library itself would have written it
    logits = model(torch.from_numpy(IDS)).detach().numpy() if package is torch_attn else np.asarray(model(IDS))
    assert np.abs(logits - wanted).max() < 2e-5 * np.abs(wanted).max()
