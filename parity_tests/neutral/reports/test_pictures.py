"""Tensors as heat maps and histograms, looked at pixel by pixel."""

import base64
import dataclasses
import re
import struct
import zlib

import ml_dtypes
import numpy as np
import pytest

from attn_parity.rendering.html import figures, pictures
from attn_parity.results.findings import Picture
from attn_parity.results.report import Report
from parity_tests.support.judging.html_outline import Outline
from parity_tests.support.judging.reports import large_report

EMPTY = Report("equal", [])


def decoded(uri: str) -> np.ndarray:
    """Return the pixels of a picture as palette entries; every checksum must be right."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"), validate=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size : place + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind.decode()] = body
        place += 12 + size
    assert list(chunks) == ["IHDR", "PLTE", "IDAT", "IEND"]
    width, height = struct.unpack(">2I", chunks["IHDR"][:8])
    assert len(chunks["PLTE"]) == 768
    lines = np.frombuffer(zlib.decompress(chunks["IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def images(picture: Picture) -> tuple[list[dict[str, str]], str]:
    """Return the attributes of a picture's images, scales left out, and all its text."""
    body = figures.section(dataclasses.replace(EMPTY, pictures=[picture]))
    page = Outline("".join(body))
    return [one for one in page.all("img") if one.get("class") != "bar-image"], page.words


def test_one_wrong_element_of_many_stays_visible():
    right = np.random.default_rng(0).normal(size=(900, 700)).astype(np.float32)
    wrong = right.copy()
    wrong[431, 77] += 1e-3
    (torch, flax, apart), words = images(Picture("output", right, wrong))
    pixels = decoded(apart["src"])
    assert pixels.shape == (64, 64)
    middle = pictures.NOT_FINITE // 2
    assert np.argwhere(pixels != middle).tolist() == [[431 * 64 // 900, 77 * 64 // 700]]
    assert pixels.min() == 0  # torch - Flax is negative there: the end of the scale
    assert (decoded(torch["src"]) == decoded(flax["src"])).mean() > 0.99
    assert "largest difference at (431, 77): torch" in words
    assert "each the most extreme of its block" in words
    assert apart["alt"].startswith("torch - Flax of output: from -0.001 to 0")


def test_values_share_a_scale_and_its_ends_are_labelled():
    one, two = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[0.0, 1.0], [2.0, 4.0]])
    (torch, flax, apart), words = images(Picture("output", one, two))
    assert decoded(torch["src"]).tolist() == [[0, 64], [127, 190]]
    assert decoded(flax["src"]).tolist() == [[0, 64], [127, 254]]
    assert decoded(apart["src"]).tolist() == [[127, 127], [127, 0]]
    assert "values 0 4 torch - Flax -1 1" in words
    assert torch["width"] == "256"


def test_palettes_run_from_dark_to_bright():
    values, differences = (np.frombuffer(pictures._palette(one), np.uint8).reshape(256, 3) for one in (False, True))
    assert [bytes(values[place]).hex() for place in (0, 127, 254, 255)] == ["440154", "21918c", "fde725", "ff00ff"]
    bright = values[:255] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(bright) > -0.6).all()
    assert bytes(differences[127]).hex() == "f7f7f7"
    assert differences[0][2] > differences[0][0]
    assert differences[254][0] > differences[254][2]


def test_attention_weights_are_drawn_for_the_worst_samples_heads():
    weights = np.full((3, 20, 4, 4), 0.25, np.float32)
    other = weights.copy()
    other[1, 17, 2] = [0.05, 0.25, 0.35, 0.35]
    found, words = images(Picture("output[1]", weights, other))
    assert len(found) == 3 * pictures.HEADS
    assert "sample 1 of 3, the 12 of 20 heads that differ most" in words
    assert "largest difference at (1, 17, 2, 0): torch 0.25, Flax 0.0500000007" in words
    heads = re.findall(r"head (\d+)", words)
    assert heads == [*map(str, range(11)), "17"]
    changed = [one["alt"] for one in found[24:] if (decoded(one["src"]) != 127).any()]
    assert changed == ["torch - Flax of output[1], head 17: from -0.1 to 0.2"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights, True),
        (lambda weights: np.tril(weights) * 0, False),
        (lambda weights: weights - 0.5, False),
        (lambda weights: weights * 2, False),
        (lambda weights: weights[0], False),
        (lambda weights: np.concatenate([weights, weights * 0], axis=2), True),
        (lambda weights: weights.astype(ml_dtypes.bfloat16), True),
        (lambda weights: weights[:0], False),
    ],
    ids=["rows sum to 1", "all zero", "negative", "sum to 2", "3-D", "masked rows", "bfloat16", "empty"],
)
def test_attention_weights_are_known_by_their_numbers(change, expected):
    assert pictures.is_attention(change(np.full((2, 3, 4, 4), 0.25))) is expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (1, 7)), ((3, 5), (3, 5)), ((300, 2), (300, 2)), ((2, 14, 48), (28, 48)), ((0, 3), (0, 0))],
)
def test_a_tensor_is_laid_out_near_a_square(shape, expected):
    assert pictures.matrix(np.zeros(shape)).shape == expected


def test_nonfinite_cells_have_a_distinct_colour_and_count():
    one = np.array([[1.0, np.nan], [np.inf, -np.inf]])
    two = np.array([[1.0, np.nan], [np.inf, 2.0]])
    (torch, flax, apart), words = images(Picture("output", one, two))
    assert decoded(torch["src"]).tolist() == [[0, 255], [255, 255]]
    assert decoded(flax["src"]).tolist() == [[0, 255], [255, 254]]
    assert decoded(apart["src"]).tolist() == [[127, 127], [127, 255]]
    assert torch["alt"] == "torch of output: from 1 to 1, 3 cells not finite"
    assert "not finite" in words
    assert "largest difference at (1, 1): torch -inf, Flax 2" in words


def test_tensors_without_a_difference_say_so():
    found, words = images(Picture("output", np.ones((2, 3)), np.ones((2, 3))))
    assert len(found) == 3
    assert "no difference in any bit" in words
    assert "largest difference" not in words


@pytest.mark.parametrize(
    ("torch", "flax", "why"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), "Not drawn: torch has 2 x 3, Flax 3 x 2."),
        (np.ones((0, 3)), np.ones((0, 3)), "Not drawn: it has no elements."),
    ],
)
def test_what_cannot_be_drawn_says_why(torch, flax, why):
    found, words = images(Picture("output", torch, flax, torch))
    assert found == []
    assert why in words


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16", "float8_e4m3fn", "float64"])
def test_every_dtype_is_drawn(dtype):
    values = np.array([0, 1]).astype(getattr(ml_dtypes, dtype, dtype))
    (torch, *_), words = images(Picture("output", values, values, values.astype(np.float64)))
    assert decoded(torch["src"])[0].tolist() == [0, 254]
    assert ("rms 0, largest 0" in words) is (dtype not in ("bool", "int32"))


def test_huge_values_are_drawn_without_overflow():
    values = np.array([[-1.7e308, 1.7e308]])
    (torch, _, apart), _ = images(Picture("output", values, -values))
    assert decoded(torch["src"]).tolist() == [[0, 254]]
    assert decoded(apart["src"]).tolist() == [[255, 255]]


def test_errors_are_counted_in_units_of_the_last_place():
    oracle = np.full(10, 2.0)
    atom = pictures.unit("float32", oracle)
    assert atom == 2.0 * 2.0**-23
    assert pictures.unit("int32", oracle) is None
    assert pictures.unit("float32", np.zeros(3)) is None
    off = np.array([0, 2.0**-12, 2.0**-8, 0.3, 1, 1.9, 2, 1e9, np.nan, np.inf]) * atom
    counts, rms, largest = pictures.error_histogram(oracle + off, oracle, atom)
    assert {pictures.octave(place): int(counts[place]) for place in np.flatnonzero(counts)} == {
        -8: 3,
        -2: 1,
        0: 2,
        1: 1,
        24: 3,
    }
    assert (rms, largest) == (float("inf"), float("inf"))
    _, rms, largest = pictures.error_histogram(oracle + 3 * atom, oracle, atom)
    assert (rms, largest) == (3.0, 3.0)


def test_the_histogram_shows_both_sides_and_a_single_outlier():
    oracle = np.ones(5000)
    torch, flax = oracle.astype(np.float32), oracle.astype(np.float32)
    flax[4000] += 2.0**-23 * 1000
    body = "".join(figures.section(dataclasses.replace(EMPTY, pictures=[Picture("output", torch, flax, oracle)])))
    page = Outline(body)
    bars = {side: page.all("rect", class_=f"side-{side}") for side in ("first", "second")}
    assert [len(bars["first"]), len(bars["second"])] == [1, 2]
    assert float(bars["second"][1]["height"]) >= 1.5
    assert float(bars["second"][1]["x"]) > float(bars["second"][0]["x"]) + 100
    assert "torch: rms 0, largest 0" in page.words
    assert "Flax: rms 14, largest 1000" in page.words
    assert "in units of the last place. torch: rms 0, largest 0. Flax: rms 14" in page.all("svg")[0]["aria-label"]
    _, words = images(Picture("output", torch, flax))
    assert "No float64 result to measure the rounding errors of both sides against." in words


def test_pictures_of_what_failed_come_first_and_are_capped():
    words = Outline("".join(figures.section(large_report()))).words
    assert "24 of 1,000 tensors, those that differ first." in words
    names = re.findall(r"grad blocks\.(\d+)\.fc\.weight (?:precision|equal)", words)
    assert names == [*(str(index) for index in range(7, 1000, 100)), *"0123456", *(str(i) for i in range(8, 15))]
