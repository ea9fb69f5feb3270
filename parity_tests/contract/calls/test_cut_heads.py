"""Layers that hold some of the heads, as those of a device under tensor parallelism do, compute just those heads."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from attn_bridge import specs

from ...support.models import drawn_decoders
from .. import backends, modules

backend = backends.fixture(backends.adapters("backend"))

CASES = {
    "MultiHeadAttention": {"d_in": 4, "d_out": 8, "context_length": 5, "num_heads": 4},
    "GroupedQueryAttention": {"config": specs.GroupedQueryAttentionConfig(4, 4, 2, 2, position=specs.Rotary())},
    "CrossAttention": {"config": specs.CrossAttentionConfig(4, 4, num_kv_heads=2, head_dim=2)},
    "LinearAttention": {"config": specs.LinearAttentionConfig(4, 4, head_dim=2, value_head_dim=6)},
    "MultiHeadLatentAttention": {"config": specs.MultiHeadLatentAttentionConfig(4, 4, 3, 4, 2, 2)},
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_of_halves_of_the_heads_add_up(backend, name):
    x, options = backend.as_argument(modules.draw(2, 5, 4)), {}
    if name == "CrossAttention":
        options["context"] = backend.as_argument(modules.draw(2, 6, 4, seed=1))

    def output(half=None):
        module = backend.build(name, **CASES[name])
        weights = modules.draw_weights(module.config, 0)
        if "out_proj.bias" in weights:  # each half would add it
            weights["out_proj.bias"][:] = 0.0
        backend.load(module, weights)
        module.eval()
        if half is not None:
            for layer in (module.W_query, module.W_key, module.W_value):
                backend.halve(layer, half, "outputs")
            backend.halve(module.out_proj, half, "inputs")
        found = module(x, **options)
        return np.asarray(found.detach() if hasattr(found, "detach") else found)

    expected = output()
    np.testing.assert_allclose(output(0) + output(1), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def layer_of(module, path):
    """Return a layer by its path, in which numbers are places in a list."""
    return functools.reduce(
        lambda part, name: part[int(name)] if name.isdigit() else getattr(part, name), path.split("."), module
    )


QUERIES, PROJECTIONS = ("W_query",), ("W_query", "W_key", "W_value")
EXAMPLES = {variant.name: variant.examples[0].config for variant in specs.VARIANTS if variant.examples}
INDEXED = EXAMPLES["SparseIndexedAttention"]
REFUSED = {
    "keys alone": (
        "MultiHeadAttention",
        CASES["MultiHeadAttention"],
        PROJECTIONS[1:],
        r"\(4\) and .* \(2\) must be cut alike",
    ),
    "queries alone": ("GroupedQueryAttention", CASES["GroupedQueryAttention"], QUERIES, "with 2 to a key head"),
    "latent keys alone": ("MultiHeadLatentAttention", CASES["MultiHeadLatentAttention"], PROJECTIONS[1:], "alike"),
    "rotary keys": ("MultiHeadLatentAttention", CASES["MultiHeadLatentAttention"], ("W_key_rope",), r"\(1\) must be 2"),
    "half a head": (
        "GroupedQueryAttention",
        {"config": specs.GroupedQueryAttentionConfig(4, 2, 1, 4)},
        PROJECTIONS,
        r"width of W_value \(2\) must be a multiple of the width of a head \(4\)",
    ),
    "a single head": ("CausalAttention", {"d_in": 4, "d_out": 4, "context_length": 5}, PROJECTIONS, r"\(2\) must be 4"),
    "half of each head": (
        "MultiHeadAttentionWrapper",
        {"d_in": 4, "d_out": 4, "context_length": 5, "num_heads": 2},
        ("heads.0.W_query", "heads.1.W_query"),
        r"\(20\) must be 24",
    ),
    "half of a pair": ("DifferentialAttention", {"config": EXAMPLES["DifferentialAttention"]}, PROJECTIONS, "W_query"),
    "decays": ("GatedDeltaNet", {"config": EXAMPLES["GatedDeltaNet"]}, ("W_alpha",), "W_alpha"),
    "gates": ("GatedDeltaNet", {"config": EXAMPLES["GatedDeltaNet"]}, ("W_gate",), "W_gate"),
    "convolved": (
        "GatedDeltaNet",
        {"config": EXAMPLES["GatedDeltaNet"]},
        QUERIES,
        "the input of a convolution",
    ),
    "values of features": (
        "LinearAttention",
        CASES["LinearAttention"],
        ("W_value",),
        r"\(4\) and of W_value \(2\) must",
    ),
    "values of a single head": (
        "CausalAttention",
        {"d_in": 4, "d_out": 4, "context_length": 5},
        ("W_value",),
        r"width of W_value \(2\) must be 4",
    ),
    "values of a head": (
        "SelfAttention_v2",
        {"d_in": 4, "d_out": 4},
        ("W_value",),
        r"width of W_value \(2\) must be 4",
    ),
    "states of fewer heads": (
        "LightningAttention",
        {"config": EXAMPLES["LightningAttention"]},
        PROJECTIONS,
        r"width of W_query \(6\) must be 12",
    ),
    "products alone": ("GatedConvolution", {"config": EXAMPLES["GatedConvolution"]}, PROJECTIONS[1:], "width of W_key"),
    "indices": ("SparseIndexedAttention", {"config": INDEXED}, ("indexer.W_index_query",), "width of W_index_query"),
}
SINGLE = {
    **{
        f"{path} of {name}": (name, path, rf"width of {path} \(1\) must be {rank}: the layer can't be cut")
        for name, path, rank in (
            ("KimiDeltaAttention", "W_decay_down", 5),
            ("KimiDeltaAttention", "W_gate_down", 5),
            ("Mamba", "W_step_down", 2),
        )
    },
    "gates of states": ("LightningAttention", "W_gate", r"width of W_gate \(1\) must be 12"),
    **{
        f"{name} of products": ("GatedConvolution", name, rf"width of {name} \(1\) must be 6")
        for name in ("W_query", "W_key", "W_value")
    },
    "weights of indices": (
        "SparseIndexedAttention",
        "indexer.W_index_weights",
        r"width of W_index_weights \(1\) must be 4",
    ),
}
"""Layers that were cut to a single number, which broadcasts to all heads or channels."""

VECTORS = (
    ("GroupedQueryAttention", "persimmon", "q_norm.scale", -1),
    ("GroupedQueryAttention", "persimmon", "q_norm.shift", -1),
    ("GroupedQueryAttention", "t5-encoder", "relative_bias", -1),
    ("DifferentialAttention", "diffllama", "lambda_q1", -1),
    ("GatedConvolution", "lfm2", "conv1d.bias", -1),
    ("GatedDeltaNet", "qwen3-next", "A_log", -1),
    ("KimiDeltaAttention", "kimi-linear", "A_log", -1),
    ("KimiDeltaAttention", "kimi-linear", "dt_bias", -1),
    ("Mamba", "mamba", "A_log", 0),
    ("Mamba", "mamba", "D", -1),
    ("Mamba2", "mamba2", "A_log", -1),
    ("Mamba2", "mamba2", "D", -1),
    ("Mamba2", "mamba2", "norm.scale", -1),
)
"""Variant, example, parameter, axis."""

PARTS = (
    ("llama", "trf_blocks.0.att.out_proj", r"width of out_proj \(1\) must be 32"),
    ("llama", "trf_blocks.0.ff.fc1", r"width of fc1 \(1\) must be 20"),
    ("llama", "trf_blocks.0.ff.fc3", r"width of fc3 \(1\) must be 32"),
    ("gpt2", "trf_blocks.0.ff.layers.2", r"width of layers.2 \(1\) must be 32"),
    ("qwen2_moe", "trf_blocks.0.ff.router", r"width of router \(1\) must be 4"),
    ("gemma3n_text", "layer_linear", r"width of layer_linear \(1\) must be 24"),
    ("gemma3n_text", "trf_blocks.0.layer_gate", r"width of layer_gate \(1\) must be 6"),
    ("gemma3n_text", "trf_blocks.0.altup.correction", r"width of correction \(1\) must be 3"),
    ("gemma3n_text", "trf_blocks.0.altup.prediction", r"width of prediction \(1\) must be 9"),
    ("falcon_h1", "trf_blocks.0.linear_att.out_proj", r"width of linear_att.out_proj \(1\) must be 32"),
)
"""Family, layer of its model, message."""


@pytest.mark.parametrize("label", REFUSED)
def test_other_cuts_are_refused(backend, label):
    """Each head would read keys of another, or a single number be broadcast to all heads, without a word."""
    name, arguments, layers, message = REFUSED[label]
    module = backend.build(name, **arguments)
    for path in layers:
        backend.halve(layer_of(module, path), 0, "outputs")
    width = arguments["d_in"] if "d_in" in arguments else arguments["config"].d_in
    with pytest.raises(ValueError, match=message):
        module(backend.as_argument(modules.draw(2, 5, width)))


@pytest.mark.parametrize("label", SINGLE)
def test_a_layer_of_a_single_number_is_refused(backend, label):
    """It would be the gate, or the weight, of every head."""
    name, path, message = SINGLE[label]
    module = backend.build(name, config=EXAMPLES[name])
    backend.keep_first(layer_of(module, path))
    with pytest.raises(ValueError, match=message):
        module(backend.as_argument(modules.draw(2, 5, EXAMPLES[name].d_in)))


def example(name, label):
    """Return a config of a variant by the name of its example."""
    return next(each.config for each in specs.find_variant(name).examples if each.name == label)


@pytest.mark.parametrize(("name", "label", "path", "axis"), VECTORS)
def test_a_parameter_of_a_single_number_is_refused(backend, name, label, path, axis):
    """It would be that of every head or channel."""
    config = example(name, label)
    module = backend.build(name, config=config)
    owner, _, leaf = path.rpartition(".")
    backend.keep_first_number(layer_of(module, owner) if owner else module, leaf, axis)
    with pytest.raises(ValueError, match="must "):
        module(backend.as_argument(modules.draw(2, 5, config.d_in)))


def test_a_gate_of_a_single_number_is_refused(backend):
    config = example("GroupedQueryAttention", "qwen3-next")
    module = backend.build("GroupedQueryAttention", config=config)
    backend.keep_first(module.W_gate)
    with pytest.raises(ValueError, match=r"width of W_gate \(1\) must be"):
        module(backend.as_argument(modules.draw(2, 5, config.d_in)))


@pytest.mark.parametrize(("family", "path", "message"), PARTS)
def test_a_layer_of_a_model_of_a_single_number_is_refused(backend, family, path, message):
    """A sum with the other channels, or a product, would broadcast it."""
    model = backend.build("DecoderModel", config=drawn_decoders.draw(family, 0))
    backend.keep_first(layer_of(model, path))
    model.eval()
    with pytest.raises(ValueError, match=message):
        model(backend.as_argument(np.array([[1, 2, 3]], "int32")))
