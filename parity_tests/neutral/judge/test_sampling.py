"""Which samples a pair is judged on, and their numbers: a matter of work and seeds, of nothing else."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest

import attn_parity
from attn_parity import input_files
from attn_parity.pair import work_of
from attn_parity.samples import calls, sampling
from attn_parity.samples.sampling import FIRST, LARGE, QUICK, Effort, Planned, Sample
from attn_parity.sides.modes import called_with, contradicted, given_modes, mode_arguments
from attn_parity.sides.subject import Arguments, ModuleFailedError, SideWeight

JUDGE = Path(attn_parity.__file__).parent
TRUNK = ("compare", "hints", "localisation", "matching", "pairing", "results", "samples", "sides", "verdict")
"""Rooms that a comparison passes through."""

SMALL, MEDIUM, BIG = Effort(1e3), Effort(1e10), Effort(1e12)
EFFORTS = {"small": SMALL, "medium": MEDIUM, "big": BIG}


# ---- plans


def test_a_small_pair_gets_all_seeds_hard_samples_and_copies():
    plan = SMALL.first_look(4, 10, transfer=True)
    assert plan[0] == FIRST == Planned("held", 0, 0, -1)
    assert [one.seed for one in plan if one.kind == "own" and not one.copy] == [10, 11, 12, 13]
    assert [one.kind for one in plan if "stress" in one.kind] == ["own stress", "held stress"]
    assert sorted(one.copy for one in plan if "stress" not in one.kind) == sorted([0, 1, 2] * 5)
    again = SMALL.second_look(4, 10, transfer=True)
    assert len(again) == 4 * 4 * 3
    assert {one.kind for one in again} == {"held", "own"}


def test_a_medium_pair_gets_three_seeds_and_no_copies():
    plan = MEDIUM.first_look(100, 0, transfer=True)
    assert [one.kind for one in plan] == ["held", "own", "own stress", "own"]
    assert not any(one.copy for one in [*plan, *MEDIUM.second_look(100, 0, transfer=True)])
    assert len(MEDIUM.second_look(100, 0, transfer=True)) == 4
    assert MEDIUM.seeds(2) == 2


def test_a_large_pair_gets_one_drawn_and_one_given_sample():
    assert BIG.first_look(9, 5, transfer=True) == [Planned("own", 1, 0, 5), FIRST]
    assert [one.kind for one in BIG.second_look(9, 5, transfer=True)] == ["own"]


@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
@pytest.mark.parametrize("transfer", [True, False])
def test_no_sample_is_planned_twice(effort, transfer):
    first, second = (look(3, 0, transfer=transfer) for look in (effort.first_look, effort.second_look))
    assert len(set(first + second)) == len(first) + len(second)
    assert not {one.seed for one in first} & {one.seed for one in second}
    assert not {one.group for one in first} & {one.group for one in second}


@pytest.mark.parametrize("effort", [SMALL, MEDIUM], ids=["small", "medium"])
def test_untransferred_weights_are_judged_once(effort):
    plan = effort.first_look(4, 0, transfer=False) + effort.second_look(4, 0, transfer=False)
    assert [one for one in plan if one.kind.startswith("held")] == [FIRST]


def test_work_limits_are_inclusive():
    assert (Effort(QUICK).quick, Effort(QUICK).large) == (True, False)
    assert not Effort(np.nextafter(QUICK, np.inf)).quick
    assert not Effort(LARGE).large
    assert Effort(np.nextafter(LARGE, np.inf)).large


@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_another_first_seed_shifts_every_drawn_sample_and_nothing_else(effort, seeds):
    def plan(first):
        looks = effort.first_look(seeds, first, transfer=True) + effort.second_look(seeds, first, transfer=True)
        return [one._replace(seed=one.seed - first) if one.seed >= 0 else one for one in looks]

    assert plan(0) == plan(17)


def test_work_is_six_times_parameters_times_rows():
    weights = {"w": np.zeros((3, 5), np.float32), "b": np.zeros(5, np.float32)}
    cases = [
        ((np.zeros((2, 70, 3), np.float32),), 140),
        ((np.arange(800).reshape(2, 400),), 800),  # every token is a row
        ((np.zeros((2, 70, 3), np.float32), np.ones((500, 500), bool)), 140),
        ((np.zeros((2, 70, 3), np.float32), np.ones((500, 500), np.int64)), 140),  # zeros and ones are a mask
        ((np.zeros((2, 7, 3), np.float32),), 128),  # what is done to weights beside the run
        ((np.zeros((), np.float32),), 128),
    ]
    for args, rows in cases:
        assert work_of(weights, Arguments(args)) == 6 * 20 * rows


# ---- no clock

CLOCKS = {"time", "datetime", "timeit", "resource", "psutil"}


def _imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


def test_only_the_driver_reads_a_clock():
    paths = [path for room in TRUNK for path in (JUDGE / room).rglob("*.py")]
    assert len(paths) > 60
    assert [path for path in paths if _imported(path) & CLOCKS] == [JUDGE / "compare" / "driver.py"]
    tree = ast.parse((JUDGE / "compare" / "driver.py").read_text(encoding="utf-8"))
    calls_of_time = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    ]
    inside = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "compare")
    assert len(calls_of_time) == 2  # when it began, and how long it took
    assert all(inside.lineno <= node.lineno <= (inside.end_lineno or 0) for node in calls_of_time)


# ---- numbers

X = np.random.default_rng(0).normal(2.0, 3.0, size=(40, 50)).astype(np.float32)
IDS = np.array([[5, 5, 7, 0], [9, 2, 2, 11]])
MASK = np.array([[True, False, True, True]])


def drawn(*args, seed=(0,), **options):
    return sampling.draw_inputs(Arguments(args), seed, **options).leaves


def test_drawn_inputs_keep_mean_spread_dtype_and_sign():
    (one,) = drawn(X)
    assert (one.shape, one.dtype) == (X.shape, X.dtype)
    assert not np.isin(one, X).any()
    assert (abs(one.mean() - 2.0), abs(one.std() - 3.0)) < (0.3, 0.3)
    (positive,) = drawn(np.abs(X))
    assert (positive >= 0).all()


def test_whole_numbers_and_masks_are_not_varied():
    blocked = np.where(MASK, 0.0, -1e9).astype(np.float32)
    for seed in range(3):
        for stress in (False, True):
            found = drawn(X, IDS, MASK, blocked, seed=(seed,), stress=stress)
            assert all(np.array_equal(one, two) for one, two in zip(found[1:], (IDS, MASK, blocked), strict=True))
            assert not np.array_equal(found[0], X)


def test_vary_shuffles_whole_numbers_and_draws_masks():
    zeros_and_ones = np.repeat(np.array([0.0, 1.0], np.float32), 8).reshape(2, 8)
    found = drawn(X, IDS, MASK, zeros_and_ones, vary={1, 2, 3})
    assert sorted(found[1].ravel()) == sorted(IDS.ravel())  # the same ids: none is out of the vocabulary
    assert (found[1].dtype, found[2].dtype) == (IDS.dtype, MASK.dtype)
    assert found[2].sum() == MASK.sum()
    assert not np.isin(found[3], (0.0, 1.0)).any()
    seeds = [drawn(IDS, vary={0}, seed=(seed,))[0].tolist() for seed in range(8)]
    assert len({str(one) for one in seeds}) > 4


def test_fixed_holds_an_input_through_draws_and_moves():
    call = Arguments((X, X + 1))
    assert np.array_equal(drawn(X, X + 1, fixed={1})[1], X + 1)
    moved = sampling.moved_inputs(call, (0,), fixed=frozenset({1})).leaves
    assert np.array_equal(moved[1], X + 1)
    assert 0 < np.abs(moved[0] - X).max() < 0.1


def test_hard_inputs_differ_in_size_by_two_orders_of_magnitude():
    (one,) = drawn(np.random.default_rng(1).normal(size=(400, 64)).astype(np.float32), stress=True)
    sizes = one.std(-1)
    assert sizes.max() > 30 * sizes.min()
    assert (np.abs(one.mean(-1)) > 3 * sizes).any()  # nearly constant, and far from zero


def test_drawn_weights_follow_from_names_and_seeds():
    names = {"a.bias": (64,), "a.scale": (64,), "b.bias": (64,)}
    parameters = {name: SideWeight(shape, "float32", "LayerNorm", "a") for name, shape in names.items()}
    parameters["n"] = SideWeight((3,), "int64", "Net", "")
    held = {name: np.zeros(one.shape, one.dtype) for name, one in parameters.items()}
    one, again = (sampling.draw_weights(parameters, held, (0, 1)) for _ in range(2))
    other = sampling.draw_weights(parameters, held, (1, 1))
    assert np.array_equal(one["n"], held["n"])
    for name in names:
        assert np.array_equal(one[name], again[name])
        assert not np.isin(one[name], other[name]).any()
        assert not np.isin(np.abs(one[name]), (0.0, 1.0)).any()
        assert not any(np.isin(one[name], one[two]).any() for two in names if two != name)


def test_state_without_negative_numbers_is_drawn_without_any():
    names = {"var": np.ones(64), "count": np.asarray(3.0), "mean": np.zeros(64), "offset": np.asarray([-1.0, 2.0] * 32)}
    parameters = {name: SideWeight(one.shape, "float64", "Net", "", role="state") for name, one in names.items()}
    drawn = sampling.draw_weights(parameters, names, (0, 1))
    assert all(isinstance(one, np.ndarray) and one.shape == names[name].shape for name, one in drawn.items())
    assert [name for name, one in drawn.items() if (one < 0).any()] == ["mean", "offset"]


def test_low_precision_samples_are_rounded_once_for_both_sides():
    sample = Sample({"w": X, "n": IDS}, {side: Arguments((X, IDS)) for side in ("first", "second")}, FIRST)
    assert sampling.rounded(sample, None) is sample
    low = sampling.rounded(sample, "float16")
    assert low.weights["w"].dtype == np.float16
    assert low.weights["n"] is IDS
    for call in low.arguments.values():
        assert [one.dtype for one in call.leaves] == [np.float16, IDS.dtype]
        assert np.array_equal(call.leaves[0], X.astype(np.float16))


def test_cotangents_follow_from_the_sample_and_the_runs_dtype():
    outputs = [("[0]", (3, 2), "float32"), ("[1]", (4,), "int64")]
    one, again, other = (sampling.cotangents(outputs, seed, "float16") for seed in ((0, 1, 0), (0, 1, 0), (0, 1, 1)))
    assert one[0].dtype == np.float16
    assert np.array_equal(one[0], again[0])
    assert not np.array_equal(one[0], other[0])
    assert sampling.cotangents(outputs, (0, 1, 0), None)[0].dtype == np.float32


@pytest.mark.parametrize(
    ("planned", "title"),
    [
        (FIRST, "your weights"),
        (Planned("own", 1, 0, 3), "random weights, seed 3"),
        (Planned("own stress", 1000, 0, 0), "random weights, hard inputs, seed 0"),
        (Planned("held", 2003, 0, 7), "your weights, random inputs, seed 7"),
        (Planned("held stress", 1001, 0, 1), "your weights, hard inputs, seed 1"),
    ],
)
def test_a_sample_says_in_words_what_it_is_of(planned, title):
    assert Sample({}, {}, planned).title() == title


# ---- what fixed and vary name

CALL = Arguments((X, {"a": X, "b": (X, IDS)}), {"mask": MASK})


@pytest.mark.parametrize(
    ("names", "leaves"),
    [
        ([0], {0}),
        (1, {1, 2, 3}),
        ("x", {0}),
        (["rest"], {1, 2, 3}),
        (["mask", 0], {0, 4}),
        ((), set()),
    ],
)
def test_arguments_are_selected_by_position_or_name(names, leaves):
    assert calls.named_leaves("fixed", names, CALL, ["x", "rest"]) == leaves


@pytest.mark.parametrize("wrong", [2, "y", -1, ["x", "mas"]])
def test_an_unknown_argument_is_refused_with_the_known_ones(wrong):
    message = r"^vary \(.*\) must name one of the call's arrays: x, rest.*, mask$"
    with pytest.raises(ValueError, match=message) as caught:
        calls.named_leaves("vary", wrong, CALL, ["x", "rest"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [[True], [None], [1.0]])
def test_argument_names_must_be_integers_or_strings(wrong):
    with pytest.raises(TypeError, match="fixed must hold positions or names of arguments, got "):
        calls.named_leaves("fixed", wrong, CALL, ["x", "rest"])


def test_a_call_without_arrays_is_refused():
    with pytest.raises(ModuleFailedError, match="inputs must be an array"):
        calls.as_arguments({"a": 3})


def test_sampling_needs_no_framework():
    module = importlib.import_module("attn_parity.samples.sampling")
    assert not _imported(Path(module.__file__ or "")) & {"torch", "jax", "flax"}


# ---- arguments that switch modes


def test_a_bool_without_axes_is_a_python_bool(tmp_path):
    path = tmp_path / "call.npz"
    np.savez(path, x=np.arange(3.0), deterministic=np.array(False), mask=np.array([True, False]))
    call = input_files.read_npz(path)
    assert call.kwargs["deterministic"] is False
    assert call.plain([]) == ["deterministic"]
    assert calls.as_arguments({"x": np.arange(3.0), "train": np.True_}).kwargs["train"] is True
    assert input_files.write_npz(tmp_path / "again.npz", call)
    again = input_files.read_npz(tmp_path / "again.npz")
    assert again.kwargs["deterministic"] is False
    assert again.kwargs["mask"].tolist() == [True, False]


GIVEN = np.arange(3.0)


def flax_call(x, train: bool = False, *, deterministic: bool = True, training=None, mask=True):
    raise NotImplementedError


def test_bools_with_the_name_of_a_mode_switch_it():
    assert mode_arguments(flax_call) == {"train": False, "deterministic": True}
    assert mode_arguments(3) == {}


def test_only_defaults_of_the_other_mode_contradict():
    defaults = mode_arguments(flax_call)
    assert contradicted((), defaults, train=False) == {}
    assert contradicted((), defaults, train=True) == {"train": True, "deterministic": False}
    assert contradicted(("train",), defaults, train=True) == {"deterministic": False}
    assert contradicted((), {"train": True}, train=False) == {"train": False}


def test_given_modes_keep_their_position():
    names, defaults = ["x", "train"], mode_arguments(flax_call)
    call = Arguments((GIVEN, True), {"mask": False})
    assert given_modes(call, names, defaults) == {"train": True}
    changed = called_with(call, names, {"train": False, "deterministic": True})
    assert changed.args == (GIVEN, False)
    assert changed.kwargs == {"mask": False, "deterministic": True}


@pytest.mark.parametrize(
    ("name", "owner", "shape", "inner"),
    [
        ("a.weight", "Linear", (50, 400), 400),
        ("a.weight", "Conv1d", (50, 20, 20), 400),
        ("a.kernel", "Linear", (400, 50), 400),
        ("a.weight", "Embedding", (50, 400), 1),
        ("a.embedding", "Embed", (50, 400), 1),
        ("a.embedding", "Net", (50, 400), 1),
        ("a.table", "Net", (40, 1000), 200),
    ],
)
def test_drawn_matrices_have_the_scale_of_their_layer(name, owner, shape, inner):
    drawn = sampling.draw_weights(
        {name: SideWeight(shape, "float32", owner, "a")}, {name: np.zeros(shape, "f4")}, (0, 1)
    )
    assert np.sqrt(inner) * drawn[name].std() == pytest.approx(1.0, rel=0.03)


def test_numbers_in_another_shape_are_one_array_where_the_sizes_show_the_order_of_axes():
    array = np.random.default_rng(0).normal(size=(2, 3, 4))

    def counterpart(other):
        (found,) = calls.alike(Arguments((array,)), Arguments((other,)))
        return found

    assert counterpart(array) == 0
    turned = counterpart(array.transpose(2, 0, 1)[:, None])
    assert (turned.axes, turned.shape) == ((2, 0, 1), (4, 1, 2, 3))
    assert counterpart(array.reshape(6, 4)).axes == (0, 1, 2), "merged"
    assert counterpart(array.transpose(2, 0, 1).reshape(8, 3)) is None, "turned and merged"
