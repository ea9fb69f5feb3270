"""`GPTModel` in torch and Flax: against `transformers`, the book's names and numbers, and what both generate."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import torch_attn
from attn_bridge import WeightsMismatchError, specs, transfer
from jax_attn import backend as jax_backend
from parity_tests.support.models.whole_models import GPT
from torch_attn import backend as torch_backend

from . import whole_models
from .whole_models import assert_close, call, cotangent, results, weights

CONFIG, IDS = GPT.config, GPT.inputs["ids"]
MODEL = specs.Variant("GPTModel", "gpt_model", specs.GPTModelConfig)
make_torch, make_flax = (functools.partial(make, GPT) for make in (whole_models.make_torch, whole_models.make_flax))


def to_transformers(arrays: dict[str, np.ndarray]) -> transformers.GPT2LMHeadModel:
    """Return a float64 GPT-2 of `transformers` with our weights, mapped by hand; its matrices are ``[in, out]``."""
    sizes = {"n_embd": CONFIG["emb_dim"], "n_head": CONFIG["n_heads"], "n_layer": CONFIG["n_layers"]}
    lengths = {"vocab_size": CONFIG["vocab_size"], "n_positions": CONFIG["context_length"]}
    config = transformers.GPT2Config(
        **sizes, **lengths, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, attn_implementation="eager"
    )
    state = {
        "transformer.wte.weight": arrays["tok_emb.weight"],
        "transformer.wpe.weight": arrays["pos_emb.weight"],
        "transformer.ln_f.weight": arrays["final_norm.scale"],
        "transformer.ln_f.bias": arrays["final_norm.shift"],
        "lm_head.weight": arrays["out_head.weight"],
    }
    for i in range(CONFIG["n_layers"]):
        ours, theirs = f"trf_blocks.{i}", f"transformer.h.{i}"
        projections = [f"{ours}.att.{name}" for name in ("W_query", "W_key", "W_value")]
        state[f"{theirs}.attn.c_attn.weight"] = np.concatenate([arrays[f"{n}.weight"].T for n in projections], axis=1)
        state[f"{theirs}.attn.c_attn.bias"] = np.concatenate([arrays[f"{n}.bias"] for n in projections])
        for mine, its in (("att.out_proj", "attn.c_proj"), ("ff.layers.0", "mlp.c_fc"), ("ff.layers.2", "mlp.c_proj")):
            state[f"{theirs}.{its}.weight"] = arrays[f"{ours}.{mine}.weight"].T
            state[f"{theirs}.{its}.bias"] = arrays[f"{ours}.{mine}.bias"]
        for mine, its in (("norm1", "ln_1"), ("norm2", "ln_2")):
            state[f"{theirs}.{its}.weight"] = arrays[f"{ours}.{mine}.scale"]
            state[f"{theirs}.{its}.bias"] = arrays[f"{ours}.{mine}.shift"]
    model = transformers.GPT2LMHeadModel(config).double().eval()
    model.load_state_dict({name: torch.tensor(array) for name, array in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_logits_and_gradients_are_those_of_transformers(framework):
    model = to_transformers(weights(GPT))
    logits = model(torch.from_numpy(IDS).long()).logits
    logits.backward(torch.from_numpy(cotangent(GPT)))
    found, gradients = results(GPT)[framework]
    assert_close(found, logits.detach().numpy(), 1e-12)
    block, ours = model.transformer.h[1], "trf_blocks.1"
    for name, theirs in {
        "tok_emb.weight": model.transformer.wte.weight.grad,
        "pos_emb.weight": model.transformer.wpe.weight.grad,
        f"{ours}.att.W_value.weight": block.attn.c_attn.weight.grad[:, -12:].T,
        f"{ours}.att.W_query.bias": block.attn.c_attn.bias.grad[:12],
        f"{ours}.ff.layers.0.bias": block.mlp.c_fc.bias.grad,
        f"{ours}.norm1.scale": block.ln_1.weight.grad,
        "out_head.weight": model.lm_head.weight.grad,
    }.items():
        assert_close(gradients[name], theirs.numpy(), 1e-12)


def test_flax_computes_in_the_given_dtype_or_its_weights():
    half = jax_backend.build(MODEL, {"config": {**CONFIG, "n_layers": 1}, "dtype": jnp.bfloat16}, "float32")
    assert (call(half, GPT.inputs).dtype, half.tok_emb.embedding.dtype) == (jnp.bfloat16, jnp.float32)
    plain, flax = make_torch("bfloat16", n_layers=1), make_flax(n_layers=1)
    transfer(plain, flax)
    assert call(flax, GPT.inputs).dtype == jnp.bfloat16


# ---- weights


def test_the_names_are_the_books():
    block = [
        f"att.{name}.{kind}" for name in ("W_query", "W_key", "W_value", "out_proj") for kind in ("weight", "bias")
    ]
    block += [f"ff.layers.{index}.{kind}" for index in (0, 2) for kind in ("weight", "bias")]
    block += [f"norm{index}.{kind}" for index in (1, 2) for kind in ("scale", "shift")]
    blocks = [f"trf_blocks.{index}.{name}" for index in (0, 1) for name in block]
    book = ["tok_emb.weight", "pos_emb.weight", *blocks, "final_norm.scale", "final_norm.shift", "out_head.weight"]
    assert list(torch_backend.describe_weights(make_torch())) == book
    assert [row.rule.torch for row in specs.GPTModelConfig(**CONFIG).parameters] == book


def test_the_smallest_gpt2_has_the_books_parameter_count():
    config = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
    model = torch_attn.GPTModel({**config, "drop_rate": 0.1, "qkv_bias": False}, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 163_009_536
    shapes = {row.rule.torch: row.shape for row in model.config.parameters}
    assert shapes == {name: shape for name, (shape, _) in torch_backend.describe_weights(model).items()}


def test_a_model_of_other_sizes_is_refused_with_every_name():
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(make_torch(n_layers=1, context_length=4), make_flax())
    assert len(caught.value.missing) == 16
    assert caught.value.misshapen == ["pos_emb.embedding: expected (8, 12), got (4, 12)"]
    with pytest.raises(ValueError, match="configs differ: n_heads is 2 in the source and 3 in the target"):
        transfer(make_torch(n_heads=2), make_flax())


def test_a_checkpoint_of_the_book_loads_with_its_mask_buffers():
    model = make_torch()
    mask = torch.triu(torch.ones(8, 8), diagonal=1)
    book = {**model.state_dict(), **{f"trf_blocks.{index}.att.mask": mask for index in (0, 1)}}
    loaded = torch_attn.GPTModel(model.config).eval()
    loaded.load_state_dict(book, strict=True)
    assert torch.equal(loaded(torch.from_numpy(IDS)), model(torch.from_numpy(IDS)))


# ---- generation


def test_all_three_generate_the_same_tokens():
    arrays = weights(GPT)
    plain = make_torch("float64")
    torch_backend.set_weights(plain, arrays)
    start = IDS[:, :3]
    ours = plain.generate_greedy(torch.from_numpy(start), 12)
    with jax_backend.precision("float64"):
        flax = make_flax("float64")
        transfer(plain, flax)
        theirs = np.asarray(flax.generate_greedy(start, 12))
    tokens = torch.from_numpy(start).long()
    model = to_transformers(arrays)
    with torch.no_grad():
        for _ in range(12):
            # By hand: `generate` of transformers stops at n_positions, 8.
            following = model(tokens[:, -8:]).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
    generated = model.generate(torch.from_numpy(start).long(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert ours.shape == (3, 15)
    assert ours.dtype == torch.int64
    assert len(np.unique(ours[:, 3:])) > 5
    np.testing.assert_array_equal(ours, tokens)
    np.testing.assert_array_equal(theirs, tokens)
    np.testing.assert_array_equal(generated, tokens[:, :8])


def test_a_prompt_longer_than_the_context_is_cropped():
    arrays = weights(GPT)
    plain, flax = make_torch(), make_flax()
    torch_backend.set_weights(plain, {name: array.astype("float32") for name, array in arrays.items()})
    transfer(plain, flax)
    long = np.concatenate([IDS, IDS[:, ::-1]], axis=1)
    ours = plain.generate_greedy(torch.from_numpy(long.copy()), 3).numpy()
    np.testing.assert_array_equal(ours[:, :16], long)
    np.testing.assert_array_equal(ours[:, 16:], plain.generate_greedy(torch.from_numpy(long[:, 8:].copy()), 3)[:, 8:])
    np.testing.assert_array_equal(flax.generate_greedy(long, 3), ours)


def test_tokens_outgrow_the_integers_of_the_prompt():
    plain, flax = make_torch(vocab_size=300, n_layers=1), make_flax(vocab_size=300, n_layers=1)
    with torch.no_grad():
        plain.out_head.weight.zero_()
        plain.out_head.weight[299] = plain.final_norm.shift.fill_(1.0)
    transfer(plain, flax)
    prompt = np.array([[7, 9]], np.uint8)
    for tokens in (plain.generate_greedy(torch.from_numpy(prompt), 2), flax.generate_greedy(prompt, 2)):
        assert np.asarray(tokens).tolist() == [[7, 9, 299, 299]]
