"""A model of one family is refused in the layout of another, in one line with the first difference."""

from __future__ import annotations

import json

import pytest

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.planning.model_checks import refuse_family
from attn_bridge.models import families, layouts

from ..configs.test_written_configs import convert, folder
from .test_decoder_families import small

SOURCES = {
    "gpt2": ({**small("gpt2"), "n_layer": 2}, "hf-gpt2"),
    "llama": ({**small("llama"), "num_hidden_layers": 2}, "hf-llama"),
}


def source_of(path, kind):
    """Return the folder of a small model of `transformers`."""
    document, layout = SOURCES[kind]
    path.mkdir()
    ours = folder(path / "ours", document, families.find_decoder(document))
    checkpoints.convert(ours, path / kind, from_layout="torch", to_layout=layout)
    (path / kind / "config.json").write_text(json.dumps(document))
    return path / kind


@pytest.mark.parametrize("target", ["folder", "file.safetensors"])
@pytest.mark.parametrize(
    ("kind", "layout", "line"),
    [
        (
            "gpt2",
            "hf-llama",
            "a gpt2 can't become hf-llama: its blocks[0].attention.position (None) in 4 blocks differs",
        ),
        (
            "llama",
            "hf-gpt2",
            "a llama can't become hf-gpt2: its blocks[0].attention.num_kv_heads (2) in 2 blocks differs",
        ),
        ("llama", "hf-bart", "a llama can't become hf-bart: a llama is a decoder, and a bart is not"),
    ],
)
def test_another_family_is_refused_with_the_first_difference(tmp_path, capsys, kind, layout, line, target):
    source = source_of(tmp_path / "source", kind)
    code, _ = convert(source, tmp_path / target, layout)
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"error: {line}")
    assert error.count("\n") == 1
    assert "smollm3" not in error
    assert not (tmp_path / target).exists()


def test_verify_refuses_a_folder_of_another_family(tmp_path):
    source, target = source_of(tmp_path / "one", "llama"), source_of(tmp_path / "two", "gpt2")
    (target / "attn-bridge.json").unlink()
    with pytest.raises(CheckpointError, match=r"^a llama can't become hf-gpt2: its blocks\[0\]"):
        checkpoints.verify(source, target)


def test_a_family_without_decoders_of_ours_names_a_tensor():
    error = WeightsMismatchError(["transformer.ln_f.bias"], ["emb_norm.scale"])
    with pytest.raises(CheckpointError, match=r"^a bert can't become hf-gpt2: hf-gpt2 has no tensor for its emb_norm"):
        refuse_family({"model_type": "bert"}, layouts.find("hf-gpt2"), {}, error)
    refuse_family({"model_type": "gpt2"}, layouts.find("hf-gpt2"), {}, error)
