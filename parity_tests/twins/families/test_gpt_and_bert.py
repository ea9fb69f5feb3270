"""`GPTModel` and `BertEncoder` in torch and Flax: against their NumPy references, each other, and there and back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn_bridge import transfer
from attn_bridge.parity import compare
from attn_bridge.reference import bert_encoder, gpt_model
from jax_attn import backend as jax_backend
from parity_tests.support.models.whole_models import BERT, GPT, draw
from torch_attn import backend as torch_backend

from ..models.whole_models import assert_close, call, make_flax, make_torch, on_torch, results, weights

every_model = pytest.mark.parametrize("model", [GPT, BERT], ids=str)
REFERENCES = {
    GPT: lambda *arguments, ids: gpt_model.reference(*arguments, ids),
    BERT: lambda *arguments, ids, attention_mask, token_type_ids: bert_encoder.reference(
        *arguments, ids, attention_mask != 0, token_type_ids
    ),
}


@every_model
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_the_output_is_that_of_the_reference(model, framework):
    wanted = REFERENCES[model](model.spec_of(), weights(model), **model.inputs)
    assert_close(results(model)[framework][0], wanted, 1e-12)


@every_model
def test_the_twins_agree_in_float64(model):
    (ours, our_gradients), (theirs, their_gradients) = results(model)["torch"], results(model)["flax"]
    assert_close(theirs, ours, 1e-12)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        # A bias of the keys moves all scores of a query alike: its gradient is 0 but for rounding.
        scale = np.abs(our_gradients[name.replace("W_key.bias", "W_query.bias")]).max()
        assert scale > 1e-3, name
        assert_close(their_gradients[name], gradient, 1e-12, scale)


@pytest.mark.parametrize(("model", "changes"), [(GPT, {}), (BERT, {"vocab_size": 5})], ids=["GPTModel", "BertEncoder"])
def test_the_twins_are_equal_to_the_judge_in_float32(model, changes):
    changes = {**changes, **model.one_layer}
    inputs = {**model.inputs, "ids": model.inputs["ids"] % changes.get("vocab_size", model.config["vocab_size"])}
    report = compare(make_torch(model, **changes), make_flax(model, **changes), inputs, seeds=1)
    assert report.raise_for_mismatch() is report
    assert report.unexercised == []


@every_model
def test_compiled_models_give_the_same(model):
    plain, flax = make_torch(model), make_flax(model)
    transfer(plain, flax)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        wanted = plain(**on_torch(model.inputs)).numpy()
        np.testing.assert_array_equal(compiled(**on_torch(model.inputs)), wanted)
    assert_close(np.asarray(call(flax, model.inputs)), wanted, 1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "changes", "matrix"),
    [
        (GPT, {"qkv_bias": True}, "out_head"),
        (GPT, {"qkv_bias": False}, "out_head"),
        (BERT, {}, "layers.1.ff.layers.0"),
    ],
    ids=["GPTModel with biases", "GPTModel without", "BertEncoder"],
)
def test_weights_go_there_and_back_to_the_last_bit(model, changes, matrix, dtype):
    source, back = make_torch(model, **changes), make_torch(model, **changes)
    # The same weights may be trained with other rates.
    flax = make_flax(model, **changes, **model.other_rates)
    drawn = {name: torch.tensor(array).to(getattr(torch, dtype)) for name, array in draw(source.config, 3).items()}
    torch_backend.set_weights(source, {name: torch_backend.to_numpy(tensor) for name, tensor in drawn.items()})
    before = {name: array.tobytes() for name, array in torch_backend.get_weights(source).items()}
    with jax_backend.precision(dtype):
        there, again = transfer(source, flax), transfer(flax, back)
    assert {name: array.tobytes() for name, array in torch_backend.get_weights(back).items()} == before
    assert len(there) == len(again) == len(source.config.parameters) == len(before)
    np.testing.assert_array_equal(
        jax_backend.get_weights(flax)[f"{matrix}.kernel"].astype("float64"),
        drawn[f"{matrix}.weight"].double().numpy().T,
    )


@every_model
def test_arrays_of_the_other_library_are_refused(model):
    ids = model.inputs["ids"]
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got ndarray"):
        make_torch(model)(ids)
    with pytest.raises(TypeError, match="must be a JAX or NumPy array, got a torch Tensor"):
        make_flax(model)(torch.from_numpy(ids))
    assert call(make_flax(model), {"ids": jnp.asarray(ids)}).shape == model.shape
