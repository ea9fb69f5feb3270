"""Mask descriptions on NumPy, and the shapes that a mask array may have."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from attn_bridge import masks, validation

PADDING = np.array([[True, True, False, True, True], [False, True, True, False, False]])
IDS = np.array([[0, 0, 1, 1, 1], [4, 4, 4, 4, 2]])
LENGTHS = [3, 5]
PARENTS = np.array([[-1, 0, 0, 1], [-1, -1, 1, 1]])
PER_HEAD = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.5


def allowed(mask: masks.Mask, queries: int = 4, keys: int = 5) -> np.ndarray:
    """Return the pairs for 2 sequences, 3 heads, `queries` and `keys`."""
    answer = mask.allowed(np.arange(queries)[:, None], np.arange(keys)[None, :])
    assert answer.dtype == np.bool_
    return np.broadcast_to(answer, (2, 3, queries, keys))


def in_diffusion(query: int, key: int, size: int, tokens: int) -> bool:
    """Return what the paper's three masks say: block diagonal, offset block-causal, block-causal (2503.09573)."""
    of_query, of_key = query % tokens // size, key % tokens // size
    if query < tokens and key < tokens:
        return of_query == of_key
    return key >= tokens and (of_key < of_query if query < tokens else of_key <= of_query)


def in_tree(query: int, key: int, parents: np.ndarray, context: int) -> bool:
    """Follow the parents from the query's node to the key's."""
    if key < context or query < context:
        return key < context
    node = query - context
    while node >= 0 and node != key - context:
        node = parents[node]
    return node >= 0


def pairs(rule: Any, queries: int = 4, keys: int = 5) -> np.ndarray:
    """Return the array of ``rule(b, h, query, key)``."""
    answer = np.zeros((2, 3, queries, keys), bool)
    for b, h, t, s in np.ndindex(answer.shape):
        answer[b, h, t, s] = rule(b, h, t, s)
    return answer


RULES = {
    "full": (masks.full(), lambda b, h, t, s: True),
    "causal": (masks.causal(), lambda b, h, t, s: s <= t),
    "window of 1": (masks.sliding_window(1), lambda b, h, t, s: s == t),
    "window of 3": (masks.sliding_window(3), lambda b, h, t, s: t - 3 < s <= t),
    "window of 99": (masks.sliding_window(99), lambda b, h, t, s: s <= t),
    "padding": (masks.ArrayMask(PADDING), lambda b, h, t, s: PADDING[b, s]),
    "per head": (masks.ArrayMask(PER_HEAD), lambda b, h, t, s: PER_HEAD[b, h, t, s]),
    "causal from 2": (masks.causal().offset(2), lambda b, h, t, s: s <= t + 2),
    "window from 2": (masks.sliding_window(2).offset(2), lambda b, h, t, s: t < s <= t + 2),
    "causal before 0": (masks.causal().offset(-1), lambda b, h, t, s: s < t),
    "twice offset": (masks.causal().offset(3).offset(-2), lambda b, h, t, s: s <= t + 1),
    "and": (masks.causal() & PADDING, lambda b, h, t, s: s <= t and PADDING[b, s]),
    "or": (masks.causal() | PADDING, lambda b, h, t, s: s <= t or PADDING[b, s]),
    "and or": (
        (masks.sliding_window(2) | PADDING) & masks.causal(),
        lambda b, h, t, s: (t - 2 < s <= t or PADDING[b, s]) and s <= t,
    ),
    "three": (
        masks.causal() & PADDING & PER_HEAD,
        lambda b, h, t, s: s <= t and PADDING[b, s] and PER_HEAD[b, h, t, s],
    ),
    "combined, from 1": (
        ((masks.sliding_window(2) | PADDING) & masks.causal()).offset(1),
        lambda b, h, t, s: (t - 1 < s <= t + 1 or PADDING[b, s]) and s <= t + 1,
    ),
    "chunks of 2": (masks.chunked(2), lambda b, h, t, s: s <= t and s // 2 == t // 2),
    "chunks of 3 from 2": (masks.chunked(3).offset(2), lambda b, h, t, s: s <= t + 2 and s // 3 == (t + 2) // 3),
    "prefix of 2": (masks.prefix(2), lambda b, h, t, s: s <= t or s < 2),
    "blocks of 2": (masks.block_causal(2), lambda b, h, t, s: s // 2 <= t // 2),
    "blocks of 3 from 2": (masks.block_causal(3).offset(2), lambda b, h, t, s: s // 3 <= (t + 2) // 3),
    "diffusion of 2 in 3": (masks.block_diffusion(2, 3), lambda b, h, t, s: in_diffusion(t, s, 2, 3)),
    "diffusion of 1 in 4, from 3": (
        masks.block_diffusion(1, 4).offset(3),
        lambda b, h, t, s: in_diffusion(t + 3, s, 1, 4),
    ),
    "tree behind 2": (masks.tree(PARENTS, 2), lambda b, h, t, s: in_tree(t, s, PARENTS[b], 2)),
    "tree, from its root behind 1": (
        masks.tree(PARENTS[0], 1).offset(1),
        lambda b, h, t, s: in_tree(t + 1, s, PARENTS[0], 1),
    ),
    "causal tree, from a node": (
        (masks.causal() & masks.tree([*PARENTS[0], 2], 1)).offset(2),
        lambda b, h, t, s: in_tree(t + 2, s, np.array([*PARENTS[0], 2]), 1),
    ),
    "lengths": (masks.padding(LENGTHS), lambda b, h, t, s: s < LENGTHS[b]),
    "documents": (masks.documents(IDS), lambda b, h, t, s: IDS[b, t] == IDS[b, s]),
    "one row of documents": (masks.documents(IDS[0]), lambda b, h, t, s: IDS[0, t] == IDS[0, s]),
    "causal documents from 1": (
        (masks.causal() & masks.documents(IDS)).offset(1),
        lambda b, h, t, s: s <= t + 1 and IDS[b, t + 1] == IDS[b, s],
    ),
    "restricted": (masks.causal().restrict(PADDING), lambda b, h, t, s: s <= t and PADDING[b, s]),
}
"""Description, and the same as a rule over batch, head, query and key."""


@pytest.mark.parametrize("label", RULES)
def test_a_description_allows_what_its_rule_says(label):
    mask, rule = RULES[label]
    np.testing.assert_array_equal(allowed(mask), pairs(rule))


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (2, 5), (5, 2), (1, 1)])
def test_query_i_is_position_i_whatever_the_number_of_keys(queries, keys):
    for label in ("full", "causal", "window of 3", "causal from 2"):
        mask, rule = RULES[label]
        np.testing.assert_array_equal(allowed(mask, queries, keys), pairs(rule, queries, keys))


@pytest.mark.parametrize("label", ["full", "causal", "window of 1", "window of 3", "causal from 2"])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_an_offset_gives_the_later_rows_of_the_same_mask(label, start):
    mask, _ = RULES[label]
    whole = allowed(mask, start + 2, 7)
    np.testing.assert_array_equal(allowed(mask.offset(start), 2, 7), whole[:, :, start:])


def test_an_array_keeps_its_rows_under_an_offset():
    mask = masks.ArrayMask(PER_HEAD)
    assert mask.offset(3) is mask


ARRAYS = {"padding": PADDING, "per head": PER_HEAD}


@pytest.mark.parametrize("label", ARRAYS)
@pytest.mark.parametrize("operator", ["&", "|"])
def test_an_array_may_stand_on_either_side(label, operator):
    array = ARRAYS[label]
    if operator == "&":
        left, right = array & masks.causal(), masks.causal() & array
    else:
        left, right = array | masks.causal(), masks.causal() | array
    assert isinstance(left, masks.Mask)
    np.testing.assert_array_equal(allowed(left), allowed(right))


def test_combining_follows_the_laws_of_logic():
    window, padding = masks.sliding_window(2), masks.ArrayMask(PADDING)
    for one, two in itertools.permutations([masks.causal(), window, padding], 2):
        np.testing.assert_array_equal(allowed(one & two), allowed(one) & allowed(two))
        np.testing.assert_array_equal(allowed(one | two), allowed(one) | allowed(two))
        np.testing.assert_array_equal(allowed(one & (one | two)), allowed(one))
        np.testing.assert_array_equal(allowed(one & masks.full()), allowed(one))


def test_restricting_by_nothing_changes_nothing():
    mask = masks.causal()
    assert mask.restrict(None) is mask


def test_the_arrays_inside_a_description_can_be_converted():
    """A backend places them on its device, wherever in the description they are."""
    mask = ((masks.causal() & PADDING) | PER_HEAD).offset(2)
    assert [array.shape for array in mask.arrays()] == [(2, 5), (2, 3, 4, 5)]
    flipped = mask.with_arrays(np.logical_not)
    np.testing.assert_array_equal(
        allowed(flipped), pairs(lambda b, h, t, s: (s <= t + 2 and not PADDING[b, s]) or not PER_HEAD[b, h, t, s])
    )
    np.testing.assert_array_equal(next(mask.arrays()), PADDING, "the description itself stays as it is")
    for plain in (masks.full(), masks.causal(), masks.sliding_window(2)):
        assert list(plain.arrays()) == []
        assert plain.with_arrays(np.logical_not) is plain


def test_descriptions_without_arrays_are_frozen_values():
    assert masks.causal() == masks.causal()
    assert masks.full() == masks.full()
    assert masks.sliding_window(2) == masks.sliding_window(np.int64(2))
    assert len({masks.causal(), masks.causal(), masks.full(), masks.sliding_window(2), masks.sliding_window(3)}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
        masks.sliding_window(2).size = 3


@pytest.mark.parametrize(
    ("size", "message"), [(0, "size (0) must be at least 1"), (-2, "size (-2) must be at least 1")]
)
def test_a_window_holds_at_least_the_token_itself(size, message):
    with pytest.raises(ValueError, match="size") as caught:
        masks.sliding_window(size)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [2.0, "2", None, True], ids=repr)
@pytest.mark.parametrize(("call", "name"), [(masks.sliding_window, "size"), (masks.causal().offset, "n")])
def test_sizes_and_offsets_are_integers(call, name, value):
    with pytest.raises(TypeError) as caught:
        call(value)
    assert str(caught.value) == f"{name} must be an integer, got {type(value).__name__}"


def test_the_base_class_describes_nothing():
    with pytest.raises(NotImplementedError):
        masks.Mask().allowed(np.arange(2)[:, None], np.arange(2)[None, :])


def test_the_public_names_are_there():
    assert set(masks.__all__) >= {"ArrayMask", "Mask", "causal", "full", "sliding_window"}
    assert all(hasattr(masks, name) for name in masks.__all__)


# ---- shapes of arrays: the refusals, the same in both backends, are in parity_tests/support/calls/bad_calls.py


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (5,), (2, 5), (1, 5), (2, 1), (1, 1), *itertools.product((1, 2), (1, 3), (1, 4), (1, 5))],
    ids=str,
)
def test_a_mask_may_have_any_shape_that_broadcasts(shape):
    validation.check_attention_mask(shape, "bool", (2, 3, 4, 5))


# ---- blocks


@pytest.mark.parametrize("name", RULES)
def test_visibility_of_a_block_agrees_with_its_pairs(name):
    mask, rule = RULES[name]
    truth = pairs(rule)
    for first, last, low, high in itertools.product(range(4), range(1, 5), range(5), range(1, 6)):
        if first < last and low < high:
            block = truth[:, :, first:last, low:high]
            answer = mask.visibility(range(first, last), range(low, high))
            assert answer is None or (block == answer).all(), (first, last, low, high)
            if name in ("full", "causal", "window of 1", "window of 3", "window of 99") and block.all() == block.any():
                assert answer is bool(block.all()), (first, last, low, high)


@pytest.mark.parametrize("mask", [masks.block_causal(3), masks.block_diffusion(3, 7)], ids=["blocks", "diffusion"])
def test_visibility_of_blocks_is_exact_within_a_half(mask):
    at = np.arange(14)
    truth = mask.allowed(at[:, None], at[None, :])
    ends = list(itertools.combinations(range(15), 2))
    for (first, last), (low, high) in itertools.product(ends, ends):
        block, answer = truth[first:last, low:high], mask.visibility(range(first, last), range(low, high))
        uniform = bool(block.all()) if block.all() == block.any() else None
        within = all(end <= 7 or start >= 7 for start, end in ((first, last), (low, high)))
        assert answer == uniform or (answer is None and not within), (first, last, low, high)


@pytest.mark.parametrize("name", [name for name in RULES if "per head" not in name and name != "three"])
@pytest.mark.parametrize("skipped", [1, 2])
def test_skipped_keys_are_the_first_ones(name, skipped):
    mask, _ = RULES[name]
    np.testing.assert_array_equal(allowed(mask.offset(0, keys=skipped), 4, 5 - skipped), allowed(mask)[..., skipped:])


@pytest.mark.parametrize("name", RULES)
def test_queries_see_keys_between_first_key_and_reach(name):
    mask, rule = RULES[name]
    truth = pairs(rule)
    for query in range(4):
        assert not truth[:, :, query:, : mask.first_key(query)].any()
        if mask.reach is not None:
            assert not truth[:, :, query, : max(0, query + 1 - mask.reach)].any()


@pytest.mark.parametrize("name", RULES)
def test_a_placed_mask_and_picked_keys_say_the_same(name):
    mask, rule = RULES[name]
    np.testing.assert_array_equal(allowed(mask.placed(4, 5)), pairs(rule))
    keys = np.array([4, 0, 3])
    answer = mask.picked(keys).allowed(np.arange(4)[:, None], keys[None, :])
    np.testing.assert_array_equal(np.broadcast_to(answer, (2, 3, 4, 3)), pairs(rule)[..., keys])


def test_bounds_of_windows_and_chunks_leave_nothing_more_out():
    assert [masks.sliding_window(3).first_key(query) for query in range(5)] == [0, 0, 0, 1, 2]
    assert [masks.chunked(2).first_key(query) for query in range(5)] == [0, 0, 2, 2, 4]
    assert [mask.reach for mask in (masks.causal(), masks.sliding_window(3), masks.chunked(2))] == [None, 3, 2]
    assert (masks.causal() & masks.sliding_window(3)).reach == 3
    assert (masks.causal() | masks.sliding_window(3)).reach is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.chunked(0), ValueError, "size (0) must be at least 1"),
        (lambda: masks.prefix(True), TypeError, "size must be an integer, got bool"),
        (lambda: masks.padding([1.0]), TypeError, "lengths must have an integer dtype, got float64"),
        (lambda: masks.padding([[1]]), ValueError, "lengths must have shape (B,), got (1, 1)"),
        (lambda: masks.documents(3), ValueError, "ids must have shape (B, S) or (S,), got ()"),
        (lambda: masks.block_causal(0), ValueError, "size (0) must be at least 1"),
        (lambda: masks.block_diffusion(2, 0), ValueError, "tokens (0) must be at least 1"),
        (lambda: masks.tree([-1], -1), ValueError, "context (-1) must be at least 0"),
        (lambda: masks.tree([0.5]), TypeError, "parents must have an integer dtype, got float64"),
        (
            lambda: masks.tree([[-1], [-1, 0]]),
            ValueError,
            "parents must have shape (N,) or (B, N), got rows of several lengths",
        ),
        (lambda: masks.tree(np.zeros((2, 0), int)), ValueError, "parents must have at least one node"),
        (lambda: masks.tree(3), ValueError, "parents must have shape (N,) or (B, N), got ()"),
        (lambda: masks.tree([-1, 1]), ValueError, "parents[..., 1] (1) must be below 1, or -1 for a root"),
        (lambda: masks.tree([-1, -2]), ValueError, "parents[..., 1] (-2) must be below 1, or -1 for a root"),
        (
            lambda: masks.tree([-1, 0], 2).offset(3).placed(2, 4),
            ValueError,
            "context (2) and parents (2) must reach every token, got queries up to 5",
        ),
        (
            lambda: masks.documents([1, 2]).placed(3, 3),
            ValueError,
            "ids (2) must be one per token, got queries up to 3",
        ),
    ],
)
def test_what_describes_no_mask_is_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


# ---- bands

BANDS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(3),
    "offset": masks.causal().offset(2),
    "window, offset twice": masks.sliding_window(2).offset(2).offset(-1),
    "two windows": masks.sliding_window(3) & masks.causal() & masks.sliding_window(2) & masks.full(),
    "arrays": PADDING & masks.sliding_window(2) & PER_HEAD,
    "arrays, offset": (masks.causal() & PADDING).offset(1),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_and_its_arrays_say_what_the_mask_says(name):
    found = masks.as_band(BANDS[name])
    assert found is not None
    band, arrays = found
    assert len(arrays) == {"arrays": 2, "arrays, offset": 1}.get(name, 0)

    def rule(b: int, h: int, t: int, s: int) -> bool:
        last = t + band.offset
        return s <= last and (band.size is None or s > last - band.size)

    whole = pairs(rule)
    for array in arrays:
        whole = whole & allowed(array)
    np.testing.assert_array_equal(whole, allowed(BANDS[name]))


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(),
        masks.ArrayMask(PADDING),
        masks.causal() | PADDING,
        masks.causal() & masks.causal().offset(1),
        (masks.causal() | PADDING).offset(1) & masks.sliding_window(2),
    ],
    ids=["full", "array", "or", "two offsets", "or in and"],
)
def test_what_is_no_band_is_none(mask):
    assert masks.as_band(mask) is None


# ---- pieces and intervals


def test_a_mask_is_taken_to_pieces():
    lengths, array = masks.padding(np.asarray([2, 3])), masks.ArrayMask(PADDING)
    window, prefix = masks.sliding_window(2), masks.prefix(3)
    documents = masks.documents(np.asarray([[0, 0, 1, 1, 1]])).placed(3, 5)
    for mask, want in (
        (masks.full(), (None, (), None)),
        (array, (None, (array,), None)),
        (lengths & array & masks.full(), (None, (lengths, array), None)),
        (window & lengths & prefix, (window & prefix, (lengths,), None)),
        (window | prefix, (window | prefix, (), None)),
        (documents & masks.causal() & array, (masks.causal(), (array,), documents)),
    ):
        assert masks.as_pieces(mask) == want
    assert masks.as_pieces((masks.causal() & lengths).offset(3)) == (masks.causal().offset(3), (lengths,), None)
    assert masks.as_pieces(lengths.offset(3, keys=1)) is None
    for mask in (masks.causal() | lengths, (masks.causal() | array) & window, documents & documents.offset(0)):
        assert masks.as_pieces(mask) is None


INTERVALS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(3),
    "chunks": masks.chunked(4),
    "prefix": masks.prefix(5),
    "blocks": masks.block_causal(4),
    "before all keys": masks.causal().offset(-4),
    "from a later key on": masks.sliding_window(5).offset(6, keys=4),
    "both": masks.chunked(6) & masks.prefix(4) & masks.full(),
    "none together": masks.sliding_window(2) & masks.sliding_window(2).offset(5),
    "either": masks.chunked(4) | masks.sliding_window(2),
    "either, of one nothing": (masks.sliding_window(2) & masks.sliding_window(2).offset(5)) | masks.sliding_window(3),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_the_keys_that_a_query_sees_are_an_interval(name):
    queries, keys = np.arange(17), np.arange(14)
    found = INTERVALS[name].interval(queries)
    assert found is not None
    start, end = (one[:, None] for one in found)
    want = np.broadcast_to(INTERVALS[name].allowed(queries[:, None], keys[None]), (17, 14))
    np.testing.assert_array_equal((start <= keys) & (keys < end), want)


@pytest.mark.parametrize(
    "mask",
    [
        masks.sliding_window(2) | masks.sliding_window(2).offset(-5),
        masks.ArrayMask(PADDING),
        masks.causal() & PADDING,
        masks.causal() | PADDING,
        (masks.sliding_window(2) | masks.sliding_window(2).offset(-5) | masks.causal()) & masks.causal(),
        masks.padding(np.asarray([3])).offset(1),
        masks.block_diffusion(2, 4),
        masks.tree([-1, 0, 0]),
    ],
    ids=["apart", "array", "and array", "or array", "apart, then together", "padding", "diffusion", "tree"],
)
def test_what_is_no_interval_is_none(mask):
    assert mask.interval(np.arange(9)) is None
