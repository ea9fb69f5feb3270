"""Folders of `transformers` under both spellings of its own renamings, as it saves them and as it holds them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import torch_attn
from attn_bridge import checkpoints
from attn_bridge.models import families
from attn_bridge.models.derived import known
from attn_bridge.models.reading import multimodal
from parity_tests.support.models import multimodal_models
from parity_tests.support.models.multimodal_models import IDS

PROJECT = Path(__file__).parents[3]


def run(folder):
    """Return the logits of our model of a folder."""
    with torch.no_grad():
        return torch_attn.DecoderModel.from_pretrained(folder).double()(torch.from_numpy(IDS)).numpy()


ALIKE = {
    *(
        "gemma3",
        "llava",
        "llava_next_video",
        "llava_onevision",
        "vipllava",
        "mistral3",
        "internvl",
        "got_ocr2",
        "smolvlm",
    ),
    *("audioflamingo3", "musicflamingo", "granite_speech_plus", "glmasr", "qwen2_audio", "qwen2_5_vl"),
    *("qwen3_next", "deepseek_v2", "gpt_oss"),
}
"""Models that have their spellings from others in the table."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in multimodal_models.MODELS],
)
def test_a_model_loads_as_saved_and_as_held(tmp_path, name):
    folders, wanted = multimodal_models.folders(name, tmp_path)
    for spelling, folder in folders.items():
        np.testing.assert_allclose(run(folder), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max(), err_msg=spelling)
    converted = tmp_path / "torch"
    checkpoints.convert(folders["saved"], converted, to_layout="torch")
    assert (run(converted) == run(folders["saved"])).all()


def test_the_changelog_counts_the_causal_models_that_run():
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    count = sum(name in multimodal_models.MODELS or name in families.known_model_types() for name in names)
    version = ".".join(transformers.__version__.split(".")[:2])
    text = " ".join((PROJECT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    counted = re.search(r"(\d+) of the (\d+) causal models of `transformers` ([\d.]+)", text)
    assert counted is not None
    assert counted.groups() == (str(count), str(len(names)), version) or counted[3] != version


def test_the_config_of_a_text_model_is_that_of_its_own_family(tmp_path):
    folders, _ = multimodal_models.folders("qwen2_vl", tmp_path)
    (tmp_path / "back").mkdir()
    checkpoints.convert(folders["saved"], tmp_path / "ours", to_layout="torch")
    checkpoints.convert(tmp_path / "ours", tmp_path / "hf", to_layout="hf-llama")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert "vision_config" not in config


def test_a_flat_config_of_qwen_vl_is_read(tmp_path):
    folders, wanted = multimodal_models.folders("qwen2_vl", tmp_path)
    path = folders["saved"] / "config.json"
    config = json.loads(path.read_text())
    rope = {"rope_theta": 7000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
    inner = {key: value for key, value in config.pop("text_config").items() if key != "rope_parameters"}
    path.write_text(json.dumps({**inner, **rope, **config}))
    np.testing.assert_allclose(run(folders["saved"]), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


APART = {
    "aria": "its text model is derived from transformers without what is around it",
    "aya_vision": "its text model, Cohere 2, is derived from transformers without what is around it",
    "cosmos3_omni": "its generator is part of the text model",
    "hyperclovax_vision_v2": "its text model is derived from transformers without what is around it",
    "jev": "a linear mixer",
    "kimi_k25": "transformers saves layers of text as blocks",
    "nemo_speechlm": "its text model is called llm there, and has experts",
    "paligemma": "text looks ahead",
    "pp_chart2table": "it has no class of its own here",
    "qianfan_ocr": "transformers saves layers of text as encoder.layers",
    "shieldgemma2": "a classifier",
}
"""``model_type`` in the table of `transformers` -> why its text model is not read; each is refused by its name."""


def test_every_renaming_of_transformers_is_known_or_refused():
    """Derived from its table: models of ours, and those around them; proofs of derived families read both spellings."""
    kinds = {
        *conversion_mapping._MODEL_TO_CONVERSION_PATTERN,
        *conversion_mapping._build_checkpoint_conversion_mapping(),
    }
    derived = {description.model_type for description in known.DESCRIPTIONS}
    ours = {kind for kind in kinds - derived if kind in families.FAMILIES}
    around = set()
    for kind in kinds & {*CONFIG_MAPPING.keys()}:
        if "text_config" not in (getattr(CONFIG_MAPPING[kind], "sub_configs", None) or {}):
            continue
        text = getattr(CONFIG_MAPPING[kind]().text_config, "model_type", None)
        around |= {kind} if text in families.FAMILIES or text in multimodal.TEXT_TYPES else set()
    assert (ours | around) - {"gemma3n"} <= multimodal_models.MODELS.keys() | APART.keys()
    # The images of a whole Gemma 3n are read by timm; twins/checkpoints/test_published_files.py has its folders.
    assert set(multimodal.MODELS) - {"gemma3n"} <= multimodal_models.MODELS.keys()
