"""Folders as makers of models, and the book, write them: `DecoderModel` reads them in both backends.

Logits are those of the same model of `transformers` in float64.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ...support.calls import cover
from ...support.models import originals
from ...support.models.decoder_oracle import TOKENS, VOCABULARY, lift, make

PACKAGES = {"torch": torch_attn, "flax": jax_attn}
IDS = np.random.default_rng(7).integers(0, VOCABULARY, (2, TOKENS))

pytestmark = pytest.mark.usefixtures("x64")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
META = {
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": VOCABULARY,
    "multiple_of": 4,
    "ffn_dim_multiplier": 0.3,  # int(0.3 * 64) = 19, rounded up to 20
    "norm_eps": 1e-5,
}
MISTRAL = {key: value for key, value in META.items() if key not in ("multiple_of", "ffn_dim_multiplier")}
MISTRAL |= {"hidden_dim": 20, "head_dim": 8}
OPENAI = {
    "num_hidden_layers": 3,
    "num_experts": 5,
    "experts_per_token": 2,
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "swiglu_limit": 3.5,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 4,
    "initial_context_length": 2048,  # OpenAI's code asks that channels of a head are on either side of the ramp
    "rope_theta": 100000,
    "rope_scaling_factor": 4.0,
    "rope_ntk_alpha": 2,
    "rope_ntk_beta": 24.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "truncate": False,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
META_SCALED = {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}

BOOK = {
    "vocab_size": VOCABULARY,
    "context_length": 64,
    "emb_dim": 24,
    "n_heads": 4,
    "n_layers": 3,
    "hidden_dim": 20,
    "n_kv_groups": 2,
    "rope_base": 300.0,
    "dtype": "torch.float64",
}
BOOK_LLAMA = {
    **BOOK,
    "rope_freq": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_length": 32,
    },
}
BOOK_QWEN = {**BOOK, "head_dim": 8, "qk_norm": True}
BOOK_MOE = {**BOOK_QWEN, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
BOOK_GEMMA = {
    **BOOK_QWEN,
    "rope_local_base": 70.0,
    "sliding_window": 4,
    "layer_types": KINDS,
    "query_pre_attn_scalar": 5,
}
del BOOK_MOE["hidden_dim"]

QWEN = {**SIZES, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 300.0}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
GEMMA = {
    **QWEN,
    "sliding_window": 4,
    "query_pre_attn_scalar": 5,
    "layer_types": KINDS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}

CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "meta llama 2": ("llama", {**SIZES, "rope_theta": 10000.0}, "meta", {**META, "vocab_size": -1}),
    "meta llama 3": ("llama", {**SIZES, "rope_theta": 500000.0}, "meta", {**META, "rope_theta": 500000.0}),
    "meta llama 3.1": (
        "llama",
        {**SIZES, "rope_theta": 500000.0, "rope_scaling": META_SCALED},
        "meta",
        {**META, "rope_theta": 500000.0, "use_scaled_rope": True},
    ),
    "mistral": (
        "mistral",
        {**SIZES, "head_dim": 8, "sliding_window": 4, "rope_theta": 10000.0},
        "meta",
        {**MISTRAL, "sliding_window": 4},
    ),
    "mistral without a window": (
        "mistral",
        {**SIZES, "head_dim": 8, "sliding_window": None, "rope_theta": 1000000.0},
        "meta",
        MISTRAL,
    ),
    "mixtral": (
        "mixtral",
        {**SIZES, **EXPERTS, "head_dim": 8, "num_local_experts": 5, "rope_theta": 500.0},
        "meta",
        {**MISTRAL, "rope_theta": 500.0, "moe": {"num_experts": 5, "num_experts_per_tok": 2}},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **SIZES,
            **EXPERTS,
            "head_dim": 8,
            "num_local_experts": 5,
            "sliding_window": 4,
            "swiglu_limit": 3.5,
            "rope_theta": 100000.0,
            "rope_scaling": YARN,
        },
        "openai",
        OPENAI,
    ),
    "the book's llama 3": (
        "llama",
        {
            **SIZES,
            "rope_theta": 300.0,
            "rope_scaling": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 32},
        },
        "book llama3",
        BOOK_LLAMA,
    ),
    "the book's llama 3, unscaled": ("llama", {**SIZES, "rope_theta": 300.0}, "book llama3", BOOK),
    "the book's qwen 3": ("qwen3", QWEN, "book qwen3", BOOK_QWEN),
    "the book's qwen 3, tied": ("qwen3", {**QWEN, "tie_word_embeddings": True}, "book qwen3", BOOK_QWEN),
    "the book's qwen 3 with experts": (
        "qwen3_moe",
        {**QWEN, **EXPERTS, "num_experts": 5, "moe_intermediate_size": 6, "norm_topk_prob": True},
        "book qwen3",
        BOOK_MOE,
    ),
    "the book's gemma 3": ("gemma3_text", GEMMA, "book gemma3", BOOK_GEMMA),
}


@functools.cache
def made(name: str) -> tuple[Path, Path, np.ndarray]:
    """Return the folder of `transformers`, that of the original, and the logits."""
    model_type, sizes, how, config = CASES[name]
    root = Path(tempfile.mkdtemp(prefix="originals-"))
    with promoted(), torch.no_grad():
        model = make(model_type, sizes)
        logits = to_numpy(model(torch.tensor(IDS), use_cache=False).logits)
    model.save_pretrained(root / "hf")
    state = originals.state_of(root / "hf")
    if how == "meta":
        return root / "hf", originals.write(root / "own", originals.meta(state, 4, 2), config, params=True), logits
    theirs = originals.openais(state) if how == "openai" else originals.books(state, how.split()[1])
    return root / "hf", originals.write(root / "own", theirs, config), logits


def logits_of(side: str, folder: Path) -> np.ndarray:
    model = PACKAGES[side].DecoderModel.from_pretrained(folder)
    if side == "torch":
        with torch.no_grad():
            return to_numpy(model(torch.tensor(IDS)))
    return np.asarray(model(jnp.asarray(IDS)))


@cover.rotated(("name", "side"), list(CASES), list(PACKAGES))
def test_an_original_has_the_logits_of_transformers(name, side):
    _, own, wanted = made(name)
    found = logits_of(side, own)
    assert found.dtype == wanted.dtype == np.float64
    assert np.abs(found - wanted).max() <= 1e-10 * np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_an_original_becomes_a_folder_of_transformers(tmp_path, name):
    _, own, wanted = made(name)
    layout = "hf-" + CASES[name][0].replace("_", "-")
    checkpoints.convert(own, tmp_path / "hf", to_layout=layout)
    with promoted(), torch.no_grad():
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", attn_implementation="eager", output_loading_info=True
        )
        lift(theirs)
        found = to_numpy(theirs(torch.tensor(IDS), use_cache=False).logits)
    assert not any(info.values()), info
    assert np.abs(found - wanted).max() <= 1e-10 * np.abs(wanted).max()


@cover.rotated(("name", "layout"), ["meta llama 2", "mixtral", "gpt-oss", "the book's qwen 3, tied"], ["flax", "torch"])
def test_an_original_becomes_a_folder_of_ours_that_loads(tmp_path, name, layout):
    _, own, wanted = made(name)
    checkpoints.convert(own, tmp_path / "ours", to_layout=layout)
    for side in PACKAGES:
        assert np.abs(logits_of(side, tmp_path / "ours") - wanted).max() <= 1e-10 * np.abs(wanted).max()


@cover.rotated(("vocabulary", "parts", "side"), [(True, 2), (False, 4), (True, 4), (False, 2)], list(PACKAGES))
def test_files_of_several_devices_are_put_together(tmp_path, vocabulary, parts, side):
    _, own, wanted = made("meta llama 3")
    state = torch.load(own / "consolidated.00.pth", weights_only=True)
    config = {"vocab_size": VOCABULARY + 1} | json.loads((own / "params.json").read_text())
    state = {name: _even(name, tensor) for name, tensor in state.items()}  # so that it can be cut into parts
    folder = originals.write(tmp_path / "whole", state, {**config, "vocab_size": VOCABULARY + 1}, params=True)
    whole = checkpoints.read(folder / "consolidated.00.pth")
    for number, part in enumerate(originals.split(state, parts, vocabulary=vocabulary)):
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    found = checkpoints.read(folder)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in whole)
    assert np.abs(logits_of(side, folder)[..., :-1] - wanted).max() <= 1e-10 * np.abs(wanted).max()


def _even(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]]) if len(tensor) == VOCABULARY else tensor


def test_a_mistral_in_safetensors_is_read(tmp_path):
    _, own, wanted = made("mistral")
    (tmp_path / "params.json").write_bytes((own / "params.json").read_bytes())
    checkpoints.convert(own / "consolidated.00.pth", tmp_path / "consolidated.safetensors", to_layout="same")
    assert np.abs(logits_of("torch", tmp_path) - wanted).max() <= 1e-10 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["the book's llama 3", "the book's qwen 3 with experts", "the book's gemma 3"])
def test_transformers_config_works_with_the_books_weights(tmp_path, name):
    hf, own, wanted = made(name)
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    torch.save(originals.state_of(own), tmp_path / "model.pth")
    assert np.abs(logits_of("torch", tmp_path) - wanted).max() <= 1e-10 * np.abs(wanted).max()


def test_an_older_books_mask_is_checked_and_dropped(tmp_path):
    _, own, wanted = made("the book's llama 3")
    state = originals.state_of(own) | {"mask": torch.ones(64, 64).triu(1).bool()}
    folder = originals.write(tmp_path / "right", state, BOOK_LLAMA)
    assert np.abs(logits_of("flax", folder) - wanted).max() <= 1e-10 * np.abs(wanted).max()
    folder = originals.write(tmp_path / "wrong", {**state, "mask": torch.ones(64, 64).triu(2).bool()}, BOOK_LLAMA)
    with pytest.raises(CheckpointError, match="mask"):
        logits_of("flax", folder)


def test_a_book_model_with_a_shared_head_is_tied(tmp_path):
    _, own, wanted = made("the book's qwen 3, tied")
    state = originals.state_of(own)
    del state["out_head.weight"]
    for side, package in PACKAGES.items():
        folder = originals.write(tmp_path / side, state, BOOK_QWEN)
        assert package.DecoderModel.from_pretrained(folder).config.tie
        assert np.abs(logits_of(side, folder) - wanted).max() <= 1e-10 * np.abs(wanted).max()


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no heads": ("meta llama 3", {"n_heads": None}, {}, "params.json: params.json lacks n_heads"),
    "layers": ("meta llama 3", {"n_layers": 10**6}, {}, "n_layers (1000000) of params.json must be at most 4096"),
    "wide": ("the book's qwen 3", {"emb_dim": 2**30}, {}, "emb_dim (1073741824) is far too large for weights of"),
    "width": (
        "meta llama 3",
        {"multiple_of": 32},
        {},
        "feed-forward layers are 32 wide by the config, 20 by the weights",
    ),
    "vision": (
        "meta llama 3",
        {"vision_chunk_size": 448},
        {},
        "vision_chunk_size (448) of params.json is not known",
    ),
    "no head": ("meta llama 3", {}, {"output.weight": None}, "missing: output.weight"),
    "no layer": ("mistral", {}, {"layers.1.attention.wk.weight": None}, "missing: layers.1.attention.wk.weight"),
    "quantised": (
        "gpt-oss",
        {},
        {
            "block.0.mlp.mlp1_weight": None,
            "block.0.mlp.mlp1_weight.blocks": torch.zeros(5, 40, 1, 16).byte(),
            "block.0.mlp.mlp1_weight.scales": torch.zeros(5, 40, 1).byte(),
        },
        "block.0.mlp.mlp1_weight.blocks: experts in MXFP4, which can't be rearranged; --dequantize makes bfloat16",
    ),
    "groups": ("the book's llama 3", {"n_kv_groups": None}, {}, "of the book's Llama 3 lacks n_kv_groups"),
    "kinds": ("the book's gemma 3", {"layer_types": KINDS[:2]}, {}, "of the book's Gemma 3 has 2 entries, none for"),
}


@pytest.mark.parametrize("side", PACKAGES)
@pytest.mark.parametrize("case", WRONG)
def test_a_broken_original_is_refused_in_one_line(tmp_path, side, case):
    name, keys, tensors, message = WRONG[case]
    _, own, _ = made(name)
    is_meta = (own / "params.json").exists()
    config = {**json.loads((own / ("params.json" if is_meta else "config.json")).read_text()), **keys}
    state = torch.load(own / "consolidated.00.pth", weights_only=True) if is_meta else originals.state_of(own)
    state = {key: value for key, value in {**state, **tensors}.items() if value is not None}
    folder = originals.write(tmp_path / "x", state, config, params=is_meta)
    with pytest.raises(ValueError, match=r".") as caught:
        PACKAGES[side].DecoderModel.from_pretrained(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
