"""Positions in rows (time, height, width) in both backends against the text models of `transformers`' Qwen-VL."""

from __future__ import annotations

import dataclasses
import functools
import operator
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

import jax_attn
import torch_attn
from attn_bridge import checkpoints, torch_to_flax
from attn_bridge.models.families import find_decoder, find_layer
from attn_bridge.specs import Rotary
from attn_parity.frameworks.torch.running.promotion import promoted
from jax_attn import positions as jax_positions
from jax_attn.backend import get_weights as get_flax_weights
from torch_attn import positions as torch_positions
from torch_attn.backend import get_weights, to_numpy

from ...support.calls.interpreted import by_numpy, run_by_numpy
from ...support.files.folders import new_folder
from ...support.models.multimodal_models import PIXELS

PACKAGES = {"torch": torch_attn, "flax": jax_attn}
BATCH, TOKENS = 2, 11
TEXT = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def rotary(*sections: int, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [*sections], **values}}


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {**TEXT, **rotary(2, 3, 3)},
        {"embed_dim": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {**TEXT, **rotary(4, 1, 3, **YARN)}, PIXELS),
    "qwen3_vl": ("Qwen3VL", {**TEXT, "head_dim": 20, **rotary(4, 3, 3)}, PIXELS),
    "qwen3_vl, few of time": ("Qwen3VL", {**TEXT, "head_dim": 16, **rotary(1, 3, 4)}, PIXELS),
}

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def theirs(name: str) -> tuple[Any, Path]:
    """Return a model of `transformers` with weights that hide nothing, and its folder."""
    kind, text, image = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=image, tie_word_embeddings=False, attn_implementation="eager"
    )
    with promoted():
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    folder = new_folder("multimodal-") / name
    model.save_pretrained(folder)
    return model, folder


@functools.cache
def ours(side: str, name: str) -> Any:
    return PACKAGES[side].DecoderModel.from_pretrained(theirs(name)[1])


def drawn(padded: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, the mask, and positions ``(3, B, T)``: text, an image of 2 x 3 patches, and text behind it."""
    random = np.random.default_rng(3)
    ids, mask = random.integers(1, 25, (BATCH, TOKENS)), np.ones((BATCH, TOKENS), bool)
    rows = np.array(
        [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]]
    )
    positions = np.stack([rows, rows + np.array([[3], [9], [1]])], 1)
    if padded:
        mask[1, :3] = False
        positions[:, 1] = np.maximum(rows - 2, 0)
    return ids, mask, positions


def call(side: str, name: str, positions: Any, padded: bool = False) -> np.ndarray:
    ids, mask, _ = drawn(padded)
    as_array = torch.tensor if side == "torch" else jnp.asarray
    options = {} if positions is None else {"positions": as_array(positions)}

    def run(model: Any, ids: Any, mask: Any) -> Any:
        return model(ids, attention_mask=mask, **options)

    given = ours(side, name), as_array(ids), as_array(mask)
    with torch.no_grad():
        return to_numpy(run(*given)) if side == "torch" else np.asarray(run_by_numpy(run, *given))


def wanted(name: str, positions: Any, padded: bool = False) -> np.ndarray:
    ids, mask, _ = drawn(padded)
    at = None if positions is None else torch.tensor(positions)
    with promoted(), torch.no_grad():
        return to_numpy(
            theirs(name)[0](torch.tensor(ids), attention_mask=torch.tensor(mask).long(), position_ids=at).logits
        )


def close(found: np.ndarray, expected: np.ndarray, rows: Any = slice(None), limit: float = 1e-10) -> bool:
    return bool(np.abs(found - expected)[rows].max() <= limit * np.abs(expected[rows]).max())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", PACKAGES)
def test_logits_are_those_of_transformers(side, name, padded):
    _, mask, positions = drawn(padded)
    assert close(call(side, name, positions, padded), wanted(name, positions, padded), mask)
    order = positions[[2, 0, 1]]
    assert not close(call(side, name, order, padded), wanted(name, positions, padded), mask, 1e-3)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("side", PACKAGES)
def test_text_has_one_position_in_all_rows(side, name):
    _, _, positions = drawn()
    plain = wanted(name, None)
    assert close(call(side, name, None), plain)
    assert close(call(side, name, np.arange(TOKENS)), plain)
    assert close(call(side, name, positions[1]), wanted(name, positions[1]))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_gradients_of_all_parameters_are_those_of_transformers(name):
    ids, mask, positions = drawn(padded=True)
    model, _ = theirs(name)
    cotangent = np.random.default_rng(3).standard_normal((*ids.shape, TEXT["vocab_size"])) * mask[:, :, None]
    given = {"attention_mask": torch.tensor(mask).long(), "position_ids": torch.tensor(positions)}
    with promoted():
        model.zero_grad()
        model(torch.tensor(ids), **given).logits.backward(torch.tensor(cotangent))
    expected = gradients_under_our_names(model)
    twin = ours("torch", name)
    twin.zero_grad()
    logits = twin(torch.tensor(ids), attention_mask=torch.tensor(mask), positions=torch.tensor(positions))
    logits.backward(torch.tensor(cotangent))
    found = {key: to_numpy(one.grad) for key, one in twin.named_parameters()}
    graph, state, rest = nnx.split(ours("flax", name), nnx.Param, ...)

    def loss(state: Any) -> Any:
        out = nnx.merge(graph, state, rest)(
            jnp.asarray(ids), attention_mask=jnp.asarray(mask), positions=jnp.asarray(positions)
        )
        return (out * cotangent).sum()

    rules = twin.config.rules()
    in_flax = get_flax_weights(nnx.merge(graph, by_numpy(jax.grad(loss), state), rest))
    for gradients, right in ((found, expected), (in_flax, torch_to_flax(expected, rules))):
        assert gradients.keys() == right.keys()
        for key, one in gradients.items():
            assert np.abs(one - right[key]).max() <= 1e-10 * max(1e-3, np.abs(right[key]).max()), key


def gradients_under_our_names(model: Any) -> dict[str, np.ndarray]:
    """Return the gradients of a model of `transformers`, read by the same way as the weights."""
    held = {key: parameter.data for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = get_weights(torch_attn.DecoderModel.from_pretrained(folder))
    for key, parameter in model.named_parameters():
        parameter.data = held[key]
    return found


@pytest.mark.parametrize("side", PACKAGES)
def test_a_cache_changes_nothing_and_text_continues_behind_an_image(side):
    name = "qwen3_vl"
    ids, mask, positions = drawn(padded=True)
    whole, model = call(side, name, positions, padded=True), ours(side, name)
    as_array = torch.tensor if side == "torch" else jnp.asarray
    call_once = model if side == "torch" else functools.partial(run_by_numpy, operator.call, model)
    cache, parts, stop = model.init_cache(BATCH, TOKENS), [], 0
    with torch.no_grad():
        # The image ends with the second part; behind it is text, whose positions are not given.
        for count, options in ((6, True), (2, True), (1, False), (1, False), (1, False)):
            begin, stop = stop, stop + count
            at = {"positions": as_array(positions[:, :, begin:stop])} if options else {}
            at |= {"attention_mask": as_array(mask[:, :stop])} if begin == 0 else {}
            logits, cache = call_once(as_array(ids[:, begin:stop]), cache=cache, **at)
            parts.append(np.asarray(logits))
    assert close(np.concatenate(parts, 1), whole, mask, 1e-12)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_sections_survive_a_conversion_to_ours_and_back(tmp_path, name):
    _, folder = theirs(name)
    for target, layout in (("ours", "torch"), ("flax", "flax"), ("back", "hf-llama")):
        checkpoints.convert(folder, tmp_path / target, to_layout=layout)
    _, _, positions = drawn()
    ids = torch.tensor(drawn()[0])
    with torch.no_grad():
        for target in ("ours", "back"):
            model = torch_attn.DecoderModel.from_pretrained(tmp_path / target)
            assert model.config == ours("torch", name).config
            assert close(to_numpy(model(ids, positions=torch.tensor(positions))), wanted(name, positions)), target
        with promoted():
            text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
            assert close(to_numpy(text(ids).logits), wanted(name, None))
    assert jax_attn.DecoderModel.from_pretrained(tmp_path / "flax").config == model.config


def test_a_layer_of_transformers_turns_by_rows():
    model, _ = theirs("qwen2_vl")
    attention = model.model.language_model.layers[1].self_attn
    layer = torch_attn.from_hf(model.config.to_dict(), 1, attention.state_dict())
    assert layer.config.position == Rotary(50.0, axes=(2, 3, 3))


@pytest.mark.parametrize(
    ("sections", "axes"), [((4, 3, 3), (4, 3, 3)), ((0, 5, 2), (5, 3, 2)), ((24, 20, 20), (4, 3, 3))]
)
def test_interleaved_sections_end_with_the_head_as_in_transformers(sections, axes):
    config = {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 20, **rotary(*sections)}
    assert find_decoder(config).blocks[0].attention.position == Rotary(50.0, axes=axes, layout="interleaved")


def test_text_whose_files_hold_experts_transposed_is_refused():
    config = transformers.Qwen3VLMoeConfig(text_config={**TEXT, "num_experts": 3}).to_dict()
    with pytest.raises(ValueError, match=r"^model_type \(qwen3_vl_moe_text\) must be one of "):
        find_decoder(config)


def test_partial_heads_of_qwen3_5_turn_by_rows_in_turn():
    text = {**TEXT, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3_5TextConfig(**text, **rotary(4, 2, 2, partial_rotary_factor=0.5))
    wanted = Rotary(50.0, dim=16, axes=(4, 2, 2), layout="interleaved")
    assert find_layer(config.to_dict(), 1).config.position == wanted


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([4, 3], r"^mrope_section of qwen2 must be three integers, got \[4, 3\]$"),
        ([4, 3, "1"], r"^mrope_section of qwen2 must be three integers, got \[4, 3, '1'\]$"),
        ([4, 6, 6], r"^axes \(4, 6, 6\) must add up to .* \(8\): they count pairs, not channels$"),
    ],
)
def test_sections_of_another_width_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        find_decoder({"model_type": "qwen2_vl_text", **TEXT, **rotary(*sections)})


AXIAL = {"rope_type": "axial", "rope_theta": 70.0}


def qwen_tables() -> Any:
    image = {"embed_dim": 32, "num_heads": 2, "rope_parameters": AXIAL}
    return qwen2_vl.Qwen2VLVisionRotaryEmbedding(transformers.Qwen2VLConfig(vision_config=image).vision_config)


def pixtral_tables() -> Any:
    config = transformers.PixtralVisionConfig(hidden_size=32, num_attention_heads=2, rope_parameters=AXIAL)
    return pixtral.PixtralVisionRotaryEmbedding(config)


IMAGES: dict[str, tuple[Rotary, Callable[[], Any], Callable[..., Any]]] = {
    "qwen2_vl": (Rotary(70.0, axes=(4, 4), layout="axial"), qwen_tables, qwen2_vl.apply_rotary_pos_emb_vision),
    "pixtral": (
        Rotary(70.0, axes=(4, 4), layout="strided"),
        pixtral_tables,
        functools.partial(pixtral.apply_rotary_pos_emb, unsqueeze_dim=-2),
    ),
}
"""Kind of image encoder -> our position, its module of tables, and its function that turns query and key."""


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("side", PACKAGES)
def test_heads_of_images_turn_as_in_transformers(side, name):
    rotary, tables, turn = IMAGES[name]
    random = np.random.default_rng(2)
    query, rows = random.standard_normal((1, 12, 2, 16)), np.stack(np.divmod(np.arange(12), 4))  # an image of 3 x 4
    with promoted(), torch.no_grad():
        cos, sin = tables()(torch.tensor(query), torch.tensor(rows.T))
        expected, _ = turn(torch.tensor(query[0]), torch.tensor(query[0]), cos, sin)
    module = torch_positions if side == "torch" else jax_positions
    as_array, dtype = (torch.tensor, torch.float64) if side == "torch" else (jnp.asarray, jnp.float64)
    made = module.rotary_tables(rotary, as_array(rows[:, None]), 16, dtype)
    found = np.asarray(module.apply_rotary(as_array(query), *made, rotary.pairing))[0]
    assert close(found, to_numpy(expected), limit=1e-13)
    for layout in {"sections", "axial", "strided"} - {rotary.layout}:
        made = module.rotary_tables(dataclasses.replace(rotary, layout=layout), as_array(rows[:, None]), 16, dtype)
        assert not close(np.asarray(module.apply_rotary(as_array(query), *made, "half"))[0], found, limit=1e-2)
