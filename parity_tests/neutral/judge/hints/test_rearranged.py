"""Weights and axes in other orders: each order is tried once, and the change has the numbers of the order it names."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.hints.rearranged import exchanged, orders_of, reordered, reshapes

RANDOM = np.random.default_rng(2)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 7, 8, 24, 60])
def test_every_order_is_tried_once_and_the_own_one_never(size):
    orders = [tuple(order) for _, order in orders_of(size)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({tuple(range(size)), *orders}) == len(orders) + 1


def test_heads_and_groups_are_named_by_their_sizes():
    own, orders = np.arange(24), dict(orders_of(24))
    parts = own.reshape(3, 2, 4)
    assert np.array_equal(orders["as (3, 2, 4) transposed to (2, 3, 4)"], parts.swapaxes(0, 1).ravel())
    queries, key, value = np.split(own, [12, 18])
    groups = np.concatenate([one.reshape(2, -1) for one in (queries, key, value)], 1).ravel()
    assert np.array_equal(
        orders["from queries, keys and values to 2 groups of 2 queries, a key and a value of 3"], groups
    )


LAYERS = {
    f"h.{layer}.{name}.{end}": draw(*shape)
    for layer in range(2)
    for name in ("k", "q")
    for end, shape in {"kernel": (4, 6), "bias": (6,)}.items()
}


def test_modules_are_exchanged_in_all_layers_and_in_each():
    texts = [text for text, _ in exchanged(LAYERS)]
    assert texts[0] == "h.0 and h.1 exchanged"
    assert {"h.*.k and h.*.q exchanged", "h.1.k and h.1.q exchanged", "h.*.k.bias and h.*.q.bias exchanged"} <= {*texts}
    changed = dict(exchanged(LAYERS))["h.*.k.kernel and h.*.q.kernel exchanged"](LAYERS)
    assert changed["h.1.k.kernel"] is LAYERS["h.1.q.kernel"]
    assert changed["h.1.k.bias"] is LAYERS["h.1.k.bias"]


def test_three_modules_are_named_in_their_new_order():
    weights = {f"attn.{name}.w": draw(2, 2) for name in "qkvo"}
    changed = dict(exchanged(weights))["attn.q, attn.k, attn.v in the order attn.k, attn.v, attn.q"](weights)
    assert all(changed[f"attn.{name}.w"] is weights[f"attn.{of}.w"] for name, of in zip("qkvo", "kvqo", strict=True))


def test_modules_of_other_shapes_are_not_exchanged():
    assert not [*exchanged({"up.w": draw(2, 3), "down.w": draw(3, 2)})]


def test_an_axis_is_reordered_with_the_bias_and_without():
    ways = dict(reordered(LAYERS))
    text = "axis 1 of h.*.q.kernel and of h.*.q.bias as (2, 3) transposed to (3, 2)"
    order = np.arange(6).reshape(2, 3).T.ravel()
    changed = ways[text](LAYERS)
    assert np.array_equal(changed["h.1.q.kernel"], LAYERS["h.1.q.kernel"][:, order])
    assert np.array_equal(changed["h.0.q.bias"], LAYERS["h.0.q.bias"][order])
    alone = ways["axis 1 of h.1.q.kernel as (2, 3) transposed to (3, 2)"](LAYERS)
    assert alone["h.1.q.bias"] is LAYERS["h.1.q.bias"]


def test_the_axes_of_heads_are_joined():
    kernel = draw(4, 3, 2)
    changed = dict(reordered({"qkv": kernel}, joined=True))["axes 1 to 2 of qkv as (3, 2) transposed to (2, 3)"](
        {"qkv": kernel}
    )
    assert np.array_equal(changed["qkv"].reshape(4, 6), kernel.swapaxes(1, 2).reshape(4, 6))


def test_an_axis_is_split_in_every_order():
    x = draw(5, 24, 2)
    ways = dict(reshapes(x, (5, 2, 3, 4, 2)))
    assert len(ways) == 5
    parts = np.moveaxis(x.reshape(5, 3, 4, 2, 2), 3, 1)
    assert np.array_equal(ways["an axis of 24 split as (3, 4, 2), then transposed by (2, 0, 1)"], parts)


def test_axes_are_merged_in_every_order():
    x = draw(5, 2, 1, 3, 2)
    ((text, made),) = reshapes(x, (5, 6, 2))
    assert text == "axes (2, 3) transposed by (1, 0), then merged"
    assert np.array_equal(made, x.transpose(0, 3, 2, 1, 4).reshape(5, 6, 2))


@pytest.mark.parametrize("shape", [(5, 24), (120,), (4, 30), (5, 1, 24)])
def test_a_shape_without_split_axes_has_no_other_orders(shape):
    assert (len([*reshapes(draw(5, 24), shape)]) > 0) == (shape == (120,))
