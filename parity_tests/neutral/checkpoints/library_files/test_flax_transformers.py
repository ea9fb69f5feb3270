"""``flax_model.msgpack`` of transformers 4: the names and axes of its modules, which convert to those of torch's."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import make_writer
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.models import layouts
from attn_bridge.weights.placements import LayoutError

from ..checkpoints import SIZES, bert, gpt, whole

TABLES = r"(wte|wpe|embed_tokens|embed_positions|shared|relative_attention_bias|\w+_embeddings)\.weight"
NORMS = r"(ln_\w+|LayerNorm|layernorm_embedding|\w*layer_norm)\.weight"


def in_flax(state, kind=""):
    """Return weights of torch as `transformers` 4.55 has them in Flax: all matrices lie the other way round."""
    norm = "weight" if kind == "t5" else "scale"
    found = {}
    for name, array in state.items():
        stem = name.removesuffix("weight")
        if re.search(TABLES, name):
            found[f"{stem}embedding"] = array
        elif re.search(NORMS, name):
            found[f"{stem}{norm}"] = array
        elif name.endswith(".weight") and array.ndim == 2:
            found[f"{stem}kernel"] = array.T
        else:
            found[name] = array
    return found


def model(kind):
    """Return the tensors of a torch model of `transformers`."""
    makers = {"gpt2": gpt, "bert": bert}
    ours = makers[kind](2) if kind in makers else whole(f"hf-{kind}", 2)
    if kind == "llama":  # without what Qwen adds
        ours = {name: one for name, one in ours.items() if not name.endswith((".bias", "_norm.scale"))} | {
            "final_norm.scale": ours["final_norm.scale"]
        }
    return layouts.find(f"hf-{kind}").from_canonical(ours, **SIZES)


def write(path, arrays):
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    writer = make_writer("msgpack", path, infos, {})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish()
    return path


NAMES = {
    "gpt2": {"transformer.h.1.attn.c_attn.kernel": (18, 6), "transformer.ln_f.scale": (6,),
             "transformer.wte.embedding": (11, 6)},
    "bert": {"encoder.layer.1.attention.self.query.kernel": (6, 6), "embeddings.LayerNorm.scale": (6,),
             "encoder.layer.1.intermediate.dense.kernel": (6, 10),
             "embeddings.token_type_embeddings.embedding": (2, 6)},
    "llama": {"model.layers.1.self_attn.k_proj.kernel": (6, 4), "model.norm.weight": (6,), "lm_head.kernel": (6, 11),
              "model.embed_tokens.embedding": (11, 6)},
    "bart": {"model.decoder.layers.1.encoder_attn.q_proj.kernel": (6, 8), "model.shared.embedding": (11, 6),
             "model.encoder.layernorm_embedding.scale": (6,), "final_logits_bias": (1, 11)},
    "t5": {"decoder.block.1.layer.1.EncDecAttention.q.kernel": (6, 8), "shared.embedding": (11, 6),
           "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.embedding": (6, 4),
           "encoder.final_layer_norm.weight": (6,)},
}  # fmt: skip
"""Some names that the modules of transformers 4.55 have, and shapes there of the models above."""


@pytest.mark.parametrize("kind", NAMES)
def test_flax_models_become_those_of_torch_and_come_back(tmp_path, kind):
    state = model(kind)
    arrays = in_flax(state, kind)
    assert {name: arrays[name].shape for name in NAMES[kind]} == NAMES[kind]
    source = write(tmp_path / "flax_model.msgpack", arrays)
    assert checkpoints.inspect(source).layout == f"flax-{kind}"
    target = checkpoints.convert(source, tmp_path / "x.safetensors", to_layout=f"hf-{kind}").target
    assert checkpoints.verify(source, target).passed
    found = checkpoints.read(target)
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], array) for name, array in state.items())
    back = checkpoints.convert(target, tmp_path / "back.msgpack", to_layout=f"flax-{kind}").target
    assert back.read_bytes() == source.read_bytes()


def test_a_base_model_of_flax_is_given_no_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    arrays = {name: array for name, array in in_flax(model("llama")).items() if "lm_head" not in name}
    source = write(tmp_path / "flax_model.msgpack", arrays)
    with pytest.raises(CheckpointError, match=r"holds no head, lm_head.kernel"):
        checkpoints.convert(source, tmp_path / "out")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no head, lm_head.kernel"):
        checkpoints.convert(source, tmp_path / "out")


def test_a_model_without_a_layout_is_refused_by_its_type(tmp_path):
    names = ("shared.embedding", "encoder.block.0.layer.0.LocalSelfAttention.LocalSelfAttention.q.kernel")
    np.savez(tmp_path / "model.npz", **dict.fromkeys(names, np.ones((4, 2))))
    (tmp_path / "config.json").write_text('{"model_type": "longt5", "d_model": 2}')
    refused = "^no layout is for the model_type longt5 of config.json; the names fit no layout; flax-bart comes closest"
    with pytest.raises(LayoutError, match=refused):
        checkpoints.convert(tmp_path, tmp_path / "out", to_layout="hf-bart")
