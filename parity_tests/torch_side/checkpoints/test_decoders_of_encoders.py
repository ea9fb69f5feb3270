"""Decoders alone with the ``model_type`` of an encoder, or of an encoder with a decoder: flags tell them apart."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import torch_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.models import families, layouts
from attn_bridge.models.reading import multimodal
from attn_bridge.specs import DecoderConfig

DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 20}
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20},
    "bart": DECODER,
    "whisper": DECODER,
}
VOCABULARY = 31


def saved(kind, path):
    """Save a causal model of `transformers` with random weights, and return it."""
    config = transformers.AutoConfig.for_model(
        kind, **SIZES[kind], vocab_size=VOCABULARY, pad_token_id=0, **({"is_decoder": True} if kind == "bert" else {})
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + 0.1
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", SIZES)
def test_a_decoder_alone_is_read_converted_and_written_back(tmp_path, kind):
    theirs = saved(kind, tmp_path / "source")
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    ours = torch_attn.DecoderModel.from_pretrained(tmp_path / "source")
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5
    ours.save_pretrained(tmp_path / "ours")
    layout = checkpoints.inspect(tmp_path / "source").layout
    checkpoints.convert(tmp_path / "ours", tmp_path / "back", to_layout=layout)
    checkpoints.convert(tmp_path / "source", tmp_path / "half", to_layout=layout, dtype="float16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["model_type"] == kind
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    missing = [name for name in info.pop("missing_keys") if "encoder_attn" not in name]  # which neither side runs
    assert not any((missing, *info.values())), info
    if kind == "bart":  # whose layout MVP has as well, and is written first
        assert keys["model_type"] == "mvp"
    else:
        assert (keys["model_type"], keys["is_decoder"], keys["is_encoder_decoder"]) == (kind, True, False)
    state = again.state_dict()
    assert all(
        torch.equal(tensor, state[name])
        for name, tensor in theirs.state_dict().items()
        if name not in missing and "encoder_attn" not in name
    )
    with torch.no_grad():
        assert (again(ids).logits - theirs(ids).logits).abs().max() < 1e-5  # the same bits, multiplied in another order


def test_an_encoder_is_no_decoder_and_a_decoder_no_encoder(tmp_path):
    saved("bert", tmp_path / "decoder")
    config = transformers.BertConfig(**SIZES["bert"], vocab_size=VOCABULARY)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    with pytest.raises(CheckpointError, match=r"is_decoder \(False\) of bert must be True for a decoder$"):
        torch_attn.DecoderModel.from_pretrained(tmp_path / "encoder")
    with pytest.raises(CheckpointError, match=r"is_decoder \(True\) must be False$"):
        torch_attn.BertEncoder.from_pretrained(tmp_path / "decoder")
    masked = transformers.BertForMaskedLM(config)
    masked.save_pretrained(tmp_path / "masked")
    assert checkpoints.inspect(tmp_path / "masked").layout == "hf-bert"
    assert checkpoints.inspect(tmp_path / "decoder").layout == "hf-bert-decoder"


@pytest.mark.parametrize("kind", sorted(multimodal.DECODERS))
def test_the_type_of_a_decoder_alone_is_written_as_that_of_its_class(kind):
    own = multimodal.decoder_type(kind)
    assert (own, multimodal.written_type(own)) == (f"{kind}-decoder", kind)
    assert families.FAMILIES[own].whole is DecoderConfig
    assert any(own in layouts.find(name).model_types for name in layouts.names())
    # An encoder with a decoder keeps its type, whatever its decoder is.
    assert multimodal.type_of({"model_type": kind, "is_decoder": True}) == own
    assert multimodal.type_of({"model_type": kind, "is_decoder": True, "is_encoder_decoder": True}) == kind
    assert multimodal.type_of({"model_type": kind}) == kind
    assert multimodal.type_of({"model_type": kind, "is_encoder_decoder": False}) == (kind if kind == "bert" else own)


def test_other_types_keep_their_names():
    assert multimodal.decoder_type("roberta") == "roberta"
    assert multimodal.written_type("modernbert-decoder") == "modernbert-decoder"
