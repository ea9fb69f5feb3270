"""What is not an argument at all gets one line with its name, its value and the rule, and never a library's error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints, masks
from attn_bridge.specs import GroupedQueryAttentionConfig
from torch_attn.random import JaxRngs

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
SHAPES = {"q_proj.weight": (8, 8), "k_proj.weight": (4, 8), "v_proj.weight": (4, 8), "o_proj.weight": (8, 8)}
CONFIG = GroupedQueryAttentionConfig(d_in=8, num_heads=4, num_kv_heads=2)


def state(layer: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(layer)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def torch_layer() -> torch_attn.GroupedQueryAttention:
    return torch_attn.GroupedQueryAttention(CONFIG)


def flax_layer() -> jax_attn.GroupedQueryAttention:
    return jax_attn.GroupedQueryAttention(CONFIG, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rngs", [0, np.zeros(2, np.uint32)], ids=["a seed", "a key"])
@pytest.mark.parametrize("build", ["SelfAttention_v1", "SelfAttention_v2"])
def test_a_seed_is_refused_as_rngs(build, rngs):
    with pytest.raises(TypeError, match=r"^rngs must be a torch_attn.random.JaxRngs or None, got "):
        getattr(torch_attn, build)(3, 2, rngs=rngs)
    with pytest.raises(TypeError, match=r"^rngs must be an nnx.Rngs or a jax_attn.random.TorchRngs, got "):
        getattr(jax_attn, build)(3, 2, rngs=rngs)


def test_the_other_frameworks_rngs_are_refused():
    with pytest.raises(TypeError, match=r"^rngs must be .*, got flax.nnx.rnglib.Rngs$"):
        torch_attn.MultiHeadAttention(3, 4, 6, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^rngs must be .*, got torch_attn.random.JaxRngs$"):
        jax_attn.MultiHeadAttention(3, 4, 6, rngs=JaxRngs(0))


@pytest.mark.parametrize(("module", "x"), [(torch_layer, torch.ones(1, 3, 8)), (flax_layer, jnp.ones((1, 3, 8)))])
def test_a_number_is_refused_as_a_cache(module, x):
    with pytest.raises(TypeError, match=r"^cache must be what init_cache of the module returns, got int$"):
        module()(x, cache=3)


def test_masks_refuse_sizes_that_no_position_has():
    for make in (masks.sliding_window, masks.chunked, masks.prefix):
        with pytest.raises(ValueError, match=r"^size \(4611686018427387904\) must be at most 2147483647"):
            make(2**62)
    with pytest.raises(ValueError, match=r"^lengths \(-1 among them\) must be at least 0$"):
        masks.padding([3, -1])
    assert masks.sliding_window(2**31 - 1).size == 2**31 - 1


@pytest.mark.parametrize("package", [torch_attn, jax_attn])
def test_none_is_refused_as_a_module(package):
    with pytest.raises(TypeError, match=r"^module must be a (torch.nn|flax.nnx).Module, got NoneType$"):
        package.to_hf(LLAMA, 0, None)


MAKERS = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "on the meta device": lambda: torch.empty(2, 2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_tensors_without_plain_numbers_are_named(kind, tmp_path):
    module = torch.nn.Module()
    module.register_buffer("table", MAKERS[kind]())
    with pytest.raises(TypeError, match=rf"^table must be a dense tensor with numbers, it is {kind}"):
        torch_attn.save(module, tmp_path / "out.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "module"), [(torch_attn, torch_layer), (jax_attn, flax_layer)])
def test_swapped_paths_and_modules_are_named(package, module, tmp_path):
    with pytest.raises(TypeError, match=r"^save\(module, path\): module must be a .*Module, got str$"):
        package.save(str(tmp_path / "out.npz"), module())
    package.save(module(), tmp_path / "out.npz")
    with pytest.raises(TypeError, match=r"^load\(path, module\): module must be a .*Module, got PosixPath$"):
        package.load(module(), tmp_path / "out.npz")


def test_a_number_is_refused_as_rules():
    with pytest.raises(TypeError, match=r"^rules must be Rules or a list of Rule, got int$"):
        attn_bridge.transfer(torch_layer(), flax_layer(), rules=3)


def test_a_string_is_refused_as_max_memory(tmp_path):
    torch_attn.save(torch_layer(), tmp_path / "in.npz")
    with pytest.raises(ValueError, match=r"^max_memory \('1GB'\) must be a whole number of bytes"):
        checkpoints.convert(tmp_path / "in.npz", tmp_path / "out.npz", max_memory="1GB")
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())


@pytest.mark.parametrize("package", [torch_attn, jax_attn])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_a_layer_is_loaded_from_any_whole_model(package, kind):
    as_kind = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[kind]
    whole = {
        f"model.layers.{layer}.self_attn.{name}": as_kind(array)
        for layer in range(3)
        for name, array in state(layer).items()
    }
    whole |= {"model.embed_tokens.weight": as_kind(np.ones((5, 8), np.float32)), "lm_head.weight": as_kind(np.eye(8))}
    module = package.from_hf(LLAMA, 1, whole)
    back = package.to_hf(LLAMA, 1, module, prefix="")
    assert back.keys() == SHAPES.keys()
    assert all(np.array_equal(back[name], array) for name, array in state(1).items())


def test_an_unknown_tensor_next_to_a_layer_is_refused():
    with pytest.raises(attn_bridge.WeightsMismatchError, match="bogus"):
        torch_attn.from_hf(LLAMA, 0, state() | {"bogus.weight": np.ones(3, np.float32)})


def test_a_whole_model_in_flax_needs_no_random_numbers(tmp_path):
    config = {"vocab_size": 9, "context_length": 6, "emb_dim": 4, "n_heads": 2, "n_layers": 1}
    torch_attn.GPTModel(config).save_pretrained(tmp_path / "gpt")
    one = jax_attn.GPTModel.from_pretrained(tmp_path / "gpt")
    two = torch_attn.GPTModel.from_pretrained(tmp_path / "gpt")
    ids = np.array([[3, 1, 4]])
    np.testing.assert_allclose(np.asarray(one(ids)), two(torch.from_numpy(ids)).detach().numpy(), atol=1e-5)


def test_weights_that_are_loaded_are_not_bound_to_a_device(tmp_path):
    torch_attn.save(torch_layer(), tmp_path / "in.npz")
    layer = flax_layer()
    jax_attn.load(tmp_path / "in.npz", layer)
    steps = []

    @jax.jit
    def step(module, x, cache):
        steps.append(x.shape)
        return module(x, cache=cache)

    cache, x = layer.init_cache(1, 8), jnp.ones((1, 1, 8))
    for _ in range(3):
        x, cache = step(layer, x, cache)
    assert len(steps) == step._cache_size() == 1
