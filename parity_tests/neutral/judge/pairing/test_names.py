"""Parameters are paired by the names that libraries give them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attn_parity.pairing import names, parts, propose
from attn_parity.pairing.tensors import whole
from attn_parity.sides.subject import SideWeight
from parity_tests.support.processes.work import count_calls

from .parameters import HIDDEN, D, linear, norm, parameters

PARTS = ("norm1", "query", "key", "value", "out", "norm2", "up", "down")
STYLES = {
    "torch": ("layers.{}", ("norm1", "attn.q", "attn.k", "attn.v", "attn.out", "norm2", "linear1", "linear2")),
    "gpt": ("h.{}", ("ln_1", "attn.wq", "attn.wk", "attn.wv", "attn.wo", "ln_2", "mlp.fc1", "mlp.fc2")),
    "nnx": ("layers.{}", ("ln1", "attn.query", "attn.key", "attn.value", "attn.out", "ln2", "lin1", "lin2")),
    "linen": (
        "encoderblock_{}",
        (
            "LayerNorm_0",
            *(f"SelfAttention_0.{name}" for name in ("query", "key", "value", "out")),
            "LayerNorm_1",
            "MLP_0.Dense_0",
            "MLP_0.Dense_1",
        ),
    ),
    "underscores": (
        "layers_{}",
        (
            "norm_1",
            *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
            "norm_2",
            "ffn.dense_1",
            "ffn.dense_2",
        ),
    ),
}


def model(style, side, blocks=2):
    """Return a model's parameters in a style, and path -> what it is."""
    prefix, names = STYLES[style]
    shapes, known = {}, {}
    for i in range(blocks):
        for part, name in zip(PARTS, names, strict=True):
            path = f"{prefix.format(i)}.{name}"
            known[path] = (i, part)
            if part.startswith("norm"):
                shapes |= norm(path, side)
            else:
                sizes = {"up": (D, HIDDEN), "down": (HIDDEN, D)}.get(part, (D, D))
                shapes |= linear(path, *sizes, side)
    shapes |= {("wte.weight" if side == "torch" else "embed.embedding"): ((9, D), "Embedding")}
    return parameters(shapes), known | {"wte": "embedding", "embed": "embedding"}


@pytest.mark.parametrize(("torch", "flax"), [*itertools.permutations(STYLES, 2)])
def test_the_names_of_libraries_are_matched(torch, flax):
    ours, known = model(torch, "torch")
    theirs, others = model(flax, "flax")
    pairing = propose(ours, theirs)
    assert len(pairing.matches) == len(ours) == len(theirs)
    for match in pairing.matches:
        path, other = (one.name.rpartition(".")[0] for one in (match.first, match.second))
        assert known[path] == others[other], f"{match.first.name} = {match.second.name}"
        assert match.first.name.endswith("bias") == match.second.name.endswith("bias")
        is_matrix = match.second.name.endswith("kernel")
        assert match.rule.pattern == ("a1 a0 -> a0 a1" if is_matrix else "... -> ...")
        assert match.how == "name"


SANDWICH = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Gemma's norms, as `transformers` and as DeepMind's packages call them."""


def test_pre_and_post_norms_are_paired_by_name():
    ours = {f"layers.0.{name}.weight": ((D,), "Gemma3RMSNorm") for name in SANDWICH}
    theirs = {f"layer_0.{name}.scale": ((D,), "RMSNorm") for name in sorted(SANDWICH.values())}
    found = propose(parameters(ours, "torch"), parameters(theirs, "flax"))
    assert {match.first.name.split(".")[2]: match.second.name.split(".")[1] for match in found.matches} == SANDWICH


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_parameters_does_not_matter(seed):
    ours, _ = model("gpt", "torch")
    theirs, _ = model("linen", "flax")
    random = np.random.default_rng(seed)
    shuffled = [{name: some[name] for name in random.permutation(list(some))} for some in (ours, theirs)]
    pairs = {(row.torch, row.flax, row.pattern) for row in propose(ours, theirs).rows()}
    assert {(row.torch, row.flax, row.pattern) for row in propose(*shuffled).rows()} == pairs


def test_names_of_another_kind_are_not_paired_by_shape():
    ours = parameters({"norm.weight": ((4,), "LayerNorm"), "norm.bias": ((4,), "LayerNorm")})
    theirs = parameters({"norm.bias": ((4,), "LayerNorm"), "norm.scale": ((4,), "LayerNorm")})
    assert [(row.torch, row.flax) for row in propose(ours, theirs).rows()] == [
        ("norm.weight", "norm.scale"),
        ("norm.bias", "norm.bias"),
    ]


def test_empty_sides_have_an_empty_pairing():
    assert propose({}, {}).matches == ()


def test_pairing_work_grows_linearly_with_the_tensors():
    def blocks(count, prefix, names, matrix, owner):
        return parameters(
            {
                f"{prefix}{i}.{name}.{last}": (shape, owner)
                for i in range(count)
                for name in names
                for last, shape in ((matrix, (8, 8)), ("bias", (8,)))
            }
        )

    def pair(count):
        ours = blocks(
            count, "model.layers.", ("attn.q", "attn.k", "attn.v", "attn.o", "fc1", "fc2"), "weight", "Linear"
        )
        theirs = blocks(count, "block_", ("query", "key", "value", "out", "Dense_0", "Dense_1"), "kernel", "Dense")
        assert {match.how for match in propose(ours, theirs).matches} == {"name"}

    pair(8)  # what is imported once
    assert count_calls(lambda: pair(80)) < 11 * count_calls(lambda: pair(8))


def test_a_fused_name_prefers_the_parts_it_names():
    """Three layers of one size stand in two sets; what is called qkv holds those of attention."""

    fused = names.read([whole("block.qkv.weight", SideWeight((12, 4), "float32", "Linear", "block.qkv"))])
    layers = ("q_proj", "k_proj", "v_proj", "up", "gate", "down")
    others = names.read(
        [whole(f"block.{one}.weight", SideWeight((4, 4), "float32", "Linear", f"block.{one}")) for one in layers]
    )
    attention, rest = (
        parts.PartBundle((0, 1, 2), layers[:3], "qkv", False),
        parts.PartBundle((3, 4, 5), layers[3:], "", False),
    )
    ((own, other),) = parts._speaks(fused, [attention, rest], others)
    assert own - other > 2.0
