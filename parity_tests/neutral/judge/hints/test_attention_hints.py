"""Attention with one step taken wrongly on one side: the hint says which, whichever side it is."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.hints import Evidence, attention, hint_for

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
def test_inputs_with_a_head_axis_are_not_split(wrong):
    inputs = [draw(B, T, H * D) for _ in range(3)]
    of_heads = [Attention().split(one) for one in inputs]
    right, other = (Attention().split(one()(*inputs)) for one in (Attention, wrong))
    assert hint(right, other, of_heads) == f"torch computes {PLAIN}, Flax {WRONG[wrong]}"


def turned(x, halves, base, direction=1, length=None, width=None):
    length, width = length or T, width or D
    half = width // 2
    pairs = x.reshape(B, length, H, 2, half).swapaxes(-1, -2) if halves else x.reshape(B, length, H, half, 2)
    angles = direction * np.outer(np.arange(length), base ** (-np.arange(half) / half))[:, None]
    made = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles.astype("float32"))  # as most models' tables are
    parts = np.stack([made.real, made.imag], -1)
    return (parts.swapaxes(-1, -2) if halves else parts).reshape(B, length, H * width)


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


def later(x, by):
    """Return ``x`` turned by the angle of so many positions."""
    return turned(np.concatenate([np.zeros((B, by, H * D)), x], 1), True, 1e4, length=T + by)[:, by:]


def partly(x, part):
    """Return the first channels of each head turned, of ``(B, T, H * D)``."""
    heads, size = x.reshape(B, T, H, D), D // part
    first = turned(heads[..., :size].reshape(B, T, -1), True, 1e4, width=size).reshape(B, T, H, size)
    return np.concatenate([first, heads[..., size:]], -1).reshape(B, T, H * D)


ROTARY = f"{PLAIN}, rotary halves of base 10000"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (turned(q, True, 1e4) * D**0.5, turned(k, True, 1e4), v), ROTARY.replace("1/sqrt(6)", "1")),
        (lambda q, k, v: [turned(one, True, 1e4) for one in (q, k, v)], f"{ROTARY} of values as well"),
        (lambda q, k, v: (turned(q, True, 1e4), later(k, 1), v), f"{ROTARY}, keys 1 later than queries"),
        (lambda q, k, v: (later(q, 1), turned(k, True, 1e4), v), f"{ROTARY}, keys 1 earlier than queries"),
    ],
)
def test_wrong_scales_and_positions_are_named_with_rotary_positions(change, said):
    given = [draw(B, T, H * D) for _ in range(3)]
    right = Attention()(turned(given[0], True, 1e4), turned(given[1], True, 1e4), given[2])
    assert hint(right, Attention()(*change(*given)), given) == f"torch computes {ROTARY}, Flax {said}"


def test_rotary_positions_of_a_part_of_each_head_are_named(monkeypatch):
    monkeypatch.setitem(globals(), "D", 8)  # of which a half can be turned
    query, key, value = (draw(B, T, H * D) for _ in range(3))
    right = Attention()(partly(query, 2), partly(key, 2), value)
    other = Attention()(turned(query, True, 1e4), turned(key, True, 1e4), value)
    plain = ROTARY.replace("sqrt(6)", "sqrt(8)")
    expected = f"torch computes {plain} of the first 1/2 of each head, Flax {plain}"
    assert hint(right, other, [query, key, value]) == expected


def test_a_wrong_mask_is_named_with_the_rotary_positions():
    query, key, value = (draw(B, T, H * D) for _ in range(3))
    given = turned(query, True, 1e4), turned(key, True, 1e4), value
    found = hint(Attention()(*given), Window()(*given), [query, key, value])
    assert found.endswith(f"{WRONG[Window].removeprefix('causal ')}, rotary halves of base 10000")


def test_impossible_head_counts_and_empty_keys_raise_no_error():
    inputs = [draw(B, T, H * D) for _ in range(3)]
    evidence = Evidence(
        inputs=inputs,
        first_outputs=[Attention()(*inputs)],
        second_outputs=[OverQueries()(*inputs)],
        first_settings={"head_dim": 0},
        second_settings={"num_heads": -2},
    )
    assert "softmax over the queries" in hint_for(evidence)
    empty = [inputs[0], draw(B, 0, H * D), draw(B, 0, H * D)]
    assert "attention" not in hint(inputs[1], inputs[2], empty)


def test_long_sequences_are_looked_at_in_little_time():
    """What fits nothing is told by a few numbers of each way, of which there are thousands."""
    inputs = [draw(1, 1024, 128) for _ in range(3)]
    seen = []
    original = attention.AttentionFormula.of
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention.AttentionFormula, "of", lambda self, few: seen.append(self) or original(self, few))
        hint(draw(1, 1024, 128), draw(1, 1024, 128), inputs)
    assert not seen


def test_a_wrong_step_is_named_with_rotary_positions():
    query, key, value = (draw(B, T, H * D) for _ in range(3))
    given = turned(query, True, 1e4), turned(key, True, 1e4), value
    found = hint(Attention()(*given), MaskedAfter()(*given), [query, key, value])
    assert found.endswith(f"Flax {PLAIN}, rotary halves of base 10000, masked after the softmax")


def test_two_unknown_formulas_get_no_hint():
    inputs = [draw(B, T, H * D) for _ in range(3)]
    assert "attention" not in hint(MaskedAfter()(*inputs), OverQueries()(*inputs), inputs)
    assert "attention" not in hint(Attention()(*inputs), draw(B, T, H * D), inputs)
