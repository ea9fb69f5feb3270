"""Sides that differ only on rows that see no key, without a framework: what must agree elsewhere."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from attn_parity.verdict import masked_rows
from attn_parity.verdict.masked_rows import AGREE

CHANGES = {"nothing": (0.0, True), "rounding": (AGREE / 10, True), "more": (AGREE * 10, False)}


@pytest.mark.parametrize("part", ["outputs", "parameter_gradients", "input_gradients"])
@pytest.mark.parametrize("change", CHANGES)
def test_outputs_and_all_gradients_must_agree_on_other_rows(part, change):
    step, agrees = CHANGES[change]

    def make(wanted):
        array = {name: np.array([1.0, 2.0 + step * (name == wanted)]) for name in ("outputs", "w", "x")}
        return types.SimpleNamespace(
            outputs=[np.append(array["outputs"], 5.0 if wanted else 7.0)],  # the last row sees no key
            parameter_gradients={"w": array["w"]},
            input_gradients=[None, array["x"]],
        )

    runs = {"first": make(""), "second": make({"parameter_gradients": "w", "input_gradients": "x"}.get(part, part))}
    pair = types.SimpleNamespace(
        dtype="float32", pairing=types.SimpleNamespace(aligned=lambda gradients, side: gradients)
    )
    runner = types.SimpleNamespace(pair=pair, of_part=lambda side, sample, dtype, kept: runs[side])
    assert masked_rows._agree(runner, None, list(runs.values()), [np.array([True, True, False])]) == agrees


VISIBLE = np.array([[True, True, True], [False, True, True]])


def runner_of(difference, elsewhere=0.0, inverted=False):
    """Return a runner of sides that add up what they see and differ by `difference`, on fresh numbers elsewhere too."""
    mask = ~VISIBLE if inverted else VISIBLE

    def run(side, sample, *_):
        x = sample.arguments["first"].leaves[1]
        seen = (x * mask[..., None]).sum(1, keepdims=True) + x
        moved = 0.0 if side == "first" else (difference + (elsewhere if sample.is_fresh else 0.0))[..., None]
        output = np.where(mask[..., None], seen, 0.0) + moved
        return types.SimpleNamespace(outputs=[output], parameter_gradients={}, input_gradients=[])

    pair = types.SimpleNamespace(
        dtype="float32",
        effort=types.SimpleNamespace(large=False),
        lacks={},
        train=False,
        pairing=types.SimpleNamespace(aligned=lambda gradients, side: gradients),
        subject=lambda side: types.SimpleNamespace(argument_names=["attention_mask", "x"]),
    )
    return types.SimpleNamespace(pair=pair, exact=run, of_part=lambda side, sample, dtype, kept: run(side, sample))


@dataclasses.dataclass
class Call:
    leaves: list

    def named(self, names):
        return names

    def with_leaves(self, leaves):
        return Call(leaves)


@dataclasses.dataclass
class Sample:
    arguments: dict
    is_fresh: bool


SAMPLES = [Sample({"first": Call([VISIBLE, np.random.default_rng(n).normal(size=(2, 3, 4))])}, n > 0) for n in (0, 1)]
HIDDEN = np.where(VISIBLE, 0.0, 1.0)


@pytest.mark.parametrize("elsewhere", [0.0, 0.5])
def test_other_rows_must_agree_on_fresh_numbers_too(elsewhere):
    """Hard inputs give one key all the weight: rows that differ on ordinary numbers agree there."""
    runner = runner_of(HIDDEN, elsewhere)
    assert bool(masked_rows.on_masked_rows(runner, *SAMPLES)) == (elsewhere == 0.0)


def test_rows_that_see_keys_are_not_taken_for_rows_without():
    """In the sense in which the side does not read the mask, the rows that differ would be those without a key."""
    assert masked_rows.on_masked_rows(runner_of(1.0 - HIDDEN), *SAMPLES) == ""
    assert masked_rows.on_masked_rows(runner_of(1.0 - HIDDEN, inverted=True), *SAMPLES) != ""
