"""The way back from a file that has no config.json next to it: the manifest has the sizes that shapes don't tell."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.models import layouts

SIZES = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 30,
    "tie_word_embeddings": False,
}
SHAPES = {
    **{f"self_attn.{name}_proj": (rows, 24) for name, rows in {"q": 24, "k": 12, "v": 12, "o": 24}.items()},
    "mlp.gate_proj": (20, 24),
    "mlp.up_proj": (20, 24),
    "mlp.down_proj": (24, 20),
    "input_layernorm": (24,),
    "post_attention_layernorm": (24,),
}
CONTAINERS = {
    "orbax": "",
    "dcp": "",
    "npz": ".npz",
    "torch": ".pt",
    "msgpack": ".msgpack",
    "safetensors": ".safetensors",
}
LAYOUTS = ("meta-llama", "gguf-llama", "vllm", "hf-phi3", "maxtext", "keras-llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "llama"
    path.mkdir()
    random = np.random.default_rng(3)
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (30, 24), "model.norm.weight": (24,), "lm_head.weight": (30, 24)}
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(SIZES))
    return path


def without_config(path, **changes):
    """Change the manifest of a file, and take the config out of it, as manifests of earlier versions have none."""
    manifest = path.with_name(f"{path.name}.attn-bridge.json")
    document = {**json.loads(manifest.read_text()), **changes}
    assert document.pop("config")
    manifest.write_text(json.dumps(document))


def bits(path):
    return {name: (array.dtype, array.tobytes()) for name, array in checkpoints.read(path).items()}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_way_back_needs_no_config(folder, tmp_path, layout, container):
    there, back = tmp_path / f"x{CONTAINERS[container]}", tmp_path / "back"
    checkpoints.convert(folder, there, to_layout=layout, format=container)
    without_config(there)
    checkpoints.convert(there, back, to_layout="hf-llama")
    assert bits(back) == bits(folder)
    assert checkpoints.verify(there, back).passed


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_way_back_through_ours_needs_no_config(folder, tmp_path, layout, is_folder):
    first = tmp_path / ("first" if is_folder else "first.npz")
    checkpoints.convert(folder, first, to_layout=layout)
    checkpoints.convert(first, tmp_path / "ours.npz", to_layout="flax")
    checkpoints.convert(tmp_path / "ours.npz", tmp_path / "again.npz", to_layout=layout)
    assert bits(tmp_path / "again.npz") == bits(first)


def test_sizes_outlive_another_container(folder, tmp_path):
    checkpoints.convert(folder, tmp_path / "x.npz", to_layout="meta-llama")
    without_config(tmp_path / "x.npz")
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "x.pt", to_layout="same")
    checkpoints.convert(tmp_path / "x.pt", tmp_path / "back", to_layout="hf-llama")
    assert bits(tmp_path / "back") == bits(folder)


def test_settings_of_the_user_come_before_the_manifest(folder, tmp_path):
    checkpoints.convert(folder, tmp_path / "x.npz", to_layout="meta-llama")
    with pytest.raises(ValueError, match="--set num_kv_heads=1: the model's config gives 3"):
        checkpoints.convert(tmp_path / "x.npz", tmp_path / "y", to_layout="hf-llama", settings={"num_kv_heads": 1})
    without_config(tmp_path / "x.npz")
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "y", to_layout="hf-llama", settings={"num_kv_heads": 1})
    assert bits(tmp_path / "y") != bits(folder)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3], "sizes is malformed"),
        ({"num_kv_heads": 1.5}, "sizes is malformed"),
        ({"num_kv_heads": 0}, r"num_kv_heads \(0\) must be a whole number of at least 1"),
        ({"num_kv_heads": 10**30}, "layers.0.attention.wk.weight"),
    ],
)
def test_sizes_that_are_none_are_refused(folder, tmp_path, sizes, message):
    checkpoints.convert(folder, tmp_path / "x.npz", to_layout="meta-llama")
    without_config(tmp_path / "x.npz", sizes=sizes)
    with pytest.raises((CheckpointError, ValueError), match=message) as caught:
        checkpoints.convert(tmp_path / "x.npz", tmp_path / "y", to_layout="hf-llama")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "y").exists()


def test_the_head_of_gpt_neox_has_the_name_that_files_have():
    """transformers 5 calls it lm_head in memory; its files, as those of all versions before, have embed_out."""
    heads = [row.theirs for row in layouts.find("hf-gpt-neox").rows if row.ours == ("out_head.weight",)]
    assert heads == ["embed_out.weight", "lm_head.weight"]  # the first is written
