"""Files as their authors publish them: converted, loaded in both backends, with the logits of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from torch_attn._parity.running.promotion import promoted

from ...support import hf_folders

T = transformers
IDS = np.random.default_rng(7).integers(1, 31, (2, 5))


def logits_of(folder: Path, kind: Any) -> np.ndarray:
    """Return the logits of a folder of `transformers`, all of it in float64."""
    with promoted(), torch.no_grad():
        model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        return model.eval()(torch.from_numpy(IDS)).logits.numpy()


def assert_loads(source: Path, wanted: np.ndarray, target: Path, **options: Any) -> None:
    """Convert a source to float64 for each backend, and hold the logits there against the wanted ones."""
    for side, package in (("torch", torch_attn), ("flax", jax_attn)):
        folder = target / side
        checkpoints.convert(source, folder, to_layout=side, dtype="f64", **options)
        assert checkpoints.verify(source, folder).passed
        assert_close(run(package, folder), wanted)


def run(package: Any, folder: Path) -> np.ndarray:
    with jax.enable_x64(True), torch.no_grad():
        model = package.DecoderModel.from_pretrained(folder)
        return np.asarray(model(torch.from_numpy(IDS) if package is torch_attn else IDS))


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-12 * np.abs(wanted).max()


MIXTRAL = {**hf_folders.SLIDING, "num_local_experts": 3, "num_experts_per_tok": 2}


def mixtral(folder: Path, *, fused: bool) -> None:
    model = hf_folders.saved(folder, T.MixtralForCausalLM, T.MixtralConfig, MIXTRAL, "1GB")
    if fused:
        model.save_pretrained(folder, save_original_format=False)


def test_mixtral_with_fused_experts_loads(tmp_path):
    mixtral(tmp_path / "fused", fused=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in checkpoints.read(tmp_path / "fused")
    assert checkpoints.inspect(tmp_path / "fused").layout == "hf-mixtral"
    for package in (torch_attn, jax_attn):
        package.DecoderModel.from_pretrained(tmp_path / "fused")
    assert_loads(tmp_path / "fused", logits_of(tmp_path / "fused", T.MixtralForCausalLM), tmp_path)


def test_mixtral_with_fused_experts_comes_back(tmp_path):
    mixtral(tmp_path / "fused", fused=True)
    mixtral(tmp_path / "apart", fused=False)
    fused, apart = checkpoints.read(tmp_path / "fused"), checkpoints.read(tmp_path / "apart")
    for source in ("fused", "apart"):
        checkpoints.convert(tmp_path / source, tmp_path / f"{source}-flax")
        checkpoints.convert(tmp_path / f"{source}-flax", tmp_path / f"{source}-back", to_layout="hf-mixtral")
        for file in (tmp_path / source).glob("model*"):
            assert (tmp_path / f"{source}-back" / file.name).read_bytes() == file.read_bytes()
        for value, wanted in ((1, fused), (0, apart)):
            there = tmp_path / f"{source}-{value}"
            checkpoints.convert(tmp_path / f"{source}-flax", there, to_layout="hf-mixtral", settings={"fused": value})
            assert hf_folders.equal(checkpoints.read(there), wanted)
