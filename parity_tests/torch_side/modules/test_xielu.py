"""xIELU next to the class of `transformers`: the numbers in its files, their start, and what it computes."""

from __future__ import annotations

import pytest
import torch

from torch_attn.blocks.activation import XIELU

activations = pytest.importorskip("transformers.activations")


def test_a_new_one_has_the_numbers_of_transformers():
    theirs = activations.XIELUActivation(dtype=torch.float64).state_dict()
    ours = XIELU(dtype=torch.float64).state_dict()
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    assert all(torch.allclose(ours[name], theirs[name].double(), rtol=1e-6) for name in theirs)


def test_with_the_same_numbers_it_computes_the_same():
    theirs = activations.XIELUActivation(0.6, 0.9, dtype=torch.float64).double()
    ours = XIELU(dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.linspace(-3, 3, 41, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
