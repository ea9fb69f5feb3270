"""Calls that fit by their sizes and yet are mistakes: refused or warned of in a line that names what to use."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings

import numpy as np
import pytest

from attn_bridge import misuse, specs
from attn_bridge.masks import causal

from ...support.calls import cover
from .. import backends
from ..modules import ALIKE, NAMES, PADDING, RECURRENT, draw, make, make_example

backend = backends.fixture(backends.adapters("backend"))

MODERN = {
    variant.name: variant.config
    for variant in specs.VARIANTS
    if variant.group == "modern" and variant.examples and hasattr(variant.config, "check")
}


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    monkeypatch.setattr(misuse, "_looks_left", misuse.LOOKS)


def error_of(call, *arguments, **options):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*arguments, **options)
    return str(caught.value)


def warning_of(call, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, **options)
    return [str(warning.message) for warning in caught]


# ---- axes in another order


def heads_first(*shape, seed=0):
    return draw(*shape, seed=seed)


def test_heads_before_tokens_are_named_where_heads_do_not_divide(backend):
    query, key = draw(2, 4, 6, 8), draw(2, 4, 5, 8)
    assert error_of(backend.attend, query, key, key) == (
        "heads of query (6) must be a multiple of the heads of key (5); the axes are (B, T, H, D), and these shapes "
        "fit (B, H, T, D): swap axes 1 and 2"
    )


@pytest.mark.parametrize("operand", ["mask", "bias"])
def test_heads_before_tokens_are_named_where_an_operand_fits_them(backend, operand):
    query = draw(2, 4, 6, 8)
    array = np.ones((1, 1, 6, 6), bool if operand == "mask" else "float32")
    assert error_of(backend.attend, query, query, query, **{operand: array}).endswith(
        "must broadcast to (B, H, T, S) = (2, 6, 4, 4); the axes of query are (B, T, H, D), and this fits "
        "(B, H, T, D): swap axes 1 and 2"
    )


@pytest.mark.parametrize("heads", [17, 33, 50, 100, 127, 160])
def test_more_heads_than_tokens_in_a_number_that_no_model_has_are_warned_of(backend, heads):
    array = backend.as_argument(draw(1, 4, heads, 2))
    call = backend.package.functional.dot_product_attention
    assert warning_of(call, array, array, array, mask=causal()) == [
        f"query (1, 4, {heads}, 2) is read as (B, T, H, D), 4 tokens of {heads} heads; swap axes 1 and 2 if it is "
        "(B, H, T, D)"
    ]


USUAL = {
    "128 heads": ((1, 4, 128, 2), 4),
    "15 heads": ((1, 4, 15, 2), 4),
    "25 heads": ((1, 4, 25, 2), 4),
    "64 heads": ((1, 12, 64, 2), 12),
    "71 heads": ((1, 4, 71, 2), 4),
    "more tokens than 50 heads": ((1, 60, 50, 2), 60),
    "1 token": ((1, 1, 160, 2), 1),
    "more tokens than heads": ((1, 170, 160, 2), 170),
    "as many queries as heads": ((1, 160, 160, 2), 4),
    "as many keys as heads": ((1, 4, 160, 2), 160),
}


@pytest.mark.parametrize("case", USUAL)
def test_many_heads_that_a_model_may_have_are_not_warned_of(backend, case):
    shape, keys = USUAL[case]
    query, key = (backend.as_argument(draw(shape[0], tokens, *shape[2:])) for tokens in (shape[1], keys))
    assert warning_of(backend.package.functional.dot_product_attention, query, key, key) == []


# ---- masks


def attend(backend, mask, batch=5):
    array, mask = backend.as_argument(draw(batch, 5, 2, 4)), backend.as_argument(mask)
    return warning_of(backend.package.functional.dot_product_attention, array, array, array, mask=mask)


@pytest.mark.parametrize("mask", [np.tri(5, dtype=bool), np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool)])
def test_a_causal_mask_read_as_padding_is_warned_of(backend, mask):
    assert attend(backend, mask) == [
        "a mask of 2 dimensions (5, 5) is (B, S), a row per sequence, and this one is causal; give a (T, S) mask as "
        "(1, 1, T, S): mask[None, None]"
    ]


def test_padding_of_as_many_sequences_as_tokens_is_not_warned_of(backend):
    assert attend(backend, np.arange(5) < np.array([5, 3, 4, 1, 2])[:, None]) == []
    assert attend(backend, np.arange(5) >= np.array([0, 3, 4, 1, 2])[:, None]) == []


INVERTED = (
    "attention mask hides every key of sequence 1: True = may be attended, where key_padding_mask of torch.nn has True "
    "for padding; give ~mask if yours has, too"
)


@pytest.mark.parametrize("name", NAMES)
def test_an_inverted_padding_mask_is_warned_of(backend, name):
    mask = ~np.array([[True, True, True, False, False], [True] * 5])
    x = backend.as_argument(draw(2, 5, 4))
    assert warning_of(make(backend, name), x, attention_mask=backend.as_argument(mask))[:1] == [INVERTED]


@cover.some("name", RECURRENT, [name for name in RECURRENT if name not in ALIKE])
def test_an_inverted_padding_mask_of_a_state_is_warned_of(backend, name):
    module, x = make_example(backend, name)
    mask = ~np.array([[True, True, True, False, False], [True] * 5])
    assert warning_of(module, backend.as_argument(x), attention_mask=backend.as_argument(mask)) == [INVERTED]
    assert warning_of(module, backend.as_argument(x), attention_mask=backend.as_argument(~mask)) == []


def test_an_inverted_padding_mask_of_a_cache_is_warned_of(backend):
    module = backend.build("GroupedQueryAttention", config=specs.GroupedQueryAttentionConfig(4, num_heads=2))
    mask = backend.as_argument(np.array([[False, False, True], [False] * 3]))
    x, cache = backend.as_argument(draw(2, 3, 4)), module.init_cache(2, 4)
    assert warning_of(module, x, cache=cache, attention_mask=mask) == [INVERTED]


def test_a_mask_that_hides_everything_is_warned_of(backend):
    assert attend(backend, np.zeros((1, 5), bool), batch=2) == [INVERTED.replace("sequence 1", "sequence 0")]


def test_padding_is_not_warned_of(backend):
    empty = np.zeros(5, bool)
    for mask in (PADDING, [empty, PADDING[1]], [empty, ~empty], [~empty, PADDING[0] < empty]):
        assert attend(backend, np.stack(mask), batch=2) == []


def test_masks_are_looked_at_a_limited_number_of_times(backend, monkeypatch):
    monkeypatch.setattr(misuse, "_looks_left", 1)
    mask = np.zeros((2, 5), bool)
    assert [len(attend(backend, mask, batch=2)) for _ in range(2)] == [1, 0]


# ---- arguments


@pytest.mark.parametrize("name", NAMES)
def test_query_key_and_value_by_position_are_refused(backend, name):
    x = backend.as_argument(draw(2, 5, 4))
    assert error_of(make(backend, name), x, x, x) == (
        "x is the only argument by position, got 3: query, key and value are projected from x; give attention_mask=, "
        "context=, positions= or cache= by name"
    )


@pytest.mark.parametrize("name", MODERN)
def test_sizes_in_place_of_a_config_are_refused(backend, name):
    message = error_of(backend.build, name, num_heads=8)
    assert message.startswith(f"{name} takes a config, not sizes; use {name}({MODERN[name].__name__}(d_in=...")
    names = {field.name for field in dataclasses.fields(MODERN[name])}
    assert ("num_heads=8" in message) == ("num_heads" in names)


def test_sizes_by_position_are_refused(backend):
    kind = backend.package.GroupedQueryAttention
    assert error_of(kind, 8, 8, num_heads=2) == (
        "GroupedQueryAttention takes a config, not sizes; use "
        "GroupedQueryAttention(GroupedQueryAttentionConfig(d_in=..., num_heads=2))"
    )


@pytest.mark.parametrize("name", RECURRENT)
def test_a_cache_of_another_layer_is_refused(backend, name):
    wanted = "cache must be what init_cache of the module returns"
    keys, x = make_example(backend, "GroupedQueryAttention")
    module, y = make_example(backend, name)
    assert error_of(module, backend.as_argument(y), cache=keys.init_cache(2, 8)) == f"{wanted}, got KeyValueCache"
    assert error_of(keys, backend.as_argument(x), cache=module.init_cache(2, 8)) == f"{wanted}, got RecurrentCache"
    for other in set(RECURRENT) - {name}:
        cache = make_example(backend, other)[0].init_cache(2, 8)
        assert error_of(module, backend.as_argument(y), cache=cache).startswith(f"{wanted}: rows of (")


@pytest.mark.parametrize("name", [*NAMES, *MODERN])
def test_an_argument_of_another_kind_is_named(backend, name):
    module, x = make_example(backend, name) if name in MODERN else (make(backend, name), draw(2, 5, 4))
    x, call = backend.as_argument(x), getattr(module, "forward", module)
    options = {"context": x} if name == "CrossAttention" else {}
    message = error_of(module, None)
    assert message.startswith("x must be a ")
    assert message.endswith(", got NoneType")
    if "attention_mask" in inspect.signature(call).parameters:
        message = error_of(module, x, attention_mask="mask", **options)
        assert message == "a mask must be an attn_bridge.masks description or a bool array, got str"
    if "positions" in inspect.signature(call).parameters and name not in RECURRENT:
        message = error_of(module, x, positions="first")
        assert message.startswith("positions must be a ")
        assert message.endswith(", got str")


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_an_operand_of_another_kind_is_named(backend, name):
    query = backend.as_argument(draw(1, 4, 2, 8))
    operands = {"query": query, "key": query, "value": query, name: object()}
    message = error_of(backend.package.functional.dot_product_attention, **operands)
    assert message.startswith(f"{name} must be a ")
    assert message.endswith(", got object")


@cover.some("name", list(MODERN), [name for name in MODERN if name not in ALIKE])
def test_a_mask_may_be_nested_lists(backend, name):
    module, x = make_example(backend, name)
    x = backend.as_argument(x)
    options = {"context": x} if name == "CrossAttention" else {}
    call = functools.partial(module, x, **options)
    padding = PADDING[:, ::-1].copy()  # its second row is padded on the left, which moves positions
    found, wanted = (call(attention_mask=mask) for mask in (padding.tolist(), backend.as_argument(padding)))
    assert bool((found == wanted).all())
