"""Latent, cross and differential attention: caches, both forms of the latent one, and BART and Whisper as oracles."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints, specs
from attn_bridge.masks import sliding_window
from attn_bridge.models import families
from attn_parity.frameworks.torch.running.promotion import promoted
from jax_attn.backend import precision
from parity_tests.support.models.hf_oracle import judge_roundings
from torch_attn.backend import to_numpy

from ...support.calls.interpreted import by_numpy
from .compiled import in_jit

LATENT = specs.MultiHeadLatentAttentionConfig(
    6, 3, 5, 4, 2, 3, query_dim=4, bias=True, position=specs.Rotary(pairing="interleaved")
)
DIFFERENTIAL = specs.DifferentialAttentionConfig(6, 4, num_kv_heads=2, head_dim=2, position=specs.Rotary())
CONFIGS = {
    "latent": LATENT,
    "latent, window": LATENT.replace(mask=sliding_window(3), query_dim=None),
    "differential": DIFFERENTIAL,
    "differential, window": DIFFERENTIAL.replace(mask=sliding_window(3), num_kv_heads=4, qkv_bias=True, out_bias=True),
}
CROSS = specs.CrossAttentionConfig(6, 4, d_context=5, num_kv_heads=2, head_dim=3, qkv_bias=True, out_bias=True)
STEPS = (3, 1, 1, 3)
ROWS, TOKENS = 3, sum(STEPS)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, TOKENS, 6))
CONTEXT = RANDOM.normal(size=(ROWS, 7, 5))
LEFT = np.arange(TOKENS) >= np.array([0, 1, 2])[:, None]
RIGHT = np.arange(7) < np.array([7, 4, 1])[:, None]


@pytest.fixture(autouse=True)
def _in_float64():
    with precision("float64"):
        yield


@functools.cache
def twins(config):
    """Return both twins of a config, in float64, with the same weights."""
    name = type(config).__name__.removesuffix("Config")
    one = getattr(torch_attn, name)(config, dtype=torch.float64).eval()
    with torch.no_grad():
        random = np.random.default_rng(len(name))
        for parameter in one.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=parameter.shape)))
    two = jax_attn.backend.build_blank(name, config, "float64")
    attn_bridge.transfer(one, two)
    return one, two


def by_torch(config, x, **at):
    at = {key: torch.tensor(value) if isinstance(value, np.ndarray) else value for key, value in at.items()}
    with torch.no_grad():
        result = twins(config)[0](torch.from_numpy(x), **at)
    return (to_numpy(result[0]), *result[1:]) if isinstance(result, tuple) else to_numpy(result)


def by_flax(config, x, **at):
    """Call the Flax twin without compiling anything, which would take most of the time."""
    static = {key: value for key, value in at.items() if isinstance(value, bool)}
    graph, state = nnx.split(twins(config)[1])

    def call(state, x, at):
        return nnx.merge(graph, state)(x, **at, **static)

    inputs = (state, jnp.asarray(x), {key: at[key] for key in at if key not in static})
    return by_numpy(call, *inputs)


SIDES = pytest.mark.parametrize("call", [by_torch, by_flax])


def new_cache(call, config, *sizes):
    return twins(config)[call is by_flax].init_cache(*sizes)


def decode(call, config, cache, steps=STEPS, **at):
    """Return the outputs of calls with a cache, and the cache; masks are given up to its capacity."""
    found, stop = [], 0
    for tokens in steps:
        start, stop = stop, stop + tokens
        out, cache = call(config, X[:, start:stop], cache=cache, attention_mask=np.pad(LEFT, ((0, 0), (0, 2))), **at)
        found.append(np.asarray(out))
    return np.concatenate(found, 1), cache


def assert_same(one, two, limit=1e-12):
    one, two = np.asarray(one), np.asarray(two)
    assert one.shape == two.shape
    assert np.abs(one - two).max() <= limit * np.abs(two).max()


# ---- caches


@SIDES
@pytest.mark.parametrize("label", CONFIGS)
def test_decoding_with_a_cache_is_the_full_pass(label, call):
    config = CONFIGS[label]
    full = call(config, X, attention_mask=LEFT)
    found, cache = decode(call, config, new_cache(call, config, ROWS, TOKENS + 2))
    assert_same(found, full)
    assert int(cache.length) == TOKENS


@SIDES
@pytest.mark.parametrize("absorbed", [False, True])
def test_both_forms_decode_alike(call, absorbed):
    full = call(LATENT, X, attention_mask=LEFT, absorbed=not absorbed)
    found, _ = decode(call, LATENT, new_cache(call, LATENT, ROWS, TOKENS + 2), absorbed=absorbed)
    assert_same(found, full)


@SIDES
@pytest.mark.parametrize("label", ["latent", "differential"])
def test_a_trimmed_and_reordered_cache_goes_on_from_there(label, call):
    config, order = CONFIGS[label], np.array([2, 0, 0])
    _, cache = decode(call, config, new_cache(call, config, ROWS, TOKENS + 2))
    index = torch.from_numpy(order) if call is by_torch else jnp.asarray(order)
    cache = cache.trim(4).reorder(index)
    out, _ = call(config, X[order][:, 4:6], cache=cache)
    assert_same(out, call(config, X[order], attention_mask=LEFT[order])[:, 4:6])


@SIDES
@pytest.mark.parametrize("label", ["latent", "differential"])
def test_more_tokens_than_the_capacity_are_refused(label, call):
    config = CONFIGS[label]
    message = r"tokens in the cache \(3\) and new ones \(2\) must be at most capacity \(4\)"
    _, cache = call(config, X[:, :3], cache=new_cache(call, config, ROWS, 4))
    cache = cache if call is by_torch else jax.tree.map(jnp.asarray, cache)
    module = twins(config)[call is by_flax]
    with pytest.raises(ValueError, match=message):
        module(torch.from_numpy(X[:, 3:5]) if call is by_torch else X[:, 3:5], cache=cache)


def test_a_cache_of_latents_holds_nothing_else():
    """Per token as many numbers as the latent and the key with the position have, whatever the number of heads."""
    for module in twins(LATENT):
        cache = module.init_cache(2, 10)
        assert cache.key.shape == (2, 10, 1, LATENT.latent_dim + LATENT.rope_dim)
        assert cache.value.shape == (2, 10, 1, 0)


@pytest.mark.parametrize("label", ["latent", "differential", "cross"])
def test_decoding_compiles_once_and_copies_no_cache(label):
    config = {"latent": LATENT.replace(latent_dim=64), "differential": DIFFERENTIAL, "cross": CROSS}[label]
    module = twins(config)[1]
    graph, state = nnx.split(module)
    calls = []

    def step(state, x, cache):
        calls.append(1)
        return nnx.merge(graph, state)(x, cache=cache)

    cache = module.init_cache(1, 8192)
    step = jax.jit(step, donate_argnums=2)
    if label == "cross":
        _, cache = by_flax(config, X[:1, :1], context=CONTEXT[:1], cache=cache)
        cache = jax.tree.map(jnp.asarray, cache)
    memory = step.lower(state, X[:1, :1], cache).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 0.2 * size  # blocks of a fixed number of keys
    for start in range(3):
        _, cache = step(state, X[:1, start : start + 1], cache)
    assert len(calls) == 1


# ---- the two forms of latent attention


@pytest.mark.parametrize("label", ["latent", "latent, window"])
def test_both_forms_have_the_same_numbers_and_gradients(label):
    module = twins(CONFIGS[label])[0]
    x = torch.from_numpy(X).requires_grad_()
    inputs = [x, *module.parameters()]
    found = []
    for absorbed in (False, True):
        out, weights = module(x, attention_mask=torch.tensor(LEFT), absorbed=absorbed, return_weights=True)
        total = (out * torch.from_numpy(X)).sum() + (weights**2).sum()
        found.append([out, weights, *torch.autograd.grad(total, inputs)])
    for one, two in zip(*found, strict=True):
        assert_same(one.detach(), two.detach(), 1e-11)


@SIDES
def test_one_token_with_a_cache_is_absorbed_by_default(call):
    _, cache = call(LATENT, X[:, :3], cache=new_cache(call, LATENT, ROWS, 4))
    if call is by_torch:  # a torch cache is written in place
        outs = []
        for options in ({}, {"absorbed": True}):
            outs.append(call(LATENT, X[:, 3:4], cache=cache.trim(3), **options)[0])
    else:
        outs = [call(LATENT, X[:, 3:4], cache=cache, **options)[0] for options in ({}, {"absorbed": True})]
    assert np.array_equal(outs[0], outs[1])


# ---- cross attention


@SIDES
def test_a_cached_context_answers_as_the_context_does(call):
    full = call(CROSS, X, context=CONTEXT, attention_mask=RIGHT)
    cache = new_cache(call, CROSS, ROWS, 9)
    first, cache = call(CROSS, X[:, :3], context=CONTEXT, attention_mask=RIGHT, cache=cache)
    rest, cache = call(CROSS, X[:, 3:], cache=cache)
    assert_same(np.concatenate([first, rest], 1), full)
    again, cache = call(CROSS, X[:, :3], context=CONTEXT, attention_mask=RIGHT, cache=cache)
    assert_same(again, full[:, :3])
    assert int(cache.length) == 7


@SIDES
def test_another_context_takes_the_place_of_the_first(call):
    cache = new_cache(call, CROSS, ROWS, 9)
    _, cache = call(CROSS, X, context=CONTEXT, attention_mask=RIGHT, cache=cache)
    other = CONTEXT[::-1, :4].copy()
    _, cache = call(CROSS, X[:, :1], context=other, cache=cache)
    out, cache = call(CROSS, X, cache=cache)
    assert_same(out, call(CROSS, X, context=other))
    assert int(cache.length) == 4


WRONG = {
    "no context": ({}, ValueError, "context must be given, or a cache that holds one"),
    "empty cache": ({"cache": 9}, ValueError, "context must be given, or a cache that holds one"),
    "context of integers": (
        {"context": np.ones((ROWS, 7, 5), np.int32)},
        TypeError,
        "context must have a floating-point dtype, got int32",
    ),
    "context without batch": (
        {"context": CONTEXT[0]},
        ValueError,
        "context must have shape (S, d_context) beside x (T, d_in), or (B, S, d_context) beside x (B, T, d_in), "
        "got (7, 5) beside (3, 8, 6)",
    ),
    "context too narrow": (
        {"context": CONTEXT[..., :4]},
        ValueError,
        "last dimension of context (4) must be d_context (5)",
    ),
    "context without tokens": (
        {"context": CONTEXT[:, :0]},
        ValueError,
        "context must hold at least 1 token, got shape (3, 0, 5)",
    ),
    "context of another batch": (
        {"context": CONTEXT[:2]},
        ValueError,
        "batch of context (2) must be the batch of x (3)",
    ),
    "context too long for the cache": (
        {"context": CONTEXT, "cache": 6},
        ValueError,
        "tokens in the cache (0) and new ones (7) must be at most capacity (6)",
    ),
    "mask of other tokens": (
        {"context": CONTEXT, "attention_mask": LEFT},
        ValueError,
        "2-D attention mask (3, 8) must broadcast to (B, S) = (3, 7); give a (T, S) mask as (1, 1, T, S)",
    ),
}


@pytest.mark.parametrize("label", WRONG)
def test_both_twins_refuse_alike(label):
    at, error, message = WRONG[label]
    for side, module in enumerate(twins(CROSS)):
        wrap = torch.tensor if side == 0 else (lambda array: array)
        given = {key: wrap(value) for key, value in at.items() if key != "cache"}
        if "cache" in at:
            given["cache"] = module.init_cache(ROWS, at["cache"])
        with pytest.raises(error) as caught:
            module(wrap(X), **given)
        assert str(caught.value) == message


SIZES = {
    "vocab_size": 11,
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 4,
    "decoder_ffn_dim": 4,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@functools.cache
def oracle(model_type):
    """Return the config and the cross attention of the second layer of the decoder, with weights that hide nothing."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    model = transformers.AutoModel.from_config(config).eval().double()
    generator = torch.Generator().manual_seed(0)
    attention = model.get_submodule("decoder.layers.1.encoder_attn")
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    state = {f"model.decoder.layers.1.encoder_attn.{k}": to_numpy(v) for k, v in attention.state_dict().items()}
    return config.to_dict(), attention, state


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model_type", ["bart", "whisper"])
def test_the_decoders_attention_matches_transformers(model_type, padded):
    config, attention, state = oracle(model_type)
    random = np.random.default_rng(1)
    x, context = random.normal(size=(ROWS, 4, 12)), random.normal(size=(ROWS, 7, 12))
    hidden = torch.where(torch.tensor(RIGHT), 0.0, -torch.inf)[:, None, None] if padded else None
    with torch.no_grad():
        expected = attention(torch.from_numpy(x), key_value_states=torch.from_numpy(context), attention_mask=hidden)[
            0
        ].numpy()
    mask = {"attention_mask": RIGHT} if padded else {}
    one = torch_attn.from_hf(config, 1, state)
    with torch.no_grad():
        cache = one.init_cache(ROWS, 7)
        given = {key: torch.tensor(value) for key, value in mask.items()}
        first, cache = one(torch.from_numpy(x[:, :3]), context=torch.from_numpy(context), cache=cache, **given)
        last, _ = one(torch.from_numpy(x[:, 3:]), cache=cache)
    assert_same(torch.cat([first, last], 1), expected, 1e-10)
    two = jax_attn.from_hf(config, 1, state)
    assert_same(two(x, context=context, **mask), expected, 1e-10)
    for package, module in ((torch_attn, one), (jax_attn, two)):
        back = package.to_hf(config, 1, module)
        assert {key: array.tobytes() for key, array in back.items()} == {k: a.tobytes() for k, a in state.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("package", [torch_attn, jax_attn])
@pytest.mark.parametrize("model_type", ["bart", "whisper"])
def test_rounding_errors_do_not_exceed_those_of_transformers(model_type, package, dtype):
    config, attention, state = oracle(model_type)
    layer = copy.deepcopy(attention).to(getattr(torch, dtype))
    wide = copy.deepcopy(layer).double()
    calls = []
    with precision(dtype), torch.no_grad():
        module = package.from_hf(config, 1, {key: array.astype(dtype) for key, array in state.items()})
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            x, context = (torch.randn(ROWS, n, 12, generator=random).to(getattr(torch, dtype)) for n in (4, 7))
            hidden = torch.where(torch.tensor(RIGHT), 0.0, -torch.inf)[:, None, None]
            theirs = layer(x, key_value_states=context, attention_mask=hidden.to(x.dtype))[0]
            exact = wide(x.double(), key_value_states=context.double(), attention_mask=hidden.double())[0]
            if package is torch_attn:
                ours = to_numpy(module(x, context=context, attention_mask=torch.tensor(RIGHT)))
            else:
                at = {"context": to_numpy(context), "attention_mask": RIGHT}
                ours = np.asarray(in_jit(module, to_numpy(x), at))
            calls.append((to_numpy(theirs), ours, exact.numpy()))
    verdict = judge_roundings(calls, dtype)
    assert verdict.verdict == "equal", verdict.message


def test_the_decoders_attention_to_itself_is_refused():
    config, _, state = oracle("bart")
    other = {key.replace("encoder_attn", "self_attn"): array for key, array in state.items()}
    message = r"^state holds self_attn \(model\.decoder\.layers\.1\.self_attn\), not encoder_attn$"
    with pytest.raises(ValueError, match=message):
        torch_attn.from_hf(config, 1, other)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
"""Of the published config.json."""


def test_deepseek_v3s_config_means_what_transformers_takes_it_for():
    layer = families.find_layer(DEEPSEEK_V3, 60)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(DEEPSEEK_V3))
    with torch.device("meta"):
        module = modeling_deepseek_v3.DeepseekV3Attention(config, 60)
    assert layer.names() == {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert layer.config.scale == pytest.approx(module.scaling, rel=1e-15)
    with promoted():
        cos, sin = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)(torch.ones(1), torch.tensor([[1, 100_000]]))
    angles = np.outer([1, 100_000], layer.config.position.frequencies(64))
    factor = layer.config.position.table_factor
    for ours, theirs in ((np.cos(angles), cos), (np.sin(angles), sin)):
        assert np.abs(factor * ours - theirs[0, :, :32].numpy()).max() < 1e-10


@pytest.mark.parametrize("config", [LATENT, DIFFERENTIAL, CROSS], ids=["latent", "differential", "cross"])
def test_a_torch_file_converts_to_one_of_flax_and_back(config, tmp_path):
    one, two = twins(config)
    torch_attn.save(one, tmp_path / "torch.safetensors")
    checkpoints.convert(tmp_path / "torch.safetensors", tmp_path / "flax.safetensors", to_layout="flax")
    found = checkpoints.read(tmp_path / "flax.safetensors")
    wanted = jax_attn.backend.get_weights(two)
    assert {key: array.tobytes() for key, array in found.items()} == {k: a.tobytes() for k, a in wanted.items()}
    checkpoints.convert(tmp_path / "flax.safetensors", tmp_path / "back.safetensors", to_layout="torch")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "torch.safetensors").read_bytes()
