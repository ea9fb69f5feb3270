"""Operations of a JAX program that are changed one at a time: the change with which the results are those wanted."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_parity.frameworks.jax.changes import search
from attn_parity.frameworks.jax.changes.search import ChangedPrograms

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(2, 3, 4))
TABLE = RANDOM.normal(size=(3, 4))


def softmax(x, axis):
    exponentials = jnp.exp(x - x.max(axis, keepdims=True))
    return exponentials / exponentials.sum(axis, keepdims=True)


def recurrent(x, order):
    def step(state, row):
        parts = jnp.split(jnp.tile(row, 4) * jnp.arange(1.0, 17.0), 4, axis=-1)
        forget, given, new, shown = (parts[part] for part in order)
        state = jax.nn.sigmoid(forget) * state + jax.nn.sigmoid(given) * jnp.tanh(new)
        return state, shown * state

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]


def decayed(x, sign):
    return x * jnp.exp(-jnp.exp(sign * jnp.arange(4.0)))


def windows(x, axes):
    return x.reshape(2, 3, 2, 2).transpose(axes).reshape(2, 3, 4)


def normed(x, axes, eps):
    return x / jnp.sqrt((x**2).sum(axes, keepdims=True) + eps)


def weighted(x, high, low):
    return (high * x + low * (1 - x)) * x


def gated(x, part):
    parts = jnp.split(x, 4, axis=-1)
    return (parts[0] + parts[part]) * parts[1]


def square(x):
    return jnp.concatenate([x, x[:, :1]], 1)


def gates(x, order):
    given, kept = (jnp.split(jnp.tile(part, 3) * jnp.arange(1.0, 13.0), 3, axis=-1) for part in (x, x[:, ::-1]))
    reset, update, new = ((given[part], kept[part]) for part in order)
    sigmoid = jax.nn.sigmoid
    return sigmoid(sum(update)) * jnp.tanh(new[0] + sigmoid(sum(reset)) * new[1])


def smoothed(x, smooth):
    total = (x * x).sum()
    return ((x * x)[:, :1].sum() + smooth) / (total + smooth)


def recurring(x, start):
    return jax.lax.scan(lambda state, row: (state * jnp.tanh(row) + row,) * 2, jnp.ones(x.shape[1:]) * start, x)[1]


def bounded(x, low):
    return jnp.clip(x, low, 1.0) * 2 + x


def twice(x, function, factor, layers=2):
    for _ in range(layers):
        x = jax.lax.scan(lambda state, row: (function(factor * state + row),) * 2, jnp.zeros(x.shape[1:]), x)[1]
    return x


def pooled(x, kind):
    first, function = {"maximum": (-jnp.inf, jax.lax.max), "mean": (0.0, jax.lax.add)}[kind]
    return jax.lax.reduce_window(x, first, function, (1, 2, 1), (1, 1, 1), "VALID") / (2 if kind == "mean" else 1)


def spread(x, step, low, high):
    kernel = jnp.arange(1.0, 13.0).reshape(3, 4, 1)
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NWC", "WIO", "NWC"))
    return jax.lax.conv_general_dilated(x, kernel, (1,), [(low, high)], rhs_dilation=(step,), dimension_numbers=numbers)


FAULTS = {
    "dilation [2] for [1]": (lambda x: spread(x, 2, 2, 2) * 2, lambda x: spread(x, 1, 1, 1) * 2),
    "dilation [1] for [2]": (lambda x: spread(x, 1, 2, 0) * 2, lambda x: spread(x, 2, 4, 0) * 2),
    "1 added to the result of astype": (
        lambda x: (x * 3).astype(int) + 1,
        lambda x: (x * 3).astype(int),
    ),
    "1e-05 for 1": (lambda x: smoothed(x, 1e-5), lambda x: smoothed(x, 1.0)),
    "no choice of -1e+30": (lambda x: softmax(x, -1), lambda x: softmax(jnp.where(x > 0.9, -1e30, x), -1)),
    "-inf for 0": (
        lambda x: softmax(jnp.where(x > 0.9, -1e30, x), -1),
        lambda x: softmax(jnp.where(x > 0.9, 0.0, x), -1),
    ),
    "min for max": (lambda x: jnp.minimum(x, -x), lambda x: jnp.maximum(x, -x)),
    "0 for 1": (lambda x: recurring(x, 0.0), lambda x: recurring(x, 1.0)),
    "a softmax over axis 2 of 3 for axis 1": (lambda x: softmax(x, -1), lambda x: softmax(x, 1)),
    "parts 2 and 3 of 4 exchanged": (lambda x: recurrent(x, (0, 1, 2, 3)), lambda x: recurrent(x, (0, 1, 3, 2))),
    "exp of the negated operand": (lambda x: decayed(x, -1.0), lambda x: decayed(x, 1.0)),
    "axes in the order (0, 1, 2, 3) for (0, 1, 3, 2)": (
        lambda x: windows(x, (0, 1, 2, 3)),
        lambda x: windows(x, (0, 1, 3, 2)),
    ),
    "a reduction of axes [2] for [1, 2]": (lambda x: normed(x, 2, 1e-3), lambda x: normed(x, (1, 2), 1e-3)),
    "1e-06 for 0.01": (lambda x: normed(x, 2, 1e-6), lambda x: normed(x, 2, 1e-2)),
    "0.75 and 0.25 exchanged": (lambda x: weighted(x, 0.25, 0.75), lambda x: weighted(x, 0.75, 0.25)),
    "part 2 of 4 for part 3": (lambda x: gated(x, 2), lambda x: gated(x, 3)),
    "a shift by -1 for 1 along axis 1": (lambda x: jnp.roll(x, -1, 1), lambda x: jnp.roll(x, 1, 1)),
    "numbers of arange 1 lower": (lambda x: x * jnp.arange(4), lambda x: x * jnp.arange(1, 5)),
    "a mean for the sum": (lambda x: x.mean(1), lambda x: x.sum(1)),
    "a sum for the mean": (lambda x: x.sum(1), lambda x: x.mean(1)),
    "no addition of its number": (lambda x: jax.nn.sigmoid(x), lambda x: jax.nn.sigmoid(x + 1.0)),
    "no subtraction of its second operand": (lambda x: jnp.sin(x), lambda x: jnp.sin(x) - jnp.exp(x)),
    "no subtraction from its first operand": (lambda x: jnp.exp(x), lambda x: jnp.sin(x) - jnp.exp(x)),
    "no division by its second operand": (lambda x: jnp.sin(x), lambda x: jnp.sin(x) / jnp.exp(x)),
    "no division of its first operand": (lambda x: jnp.exp(x), lambda x: jnp.sin(x) / jnp.exp(x)),
    "SiLU for relu": (lambda x: jax.nn.silu(x) * 2, lambda x: jax.nn.relu(x) * 2),
    "ReLU of the result of mul": (lambda x: jax.nn.relu(x * 2) + 1, lambda x: x * 2 + 1),
    "ReLU of the result of mean": (lambda x: jax.nn.relu(x.mean(1)) + 1, lambda x: x.mean(1) + 1),
    "the biased variance for the unbiased": (lambda x: x / x.var(-1).sum(), lambda x: x / x.var(-1, ddof=1).sum()),
    "a logsumexp over axis 1 of 3 for axis 2": (
        lambda x: jax.nn.logsumexp(square(x), 1),
        lambda x: jax.nn.logsumexp(square(x), 2),
    ),
    "a maximum for the logsumexp": (lambda x: x.max(1) * 2, lambda x: jax.nn.logsumexp(x, 1) * 2),
    "a sort in the other direction": (lambda x: -jnp.sort(-x, 1), lambda x: jnp.sort(x, 1)),
    "the Fourier transform over sqrt(4)": (
        lambda x: jnp.fft.fft(x, norm="ortho").real,
        lambda x: jnp.fft.fft(x).real,
    ),
    "a Fourier transform of axes [1, 2] for [1]": (
        lambda x: jnp.fft.fft2(x).real,
        lambda x: jnp.fft.fft(x, axis=1).real,
    ),
    "real for imag": (lambda x: jnp.fft.fft(x).real * 2, lambda x: jnp.fft.fft(x).imag * 2),
    "argmin for argmax": (lambda x: x * x.argmin(-1)[..., None], lambda x: x * x.argmax(-1)[..., None]),
    "parts 0 and 1 of 3 exchanged wherever 3 are split": (
        lambda x: gates(x, (0, 1, 2)),
        lambda x: gates(x, (1, 0, 2)),
    ),
    "whole numbers 1 higher": (
        lambda x: x * 2.0 ** (-1 - jnp.arange(x.shape[-1])),
        lambda x: x * 2.0 ** (-2 - jnp.arange(x.shape[-1])),
    ),
    "the last factors of a sum of two products exchanged": (
        lambda x: (1 - jnp.sin(x)) * x[::-1] + jnp.sin(x) * x,
        lambda x: (1 - jnp.sin(x)) * x + jnp.sin(x) * x[::-1],
    ),
    "the inner factors of a sum of two products exchanged": (
        lambda x: x[::-1] * (1 - jnp.sin(x)) + jnp.sin(x) * x,
        lambda x: x[::-1] * jnp.sin(x) + (1 - jnp.sin(x)) * x,
    ),
    "the 4 x 4 operand of a product transposed": (
        lambda x: jnp.sin(jnp.einsum("bij,bkj->bki", square(x).mT + 1, x)),
        lambda x: jnp.sin(jnp.einsum("bij,bkj->bki", square(x) + 1, x)),
    ),
    "a diagonal 1 lower in triu": (lambda x: jnp.triu(x, 1).sum(1) * 2, lambda x: jnp.triu(x, 2).sum(1) * 2),
    "the slice from 1 for the one from 0 along axis 2": (
        lambda x: x[..., :-1] * jnp.sin(x[..., 1:]) + x[..., 1:],
        lambda x: x[..., :-1] * jnp.sin(x[..., :-1]) + x[..., 1:],
    ),
    "-0.5 for -1": (lambda x: bounded(x, -0.5), lambda x: bounded(x, -1.0)),
    "sin for tanh": (lambda x: twice(x, jnp.sin, 0.5), lambda x: twice(x, jnp.tanh, 0.5)),
    "0.25 for 0.5": (lambda x: twice(x, jnp.tanh, 0.25), lambda x: twice(x, jnp.tanh, 0.5)),
    "sin for tanh in run 2 of 2 alone": (
        lambda x: twice(twice(x, jnp.tanh, 0.5, 1), jnp.sin, 0.5, 1),
        lambda x: twice(x, jnp.tanh, 0.5),
    ),
    "the maximum of each window for its mean": (
        lambda x: jnp.sin(pooled(x, "maximum")),
        lambda x: jnp.sin(pooled(x, "mean")),
    ),
    "the mean of each window for its maximum": (
        lambda x: jnp.sin(pooled(x, "mean")),
        lambda x: jnp.sin(pooled(x, "maximum")),
    ),
    "axis 1 of the constant of shape (3, 4) with entries 1 and 2 exchanged": (
        lambda x: jnp.sin(x * TABLE),
        lambda x: jnp.sin(x * TABLE[:, [0, 2, 1, 3]]),
    ),
    "the constant of shape (3, 4) negated": (
        lambda x: jnp.exp(x + -TABLE),
        lambda x: jnp.exp(x + TABLE),
    ),
    "the constant of shape (3, 3) transposed": (
        lambda x: jnp.sin(x[..., :3] * TABLE[:, :3].T),
        lambda x: jnp.sin(x[..., :3] * TABLE[:, :3]),
    ),
    "an axis of 4 split as (2, 2), then transposed by (1, 0)": (
        lambda x: jnp.sin(x.reshape(2, 3, 2, 2).swapaxes(2, 3)).sum(2),
        lambda x: jnp.sin(x.reshape(2, 3, 2, 2)).sum(2),
    ),
    "the shift the other way along axes [1, 2]": (
        lambda x: x * jnp.roll(x, (1, 1), (1, 2)),
        lambda x: x * jnp.roll(x, (-1, -1), (1, 2)),
    ),
    "> for >=": (lambda x: jnp.where(x.round() > 0, x, 0), lambda x: jnp.where(x.round() >= 0, x, 0)),
}


def changes(right, wrong, x=X, others=(), kinds=(False, True)):
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(wrong)(x)
        first, *more = (ChangedPrograms(closed, [one]) for one in (x, *others))
        wanted = [[np.asarray(right(one))] for one in (x, *others)]
        return next(filter(None, (first.found(wanted, more, numbers=kind) for kind in kinds)), [])


@pytest.mark.parametrize("fault", FAULTS)
def test_changes_are_found(fault):
    right, wrong = FAULTS[fault]
    assert fault in [text for text, _ in changes(right, wrong)]


def test_numbers_of_axes_alone_are_counted_with_the_axis_of_vmap():
    def mapped(function):
        return jax.vmap(lambda row: jnp.sin(function(row)))

    made = changes(mapped(lambda row: softmax(row, 0)), mapped(lambda row: softmax(row, 1)))
    assert made[0][0] == "a softmax over axis 1 of 3 for axis 2 (axes counted with the one of jax.vmap)"
    made = changes(
        mapped(lambda row: row.reshape(3, 2, 2).swapaxes(1, 2).sum(1)), mapped(lambda row: row.reshape(3, 2, 2).sum(1))
    )
    assert "an axis of 4 split as (2, 2), then transposed by (1, 0)" in [text for text, _ in made]


def test_all_numbers_that_agree_are_offered():
    made = changes(lambda x: x * 3.0 * 4.0, lambda x: x * 3.0 * 2.0)
    assert {text for text, _ in made} == {"4 for 2", "6 for 3"}


def test_no_number_in_the_code_of_a_library_is_offered():
    """Without the triangle's width of 1 a linear kernel is that of the nearest pixel."""

    def resized(x, method):
        return jax.image.resize(x, (*x.shape[:-1], 2 * x.shape[-1]), method)

    assert not changes(lambda x: resized(x, "nearest"), lambda x: resized(x, "linear"), kinds=(True,))


def test_a_change_is_found_beside_a_literal_of_float32_accuracy():
    (text, _), *_ = changes(lambda x: jnp.sin(x) - float(np.float32(4 / 3)), lambda x: jnp.cos(x) - 4 / 3)
    assert text == "sin for cos"


def test_without_literals_of_float32_accuracy_a_change_leaves_no_difference():
    with jax.enable_x64(True):
        program = ChangedPrograms(jax.make_jaxpr(lambda x: jnp.cos(x) * 5)(X), [X])
        wanted = [[np.sin(X) * 5 + 1e-8]]
        assert [text for text, _ in program.found(wanted, [])] == ["sin for cos"]
        assert not program.found(wanted, [], has_literals=False)


def test_a_change_that_leaves_a_small_difference_is_not_named():
    assert not changes(lambda x: jnp.sin(x) * (1 + 1e-8) + 1e-7, lambda x: jnp.cos(x) * x)
    assert not changes(lambda x: x / jnp.sqrt(x * x + 1e-8), lambda x: x / jnp.sqrt(x * x + 2e-8) * (1 + 1e-8))


def test_changes_name_their_line():
    ((_, where),) = changes(lambda x: jnp.sin(x), lambda x: jnp.cos(x))
    assert "test_changed_operations.py:" in where


def test_a_function_that_jax_traces_once_has_the_line_of_each_call():
    """The second logarithm of a softmax is a copy of the first one's program."""

    def loss(x):
        return -jax.nn.log_softmax(x, -1).diagonal().sum()

    made = changes(lambda x: loss(x) + loss(x.T), lambda x: loss(x) + loss(x), RANDOM.normal(size=(4, 4)))
    text, where = made[0]
    assert text == "a softmax over axis 0 of 2 for axis 1"
    assert re.search(r"test_changed_operations.py:\d+, called in line \d+ `loss\(x\)`$", where)


def test_a_power_is_named_before_a_function_that_is_the_same_where_numbers_are_positive():
    """The weight of a focal loss is (1 - p) squared, to which squared ReLU is the same."""
    texts = [
        text for text, _ in changes(lambda x: (1 - jax.nn.sigmoid(x)) ** 2, lambda x: (1 - jax.nn.sigmoid(x)) ** 3)
    ]
    assert texts[:1] == ["the power 2 for 3"]


def test_code_that_runs_repeatedly_is_changed_everywhere():
    def layers(x, function):
        for _ in range(3):
            x = function(x + 1.0)
        return x

    texts = [text for text, _ in changes(lambda x: layers(x, jnp.sin), lambda x: layers(x, jnp.cos))]
    assert texts == ["sin for cos"]


def test_a_call_of_a_line_that_is_changed_alone_is_named():
    def act(x, function):
        return function(x + 1.0)

    def waves(x, factor):
        return jnp.sin(2.0 * x) + jnp.cos(factor * x)

    made = changes(lambda x: act(x, jnp.sin) + 3 * act(-x, jnp.cos), lambda x: act(x, jnp.sin) + 3 * act(-x, jnp.sin))
    assert [text for text, _ in made] == ["cos for sin"]
    assert made[0][1].endswith("`act(-x, jnp.sin)`")
    made = changes(lambda x: jnp.sin(x[0]) * x[1] + 2, lambda x: jnp.sin(x[1]) * x[0] + 2)
    assert not any("alone" in text for text, _ in made)  # both parts are
    made = changes(lambda x: waves(x, 3.0), lambda x: waves(x, 2.0))
    assert [text for text, _ in made] == ["3 for 2"]
    assert made[0][1].endswith("`factor * x`")


def test_a_run_of_a_loop_that_is_changed_alone_is_numbered():
    def layers(x, *functions):
        for function in functions:
            x = function(x + 1.0)
        return x

    made = changes(lambda x: layers(x, jnp.sin, jnp.cos, jnp.sin), lambda x: layers(x, jnp.sin, jnp.sin, jnp.sin))
    assert [text for text, _ in made] == ["cos for sin in run 2 of 3 alone"]


def test_a_loop_that_a_change_keeps_from_ending_is_given_up():
    """Halving becomes doubling; and the logarithm in place of the root is no number, which no step makes small."""

    def shrunk(x):
        x = jnp.sqrt(x - x.min())
        return jax.lax.while_loop(lambda x: ~(jnp.abs(x).max() <= 0.1), lambda x: x / 2.0, x)

    assert not changes(lambda x: jnp.sin(x) * x[::-1] + 5, shrunk)


@pytest.mark.parametrize(("most", "named"), [(X.size, ["cos for sin"]), (X.size - 1, [])])
def test_a_program_is_changed_only_if_its_values_are_few_enough_to_keep(most, named, monkeypatch):
    monkeypatch.setattr(search, "MOST_VALUES", most)
    assert [text for text, _ in changes(jnp.cos, jnp.sin)] == named


def test_a_change_that_fits_one_input_alone_is_not_named():
    def right(x):
        return x * 3

    def wrong(x):
        return x * x * x * 2.0

    ones = np.ones(())
    assert changes(right, wrong, ones)
    assert not changes(right, wrong, ones, [np.full((), 7.0)])


def test_a_bound_to_both_sides_is_a_single_number():
    texts = [text for text, _ in changes(lambda x: jnp.clip(x, -0.5, 0.5) * x, lambda x: jnp.clip(x, -1.0, 1.0) * x)]
    assert any(text.endswith("of both signs") for text in texts)


def test_an_operation_has_one_change():
    """Negated and subtracted are one: the first that agrees is named."""
    texts = [text for text, _ in changes(lambda x: jnp.sin(x) - x[::-1], lambda x: jnp.sin(x) + x[::-1])]
    assert texts == ["subtraction for addition"]


def test_a_function_that_jax_does_not_trace_by_itself_is_left_out_as_a_whole():
    texts = [text for text, _ in changes(lambda x: x * 2 + 1, lambda x: jax.nn.gelu(x) * 2 + 1)]
    assert texts[0] == "no gelu"


def test_nothing_is_named_where_no_change_fits():
    assert not changes(lambda x: jnp.sin(x * x[::-1]) + 5, lambda x: jnp.cos(x) * x)


def test_the_count_of_a_mean_is_no_number_in_code():
    assert not changes(lambda x: jnp.sin(x).mean() * 2.4, lambda x: jnp.sin(x).mean())  # 24 / 10


def test_parts_of_one_size_are_numbered_among_all_parts():
    def mixed(x, first, second):
        parts = jnp.split(x, [2, 3], axis=-1)
        return parts[0].sum(-1, keepdims=True) + jnp.sin(parts[first]) * parts[second]

    texts = [text for text, _ in changes(lambda x: mixed(x, 2, 1), lambda x: mixed(x, 1, 2))]
    assert "parts 1 and 2 of 3 exchanged" in texts


def test_no_operation_inside_an_algorithm_of_a_library_is_changed():
    def volumes(x):
        return jnp.linalg.slogdet(x @ x.swapaxes(1, 2) + jnp.eye(3))[1]

    assert not changes(lambda x: 0.5 * volumes(x), volumes)


def test_as_many_axes_come_first_where_one_of_them_has_one_element():
    x = RANDOM.normal(size=(1, 1, 3, 5))
    made = changes(lambda x: x - x.mean((0, 1, 2), keepdims=True), lambda x: x - x.mean((0, 1, 3), keepdims=True), x)
    assert made[0][0] == "a reduction of axes [0, 1, 2] for [0, 1, 3]"


def test_a_part_is_not_exchanged_inside_a_function_of_a_library():
    """`gelu` multiplies its operand by a function of it: another part in that function alone is no change of a line."""

    def gated(x, order):
        parts = jnp.split(x, 2, axis=-1)
        return parts[order[0]] * jax.nn.gelu(parts[order[1]], approximate=False)

    assert [text for text, _ in changes(lambda x: gated(x, (0, 1)), lambda x: gated(x, (1, 0)))] == [
        "parts 0 and 1 of 2 exchanged"
    ]
