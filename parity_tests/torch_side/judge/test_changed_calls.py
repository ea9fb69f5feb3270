"""Calls of torch that are changed one at a time: the change with which the results are those wanted."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attn_parity.frameworks.torch.running.operations import ChangedCalls, found

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def recurrent(x, with_bonus):
    state, outputs = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        row = x[:, step]
        outputs.append(torch.exp(row + 0.5 if with_bonus else row) * state)
        state = state * 0.25 + row
    return torch.stack(outputs, 1)


def square(x):
    return torch.cat([x, x[:, :1]], 1)


def weighted_loss(x, **options):
    return functional.cross_entropy(x.flatten(0, 1), torch.tensor([0, 1, 2, 3, 1, 2]), **options)


def added(total, x):
    total += x
    return total


WEIGHTS = torch.tensor([0.25, 1.0, 0.5, 2.0], dtype=torch.float64)

FAULTS = {
    "no `weight` in cross_entropy": (weighted_loss, lambda x: weighted_loss(x, weight=WEIGHTS)),
    "no `label_smoothing` in cross_entropy": (weighted_loss, lambda x: weighted_loss(x, label_smoothing=0.1)),
    "no clamp": (lambda x: x * 2 + 1, lambda x: (x * 2).clamp(-1, 1) + 1),
    "masked_fill by 0": (lambda x: x.masked_fill(x > 0, 0.0).exp(), lambda x: x.masked_fill(x > 0, 0.5).exp()),
    "no addition of its first operand": (lambda x: x.sin(), lambda x: added(x.cos(), x.sin())),
    "min for max": (lambda x: torch.min(x, -x), lambda x: torch.max(x, -x)),
    "1e-05 for 1": (lambda x: ((x * x) / (x * x + 1e-5)).mean(), lambda x: ((x * x) / (x * x + 1.0)).mean()),
    "no addition of its number": (lambda x: recurrent(x, False), lambda x: recurrent(x, True)),
    "a softmax over axis 1 of 3 for axis 2": (lambda x: x.softmax(1), lambda x: x.softmax(-1)),
    "an axis of 4 split as (2, 2), then transposed by (1, 0)": (
        lambda x: x.unflatten(-1, (2, 2)).mT.sin().sum(-2),
        lambda x: x.view(*x.shape[:-1], 2, 2).sin().sum(-2),
    ),
    "parts 0 and 1 of 2 exchanged": (
        lambda x: x.chunk(2, -1)[1].sin() * x.chunk(2, -1)[0],
        lambda x: torch.mul(*(part.sin() if at == 0 else part for at, part in enumerate(x.chunk(2, -1)))),
    ),
    "the shift the other way": (lambda x: x.roll((-1, 1), (1, 2)), lambda x: x.roll((1, -1), (1, 2))),
    "no shift": (lambda x: x * 2, lambda x: torch.roll(x, shifts=(1, -1), dims=(1, 2)) * 2),
    "a mean for the sum": (lambda x: x.mean(1), lambda x: x.sum(1)),
    "SiLU for gelu": (functional.silu, functional.gelu),
    "exp of the negated operand": (lambda x: torch.exp(-x) * 2, lambda x: torch.exp(x) * 2),
    "a reduction of axes [1] for [2]": (lambda x: square(x).sum(1), lambda x: square(x).sum(2)),
    "a logsumexp over axis 1 of 3 for axis 2": (lambda x: square(x).logsumexp(1), lambda x: square(x).logsumexp(2)),
    "a maximum for the logsumexp": (lambda x: x.amax(1) * 2, lambda x: x.logsumexp(1) * 2),
    "the Fourier transform times 4": (lambda x: torch.fft.fft(x).real, lambda x: torch.fft.fft(x, norm="forward").real),
    "argmin for argmax": (lambda x: x * x.argmin(-1, keepdim=True), lambda x: x * x.argmax(-1, keepdim=True)),
    "the mean of each window for its maximum": (
        lambda x: functional.avg_pool1d(x, 2, 1).sin(),
        lambda x: functional.max_pool1d(x, 2, 1).sin(),
    ),
    "the maximum of each window for its mean": (
        lambda x: functional.max_pool2d(x, (2, 1)),
        lambda x: functional.avg_pool2d(x, (2, 1)),
    ),
    "2.5 for 1.5": (lambda x: x / (x * x + 2.5), lambda x: x / (x * x + 1.5)),
    ">= for >": (lambda x: x * (x.round() >= 0), lambda x: x * (x.round() > 0)),
    "numbers of arange 1 lower": (lambda x: x * torch.arange(4), lambda x: x * torch.arange(1, 5)),
    "normalize over axis 2 of 3 for axis 1": (
        lambda x: functional.normalize(x, dim=-1) * 2,
        lambda x: functional.normalize(x) * 2,
    ),
    "cumsum over axis 2 of 3 for axis 1": (lambda x: x.cumsum(-1).sin(), lambda x: x.cumsum(1).sin()),
    "norm over axis 1 of 3 for axis 2": (
        lambda x: x / x.norm(dim=1, keepdim=True),
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ),
    "a reduction of axes [0] for [2]": (lambda x: x - x.mean(0, keepdim=True), lambda x: x - x.mean(2, keepdim=True)),
    "einsum of bij,bkj->bik for bij,bjk->bik": (
        lambda x: torch.einsum("bij,bkj->bik", square(x), square(x)).sin(),
        lambda x: torch.einsum("bij,bjk->bik", square(x), square(x)).sin(),
    ),
    "the first operand of a product transposed": (
        lambda x: (square(x).mT @ (square(x) + 1)).sin(),
        lambda x: (square(x) @ (square(x) + 1)).sin(),
    ),
    "the 4 x 4 operand of a product transposed": (
        lambda x: (x @ (square(x).mT + 1)).sin(),
        lambda x: (x @ (square(x) + 1)).sin(),
    ),
    "a diagonal 1 lower in triu": (lambda x: x.triu(1).sum(1) * 2, lambda x: x.triu(2).sum(1) * 2),
    "0.5 for 1 of both signs": (lambda x: x.clamp(-0.5, 0.5) * 2 + x, lambda x: x.clamp(-1, 1) * 2 + x),
    "-0.5 for -1": (lambda x: x.clamp(-0.5, 1) * 2 + x, lambda x: x.clamp(-1, 1) * 2 + x),
    "0.3 for 0.01": (lambda x: functional.leaky_relu(x, 0.3).sin(), lambda x: functional.leaky_relu(x, 0.01).sin()),
    "3 for 2": (lambda x: functional.softplus(x, beta=3.0) + x, lambda x: functional.softplus(x, beta=2.0) + x),
}


def changes(right, wrong):
    def run(sample: int, calls: ChangedCalls):
        with calls:
            outputs = wrong(X * (1 + sample))
        return [outputs.numpy()]

    wanted = [[right(X * (1 + sample)).numpy()] for sample in range(2)]
    return found(run, wanted) or found(run, wanted, numbers=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_changes_are_found(fault):
    right, wrong = FAULTS[fault]
    assert fault in [text for text, _ in changes(right, wrong)]


def test_all_numbers_that_agree_are_offered():
    made = changes(lambda x: x * 3.0 * 4.0, lambda x: x * 3.0 * 2.0)
    assert {text for text, _ in made} == {"4 for 2", "6 for 3"}


def test_a_sum_in_place_is_no_difference():
    """The first operand is what it was before the call."""
    (text, _), *_ = changes(lambda x: x.cos(), lambda x: added(x.cos(), x.sin()))
    assert text == "no addition of its second operand"


def test_changes_name_their_line():
    ((_, where),) = changes(lambda x: x.sin(), lambda x: x.cos())
    assert "test_changed_calls.py:" in where


def test_a_call_of_a_line_that_is_changed_alone_is_named():
    def act(x, function):
        return function(x + 1.0)

    made = changes(
        lambda x: act(x, torch.cos) + 3 * act(-x, torch.sin), lambda x: act(x, torch.sin) + 3 * act(-x, torch.sin)
    )
    assert [text for text, _ in made] == ["cos for sin"]
    assert made[0][1].endswith("`act(x, torch.sin)`")


def test_a_run_of_a_loop_that_is_changed_alone_is_numbered():
    def layers(x, *functions):
        for function in functions:
            x = function(x + 1.0)
        return x

    made = changes(lambda x: layers(x, torch.cos, torch.sin), lambda x: layers(x, torch.sin, torch.sin))
    assert [text for text, _ in made] == ["cos for sin in run 1 of 2 alone"]


def test_a_loop_that_a_change_keeps_from_ending_is_given_up():
    """The logarithm in place of the root is no number, which no number of steps makes small."""

    def shrunk(x):
        x = torch.sqrt(x - x.min())
        while not x.abs().max() <= 0.1:
            x = x / 2.0
        return x

    assert not changes(lambda x: x.sin() * x.flip(0) + 5, shrunk)


def test_both_calls_of_a_line_are_changed_together():
    def joined(x, y, axis):
        return functional.normalize(x, dim=axis) * 2, functional.normalize(y, dim=axis)

    made = changes(lambda x: torch.cat(joined(x, x * x, 2)), lambda x: torch.cat(joined(x, x * x, 1)))
    assert "normalize over axis 2 of 3 for axis 1" in [text for text, _ in made]


def test_nothing_is_named_where_no_change_fits():
    assert not changes(lambda x: x.sin() * x.flip(0) + 5, lambda x: x.cos() * x)
