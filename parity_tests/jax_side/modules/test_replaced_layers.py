"""Modules whose linear layers were replaced: by ``nnx.LoRA``, and by wrappers without ``kernel``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import VARIANTS

from ...contract import jax_backend, modules
from ...support.calls import cover
from ...support.calls.bad_calls import ATTENTION_MODULES, D_IN

MODERN = {variant.name: variant.examples[0] for variant in VARIANTS if variant.examples}
CACHED = [name for name in MODERN if name != "CrossAttention"]


class Wrapped(nnx.Module):
    """Calls the layer that it replaced, as an adapter does."""

    def __init__(self, layer: nnx.Linear):
        self.inner = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def adapted(layer: nnx.Linear) -> nnx.LoRA:
    """Return a layer with a low-rank addition that is not zero."""
    size, width = layer.kernel.shape
    lora = nnx.LoRA(size, 2, width, base_module=layer, param_dtype=layer.kernel.dtype, rngs=nnx.Rngs(3))
    lora.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(4), (2, width), layer.kernel.dtype)
    return lora


def replace(module: nnx.Module, kind: Any) -> int:
    """Replace the linear layers of a module; return their number."""
    layers = [(path, layer) for path, layer in nnx.iter_modules(module) if isinstance(layer, nnx.Linear)]
    for path, layer in layers:
        parent: Any = module
        for name in path[:-1]:
            parent = parent[name] if isinstance(name, int) else getattr(parent, name)
        setattr(parent, path[-1], kind(layer))
    return len(layers)


def build(name: str, dtype: Any = jnp.float32) -> tuple[Any, dict[str, Any], jax.Array]:
    """Return a module in eval mode, arguments of its calls, and an input."""
    draw = np.random.default_rng(1)
    if name in ATTENTION_MODULES:
        return modules.make(jax_backend, name), {}, jnp.asarray(draw.normal(size=(2, 5, D_IN)), dtype)
    config = MODERN[name].config
    module = getattr(jax_attn, name)(config, rngs=nnx.Rngs(0), param_dtype=dtype)
    module.eval()
    arguments = {}
    if name == "CrossAttention":
        arguments["context"] = jnp.asarray(draw.normal(size=(2, 3, config.d_context)), dtype)
    return module, arguments, jnp.asarray(draw.normal(size=(2, 5, config.d_in)), dtype)


@nnx.jit
def whole(module: nnx.Module, x: jax.Array, arguments: Any) -> jax.Array:
    """Call a module in one program: called eagerly, each of its operations would be compiled alone."""
    return module(x, **arguments)


@pytest.mark.parametrize("name", [*(name for name in ATTENTION_MODULES if name != "SelfAttention_v1"), *MODERN])
def test_wrapped_layers_give_what_the_layers_gave(name):
    module, arguments, x = build(name)
    want = whole(module, x, arguments)
    assert replace(module, Wrapped)
    np.testing.assert_allclose(whole(module, x, arguments), want, rtol=0, atol=1e-6)


@cover.rotated(("name", "dtype"), CACHED, ["float32", "bfloat16"])
def test_adapted_modules_decode_in_one_compiled_step(name, dtype):
    module, _, x = build(name, dtype)
    plain = whole(module, x, {})
    replace(module, adapted)
    want, cache, parts = whole(module, x, {}), module.init_cache(2, 5), []
    step = nnx.jit(lambda module, token, cache: module(token, cache=cache))
    for token in jnp.split(x, 5, 1):
        part, cache = step(module, token, cache)
        parts.append(part)
    assert parts[-1].dtype == want.dtype
    limit = 1e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(jnp.concatenate(parts, 1).astype("float32"), want.astype("float32"), rtol=0, atol=limit)
    assert jnp.abs(plain - want).max() > 1e-3


@pytest.mark.parametrize("name", ["GatedDeltaNet", "LinearAttention"])
def test_states_of_replaced_layers_in_float64_are_not_rounded(name):
    with jax.enable_x64(True):
        module, _, _ = build(name, jnp.float64)
        replace(module, Wrapped)
        assert module.init_cache(2, 5).state.dtype == jnp.float64
