"""`GPTModel` in torch and Flax: against each other, a NumPy reference and `transformers`."""

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
from attn_bridge.reference.gpt_model import reference
from jax_attn import backend as jax_backend
from torch_attn import backend as torch_backend

CONFIG = {
    "vocab_size": 23,
    "context_length": 8,
    "emb_dim": 12,
    "n_heads": 3,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": True,
}
IDS = np.random.default_rng(0).integers(0, 23, (3, 8)).astype(np.int32)
SHAPE = (3, 8, 23)
MODEL = specs.Variant("GPTModel", "gpt_model", specs.GPTModelConfig)


def draw(config: specs.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw every parameter under its torch name: no bias near 0, no scale near 1, scores that differ."""
    random = np.random.default_rng(seed)
    arrays = {}
    for row in config.parameters:
        if len(row.shape) == 1:
            # Larger biases and shifts would outweigh what the tokens say.
            size = 1.0 if row.rule.torch.endswith("scale") else 0.3
            array = random.choice([-1.0, 1.0], row.shape) * random.uniform(0.2 * size, 1.6 * size, row.shape)
        else:
            array = random.normal(size=row.shape) * (1.0 if "emb" in row.rule.torch else 1.5 * row.shape[1] ** -0.5)
        arrays[row.rule.torch] = array
    return arrays


def make_torch(dtype: str = "float32", **changes: Any) -> torch.nn.Module:
    return torch_attn.GPTModel({**CONFIG, **changes}, dtype=getattr(torch, dtype)).eval()


def make_flax(dtype: str = "float32", **changes: Any) -> nnx.Module:
    """Return a model of zeros, which costs no time."""
    return jax_backend.build(MODEL, {"config": {**CONFIG, **changes}}, dtype)


@jax.jit
def call(model: nnx.Module, ids: jax.Array) -> jax.Array:
    return model(ids)


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


def assert_close(actual: np.ndarray, wanted: np.ndarray, tolerance: float, scale: float | None = None) -> None:
    """Check the largest difference against the largest value wanted, or against `scale`."""
    assert actual.shape == wanted.shape
    assert np.abs(actual - wanted).max() <= tolerance * (np.abs(wanted).max() if scale is None else scale)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return draw(specs.GPTModelConfig(**CONFIG))


@pytest.fixture(scope="module")
def results(arrays: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """``framework -> logits, gradients under torch names``, in float64, Flax with the weights that torch gives it."""
    cotangent = np.random.default_rng(1).normal(size=SHAPE)
    plain = make_torch("float64")
    logits, _, gradients = torch_backend.Runner(plain)(arrays, {"ids": IDS}, [cotangent])
    found = {"torch": (logits[0], gradients)}
    with jax_backend.precision("float64"):
        flax = make_flax("float64")
        transfer(plain, flax)
        logits, _, gradients = jax_backend.Runner(flax, mode="jit")(
            jax_backend.get_weights(flax), {"ids": IDS}, [cotangent]
        )
    found["flax"] = (logits[0], plain.config.rules().convert(gradients, "flax"))
    return found


# ---- the numbers


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_the_logits_are_those_of_the_reference(framework, results, arrays):
    assert_close(results[framework][0], reference(specs.GPTModelConfig(**CONFIG), arrays, IDS), 1e-12)


def test_the_twins_agree_in_float64(results):
    (ours, our_gradients), (theirs, their_gradients) = results["torch"], results["flax"]
    assert_close(theirs, ours, 1e-12)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        # A bias of the keys moves all scores of a query alike: its gradient is 0 but for rounding.
        scale = np.abs(our_gradients[name.replace("W_key.bias", "W_query.bias")]).max()
        assert scale > 1e-3, name
        assert_close(their_gradients[name], gradient, 1e-12, scale)


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_logits_and_gradients_are_those_of_transformers(framework, results, arrays):
    model = to_transformers(arrays)
    logits = model(torch.from_numpy(IDS).long()).logits
    logits.backward(torch.from_numpy(np.random.default_rng(1).normal(size=SHAPE)))
    found, gradients = results[framework]
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


def test_the_twins_are_equal_to_the_judge_in_float32():
    report = compare(make_torch(n_layers=1), make_flax(n_layers=1), {"ids": IDS}, seeds=1)
    assert report.raise_for_mismatch() is report
    assert report.unexercised == []


def test_flax_computes_in_the_dtype_asked_for_and_in_that_of_its_weights():
    half = jax_backend.build(MODEL, {"config": {**CONFIG, "n_layers": 1}, "dtype": jnp.bfloat16}, "float32")
    assert (call(half, IDS).dtype, half.tok_emb.embedding.dtype) == (jnp.bfloat16, jnp.float32)
    plain, flax = make_torch("bfloat16", n_layers=1), make_flax(n_layers=1)
    transfer(plain, flax)
    assert call(flax, IDS).dtype == jnp.bfloat16


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_dropout_acts_in_training_alone(framework):
    plain, flax = make_torch(n_layers=1), make_flax(n_layers=1)
    transfer(plain, flax)
    step = nnx.jit(lambda model: model(IDS))
    calm, wild = [], []
    for found, is_training in ((calm, False), (wild, True)):
        for model in (plain, flax):
            model.train() if is_training else model.eval()
        for _ in range(2):
            found.append(plain(torch.from_numpy(IDS)).detach().numpy() if framework == "torch" else step(flax))
    np.testing.assert_array_equal(*calm)
    assert np.abs(wild[0] - wild[1]).max() > 1e-2


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


def test_the_smallest_gpt_2_has_the_parameters_that_the_book_counts():
    config = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
    model = torch_attn.GPTModel({**config, "drop_rate": 0.1, "qkv_bias": False}, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 163_009_536
    shapes = {row.rule.torch: row.shape for row in model.config.parameters}
    assert shapes == {name: shape for name, (shape, _) in torch_backend.describe_weights(model).items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_weights_go_there_and_back_to_the_last_bit(dtype, qkv_bias):
    source, back, flax = (make(qkv_bias=qkv_bias) for make in (make_torch, make_torch, make_flax))
    # The same weights may be trained with another rate.
    flax.config = flax.config.replace(drop_rate=0.0)
    numbers = draw(source.config, 3)
    torch_backend.set_weights(
        source, {n: torch_backend.to_numpy(torch.tensor(a).to(getattr(torch, dtype))) for n, a in numbers.items()}
    )
    before = {name: array.tobytes() for name, array in torch_backend.get_weights(source).items()}
    with jax_backend.precision(dtype):
        there, again = transfer(source, flax), transfer(flax, back)
    assert {name: array.tobytes() for name, array in torch_backend.get_weights(back).items()} == before
    assert len(there) == len(again) == len(source.config.parameters) == len(before)
    np.testing.assert_array_equal(
        jax_backend.get_weights(flax)["out_head.kernel"].astype("float64"),
        torch_backend.get_weights(source)["out_head.weight"].astype("float64").T,
    )


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
    model.load_state_dict(book, strict=True)


# ---- generation


def test_all_three_generate_the_same_tokens(arrays):
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


def test_a_prompt_longer_than_the_context_is_cropped(arrays):
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


# ---- compilers


def test_compiled_models_give_the_same():
    plain, flax = make_torch(), make_flax()
    transfer(plain, flax)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        wanted = plain(torch.from_numpy(IDS)).numpy()
        np.testing.assert_array_equal(compiled(torch.from_numpy(IDS)), wanted)
    assert_close(np.asarray(call(flax, IDS)), wanted, 1e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**CONFIG, "n_head": 3}, ValueError, "config does not fit GPTModelConfig: unknown keys: n_head"),
        (
            {"emb_dim": 4, "heads": 2, "layers": 1},
            ValueError,
            "config does not fit GPTModelConfig: missing keys: vocab_size, context_length, n_heads, n_layers; "
            "unknown keys: heads, layers",
        ),
        ({**CONFIG, "n_heads": 5}, ValueError, "emb_dim (12) must be a multiple of n_heads (5)"),
        ({**CONFIG, "n_layers": 0}, ValueError, "n_layers (0) must be at least 1"),
        ({**CONFIG, "vocab_size": 23.0}, TypeError, "vocab_size must be an integer, got float"),
        ({**CONFIG, "drop_rate": 1}, ValueError, "drop_rate (1) must be in [0, 1)"),
        ({**CONFIG, "qkv_bias": None}, TypeError, "qkv_bias must be a bool, got NoneType"),
        (list(CONFIG), TypeError, "config must be a dict or a GPTModelConfig, got list"),
    ],
)
def test_a_bad_config_gives_both_the_same_line(config, error, message):
    for make in (torch_attn.GPTModel, lambda config: jax_attn.GPTModel(config, rngs=nnx.Rngs(0))):
        with pytest.raises(error) as caught:
            make(config)
        assert (type(caught.value), str(caught.value)) == (error, message)


def test_a_config_object_is_taken_and_a_dict_is_left_as_it_was():
    given = dict(CONFIG)
    assert torch_attn.GPTModel(given).config == torch_attn.GPTModel(specs.GPTModelConfig(**CONFIG)).config
    assert given == CONFIG


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.ones((1, 9), np.int32), ValueError, "number of tokens (9) must be at most context_length (8)"),
        (np.ones(4, np.int32), ValueError, "ids must have shape (B, T), got (4,)"),
        (np.ones((2, 0), np.int32), ValueError, "ids must hold at least 1 token, got shape (2, 0)"),
        (np.ones((2, 4), np.float32), TypeError, "ids must have an integer dtype, got float32"),
        (np.ones((2, 4), np.bool_), TypeError, "ids must have an integer dtype, got bool"),
        (np.array([[1, 23]]), ValueError, "ids (23) must be at least 0 and below 23"),
        (np.array([[1, 2**32]]), ValueError, "ids (4294967296) must be at least 0 and below 23"),
        (np.array([[-1, 5]]), ValueError, "ids (-1) must be at least 0 and below 23"),
    ],
)
def test_bad_ids_give_both_the_same_line(ids, error, message):
    for model, given in ((make_torch(), torch.from_numpy(ids)), (make_flax(), ids)):
        with pytest.raises(error) as caught:
            model(given)
        assert (type(caught.value), str(caught.value)) == (error, message)
        if ids.shape != (1, 9):
            with pytest.raises(error) as caught:
                model.generate_greedy(given, 1)
            assert str(caught.value) == message


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "max_new_tokens (0) must be at least 1"),
        (2.0, TypeError, "max_new_tokens must be an integer, got float"),
    ],
)
def test_a_bad_number_of_tokens_gives_both_the_same_line(number, error, message):
    for model, given in ((make_torch(), torch.from_numpy(IDS)), (make_flax(), IDS)):
        with pytest.raises(error) as caught:
            model.generate_greedy(given, number)
        assert (type(caught.value), str(caught.value)) == (error, message)


def test_what_is_no_array_of_its_library_is_refused():
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got ndarray"):
        make_torch()(IDS)
    with pytest.raises(TypeError, match="expected a JAX or NumPy array, got a torch Tensor"):
        make_flax()(torch.from_numpy(IDS))
