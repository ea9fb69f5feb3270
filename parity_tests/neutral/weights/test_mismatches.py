"""Names, shapes and arrays that do not fit the rules are refused together."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import Rule, Rules, WeightsMismatchError, flax_to_torch, torch_to_flax

from .checks import ONE, raises

LAYERS = Rules([Rule("h.{i}.a", "k.{i}.x"), Rule("h.{i}.b", "k.{i}.y", "o i -> i o"), Rule("end", "end")])


def test_all_mismatches_are_in_one_error():
    arrays = {"h.0.a": ONE, "h.0.b": np.ones((2, 3, 4)), "h.1.b": ONE, "x": ONE, "h.a.a": ONE}
    with pytest.raises(WeightsMismatchError) as caught:
        torch_to_flax(arrays, LAYERS)
    error = caught.value
    assert type(error) is WeightsMismatchError
    assert error.missing == ["end", "h.1.a"]
    assert error.unexpected == ["h.a.a", "x"]
    assert error.misshapen == [
        "h.0.b: shape (2, 3, 4) does not fit 'o i -> i o'",
        "h.1.b: shape (2,) does not fit 'o i -> i o'",
    ]
    assert str(error) == (
        "weights do not match: missing: end, h.1.a; unexpected: h.a.a, x; misshapen: "
        "h.0.b: shape (2, 3, 4) does not fit 'o i -> i o', h.1.b: shape (2,) does not fit 'o i -> i o'"
    )


def test_a_mismatch_is_a_value_error():
    assert issubclass(WeightsMismatchError, ValueError)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"k.0.x": ONE, "k.0.y": np.ones((2, 2)), "k.1.x": ONE, "end": ONE}, "missing: k.1.y"),
        ({"end": ONE}, "missing: k.{i}.x, k.{i}.y"),
        ({}, "missing: end, k.{i}.x, k.{i}.y"),
        ({"k.00.x": ONE, "k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE}, "unexpected: k.00.x"),
        ({"k.-1.x": ONE, "k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE}, "unexpected: k.-1.x"),
        ({"k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE, "kA0Ax": ONE}, "unexpected: kA0Ax"),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_named(arrays, message):
    raises(WeightsMismatchError, f"weights do not match: {message}", flax_to_torch, arrays, LAYERS)


def test_indices_go_with_their_names():
    rules = [Rule("h.{i}.e.{j}", "x.{j}.{i}")]
    arrays = {f"h.{i}.e.{j}": np.full(2, 10 * i + j) for i in (0, 1, 12) for j in (0, 3)}
    there = torch_to_flax(arrays, rules)
    assert sorted(there) == sorted(f"x.{j}.{i}" for i in (0, 1, 12) for j in (0, 3))
    assert all(np.array_equal(there[f"x.{j}.{i}"], arrays[f"h.{i}.e.{j}"]) for i in (0, 1, 12) for j in (0, 3))
    assert sorted(flax_to_torch(there, rules)) == sorted(arrays)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": [1.0, 2.0]}, "a must be a NumPy array, got list"),
        ({"a": np.float32(1)}, "a must be a NumPy array, got float32"),
        ({"a": None}, "a must be a NumPy array, got NoneType"),
        ({"a": np.array([None])}, "a must hold numbers, got dtype object"),
        ({"a": np.zeros(2, "i4,i4")}, "a must hold numbers, got dtype [('f0', '<i4'), ('f1', '<i4')]"),
        ({"a": np.array(["one"])}, "a must hold numbers, got dtype <U3"),
        ({"a": np.array([b"one"])}, "a must hold numbers, got dtype |S3"),
        ({"a": np.array(["2020"], "datetime64[Y]")}, "a must hold numbers, got dtype datetime64[Y]"),
        ({3: ONE}, "names must be strings, got 3"),
    ],
    ids=["list", "scalar", "none", "objects", "records", "text", "bytes", "dates", "integer name"],
)
def test_only_named_arrays_of_numbers_are_taken(arrays, message):
    raises(TypeError, message, torch_to_flax, arrays, [Rule("a", "b")])


def test_shapes_are_shown_after_long_names():
    arrays = {"n" * 100: np.ones((3, 2))}
    with pytest.raises(WeightsMismatchError) as caught:
        torch_to_flax(arrays, [Rule("n" * 100, "b", "a b -> b a", a=1234567)])
    assert "n" * 100 + ": " in str(caught.value)
    assert str(caught.value).isprintable()
    text = str(WeightsMismatchError(misshapen=["n" * 100 + ": expected (12288, 4096),\ngot (4096, 12288)"]))
    assert text.endswith(r"expected (12288, 4096),\ngot (4096, 12288)")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31m", r"\x1b[31m"),
        ("n" * 300, "n" * 120 + "... (300 characters)"),
        ("Gewicht_ü", "Gewicht_ü"),
    ],
    ids=["line break", "escape code", "long", "letters"],
)
def test_a_hostile_name_is_escaped(name, shown):
    raises(
        WeightsMismatchError,
        f"weights do not match: missing: a; unexpected: {shown}",
        torch_to_flax,
        {name: ONE},
        [Rule("a", "b")],
    )
