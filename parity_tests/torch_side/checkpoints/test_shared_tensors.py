"""Tensors that safetensors' and the hub's own writers store once for several names, as ties do."""

from __future__ import annotations

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.utils.prune
import transformers
from safetensors.torch import save_file, save_model

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from torch_attn import DecoderModel

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=24, tie_word_embeddings=True, max_position_embeddings=32, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def saved(llama, folder, shard):
    """Save the model as users do whose trainer is not transformers'."""
    folder.mkdir()
    llama.config.save_pretrained(folder)
    if shard:
        huggingface_hub.save_torch_model(llama, str(folder), max_shard_size=shard)
    else:
        save_model(llama, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("shard", [None, "100GB", "4KB"])
def test_ties_that_are_stored_once_are_read_under_both_names(tmp_path, llama, shard):
    source = saved(llama, tmp_path / "in", shard)
    found = checkpoints.read(source)
    assert found.keys() == llama.state_dict().keys()
    for name, tensor in llama.state_dict().items():
        np.testing.assert_array_equal(found[name], tensor.numpy())
    (note,) = [note for note in checkpoints.inspect(source).notes if "metadata" in note]
    assert note in [
        f"stored once for several names, as the metadata says: {one} is {other}"
        for one, other in ((TABLE, HEAD), (HEAD, TABLE))
    ]
    checkpoints.convert(source, tmp_path / "flax")
    assert checkpoints.verify(source, tmp_path / "flax").passed
    checkpoints.convert(tmp_path / "flax", tmp_path / "back", to_layout="hf-llama")
    again = checkpoints.read(tmp_path / "back")
    assert again.keys() == found.keys()
    assert all(again[name].tobytes() == found[name].tobytes() for name in found)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        torch.testing.assert_close(DecoderModel.from_pretrained(tmp_path / "flax")(tokens), llama(tokens).logits)


def test_ranges_and_copies_of_a_shared_tensor_are_those_of_the_stored_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"b": torch.arange(12.0).reshape(3, 4)}, path, {"a": "b", "format": "pt", "c": "absent", "d": "b"})
    with open_reader(path) as reader:
        assert [*reader.tensors] == ["b", "a", "d"]
        assert reader.shared == {"a": "b", "d": "b"}
        assert bytes(reader.read_range("a", 5, 30)) == bytes(reader.read_range("b", 5, 30))
    checkpoints.convert(path, tmp_path / "y.npz", to_layout="same")
    found = checkpoints.read(tmp_path / "y.npz")
    assert all(found[name].tobytes() == found["b"].tobytes() for name in "ad")


def test_names_in_metadata_are_checked_like_others(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"b": torch.ones(2)}, path, {"a\n": "b"})
    with pytest.raises(CheckpointError, match="has control characters"):
        checkpoints.read(path)


def weight_norm(layer):
    torch.nn.utils.parametrizations.weight_norm(layer)


def old_weight_norm(layer):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(layer)


def orthogonal(layer):
    torch.nn.utils.parametrizations.orthogonal(layer)


def pruned(layer):
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)


def spectral(layer):
    torch.nn.utils.spectral_norm(layer)


@pytest.mark.parametrize(
    ("change", "undo", "text"),
    [
        (weight_norm, torch.nn.utils.parametrize.remove_parametrizations, "parametrize.remove_parametrizations"),
        (orthogonal, torch.nn.utils.parametrize.remove_parametrizations, "parametrize.remove_parametrizations"),
        (pruned, torch.nn.utils.prune.remove, "prune masks"),
        (spectral, torch.nn.utils.remove_spectral_norm, "remove_spectral_norm"),
        (old_weight_norm, torch.nn.utils.remove_weight_norm, "remove_weight_norm"),
    ],
)
@pytest.mark.parametrize("path", ["lm_head", "model.layers.1.mlp.up_proj"])
def test_weights_that_torch_computes_are_named_with_the_call_that_undoes_it(tmp_path, change, undo, text, path):
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=24, tie_word_embeddings=False, **sizes))
    layer = model.eval().get_submodule(path)
    change(layer)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match=rf"{path}\.weight.*{text}.*\(module, 'weight'\)") as caught:
        checkpoints.convert(tmp_path / "x.pt", tmp_path / "flax")
    assert "--drop" not in str(caught.value)
    undo(layer, *(["weight"] if undo is not torch.nn.utils.remove_weight_norm else []))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    checkpoints.convert(tmp_path / "x.pt", tmp_path / "flax")


def test_a_head_in_another_form_is_no_reason_to_drop_it(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=24, tie_word_embeddings=False, **sizes))
    state = model.state_dict()
    state["lm_head.code"], state["lm_head.table"] = state.pop("lm_head.weight"), torch.ones(3)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"does not know lm_head\.code, lm_head\.table") as caught:
        checkpoints.convert(tmp_path / "x.pt", tmp_path / "flax")
    assert "--drop" not in str(caught.value)
