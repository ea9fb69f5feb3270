"""What arguments are refused with: the values that do not fit, each at its place in the message."""

from __future__ import annotations

import pytest

from attn_bridge.parity.training import arguments
from attn_bridge.validation import check_context

CONTEXTS = {
    "batch": ((3, 5, 4), "batch of context (3) must be the batch of x (2)"),
    "width": ((2, 5, 3), "last dimension of context (3) must be d_context (4)"),
    "empty": ((2, 0, 4), "context must hold at least 1 token, got shape (2, 0, 4)"),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_a_context_of_wrong_size_is_refused(case):
    shape, message = CONTEXTS[case]
    check_context((2, 5, 4), "float32", (2, 7, 6), d_context=4)
    with pytest.raises(ValueError, match=r"^.*$") as caught:
        check_context(shape, "float32", (2, 7, 6), d_context=4)
    assert str(caught.value) == message


@pytest.mark.parametrize("steps", [True, False, 0, -1, 1.5, "2", None])
def test_steps_of_a_training_are_a_whole_number_from_1(steps):
    arguments.check(1, "sgd", "mse", 0.1, 0, False, None)
    with pytest.raises(ValueError, match=r"^steps \(.*\) must be a whole number of at least 1$"):
        arguments.check(steps, "sgd", "mse", 0.1, 0, False, None)


@pytest.mark.parametrize("seed", [True, -1, 0.5, "2"])
def test_training_seeds_must_be_nonnegative_integers(seed):
    with pytest.raises(ValueError, match=r"^seed \(.*\) must be a whole number of at least 0$"):
        arguments.check(1, "sgd", "mse", 0.1, seed, False, None)
