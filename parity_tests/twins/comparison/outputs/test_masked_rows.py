"""Rows of attention that see no key: what differs there alone is named as that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

WIDTH, LENGTH = 8, 6
X = np.random.default_rng(3).normal(size=(2, LENGTH, WIDTH)).astype("float32")
PADDED = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
NONE = "only rows that see no key; masking the output makes them equal"


class Additive(nn.Module):
    """Adds the lowest number of float32 to what is hidden, as `transformers` did."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        visible = attention_mask.bool()[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        hidden = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        return self.out(torch.softmax(q @ k.swapaxes(1, 2) / WIDTH**0.5 + hidden, -1) @ v)


class Where(nnx.Module):
    def __init__(self, gain=1.0, lost=False):
        self.qkv, self.out = (nnx.Linear(WIDTH, size, rngs=nnx.Rngs(0)) for size in (3 * WIDTH, WIDTH))
        self.gain, self.lost = gain, lost

    def __call__(self, x, attention_mask):
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        k = jax.lax.stop_gradient(k) if self.lost else k
        visible = attention_mask.astype(bool)[:, None] & jnp.tri(LENGTH, dtype=bool)
        scores = jnp.where(visible, q @ k.swapaxes(1, 2) / WIDTH**0.5, jnp.finfo(jnp.float32).min)
        return self.out(jax.nn.softmax(scores, -1) @ v * self.gain)


def hint(second, mask=PADDED):
    report = compare(Additive(), second, {"x": X, "attention_mask": mask}, seeds=1)
    return report.verdict, report.first_divergence and report.first_divergence.hint


def test_gradients_of_rows_that_see_no_key_are_named():
    verdict, said = hint(Where())
    assert verdict == "different"
    assert NONE in said


def test_rows_that_all_see_a_key_are_equal():
    assert hint(Where(), PADDED[:, ::-1].copy()) == ("equal", None)


@pytest.mark.parametrize("fault", [{"gain": 1.01}, {"lost": True}])
def test_other_faults_are_not_excused_by_masked_rows(fault):
    verdict, said = hint(Where(**fault))
    assert verdict == "different"
    assert NONE not in said


class Weights(nn.Module):
    """Returns weights that are zero where the mask hides a key."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, attention_mask):
        scores = self.query(x) @ x.swapaxes(1, 2)
        return torch.softmax(scores.masked_fill(~attention_mask, -torch.inf), -1)


class Leaking(nnx.Module):
    """Returns weights that are not zero there."""

    def __init__(self):
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x, attention_mask):
        scores = self.query(x) @ x.swapaxes(1, 2)
        weights = jax.nn.softmax(jnp.where(attention_mask, scores, -jnp.inf), -1)
        return jnp.where(attention_mask, weights, 0.01 * jnp.tanh(scores))


def test_hidden_keys_are_no_rows_that_see_no_key():
    mask = np.tri(LENGTH, dtype=bool)[None].repeat(2, 0)
    report = compare(Weights(), Leaking(), {"x": X, "attention_mask": mask}, seeds=1)
    assert report.verdict == "different"
    assert NONE not in (report.first_divergence.hint or "")


class TorchMasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        return self.attn(x, x, x, key_padding_mask, False, attn_mask)[0]


class FlaxMasked(nnx.Module):
    def __init__(self):
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x, mask):
        return self.attn(x, mask=jnp.asarray(mask)[:, None, None] if mask.shape[0] == len(x) else jnp.asarray(mask))


KEYS, PLACES = np.arange(LENGTH) < np.array([[6], [4]]), np.tri(LENGTH, dtype=bool)
TURNED = "inverting `{}` of torch makes both sides agree: True hides a key on one side, and shows it on the other"


@pytest.mark.parametrize(("name", "visible"), [("key_padding_mask", KEYS), ("attn_mask", PLACES)])
def test_masks_of_opposite_senses_are_equal_if_each_side_has_its_own(name, visible):
    masks = {"x": X, name: ~visible}, {"x": X, "mask": visible}
    assert compare(TorchMasked(), FlaxMasked(), *masks, seeds=1).verdict == "equal"


@pytest.mark.parametrize(("name", "visible"), [("key_padding_mask", KEYS), ("attn_mask", PLACES)])
def test_one_mask_for_sides_of_opposite_senses_is_named(name, visible):
    masks = {"x": X, name: visible}, {"x": X, "mask": visible}
    report = compare(TorchMasked(), FlaxMasked(), *masks, seeds=1)
    assert report.first_divergence.hint == TURNED.format(name)


def test_a_transposed_mask_is_named():
    masks = {"x": X, "attn_mask": ~PLACES.T}, {"x": X, "mask": PLACES}
    report = compare(TorchMasked(), FlaxMasked(), *masks, seeds=1)
    assert report.first_divergence.hint == "transposing `attn_mask` of torch makes both sides agree"


def test_zeros_and_ones_of_the_wrong_sense_are_named():
    class Inverted(Where):
        def __call__(self, x, attention_mask):
            return super().__call__(x, 1 - attention_mask)

    ones = np.array([[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1]])
    verdict, said = hint(Inverted(), ones)
    assert verdict == "different"
    assert said == TURNED.replace("torch", "Flax").replace("True", "1").format("attention_mask")


def test_code_that_refuses_an_inverted_mask_is_still_judged():
    class Strict(TorchMasked):
        def forward(self, x, attn_mask):
            if not (~attn_mask).any(-1).all():
                raise ValueError("a query sees no key")
            return 1.01 * super().forward(x, attn_mask=attn_mask)

    hidden = np.zeros((LENGTH, LENGTH), bool)  # inverted, every query sees none
    report = compare(Strict(), FlaxMasked(), {"x": X, "attn_mask": hidden}, {"x": X, "mask": ~hidden}, seeds=1)
    assert report.verdict == "different"
