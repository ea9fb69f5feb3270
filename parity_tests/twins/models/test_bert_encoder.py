"""`BertEncoder` in torch and Flax: against `transformers`, its masks and segments, its names and norms."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from attn_bridge import WeightsMismatchError, specs, transfer
from parity_tests.support.models.whole_models import BERT
from torch_attn import backend as torch_backend

from . import whole_models
from .whole_models import assert_close, call, cotangent, on_torch, results, weights

CONFIG, INPUTS = BERT.config, BERT.inputs
IDS, MASK, TYPES = (INPUTS[name] for name in ("ids", "attention_mask", "token_type_ids"))
make_torch, make_flax = (functools.partial(make, BERT) for make in (whole_models.make_torch, whole_models.make_flax))


def to_transformers(arrays: dict[str, np.ndarray], attn_implementation: str = "eager") -> transformers.BertModel:
    """Return a float64 BERT of `transformers` with our weights, mapped by hand."""
    config = transformers.BertConfig(**CONFIG, pad_token_id=None, attn_implementation=attn_implementation)
    model = transformers.BertModel(config, add_pooling_layer=False).double().eval()
    state = {
        "embeddings.word_embeddings.weight": arrays["tok_emb.weight"],
        "embeddings.position_embeddings.weight": arrays["pos_emb.weight"],
        "embeddings.token_type_embeddings.weight": arrays["type_emb.weight"],
        "embeddings.LayerNorm.weight": arrays["emb_norm.scale"],
        "embeddings.LayerNorm.bias": arrays["emb_norm.shift"],
    }
    for i in range(CONFIG["num_hidden_layers"]):
        for mine, its in {
            "att.W_query": "attention.self.query",
            "att.W_key": "attention.self.key",
            "att.W_value": "attention.self.value",
            "att.out_proj": "attention.output.dense",
            "ff.layers.0": "intermediate.dense",
            "ff.layers.2": "output.dense",
        }.items():
            for kind in ("weight", "bias"):
                state[f"encoder.layer.{i}.{its}.{kind}"] = arrays[f"layers.{i}.{mine}.{kind}"]
        for mine, its in (("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm")):
            state[f"encoder.layer.{i}.{its}.weight"] = arrays[f"layers.{i}.{mine}.scale"]
            state[f"encoder.layer.{i}.{its}.bias"] = arrays[f"layers.{i}.{mine}.shift"]
    model.load_state_dict({name: torch.tensor(array) for name, array in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_hidden_state_and_gradients_are_those_of_transformers(framework, attn_implementation):
    model = to_transformers(weights(BERT), attn_implementation)
    ids, mask, types = (torch.from_numpy(array).long() for array in (IDS, MASK, TYPES))
    hidden = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    hidden.backward(torch.from_numpy(cotangent(BERT)))
    found, gradients = results(BERT)[framework]
    assert_close(found, hidden.detach().numpy(), 1e-12)
    layer, embeddings = model.encoder.layer[1], model.embeddings
    for name, theirs in {
        "tok_emb.weight": embeddings.word_embeddings.weight,
        "pos_emb.weight": embeddings.position_embeddings.weight,
        "type_emb.weight": embeddings.token_type_embeddings.weight,
        "emb_norm.scale": embeddings.LayerNorm.weight,
        "layers.1.att.W_query.weight": layer.attention.self.query.weight,
        "layers.1.att.W_value.bias": layer.attention.self.value.bias,
        "layers.1.ff.layers.2.weight": layer.output.dense.weight,
        "layers.1.norm1.shift": layer.attention.output.LayerNorm.bias,
    }.items():
        assert_close(gradients[name], theirs.grad.numpy(), 1e-12)


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, nnx.Module]:
    plain, flax = make_torch(), make_flax()
    torch_backend.set_weights(plain, {name: array.astype("float32") for name, array in weights(BERT).items()})
    transfer(plain, flax)
    return plain, flax


def run(pair: tuple[torch.nn.Module, nnx.Module], **inputs: np.ndarray) -> list[np.ndarray]:
    """Run both in float32; check that they agree."""
    plain, flax = pair
    ours, theirs = plain(**on_torch(inputs)).detach().numpy(), np.asarray(call(flax, inputs))
    assert_close(theirs, ours, 1e-5)
    return [ours, theirs]


def test_padded_tokens_do_not_affect_others(pair):
    other = np.where(MASK == 1, IDS, 22 - IDS)
    for one, two in zip(run(pair, **INPUTS), run(pair, **{**INPUTS, "ids": other}), strict=True):
        np.testing.assert_array_equal(one[MASK == 1], two[MASK == 1])
        assert np.abs(one - two).max() > 0.1


def test_padding_on_the_right_changes_nothing(pair):
    short = run(pair, ids=IDS[:1, :4], token_type_ids=TYPES[:1, :4])
    for one, two in zip(run(pair, **INPUTS), short, strict=True):
        assert_close(one[:1, :4], two, 1e-5)


def test_a_mask_may_be_bool_or_integers(pair):
    for dtype in (np.bool_, np.uint8):
        for one, two in zip(
            run(pair, **INPUTS), run(pair, **INPUTS | {"attention_mask": MASK.astype(dtype)}), strict=True
        ):
            np.testing.assert_array_equal(one, two)


def test_masks_and_segments_default_to_ones_and_zeros(pair):
    given = {"attention_mask": np.ones_like(MASK), "token_type_ids": np.zeros_like(TYPES)}
    for one, two in zip(run(pair, ids=IDS), run(pair, ids=IDS, **given), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_sequence_of_padding_alone_gives_numbers(pair):
    for found in run(pair, **INPUTS | {"attention_mask": MASK * np.array([[1], [0], [1]], np.int32)}):
        assert np.isfinite(found).all()


def test_attention_is_not_causal(pair):
    for found, changed in zip(
        run(pair, ids=IDS), run(pair, ids=np.concatenate([IDS[:, :-1], 22 - IDS[:, -1:]], 1)), strict=True
    ):
        assert np.abs(found[:, 0] - changed[:, 0]).max() > 1e-3


def test_the_norms_take_the_eps_of_the_config():
    plain, flax = make_torch(layer_norm_eps=1e-7), make_flax(layer_norm_eps=1e-7)
    norms = [plain.emb_norm, plain.layers[1].norm1, plain.layers[0].norm2]
    norms += [flax.emb_norm, flax.layers[1].norm1, flax.layers[0].norm2]
    assert {norm.config.eps for norm in norms} == {1e-7}
    with pytest.raises(ValueError, match="configs differ: layer_norm_eps is 1e-12 in the source and 1e-07"):
        transfer(make_torch(), flax)


# ---- weights


def test_the_names_are_those_of_the_house():
    layer = [
        f"att.{name}.{kind}" for name in ("W_query", "W_key", "W_value", "out_proj") for kind in ("weight", "bias")
    ]
    layer += [f"norm1.{kind}" for kind in ("scale", "shift")]
    layer += [f"ff.layers.{index}.{kind}" for index in (0, 2) for kind in ("weight", "bias")]
    layer += [f"norm2.{kind}" for kind in ("scale", "shift")]
    names = [f"{table}.weight" for table in ("tok_emb", "pos_emb", "type_emb")] + ["emb_norm.scale", "emb_norm.shift"]
    names += [f"layers.{index}.{name}" for index in (0, 1) for name in layer]
    assert list(torch_backend.describe_weights(make_torch())) == names
    assert [row.rule.torch for row in specs.BertEncoderConfig(**CONFIG).parameters] == names


def test_a_model_of_other_sizes_is_refused_with_every_name():
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(make_flax(num_hidden_layers=1, type_vocab_size=1), make_torch())
    assert len(caught.value.missing) == 16
    assert caught.value.misshapen == ["type_emb.weight: expected (2, 12), got (1, 12)"]


def test_a_whole_config_of_transformers_is_read():
    config = transformers.BertConfig(**CONFIG, hidden_dropout_prob=0.25).to_dict()
    assert specs.BertEncoderConfig.read(config) == specs.BertEncoderConfig(**CONFIG, hidden_dropout_prob=0.25)
    assert specs.BertEncoderConfig.read({**CONFIG}) == specs.BertEncoderConfig(**CONFIG)
