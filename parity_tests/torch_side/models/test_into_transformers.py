"""Whole models of ours, saved and converted: `transformers` loads the folder and gives the same logits."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

import torch_attn
from attn_bridge import checkpoints, masks
from attn_bridge.cli.app import run as command
from attn_bridge.models import families, layouts
from attn_bridge.models.derived import known
from attn_bridge.models.reading import multimodal
from attn_bridge.specs import DecoderConfig
from attn_bridge.specs.position import Rotary
from attn_bridge.specs.rope_scaling import LinearScaling, LongRoPEScaling, NTKScaling, YaRNScaling
from attn_bridge.weights.templates import match
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import get_weights, to_numpy

from ...support.calls import cover
from ...support.models import drawn_decoders, drawn_encoder_decoders, encoder_decoder_oracle
from ...support.models.decoder_oracle import DECODERS, WHOLE, lift, run
from ...support.models.hf_configs import LATENT_HEADS
from ...support.models.hf_folders import COMPUTED

PAIRS = encoder_decoder_oracle.MODELS
OWN_LAYOUTS = {"granite-4-dense": "hf-granitemoehybrid-dense", "gemma4-moe": "hf-gemma4-moe", "mt5": "hf-t5"}
"""Models of a type that has several layouts, and whose layout is not the one that the type names."""
OWN_CLASSES = {
    "mt5": transformers.T5ForConditionalGeneration,
    "phi4-multimodal": transformers.Phi3ForCausalLM,
}
"""Models that are written as those of the first family of their layout, which computes the same."""
WHOLE_MODELS = [*DECODERS, *PAIRS]
TYPES = {name: DECODERS[name][0] if name in DECODERS else name.partition("-")[0] for name in WHOLE_MODELS}
"""Model -> its `model_type`."""
ONE_OF_A_TYPE = [
    *{model_type: name for name, model_type in reversed(TYPES.items())}.values(),
    *(name for name in OWN_LAYOUTS if name in DECODERS),
    "bart-untied",
]


def into_transformers(model, tmp_path, layout):
    """Save a model, convert it, and return the folder and what `transformers` makes of it."""
    model.save_pretrained(tmp_path / "ours")
    assert command(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", layout]) == 0
    kind = transformers.AutoModelForCausalLM
    if isinstance(model, torch_attn.EncoderDecoderModel):
        is_speech = layout == "hf-whisper"
        kind = transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    with promoted():  # apart from saving: Marian's table of positions goes through NumPy, which nothing may follow
        found, info = kind.from_pretrained(tmp_path / "hf", attn_implementation="eager", output_loading_info=True)
    if not model.config.tie and layout == "hf-bart":  # a table of both sides that is made, and that no side reads
        info["missing_keys"].remove("model.shared.weight")
    if layout == "hf-minimax":  # decays, which follow from the config
        info["missing_keys"] -= {name for name in info["missing_keys"] if name.endswith(COMPUTED)}
    # What a causal class has and never runs, as the attention of a decoder to an encoder.
    info["missing_keys"] = {name for name in info["missing_keys"] if not _is_left_out(name, layouts.find(layout))}
    assert not any(info.values()), info
    lift(found)
    return tmp_path / "hf", found


def _is_left_out(name, layout):
    return any(row.reason and match(row.theirs, name, layout.prefixes) is not None for row in layout.rows)


def opened(name):
    """Return an oracle, its ``model_type``, the class of ours, and the arguments of a call of theirs."""
    if name in PAIRS:
        oracle = encoder_decoder_oracle.run(name, "left")
        masks_of = {"decoder_attention_mask": torch.tensor(oracle.mask).long()}
        return oracle, name.partition("-")[0], torch_attn.EncoderDecoderModel, oracle.call(**masks_of)
    oracle, model_type = run(name, "left"), DECODERS[name][0]
    at = {} if model_type == "bloom" else {"position_ids": torch.tensor(oracle.positions)}
    given = {"input_ids": torch.tensor(oracle.ids), "attention_mask": torch.tensor(oracle.mask).long(), **at}
    return oracle, model_type, torch_attn.DecoderModel, given


@cover.some("name", WHOLE_MODELS, ONE_OF_A_TYPE)
def test_transformers_loads_what_was_saved_and_gives_the_same_logits(tmp_path, name):
    oracle, model_type, kind, given = opened(name)
    layout = OWN_LAYOUTS.get(name, f"hf-{model_type.replace('_', '-')}")
    model = kind.from_pretrained(oracle.folder)
    folder, theirs = into_transformers(model, tmp_path, layout)
    with promoted(), torch.no_grad():
        found = to_numpy(theirs(**given, use_cache=False).logits)
    assert type(theirs) is OWN_CLASSES.get(name, type(oracle.model))
    assert found.dtype == np.float64
    assert np.abs(found - oracle.logits)[oracle.mask].max() <= 1e-10 * np.abs(oracle.logits[oracle.mask]).max()
    # and back: what is read from there is the same model, and the same bytes
    assert kind.from_pretrained(folder).config == model.config
    back = checkpoints.convert(folder, tmp_path / "back", to_layout="torch").target
    assert (back / "model.safetensors").read_bytes() == (tmp_path / "ours" / "model.safetensors").read_bytes()
    # straight from memory
    torch_attn.checkpoints.save(model, tmp_path / "saved", to_layout=layout)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "saved" / file).read_bytes() == (folder / file).read_bytes()
    torch_attn.checkpoints.save(model, tmp_path / "x.safetensors", to_layout=layout)
    assert (tmp_path / "x.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def read(model_type, changes=None, **keys):
    """Return a decoder that a family reads, with the attention of some layers changed: layer -> changes."""
    config = families.find_decoder({"model_type": model_type, **WHOLE, **keys})
    blocks = [
        dataclasses.replace(block, attention=dataclasses.replace(block.attention, **(changes or {}).get(number, {})))
        for number, block in enumerate(config.blocks)
    ]
    return dataclasses.replace(config, blocks=tuple(blocks))


def everywhere(**changes):
    return dict.fromkeys(range(WHOLE["num_hidden_layers"]), changes)


WINDOW = masks.sliding_window(4)
LONG = LongRoPEScaling((1.1, 1.3, 1.7), (1.5, 2.9, 4.2), 8, 3.0)
DEEP = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "n_shared_experts": 3, "first_k_dense_replace": 1}  # fmt: skip
COMPOSED = {
    "heads-apart": ("hf-llama", "mistral", read("llama", num_attention_heads=5, num_key_value_heads=1, head_dim=6)),
    "linear": ("hf-llama", "llama", read("llama", everywhere(position=Rotary(300.0, scaling=LinearScaling(2.5))))),
    "dynamic": ("hf-llama", "llama", read("llama", everywhere(position=Rotary(scaling=NTKScaling(3.0, 64))))),
    "yarn": (
        "hf-llama",
        "llama",
        read("llama", everywhere(position=Rotary(90.0, scaling=YaRNScaling(4.0, 16, 20.0, 2.0, truncate=False)))),
    ),
    "longrope": ("hf-llama", "llama", read("llama", everywhere(position=Rotary(90.0, scaling=LONG)))),
    "windows": ("hf-llama", "smollm3", read("llama", {1: {"mask": WINDOW}, 2: {"position": None}})),
    "qwen2": ("hf-llama", "qwen2", read("qwen2", {2: {"mask": WINDOW}})),
    "scale": (
        "hf-llama",
        "granite",
        dataclasses.replace(read("llama", everywhere(scale=0.31)), logit_scale=0.47, embedding_scale=1.7),
    ),
    "gemma2": ("hf-gemma", "gemma2", read("gemma2", head_dim=8, layer_types=["full_attention"] * 3)),
    "gemma3": (
        "hf-gemma",
        "gemma3_text",
        read(
            "gemma3_text",
            {0: {"position": Rotary(70.0, scaling=LinearScaling(2.0))}},
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=4,
            rope_theta=90.0,
        ),
    ),
    "olmo3": (
        "hf-olmo2",
        "olmo3",
        read(
            "olmo3",
            {0: {"position": Rotary(70.0)}},
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=4,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ),
    "gpt-oss": (
        "hf-gpt-oss",
        "gpt_oss",
        read(
            "gpt_oss",
            everywhere(position=Rotary(90.0), qkv_bias=False, key_bias=False, out_bias=False),
            num_local_experts=3,
            num_experts_per_tok=2,
            swiglu_limit=2.0,
        ),
    ),
    "mixtral": (
        "hf-mixtral",
        "mixtral",
        read("mixtral", sliding_window=3, num_local_experts=3, num_experts_per_tok=1, hidden_act="relu"),
    ),
    "qwen3-moe": (
        "hf-qwen3-moe",
        "qwen3_moe",
        read(
            "qwen3_moe",
            num_experts=3,
            num_experts_per_tok=2,
            use_sliding_window=True,
            sliding_window=4,
            norm_topk_prob=True,
            attention_bias=True,
            moe_intermediate_size=5,
        ),
    ),
    "deepseek-v2": (
        "hf-deepseek",
        "deepseek_v2",
        read("deepseek_v2", **{**LATENT_HEADS, "q_lora_rank": None}, **DEEP, routed_scaling_factor=1.4),
    ),
    "deepseek-v3": (
        "hf-deepseek",
        "deepseek_v3",
        read(
            "deepseek_v3",
            **LATENT_HEADS,
            **DEEP,
            rope_interleave=False,
            norm_topk_prob=False,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                          "mscale_all_dim": 0.8},
        ),
    ),
    "dense": (
        "hf-deepseek",
        "deepseek_v2",  # the first that fits
        read("deepseek_v3", **LATENT_HEADS, **{**DEEP, "first_k_dense_replace": 3}),
    ),
}  # fmt: skip
"""Word -> layout, the ``model_type`` that fits, and a decoder which no published config says, or few."""


@pytest.mark.parametrize("case", COMPOSED)
def test_a_decoder_that_was_composed_is_one_of_theirs_too(tmp_path, case):
    layout, model_type, config = COMPOSED[case]
    assert model_type == assert_same_in_transformers(config, layout, tmp_path)


WRITTEN = families.FAMILIES


@cover.rotated(("name", "changes"), list(WRITTEN), [3, 1])
def test_accepted_drawn_decoders_match_transformers(tmp_path, name, changes):
    of_transformers = (layouts.find(word) for word in layouts.names() if word.startswith("hf-"))
    layout = next(layout for layout in of_transformers if name in layout.model_types)
    draw = drawn_decoders.draw if WRITTEN[name].whole is DecoderConfig else drawn_encoder_decoders.draw
    seeds = range(changes, 4000, 4)
    config = next(one for one in (draw(name, seed) for seed in seeds) if is_written(one, layout))
    assert_same_in_transformers(config, layout.name, tmp_path)


def is_written(config, layout):
    try:
        return bool(families.write_config(config, layout))
    except ValueError:
        return False


def assert_same_in_transformers(config, layout, tmp_path):
    """Hold a model with drawn weights against what `transformers` makes of it, and return its ``model_type``."""
    generator = torch.Generator().manual_seed(6)
    kind = torch_attn.DecoderModel if isinstance(config, DecoderConfig) else torch_attn.EncoderDecoderModel
    with promoted(), torch.no_grad():
        model = kind(config, dtype=torch.float64).eval()
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    folder, theirs = into_transformers(model, tmp_path, layout)
    with promoted(), torch.no_grad():
        # RoBERTa gives padding, whose id is 0 to 2, no position
        ids = torch.randint(3, config.vocab_size, (2, 13), generator=generator)
        given = {"input_ids": ids} if kind is torch_attn.DecoderModel else with_source(config, ids, generator)
        wanted, found = model(*given.values()), theirs(**given, use_cache=False).logits
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    again, weights = get_weights(kind.from_pretrained(folder)), get_weights(model)
    assert all(np.array_equal(one, weights[name]) for name, one in again.items())
    return json.loads((folder / "config.json").read_text())["model_type"]


def with_source(config, ids, generator):
    """Return the arguments of theirs, in the order of ours: a source as long as it may be, and the tokens."""
    encoder = config.encoder
    if encoder.convolutions is None:
        shape, name = (len(ids), encoder.num_positions or 15), "input_ids"
        return {name: torch.randint(1, config.vocab_size, shape, generator=generator), "decoder_input_ids": ids}
    shape = len(ids), encoder.convolutions.channels, 2 * encoder.num_positions
    source = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"input_features": source, "decoder_input_ids": ids}


def test_the_architectures_are_those_of_transformers():
    auto = transformers.models.auto.modeling_auto
    alone = {
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "emu3_text_model": "Emu3ForCausalLM",  # which the table has for the whole model
        "gemma3": "Gemma3ForCausalLM",  # which is written as its text model
    }
    pairs = {**auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
    ours = {name: family.architecture for name, family in WRITTEN.items()}
    assert ours == {
        name: (alone if family.whole is DecoderConfig else pairs)[multimodal.written_type(name)]
        for name, family in WRITTEN.items()
    }


def test_heads_that_do_not_divide_the_width_are_refused_where_their_class_refuses_them():
    def is_refused(description, heads):
        keys = {"hidden_size": 24, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 4}
        named = {description.keys.get(key, key): value for key, value in keys.items()}
        try:
            transformers.AutoConfig.for_model(description.model_type, **named)
        except Exception as error:  # of huggingface_hub, which has several classes
            return "multiple of the number of attention heads" in str(error)
        return False

    wide = [one for one in known.DESCRIPTIONS if {"attention.head_dim", "attention.nope_dim"} & one.fields.keys()]
    refused = {one.model_type for one in wide if is_refused(one, 5) and not is_refused(one, 6)}
    assert "llama" in refused
    assert {one.model_type for one in wide if one.even_heads} == refused


def test_a_bert_encoder_is_one_of_theirs(tmp_path):
    sizes = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 16, "layer_norm_eps": 1e-3}
    model = torch_attn.BertEncoder(sizes, dtype=torch.float64).eval()
    torch_attn.checkpoints.save(model, tmp_path / "hf", to_layout="hf-bert")
    theirs = transformers.AutoModel.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", add_pooling_layer=False
    )
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        wanted, found = model(ids), theirs(ids).last_hidden_state
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
