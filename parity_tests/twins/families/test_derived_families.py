"""Families that are data compute in torch and in Flax what their class of `transformers` computes."""

from __future__ import annotations

import pytest

from attn_bridge.models.derived import known
from attn_parity.frameworks.torch.derivation import model_pair, proof
from attn_parity.frameworks.torch.model_classes import model_class
from attn_parity.frameworks.torch.running.promotion import promoted

DESCRIPTIONS = {description.model_type: description for description in known.DESCRIPTIONS}
ODD = (
    *("cohere", "exaone4", "glm4", "glm4_moe_lite", "hunyuan_v1_moe", "jais2", "kolibri1", "phimoe", "vaultgemma"),
    *("gptj", "gpt_neox", "nemotron", "roberta"),
)
"""Families of one kind of norm, block, experts or rotary positions each; the others have parts of these or of Llama."""


@pytest.mark.parametrize(
    "model_type", [name if name in ODD else pytest.param(name, marks=pytest.mark.full) for name in DESCRIPTIONS]
)
def test_a_derived_family_is_the_same_in_both_frameworks(model_type):
    description = DESCRIPTIONS[model_type]
    model, reader = model_class.find(model_type).fitting(description.fixed), model_pair.reader_of(description)
    with promoted():
        pair = model_pair.make_pair(model, reader, model.keys())
        proof.check_logits(pair, "the usual instance")
    proof.check_jax(pair)


def test_a_flax_model_of_another_family_is_seen():
    model, reader = model_class.find("glm4"), model_pair.reader_of(DESCRIPTIONS["glm4"])
    with promoted():
        pair = model_pair.make_pair(model, reader, model.keys())
    other = model_pair.make_pair(model, reader, model.keys(), seed=1)
    pair.theirs = other.theirs
    with pytest.raises(model_pair.WrongError, match="logits of the Flax model differ"):
        proof.check_jax(pair)
