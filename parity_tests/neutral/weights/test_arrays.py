"""Arrays go from torch to Flax and back to the last bit."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_bridge import Rule, flax_to_torch, specs, torch_to_flax

PATTERNS: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = (
    ("... -> ...", (), ((),)),
    ("... -> ...", (), (("a",), ("b",), ("c",))),
    ("o -> o", (), (("o",),)),
    ("o i -> i o", (), (("o",), ("i",))),
    ("a b c -> c a b", (), (("a",), ("b",), ("c",))),
    ("a b -> a 1 b", (), (("a",), ("b",))),
    ("a b ... -> b a ...", (), (("a",), ("b",), ("c",), ("d",))),
    ("(h d) -> h d", ("h",), (("h", "d"),)),
    ("(h d) e -> e h d", ("h",), (("h", "d"), ("e",))),
    ("e (h d) -> h e d", ("d",), (("e",), ("h", "d"))),
    ("(h d) e -> (d h) e", ("h",), (("h", "d"), ("e",))),
    ("(k h d) e -> k e h d", ("k", "h"), (("k", "h", "d"), ("e",))),
    ("... (h d) -> ... h d", ("d",), (("a",), ("b",), ("h", "d"))),
    ("o i -> (i o)", ("i",), (("o",), ("i",))),
)
"""Pattern, the letters whose size it is told, and the letters of each torch axis."""
KINDS = (*"?bBhHiIlLqQefdFD", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
DTYPES = tuple(dict.fromkeys(map(np.dtype, KINDS)))
LAYOUTS = ("C", "Fortran", "transposed", "reversed", "strided", "broadcast", "big-endian", "read-only")


def lay_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return an array of like shape (and, except where broadcast, like elements) that lies otherwise in memory."""
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "transposed":
        return np.roll(array.T, 1, 0).copy().T if array.ndim else array
    if layout == "reversed":
        return np.flip(np.flip(array).copy()) if array.ndim else array
    if layout == "strided":
        return np.stack([array, array], -1)[..., 1] if array.ndim else array
    if layout == "broadcast" and array.ndim:
        return np.broadcast_to(array[:1], array.shape)
    if layout == "big-endian" and array.dtype.isbuiltin == 1:
        return array.byteswap().view(array.dtype.newbyteorder(">"))
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rule, np.ndarray]:
    """Draw a rule and an array of random bits that fits it."""
    pattern, told, axes = draw(st.sampled_from(PATTERNS))
    letters = sorted(set(itertools.chain.from_iterable(axes)))
    sizes = {letter: draw(st.integers(1, 4)) for letter in letters}
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(int(np.prod([sizes[letter] for letter in axis])) for axis in axes if axis)
    count = int(np.prod(shape, dtype=int))
    bits = np.frombuffer(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), np.uint8)
    array = (bits % 2 if dtype == np.bool_ else bits).astype(np.uint8).view(dtype).reshape(shape)
    rule = Rule("t.weight", "f.kernel", pattern, **{letter: sizes[letter] for letter in told})
    return rule, lay_out(array, draw(st.sampled_from(LAYOUTS)))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_rules_round_trip_every_bit(case):
    rule, array = case
    before = array.tobytes()
    there = torch_to_flax({"t.weight": array}, [rule])
    back = flax_to_torch(there, [rule])
    assert list(there) == ["f.kernel"]
    assert list(back) == ["t.weight"]
    moved, returned = there["f.kernel"], back["t.weight"]
    assert (returned.shape, returned.dtype, returned.tobytes()) == (array.shape, array.dtype, before)
    assert array.tobytes() == before
    assert moved.dtype == array.dtype
    assert moved.shape == rule.convert_shape(array.shape, "torch")
    for one, other in itertools.combinations((array, moved, returned), 2):
        assert not np.shares_memory(one, other)
    for result in (moved, returned):
        assert result.flags.c_contiguous
        assert result.flags.writeable


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_pattern_is_read_from_torch_to_flax(case):
    """Element by element: the flat position in the result is where the pattern puts it."""
    rule, array = case
    ids = torch_to_flax({"t.weight": np.arange(array.size).reshape(array.shape)}, [rule])["f.kernel"]
    moved = torch_to_flax({"t.weight": array}, [rule])["f.kernel"]
    assert moved.tobytes() == array.reshape(-1)[ids.reshape(-1)].tobytes()


def test_heads_split_as_the_pattern_says():
    weight = np.arange(24).reshape(6, 4)
    kernel = torch_to_flax({"q": weight}, [Rule("q", "k", "(h d) e -> e h d", h=2)])["k"]
    assert kernel.shape == (4, 2, 3)
    assert all(kernel[e, h, d] == weight[3 * h + d, e] for e, h, d in np.ndindex(4, 2, 3))


def test_empty_arrays_cross():
    rule = Rule("q", "k", "(h d) e -> e h d", h=2)
    kernel = torch_to_flax({"q": np.zeros((6, 0))}, [rule])["k"]
    assert kernel.shape == (0, 2, 3)
    assert flax_to_torch({"k": kernel}, [rule])["q"].shape == (6, 0)


def test_the_given_dictionary_stays_as_it_is():
    arrays = {"a": np.ones((2, 3))}
    torch_to_flax(arrays, [Rule("a", "b", "o i -> i o")])
    assert list(arrays) == ["a"]
    assert arrays["a"].shape == (2, 3)


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
def test_the_rules_of_every_variant_round_trip(variant):
    sizes = {"d_in": 4, "d_out": 6, "context_length": 5, "num_heads": 2, "qkv_bias": True, "emb_dim": 4}
    for config in [example.config for example in variant.examples] or [
        variant.config(**variant.config.arguments_from(sizes))
    ]:
        check_there_and_back(config)


def check_there_and_back(config: specs.Config) -> None:
    rng = np.random.default_rng(0)
    arrays = {row.rule.torch: rng.normal(size=row.shape) for row in config.parameters}
    there = torch_to_flax(arrays, config.rules())
    assert {name: array.shape for name, array in there.items()} == {
        row.rule.flax: row.flax_shape for row in config.parameters
    }
    back = flax_to_torch(there, config.rules())
    assert list(back) == list(arrays)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
