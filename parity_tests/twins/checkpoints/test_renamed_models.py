"""Text models inside multimodal ones of `transformers`, in both backends, as saved and as held in memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from parity_tests.support.models import multimodal_models
from parity_tests.support.models.multimodal_models import IDS


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_both_backends_give_the_logits_of_the_text_model(tmp_path, name):
    folders, wanted = multimodal_models.folders(name, tmp_path)
    for side in ("torch", "flax"):
        for spelling, folder in folders.items():
            checkpoints.convert(folder, tmp_path / f"{spelling}-{side}", to_layout=side, dtype="f64")
            assert checkpoints.verify(folder, tmp_path / f"{spelling}-{side}").passed
    found = {}
    with jax.enable_x64(True), torch.no_grad():
        for spelling in folders:
            ours = torch_attn.DecoderModel.from_pretrained(tmp_path / f"{spelling}-torch")
            twin = jax_attn.DecoderModel.from_pretrained(tmp_path / f"{spelling}-flax")
            found |= {f"{spelling} torch": ours(torch.from_numpy(IDS)).numpy(), f"{spelling} flax": twin(IDS)}
    for label, logits in found.items():
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max(), err_msg=label)
    assert jax_attn.DecoderModel.from_pretrained(folders["saved"]) is not None
