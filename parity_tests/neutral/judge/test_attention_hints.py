"""Attention with one step taken wrongly on one side: the hint says which, whichever side it is."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge.parity.compare.hints import Evidence, hint_for

RANDOM = np.random.default_rng(7)
B, T, H, K, D = 2, 9, 4, 2, 6
BACK = np.arange(T)[:, None] - np.arange(T)


def draw(*shape):
    return RANDOM.normal(size=shape)


def softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


class Attention:
    """Causal attention in four steps, each of which a port may take wrongly."""

    def split(self, x):
        return x.reshape(B, T, -1, D).transpose(0, 2, 1, 3)

    def merge(self, context):
        return context.transpose(0, 2, 1, 3).reshape(B, T, -1)

    def repeat(self, heads):
        return np.repeat(heads, H // heads.shape[1], axis=1)

    def weights(self, scores):
        return softmax(np.where(BACK >= 0, scores, -np.inf))

    def __call__(self, query, key, value):
        query, key, value = self.split(query), self.repeat(self.split(key)), self.repeat(self.split(value))
        return self.merge(self.weights(query @ key.swapaxes(-1, -2) / D**0.5) @ value)


class SplitsApart(Attention):
    def split(self, x):
        return x.reshape(B, T, D, -1).transpose(0, 3, 1, 2)


class BothApart(SplitsApart):
    def merge(self, context):
        return context.transpose(0, 2, 3, 1).reshape(B, T, -1)


class MergesApart(Attention):
    merge = BothApart.merge


class SplitsRows(Attention):
    def split(self, x):
        return x.reshape(B, -1, T, D)


class MergesRows(Attention):
    def merge(self, context):
        return context.reshape(B, T, -1)


class BothRows(SplitsRows):
    merge = MergesRows.merge


class MaskedAfter(Attention):
    def weights(self, scores):
        return softmax(scores) * (BACK >= 0)


class OverQueries(Attention):
    def weights(self, scores):
        return softmax(np.where(BACK >= 0, scores, -np.inf), axis=-2)


class OverHeads(Attention):
    def weights(self, scores):
        return softmax(np.where(BACK >= 0, scores, -1e30), axis=1) * (BACK >= 0)


class NotItself(Attention):
    def weights(self, scores):
        seen = softmax(np.where(BACK >= 1, scores, -1e30))
        return seen * (BACK >= 1)


class NotItselfButTheFirst(Attention):
    def weights(self, scores):
        seen = BACK >= 1
        seen[0, 0] = True
        return softmax(np.where(seen, scores, -np.inf))


class TheNextOne(Attention):
    def weights(self, scores):
        return softmax(np.where(BACK >= -1, scores, -np.inf))


class TheOtherWay(Attention):
    def weights(self, scores):
        return softmax(np.where(BACK <= 0, scores, -np.inf))


class Window(Attention):
    def weights(self, scores):
        return softmax(np.where((BACK >= 0) & (BACK < 4), scores, -np.inf))


class InTurn(Attention):
    def repeat(self, heads):
        return np.concatenate([heads] * (H // heads.shape[1]), axis=1)


class BetweenHeads(Attention):
    def __call__(self, query, key, value):
        query, key, value = (one.reshape(B, T, H, D) for one in (query, key, value))
        return (softmax(query @ key.swapaxes(-1, -2) / D**0.5) @ value).reshape(B, T, -1)


PLAIN = "causal attention of 4 heads with scores times 1/sqrt(6)"
WRONG = {
    SplitsApart: f"{PLAIN}, heads split as (channel, head)",
    MergesApart: f"{PLAIN}, merged as (channel, head)",
    BothApart: f"{PLAIN}, heads split as (channel, head), merged as (channel, head)",
    SplitsRows: f"{PLAIN}, heads split without their axis moved before the positions",
    MergesRows: f"{PLAIN}, merged without their axis moved behind the positions",
    BothRows: f"{PLAIN}, heads split without their axis moved before the positions, "
    "merged without their axis moved behind the positions",
    MaskedAfter: f"{PLAIN}, masked after the softmax",
    OverQueries: f"{PLAIN}, softmax over the queries",
    OverHeads: f"{PLAIN}, softmax over the heads",
    NotItself: f"{PLAIN[7:]}, each position seeing those before it and not itself",
    NotItselfButTheFirst: f"{PLAIN[7:]}, each position seeing those before it and not itself, but for the first",
    TheNextOne: f"{PLAIN[7:]}, each position seeing the next one, too",
    TheOtherWay: f"{PLAIN[7:]}, each position seeing itself and those after it",
    Window: f"{PLAIN[7:]}, causal in a window of 4",
    BetweenHeads: f"{PLAIN[7:]}, between the heads of a position instead of between positions",
}


def hint(one, two, inputs, **fields):
    return hint_for(Evidence(inputs=inputs, first_outputs=[one], second_outputs=[two], **fields))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_a_wrong_step_is_named(wrong):
    inputs = [draw(B, T, H * D) for _ in range(3)]
    right, other = Attention()(*inputs), wrong()(*inputs)
    assert hint(right, other, inputs) == f"torch computes {PLAIN}, Flax {WRONG[wrong]}"
    fused = [np.concatenate(inputs, axis=-1)]
    assert hint(other, right, fused) == f"torch computes {WRONG[wrong]}, Flax {PLAIN}"


def test_heads_of_keys_that_are_repeated_in_turn_are_named():
    inputs = [draw(B, T, H * D), draw(B, T, K * D), draw(B, T, K * D)]
    said = hint(Attention()(*inputs), InTurn()(*inputs), inputs)
    plain = "causal attention of 4 heads, 2 of keys, with scores times 1/sqrt(6)"
    assert said == f"torch computes {plain}, Flax {plain}, heads of keys repeated as a whole, not each beside itself"


@pytest.mark.parametrize("wrong", [MaskedAfter, OverQueries, OverHeads, Window], ids=lambda one: one.__name__)
def test_heads_that_are_an_axis_already_are_taken_as_they_are(wrong):
    inputs = [draw(B, T, H * D) for _ in range(3)]
    of_heads = [Attention().split(one) for one in inputs]
    right, other = (Attention().split(one()(*inputs)) for one in (Attention, wrong))
    assert hint(right, other, of_heads) == f"torch computes {PLAIN}, Flax {WRONG[wrong]}"


def turned(x, halves, base, direction=1):
    pairs = x.reshape(B, T, H, 2, D // 2).swapaxes(-1, -2) if halves else x.reshape(B, T, H, D // 2, 2)
    angles = direction * np.outer(np.arange(T), base ** (-np.arange(D // 2) / (D // 2)))[:, None]
    made = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles.astype("float32"))  # as most models' tables are
    parts = np.stack([made.real, made.imag], -1)
    return (parts.swapaxes(-1, -2) if halves else parts).reshape(B, T, H * D)


@pytest.mark.parametrize(
    ("halves", "base", "direction", "queries", "keys", "said"),
    [
        (False, 1e4, 1, True, True, ", rotary pairs of base 10000"),
        (True, 5e5, 1, True, True, ", rotary halves of base 500000"),
        (True, 1e4, -1, True, True, ", rotary halves of base 10000, turned the other way"),
        (True, 1e4, 1, True, False, ", rotary halves of base 10000 of queries alone"),
        (True, 1e4, 1, False, False, ""),
    ],
)
def test_other_rotary_positions_are_named(halves, base, direction, queries, keys, said):
    query, key, value = (draw(B, T, H * D) for _ in range(3))
    right = Attention()(turned(query, True, 1e4), turned(key, True, 1e4), value)
    other = Attention()(
        turned(query, halves, base, direction) if queries else query,
        turned(key, halves, base, direction) if keys else key,
        value,
    )
    found = hint(right, other, [query, key, value])
    assert found == f"torch computes {PLAIN}, rotary halves of base 10000, Flax {PLAIN}{said}"


def test_a_wrong_step_is_named_beside_rotary_positions():
    query, key, value = (draw(B, T, H * D) for _ in range(3))
    given = turned(query, True, 1e4), turned(key, True, 1e4), value
    found = hint(Attention()(*given), MaskedAfter()(*given), [query, key, value])
    assert found.endswith(f"Flax {PLAIN}, rotary halves of base 10000, masked after the softmax")


def test_two_sides_that_nobody_computes_plainly_get_no_name():
    inputs = [draw(B, T, H * D) for _ in range(3)]
    assert "attention" not in hint(MaskedAfter()(*inputs), OverQueries()(*inputs), inputs)
    assert "attention" not in hint(Attention()(*inputs), draw(B, T, H * D), inputs)
