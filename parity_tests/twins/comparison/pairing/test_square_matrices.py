"""Bare square matrices under other names: how they lie follows from what the second side holds, or is in a note."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_bridge.parity import compare, function

RANDOM = np.random.default_rng(4)
MATRIX, OTHER, LAST = (RANDOM.normal(size=(6, 6)).astype(np.float32) for _ in range(3))
X = RANDOM.normal(size=(3, 6)).astype(np.float32)


def first(weights, x):
    return jnp.tanh(x @ weights["proj"]) @ weights["last"][:, :2]


def as_it_is(weights, x):
    return jnp.tanh(x @ weights["text_projection"]) @ weights["last"][:, :2]


def turned(weights, x):
    return jnp.tanh(x @ weights["text_projection"].T) @ weights["last"][:, :2]


def judged(second, held, **options):
    sides = (
        function(call, {name: jnp.asarray(matrix), "last": jnp.asarray(LAST)}, framework="jax")
        for call, name, matrix in ((first, "proj", MATRIX), (second, "text_projection", held))
    )
    return compare(*sides, X, seeds=1, **options)


@pytest.mark.parametrize(
    ("second", "held", "verdict", "note"),
    [
        (turned, MATRIX, "different", "holds proj as it is as text_projection"),
        (as_it_is, MATRIX.T, "different", "holds proj transposed as text_projection"),
        (as_it_is, OTHER, "equal", ""),
        (turned, OTHER, "equal", "trial runs alone support that"),
    ],
)
def test_a_square_matrix_lies_as_the_second_side_holds_it(second, held, verdict, note):
    report = judged(second, held, localise=False)
    notes = [one for one in report.notes if "transposed" in one or "as it is" in one]
    assert (report.verdict, len(notes)) == (verdict, bool(note))
    assert note in " ".join(notes)


def test_the_rule_of_the_note_judges_the_matrix_as_it_is():
    (note,) = (one for one in judged(turned, OTHER, localise=False).notes if "transposed" in one)
    assert 'rule = [{first = "proj", second = "text_projection"}]' in note
    report = judged(turned, OTHER, rules=[{"first": "proj", "second": "text_projection"}])
    assert report.verdict == "different"
    assert "the 6 x 6 operand of a product transposed" in report.first_divergence.hint


def test_a_hint_names_the_changed_line():
    def decayed(weights, x):
        return as_it_is(weights, x) * jnp.exp(-x[:, :2])

    def kept(weights, x):
        return as_it_is(weights, x) * jnp.exp(x[:, :2])

    weights = {"text_projection": jnp.asarray(MATRIX), "last": jnp.asarray(LAST)}
    report = compare(*(function(call, weights, framework="jax") for call in (decayed, kept)), X, seeds=1)
    assert "both sides agree" in report.first_divergence.hint
    assert "test_square_matrices.py:" in report.first_divergence.hint
