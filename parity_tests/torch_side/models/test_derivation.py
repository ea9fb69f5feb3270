"""Deriving families from `transformers`: packaged ones compute the same, wrong ones are refused by the proof."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import pytest
import torch

from attn_bridge.cli.app import run
from attn_bridge.masks import sliding_window
from attn_bridge.models.derived import known, reading
from attn_bridge.models.derived.description import KeySource, loads
from attn_bridge.models.rows.decoder import EMBEDDINGS, OURS, PREFIXES
from attn_parity.frameworks.torch.derivation import (
    DerivationError,
    choices,
    derive,
    key_changes,
    model_pair,
    proof,
    repair,
    search,
    survey,
)
from attn_parity.frameworks.torch.derivation.key_changes import STRETCHED
from attn_parity.frameworks.torch.model_classes import model_class, rows, structure
from attn_parity.frameworks.torch.running.promotion import promoted

from ...support.calls.cover import some
from ...support.models.planted_families import plants

BY_NAME = {one.model_type: one for one in known.DESCRIPTIONS}


@functools.cache
def found(name):
    """Return the class of a family, with a usual instance that the family reads."""
    return model_class.find(name).fitting(BY_NAME[name].fixed)


OF_EXPERTS = tuple(f"{OURS}ff.{part}." for part in ("experts", "router", "shared"))


def with_rows(description):
    """Return a description with rows of its own, where it uses another family's layout."""
    if description.rows:
        return description
    layout = known.layout_for(description)
    rows = tuple(row for row in layout.rows if row.check is None and row not in EMBEDDINGS)
    if "experts.num_experts" not in description.fields:  # whose layout other families with experts share
        rows = tuple(row for row in rows if not row.ours or not row.ours[0].startswith(OF_EXPERTS))
    prefixes = () if layout.prefixes == PREFIXES else layout.prefixes
    return dataclasses.replace(description, layout=f"{description.layout}-own", rows=rows, prefixes=prefixes)


ALWAYS = ("starcoder2", "cohere", "exaone4", "hy_v3", "glm4_moe_lite", "phimoe", "opt", "roberta", "mbart", "marian")


@some("name", [name for name, one in BY_NAME.items() if one.proof], ALWAYS)
def test_packaged_family_computes_what_transformers_does(name):
    reader = model_pair.reader_of(BY_NAME[name])
    proof.check_defaults(found(name), reader)
    with promoted():
        pair = model_pair.make_pair(found(name), reader, found(name).keys(), seed=7)
        proof.check_logits(pair, "the usual instance")
        proof.check_padding(pair, "left")
        proof.check_cache(pair)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, one in BY_NAME.items() if one.proof])
def test_derivation_gives_the_packaged_family(name):
    derived = derive(name, flax=False)
    assert dataclasses.replace(derived, proof={}) == dataclasses.replace(BY_NAME[name], proof={})


WITH_ROWS = tuple(name for name, description in BY_NAME.items() if description.rows)
LIKELIEST = 13
"""Proposals among which the right rows are: projections of several kinds have many."""


@some("name", WITH_ROWS, ("phimoe", "dots1", "granitemoe", "codegen", "gpt_neox", "bigbird_pegasus", "apertus", "mpt"))
def test_right_rows_are_among_the_likeliest(name):
    model = model_class.find(name)
    parts = structure.read(model)
    written = []
    for _, arguments in itertools.islice(search._proposals(choices.choices_of(model, parts)), LIKELIEST):
        arguments.pop("renamed", None)
        written.append(rows.rows(parts, **arguments))
    assert BY_NAME[name].rows in written


@pytest.mark.parametrize(("name", "has_sinks"), [("granite_swa", True), ("arcee", False)])
def test_sinks_of_a_class_are_told_by_its_tensors(name, has_sinks):
    assert structure.read(model_class.find(name)).flags["attention.sinks"].value is has_sinks


PLANTED = {f"{name}: {fault}": (name, wrong) for name in BY_NAME for fault, wrong in plants(with_rows(BY_NAME[name]))}
# These classes can't run heads that turn in part, which alone would tell the two descriptions apart.
del PLANTED["solar_open: rotary part"], PLANTED["mellum: rotary part"]
# Sparse blocks begin beyond the length of the samples.
del PLANTED["big_bird: attention_type not refused"]
# Samples of the proof have no tokens of padding, whose row of zeros such a token would move to a position.
del PLANTED["xglm: pad_token_id not refused"]
# transformers refuses the other value as well, or can't run it, so that no instance shows a difference.
del PLANTED["laguna: moe_apply_router_weight_on_input not refused"]
del PLANTED["gpt_bigcode: add_cross_attention not refused"], PLANTED["phi: qk_layernorm not refused"]
del PLANTED["trocr: use_learned_position_embeddings not refused"]
del PLANTED["granite: null of attention_multiplier not refused"]
del PLANTED["glm_moe_dsa: null of q_lora_rank not refused"]
del PLANTED["gemma3n_text: null of final_logit_softcapping not refused"]
# The class has no such key; files for other code have it.
del PLANTED["internlm3: qkv_bias not refused"], PLANTED["internlm3: bias not refused"]
del PLANTED["qwen2: attention_bias not refused"], PLANTED["gpt_oss: hidden_act not refused"]
# Its value is null by default, of which no other is made.
del PLANTED["gemma2: use_bidirectional_attention not refused"]
for name in ("gemma4_text", "gemma4_unified_text"):
    del PLANTED[f"{name}: use_bidirectional_attention not refused"], PLANTED[f"{name}: rope_scaling not refused"]
# It takes two keys to have an effect, of which one is changed at a time.
del PLANTED["bloom: slow_but_exact not refused"]
# The name stands for itself, and is there for writing alone.
del PLANTED["gpt2: own names not read"]
# Usual instances have no experts, no groups of them and no other kind of layer: whole models of the tests do.
for fault in ("router scores", "router normalisation False", "top k not read", "gate order of experts"):
    del PLANTED[f"gemma4_text: {fault}"]
for fault in ("best of groups", "chosen groups not read", "without groups"):
    del PLANTED[f"deepseek_v2: {fault}"]
del PLANTED["diffllama: positions in all layers"], PLANTED["cohere2_moe: rotary base not the default"]
del PLANTED["lfm2: no window"], PLANTED["lfm2: window in all layers"]
# The other kind of layer is a convolution, which has no positions, or the usual instance has a base.
for name, fault in itertools.product(("lfm2", "lfm2_moe"), ("positions in all layers", "rotary base not the default")):
    del PLANTED[f"{name}: {fault}"]
# The base of each kind of layer is that of other keys, which stand before this default.
del PLANTED["modernbert-decoder: rotary kinds exchanged"]
# Probabilities of the chosen experts add up to 1 but for sigmoids, which are another key.
del PLANTED["cohere2_moe: router normalisation True"], PLANTED["cohere2_moe: router normalisation False"]
# Dropout is off where numbers are compared, and coefficients are clipped in training alone.
del PLANTED["gemma3n_text: altup_coef_clip not refused"]
del PLANTED["diffllama: attention_dropout not refused"]
# transformers computes the same, or can't run them; other code reads them differently, so that they are refused.
del PLANTED["deepseek_v3: other head_dim not refused"], PLANTED["deepseek_v32: null of q_lora_rank not refused"]
del PLANTED["cohere2_moe: expert_selection_fn not refused"]
del PLANTED["cohere2_moe: shared_expert_combination_strategy not refused"]
# A description without the field can't be read at all.
del PLANTED["cohere2_moe: sparse.first not read"], PLANTED["minimax: without block.residual_scale"]
# The family has no dense layer: the rows that the fault exchanges come with a shared layout, and are never used.
del PLANTED["olmoe: gate order"], PLANTED["mellum: gate order"]
QUICK = (
    *("cohere: rotary kind", "exaone4: layers counted from 1", "exaone4: positions in all layers"),
    *("cohere: mean not taken off", "cohere: without model.logit_scale", "exaone4: norms elsewhere"),
    *("exaone4: 1 + w of q and k", "glm: gate order", "glm: rotary part", "arcee: tied head", "arcee: 1 + w"),
    *("starcoder2: no window", "starcoder2: eps not read", "starcoder2: keys as values"),
    *("hy_v3: router normalisation False", "hy_v3: router scores", "hy_v3: without router.scale"),
    *("hy_v3: without correction", "hy_v3: gate order of experts", "hy_v3: gate order of shared layers"),
    *("hy_v3: top k not read", "hy_v3: shared layers not read"),
    *("gpt_neox: sums elsewhere", "nemotron: 1 + w", "roberta: positions not offset", "roberta: sums elsewhere"),
    *("axk1: without the last norm", "laguna: sigmoid of the gate", "laguna: heads of layers not read"),
    *("gpt_neox_japanese: bias in no layer", "gpt_neox_japanese: bias in all layers"),
    *("bert: sums elsewhere", "bart: scale of embeddings not switched"),
    *("roberta: activation of the head", "blenderbot-small: positions in the norm"),
    *(
        "minicpm3: block.residual_scale without a root",
        "minicpm3: model.logit_scale not divided",
        "gptj: rotary channels not read",
    ),
    *("nanochat: positions turned back", "nanochat: mean taken off"),
    *(
        "apertus: slopes exchanged",
        "bitnet: eps of attention.context_norm not read",
        "rembert: model.embedding_width not read",
        "solar_open: best of groups",
        "solar_open: without groups",
        "minimax_m2: router scores",
    ),
    *("kolibri1: correction elsewhere", "hy_v3: correction in the weights", "phimoe: router scores"),
    "glm4_moe_lite: channels with and without position exchanged",
    *(
        "hunyuan_v1_moe: norms of q and k elsewhere",
        "flint: last layer like the others",
    ),
    *("qwen2_moe: without the gate of shared layers", "mellum: rotary kinds exchanged"),
    *("mbart: num_attention_heads of the encoder", "mbart: num_hidden_layers of the encoder"),
    *("mbart: scale of embeddings not switched", "marian: sums elsewhere", "bigbird_pegasus: tied head"),
)


@some("fault", list(PLANTED), QUICK)
def test_proof_refuses_wrong_family(fault):
    name, wrong = PLANTED[fault]
    with pytest.raises(model_pair.WrongError):
        proof.prove(found(name), wrong, flax=False)


def test_config_that_lacks_memory_is_not_one_that_the_class_cannot_run(monkeypatch):
    model = dataclasses.replace(found("hunyuan_v1_moe"), kept={})
    right, reader = model_class.ModelClass.instance, model_pair.reader_of(BY_NAME["hunyuan_v1_moe"])

    def instance(self, keys, seed=0):
        if keys.get("rope_parameters") == STRETCHED:
            return torch.empty(1 << 50)
        return right(self, keys, seed)

    with monkeypatch.context() as patch:
        patch.setattr(model_class.ModelClass, "instance", instance)
        with pytest.raises(MemoryError, match=r"^too little memory for an instance with ."):
            proof.try_change(model, reader, {"rope_parameters": STRETCHED})
    assert proof.try_change(model, reader, {"rope_parameters": STRETCHED}) == "equal"
    _, wrong = PLANTED["hunyuan_v1_moe: base not stretched"]
    with pytest.raises(model_pair.WrongError, match=r"^logits differ by "):
        proof.try_change(model, model_pair.reader_of(wrong), {"rope_parameters": STRETCHED})


OTHER_NAMES = {"num_layers": "num_hidden_layers", "n_layer": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}


def test_keys_are_read_by_all_names_that_a_class_has_for_them(monkeypatch):
    monkeypatch.setattr(found("arcee").config_class, "attribute_map", OTHER_NAMES)
    model = model_class.find("arcee")
    parts = structure.read(model)
    description = repair.tidy(model, parts, search.propose(model, parts))
    reader = model_pair.reader_of(description)
    proof.check_defaults(model, reader)
    changes = list(key_changes.renamed(model, key_changes.changes_of(model)))
    assert {name for change in changes for name, value in change.items() if value != model_class.ABSENT} == {
        *OTHER_NAMES
    }
    assert {proof.try_change(model, reader, change) for change in changes} == {"equal"}
    for usual, key in (("num_hidden_layers", "num_layers"), ("rms_norm_eps", "layer_norm_epsilon")):
        wrong = dataclasses.replace(description, aliases={}, keys={}, defaults={**description.defaults, usual: 3})
        with pytest.raises(model_pair.WrongError):
            proof.try_change(model, model_pair.reader_of(wrong), {usual: model_class.ABSENT, key: 2})
    assert reader.write(model_pair.read(reader, model.keys()))["num_hidden_layers"] == 4


def test_class_without_a_planted_fault_cannot_run_what_would_tell():
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    reader = model_pair.reader_of(BY_NAME["solar_open"])
    assert proof.try_change(found("solar_open"), reader, {"rope_parameters": half}) == "impossible"


@pytest.mark.parametrize("name", ["starcoder2", "exaone4"])
def test_proof_refuses_window_off_by_one(name, monkeypatch):
    right = reading.mask_of

    def wider(config, layer, kind):
        mask = right(config, layer, kind)
        return mask if mask.reach is None else sliding_window(mask.reach + 1)

    monkeypatch.setattr(reading, "mask_of", wider)
    with pytest.raises(model_pair.WrongError, match=r"^logits differ by .* with the usual instance$"):
        proof.prove(found(name), BY_NAME[name], flax=False)


@pytest.mark.parametrize("beyond", ["layers", "tokens"])
def test_proof_refuses_what_begins_beyond_the_usual_instance(beyond, monkeypatch):
    right = model_class.ModelClass.instance

    def instance(self, keys, seed=0):
        model = right(self, keys, seed)

        def scaled(module, arguments, out):
            steps = torch.arange(out.shape[1])
            return torch.where(steps[:, None] < 30, out, 1.1 * out) if beyond == "tokens" else 1.1 * out

        for layer in model.model.layers[0 if beyond == "tokens" else 9 :]:
            layer.register_forward_hook(scaled)
        return model

    monkeypatch.setattr(model_class.ModelClass, "instance", instance)
    model = dataclasses.replace(found("arcee"), kept={})
    with pytest.raises(model_pair.WrongError, match=r"^logits of 24 layers and 48 tokens differ by "):
        proof.prove(model, BY_NAME["arcee"], flax=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", r"^model_type \(nosuch\) has no causal language model in transformers "),
        (
            "doge",
            r"^model.layers.0 \(DogeDecoderLayer\): input_residual has no place in ours; the nearest is input_layern",
        ),
        ("prophetnet", r"^no attention layers of ours among self_attn \(ProphetNetNgramSelfAttention\), "),
        ("roc_bert", r"^roc_bert.embeddings.shape_embed \(Embedding\): a part besides blocks that ours lack$"),
    ],
)
def test_unknown_part_is_refused_by_name(name, message):
    with pytest.raises(DerivationError, match=message):
        derive(name, flax=False)


@some("deviations", [1, search.MOST_DEVIATIONS], [1])
def test_module_that_computes_something_else_is_named(deviations, monkeypatch):
    monkeypatch.setattr(search, "MOST_DEVIATIONS", deviations)
    with pytest.raises(DerivationError, match=r"^model.layers.0.self_attn \(Llama4TextAttention\) computes"):
        derive("llama4_text", flax=False)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (4, r"^model.layers.0.mlp \(ArceeMLP\) computes something else; the nearest is FeedForward$"),
        (5, r"^model.layers.1.input_layernorm \(ArceeRMSNorm\) computes something else; the nearest is RMSNorm$"),
        (None, r"^ArceeForCausalLM: what is around the blocks differs \(embeddings, head or last norm\); the "),
    ],
)
def test_first_submodule_in_order_of_calls_is_named(number, message, monkeypatch):
    calls = itertools.count(1)
    monkeypatch.setattr(search, "_is_equal", lambda *_: False)
    monkeypatch.setattr(proof, "error_of", lambda ours, theirs: 2.0 if next(calls) == number else 1.0)
    model = model_class.find("arcee")
    with pytest.raises(DerivationError, match=message):
        search.propose(model, structure.read(model))


def test_command_refuses_in_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "doge"}')
    assert run(["derive", str(tmp_path), "--no-flax"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refused: model.layers.0 (DogeDecoderLayer): ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either FOLDER|MODEL_TYPE or --all"),
        (["arcee", "--all"], "give either FOLDER|MODEL_TYPE or --all"),
        (["--all"], "--all needs a folder to write to (--out)"),
    ],
)
def test_command_refuses_bad_usage(arguments, message, capsys):
    assert run(["derive", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_survey_has_an_outcome_for_each_family(tmp_path):
    limits = {"seconds": 300.0, "memory": 8 << 30}
    outcomes = {one.model_type: one for one in survey.survey(["arcee", "doge"], tmp_path, **limits)}
    assert {name: one.kind for name, one in outcomes.items()} == {"arcee": "proven", "doge": "refused"}
    assert outcomes["doge"].detail.startswith("model.layers.0 (DogeDecoderLayer): ")
    assert loads((tmp_path / "arcee.toml").read_text(), "arcee.toml").fields == BY_NAME["arcee"].fields
    assert json.loads((tmp_path / survey.FILE).read_text())["families"].keys() == outcomes.keys()


def test_survey_takes_packaged_families_as_they_are(tmp_path):
    (outcome,) = survey.survey(["arcee"], tmp_path, seconds=0.01, memory=8 << 30, reuse=True)
    assert (outcome.kind, outcome.proof) == ("proven", BY_NAME["arcee"].proof)
    assert loads((tmp_path / "arcee.toml").read_text(), "arcee.toml") == BY_NAME["arcee"]
    assert json.loads((tmp_path / survey.FILE).read_text())["families"]["arcee"]["kind"] == "proven"


@pytest.mark.full
def test_survey_stops_a_family_beyond_its_limits(tmp_path):
    (outcome,) = survey.survey(["arcee"], tmp_path, seconds=0.01, memory=8 << 30)
    assert (outcome.kind, outcome.detail) == ("stopped", "more than 0.01 seconds")
    assert not (tmp_path / "arcee.toml").exists()


@pytest.mark.full
def test_command_writes_family_that_it_proved(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["derive", "arcee", "--no-flax"]) == 0
    assert capsys.readouterr().out.startswith("proven: ArceeForCausalLM, ")
    written = loads((tmp_path / "arcee.toml").read_text(), "arcee.toml")
    assert written.fields == BY_NAME["arcee"].fields


@pytest.mark.parametrize(("hard", "limits"), [(-1, (8, -1)), (5, (5, 5)), (9, (8, 9))])
def test_memory_of_a_family_is_limited_within_the_hard_limit(hard, limits, monkeypatch):
    resource = pytest.importorskip("resource")
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (-1, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append((kind, limits)))
    survey._limit(8)
    assert given == [(resource.RLIMIT_AS, limits)]


@pytest.mark.parametrize(
    ("name", "sizes"), [("hy_v3", (6, 20, 60)), ("solar_open", (6, 20, 60)), ("minimax_m2", (6, 40, 0))]
)
def test_experts_of_a_class_are_found_with_their_sizes(name, sizes):
    experts = structure.read(found(name)).experts
    assert (experts.number, experts.width, experts.shared) == sizes


@pytest.mark.parametrize(("field", "value"), sorted(repair._USUAL, key=str))
def test_a_value_that_derivation_leaves_out_is_that_of_a_missing_field(field, value):
    part = f"{field.partition('.')[0]}."
    family = next(
        BY_NAME[name]
        for name in ("dots1", "qwen3_moe", "cohere", "exaone4", "phi3")
        if field not in BY_NAME[name].fields and any(other.startswith(part) for other in BY_NAME[name].fields)
    )
    written = dataclasses.replace(family, fields={**family.fields, field: KeySource(value=value)})
    keys = found(family.model_type).keys()
    missing, read = (model_pair.read(model_pair.reader_of(one), keys) for one in (family, written))
    assert read == missing
