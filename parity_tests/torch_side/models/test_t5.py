"""T5, mT5 and UMT5 against `transformers`: every key of their configs, and faults that each give other logits."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

import torch_attn
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.specs.layer_norm import LayerNormConfig
from attn_bridge.specs.position import RelativeBias
from attn_bridge.specs.rms_norm import RMSNormConfig
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ...support.models import drawn_encoder_decoders
from ...support.models.encoder_decoder_oracle import MODELS, run

KEYS = {
    "vocab_size": (29,),
    "d_model": (12,),
    "d_kv": (8,),
    "d_ff": (6,),
    "num_layers": (1,),
    "num_decoder_layers": (None, 4),
    "num_heads": (1, 4),
    "relative_attention_num_buckets": (12, 32),
    "relative_attention_max_distance": (128, 5),
    "dropout_rate": (0.0,),
    "layer_norm_epsilon": (1e-6,),
    "initializer_factor": (2.0,),
    "feed_forward_proj": ("gated-gelu", "gelu", "gated-silu", "tanh", "gated-gelu_new"),
    "is_encoder_decoder": (False,),
    "use_cache": (False,),
    "pad_token_id": (3,),
    "classifier_dropout": (0.3,),
    "is_decoder": (True,),
    "tie_word_embeddings": (True, False),
    "scale_decoder_outputs": (True, False),
    "dense_act_fn": ("silu",),
    "is_gated_act": (False,),
}
REFUSED = {
    ("relative_attention_num_buckets", 32): "max_distance of RelativeBias .9. must be above the 16 distances",
    ("feed_forward_proj", "tanh"): "dense_act_fn .'tanh'. of .?.?t5 must be one of silu",
    ("is_encoder_decoder", False): "is_encoder_decoder .False. of .?.?t5 is not supported",
    ("is_decoder", True): "is_decoder .True. of .?.?t5 is not supported",
}


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_computed_as_in_transformers_or_refused(tmp_path, model_type, key):
    for value in KEYS[key]:
        config = transformers.AutoConfig.for_model(model_type, **{**MODELS["t5"], key: value})
        generator = torch.Generator().manual_seed(3)
        source, ids = (torch.randint(4, 20, (2, tokens), generator=generator) for tokens in (11, 7))
        with promoted(), torch.no_grad():
            theirs = transformers.AutoModelForSeq2SeqLM.from_config(config).eval().double()
            for tensor in theirs.parameters():
                spread = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
                tensor.copy_(spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64) + 0.1)
            wanted = theirs(input_ids=source, decoder_input_ids=ids, use_cache=False).logits
        theirs.save_pretrained(tmp_path)
        if (key, value) in REFUSED:
            with pytest.raises(CheckpointError, match=REFUSED[key, value]):
                torch_attn.EncoderDecoderModel.from_pretrained(tmp_path)
            continue
        with torch.no_grad():
            found = torch_attn.EncoderDecoderModel.from_pretrained(tmp_path)(source, ids)
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max(), value


def test_files_of_transformers_4_say_less_of_activation_and_scale(tmp_path):
    oracle = run("t5-untied")
    oracle.model.save_pretrained(tmp_path)
    document = json.loads((oracle.folder / "config.json").read_text())
    for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"):
        del document[key]
    (tmp_path / "config.json").write_text(json.dumps(document))
    found = torch_attn.EncoderDecoderModel.from_pretrained(tmp_path).config
    assert found == torch_attn.EncoderDecoderModel.from_pretrained(oracle.folder).config


def everywhere(part, **changes):
    """Return a fault of a part of all blocks, or of the blocks themselves: ``blocks``."""

    def fault(config):
        for side in ("encoder", "decoder"):
            if part != "cross_attention" or side == "decoder":
                config = drawn_encoder_decoders.changed(config, side, part, **changes)
        return config

    return fault


def _biased(block, **changes):
    attention = block.attention
    return block.replace(attention=attention.replace(position=dataclasses.replace(attention.position, **changes)))


def biased(side, **changes):
    """Return a fault of the relative bias of a stack."""

    def fault(config):
        stack = getattr(config, side)
        blocks = tuple(
            block.replace(
                attention=block.attention.replace(position=dataclasses.replace(block.attention.position, **changes))
            )
            for block in stack.blocks
        )
        return config.replace(**{side: stack.replace(blocks=blocks)})

    return fault


FAULTS = {
    "t5": {
        "scores are scaled": everywhere("attention", scale=5**-0.5),
        "scores of the source are scaled": everywhere("cross_attention", scale=5**-0.5),
        "later keys in the decoder": biased("decoder", bidirectional=True),
        "one direction in the encoder": biased("encoder", bidirectional=False),
        "usual distances": biased("decoder", max_distance=RelativeBias().max_distance),
        "norms take off the mean": everywhere("blocks", norm=LayerNormConfig(24, 1e-3)),
        "epsilon": everywhere("blocks", norm=RMSNormConfig(24)),
        "logits are not scaled": lambda config: config.replace(logit_scale=1.0),
        "activation": everywhere("feed_forward", activation="silu"),
        "norms behind the sums": everywhere("blocks", norms="post"),
    },
    "t5-untied": {
        "exact gelu": everywhere("feed_forward", activation="gelu"),
        "logits are scaled": lambda config: config.replace(logit_scale=24**-0.5),
        "head is tied": lambda config: config.replace(tie=True),
    },
    "umt5": {
        "the first table for all layers": lambda config: config.replace(encoder=_first_for_all(config.encoder)),
        "logits are not scaled": lambda config: config.replace(logit_scale=1.0),
    },
}


def _first_for_all(stack):
    first, *later = stack.blocks
    return stack.replace(blocks=(first, *(_biased(one, shared=True) for one in later)))


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
@torch.no_grad()
def test_a_wrong_version_gives_other_logits(name, fault):
    oracle = run(name, "left")
    right = torch_attn.EncoderDecoderModel.from_pretrained(oracle.folder)
    config = FAULTS[name][fault](right.config)
    assert config != right.config
    model = torch_attn.EncoderDecoderModel(config, dtype=torch.float64).eval()
    model.load_state_dict(right.state_dict(), strict=False)
    masks = {"source_mask": torch.tensor(oracle.source_mask), "attention_mask": torch.tensor(oracle.mask)}
    arguments = (torch.tensor(oracle.source), torch.tensor(oracle.ids))
    errors = [
        np.abs(to_numpy(one(*arguments, **masks)) - oracle.logits)[oracle.mask].max() / np.abs(oracle.logits).max()
        for one in (right, model)
    ]
    assert errors[0] <= 1e-10
    assert errors[1] >= 1e-5  # the two forms of gelu are 3e-5 apart


def test_blocks_that_are_sharded_one_by_one_share_the_table_of_the_first():
    """`fully_shard` frees the weights of a block behind its call, in which alone they are whole."""
    plain = torch_attn.EncoderDecoderModel.from_pretrained(run("t5").folder)
    sharded = torch_attn.EncoderDecoderModel.from_pretrained(run("t5").folder)
    tokens = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(5))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for stack in (sharded.encoder, sharded.decoder):
            for block in stack.trf_blocks:
                torch.distributed.fsdp.fully_shard(block, mesh=mesh)
        torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
        found, wanted = (model(tokens, tokens) for model in (sharded, plain))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        found.sin().sum().backward()
        wanted.sin().sum().backward()
        gradients = {name: tensor.grad.full_tensor() for name, tensor in sharded.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(gradients[name], tensor.grad, rtol=0, atol=1e-11)
