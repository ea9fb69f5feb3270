"""Parameters without a counterpart are refused and listed."""

from __future__ import annotations

import re

import pytest

from attn_bridge import WeightsMismatchError
from attn_parity.pairing import leftovers, propose, suited, whole

from .parameters import parameters


def test_up_to_six_numbers_of_a_name_become_letters():
    assert leftovers._lettered("a.0.1.2.3.4.5.b") == "a.{i}.{j}.{k}.{l}.{m}.{n}.b"
    assert leftovers._lettered("a.0.1.2.3.4.5.6.b") == "a.0.1.2.3.4.5.6.b"


def test_everything_without_a_counterpart_is_listed():
    ours = parameters({"a.weight": ((4, 4), "Linear"), "b.weight": ((5, 4), "Linear"), "c.bias": ((3,), "Linear")})
    theirs = parameters({"a.kernel": ((4, 4), "Linear"), "d.kernel": ((4, 6), "Linear"), "e": ((2,), "Own")})
    with pytest.raises(WeightsMismatchError) as caught:
        propose(ours, theirs)
    assert caught.value.missing == [
        "d.kernel (4, 6) (Flax, no torch parameter left for it)",
        "e (2,) (Flax, no torch parameter left for it)",
    ]
    assert caught.value.unexpected == [
        "b.weight (5, 4) (torch, no Flax parameter left for it)",
        "c.bias (3,) (torch, no Flax parameter left for it)",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "left"),
    [
        (
            {"a.weight": ((4, 4), "Linear"), "b.weight": ((4, 4), "Linear")},
            {"a.kernel": ((4, 4), "Linear")},
            "b.weight",
        ),
        ({"a.weight": ((4, 4), "Linear")}, {"a.kernel": ((4, 4), "Linear"), "z": ((1,), "Own")}, "z"),
        ({"a.weight": ((4, 3), "Linear")}, {"a.kernel": ((4, 3), "Dropout")}, None),
        ({}, {"z": ((1,), "Own")}, "z"),
    ],
)
def test_differing_parameter_counts_are_refused(ours, theirs, left):
    if left is None:  # a matrix that lies the other way round than kernels do is still one
        (row,) = propose(parameters(ours), parameters(theirs)).rows()
        assert row.pattern == "... -> ..."
        return
    with pytest.raises(WeightsMismatchError, match=re.escape(f"{left} (")):
        propose(parameters(ours), parameters(theirs))


def test_labels_name_the_sides():
    with pytest.raises(WeightsMismatchError, match=re.escape("a (2,) (first, no second parameter left for it)")):
        propose(parameters({"a": ((2,), "")}, "torch"), {}, labels=("first", "second"))
    one, two = parameters({"fc.weight": ((4, 3), "Linear")}), parameters({"fc.kernel": ((4, 3), "Linear")})
    with pytest.raises(
        WeightsMismatchError, match=re.escape("fc.weight is (4, 3) in torch and fc.kernel is (4, 3) in Flax")
    ):
        propose(one, two)


def test_vectors_of_a_parametrization_suit_those_of_their_layer():
    """The second layer's ``v`` is as long as the first one's ``u``: only names tell them apart."""
    sizes = {"u": (8, 1), "v": (5, 8)}
    held = {f"l{i + 1}.parametrizations.weight.0._{w}": ((some[i],), "") for w, some in sizes.items() for i in range(2)}
    wanted = {f"l{i + 1}.{w}": ((some[i],), "") for w, some in sizes.items() for i in range(2)}
    first, second = parameters(held, "torch"), parameters(wanted, "flax")
    sides = [[whole(name, one) for name, one in side.items()] for side in (first, second)]
    assert {(one.first.name, one.second.name, one.is_named) for one in suited(*sides)} == {
        (f"l{i}.parametrizations.weight.0._{w}", f"l{i}.{w}", True) for w in "uv" for i in (1, 2)
    }
