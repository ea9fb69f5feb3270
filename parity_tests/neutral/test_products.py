"""The rows of products that `make test` runs."""

from __future__ import annotations

import itertools

import pytest

from .. import costs, products


def test_of_a_product_each_value_runs_and_meets_several_of_the_other_axis():
    product = [{"first": first, "second": second} for first in range(6) for second in range(2)]
    kept = [product[number] for number in products.cover(product)]
    assert len(kept) == 6
    assert {row["first"] for row in kept} == set(range(6))
    assert [sum(row["second"] == second for row in kept) for second in range(2)] == [3, 3]


def test_each_framework_has_a_cover():
    values = itertools.product(range(2), range(3), range(3))
    product = [{"side": side, "name": name, "mode": mode} for side, name, mode in values]
    kept = [product[number] for number in products.cover(product)]
    assert {(row["side"], row["name"]) for row in kept} == {(side, name) for side in range(2) for name in range(3)}
    assert len(kept) == 6


@pytest.mark.parametrize("cases", [[], [{"a": 0, "b": 0}], [{"a": n, "b": 0} for n in range(4)]], ids=len)
def test_of_a_list_all_rows_run(cases):
    assert products.cover(cases) == set(range(len(cases)))


@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize(("one", "two"), [(1, 2), (2, 2), (1, 1)])
def test_arguments_of_a_list_of_cases_are_one_axis(request, one, two, letter):
    assert products.values_of(request.node) == {"letter": (id(letter),), "one,two": (id(one), id(two))}


class Item:
    """The part of a test that `products.mark` reads."""

    def __init__(self, nodeid, **params):
        self.nodeid, self.params, self.marks = nodeid, params, []

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(("seconds", "count"), [(60.0, 3), (0.01, 9), (None, 3)], ids=["dear", "cheap", "unknown"])
def test_the_rest_of_a_product_is_full_where_its_file_is_not_cheap(seconds, count, monkeypatch):
    monkeypatch.setattr(costs, "stored", lambda: {} if seconds is None else {"tests/x.py": seconds})
    monkeypatch.setattr(products, "values_of", lambda item: item.params)
    rows = [Item(f"tests/x.py::f[{one}-{two}]", one=one, two=two) for one in range(3) for two in range(3)]
    plain = Item("tests/x.py::g")
    products.mark([*rows, plain])
    assert sum(not item.marks for item in rows) == count
    assert plain.marks == []
