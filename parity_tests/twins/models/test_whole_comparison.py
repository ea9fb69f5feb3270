"""`compare` of whole models: `transformers`' own, as it comes, against our Flax twin, right and with a fault."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

import jax_attn
from attn_bridge.parity import compare

from ...support.models import decoder_oracle

IDS = np.random.default_rng(0).integers(1, decoder_oracle.VOCABULARY, (2, 9))
"""Tokens other than that of padding, whose embedding gets no gradient in torch."""


@pytest.fixture(scope="module", params=["llama", pytest.param("mixtral", marks=pytest.mark.full)])
def pair(request, tmp_path_factory):
    kind, sizes = decoder_oracle.DECODERS[request.param]
    folder = tmp_path_factory.mktemp("whole")
    decoder_oracle.make(kind, {**sizes, "num_hidden_layers": 2}).float().save_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return theirs, jax_attn.DecoderModel.from_pretrained(folder)


def test_a_whole_model_of_transformers_is_equal(pair):
    theirs, ours = pair
    report = compare(theirs, ours, {"input_ids": IDS, "use_cache": False}, (IDS,), transfer=False, seeds=1)
    assert report.verdict == "equal"
    names = {one.first: one.second for one in report.pairing}
    assert names["model.layers.1.self_attn.k_proj.weight"] == "trf_blocks.1.att.W_key.kernel"
    assert names["lm_head.weight"] == "out_head.kernel"


def test_a_fault_in_it_is_placed(pair):
    theirs, ours = pair
    wrong = nnx.clone(ours)
    kernel = wrong.trf_blocks[1].att.W_value.kernel
    kernel.set_value(jnp.asarray(kernel.get_value()) * 1.01)
    report = compare(theirs, wrong, {"input_ids": IDS, "use_cache": False}, (IDS,), transfer=False, seeds=1)
    assert report.verdict == "different"
    assert report.first_divergence.second_path == "trf_blocks.1.att.W_value"
