"""The choice of rows that `make test` leaves out, and the probes that it rests on."""

from __future__ import annotations

import builtins
import itertools
from types import SimpleNamespace

import pytest

from .. import probes, rows

CODE = '''
def sign(x, names=()):
    """Return a word for a number."""
    if x < 0:
        return "negative"
    word = "zero" if x == 0 else "positive"
    for name in names:
        word += name
    return word if all(len(name) > x for name in names) and x or word else None
'''


@pytest.fixture
def traced(monkeypatch):
    """Return a function with probes, and what it ran."""
    blocks = probes.Blocks()
    monkeypatch.setattr(builtins, probes.PROBE, blocks.ran.add, raising=False)
    space: dict = {}
    exec(compile(probes.instrument(CODE, "sign.py", blocks), "sign.py", "exec"), space)
    return space["sign"], lambda: {blocks.names[number].removeprefix("sign.py:") for number in blocks.take()}


@pytest.mark.parametrize(("arguments", "result"), [((-1,), "negative"), ((0,), "zero"), ((1, ("ab",)), "positiveab")])
def test_probes_change_no_result_and_no_docstring(traced, arguments, result):
    sign, _ = traced
    assert sign(*arguments) == result
    assert sign.__doc__ == "Return a word for a number."


def test_each_branch_has_a_block(traced):
    sign, ran = traced
    sign(-1)
    assert ran() == {"3:4:function", "5:8:then"}
    sign(0)
    zero = ran()
    assert {"4:4:else", "6:11:then"} <= zero
    sign(1, ("ab",))
    assert {"6:33:else", "8:8:loop", "9:23:element"} <= ran() - zero


def row(name, ran, seconds=1.0, is_whole=True, **values):
    return rows.Row(name, seconds, frozenset(ran), values, is_whole)


def names(left_out):
    return [row.name for row in left_out]


def test_rows_that_alone_run_a_block_stay_and_the_dearest_of_others_goes():
    cases = [row("a", {1, 2}), row("b", {1, 2}, 2.0), row("c", {1, 2}), row("d", {1, 3})]
    assert names(rows.left_out(cases)) == ["b"]


def test_each_value_of_both_axes_of_a_product_stays():
    product = [row(f"{first}{second}", {1}, first=first, second=second) for first in range(5) for second in range(2)]
    kept = [case for case in product if case not in rows.left_out(product)]
    assert len(kept) == 5
    assert {case.values["first"] for case in kept} == set(range(5))
    assert {case.values["second"] for case in kept} == {0, 1}


def test_two_rows_of_a_list_run_each_block():
    cases = [row(str(index), {1}, case=index) for index in range(5)]
    assert len(rows.left_out(cases)) == 3


def test_cheap_rows_all_stay():
    assert rows.left_out([row(str(index), {1}, 0.1) for index in range(5)]) == []


def test_rows_that_probes_do_not_see_stay_and_replace_none():
    cases = [row("started", {1}, is_whole=False), *(row(str(index), {1}) for index in range(4))]
    assert names(rows.left_out(cases)) == ["2", "3"]


def test_of_a_product_each_value_runs_and_meets_several_of_the_other_axis():
    product = [{"first": first, "second": second} for first in range(6) for second in range(2)]
    kept = [product[number] for number in rows.cover(product)]
    assert len(kept) == 6
    assert {row["first"] for row in kept} == set(range(6))
    assert [sum(row["second"] == second for row in kept) for second in range(2)] == [3, 3]


def test_each_framework_has_a_cover():
    values = itertools.product(range(2), range(3), range(3))
    product = [{"side": side, "name": name, "mode": mode} for side, name, mode in values]
    kept = [product[number] for number in rows.cover(product)]
    assert {(row["side"], row["name"]) for row in kept} == {(side, name) for side in range(2) for name in range(3)}
    assert len(kept) == 6


@pytest.mark.parametrize("cases", [[], [{"a": 0, "b": 0}], [{"a": n, "b": 0} for n in range(4)]], ids=len)
def test_of_a_list_all_rows_run(cases):
    assert rows.cover(cases) == set(range(len(cases)))


@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize(("one", "two"), [(1, 2), (2, 2), (1, 1)])
def test_arguments_of_a_list_of_cases_are_one_axis(request, one, two, letter):
    assert rows.values_of(request.node) == {"letter": (id(letter),), "one,two": (id(one), id(two))}


class Item:
    """The part of a test that `rows.mark` reads of one that was measured."""

    def __init__(self, nodeid):
        self.nodeid, self.marks = nodeid, []

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("ids", "marked"),
    [
        (["f[a]", "f[b]", "f[new]", "g[a]", "h"], ["f[a]", "f[b]"]),
        (["f[a]", "f[b]"], []),
    ],
    ids=["others", "none"],
)
def test_stored_rows_are_marked_where_another_row_of_the_test_runs(ids, marked):
    items = [Item(nodeid) for nodeid in ids]
    rows.mark(items, {"f": ["a", "b", "gone"]})
    assert [item.nodeid for item in items if item.get_closest_marker("full")] == marked


def test_the_recorder_sees_what_failed_and_what_started_a_process():
    recorder = rows.Recorder(probes.Blocks())
    outcomes = {
        "passed": lambda: None,
        "failed": lambda: recorder.pytest_runtest_logreport(SimpleNamespace(passed=False)),
    }
    outcomes["started"] = lambda: recorder._audit("subprocess.Popen", ())
    for name, act in outcomes.items():
        protocol = recorder.pytest_runtest_protocol(Item(f"f[{name}]"))
        next(protocol)
        act()
        with pytest.raises(StopIteration):
            next(protocol)
    assert [(row.name, row.is_whole) for row in recorder.rows["f"]] == [
        ("passed", True),
        ("failed", False),
        ("started", False),
    ]


def test_what_is_stored_is_there():
    for lane in ("neutral", "torch", "jax", "both"):
        for test in rows.stored(lane):
            path, _, name = test.partition("::")
            text = (rows.ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name.rpartition('::')[2]}(" in text
