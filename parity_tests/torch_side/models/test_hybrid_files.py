"""Kimi Linear and OLMo hybrid: every form of their files there and back, and every key of their configs."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from huggingface_hub.errors import StrictDataclassError

import torch_attn
from attn_bridge import checkpoints
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ...support.models.decoder_oracle import DECODERS, make, run

NAMES = ("kimi-linear", "kimi-linear-without-latent-queries", "olmo-hybrid", "olmo-hybrid-with-positions")
FORMS = ("saved", "published", "memory")


def saved(name: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run(name).folder / "model.safetensors")


def memory(name: str) -> dict[str, np.ndarray]:
    state = {key: to_numpy(one) for key, one in run(name).model.state_dict().items()}
    if run(name).model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def published(name: str) -> dict[str, np.ndarray]:
    """Return the tensors under the names of the files that were published, by transformers' conversion_mapping."""
    if name.startswith("kimi"):  # where transformers saves the dense layers as those of experts
        dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
        return {dense.sub(r"mlp.\1_proj", key): one for key, one in saved(name).items()}
    tensors: dict[str, np.ndarray] = {}
    state = memory(name)
    for key, one in state.items():
        block = key.partition(".mlp.")[0].rpartition(".linear_attn.")[0] or ".".join(key.split(".")[:3])
        is_linear = f"{block}.linear_attn.A_log" in state
        if key.endswith("linear_attn.conv1d.weight"):
            widths = [len(state[f"{block}.linear_attn.{part}_proj.weight"]) for part in "qkv"]
            for part, piece in zip("qkv", np.split(one, np.cumsum(widths)[:2]), strict=True):
                tensors[f"{block}.linear_attn.{part}_conv1d.weight"] = np.ascontiguousarray(piece)
            continue
        if is_linear:
            key = key.replace("input_layernorm", "attention_layer_norm")
            key = key.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[key] = one
    return tensors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_a_file_loads_and_comes_back_bit_for_bit(tmp_path, name, form):
    oracle = run(name)
    tensors = {"saved": saved, "published": published, "memory": memory}[form](name)
    folders = [tmp_path / one for one in ("theirs", "ours", "back")]
    folders[0].mkdir()
    (folders[0] / "config.json").write_bytes((oracle.folder / "config.json").read_bytes())
    safetensors.numpy.save_file(tensors, folders[0] / "model.safetensors", {"format": "pt"})
    model = torch_attn.DecoderModel.from_pretrained(folders[0])
    given = {"attention_mask": torch.tensor(oracle.mask), "positions": torch.tensor(oracle.positions)}
    with torch.no_grad():
        logits = to_numpy(model(torch.tensor(oracle.ids), **given))
    assert np.abs(logits - oracle.logits)[oracle.mask].max() <= 1e-10 * np.abs(oracle.logits[oracle.mask]).max()
    layout = "hf-kimi-linear" if name.startswith("kimi") else "hf-olmo-hybrid"
    checkpoints.convert(folders[0], folders[1], to_layout="torch")
    checkpoints.convert(folders[1], folders[2], to_layout=layout)
    back = safetensors.numpy.load_file(folders[2] / "model.safetensors")
    assert back.keys() == tensors.keys()
    for key, one in tensors.items():
        assert (back[key].dtype, back[key].shape) == (one.dtype, one.shape)
        np.testing.assert_array_equal(back[key], one)


def test_a_block_without_a_kernel_is_refused(tmp_path):
    tensors = saved("olmo-hybrid")
    del tensors["model.layers.0.linear_attn.k_conv1d.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((run("olmo-hybrid").folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.linear_attn\.k_conv1d\.weight"):
        torch_attn.DecoderModel.from_pretrained(tmp_path)


OTHERS: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu"],
    "layer_types": [["full_attention", "linear_attention"] * 2, ["linear_attention", "full_attention"] * 2],
    "mlp_layer_types": [["sparse"] * 4, ["dense", "sparse"] * 2, ["dense"] * 4],
    "rope_parameters": [
        None,
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
        {"rope_type": "default", "rope_theta": None},
    ],
    "q_lora_rank": [None, 7],
    "num_key_value_heads": [None, 1, 2, 4],
    "num_hidden_layers": [1, 2, 3],
    "linear_attn_config": [{"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 2}],
    "first_k_dense_replace": [0, 2],
    "head_dim": [4, 8],
    "moe_layer_freq": [2],
    "moe_router_activation_func": ["softmax"],
    "mla_use_nope": [False],
    "tie_word_embeddings": [False, True],
}
"""Other values of a key, also of keys that published files have; those of a number or bool are derived."""

CANT_RUN = (ValueError, TypeError, RuntimeError, IndexError, AssertionError, AttributeError, StrictDataclassError)
"""Errors of `transformers` where a value is none of its own."""

REFUSED = {
    "kimi_linear": {
        *("hidden_act", "tie_word_embeddings", "moe_layer_freq", "moe_router_activation_func", "mla_use_nope"),
        "num_experts_per_token",  # more than the chosen groups have
    },
    "olmo_hybrid": {"hidden_act"},
}
"""Keys of which some value is refused."""


def others(key: str, value: Any) -> list[Any]:
    if key in OTHERS:
        return [one for one in OTHERS[key] if one != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    return [0.5 * value + 0.01] if isinstance(value, float) else []


@pytest.mark.full
@pytest.mark.parametrize("name", ["kimi-linear", "olmo-hybrid-with-positions"])
def test_a_key_with_another_value_is_computed_alike_or_refused(tmp_path, name):
    kind, sizes = DECODERS[name]
    given = {key: value for key, value in sizes.items() if key not in ("layer_types", "rope_scaling")}
    keys = {**run(name).model.config.to_dict(), **dict.fromkeys(OTHERS)}
    outcomes: dict[str, dict[str, str]] = {"equal": {}, "refused": {}}
    for key, value in keys.items():
        for number, other in enumerate(others(key, value)):
            folder = tmp_path / f"{key}-{number}"
            try:
                with promoted(), torch.no_grad():
                    model = make(kind, {**given, key: other})
                    wanted = to_numpy(model(IDS, use_cache=False).logits)
            except CANT_RUN:
                continue
            model.save_pretrained(folder)
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), key: other}))
            try:
                ours = torch_attn.DecoderModel.from_pretrained(folder)
            except ValueError as error:
                outcomes["refused"][f"{key}={other}"] = str(error)
                continue
            with torch.no_grad():
                found = to_numpy(ours(IDS))
            assert np.abs(found - wanted).max() <= 1e-10 * np.abs(wanted).max(), (key, other)
            outcomes["equal"][f"{key}={other}"] = ""
    refused = {shown.partition("=")[0] for shown in outcomes["refused"]}
    assert refused == REFUSED[kind], outcomes["refused"]
    assert len(outcomes["equal"]) >= 30


IDS = torch.arange(1, 29).reshape(2, 14)
