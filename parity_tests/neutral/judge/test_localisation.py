"""Localisation without a framework: which array is which, which submodule is which, and the code between them."""

from __future__ import annotations

import types

import numpy as np
import pytest

from attn_parity.localisation import search
from attn_parity.localisation.between import PairedCall, calls_inside, located
from attn_parity.localisation.leaves import (
    fed_alike,
    got_apart,
    match_by_place,
    match_leaves,
    other_layouts,
    whole_numbers,
)
from attn_parity.localisation.sides import Sides
from attn_parity.localisation.trials.weighing import explained
from attn_parity.matching.submodule_pairs import pair_modules
from attn_parity.sides.subject import Arguments, Call, ModuleFailedError, Run, Submodule
from attn_parity.verdict.measures import TABLE_LIMIT

RANDOM = np.random.default_rng(0)


def draw(*shape):
    return RANDOM.normal(size=shape)


def test_no_difference_is_excused_where_a_pair_cannot_run_alone(monkeypatch):
    def fail(*arguments):
        raise ModuleFailedError("no input")

    monkeypatch.setattr(search, "rounding", fail)
    node = types.SimpleNamespace(rounding=None, calls=[(None, None)], paths={})
    assert search._Search._rounding(types.SimpleNamespace(runner=object(), sides=None), node) == 0.0


@pytest.mark.parametrize(
    ("error", "by_tables", "is_at_fault"),
    [
        (None, 0.0, False),
        (1e-9, 0.0, False),
        (1e-7, 0.0, True),
        (1e-7, 2e-7, False),
        (2 * TABLE_LIMIT, 1.0, True),
    ],
)
def test_a_pair_is_at_fault_beyond_rounding_and_what_its_tables_explain(error, by_tables, is_at_fault):
    node = types.SimpleNamespace(error=lambda direction: error)
    searched = types.SimpleNamespace(aim="meaning", limits={"forward": 1e-8}, runner=None, root=None)
    searched._limit_of = lambda node, direction: by_tables
    assert search._Search._guilty(searched, node, "forward") is is_at_fault


# ---- arrays


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((2, 3, 4), lambda x: x.transpose(1, 0, 2)),
        ((2, 3, 4, 5), lambda x: x.transpose(0, 2, 1, 3)),
        ((2, 3, 20), lambda x: x.reshape(2, 3, 4, 5)),
        ((2, 3, 20), lambda x: x.reshape(2, 3, 4, 5).transpose(0, 2, 1, 3)),
        ((2, 3, 4, 5), lambda x: x.transpose(0, 2, 1, 3).reshape(2, 3, 20)),
        ((2, 3, 4), lambda x: x.transpose(1, 0, 2).reshape(6, 4)),
        ((1, 3, 4), lambda x: x[0]),
        ((4, 4), lambda x: x.T),
    ],
)
def test_an_array_is_found_whatever_the_order_of_its_axes(shape, turned):
    x = draw(*shape)
    y = turned(x)
    (group,) = match_leaves([np.arange(3), x], [y])
    assert (group.first, group.second) == ((1,), (0,))
    np.testing.assert_array_equal(group.value("second", [y]), x)
    np.testing.assert_array_equal(group.given("second", x), y)


def test_arrays_that_fit_none_by_shape_are_left_out():
    assert match_leaves([draw(2, 3)], [draw(3, 3), draw(7)]) == []
    assert match_leaves([draw(2, 6)], [draw(3, 4)]) == [], "the same size is no evidence"
    assert match_leaves([], [draw(2)]) == []


@pytest.mark.parametrize(("shapes", "axes"), [(((6, 4, 4), (2, 3, 4, 4)), (0, 1, 3, 2)), (((4, 4), (2, 2, 4)), None)])
def test_axes_may_be_exchanged_beside_merged_ones(shapes, axes):
    """Channels stand before or after the positions, whether or not rows are merged; merged axes are split in order."""
    both = [[draw(*shape)] for shape in shapes]
    layouts = other_layouts(*both, match_leaves(*both))
    assert {group.turn.axes for groups in layouts for group in groups} >= ({axes} if axes else set())
    assert all(group.turn.keeps_neighbours for groups in layouts for group in groups)


@pytest.mark.parametrize(
    ("change", "is_apart"),
    [(lambda x: x, False), (lambda x: x[:, ::-1], True), (lambda x: x + 1e-3, True)],
    ids=["the same", "channels exchanged", "other numbers"],
)
@pytest.mark.parametrize("holds", ["a border", "an image more", "a channel more"])
def test_inputs_of_other_shapes_are_the_same_if_one_holds_the_other(holds, change, is_apart):
    x = draw(2, 3, 4, 4)
    around = {
        "a border": np.pad(change(x), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect").transpose(0, 2, 3, 1),
        "an image more": np.concatenate([change(x), draw(1, 3, 4, 4)]),
        "a channel more": np.concatenate([draw(2, 1, 4, 4), change(x)], 1),
    }
    calls = {
        side: Call("conv", 0, 0, Arguments((given,)), [], [])
        for side, given in (("first", x), ("second", around[holds]))
    }
    assert got_apart(calls, []) is is_apart


def test_masks_of_other_encodings_do_not_take_each_others_place():
    x, seen = draw(2, 3), np.tri(3, dtype=np.float32)
    added = np.where(seen == 1, 0.0, np.finfo(np.float32).min)
    groups = match_leaves([x, added], [seen, x])
    assert [(group.first, group.second) for group in groups] == [((0,), (1,))]
    assert len(match_by_place(Arguments((x, added)), Arguments((x, seen)))) == 1
    assert len(match_leaves([added], [added.T])) == 1, "another mask of the same encoding is a fault"
    assert len(match_leaves([added], [np.zeros((3, 3))])) == 1, "a mask that hides nothing, too"


def test_roughly_equal_numbers_are_matched_before_mere_shapes():
    one, two = draw(3, 3), draw(3, 3)
    groups = match_leaves([one, two], [two * 1.01, one.T * 1.01])
    assert [(group.first, group.second) for group in groups] == [((0,), (1,)), ((1,), (0,))]


def test_gradients_of_a_repeated_argument_are_summed():
    x = draw(2, 3)
    (group,) = match_leaves([x, x, x], [x])
    assert (group.first, group.second) == ((0, 1, 2), (0,))
    np.testing.assert_allclose(group.total("first", [x, x, None]), 2 * x)
    assert group.total("second", [None]) is None


def test_arrays_are_matched_by_keyword_then_by_order():
    x, y = draw(2), draw(2)
    groups = match_by_place(Arguments((), {"key": x, "query": y}), Arguments((), {"query": x, "key": y}))
    assert [(one.first, one.second) for one in groups] == [((0,), (1,)), ((1,), (0,))]
    assert match_by_place(Arguments((x,)), Arguments((x, y))) is None
    mask = np.array([True, False])
    assert whole_numbers(Arguments((x, mask)), Arguments((~mask, x))) == [(1, 0)]
    assert whole_numbers(Arguments((mask,)), Arguments((mask.copy(),))) == []


def test_both_sides_are_fed_the_side_with_more_rows():
    few, many = draw(3, 4), draw(2, 5, 4)
    calls = {"first": call("m", 0, few, few[:, :2], few[:, :2]), "second": call("m", 0, many, many[..., :2])}
    found = fed_alike(calls)
    assert found["second"] is calls["second"]
    np.testing.assert_array_equal(found["first"].arguments.leaves[0], many)
    np.testing.assert_array_equal(found["first"].outputs[0], many[..., :2])
    assert fed_alike(dict.fromkeys(calls, calls["second"])) is None, "they are alike"
    assert fed_alike({**calls, "first": call("m", 0, draw(3, 5), draw(3, 2))}) is None, "other channels"


# ---- submodules


def paired(first, second, shared, sizes=()):
    """Pair modules ("path:Class") given the pairs of paths that hold each parameter, and sizes of what some return."""
    sides = [[Submodule("", "M"), *(Submodule(*one.split(":")) for one in side)] for side in (first, second)]
    matches = [
        types.SimpleNamespace(
            **{
                side: types.SimpleNamespace(parameter=types.SimpleNamespace(path=path))
                for side, path in zip(("first", "second"), paths, strict=True)
            }
        )
        for paths in shared
    ]
    called = [{one.path: [dict(sizes).get(one.path, 4)] for one in side} for side in sides]
    return pair_modules(matches, *sides, {"first": called[0], "second": called[1]})


def test_modules_without_parameters_are_paired_by_name_then_kind():
    first = ["a:Linear", "act:GELU", "drop:Dropout", "one:Tanh", "x:Custom"]
    second = ["b:Dense", "drop:Dropout", "activation:NewGELUActivation", "y:Custom"]
    pairs = paired(first, second, [("a", "b")])
    assert pairs == {"": "", "a": "b", "drop": "drop"}, "which of two activations it is can't be told"
    pairs = paired(first[:3], second, [("a", "b")])
    assert pairs == {"": "", "a": "b", "drop": "drop", "act": "activation"}


def test_wrappers_are_paired_with_what_is_like_them():
    pairs = paired(["p:Sequential", "p.0:Linear"], ["proj:Linear"], [("p.0", "proj")])
    assert pairs == {"": "", "p.0": "proj"}
    pairs = paired(["a:A", "a.fc:Linear"], ["b:B", "b.x:Linear"], [("a.fc", "b.x")])
    assert pairs == {"": "", "a": "b", "a.fc": "b.x"}


def test_modules_without_parameters_are_paired_through_wrappers():
    """A layer in a module that calls it has its norms without weights one level below the other side's."""
    first = ["layer:Layer", "layer.norm:OlmoLayerNorm", "layer.fc:Linear", "layer.post:OlmoLayerNorm"]
    second = ["norm1:LayerNorm", "norm2:LayerNorm", "ff:Linear"]
    pairs = paired(first, second, [("layer.fc", "ff")])
    assert pairs == {"": "", "layer.fc": "ff", "layer.norm": "norm1", "layer.post": "norm2"}
    assert paired([*first, "norm:LayerNorm"], second, [("layer.fc", "ff")]) == {"": "", "layer.fc": "ff"}, "which two?"
    other = ["layer:Layer", "layer.norm:Norm", "layer.fc:Linear", "layer.fc.act:GELU", "x:Linear"]
    pairs = paired(other, ["norm:Norm", "ff:Linear", "y:Linear"], [("layer.fc", "ff"), ("x", "y")])
    assert "layer.norm" not in pairs, "the layer holds less than the whole"


def test_nested_modules_of_equal_weights_are_paired_by_outputs():
    """A tied head has no weights of its own, so that the language model and the decoder in it hold the same."""
    first, second = ["lm:LM", "lm.model:Model", "lm.model.fc:Linear"], ["model:Model", "model.linear:Linear", "x:X"]
    shared = [("lm.model.fc", "model.linear"), ("lm.model", "model")]
    pairs = paired(first, second, shared, {"lm": 336, "model": 336, "lm.model": 224}.items())
    assert pairs == {"": "", "lm": "model", "lm.model.fc": "model.linear"}
    assert paired(first, second, shared)["lm.model"] == "model"


# ---- code between


def call(path, order, given, result, cotangent=None):
    return Call(path, 0, order, Arguments((given,)), [result], [cotangent])


def chain(faults=(), direction="forward"):
    """Return steps a, b, c in a row, with something else given to those in `faults`."""
    steps, x = [], draw(4)
    for order, path in enumerate("abc"):
        result, gradient = draw(4), draw(4)
        moved = 1.01 if path in faults else 1.0
        given, back = (x * moved, gradient) if direction == "forward" else (x, gradient * moved)
        second_result = result * moved if direction == "forward" else result
        calls = {
            "first": call(path, order, x, result, gradient),
            "second": call(path, order, given, second_result, back),
        }
        steps.append(PairedCall(path, calls))
        x = result * 2
    return steps


WHOLE = {side: call("", -1, np.ones(4), np.ones(4), np.ones(4)) for side in ("first", "second")}


def nothing(step):
    return {"first": [], "second": []}


def code_between(*arguments):
    """Return the first pair of paths between which the code at fault lies."""
    return next(iter(located(*arguments)[0]), None)


@pytest.mark.parametrize(
    ("direction", "faults", "between"),
    [
        ("forward", "abc", ("m", "a")),
        ("forward", "bc", ("a", "b")),
        ("forward", "c", ("b", "c")),
        ("forward", "", ("c", "m")),
        ("backward", "abc", ("c", "m")),
        ("backward", "ab", ("b", "c")),
        ("backward", "a", ("a", "b")),
    ],
)
def test_the_code_between_two_steps(direction, faults, between):
    steps = chain(faults, direction)
    assert code_between("m", steps, WHOLE, direction, 1e-11, nothing) == between


def test_nothing_is_located_without_comparable_calls():
    assert code_between("m", [], WHOLE, "forward", 1e-11, nothing) is None
    odd = {"first": call("a", 0, draw(4), draw(4)), "second": call("a", 0, draw(5), draw(5))}
    assert code_between("m", [PairedCall("a", odd)], WHOLE, "forward", 1e-11, nothing) is None
    assert code_between("m", chain("", "backward"), WHOLE, "backward", 1e-11, nothing) is None


@pytest.mark.parametrize(("moved", "between"), [(1.0, ("m.embed", "a")), (1.01, ("m", "a"))])
def test_an_embeddings_inputs_are_compared_by_its_outputs(moved, between):
    ids, result = np.arange(4), draw(4)
    calls = {"first": call("m.embed", -1, ids, result), "second": call("m.embed", -1, ids, result * moved)}
    assert code_between("m", [PairedCall("m.embed", calls), *chain("a")], WHOLE, "forward", 1e-11, nothing) == between


def test_a_backward_fault_before_the_first_step_is_located():
    def own(step):
        return {"first": [np.ones(4)], "second": [np.array([1.0, 2.0, 1.0, 3.0])]} if step is None else nothing(step)

    assert code_between("m", chain("", "backward"), WHOLE, "backward", 1e-11, own) == ("m", "a")


def test_nested_calls_are_found_by_their_order():
    calls = [
        call(path, order, draw(2), draw(2)) for order, path in enumerate(["m", "m.a", "rope", "m.b", "n", "m", "m.a"])
    ]
    assert [one.order for one in calls_inside(calls, "m", calls[0])] == [1, 2, 3]
    assert [one.order for one in calls_inside(calls, "m", calls[5])] == [6]
    assert len(calls_inside(calls, "", call("", -1, draw(2), draw(2)))) == 7


# ---- tables


class Tables:
    """Runs a module that adds a table to its input; one side's table can be moved."""

    def __init__(self, has_table):
        self.has_table = has_table

    def run(self, side, path, arguments, cotangents=None):
        return Run([arguments.leaves[0] + 1.0], ["0"], [cotangents[0]])

    def run_moved(self, side, path, arguments, cotangents, seed, kind="tables"):
        moved = side == "first" and self.has_table and kind == "tables"
        return Run([arguments.leaves[0] + 1.0 + 1e-7 * max(seed, 0) * moved], ["0"], [cotangents[0]], moved=int(moved))


@pytest.mark.parametrize(("has_table", "forward"), [(True, 4e-7 / 2), (False, 0.0)])
def test_tables_excuse_only_the_submodule_that_holds_them(has_table, forward):
    one = call("m", 0, np.ones(4), np.full(4, 2.0), np.ones(4))
    calls = {"first": one, "second": one}
    found = explained(Tables(has_table), Sides({}, None, {}, {}), {"first": "m", "second": "m"}, calls)
    assert found == {"forward": pytest.approx(forward), "backward": 0.0}
