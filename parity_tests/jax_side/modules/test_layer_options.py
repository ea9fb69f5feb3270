"""`kernel_init`, `bias_init` and `precision` of Flax modules reach every projection, and all products of a call."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jax_attn
from attn_bridge import specs
from jax_attn import functional
from jax_attn.random import TorchRngs

from ...support.calls.bad_calls import MODULES

NORM, FEED = specs.RMSNormConfig(8), specs.FeedForwardConfig(8, 12)
BLOCK = specs.DecoderBlockConfig(specs.GroupedQueryAttentionConfig(8, 2), FEED, NORM)
EXPERTS = specs.DecoderBlockConfig(
    specs.MultiHeadLatentAttentionConfig(8, 2, nope_dim=4, rope_dim=2, value_dim=4, latent_dim=6),
    specs.MixtureOfExpertsConfig(specs.FeedForwardConfig(8, 6, gated=True), num_experts=3, top_k=2),
    NORM,
)
MODELS = {
    "DecoderModel": specs.DecoderConfig(11, 8, (BLOCK, EXPERTS), NORM),
    "GPTModel": specs.GPTModelConfig(11, 9, 8, 2, 1, qkv_bias=True),
    "BertEncoder": specs.BertEncoderConfig(11, 8, 2, 1, 12, 9),
}
CROSS_BLOCK = specs.EncoderDecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), FEED, NORM, specs.CrossAttentionConfig(8, 2)
)
PARTS = {
    "DecoderBlock": EXPERTS,
    "TokenPrediction": specs.TokenPredictionConfig(BLOCK),
    "EncoderDecoderModel": specs.EncoderDecoderConfig(
        11,
        specs.StackConfig(
            8, (specs.EncoderDecoderBlockConfig(specs.GroupedQueryAttentionConfig(8, 2), FEED, NORM),), 6
        ),
        specs.StackConfig(8, (CROSS_BLOCK,), 6),
    ),
}
"""Classes that are called in other ways."""

NAMES = [
    variant.name
    for variant in specs.VARIANTS
    if not variant.is_function and variant.name not in ("LayerNorm", "RMSNorm")
] + list(MODELS)


def build(name: str, **options: object) -> nnx.Module:
    options = {"rngs": nnx.Rngs(0), **options}
    if name in MODULES:
        return getattr(jax_attn, name)(**MODULES[name], **options)
    config = {**MODELS, **PARTS}.get(name) or specs.find_variant(name).examples[0].config
    module = getattr(jax_attn, name)(config, **options)
    module.eval()
    return module


def inputs(module: nnx.Module, tokens: int = 5) -> dict[str, jax.Array]:
    config, rng = module.config, np.random.default_rng(0)
    if not hasattr(config, "d_in"):
        return {"tokens": jnp.asarray(rng.integers(11, size=(2, tokens)), "int32")}
    arrays = {"x": jnp.asarray(rng.normal(size=(2, tokens, config.d_in)), "float32")}
    if hasattr(config, "d_context"):
        arrays["context"] = jnp.asarray(rng.normal(size=(2, 3, config.d_context)), "float32")
    return arrays


def is_projected(path: tuple, name: str) -> bool:
    """Return whether a parameter is a kernel or a bias of a projection; a convolution and a norm have others."""
    if name == "SelfAttention_v1":
        return True
    layer, leaf = str(path[-2]) if len(path) > 1 else "", str(path[-1])
    return leaf in ("kernel", "bias") and not re.search("conv|norm|emb", layer)


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_initialisers_draw_every_projection_and_nothing_else(name):
    options = {"kernel_init": nnx.initializers.constant(0.25), "bias_init": nnx.initializers.constant(-3.0)}
    own, default = (nnx.to_flat_state(nnx.state(build(name, **one), nnx.Param)) for one in (options, {}))
    projected = [path for path, _ in own if is_projected(path, name)]
    assert projected
    for (path, leaf), (_, drawn) in zip(own, default, strict=True):
        if path not in projected:
            assert leaf.shape == drawn.shape
            continue
        np.testing.assert_array_equal(leaf[...], -3.0 if path[-1] == "bias" else 0.25, err_msg=str(path))


def products(function: object, *arguments: object) -> tuple[int, int]:
    """Return how many products of matrices a program for a GPU has, and how many of them have the highest precision."""
    text = export.export(jax.jit(function), platforms=("cuda",))(*arguments).mlir_module()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line or "stablehlo.convolution" in line]
    return len(lines), sum("HIGHEST" in line for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_all_products_of_a_call_and_of_its_gradients_have_the_precision(name):
    module = build(name, precision="highest")
    assert all(part.precision == "highest" for _, part in nnx.iter_modules(module) if isinstance(part, nnx.Linear))
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    others = inputs(module)
    first = [others.pop(next(iter(others)))]

    def loss(weights: nnx.State) -> jax.Array:
        return sum((one**2).sum() for one in jax.tree.leaves(nnx.merge(graph, weights, rest)(*first, **others)))

    # A gradient of a compiled program is traced after the call, when its context has ended.
    total, highest = products(jax.grad(jax.jit(loss)), weights)
    assert total == highest > 3


@pytest.mark.parametrize("implementation", ["reference", "blocked", "cpu_flash", "few_queries"])
@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]])
def test_every_implementation_has_the_precision_of_the_call(implementation, derivative):
    if functional.explain(*[jnp.ones((1, 300, 2, 8))] * 3)[implementation] == "llvmlite is not installed":
        pytest.skip("the extra cpu is not installed")
    module = jax_attn.MultiHeadAttention(
        8, 8, 300, num_heads=2, rngs=nnx.Rngs(0), precision=jax.lax.Precision.HIGHEST, implementation=implementation
    )
    total, highest = products(derivative(jax.jit(lambda x: module(x).sum())), jnp.ones((1, 300, 8)))
    assert total == highest > 3


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_precision(name):
    parts = [part for _, part in nnx.iter_modules(build(name, precision="highest")) if isinstance(part, nnx.Linear)]
    assert len(parts) > 3
    assert {part.precision for part in parts} == {"highest"}


def test_without_a_precision_a_call_takes_that_of_the_context():
    module, x = build("MultiHeadAttention"), jnp.ones((2, 5, 4))
    assert products(lambda x: module(x), x)[1] == 0
    with jax.default_matmul_precision("highest"):
        total, highest = products(lambda x: module(x), x)
    assert total == highest > 3


def test_options_end_with_the_constructor():
    build("GroupedQueryAttention", kernel_init=nnx.initializers.zeros, precision="highest")
    module = build("GroupedQueryAttention")
    assert module.precision is None
    assert module.W_query.precision is None
    assert np.abs(module.W_query.kernel[...]).max() > 0.0


def test_a_loaded_model_takes_a_precision(tmp_path):
    model = build("DecoderModel")
    model.save_pretrained(tmp_path / "model")
    loaded = jax_attn.DecoderModel.from_pretrained(
        tmp_path / "model", precision="highest", kernel_init=nnx.initializers.zeros
    )
    assert loaded.trf_blocks[0].attention.W_query.precision == "highest"
    np.testing.assert_array_equal(loaded.out_head.kernel[...], model.out_head.kernel[...])


def test_help_shows_the_options():
    for name in NAMES:
        shown = list(inspect.signature(getattr(jax_attn, name).__init__).parameters)
        assert shown[-3:] == ["kernel_init", "bias_init", "precision"], name


def test_a_subclass_has_its_own_constructor():
    class Deep(jax_attn.MultiHeadAttention):
        def __init__(self, layers: int, **options: object):
            super().__init__(4, 4, 6, **options)
            self.layers = layers

    module = Deep(3, rngs=nnx.Rngs(0), precision="highest")
    assert (module.layers, module.precision) == (3, "highest")


BAD = {
    "a name of no precision": (
        {"precision": "best"},
        ValueError,
        "precision ('best') must be a name that jax.default_matmul_precision takes",
    ),
    "a precision of another kind": (
        {"precision": 3},
        TypeError,
        "precision must be a name or a jax.lax.Precision, got int",
    ),
    "two precisions": (
        {"precision": ("highest", "default")},
        ValueError,
        "precision must be the same for both operands of attention, got ('highest', 'default')",
    ),
    "numbers for an initialiser": (
        {"kernel_init": 0.1},
        TypeError,
        "kernel_init must be a function of a key, a shape and a dtype, got float",
    ),
    "an initialiser and torch's numbers": (
        {"kernel_init": nnx.initializers.zeros, "rngs": TorchRngs(0)},
        TypeError,
        "kernel_init and bias_init draw from a key of JAX, which a TorchRngs has not; give nnx.Rngs",
    ),
    "another name": ({"kernel_inti": None}, TypeError, "got an unexpected keyword argument 'kernel_inti'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused_in_one_line(case):
    options, error, message = BAD[case]
    for name in ("MultiHeadAttention", "GroupedQueryAttention", "DecoderModel"):
        with pytest.raises(error, match=re.escape(message)) as raised:
            build(name, **options)
        assert "\n" not in str(raised.value)
