"""`BertEncoder` in torch and Flax: against each other, a NumPy reference and `transformers`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import WeightsMismatchError, specs, transfer
from attn_bridge.parity import compare
from attn_bridge.reference.bert_encoder import reference
from jax_attn import backend as jax_backend
from torch_attn import backend as torch_backend

from .test_gpt_model import assert_close, draw

CONFIG = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
MODEL = specs.Variant("BertEncoder", "bert_encoder", specs.BertEncoderConfig)
IDS = np.random.default_rng(0).integers(0, 23, (3, 7)).astype(np.int32)
TYPES = (np.arange(7) > 3).astype(np.int32)[None].repeat(3, 0)
MASK = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], np.int32)
"""Padded on the right, on the left, and not at all."""
INPUTS = {"ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}
SHAPE = (3, 7, 12)


def make_torch(dtype: str = "float32", **changes: Any) -> torch.nn.Module:
    return torch_attn.BertEncoder({**CONFIG, **changes}, dtype=getattr(torch, dtype)).eval()


def make_flax(dtype: str = "float32", **changes: Any) -> nnx.Module:
    """Return a model of zeros, which costs no time."""
    return jax_backend.build(MODEL, {"config": {**CONFIG, **changes}}, dtype)


def on_torch(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


@jax.jit
def call(model: nnx.Module, inputs: dict[str, jax.Array]) -> jax.Array:
    return model(**inputs)


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


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return draw(specs.BertEncoderConfig(**CONFIG))


@pytest.fixture(scope="module")
def results(arrays: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """``framework -> hidden state, gradients under torch names``, in float64, Flax with torch's weights."""
    cotangent = np.random.default_rng(1).normal(size=SHAPE)
    plain = make_torch("float64")
    hidden, _, gradients = torch_backend.Runner(plain)(arrays, INPUTS, [cotangent])
    found = {"torch": (hidden[0], gradients)}
    with jax_backend.precision("float64"):
        flax = make_flax("float64")
        transfer(plain, flax)
        hidden, _, gradients = jax_backend.Runner(flax, mode="jit")(jax_backend.get_weights(flax), INPUTS, [cotangent])
    found["flax"] = (hidden[0], plain.config.rules().convert(gradients, "flax"))
    return found


# ---- the numbers


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_the_hidden_state_is_that_of_the_reference(framework, results, arrays):
    wanted = reference(specs.BertEncoderConfig(**CONFIG), arrays, IDS, MASK != 0, TYPES)
    assert_close(results[framework][0], wanted, 1e-12)


def test_the_twins_agree_in_float64(results):
    (ours, our_gradients), (theirs, their_gradients) = results["torch"], results["flax"]
    assert_close(theirs, ours, 1e-12)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        # A bias of the keys moves all scores of a query alike: its gradient is 0 but for rounding.
        scale = np.abs(our_gradients[name.replace("W_key.bias", "W_query.bias")]).max()
        assert scale > 1e-3, name
        assert_close(their_gradients[name], gradient, 1e-12, scale)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_hidden_state_and_gradients_are_those_of_transformers(framework, attn_implementation, results, arrays):
    model = to_transformers(arrays, attn_implementation)
    ids, mask, types = (torch.from_numpy(array).long() for array in (IDS, MASK, TYPES))
    hidden = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    hidden.backward(torch.from_numpy(np.random.default_rng(1).normal(size=SHAPE)))
    found, gradients = results[framework]
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


def test_the_twins_are_equal_to_the_judge_in_float32():
    changes = {"num_hidden_layers": 1, "vocab_size": 5}
    ids = IDS % 5
    report = compare(make_torch(**changes), make_flax(**changes), {**INPUTS, "ids": ids}, seeds=1)
    assert report.raise_for_mismatch() is report
    assert report.unexercised == []


@pytest.fixture(scope="module")
def pair(arrays: dict[str, np.ndarray]) -> tuple[torch.nn.Module, nnx.Module]:
    plain, flax = make_torch(), make_flax()
    torch_backend.set_weights(plain, {name: array.astype("float32") for name, array in arrays.items()})
    transfer(plain, flax)
    return plain, flax


def run(pair: tuple[torch.nn.Module, nnx.Module], **inputs: np.ndarray) -> list[np.ndarray]:
    """Run both in float32; check that they agree."""
    plain, flax = pair
    ours, theirs = plain(**on_torch(inputs)).detach().numpy(), np.asarray(call(flax, inputs))
    assert_close(theirs, ours, 1e-5)
    return [ours, theirs]


def test_what_padding_holds_changes_nothing(pair):
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


def test_a_mask_of_ones_and_segments_of_zeros_are_the_defaults(pair):
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


@pytest.mark.parametrize("rates", [(0.5, 0.0), (0.0, 0.5)], ids=["hidden", "weights"])
def test_dropout_acts_in_training_alone(rates):
    changes = {"hidden_dropout_prob": rates[0], "attention_probs_dropout_prob": rates[1], "num_hidden_layers": 1}
    plain, flax = make_torch(**changes), make_flax(**changes)
    transfer(plain, flax)
    step = nnx.jit(lambda model: model(IDS))
    for model, once in ((plain, lambda: plain(torch.from_numpy(IDS)).detach().numpy()), (flax, lambda: step(flax))):
        np.testing.assert_array_equal(once(), once())
        model.train()
        assert np.abs(once() - once()).max() > 1e-2


def test_torch_compiles_as_one_graph(pair):
    compiled = torch.compile(pair[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        np.testing.assert_array_equal(compiled(**on_torch(INPUTS)), pair[0](**on_torch(INPUTS)))


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


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_weights_go_there_and_back_to_the_last_bit(dtype):
    source, back = make_torch(), make_torch()
    flax = make_flax(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.3)
    drawn = {name: torch.tensor(array).to(getattr(torch, dtype)) for name, array in draw(source.config, 3).items()}
    torch_backend.set_weights(source, {name: torch_backend.to_numpy(tensor) for name, tensor in drawn.items()})
    before = {name: array.tobytes() for name, array in torch_backend.get_weights(source).items()}
    with jax_backend.precision(dtype):
        there, again = transfer(source, flax), transfer(flax, back)
    assert {name: array.tobytes() for name, array in torch_backend.get_weights(back).items()} == before
    assert len(there) == len(again) == len(source.config.parameters) == len(before)
    np.testing.assert_array_equal(
        jax_backend.get_weights(flax)["layers.1.ff.layers.0.kernel"].astype("float64"),
        drawn["layers.1.ff.layers.0.weight"].double().numpy().T,
    )


def test_a_model_of_other_sizes_is_refused_with_every_name():
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(make_flax(num_hidden_layers=1, type_vocab_size=1), make_torch())
    assert len(caught.value.missing) == 16
    assert caught.value.misshapen == ["type_emb.weight: expected (2, 12), got (1, 12)"]


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"hidden_size": 12, "num_hidden_layers": 1},
            ValueError,
            "config does not fit BertEncoderConfig: missing keys: vocab_size, num_attention_heads, intermediate_size, "
            "max_position_embeddings",
        ),
        ({**CONFIG, "hidden_act": "relu"}, ValueError, "hidden_act ('relu') must be 'gelu'"),
        ({**CONFIG, "model_type": "roberta"}, ValueError, "model_type ('roberta') must be 'bert'"),
        (
            {**CONFIG, "position_embedding_type": "relative_key"},
            ValueError,
            "position_embedding_type ('relative_key') must be 'absolute'",
        ),
        ({**CONFIG, "is_decoder": True}, ValueError, "is_decoder (True) must be False"),
        (
            {**CONFIG, "num_attention_heads": 5},
            ValueError,
            "hidden_size (12) must be a multiple of num_attention_heads (5)",
        ),
        ({**CONFIG, "layer_norm_eps": 0}, ValueError, "layer_norm_eps (0) must be positive and finite"),
        ({**CONFIG, "type_vocab_size": 0}, ValueError, "type_vocab_size (0) must be at least 1"),
        ({**CONFIG, "hidden_dropout_prob": 2}, ValueError, "hidden_dropout_prob (2) must be in [0, 1)"),
        ("bert", TypeError, "config must be a dict or a BertEncoderConfig, got str"),
    ],
)
def test_a_bad_config_gives_both_the_same_line(config, error, message):
    for make in (torch_attn.BertEncoder, lambda config: jax_attn.BertEncoder(config, rngs=nnx.Rngs(0))):
        with pytest.raises(error) as caught:
            make(config)
        assert (type(caught.value), str(caught.value)) == (error, message)


def test_a_whole_config_of_transformers_is_read():
    config = transformers.BertConfig(**CONFIG, hidden_dropout_prob=0.25).to_dict()
    assert specs.BertEncoderConfig.read(config) == specs.BertEncoderConfig(**CONFIG, hidden_dropout_prob=0.25)
    assert specs.BertEncoderConfig.read({**CONFIG}) == specs.BertEncoderConfig(**CONFIG)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"ids": np.ones((1, 10), np.int32)},
            ValueError,
            "number of tokens (10) must be at most max_position_embeddings (9)",
        ),
        ({"ids": np.ones(4, np.int32)}, ValueError, "ids must have shape (B, T), got (4,)"),
        ({"ids": np.ones((2, 3), np.float32)}, TypeError, "ids must have an integer dtype, got float32"),
        ({"ids": IDS + 23}, ValueError, f"ids ({IDS.max() + 23}) must be at least 0 and below 23"),
        ({"token_type_ids": TYPES - 1}, ValueError, "token_type_ids (-1) must be at least 0 and below 2"),
        (
            {"token_type_ids": TYPES[:1]},
            ValueError,
            "token_type_ids must have the shape of ids (3, 7), got (1, 7)",
        ),
        ({"token_type_ids": TYPES == 1}, TypeError, "token_type_ids must have an integer dtype, got bool"),
        (
            {"attention_mask": MASK[:, :6]},
            ValueError,
            "attention_mask must have the shape of ids (3, 7), got (3, 6)",
        ),
        (
            {"attention_mask": MASK.astype(np.float32)},
            TypeError,
            "attention_mask must have dtype bool or an integer dtype, got float32",
        ),
    ],
)
def test_a_bad_call_gives_both_the_same_line(pair, changes, error, message):
    inputs = {**INPUTS, **changes} if "ids" not in changes or changes["ids"].shape == (3, 7) else changes
    for model, given in ((pair[0], on_torch(inputs)), (pair[1], inputs)):
        with pytest.raises(error) as caught:
            model(**given)
        assert (type(caught.value), str(caught.value)) == (error, message)


def test_what_is_no_array_of_its_library_is_refused(pair):
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got ndarray"):
        pair[0](IDS)
    with pytest.raises(TypeError, match="expected a JAX or NumPy array, got a torch Tensor"):
        pair[1](torch.from_numpy(IDS))
    assert jnp.asarray(call(pair[1], {"ids": jnp.asarray(IDS)})).shape == SHAPE
