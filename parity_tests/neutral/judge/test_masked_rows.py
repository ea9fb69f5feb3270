"""Sides that differ only on rows that see no key, without a framework: what must agree elsewhere."""

from __future__ import annotations

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


@pytest.mark.parametrize("elsewhere", [0.0, 0.5])
def test_other_rows_must_agree_on_fresh_numbers_too(elsewhere):
    """Hard inputs give one key all the weight: rows that differ on ordinary numbers agree there."""
    visible = np.array([[1, 1, 1], [0, 1, 1]])
    difference = np.where([[0, 0, 0], [1, 0, 0]], 1.0, 0.0)

    def run(side, sample, *_):
        moved = 0.0 if side == "first" else difference + (elsewhere if sample.is_fresh else 0.0)
        return types.SimpleNamespace(
            outputs=[np.arange(6.0).reshape(2, 3) + moved], parameter_gradients={}, input_gradients=[]
        )

    call = types.SimpleNamespace(leaves=[visible], named=lambda names: names)
    samples = [types.SimpleNamespace(arguments={"first": call}, is_fresh=is_fresh) for is_fresh in (False, True)]
    pair = types.SimpleNamespace(
        dtype="float32",
        effort=types.SimpleNamespace(large=False),
        lacks={},
        train=False,
        pairing=types.SimpleNamespace(aligned=lambda gradients, side: gradients),
        subject=lambda side: types.SimpleNamespace(argument_names=["attention_mask"]),
    )
    runner = types.SimpleNamespace(pair=pair, exact=run, of_part=lambda side, sample, dtype, kept: run(side, sample))
    assert bool(masked_rows.on_masked_rows(runner, *samples)) == (elsewhere == 0.0)
