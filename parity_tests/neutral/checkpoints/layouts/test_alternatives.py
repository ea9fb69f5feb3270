"""Names of tensors that differ by block, and tensors of ours that lie in several of theirs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attn_bridge.models.layout import Layout
from attn_bridge.weights import WeightsMismatchError
from attn_bridge.weights.placements import LayoutError, Placement, common
from attn_bridge.weights.rows import Row

LENGTHS = tuple(f"b.{{i}}.{name}" for name in ("query", "key"))
ROWS = (
    Row("layers.{i}.a.weight", ("b.{i}.query",), branch="mixer/one|two"),
    Row("layers.{i}.k.weight", ("b.{i}.key",), branch="mixer/one|two"),
    Row("layers.{i}.taps", ("b.{i}.taps",), branch="mixer/two"),
    Row("layers.{i}.q_taps", ("b.{i}.taps",), branch="mixer/one", lengths=LENGTHS, piece=0, even="resaved"),
    Row("layers.{i}.k_taps", ("b.{i}.taps",), branch="mixer/one", lengths=LENGTHS, piece=1, even="resaved"),
    Row("layers.{i}.a.weight", ("b.{i}.other",), branch="mixer/three"),
    Row("layers.{i}.gate", ("b.{i}.gate",), branch="mixer/three"),
)
LAYOUT = Layout("toy", "a toy", ROWS, ours=False, whole=True, settings={"resaved": (), "two": ()})


def shapes(arrays):
    return {name: array.shape for name, array in arrays.items()}


def ours(widths=(4, 3)):
    numbers = iter(np.arange(1000.0).reshape(-1, 2))
    sizes = {"b.0.query": widths[0], "b.0.key": widths[1], "b.0.taps": sum(widths), "b.1.other": 2, "b.1.gate": 1}
    return {name: np.array([next(numbers) for _ in range(size)]) for name, size in sizes.items()}


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])


def test_a_name_goes_where_the_other_tensors_of_its_block_say():
    theirs = LAYOUT.from_canonical(ours())
    _, matches = LAYOUT.match(theirs)
    assert [matches[f"layers.{i}.a.weight"][0].ours for i in (0, 1)] == [("b.{i}.query",), ("b.{i}.other",)]
    assert list(matches) == list(theirs)
    assert_equal(LAYOUT.to_canonical(theirs), ours())


def test_a_name_that_nothing_decides_is_of_no_row():
    names = {"layers.0.a.weight": (2, 2)}
    assert LAYOUT.match(names)[1] == {}
    with pytest.raises(WeightsMismatchError, match=r"layers\.0\.a\.weight"):
        LAYOUT.decode(names, part=True)


def test_a_block_of_two_alternatives_is_refused():
    theirs = LAYOUT.from_canonical(ours())
    theirs["layers.0.gate"] = theirs["layers.1.gate"]
    with pytest.raises((LayoutError, WeightsMismatchError)):
        LAYOUT.to_canonical(theirs)


@pytest.mark.parametrize("branch", ["", "mixer/one", "other/three"])
def test_rows_of_one_name_have_to_be_alternatives(branch):
    rows = [*ROWS[:5], Row("layers.{i}.a.weight", ("b.{i}.other",), branch=branch)]
    with pytest.raises(LayoutError, match=r"^layers\.0\.a\.weight: more than one row of twice covers it$"):
        Layout("twice", "", rows, ours=False).match(["layers.0.a.weight", "layers.0.k.weight"])


def test_pieces_are_rows_behind_rows_whatever_their_order():
    canonical = ours()
    theirs = LAYOUT.from_canonical(canonical)
    assert [theirs[f"layers.0.{name}_taps"].shape for name in "qk"] == [(4, 2), (3, 2)]
    np.testing.assert_array_equal(theirs["layers.0.k_taps"], canonical["b.0.taps"][4:])
    assert_equal(LAYOUT.to_canonical(dict(reversed(theirs.items()))), canonical)


def test_a_file_may_be_cut_elsewhere():
    canonical = ours((5, 2))
    even = LAYOUT.from_canonical(canonical, resaved=1)
    assert [even[f"layers.0.{name}_taps"].shape for name in "qk"] == [(4, 2), (3, 2)]
    decoded = LAYOUT.decode(shapes(even))
    assert decoded.placements["b.0.taps"].shape == (7, 2)
    assert_equal(LAYOUT.to_canonical(even), canonical)


def test_one_tensor_is_an_alternative_of_its_pieces():
    canonical = ours()
    whole = LAYOUT.from_canonical(canonical, two=1)
    assert "layers.0.taps" in whole
    assert "layers.0.q_taps" not in whole
    assert_equal(LAYOUT.to_canonical(whole), canonical)
    assert LAYOUT.decode(shapes(whole)).restore["two"] == 1
    assert LAYOUT.decode(shapes(LAYOUT.from_canonical(canonical))).restore["two"] == 0
    whole["layers.0.q_taps"] = whole["layers.0.taps"]
    with pytest.raises(LayoutError, match=r"^layers\.0\.taps and layers\.0\.q_taps both hold b\.0\.taps$"):
        LAYOUT.to_canonical(whole)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", ["layers.0.q_taps", "layers.0.k_taps"])
def test_all_pieces_have_to_be_there(name, part):
    theirs = shapes(LAYOUT.from_canonical(ours()))
    del theirs[name]
    with pytest.raises(WeightsMismatchError) as caught:
        LAYOUT.decode(theirs, part=part)
    assert caught.value.missing == [name]


def test_pieces_of_other_widths_are_refused():
    theirs = shapes(LAYOUT.from_canonical(ours()))
    theirs["layers.0.k_taps"] = (3, 5)
    message = re.escape("layers.0.q_taps (4, 2) and layers.0.k_taps (3, 5) are no parts of one tensor")
    with pytest.raises(LayoutError, match=f"^{message}$"):
        LAYOUT.decode(theirs)


def test_pieces_are_written_with_the_rows_of_the_tensors_that_say_so():
    canonical = ours()
    with pytest.raises(LayoutError, match=r"b\.0\.taps has 7 rows, b\.0\.query \+ b\.0\.key 6$"):
        LAYOUT.from_canonical({**canonical, "b.0.key": canonical["b.0.key"][:2]})
    with pytest.raises(LayoutError, match=r"b\.0\.taps is cut as b\.0\.query says, which is not there$"):
        LAYOUT.from_canonical({"b.0.taps": canonical["b.0.taps"]})


def test_a_piece_has_the_numbers_of_one_tensor():
    with pytest.raises(LayoutError, match=r"^q: a piece is one of a single tensor of ours, with its numbers$"):
        Row("q", ("a", "b"), "o -> o", along="o", lengths=("c", "d"))


def test_rows_on_both_sides_are_paired_where_either_is_cut():
    three, five = (Placement(name, 0, (((rows, 2),), ((2, 1),))) for name, rows in (("a", 3), ("b", 5)))
    source = Placement("a", 0, three.axes, rest=(Placement("b", 0, five.axes, start=3),))
    target = Placement("c", 0, (((4, 1),), ((2, 4),)), start=2)
    pairs = [(one.theirs, one.offset, one.rows, two.offset) for one, two in common(source, target)]
    assert pairs == [("a", 4, 1, 0), ("b", 0, 3, 1)]
    assert source.shape == (8, 2)


def test_rows_are_cut_where_outside_axes_are():
    placement = Placement("a", 1, (((3, 10), (2, 1)),))
    assert placement.narrowed(2, 6) == Placement("a", 11, (((2, 10), (2, 1)),), start=2)
    with pytest.raises(LayoutError, match=r"^a: 6 rows are not cut at 1 and 4$"):
        placement.narrowed(1, 4)
