"""DeepMind's package `gemma` itself, where it is importable: its own modules run with what `gemma-linen` gives.

It needs `kauldron`, and with that much of TensorFlow, so that no installation of this project has it. To run it, put
both on the path: ``pip install --no-deps --target DIR gemma kauldron ...``, ``PYTHONPATH=$PWD:DIR``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import traverse_util

from attn_bridge import checkpoints

pytest.importorskip("gemma.gm.nn._transformer", reason="gemma and kauldron are not installed", exc_type=ImportError)
from gemma.gm.nn import _config, _modules, _transformer

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
IDS = np.random.default_rng(0).integers(1, 37, size=(2, 12))
LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
KINDS = {2: (LOCAL, GLOBAL) * 2, 3: (LOCAL,) * 5 + (GLOBAL,)}


def made_by_transformers(generation, kv_heads):
    kinds = ["full_attention" if kind is GLOBAL else "sliding_attention" for kind in KINDS[generation]]
    sizes = {**SIZES, "num_key_value_heads": kv_heads, "num_hidden_layers": len(kinds), "layer_types": kinds}
    if generation == 2:
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))
    else:
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))
    generator = torch.Generator().manual_seed(generation)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def made_by_gemma(generation, kv_heads, transposed):
    own = (
        {"attn_logits_soft_cap": 50.0, "final_logit_softcap": 30.0}
        if generation == 2
        else {"final_logit_softcap": None, "use_qk_norm": True, "global_base_frequency": 1_000_000}
    )
    config = _config.TransformerConfig(
        num_embed=SIZES["vocab_size"],
        embed_dim=SIZES["hidden_size"],
        hidden_dim=SIZES["intermediate_size"],
        num_heads=SIZES["num_attention_heads"],
        head_dim=SIZES["head_dim"],
        num_kv_heads=kv_heads,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=KINDS[generation],
        sliding_window_size=SIZES["sliding_window"],
        transpose_gating_einsum=bool(transposed),
        **own,
    )
    return _transformer.Transformer(config=config, dtype=jnp.float64)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("generation", KINDS)
def test_its_modules_give_the_logits_of_transformers(tmp_path, generation, kv_heads, transposed):
    model = made_by_transformers(generation, kv_heads)
    model.save_pretrained(tmp_path / "hf")
    settings = {"transposed": transposed}
    there = checkpoints.convert(tmp_path / "hf", tmp_path / "x", to_layout="gemma-linen", settings=settings).target
    found = checkpoints.read(there)
    with jax.enable_x64(True):
        theirs = made_by_gemma(generation, kv_heads, transposed)
        own = traverse_util.flatten_dict(theirs.init(jax.random.key(0), jnp.asarray(IDS))["params"], sep=".")
        assert {name: array.shape for name, array in own.items()} == {name: one.shape for name, one in found.items()}
        params = traverse_util.unflatten_dict({name: jnp.asarray(array) for name, array in found.items()}, sep=".")
        logits = np.asarray(theirs.apply({"params": params}, jnp.asarray(IDS)).logits)
    with torch.no_grad():
        wanted = model(torch.from_numpy(IDS)).logits.numpy()
    worst = np.abs(logits - wanted).max() / np.abs(wanted).max()
    print(f"gemma {generation}, {kv_heads} key heads, transposed={transposed}: {worst:.2e}")
    assert worst < 2e-6  # rotary tables are float32 on both sides
