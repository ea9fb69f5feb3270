"""Every layout in every container: the result of a conversion, and of the way back, loads in both backends."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints import configs
from jax_attn import backend as jax_backend
from torch_attn import backend as torch_backend

from ...support.calls.interpreted import run_by_numpy
from ...support.files import gguf_files
from ...support.models import hf_folders

T = transformers
IDS = np.random.default_rng(7).integers(1, 31, (2, 5))
SOUND = np.random.default_rng(8).normal(size=(2, 5, 14)).astype(np.float32)
EXPERTS = {**hf_folders.SLIDING, "num_experts_per_tok": 2}

CONTAINERS: dict[str, tuple[str, str | None, dict[str, int]]] = {
    "orbax": ("", "orbax", {}),
    "npz": (".npz", None, {}),
    "dcp": ("", "dcp", {}),
    "torch": (".pt", None, {}),
    "ocdbt": ("", "orbax", {"ocdbt": 1}),
    "msgpack": (".msgpack", None, {}),
    "safetensors": (".safetensors", None, {}),
}
"""Container, but for a folder of safetensors -> ending, format and settings of a target."""

MODELS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    **{name: hf_folders.FAMILIES[name][1:] for name in (
        "gpt2", "bert", "llama", "llama-tied", "qwen2", "qwen3", "gemma3", "gpt-oss", "olmo", "olmo2", "deepseek-v3",
        "qwen3-next", "mamba2", "granite-4", "minimax", "bloom", "bart", "whisper",
    )},
    "phi3": (T.Phi3ForCausalLM, T.Phi3Config, {**hf_folders.GROUPED, "pad_token_id": 0}),
    "diffllama": (T.DiffLlamaForCausalLM, T.DiffLlamaConfig, {**hf_folders.GROUPED, "head_dim": 6}),
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig, {**EXPERTS, "num_local_experts": 3}),
    "qwen3-moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig, {**EXPERTS, "num_experts": 3, "moe_intermediate_size": 4}),
}  # fmt: skip
"""Name -> model and config of `transformers`, and its sizes."""

SIDES = {"torch": (torch_attn, torch_backend), "flax": (jax_attn, jax_backend)}

OURS = {"gpt2": "GPTModel", "bert": "BertEncoder", "bart": "EncoderDecoderModel", "whisper": "EncoderDecoderModel"}
"""Models that are not a `DecoderModel`."""

FORMS: list[tuple[str, str, dict[str, int]]] = [
    *((model, "flax", {}) for model in MODELS),
    *((model, "torch", {}) for model in ("llama", "gpt2", "bert", "whisper")),
    ("gpt2", "flax", {"value": 1}),
    ("gpt2", "book", {}),
    ("gpt2", "fused-qkv", {}),
    ("llama", "meta-llama", {}),
    ("llama", "gguf-llama", {}),
    ("qwen3", "gguf-qwen", {}),
    ("gpt2", "gguf-gpt2", {}),
    *((model, f"flax-{model}", {}) for model in ("gpt2", "bert", "llama", "bart")),
    ("llama", "book-llama3", {}),
    ("llama", "tunix-llama3", {}),
    ("llama", "tunix-llama3", {"value": 1}),
    ("llama", "maxtext", {"scan": 0}),
    ("llama", "maxtext", {"scan": 1}),
    ("llama", "hf-phi3", {}),
    ("phi3", "hf-llama", {}),
    ("llama-tied", "meta-llama", {}),
    ("llama-tied", "tunix-llama3", {}),
    ("llama-tied", "maxtext", {}),
    ("qwen2", "tunix-qwen2", {}),
    ("qwen3", "tunix-qwen3", {}),
    ("qwen3", "book-qwen3", {}),
    ("qwen3", "maxtext", {}),
    ("gemma3", "tunix-gemma3", {}),
    ("gemma3", "gemma-linen", {}),
    ("gemma3", "gemma-linen", {"flat": 1}),
    ("gemma3", "book-gemma3", {}),
    ("gemma3", "maxtext", {}),
    ("mixtral", "maxtext", {}),
    ("gpt-oss", "openai-gpt-oss", {}),
    *((model, "vllm", {}) for model in ("llama-tied", "qwen2", "gemma3", "olmo2", "mixtral", "qwen3-moe")),
    *((model, f"keras-{model}", {}) for model in ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "bert")),
]
"""Model, layout, and settings that choose a form of it."""

EVERYWHERE = ("llama", "flax", {"value": 1})
"""The form that goes through every container; the others take turns, as readers and writers know no layout."""

REST = {
    *(
        (model, "flax")
        for model in ("llama", "gpt2", "bert", "bart", "llama-tied", "qwen2", "qwen3", "gemma3", "gpt-oss")
    ),
    *((model, "flax") for model in ("olmo2", "mixtral", "qwen3-moe", "phi3")),
    ("qwen2", "vllm"),
    *((model, "maxtext") for model in ("llama-tied", "qwen3")),
    *((model, f"keras-{model}") for model in ("llama", "qwen2", "qwen3")),
    *(("llama-tied", layout) for layout in ("meta-llama", "tunix-llama3")),
}
"""Models and layouts that other forms have, each in another pair: `make full` runs them."""


def _turn(number: int, settings: Mapping[str, int]) -> str:
    """Return the container whose turn it is; names with a slash, as flat ones of gemma, name no folder of Orbax."""
    names = [name for name in CONTAINERS if not (settings.get("flat") and "ocdbt" in name)]
    return names[number % len(names)]


CASES = [
    *((*EVERYWHERE, container) for container in CONTAINERS),
    *((*form, _turn(number, form[2])) for number, form in enumerate(FORMS)),
]


@dataclasses.dataclass(frozen=True)
class Original:
    """A model of `transformers`.

    Attributes:
        folder: what its `save_pretrained` wrote.
        layout: of that folder.
        config: what `from_pretrained` of ours reads of it.
        logits: what it gives.
        models: ours of that folder, in both backends.
        weights: theirs, by name.
    """

    folder: Path
    layout: str
    config: Any
    logits: np.ndarray
    models: dict[str, Any]
    weights: dict[str, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return the function that makes a model, once each."""

    @functools.cache
    def make(name: str) -> Original:
        folder = tmp_path_factory.mktemp(name) / "hf"
        model = hf_folders.saved(folder, *MODELS[name], "1GB")
        ours = OURS.get(name, "DecoderModel")
        models = {side: getattr(package, ours).from_pretrained(folder) for side, (package, _) in SIDES.items()}
        weights = {side: SIDES[side][1].get_weights(model) for side, model in models.items()}
        weights = {side: {key: np.array(array) for key, array in one.items()} for side, one in weights.items()}
        with torch.no_grad():
            wanted = theirs(name, model)
        for side, one in models.items():
            assert_close(run(side, name, one), wanted)
        layout = checkpoints.inspect(folder).layout
        return Original(folder, layout, configs.read_config(ours, folder), wanted, models, weights)

    return make


def theirs(name: str, model: Any) -> np.ndarray:
    ids = torch.from_numpy(IDS)
    if name == "whisper":
        return model(input_features=torch.from_numpy(SOUND), decoder_input_ids=ids).logits.numpy()
    if name == "bart":
        return model(input_ids=ids, decoder_input_ids=ids).logits.numpy()
    found = model(ids)
    return (found.last_hidden_state if name == "bert" else found.logits).numpy()


def run(side: str, name: str, model: Any) -> np.ndarray:
    given = {"whisper": (SOUND, IDS), "bart": (IDS, IDS)}.get(name, (IDS,))
    if side == "flax":
        return np.asarray(run_by_numpy(operator.call, model, *given))
    with torch.no_grad():
        return model(*map(torch.from_numpy, given)).numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() < 3e-5 * np.abs(wanted).max()


def assert_loads(path: Path, name: str, source: Original) -> None:
    """Check that a checkpoint gives both backends the weights of the original bit for bit, and its logits.

    The model of Flax gave them with these weights before: calling it again would show nothing else.
    """
    for side, (package, backend) in SIDES.items():
        model, wanted = source.models[side], source.weights[side]
        backend.set_weights(model, {key: np.full_like(array, np.nan) for key, array in wanted.items()})
        package.load(path, model)
        found = backend.get_weights(model)
        assert {key: array.tobytes() for key, array in found.items()} == {
            key: array.tobytes() for key, array in wanted.items()
        }
        if side == "torch":
            assert_close(run(side, name, model), source.logits)


@pytest.mark.parametrize(
    ("name", "layout", "settings", "container"),
    [
        pytest.param(
            *case,
            id="-".join([*case[:2], *case[2], case[3]]),
            marks=[pytest.mark.full] if case[:2] in REST and not case[2] else [],
        )
        for case in CASES
    ],
)
def test_a_conversion_and_its_way_back_load(tmp_path, original, name, layout, settings, container):
    source = original(name)
    folder = tmp_path / "folder"
    checkpoints.convert(source.folder, folder, to_layout=layout, settings=settings)
    assert configs.read_config(OURS.get(name, "DecoderModel"), folder) == source.config
    assert_loads(folder, name, source)

    ending, format, more = CONTAINERS[container]
    there = tmp_path / f"there{ending}"
    checkpoints.convert(source.folder, there, to_layout=layout, format=format, settings={**settings, **more})
    back = tmp_path / "back"
    checkpoints.convert(there, back, to_layout=source.layout)  # its manifest carries the config
    if not layout.startswith("hf-"):  # the config of another family is written anew
        assert (back / "config.json").read_bytes() == (source.folder / "config.json").read_bytes()
    assert configs.read_config(OURS.get(name, "DecoderModel"), back) == source.config
    assert_loads(back, name, source)

    config = there if there.is_dir() else tmp_path
    shutil.copy(folder / "config.json", config / "config.json")
    assert_loads(there, name, source)


def test_file_of_a_saved_model_carries_its_config(tmp_path, original):
    source = original("llama")
    for side, (package, _) in SIDES.items():
        package.save(source.models[side], tmp_path / f"{side}.npz", to_layout="torch")
        back = checkpoints.convert(tmp_path / f"{side}.npz", tmp_path / f"{side}-hf", to_layout="hf-llama").target
        assert_loads(back, "llama", source)


def test_a_saved_state_of_nnx_becomes_a_folder_that_loads(tmp_path, original):
    source = original("llama")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(source.models["flax"]))
    shutil.copy(source.folder / "config.json", tmp_path / "state" / "config.json")
    checkpoints.convert(tmp_path / "state", tmp_path / "hf", to_layout="hf-llama")
    assert_loads(tmp_path / "state", "llama", source)
    assert_loads(tmp_path / "hf", "llama", source)


def test_a_head_that_a_source_lacked_is_there_for_a_model(tmp_path, original):
    """GPT-2's files leave out the head, which is the embeddings; ours has one of its own."""
    source = original("gpt2")
    arrays = {key: np.asarray(array) for key, array in source.weights["torch"].items() if key != "out_head.weight"}
    np.savez(tmp_path / "x.npz", **arrays)
    shutil.copy(source.folder / "config.json", tmp_path / "config.json")
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "hf", to_layout="hf-gpt2")
    assert_loads(tmp_path / "hf", "gpt2", source)


@pytest.mark.parametrize("layout", ["hf-llama", "torch", "flax", "vllm"])
def test_matrices_in_float16_beside_norms_in_float32_load(original, tmp_path, layout):
    source = original("llama")
    state = safetensors.numpy.load_file(source.folder / "model.safetensors")
    config = json.loads((source.folder / "config.json").read_text())
    mixed = {
        name: array if array.ndim == 1 else array.astype(np.float16).astype(array.dtype)
        for name, array in state.items()
    }
    gguf = gguf_files.converted(tmp_path / "x.gguf", mixed, {"head_dim": 4, **config}, kind="F16")
    checkpoints.convert(gguf, tmp_path / "out", to_layout=layout)
    if not (tmp_path / "out" / "config.json").exists():
        shutil.copy(source.folder / "config.json", tmp_path / "out")
    models = {side: package.DecoderModel.from_pretrained(tmp_path / "out") for side, (package, _) in SIDES.items()}
    logits = {side: run(side, "llama", model) for side, model in models.items()}
    assert {parameter.dtype for parameter in models["torch"].parameters()} == {torch.float32}
    assert_close(logits["torch"], logits["flax"])
    assert np.abs(logits["torch"] - source.logits).max() < 1e-2 * np.abs(source.logits).max()
