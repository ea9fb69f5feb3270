"""Bad arguments whose message is torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_attn


@pytest.mark.parametrize("name", ["SelfAttention_v1", "SelfAttention_v2", "CausalAttention", "MultiHeadAttention"])
def test_an_array_of_another_library_is_refused(name):
    module = getattr(torch_attn, name)(4, 4, *([6] if name.startswith(("Causal", "Multi")) else []))
    with pytest.raises(TypeError) as caught:
        module(np.ones((5, 4), np.float32))
    assert str(caught.value) == "x must be a torch.Tensor, got ndarray"


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_refuse_what_is_no_tensor(name):
    with pytest.raises(TypeError, match=r"^x must be a torch\.Tensor, got list$"):
        getattr(torch_attn, name)(2)([[1.0, 2.0]])


def test_an_input_of_another_dtype_than_the_weights_is_refused():
    module = torch_attn.MultiHeadAttention(4, 4, 6)
    with pytest.raises(TypeError) as caught:
        module(torch.ones(5, 4, dtype=torch.bfloat16))
    assert str(caught.value) == "x must have the dtype of the weights (float32), got bfloat16"
