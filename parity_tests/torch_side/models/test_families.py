"""Families against `transformers`: what it makes of a config, and what its attention gives, in torch."""

from __future__ import annotations

import copy
import json
import sys

import numpy as np
import pytest
import torch
import transformers

import torch_attn
from attn_bridge.masks import causal, sliding_window
from attn_bridge.models import families
from attn_bridge.models.derived import known
from attn_bridge.models.reading import multimodal
from attn_bridge.specs.position import Rotary
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ...support.calls import cover
from ...support.models.hf_configs import PUBLISHED
from ...support.models.hf_oracle import CASES, LAYERS, build, judge_layer, padding, run, torch_outputs

DIFFERENTIATED = ("llama", "gemma2", "gemma3", "gpt-oss", "olmo-clipped", "olmo2", "bloom", "qwen3-next")
"""Cases whose gradients are looked at; `check` judges those of the twins for all pieces."""

PARTS = [(name, layer) for name in PUBLISHED for layer in ((0, 3) if name != "Qwen3-Next-80B-A3B" else (3, 47))]


def theirs(config):
    """Return what `transformers` makes of a config: the config of its text, its attention, its rotary positions."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(config)).get_text_config()
    module = sys.modules[transformers.AutoModel._model_mapping[type(config)].__module__]
    found = [getattr(module, name) for name in dir(module) if name.endswith(("Attention", "RotaryEmbedding"))]
    attention = next(one for one in found if one.__name__.endswith("Attention") and "Vision" not in one.__name__)
    rotary = next((one for one in found if one.__name__.endswith("RotaryEmbedding")), None)
    return config, attention, rotary


@pytest.mark.parametrize(("name", "index"), PARTS)
def test_published_configs_mean_what_transformers_takes_them_for(name, index):
    layer = families.find_layer(PUBLISHED[name], index)
    spec = layer.config
    config, attention, rotary = theirs(PUBLISHED[name])
    with torch.device("meta"):
        module = attention(config, index)
    assert layer.names() == {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert spec.scale == getattr(module, "scaling", spec.scale)
    # Mistral's mask is made from the config; its layers know no window.
    window = config.sliding_window if config.model_type == "mistral" else getattr(module, "sliding_window", None)
    assert spec.mask == (causal() if window is None else sliding_window(window))
    if not isinstance(spec.position, Rotary):
        return
    kind = {"layer_type": config.layer_types[index]} if config.model_type in ("gemma3_text", "olmo3") else {}
    with promoted():
        cos, sin = rotary(config)(torch.ones(1), torch.tensor([[0, 1, 100000]]), **kind)
    width = spec.position.width(spec.head_dim)
    angles = np.outer([0, 1, 100000], spec.position.frequencies(width))
    ours = [np.cos(angles) * spec.position.table_factor, np.sin(angles) * spec.position.table_factor]
    for one, table in zip(ours, (cos, sin), strict=True):
        table = table[0].numpy()
        assert table.dtype == np.float64
        half = table if config.model_type == "gpt_oss" else table[:, : width // 2]
        assert table.shape[-1] == (width // 2 if config.model_type == "gpt_oss" else width)
        assert np.abs(one - half).max() < 1e-10


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_short_and_full_configs_mean_the_same(name, index):
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **copy.deepcopy(case.sizes))
    brief = {"model_type": case.model_type, **case.sizes}
    spellings = [brief, json.loads(config.to_json_string()), config.to_dict()]
    specs = [families.find_layer(spelling, index).config for spelling in spellings]
    assert specs[0] == specs[1] == specs[2]


def test_model_types_of_gpt2_are_run_by_its_classes():
    auto = transformers.models.auto
    configs, models = auto.configuration_auto.CONFIG_MAPPING, auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = {(configs[name], models[name]) for name in families.FAMILIES["gpt2"].model_types}
    assert classes == {(transformers.GPT2Config, "GPT2LMHeadModel")}


HANDWRITTEN = [name for name in families.FAMILIES if name not in {one.model_type for one in known.DESCRIPTIONS}]
COMPUTED = {
    ("qwen2", "sliding_window"): "None unless use_sliding_window",
    ("qwen3", "sliding_window"): "None unless use_sliding_window",
    ("qwen3_moe", "sliding_window"): "None unless use_sliding_window",
    ("deepseek_v2", "norm_topk_prob"): "read for DeepSeek-V3 alone",
    ("gemma3n_text", "intermediate_size"): "the same for each layer",
    ("gemma4_text", "head_dim"): "per layer there: another one in layers of full attention",
}
"""Defaults that `transformers` has otherwise, and why they mean the same."""


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_a_missing_key_has_the_default_of_transformers(name):
    theirs = transformers.models.auto.configuration_auto.CONFIG_MAPPING[multimodal.written_type(name)]()
    ours = {
        key: value
        for key, value in families.FAMILIES[name].description.defaults.items()
        if (name, key) not in COMPUTED and hasattr(theirs, key) and value != "auto"
    }
    assert ours == {key: getattr(theirs, key) for key in ours}


# ---- what attention gives


def assert_close(layer, found, limit=1e-10):
    for step, one in zip(layer.steps, found, strict=True):
        assert one.shape == step.output.shape
        assert one.dtype == step.output.dtype
        apart = np.abs(one - step.output)[step.rows].max(initial=0.0)
        assert apart <= limit * np.abs(step.output[step.rows]).max(initial=1e-300)


@cover.rotated(("name", "index", "padded"), LAYERS, ["left", "none", "right"])
def test_a_batch_matches_transformers(name, index, padded):
    layer = run(name, index, padded=padded)
    assert_close(layer, torch_outputs(layer))


@pytest.mark.parametrize(("name", "index"), [one for one in LAYERS if one[0] != "bloom"])
def test_large_positions_match_transformers(name, index):
    layer = run(name, index, start=100_000, seed=1)
    assert_close(layer, torch_outputs(layer))


@cover.rotated(("name", "index", "padded"), LAYERS, ["right", "left"])
def test_decoding_with_a_cache_matches_transformers(name, index, padded):
    steps = (6, 1, 1, 3) if padded == "left" else (11, 1, 2)
    layer = run(name, index, padded=padded, tokens=sum(steps), steps=steps, seed=2)
    assert_close(layer, torch_outputs(layer))


@pytest.mark.parametrize(("name", "index"), [one for one in LAYERS if one[0] in DIFFERENTIATED])
def test_gradients_match_transformers(name, index):
    case, seen, generator = CASES[name], [], torch.Generator().manual_seed(7)
    mask = torch.from_numpy(padding("left", 11).copy())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with promoted():
        with torch.no_grad():
            config, model = build(case, "float64", generator)
        attention = model.get_submodule(f"{case.layers_at}.{index}.{case.attention}")
        attention.register_forward_hook(lambda *call: seen.append(call), with_kwargs=True)
        x = torch.randn(3, 11, config.hidden_size, generator=generator)
        at = {} if name == "bloom" else {"position_ids": positions}
        model(inputs_embeds=x, attention_mask=mask.long(), **at)
        ((_, args, kwargs, (output, *_)),) = seen
        hidden = args[0] if args else kwargs["hidden_states"]
        cotangent = torch.randn(output.shape, generator=generator) * mask[:, :, None]
        wanted = torch.autograd.grad(output, [hidden, *attention.parameters()], cotangent)
    layer = families.find_layer(config.to_dict(), index)
    names = [key for key, _ in attention.named_parameters()]
    expected = layer.to_ours(dict(zip(names, map(to_numpy, wanted[1:]), strict=True)))
    module = torch_attn.from_hf(
        config.to_dict(), index, {key: to_numpy(one) for key, one in attention.named_parameters()}
    )
    x = hidden.detach().requires_grad_()
    found = torch.autograd.grad(
        module(x, attention_mask=mask, positions=positions), [x, *module.parameters()], cotangent
    )
    pairs = {"x": (found[0].numpy(), wanted[0].numpy())}
    for (key, _), one in zip(module.named_parameters(), found[1:], strict=True):
        pairs[key] = one.numpy(), expected[key]
    largest = max(np.abs(one).max() for one, _ in pairs.values())
    for key, (one, other) in pairs.items():
        assert np.abs(other).max() > 1e-3 * largest or key.endswith("W_key.bias"), key
        assert np.abs(one - other).max() <= 1e-10 * largest, key


@cover.rotated(("name", "index", "dtype"), LAYERS, ["float32", "bfloat16"])
def test_rounding_errors_do_not_exceed_those_of_transformers(name, index, dtype):
    verdict = judge_layer(name, index, dtype, torch_outputs)
    assert verdict.verdict == "equal", verdict.message


def test_every_family_of_this_kind_has_an_oracle():
    # twins/attention has MiniMax and T5, twins/models whole hybrids; gpt-sw3 has the classes of gpt2.
    elsewhere = {
        "gemma3",
        "minimax",
        "t5",
        "mt5",
        "umt5",
        "falcon_h1",
        "jamba",
        "nemotron_h",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "modernbert-decoder",
        "mimo_v2_flash",
        "olmo_hybrid",
        "gemma3n_text",
        "gemma4_text",
        "gpt-sw3",
    }
    tried = {case.model_type for case in CASES.values()} | elsewhere
    derived = {name for name, family in families.FAMILIES.items() if family in known.FAMILIES}  # proven as a whole
    grouped = {name for name in families.FAMILIES if name not in derived and _is_grouped(name)}
    assert grouped <= tried


def _is_grouped(name):
    indices = (0,) if name in ("bloom", "t5", "mt5") else {"nemotron_h": (0, 2), "jamba": (0, 4)}.get(name, (0, 3))
    layers = (families.find_layer({"model_type": name}, index) for index in indices)
    return any(layer.variant == "GroupedQueryAttention" for layer in layers)
