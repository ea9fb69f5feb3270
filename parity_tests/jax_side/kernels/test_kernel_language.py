"""The language of the kernels: what it computes, and the mistakes that it does not let pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attn_kernels.compiler import compiling
from attn_kernels.compiler.language import WORD, Array, Code, Value, function, routine


def compute(write: Callable[..., Any], *numbers: int) -> int:
    """Return what a function of words gives back once it is compiled."""
    module = compiling.module("test")
    code = Code(function(module, "test", [WORD] * len(numbers), WORD))
    code.ret(write(code, *code.arguments))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(numbers))
    return int(kind(compiling.address_of(module, "test"))(*numbers))


def test_words_are_computed_as_python_computes_them():
    for one, two in ((7, 3), (64, 8), (5, 9)):
        assert compute(lambda code, x, y: x * y + x // y - y % x + (x << 2) + (x >> 1) + 3 + (x ^ y), one, two) == (
            one * two + one // two - two % one + (one << 2) + (one >> 1) + 3 + (one ^ two)
        )
        assert compute(
            lambda code, x, y: code.choose((x < y) & (y >= 4), code.least(x, y), code.largest(x, y)), one, two
        ) == (min(one, two) if one < two and two >= 4 else max(one, two))


def test_loops_are_those_of_range():
    def sum_of(code: Code, start: Value, stop: Value, step: Value) -> Value:
        total = code.variable(0)
        with code.loop(start, stop, step) as i:
            total.set(total.get() * 3 + i)
        return total.get()

    for numbers in ((0, 5, 1), (2, 11, 4), (3, 3, 1), (7, 2, 2)):
        want = 0
        for i in range(*numbers):
            want = want * 3 + i
        assert compute(sum_of, *numbers) == want


def test_repeat_ends_where_its_condition_holds():
    def halvings(code: Code, x: Value) -> Value:
        count, rest = code.variable(0), code.variable(x)
        with code.repeat() as leave_if:
            leave_if(rest.get() <= 1)
            rest.set(rest.get() // 2)
            count.set(count.get() + 1)
        return count.get()

    assert [compute(halvings, x) for x in (1, 2, 9, 1024)] == [0, 1, 3, 10]


def test_one_of_two_ways_is_taken():
    def way(code: Code, x: Value) -> Value:
        result = code.variable(0)
        with code.either(x > 3) as (yes, no):
            with yes:
                result.set(x * 10)
            with no, code.when(x == 2):
                result.set(0 - x)
        return result.get()

    assert [compute(way, x) for x in (1, 2, 3, 4)] == [0, -2, 0, 40]


def test_a_routine_is_one_for_each_of_its_keywords():
    @routine
    def store(code: Code, target: Value, x: Value, *, one: int, two: int) -> None:
        Array(code, target, WORD)[0] = x * one + two

    def both(code: Code, x: Value) -> Value:
        room = code.stack(2)
        store(code, room, x, one=1, two=2)
        store(code, room.at(1), x, two=1, one=2)
        return room[0] * 1000 + room[1]

    assert compute(both, 5) == 7011


def closes_over(code: Code, x: Value) -> None:
    @routine
    def store(inner: Code, target: Value) -> None:
        Array(inner, target, WORD)[0] = x

    store(code, code.stack(1))


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Code, Value], Any]]] = {
    "if": (TypeError, "known when it runs", lambda code, x: 1 if x == 3 else 2),
    "min": (TypeError, "known when it runs", lambda code, x: min(x, 9)),
    "chained": (TypeError, "known when it runs", lambda code, x: 0 < x < 5),
    "in": (TypeError, "known when it runs", lambda code, x: x in (1, 2)),
    "word in floats": (TypeError, "expected float", lambda code, x: Array(code, x).__setitem__(0, x)),
    "0 in floats": (TypeError, "float takes float, got 0", lambda code, x: Array(code, x).__setitem__(0, 0)),
    "float in words": (TypeError, "i64 takes int, got 1.5", lambda code, x: x + 1.5),
    "None": (TypeError, "i64 takes int, got None", lambda code, x: x + None),
    "true division": (TypeError, "has not got this operator", lambda code, x: x / 2),
    "of another function": (TypeError, "of another", closes_over),
    "unknown count": (ValueError, "nobody said", lambda code, x: Array(code, x).count),
    "iteration": (TypeError, "not iterable", lambda code, x: list(Array(code, x))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_do_not_pass(name):
    kind, message, write = MISTAKES[name]
    with pytest.raises(kind, match=message):
        compute(write, 3)


def test_floats_that_are_none_compare_as_in_python():
    numbers = np.asarray([1.0, np.nan], np.float32)

    def compare(code: Code, address: Value) -> Value:
        one, none = Array(code, address)[0], Array(code, address)[1]
        bits = code.value(0)
        for truth in (one < none, one > none, one == none, none == none, none != none, one <= 1.0, one != 1.0):
            bits = bits * 2 + code.choose(truth, 1, 0)
        return bits

    assert compute(compare, numbers.ctypes.data) == 0b0000110
