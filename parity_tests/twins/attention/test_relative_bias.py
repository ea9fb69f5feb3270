"""Relative bias: both frameworks, `transformers` and the formula give the same; buckets, caches, names."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

import jax_attn
import torch_attn
from attn_bridge.models import families
from attn_bridge.specs import RelativeBias
from attn_parity.frameworks.torch.running.promotion import promoted

from ..recurrent.recurrent import decode, left_and_right, tokens

CLASSES = {"t5": T5Attention, "mt5": MT5Attention, "umt5": UMT5Attention}
SIDES = ("encoder", "decoder")
KINDS = [(name, side) for name in CLASSES for side in SIDES]


@functools.cache
def hugging_face(name: str, side: str):
    """Return the config of a stack, the attention of its first layer, and its tensors."""
    config = transformers.AutoConfig.for_model(
        name,
        d_model=12,
        d_kv=5,
        num_heads=4,
        num_layers=2,
        relative_attention_num_buckets=10,
        relative_attention_max_distance=9,
        is_decoder=side == "decoder",
        attn_implementation="eager",
    )
    with promoted():
        attention = CLASSES[name](config, True, 0, side == "decoder").eval().double()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw) + 0.1)
    prefix = f"{side}.block.0.layer.0.SelfAttention."
    state = {prefix + key: array.numpy() for key, array in attention.state_dict().items()}
    return json.loads(config.to_json_string()), attention, state


def additive(side: str, seen: np.ndarray, queries: int) -> torch.Tensor:
    """Return the mask of the last queries as `transformers` adds it to scores."""
    shown = np.broadcast_to(seen[:, None, None, :], (*seen.shape[:1], 1, queries, seen.shape[1]))
    if side == "decoder":
        shown = shown & np.tri(seen.shape[1], dtype=bool)[-queries:]
    return torch.from_numpy(np.where(shown, 0.0, np.finfo(np.float64).min))


def run_theirs(name: str, side: str, x: torch.Tensor, seen: np.ndarray, steps: tuple[int, ...]) -> torch.Tensor:
    attention = hugging_face(name, side)[1]
    mask_name = "attention_mask" if name == "umt5" else "mask"
    cache, outputs, stop = transformers.DynamicCache() if len(steps) > 1 else None, [], 0
    for count in steps:
        begin, stop = stop, stop + count
        mask = {mask_name: additive(side, seen[:, :stop], count)}
        outputs.append(attention(x[:, begin:stop], **mask, past_key_values=cache)[0])
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(("name", "side"), KINDS)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same(name, side):
    raw, _, state = hugging_face(name, side)
    x, seen = tokens(3, 23, 12), left_and_right(23)
    for steps in [(23,)] if side == "encoder" else [(23,), (6, 1, 1, 15)]:
        with promoted(), torch.no_grad():
            expected = run_theirs(name, side, torch.from_numpy(x), seen, steps).numpy()
        for backend in (torch_attn, jax_attn):
            got = decode(backend.from_hf(raw, 0, state), x, steps, seen)
            assert np.abs(got - expected)[seen].max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "side"), KINDS)
def test_gradients_are_those_of_transformers(name, side):
    raw, attention, state = hugging_face(name, side)
    x = tokens(2, 19, 12)
    weight = torch.from_numpy(tokens(2, 19, 12, seed=3))
    with promoted():
        given = torch.from_numpy(x).requires_grad_()
        loss = (run_theirs(name, side, given, np.ones((2, 19), bool), (19,)) * weight).sum()
        of_x, *expected = torch.autograd.grad(loss, [given, *attention.parameters()])
    module = torch_attn.from_hf(raw, 0, state)
    given = torch.from_numpy(x).requires_grad_()
    found_x, *found = torch.autograd.grad((module(given) * weight).sum(), [given, *module.parameters()])
    np.testing.assert_allclose(found_x, of_x, rtol=0, atol=1e-10 * of_x.abs().max().item())
    gradients = {key: one.numpy() for (key, _), one in zip(module.named_parameters(), found, strict=True)}
    back = families.find_layer(raw, 0).to_theirs(gradients, prefix="")
    for (key, _), gradient in zip(attention.named_parameters(), expected, strict=True):
        assert gradient.abs().max() > 0
        np.testing.assert_allclose(back[key], gradient, rtol=0, atol=1e-10 * gradient.abs().max().item(), err_msg=key)


SETTINGS = [
    (num_buckets, max_distance, bidirectional)
    for num_buckets in (4, 7, 10, 32, 33, 64, 320)
    for max_distance in (3, 5, 16, 20, 64, 100, 128, 800, 1024)
    for bidirectional in (True, False)
    if max_distance > num_buckets // (4 if bidirectional else 2)
]
# Ranges that end at a whole number, which the logarithm in float32 rounds to the range before or not.
SETTINGS += [(17, 27, False), (19, 25, False), (36, 50, False), (9, 128, True), (34, 27, True), (38, 25, True)]


def test_buckets_are_those_of_transformers():
    for setting in SETTINGS:
        num_buckets, max_distance, bidirectional = setting
        later = torch.arange(-max_distance - 3, max_distance + 3)
        expected = T5Attention._relative_position_bucket(later, bidirectional, num_buckets, max_distance)
        found = torch_attn.positions.relative_buckets(RelativeBias(*setting), torch.tensor([0]), later)[0]
        np.testing.assert_array_equal(found, expected, err_msg=str(setting))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_both_frameworks_count_buckets_from_the_query_to_the_key(bidirectional):
    position, queries, keys = RelativeBias(32, 128, bidirectional), np.array([5, 200]), np.arange(260)
    expected = T5Attention._relative_position_bucket(torch.from_numpy(keys - queries[:, None]), bidirectional, 32, 128)
    ours = torch_attn.positions.relative_buckets(position, torch.from_numpy(queries), torch.from_numpy(keys))
    twin = jax_attn.positions.relative_buckets(position, jnp.asarray(queries), jnp.asarray(keys))
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(twin, expected)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_layers_of_a_whole_model_are_found(name):
    raw = hugging_face(name, "encoder")[0]
    config = transformers.AutoConfig.for_model(**{**raw, "vocab_size": 7, "d_ff": 4})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    state = {key: array.numpy() for key, array in model.state_dict().items()}
    for side in SIDES:
        stack = {**raw, "is_decoder": side == "decoder"}
        for layer in range(2 if name == "umt5" else 1):
            prefix = f"{side}.block.{layer}.layer.0.SelfAttention."
            own = {key: array for key, array in state.items() if key.startswith(prefix)}
            module = torch_attn.from_hf(stack, layer, state)
            back = torch_attn.to_hf(stack, layer, module)
            assert back.keys() == own.keys()
            for key, array in own.items():
                np.testing.assert_array_equal(back[key], array)
            other = {**raw, "is_decoder": side != "decoder"}
            with pytest.raises(ValueError, match=rf"^state holds the {side} \({prefix[:-1]}\), not the "):
                torch_attn.from_hf(other, layer, own)


@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_layers_that_share_the_bias_of_the_first_are_refused(name):
    message = f"^layer 1 of {name} has no relative_attention_bias; only layer 0 is supported$"
    with pytest.raises(ValueError, match=message):
        families.find_layer(hugging_face(name, "encoder")[0], 1)
