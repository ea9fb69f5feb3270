"""The same seed gives both frameworks the same numbers: draws, initial weights, and dropout masks call after call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import rng, specs
from jax_attn.linear import Linear
from jax_attn.random import TorchRngs
from torch_attn import random
from torch_attn.random import JaxRngs

from ..support.calls import cover

SIZE = 60
"""Elements that JAX draws per case; a shape only groups them, and a shorter draw is a prefix."""

NAMES = ("params", "dropout", "noise", "default")
CASES = {False: 700, True: 300}
"""Whether 64-bit types are on in JAX -> the number of random cases."""


def walk(rngs: Any, steps: list[tuple[str, str]]) -> Any:
    """Go through streams as `steps` say and return a key."""
    for kind, name in steps:
        if kind == "fork":
            rngs = rngs.fork()
        elif kind == "draw":
            rngs[name]()
        elif kind == "fork one":
            rngs[name].fork()
    return rngs[steps[-1][1]]()


def random_cases(x64: bool) -> list[dict[str, Any]]:
    choose = np.random.default_rng(int(x64))
    cases = []
    for _ in range(CASES[x64]):
        seeds = {n: int(choose.integers(-(2**63), 2**63)) for n in choose.choice(NAMES[:3], choose.integers(3), False)}
        kinds = choose.choice(["fork", "draw", "fork one"], choose.integers(1, 5))
        low = float(choose.normal())
        cases.append(
            {
                "seeds": {**seeds, "default": int(choose.integers(-(2**31), 2**31))},
                "steps": [(str(kind), str(choose.choice(NAMES))) for kind in kinds],
                "shape": tuple(int(size) for size in choose.integers(0, [3, 4, 5])[: choose.integers(0, 4)]),
                "p": float(choose.random()),
                "bounds": (low, low + float(choose.exponential())),
            }
        )
    return cases


@pytest.mark.optimized
@pytest.mark.parametrize("x64", CASES)
def test_torch_draws_what_jax_draws_in_1000_random_cases(x64: bool) -> None:
    cases = random_cases(x64)
    keys = [walk(JaxRngs(**case["seeds"], x64=x64), case["steps"]) for case in cases]
    unsigned = ("uint8", "uint16", "uint32", *(["uint64"] if x64 else []))
    floats = ("float16", "bfloat16", "float32", *(["float64"] if x64 else []))
    with jax.enable_x64(x64):
        theirs = jnp.stack([walk(nnx.Rngs(**case["seeds"]), case["steps"]) for case in cases])
        np.testing.assert_array_equal(
            torch.stack(keys).numpy().view(np.uint32), np.asarray(jax.random.key_data(theirs))
        )
        low, high = jnp.asarray([case["bounds"] for case in cases]).T
        probabilities = jnp.asarray([case["p"] for case in cases])
        drawn = {name: np.asarray(over(theirs, lambda k, n=name: jax.random.bits(k, (SIZE,), n))) for name in unsigned}
        for name in floats:
            drawn[name] = np.asarray(over(theirs, lambda k, n=name: jax.random.uniform(k, (SIZE,), n)))
            drawn[name, "bounds"] = np.asarray(
                over(theirs, lambda k, a, b, n=name: jax.random.uniform(k, (SIZE,), n, a, b), low, high)
            )
        drawn["bernoulli"] = np.asarray(over(theirs, lambda k, p: jax.random.bernoulli(k, p, (SIZE,)), probabilities))
    for index, (case, key) in enumerate(zip(cases, keys, strict=True)):
        shape = case["shape"]
        found = {name: random.bits(key, shape, getattr(torch, name)) for name in unsigned}
        for name in floats:
            dtype = getattr(torch, name)
            found[name] = random.uniform(key, shape, dtype)
            found[name, "bounds"] = random.uniform(key, shape, dtype, *case["bounds"], x64=x64)
        found["bernoulli"] = random.bernoulli(key, case["p"], shape, x64=x64)
        for name, result in found.items():
            raw = result.view(torch.int16) if result.dtype == torch.bfloat16 else result
            expected = drawn[name][index, : result.numel()].reshape(shape)
            assert raw.numpy().tobytes() == expected.tobytes(), (name, case)


def over(keys: Any, draw: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(jax.vmap(draw))(keys, *arguments)


def test_a_shape_only_groups_what_jax_draws() -> None:
    key = jax.random.key(3)
    flat = jax.random.bits(key, (SIZE,))
    for shape in ((3, 4, 5), (2, 7), (1,)):
        assert (jax.random.bits(key, shape) == flat[: np.prod(shape)].reshape(shape)).all()


def test_flax_draws_what_torch_draws_in_1000_random_cases() -> None:
    choose = np.random.default_rng(2)
    for _ in range(1000):
        seed = int(choose.integers(-(2**63), 2**63))
        torch.manual_seed(seed)
        generator = rng.TorchGenerator(seed)
        for _ in range(choose.integers(1, 4)):
            d_in, d_out = (int(size) for size in choose.integers(1, 40, 2))
            layer = nn.Linear(d_in, d_out, bias=bool(choose.integers(2)))
            bound = 3**0.5 * ((2 / 6) ** 0.5 / d_in**0.5)
            np.testing.assert_array_equal(
                generator.uniform((d_out, d_in), np.float32, -bound, bound), layer.weight.detach().numpy()
            )
            if layer.bias is not None:
                bound = 1 / d_in**0.5
                np.testing.assert_array_equal(
                    generator.uniform(d_out, np.float32, -bound, bound), layer.bias.detach().numpy()
                )
            shape = tuple(int(size) for size in choose.integers(0, 9, choose.integers(0, 4)))
            dtype = "float64" if choose.integers(4) == 0 else "float32"
            np.testing.assert_array_equal(
                generator.uniform(shape, dtype), torch.rand(shape, dtype=getattr(torch, dtype)).numpy()
            )
            rate = float(choose.random())
            kept = nn.functional.dropout(torch.ones(shape), rate) != 0
            np.testing.assert_array_equal(generator.bernoulli(shape, 1.0 - rate), kept.numpy())


def test_linear_layers_of_flax_start_as_those_of_torch() -> None:
    for seed in range(100):
        d_in, d_out = 1 + seed % 7, 1 + seed % 5
        torch.manual_seed(seed)
        layer, ours = nn.Linear(d_in, d_out), Linear(d_in, d_out, rngs=TorchRngs(seed))
        np.testing.assert_array_equal(np.asarray(ours.kernel[...]).T, layer.weight.detach().numpy())
        np.testing.assert_array_equal(np.asarray(ours.bias[...]), layer.bias.detach().numpy())


# ---- modules: name -> constructor of either package, the shape of the input


GPT = {
    "vocab_size": 40,
    "context_length": 8,
    "emb_dim": 8,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.2,
    "qkv_bias": True,
}
BERT = specs.BertEncoderConfig(
    vocab_size=40,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=8,
    type_vocab_size=2,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.3,
)
MODULES: dict[str, tuple[Callable[..., Any], bool]] = {
    "SelfAttention_v1": (lambda package, **k: package.SelfAttention_v1(6, 4, **k), False),
    "SelfAttention_v2": (lambda package, **k: package.SelfAttention_v2(6, 4, True, **k), False),
    "CausalAttention": (lambda package, **k: package.CausalAttention(6, 4, 8, 0.4, True, **k), False),
    "MultiHeadAttentionWrapper": (lambda package, **k: package.MultiHeadAttentionWrapper(6, 4, 8, 0.4, 3, **k), False),
    "MultiHeadAttention": (lambda package, **k: package.MultiHeadAttention(6, 8, 8, 0.4, 2, True, **k), False),
    "GPTModel": (lambda package, **k: package.GPTModel(GPT, **k), True),
    "BertEncoder": (lambda package, **k: package.BertEncoder(BERT, **k), True),
}


def inputs(ids: bool) -> np.ndarray:
    choose = np.random.default_rng(5)
    return choose.integers(0, 40, (2, 7)) if ids else choose.standard_normal((2, 7, 6)).astype(np.float32)


def weights_in_torch(name: str, flax_module: nnx.Module) -> dict[str, torch.Tensor]:
    holder = MODULES[name][0](torch_attn)
    attn_bridge.transfer(flax_module, holder)
    return holder.state_dict()


def assert_same_calls(torch_module: nn.Module, flax_module: Any, x: np.ndarray) -> None:
    """Call both three times, the last time compiled in Flax; other masks would differ by whole weights."""
    outputs = []
    for call in (flax_module, flax_module, nnx.jit(lambda module, x: module(x))):
        given = (x,) if call is flax_module else (flax_module, x)
        outputs.append(torch_module(torch.from_numpy(x)).detach().numpy())
        np.testing.assert_allclose(outputs[-1], np.asarray(call(*given)), rtol=1e-4, atol=2e-5)
    if any(isinstance(part, nn.Dropout) for part in torch_module.modules()):
        assert np.abs(outputs[0] - outputs[1]).max() > 1e-2


@pytest.mark.optimized
@cover.rotated(
    ("name", "streams"), list(MODULES), [{"default": 3}, {"default": 3, "dropout": 9}, {"params": 4, "dropout": 9}]
)
def test_torch_modules_start_and_drop_as_flax(name: str, streams: dict[str, int]) -> None:
    make, ids = MODULES[name]
    torch_module, flax_module = make(torch_attn, rngs=JaxRngs(**streams)), make(jax_attn, rngs=nnx.Rngs(**streams))
    for parameter, expected in weights_in_torch(name, flax_module).items():
        found = torch_module.state_dict()[parameter]
        if parameter.endswith("_emb.weight"):  # normal draws, see docs/randomness.md
            torch.testing.assert_close(found, expected, rtol=5e-7, atol=1e-7, msg=parameter)
        else:
            assert torch.equal(found, expected), parameter
    assert_same_calls(torch_module, flax_module, inputs(ids))


@pytest.mark.parametrize("name", MODULES)
def test_flax_modules_start_and_drop_as_torch(name: str) -> None:
    make, ids = MODULES[name]
    torch.manual_seed(11)
    make(torch_attn)  # the copy in `weights_in_torch` draws, too
    rngs = TorchRngs(11)
    flax_module = make(jax_attn, rngs=rngs)
    expected = weights_in_torch(name, flax_module)
    torch.manual_seed(11)
    torch_module = make(torch_attn)
    for parameter, found in torch_module.state_dict().items():
        # torch's normal draws are bit-equal with AVX2 only.
        exact = not parameter.endswith("_emb.weight") or torch.backends.cpu.get_cpu_capability() == "AVX2"
        assert torch.equal(found, expected[parameter]) if exact else torch.allclose(found, expected[parameter]), (
            parameter
        )
    assert_same_calls(torch_module, flax_module, inputs(ids))


@pytest.mark.parametrize("rate", [0.1, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_kept_is_scaled_alike(rate: float, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    ours = torch_attn.dropout.Dropout(rate, rngs=JaxRngs(6)).train()(torch.from_numpy(x).to(getattr(torch, dtype)))
    theirs = nnx.Dropout(rate, rngs=nnx.Rngs(6))(jnp.asarray(x, dtype))
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(theirs, np.float32))


def test_where_all_is_dropped_the_gradient_is_zero() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    torch_attn.dropout.Dropout(1.0, rngs=JaxRngs(6))(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))
    layer = jax_attn.dropout.Dropout(1.0, rngs=TorchRngs(6))
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x).sum())(jnp.ones((3, 4))), 0.0)


def test_dropout_of_double_precision_is_alike_under_x64() -> None:
    x = np.random.default_rng(0).standard_normal((30, 40))
    with jax.enable_x64(True):
        theirs = np.asarray(jax_attn.dropout.Dropout(0.3, rngs=nnx.Rngs(6))(jnp.asarray(x)))
    ours = torch_attn.dropout.Dropout(0.3, rngs=JaxRngs(6, x64=True))(torch.from_numpy(x))
    np.testing.assert_array_equal(ours.numpy(), theirs)
