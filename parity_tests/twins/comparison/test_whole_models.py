"""The attention in a converted model loads into the twins, and is that of `from_hf`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import backends, checkpoints
from attn_bridge.models import families
from parity_tests.support.models.hf_folders import FAMILIES, attention_of, equal, saved

LAYERS = {
    "gemma3": (1, "trf_blocks.1.att."),
    "gpt-oss": (0, "trf_blocks.0.att."),
    "deepseek-v3": (2, "trf_blocks.2.att."),
    "qwen3-next": (3, "trf_blocks.3.att."),
    "qwen3-next delta net": (2, "trf_blocks.2.linear_att."),
    "bloom": (1, "trf_blocks.1.att."),
    "whisper": (2, "decoder.trf_blocks.2.cross_att."),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_converted_layer_loads_into_both_twins(tmp_path, name):
    index, path = LAYERS[name]
    _, kind, config, sizes = FAMILIES[name.removesuffix(" delta net")]
    saved(tmp_path / "hf", kind, config, sizes, "1GB")
    document = json.loads((tmp_path / "hf" / "config.json").read_text())
    layer = families.find_layer(document, index)
    stem = ".".join(layer.prefix.split(".")[-4:])
    theirs = {name: array for name, array in checkpoints.read(tmp_path / "hf").items() if stem in name}
    flax = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "flax").target)
    np.savez(tmp_path / "layer.npz", **attention_of(flax, path))
    in_torch = getattr(torch_attn, layer.variant)(layer.config)
    in_flax = getattr(jax_attn, layer.variant)(layer.config, rngs=nnx.Rngs(0))
    for package, side, module in ((torch_attn, "torch", in_torch), (jax_attn, "flax", in_flax)):
        package.load(tmp_path / "layer.npz", module)
        get = backends.load(side).get_weights
        assert equal(get(module), get(package.from_hf(document, index, theirs)))
