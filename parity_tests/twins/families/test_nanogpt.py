"""Files that nanoGPT saves, run by both twins and by a nanoGPT of torch's own linear layers."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.models import families

HEADS, WIDTH, LAYERS, POSITIONS, TOKENS = 3, 24, 2, 10, 64
GPT2 = {"model_type": "gpt2", "vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
GPT2 |= {"n_positions": POSITIONS, "activation_function": "gelu", "tie_word_embeddings": True}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


class Norm(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x):
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.register_buffer("bias", torch.tril(torch.ones(POSITIONS, POSITIONS))[None, None])

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(self.bias[:, :, : x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = Norm(bias), Attention(bias), Norm(bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH, bias=bias), "c_proj": nn.Linear(4 * WIDTH, WIDTH, bias=bias)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(TOKENS, WIDTH), "wpe": nn.Embedding(POSITIONS, WIDTH)}
            | {"h": nn.ModuleList([Block(bias) for _ in range(LAYERS)]), "ln_f": Norm(bias)}
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids):
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def decoder(*, bias):
    """Return the config of the model in ours."""
    config = families.find_decoder(GPT2)
    if bias:
        return config
    norm = config.norm.replace(bias=False)
    blocks = tuple(
        block.replace(
            attention=block.attention.replace(qkv_bias=False, key_bias=False, out_bias=False),
            feed_forward=block.feed_forward.replace(bias=False),
            norm=norm,
        )
        for block in config.blocks
    )
    return dataclasses.replace(config, blocks=blocks, norm=norm)


@pytest.mark.parametrize("bias", [True, False])
def test_both_twins_have_nanogpts_logits(tmp_path, bias):
    torch.manual_seed(7)
    theirs = NanoGPT(bias)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.3 if parameter.ndim == 1 else 0.0, 0.4)
    ids = torch.randint(TOKENS, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
    expected = theirs(ids).detach().numpy()
    torch.save(theirs.state_dict(), tmp_path / "ckpt.pt")
    there = checkpoints.convert(tmp_path / "ckpt.pt", tmp_path / "flax").target
    back = checkpoints.convert(there, tmp_path / "back.pt", to_layout="nanogpt").target
    returned = NanoGPT(bias)
    returned.load_state_dict(torch.load(back, weights_only=True))
    assert np.array_equal(returned(ids).detach().numpy(), expected)
    for source in (tmp_path / "ckpt.pt", there):
        ours = torch_attn.DecoderModel(decoder(bias=bias)).eval()
        torch_attn.checkpoints.load(source, ours)
        np.testing.assert_allclose(ours(ids).detach().numpy(), expected, rtol=1e-4, atol=1e-4)
        flax = jax_attn.DecoderModel(decoder(bias=bias), rngs=nnx.Rngs(0))
        jax_attn.checkpoints.load(source, flax)
        np.testing.assert_allclose(np.asarray(flax(jnp.asarray(ids.numpy()))), expected, rtol=1e-4, atol=1e-4)


def test_a_folder_of_nanogpts_weights_loads_with_a_config_of_gpt2(tmp_path):
    theirs = NanoGPT(True)
    source, folder = tmp_path / "nano", tmp_path / "hf"
    source.mkdir()
    torch.save(theirs.state_dict(), source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps(GPT2))
    checkpoints.convert(source, folder, to_layout="hf-gpt2")
    ids = torch.arange(POSITIONS)[None]
    ours = torch_attn.DecoderModel.from_pretrained(folder).eval()
    np.testing.assert_allclose(ours(ids).detach().numpy(), theirs(ids).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_file_of_its_training_has_its_config(tmp_path):
    theirs = NanoGPT(True)
    names = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": POSITIONS, "vocab_size": TOKENS}
    weights = {f"_orig_mod.{name}": tensor for name, tensor in theirs.state_dict().items()}
    flash = {name: tensor for name, tensor in weights.items() if not name.endswith(".attn.bias")}
    arguments = {**names, "bias": True, "dropout": 0.0}
    torch.save({"model": flash, "optimizer": {}, "model_args": arguments, "iter_num": 3}, tmp_path / "ckpt.pt")
    there = checkpoints.convert(tmp_path / "ckpt.pt", tmp_path / "there", strip="model.").target
    ids = torch.arange(POSITIONS)[None]
    expected = theirs(ids).detach().numpy()
    ours, flax = torch_attn.DecoderModel.from_pretrained(there).eval(), jax_attn.DecoderModel.from_pretrained(there)
    np.testing.assert_allclose(ours(ids).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(flax(jnp.asarray(ids.numpy()))), expected, rtol=1e-4, atol=1e-5)
    for other in ({"n_kv_head": 1}, {"bias": False}, {"n_layer": "2"}):  # a fork, and what GPT-2 has no config for
        torch.save({"model": flash, "model_args": arguments | other}, tmp_path / "other.pt")
        assert checkpoints.containers.open_reader(tmp_path / "other.pt").config is None
