"""Names of an adapter's tensors that are not those of the base's files: in memory, and of several copies."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from parity_tests.support.files import adapter_files
from parity_tests.support.files.adapter_files import matrices, product

TEXT, SIGHT = "model.language_model.layers.0.self_attn.q_proj", "model.vision_tower.layers.0.q_proj"
TABLE, HEAD = "model.language_model.embed_tokens", "lm_head"
STORED = {
    "as LLaVA": (
        "language_model.model.layers.0.self_attn.q_proj",
        "vision_tower.vision_model.layers.0.q_proj",
        "language_model.model.embed_tokens",
        "language_model.lm_head",
    ),
    "as Qwen2-VL": ("model.layers.0.self_attn.q_proj", "vision_tower.layers.0.q_proj", "model.embed_tokens", "lm_head"),
    "as in memory": (TEXT, SIGHT, TABLE, HEAD),
}
"""Kind of a model -> the names of the four layers in its files."""


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", STORED)
def test_names_in_memory_lead_to_those_of_files(tmp_path, kind, is_tied):
    stored = dict(zip((TEXT, SIGHT, TABLE, HEAD), STORED[kind], strict=True))
    rng, shapes = np.random.default_rng(0), {TEXT: (6, 6), SIGHT: (6, 6), TABLE: (7, 6), HEAD: (7, 6)}
    arrays = {f"{stored[layer]}.weight": rng.normal(size=shape).astype(np.float32) for layer, shape in shapes.items()}
    if is_tied:
        arrays[f"{stored[HEAD]}.weight"] = arrays[f"{stored[TABLE]}.weight"]
    (tmp_path / "base").mkdir()
    safetensors.numpy.save_file(
        {name: array for name, array in arrays.items() if not is_tied or name != f"{stored[HEAD]}.weight"},
        tmp_path / "base" / "model.safetensors",
    )
    (tmp_path / "base" / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied, "text_config": {}}))
    tensors = matrices(TEXT, 6, 6) | matrices(SIGHT, 6, 6) | matrices(HEAD, 6, 7)
    adapter = adapter_files.save(tmp_path / "adapter", tensors)
    checkpoints.convert(tmp_path / "base", tmp_path / "out", to_layout="same", adapter=adapter)
    added = {f"{stored[layer]}.weight": product(tensors, layer) for layer in (TEXT, SIGHT, HEAD)}
    merged = checkpoints.read(tmp_path / "out")
    assert merged.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(merged[name], array + added.get(name, 0), rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_saved_modules_with_copies_replace_those_of_the_base(tmp_path):
    rng, layer = np.random.default_rng(0), "layers.0.q_proj"
    arrays = {f"{layer}.weight": rng.normal(size=(6, 6)).astype(np.float32), "lm_head.weight": np.ones((7, 6), "f4")}
    (tmp_path / "base").mkdir()
    safetensors.numpy.save_file(arrays, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    trained = rng.normal(size=(7, 6)).astype(np.float32)
    names = {"weight": trained, "modules_to_save.weight": trained, "original_module.weight": arrays["lm_head.weight"]}
    saved = {f"lm_head.{name}": array for name, array in names.items()}
    adapter = adapter_files.save(tmp_path / "adapter", matrices(layer, 6, 6) | saved, modules_to_save=["lm_head"])
    checkpoints.convert(tmp_path / "base", tmp_path / "out", to_layout="same", adapter=adapter)
    assert checkpoints.verify(tmp_path / "base", tmp_path / "out", adapter=adapter).passed
    np.testing.assert_array_equal(checkpoints.read(tmp_path / "out")["lm_head.weight"], trained)
