"""The config.json of an encoder with its decoder in a layout of `transformers`: what is said, kept, and refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attn_bridge import checkpoints, masks
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.models import families, layouts
from attn_bridge.models.reading.differences import differences
from attn_bridge.specs.layer_norm import LayerNormConfig
from attn_bridge.specs.rms_norm import RMSNormConfig
from parity_tests.support.models.drawn_encoder_decoders import SIZES, changed, draw, read

from .test_written_configs import convert, decoder, folder, own

MODEL = "EncoderDecoderModel"
BIAS = ("final_logits_bias",)
BART, WHISPER = read("bart"), read("whisper")
FREE = {"tie_word_embeddings": False, "activation_function": "gelu_new", "attention_dropout": 0.2, "dropout": 0.3}
FREE |= {"activation_dropout": 0.4}
SAID = {
    "bart": ("bart", BART),
    "bart, biased": ("bart", read("bart", names=BIAS)),
    "bart, scaled": ("bart", read("bart", scale_embedding=True)),
    "bart, free": ("bart", read("bart", names=BIAS, **FREE)),
    "whisper": ("whisper", WHISPER),
    "whisper, free": ("whisper", read("whisper", **FREE)),
    "t5": ("t5", read("t5")),
    "t5, free": ("t5", read("t5", tie_word_embeddings=False, feed_forward_proj="gated-gelu", dropout_rate=0.3)),
    "umt5": ("umt5", read("umt5", feed_forward_proj="silu")),
}
NULL = {
    "bart": {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"},
    "whisper": {"bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "begin_suppress_tokens"},
    **{key: {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"} for key in ("t5", "umt5")},
}


def names_of(config):
    return [row.rule.torch for row in config.parameters]


@pytest.mark.parametrize("name", SAID)
def test_what_a_family_reads_it_writes(name):
    model_type, config = SAID[name]
    written = json.loads(json.dumps(families.write_config(config, layouts.find(f"hf-{model_type}"))))
    assert families.find_encoder_decoder(written, names_of(config)) == config
    assert written["architectures"] == [families.FAMILIES[model_type].architecture]
    assert {key for key, value in written.items() if value is None} == NULL[model_type]
    assert written["is_encoder_decoder"] is True


# ---- refused


def wide():
    """Return a Whisper whose encoder is wider than its decoder."""
    decoder, (block, *_) = WHISPER.decoder, WHISPER.decoder.blocks
    block = dataclasses.replace(block, cross_attention=dataclasses.replace(block.cross_attention, d_context=24))
    decoder = dataclasses.replace(decoder, blocks=(block,) * len(decoder.blocks))
    return dataclasses.replace(WHISPER, encoder=read("whisper", d_model=24).encoder, decoder=decoder)


REFUSED = {
    "widths": ("whisper", wide, "whisper has another encoder.emb_dim (24), encoder.blocks[0].attention.d_in (24) in 3"),
    "norms": ("bart", ("decoder", "blocks", {"norms": "pre"}), "bart has another decoder.blocks[0].norms (pre) in 2"),
    "norm": (
        "bart",
        ("encoder", "blocks", {"norm": RMSNormConfig(12)}),
        "bart has another encoder.blocks[0].norm (RMSNormConfig(",
    ),
    "constant": (
        "whisper",
        ("encoder", "", {"norm": LayerNormConfig(12, 1e-3)}),
        "whisper has another encoder.norm.eps (0.001)",
    ),
    "positions": ("bart", ("encoder", "", {"num_positions": 99}), "bart has another encoder.num_positions (99)"),
    "offset": ("bart", ("decoder", "", {"position_offset": 0}), "bart has another decoder.position_offset (0)"),
    "scale": (
        "whisper",
        ("decoder", "", {"embedding_scale": 2.0}),
        "whisper has another decoder.embedding_scale (2.0)",
    ),
    "dropout": ("bart", ("encoder", "", {"dropout": 0.4}), "bart has another encoder.dropout (0.4)"),
    "none": ("bart", ("encoder", "", {"blocks": ()}), "bart: encoder.blocks are none"),
    "table": (
        "bart",
        lambda: dataclasses.replace(BART, tie=False),
        "bart has another encoder.vocab_size (None), decoder.vocab_size (None)",
    ),
    "logits": (
        "whisper",
        lambda: dataclasses.replace(WHISPER, logits_bias=True),
        "whisper has another logits_bias (True)",
    ),
    "keys": (
        "whisper",
        ("decoder", "cross_attention", {"key_bias": True}),
        "whisper has another decoder.blocks[0].cross_attention.key_bias (True) in 2 blocks",
    ),
    "activation": (
        "bart",
        ("encoder", "feed_forward", {"activation": "relu"}),
        "bart has another encoder.blocks[0].feed_forward.activation (relu) in 3 blocks",
    ),
    "mask": (
        "bart",
        ("decoder", "attention", {"mask": masks.sliding_window(3)}),
        "bart has another decoder.blocks[0].attention.mask (SlidingWindow(size=3)) in 2 blocks",
    ),
    "heads": (
        "bart",
        ("decoder", "attention", {"num_heads": 5, "num_kv_heads": 5}),
        "bart: d_in (12) must be a multiple of num_heads (5)",
    ),
    "tokens": ("whisper", lambda: BART, "whisper: encoder.convolutions (None) must be a ConvolutionsConfig"),
    "no bias": (
        "t5",
        ("decoder", "attention", {"position": None}),
        "t5: position of decoder.blocks[0] (None) must be a RelativeBias",
    ),
    "frames": ("bart", lambda: WHISPER, "bart has another encoder.blocks[0].attention.key_bias (False) in 3 blocks, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_can_not_say_is_refused_by_name(case):
    model_type, change, message = REFUSED[case]
    config = change() if callable(change) else changed(read(model_type), *change[:2], **change[2])
    with pytest.raises(ValueError, match=r"^no config.json of hf-[^\n]*$") as caught:
        families.write_config(config, layouts.find(f"hf-{model_type}"))
    tried = ", ".join(layouts.find(f"hf-{model_type}").model_types)
    start = f"no config.json of hf-{model_type} ({tried}) says all of this encoder and decoder; {message}"
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    ("config", "layout"), [(BART, "hf-llama"), (WHISPER, "hf-bert"), (decoder(), "hf-bart"), (decoder(), "hf-whisper")]
)
def test_a_layout_of_other_models_is_refused(config, layout):
    kind = "encoder and decoder" if config in (BART, WHISPER) else "decoder"
    with pytest.raises(ValueError, match=f"^{layout} is for no {kind} of ours, so that no config.json can be written$"):
        families.write_config(config, layouts.find(layout))


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_a_drawn_pair_is_said_or_refused_in_one_line(name):
    said, refused = 0, []
    for seed in range(60):
        config = draw(name, seed)
        try:
            written = families.write_config(config, layouts.find(f"hf-{name}"))
        except ValueError as error:
            refused.append(str(error))
            continue
        read_again = families.find_encoder_decoder(json.loads(json.dumps(written)), names_of(config))
        assert differences(config, read_again) == []
        assert read_again == config
        said += 1
    assert said >= 20
    assert len(refused) >= 20
    assert not [line for line in refused if "\n" in line or not line.startswith("no config.json of ")]


# ---- beside weights


@pytest.mark.parametrize("name", SAID)
def test_a_folder_of_ours_becomes_one_of_theirs_and_again_ours(tmp_path, name):
    model_type, config = SAID[name]
    source = folder(tmp_path / "ours", own(config, MODEL), config, "bfloat16")
    code, found = convert(source, tmp_path / "hf", f"hf-{model_type}")
    assert code == 0
    assert (found["model_type"], found["torch_dtype"]) == (model_type, "bfloat16")
    assert found["tie_word_embeddings"] is config.tie
    tensors = checkpoints.inspect(tmp_path / "hf").tensors
    assert families.find_encoder_decoder(found, tensors) == config
    assert ("final_logits_bias" in tensors) is config.logits_bias
    checkpoints.convert(tmp_path / "hf", tmp_path / "back", to_layout="torch")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == found
    assert checkpoints.verify(source, tmp_path / "hf").passed
    flax = checkpoints.convert(source, tmp_path / "flax", to_layout="flax").target
    assert convert(flax, tmp_path / "from-flax", f"hf-{model_type}") == (0, found)
    arrays, wanted = checkpoints.read(tmp_path / "from-flax"), checkpoints.read(tmp_path / "hf")
    assert {name: one.tobytes() for name, one in arrays.items()} == {
        name: one.tobytes() for name, one in wanted.items()
    }


def test_what_steers_generation_goes_along_and_a_number_of_positions_does_not(tmp_path):
    kept = {"decoder_start_token_id": 4, "forced_eos_token_id": 2, "pad_token_id": 1, "suppress_tokens": [3, 5]}
    for config, name in ((BART, "bart"), (WHISPER, "whisper")):
        document = {**own(config, MODEL), **kept, "max_position_embeddings": 777, "begin_suppress_tokens": None}
        _, found = convert(folder(tmp_path / name, document, config), tmp_path / f"hf-{name}", f"hf-{name}")
        assert {key: found[key] for key in kept} == kept
        assert found["bos_token_id"] is None
        assert families.find_encoder_decoder(found) == config
    assert found["begin_suppress_tokens"] is None
    assert "decoder_start_token_id" not in families.write_config(WHISPER, layouts.find("hf-whisper"))


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_refusal_is_one_line_and_writes_nothing(tmp_path, capsys, more):
    config = changed(BART, "decoder", "blocks", norms="pre")
    source = folder(tmp_path / "ours", own(config, MODEL), config)
    assert convert(source, tmp_path / "hf", "hf-bart", *more) == (2, None)
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert "decoder.blocks[0].norms (pre) in 2 blocks" in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ours"]


def test_a_file_finds_in_our_config_whether_the_head_is_tied(tmp_path):
    for free, head in ((FREE, True), ({}, False)):
        config = changed(read("whisper", **free), "decoder", embedding_scale=2.0)  # which no config.json says
        source = folder(tmp_path / f"ours-{head}", own(config, MODEL), config)
        target = checkpoints.convert(source, tmp_path / f"{head}.safetensors", to_layout="hf-whisper").target
        assert ("proj_out.weight" in checkpoints.inspect(target).tensors) is head


@pytest.mark.parametrize("config", [None, 3, {"class": "DecoderConfig"}, {"class": "EncoderDecoderConfig"}])
def test_a_damaged_config_of_ours_is_one_line(tmp_path, config):
    source = folder(tmp_path / "ours", {"model_type": f"attn-bridge-{MODEL}", "config": config}, BART)
    with pytest.raises(CheckpointError, match=r"/config\.json: [^\n]*(DecoderConfig|class)[^\n]*$"):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-bart")


def test_a_config_of_theirs_goes_along_as_it_is_and_to_no_other_model(tmp_path):
    theirs = {"model_type": "bart", **SIZES, "decoder_start_token_id": 4, "a_key_of_theirs": [1]}
    source = folder(tmp_path / "ours", theirs, BART)
    assert convert(source, tmp_path / "hf", "hf-bart") == (0, theirs)
    with pytest.raises(CheckpointError, match=r"^a bart can't become hf-whisper: encoder\.convolutions \(None\)"):
        checkpoints.plan(source, tmp_path / "other", to_layout="hf-whisper")
