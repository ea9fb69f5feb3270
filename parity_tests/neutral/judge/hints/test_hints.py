"""Hints: every relation is planted and must be named, and numbers without one must be left alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from attn_parity.hints import Evidence, changes, hint_for, of_statistic
from attn_parity.hints.layers import ACTIVATIONS
from attn_parity.hints.reshaping import RESIZINGS
from parity_tests.support.processes.work import count_calls

RANDOM = np.random.default_rng(5)
LABELS = ("torch", "Flax")


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


def hint(one: np.ndarray, two: np.ndarray, *inputs: np.ndarray, **fields: Any) -> str:
    return hint_for(Evidence(inputs=inputs, first_outputs=[one], second_outputs=[two], **fields))


X = draw(3, 7, 16)
WEIGHT, BIAS = draw(16) + 3, draw(16)


def normed(x: np.ndarray, eps: float = 1e-5, ddof: int = 0, weight: Any = WEIGHT, bias: Any = BIAS) -> np.ndarray:
    apart = x - x.mean(-1, keepdims=True)
    return apart / np.sqrt(x.var(-1, keepdims=True, ddof=ddof) + eps) * weight + bias


def rotated(x: np.ndarray, halves: bool, base: float = 1e4) -> np.ndarray:
    width, length = x.shape[-1], x.shape[-2]
    angles = np.arange(length)[:, None] * base ** (-np.arange(width // 2) / (width // 2))
    one, two = (x[..., : width // 2], x[..., width // 2 :]) if halves else (x[..., ::2], x[..., 1::2])
    parts = [one * np.cos(angles) - two * np.sin(angles), two * np.cos(angles) + one * np.sin(angles)]
    return np.concatenate(parts, -1) if halves else np.stack(parts, -1).reshape(x.shape)


def attention(q: Any, k: Any, v: Any, heads: int, scale: float, causal: bool = False) -> np.ndarray:
    b, t, d = q.shape
    q, k, v = (one.reshape(b, t, heads, -1).swapaxes(1, 2) for one in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * scale + (np.triu(np.full((t, t), -np.inf), 1) if causal else 0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(b, t, d)


def convolved(
    x: np.ndarray, kernel: np.ndarray, low: int, high: int, wide: tuple[int, int] | None = None
) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (low, high), wide or (low, high)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, kernel)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


def resize(x: np.ndarray, kind: str, size: int = 9) -> np.ndarray:
    matrix = RESIZINGS[kind](x.shape[-1], size)
    return np.einsum("ai,bj,...ij->...ab", matrix, matrix, x)


CENTRED = X - X.mean(-1, keepdims=True)
KERNEL, IMAGE, SIGNAL = draw(4, 3, 3, 3), draw(2, 3, 6, 6), draw(2, 3, 1, 8)
SHIFTS = np.repeat(draw(3, 1, 32), 7, 1)
TABLE, Q9 = draw(16, 4, 4), draw(2, 9, 16)
SQUARE, ROWS = draw(16, 16), draw(9, 4)
Q, K, V = draw(3, 2, 5, 16)
GATES = draw(3, 7, 32)
UP = draw(24, 16), draw(24, 16), draw(16, 24)
BIAS24 = draw(24)
GELU = ACTIVATIONS["GELU by erf"], ACTIVATIONS["GELU by tanh"]
NORM = {"first_weights": {"norm.weight": WEIGHT, "norm.bias": BIAS}}

PLANTED = {
    "a scale by the wrong width": (
        X,
        X * 4,
        [],
        {},
        "Flax is 4 times torch everywhere",
    ),
    "the root of a width": (
        X,
        X / 4,
        [],
        {},
        "Flax is 0.25 times torch everywhere",
    ),
    "a root": (X, X / math.sqrt(2), [], {}, "Flax is 0.707107 = 1/sqrt(2) times torch everywhere"),
    "one over a count": (X, X / -21, [], {}, "Flax is -0.047619 = -1/21 times torch everywhere"),
    "a scale without a name": (X, X * 1.7, [], {}, "Flax is 1.7 times torch everywhere"),
    "the sign": (X, -X, [], {}, "Flax is -1 times torch everywhere"),
    "a bias twice": (
        X,
        X + BIAS,
        [],
        NORM,
        "Flax is torch plus norm.bias in every row",
    ),
    "a bias left out": (X, X - BIAS, [], NORM, "torch is Flax plus norm.bias in every row"),
    "another bias": (X, X + draw(16), [], {}, "the difference is the same in every row"),
    "1 + w": (
        normed(X, bias=0),
        normed(X, weight=1 + WEIGHT, bias=0),
        [X],
        {"first_weights": {"w": WEIGHT}},
        "/ sqrt(var + 1e-05) * w, Flax (x - mean) / sqrt(var + 1e-05) * (1 + w)",
    ),
    "1 + w behind other code": (
        normed(X, bias=0),
        normed(X, weight=1 + WEIGHT, bias=0),
        [],
        {"first_weights": {"w": WEIGHT}},
        "Flax multiplies by 1 + w where torch",
    ),
    "1 + w and a bias": (
        normed(X, weight=1 + WEIGHT),
        normed(X),
        [X],
        NORM,
        "torch computes (x - mean) / sqrt(var + 1e-05) * (1 + norm.weight) + norm.bias, Flax (x - mean) / sqrt(var",
    ),
    "1 + w of ones": (
        normed(X, weight=1),
        normed(X, weight=2),
        [X],
        {"first_weights": {"w": np.ones(16), "b": BIAS}},
        "Flax (x - mean) / sqrt(var + 1e-05) * (1 + w) + b",
    ),
    "another eps": (
        normed(X, 1e-5),
        normed(X, 1e-2),
        [X],
        NORM,
        "torch computes (x - mean) / sqrt(var + 1e-05) * norm.weight + norm.bias, Flax (x - mean) / sqrt(var + 0.01) *",
    ),
    "another eps of an input that is not known": (
        normed(X, 1e-5),
        normed(X, 1e-2),
        [],
        NORM,
        "each row of Flax is a multiple of torch's without norm.weight and norm.bias, 0.",
    ),
    "weights per row": (X, X * draw(3, 7, 1), [], {}, "each row of Flax is a multiple of torch's, "),
    "an unbiased deviation": (
        WEIGHT * CENTRED / (X.std(-1, keepdims=True, ddof=1) + 1e-6) + BIAS,
        normed(X, 1e-6),
        [X],
        NORM,
        "torch computes (x - mean) / (std by n - 1 + 1e-06) * norm.weight + norm.bias, Flax (x - mean) / sqrt(var + 1e",
    ),
    "eps beside the root": (
        X / np.sqrt(np.square(X).mean(-1, keepdims=True) + 1e-6),
        X / (np.sqrt(np.square(X).mean(-1, keepdims=True)) + 1e-6),
        [X],
        {},
        "torch computes x / sqrt(mean(x^2) + 1e-06), Flax x / (rms + 1e-06)",
    ),
    "weight and bias of a norm exchanged": (
        normed(X),
        normed(X, weight=BIAS, bias=WEIGHT),
        [X],
        NORM,
        "* norm.weight + norm.bias, Flax (x - mean) / sqrt(var + 1e-05) * norm.bias + norm.weight",
    ),
    "statistics of a batch": (
        normed(IMAGE.transpose(1, 0, 2, 3).reshape(3, -1), weight=1, bias=0).reshape(3, 2, 6, 6).swapaxes(0, 1),
        normed(IMAGE.transpose(1, 0, 2, 3).reshape(3, -1), 1e-3, 0, 1, 0).reshape(3, 2, 6, 6).swapaxes(0, 1),
        [IMAGE],
        {},
        "Flax (x - mean) / sqrt(var + 0.001) (statistics over axes 0, 2, 3)",
    ),
    "scale and shift exchanged": (
        X * (1 + SHIFTS[..., :16]) + SHIFTS[..., 16:],
        X * (1 + SHIFTS[..., 16:]) + SHIFTS[..., :16],
        [X, SHIFTS[:, 0]],
        {},
        "part 0 of 2 of input 1 as scale, part 1 of 2 of input 1 as shift, Flax x * (1 + scale) + shift with part 1",
    ),
    "the axis of a softmax": (
        softmax(X, -1),
        softmax(X, 1),
        [X],
        {},
        "torch computes a softmax over axis 2 of 3, Flax a softmax over axis 1 of 3",
    ),
    "a sum for a mean": (
        X.mean(1),
        X.sum(1),
        [X],
        {},
        "torch computes the mean of the input over axis 1, Flax the sum of the input over axis 1",
    ),
    "a first token of several, its axis kept": (
        X[:1, :1],
        X[:1].mean(1, keepdims=True),
        [X[:1]],
        {},
        "torch computes the first of the input over axis 1, Flax the mean of the input over axis 1",
    ),
    "a class token for a mean": (X.mean(1), X[:, 0], [X], {}, "over axis 1, Flax the first of the input over axis 1"),
    "corners of an image aligned": (
        resize(IMAGE, "linear resizing, corners aligned"),
        resize(IMAGE, "linear resizing, corners not aligned"),
        [IMAGE],
        {},
        "torch computes linear resizing, corners aligned, Flax linear resizing, corners not aligned",
    ),
    "a resized table of positions": (
        Q9 + resize(TABLE, "cubic resizing, corners not aligned", 3).reshape(16, 9).T,
        Q9 + resize(TABLE, "linear resizing, corners not aligned", 3).reshape(16, 9).T,
        [Q9],
        {"first_weights": {"pos_embed": TABLE.reshape(16, 16).T[None], "conv.weight": draw(16, 3, 2, 2)}},
        "torch computes cubic resizing, corners not aligned of pos_embed, Flax linear resizing, corners not aligned of",
    ),
    "padding on one side": (
        np.pad(X, ((0, 0), (2, 0), (0, 0))),
        np.pad(X, ((0, 0), (1, 1), (0, 0))),
        [X],
        {},
        "torch computes padding with zeros by (2, 0) of axis 1, Flax padding with zeros by (1, 1) of axis 1",
    ),
    "a causal convolution": (
        convolved(SIGNAL, KERNEL[:, :, :1], 0, 0, (2, 0))[:, :, 0],
        convolved(SIGNAL, KERNEL[:, :, :1], 0, 0, (1, 1))[:, :, 0],
        [SIGNAL[:, :, 0]],
        {"first_weights": {"conv.weight": KERNEL[:, :, 0]}},
        "torch computes the kernel as it is, 2 of padding before it, Flax the kernel as it is, 1 of padding before it",
    ),
    "an unbiased variance": (
        normed(X),
        normed(X, ddof=1),
        [X],
        NORM,
        "Flax (x - mean) / sqrt(var by n - 1 + 1e-05) * norm.weight + norm.bias",
    ),
    "n/(n-1) in a batch": (
        normed(X.reshape(-1, 16).T, weight=1, bias=0).T,
        normed(X.reshape(-1, 16).T, ddof=1, weight=1, bias=0).T,
        [],
        {},
        "each channel of Flax is a multiple of torch's, 0.97",
    ),
    "channels times numbers, and shifted": (
        X.reshape(-1, 16),
        X.reshape(-1, 16) * np.arange(2.0, 18.0) + np.arange(16.0, 0.0, -1.0),
        [],
        {},
        "each channel of Flax is a multiple of torch's, shifted",
    ),
    "interleaved heads": (
        X,
        X.reshape(3, 7, 2, 8).swapaxes(-1, -2).reshape(X.shape),
        [],
        {},
        "Flax has the same numbers in another order: ",
    ),
    "pairs interleaved": (
        X,
        X.reshape(3, 7, 2, 2, 4).swapaxes(-1, -2).reshape(X.shape),
        [],
        {},
        "pairs interleaved instead of in halves in each 8 channels",
    ),
    "gates exchanged": (
        X,
        X[..., [*range(4, 8), *range(4), *range(8, 16)]],
        [],
        {},
        "chunks 0 and 1 of 4 exchanged",
    ),
    "channels permuted": (X, X[..., RANDOM.permutation(16)], [], {}, "along the last axis: permuted, all rows alike"),
    "an axis reversed": (X, X[..., ::-1], [], {}, "in another order along the last axis: reversed"),
    "an axis shifted": (X, np.roll(X, 3, -1), [], {}, "in another order along the last axis: shifted by 3"),
    "rows in orders of their own": (X, RANDOM.permuted(X, axis=-1), [], {}, "last axis: each row in one of its own"),
    "a transposed kernel": (
        X @ SQUARE.T,
        X @ SQUARE,
        [X],
        {"first_weights": {"fc.weight": SQUARE}},
        "one side multiplies by fc.weight, the other by its transpose",
    ),
    "a transposed kernel with a bias": (
        X @ SQUARE.T + BIAS,
        X @ SQUARE + BIAS,
        [X],
        {"first_weights": {"fc.weight": SQUARE, "fc.bias": BIAS}},
        "one side multiplies by fc.weight",
    ),
    "rotary halves": (
        rotated(Q, True),
        rotated(Q, False),
        [Q],
        {},
        "torch rotates halves, Flax interleaved pairs (16 channels",
    ),
    "another base": (
        rotated(Q, True),
        rotated(Q, True, 5e5),
        [Q],
        {},
        "both rotate the same pairs, by other angles",
    ),
    "GELU": (GELU[0](X), GELU[1](X), [X], {}, "torch computes GELU by erf, Flax GELU by tanh"),
    "SiLU for GELU": (ACTIVATIONS["SiLU"](X), GELU[1](X), [X], {}, "torch computes SiLU, Flax GELU by tanh"),
    "a gated unit": (
        ACTIVATIONS["SiLU"](GATES[..., :16]) * GATES[..., 16:],
        GATES[..., :16] * ACTIVATIONS["SiLU"](GATES[..., 16:]),
        [GATES],
        {},
        "computes SiLU(first) * second of halves, Flax first * SiLU(second) of halves",
    ),
    "gate and up": (
        GELU[0](X) * X[::-1],
        GELU[0](X[::-1]) * X,
        [X, X[::-1]],
        {},
        "torch computes GELU by erf(first) * second, Flax first * GELU",
    ),
    "attention by the model's width": (
        attention(Q, K, V, 4, 0.5),
        attention(Q, K, V, 4, 0.25),
        [Q, K, V],
        {},
        "attention of 4 heads with scores times 1/sqrt(4), Flax attention of 4 heads with scores times 1/sqrt(16)",
    ),
    "attention without a mask": (
        attention(Q, K, V, 2, 8**-0.5, True),
        attention(Q, K, V, 2, 8**-0.5),
        [Q, K, V],
        {},
        "torch computes causal attention of 2 heads with scores times 1/sqrt(8), Flax attention",
    ),
    "a kernel's height and width": (
        convolved(IMAGE, KERNEL, 1, 1),
        convolved(IMAGE, KERNEL.swapaxes(2, 3), 1, 1),
        [IMAGE],
        {"first_weights": {"k": KERNEL}},
        "Flax the kernel with height and width exchanged",
    ),
    "a convolution's padding": (
        convolved(IMAGE, KERNEL, 1, 1),
        convolved(IMAGE, KERNEL, 0, 2),
        [IMAGE],
        {"first_weights": {"k": KERNEL}},
        "the kernel as it is, 1 of padding before it, Flax the kernel as it is, 0 of padding before",
    ),
    "the border": (
        np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1))),
        np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge"),
        [],
        {},
        "only the border along axes 2 and 3 differs",
    ),
    "a mask at the end": (
        X,
        np.concatenate([X[:, :4], X[:, 4:] + draw(3, 3, 16)], 1),
        [],
        {},
        "along axis 1, entries 4 to 6 of 7 differ, the others agree",
    ),
    "a table from the third position on": (
        X,
        X + np.maximum(np.arange(7) - 2, 0)[:, None] * draw(16),
        [],
        {},
        "along axis 1, entries 3 to 6 of 7 differ by the same numbers for every entry of axis 0, the others agree",
    ),
    "a mask at the start": (
        X,
        np.concatenate([X[:, :2] + draw(3, 2, 16), X[:, 2:]], 1),
        [],
        {},
        "along axis 1, entries 0 to 1 of 7 differ, the others agree",
    ),
    "one step": (X, np.roll(X, 1, axis=1), [], {}, "one side is the other moved by 1 along axis 1"),
    "scores of causal attention": (
        X,
        np.concatenate([X[:, :1], X[:, 1:] + draw(3, 6, 16)], 1),
        [],
        {},
        "along axis 1, entries 1 to 6 of 7 differ, the others agree",
    ),
    "an eps that hardly shows": (
        normed(X, 1e-5),
        normed(X, 1.1e-5),
        [X],
        NORM,
        "Flax (x - mean) / sqrt(var + 1.1e-05) * norm.weight + norm.bias",
    ),
    "queries and keys exchanged": (
        attention(X, X + 1, X - 1, 4, 0.5, causal=True),
        attention(X + 1, X, X - 1, 4, 0.5, causal=True),
        [np.concatenate([X, X + 1, X - 1], -1)],
        {},
        "Flax causal attention of 4 heads with scores times 1/sqrt(4) and queries and keys exchanged",
    ),
    "a gate that is stacked": (
        GELU[1](GATES[..., :16]) * GATES[..., 16:],
        GELU[0](GATES[..., :16]) * GATES[..., 16:],
        [np.stack([GATES[..., :16], GATES[..., 16:]])],
        {},
        "torch computes GELU by tanh(first) * second, Flax GELU by erf(first) * second",
    ),
    "gate and unit exchanged, by weights": (
        (ACTIVATIONS["SiLU"](X @ UP[0].T) * (X @ UP[1].T)) @ UP[2].T,
        (ACTIVATIONS["SiLU"](X @ UP[1].T) * (X @ UP[0].T)) @ UP[2].T,
        [X],
        {"first_weights": dict(zip(("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"), UP, strict=True))},
        "torch computes down(SiLU(gate) * up), Flax down(SiLU(up) * gate)",
    ),
    "an activation, by kernels and biases": (
        GELU[0](X @ UP[0].T + BIAS24) @ UP[2].T + BIAS,
        np.maximum(X @ UP[0].T + BIAS24, 0) @ UP[2].T + BIAS,
        [X],
        {
            "first_weights": {
                "fc1.kernel": UP[0].T,
                "fc1.bias": BIAS24,
                "fc2.kernel": UP[2].T,
                "fc2.bias": BIAS,
            }
        },
        "torch computes fc2(GELU by erf(fc1)), Flax fc2(ReLU(fc1))",
    ),
    "one token": (
        X,
        X + draw(3, 7, 16) * (np.arange(7) == 4)[:, None],
        [],
        {},
        "along axis 1, entry 4 of 7 differs, the others agree",
    ),
    "packed documents": (
        X,
        X + draw(3, 7, 16) * (np.arange(7) % 3 == 1)[:, None],
        [],
        {},
        "along axis 1, entries 1, 4 of 7 differ, the others agree",
    ),
    "one direction not turned back": (
        X,
        np.concatenate([X[..., :9], X[:, ::-1, 9:]], -1),
        [],
        {},
        "one side has axis 1 in reverse order in 7 of 16 channels, from 9 on",
    ),
    "all positions the other way round": (X, X[:, ::-1], [], {}, "one side has axis 1 in reverse order"),
}


@pytest.mark.parametrize("label", PLANTED)
def test_a_planted_relation_is_named(label):
    one, two, inputs, fields, expected = PLANTED[label]
    assert expected in hint(one, two, *inputs, **fields)


@pytest.mark.parametrize("label", PLANTED)
def test_noisy_relations_get_no_hint(label):
    one, two, inputs, fields, _ = PLANTED[label]
    noise = 1 + 0.3 * np.random.default_rng(1).normal(size=two.shape)
    assert hint(one, two * noise + 0.2 * noise.mean(), *inputs, **fields) == ""


def test_no_relation_names_a_cause():
    """A multiple of a row has many: eps, a variance, a weight per row. The sentence says that it is one."""
    for label, (one, two, inputs, fields, _) in PLANTED.items():
        assert "consistent" not in hint(one, two, *inputs, **fields), label
    emptied = np.where(np.arange(9)[:, None] == 3, 0, ROWS)
    assert hint(ROWS, emptied) == "row 3 of 9 is zero in Flax alone, the others agree"
    assert hint(np.asarray(2.0), np.asarray(2.001), X) == ""
    assert hint(np.full((3, 4), 2.0), np.full((3, 4), 2.6)) == ""


def test_a_relation_of_one_of_several_calls_says_so():
    def evidence(times, **fields):
        return Evidence(inputs=[X], first_outputs=[X], second_outputs=[X * times], **fields)

    plain = "Flax is 1.7 times torch everywhere"
    assert hint_for(evidence(1.7, others=[evidence(1.7), evidence(1.0)])) == plain
    assert hint_for(evidence(1.7, others=[evidence(1.7), evidence(2.5)])) == f"in one of its calls, {plain}"


@pytest.mark.parametrize("factor", [1.7, np.linspace(0.5, 2.5, 21).reshape(3, 7, 1)])
def test_a_change_is_named_before_a_relation_that_many_causes_have(factor):
    fields = {"first_outputs": [X], "second_outputs": [X * factor], "second_class": "Norm"}
    assert hint_for(Evidence(inputs=[X], changes=lambda: "with 1 for 2", **fields)) == "with 1 for 2"
    assert "times" in hint_for(Evidence(inputs=[X], **fields))


def test_a_relation_that_a_fresh_sample_does_not_have_is_left_out():
    def sample(times, **fields):
        return Evidence(inputs=[X], first_outputs=[X], second_outputs=[X * times], **fields)

    assert hint_for(sample(2.0, again=lambda: sample(3.0))) == ""
    lasting = hint_for(sample(2.0, again=lambda: sample(2.0)))
    assert lasting == hint_for(sample(2.0)) != ""
    assert hint_for(sample(2.0, again=lambda: sample(1.0))) == lasting  # nothing differs there


def test_axes_that_the_sides_count_otherwise_are_those_of_the_first():
    fields = {"first_outputs": [softmax(X, 1)], "second_outputs": [softmax(X, 2)], "inputs": [X]}
    assert hint_for(Evidence(**fields)).endswith("Flax a softmax over axis 2 of 3")
    text = hint_for(Evidence(**fields, counts_alike=False))
    assert text.endswith("Flax a softmax over axis 2 of 3 (axes as torch counts them)")


def test_numbers_that_are_the_same_along_a_row_are_no_norm():
    rows = draw(3, 7, 1) * np.ones(16)
    assert "norm" not in hint(rows, rows * draw(3, 7, 1), first_class="LayerNorm")
    assert "norm" not in hint(X, X * draw(3, 7, 1), first_class="LayerNorm")


def test_channels_with_another_factor_are_counted():
    factor = np.where(np.arange(16) < 5, 1.0, 0.25)
    expected = "11 of 16 along axis 2, from 5 on, are 0.25 times as large in Flax as in torch, the others agree"
    assert hint(X, X * factor, draw(3, 7, 4)) == expected
    hue = np.array([57.2957795, 1.0, 1.0]).reshape(1, 3, 1, 1)
    colours = np.abs(draw(2, 3, 4, 5))
    expected = "1 of 3 along axis 1, from 0 on, are 57.2958 times as large in Flax as in torch, the others agree"
    assert hint(colours, colours * hue, first_settings={"eps": 1e-8}) == expected


def test_some_numbers_at_a_border_are_no_padding():
    image, moved = draw(2, 3, 4, 5), np.zeros((2, 3, 4, 5))
    moved[0, 0, 0, 1:3] = moved[1, 0, 1:3, 0] = 1.0
    assert "padding" not in hint(image, image + moved)


def test_equal_and_nonfinite_values_get_no_hint():
    assert hint(X, X) == ""
    assert hint(X, X + 1e-15) == ""
    assert hint(X, np.where(X > 2, np.nan, X)) == ""
    assert hint(X, X[:, :3]) == ""
    assert hint_for(Evidence()) == ""


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 1), (5,), (2, 3, 4), (2, 1, 3, 1, 2), (1, 2, 2, 2)])
def test_tensors_of_any_shape_are_taken(shape):
    one = np.asarray(draw(*shape))
    for inputs in ([one], [one, np.asarray(2.5), draw(3), draw(2, 3)], [one, one, np.asarray(2.5), one]):
        assert isinstance(hint(one, one * 1.5 + 0.1, *inputs, first_weights={"w": one, "k": draw(1, 1, 1, 1)}), str)


@pytest.mark.parametrize(
    ("output", "given", "weight"),
    [
        ((2, 5, 6), (2, 5, 6), (1, 1, 6)),  # a class token beside 4 patches
        ((2, 1, 6), (2, 1, 6), (2, 6)),
        ((2, 1, 16), (4, 1, 16), (1, 4, 16)),
        ((16, 10, 10), (3, 9, 2), (3, 10, 10)),
    ],
)
def test_weights_and_inputs_of_any_shape_are_taken(output, given, weight):
    assert hint(draw(*output), draw(*output), draw(*given), first_weights={"w": draw(*weight), "b": draw(6)}) == ""


@pytest.mark.parametrize("names", [("ReLU6", "ReLU"), ("ELU", "leaky ReLU by 0.01"), ("hard swish", "SiLU")])
def test_activations_of_convolutional_nets_are_named(names):
    one, two = (ACTIVATIONS[name](6 * X) for name in names)
    assert hint(one, two, 6 * X) == f"torch computes {names[0]}, Flax {names[1]}"


def test_an_order_that_all_rows_share_is_found_where_columns_repeat_numbers():
    """A sine of 0 is its argument, so that one row alone does not tell the order."""
    rows = np.stack([np.sin(X[0, :, 0]), np.cos(X[0, :, 0]), X[0, :, 0]], -1)
    rows = np.concatenate([np.array([[0.0, 1.0, 0.0]]), rows])
    assert hint(rows, rows[:, [2, 0, 1]]).endswith("along the last axis: shifted by 1")
    moved = np.pad(X, ((0, 0), (0, 0), (2, 0)))
    assert hint(moved, np.pad(X, ((0, 0), (0, 0), (1, 1)))).endswith("along the last axis: shifted by 17")


def test_a_gate_that_takes_the_other_part_is_named():
    gate, new = draw(3, 7, 16), draw(3, 7, 16)
    share = ACTIVATIONS["sigmoid"](gate)
    mixed = share * np.maximum(new, 0) + (1 - share) * X, (1 - share) * np.maximum(new, 0) + share * X
    whole = Evidence(inputs=[X])
    expected = (
        "torch computes g * ReLU(a) + (1 - g) * b, with g the sigmoid of a submodule's output, "
        "Flax (1 - g) * ReLU(a) + g * b"
    )
    assert hint(*mixed, gate, new, between=("gate", ""), whole=whole) == expected
    assert hint(mixed[0], mixed[1] + 1e-3 * new, gate, new, between=("gate", ""), whole=whole) == ""


def test_settings_of_other_things_are_no_widths():
    other = {"max_positions": 4, "num_kv_heads": None}
    assert hint(X, X * 2, path="attn", first_settings=other) == hint(X, X * 2, path="attn")


def test_a_hint_has_at_most_two_parts():
    settings = {"eps": 1.0, "num_heads": 2, "padding_idx": 3}
    other = {"eps": 2.0, "num_heads": 4, "padding_idx": 5}
    found = hint(X, X * 4, first_settings=settings, second_settings=other)
    assert found == "eps is 1 in torch and 2 in Flax; num_heads is 2 in torch and 4 in Flax"
    found = hint(X, X * 4, first_settings={"eps": 1.0}, second_settings={"eps": 2.0})
    assert found == "eps is 1 in torch and 2 in Flax"  # a ratio says no more


def test_formulas_of_norms_are_left_out_where_settings_name_their_eps():
    eps = {"first_settings": {"eps": 1e-5}, "second_settings": {"eps": 1e-2}}
    assert hint(normed(X, 1e-5), normed(X, 1e-2), X, **NORM, **eps) == "eps is 1e-05 in torch and 0.01 in Flax"


def test_hints_name_whole_modules_before_their_last_code():
    whole = Evidence(inputs=[X], first_outputs=[GELU[0](X @ UP[0].T) @ UP[2].T])
    second = np.tanh(X @ UP[0].T) @ UP[2].T
    weights = {"fc1.weight": UP[0], "fc2.weight": UP[2]}
    whole = dataclasses.replace(whole, second_outputs=[second], first_weights=weights)
    assert hint(X, X * 2, whole=whole) == "torch computes fc2(GELU by erf(fc1)), Flax fc2(tanh(fc1))"
    assert hint(X, X * 2, whole=dataclasses.replace(whole, first_weights={})).startswith("Flax is 2 times torch")


def test_the_sides_have_the_names_that_the_evidence_gives_them():
    assert hint(X, X * 1.7, labels=("first", "second")).startswith("second is 1.7 times first everywhere")


def test_gradients_are_looked_at_where_the_outputs_agree():
    gradient = draw(9, 4)
    other = gradient.copy()
    other[3] = 0
    evidence = Evidence(
        direction="backward",
        first_outputs=[X],
        second_outputs=[X],
        first_gradients={"input 0": X, "emb.weight": other},
        second_gradients={"input 0": X, "emb.weight": gradient},
    )
    expected = "the gradient of emb.weight: row 3 of 9 is zero in torch alone, the others agree"
    assert hint_for(evidence) == expected
    twice = Evidence(first_gradients={"b": BIAS}, second_gradients={"b": 2 * BIAS})
    assert hint_for(twice) == "the gradient of b: Flax is 2 times torch everywhere"
    nearly = Evidence(first_gradients={"b": BIAS}, second_gradients={"b": (1 + 1e-9) * BIAS})
    assert hint_for(nearly) == ""


def test_a_running_variance_by_n_minus_1_is_named():
    before, batch = np.linspace(0.5, 2.0, 16), X.reshape(-1, 16)
    count = len(batch)
    first = 0.9 * before + 0.1 * batch.var(0, ddof=1)
    second = 0.9 * before + 0.1 * batch.var(0)
    assert of_statistic("var", before, first, second, 3) == (
        f"var takes in 1/(n/(n-1)) times as much variance in Flax as in torch, with n = {count}: "
        "consistent with the unbiased variance on one side alone"
    )
    assert "takes in n/(n-1) times as much" in of_statistic("var", before, second, first, 3)
    assert of_statistic("var", before, first, second, 4) == ""  # a batch of 4 rows makes no 21 numbers
    slower = 0.99 * before + 0.01 * batch.var(0, ddof=1)
    assert "consistent with another momentum" in of_statistic("var", before, first, slower, 3)
    assert of_statistic("var", before, first, first, 3) == ""
    assert of_statistic("var", before, first, first + RANDOM.normal(size=16), 3) == ""


# ---- settings


def test_numbers_named_in_a_hint_are_those_of_the_tensors():
    assert f"{math.sqrt(3):.6g} = sqrt(3) times" in hint(X, X * math.sqrt(3))


def test_large_tensors_take_little_more_work_than_small_ones():
    def look(tokens, width):
        given = [RANDOM.normal(size=(4, tokens, width)) for _ in range(3)]
        weights = {"w": RANDOM.normal(size=(width, width)), "b": RANDOM.normal(size=width)}
        apart = given[0] + 1e-3 * given[1] * given[2]
        assert hint(given[0], apart, *given, first_weights=weights, first_settings={"num_heads": 12}) == ""

    look(16, 96)
    assert count_calls(lambda: look(128, 768)) < 4 * count_calls(lambda: look(16, 96))  # of 64 times as many numbers


def test_rows_of_zeros_do_not_count_as_agreeing():
    quiet = np.concatenate([np.zeros((3, 2, 16)), draw(3, 5, 16)], 1)
    assert "axis" not in hint(quiet, quiet + np.concatenate([np.zeros((3, 2, 16)), draw(3, 5, 16)], 1))


def test_single_columns_are_not_called_multiples():
    assert "multiple" not in hint(X[..., :1], draw(3, 7, 1))


def test_a_channel_that_differs_is_not_called_a_border():
    image = draw(2, 3, 8, 8)
    other = image.copy()
    other[:, -1] = draw(2, 8, 8)
    assert "border" not in hint(image, other)


def test_a_product_with_zeros_is_no_other_operation():
    """It only drops the other operand, as a sum that begins at 0 would show."""
    array = np.arange(1.0, 4.0)
    for left, right in ((np.asarray(0.0), array), (array, np.asarray(0.0))):
        texts = [text for text, _ in changes.binaries("add", left, right, left + right)]
        assert "subtraction for addition" in texts
        assert "multiplication for addition" not in texts
    assert "multiplication for addition" in [text for text, _ in changes.binaries("add", array, array, 2 * array)]
