"""What is torch's own about promotion to float64: buffers, attributes, products of experts, the default dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_parity.frameworks.torch.running.promotion import promoted
from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.subject import Arguments

from ...contract.judge.promotion import X


def test_parameters_buffers_and_attributes_are_promoted_and_restored():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.3, -0.4, 0.9], dtype=torch.bfloat16))
            self.register_buffer("table", torch.tensor([0.1, 0.2, 0.3]))
            self.plain = [torch.tensor([0.7, 0.8, 0.9], dtype=torch.float16)]
            self.count = torch.tensor([1, 2, 3])

        def forward(self, x):
            self.table.mul_(2.0)
            return x.float() * self.weight.half() + self.table * self.plain[0] + self.count

    module = Holder()
    before = [*module.state_dict().items(), ("plain", module.plain[0])]
    values = {name: (tensor.dtype, tensor.clone(), id(tensor)) for name, tensor in before}
    subject = subject_of(module)
    found = subject.run(subject.weights(), Arguments((X,)), [np.ones(3)], dtype="float64")
    wide = {name: tensor.double().numpy() for name, tensor in before}
    expected = X * wide["weight"] + 2.0 * wide["table"] * wide["plain"] + np.array([1, 2, 3])
    np.testing.assert_allclose(found.outputs[0], expected, rtol=1e-15)
    np.testing.assert_allclose(found.parameter_gradients["weight"], X, rtol=1e-15)
    for name, tensor in [*module.state_dict().items(), ("plain", module.plain[0])]:
        assert tensor.dtype == values[name][0]
        assert torch.equal(tensor, values[name][1])


@pytest.mark.parametrize(
    ("shapes", "ends"),
    [(((6, 8), (3, 8, 4)), (2, 2, 6)), (((3, 8, 8), (8, 8)), (2, 4, 8)), (((8, 8), (8, 4)), (2, 4, 8))],
)
def test_products_of_experts_are_those_of_torch(shapes, ends):
    first, second = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes)
    offsets = torch.tensor(ends, dtype=torch.int32)
    with promoted():
        found = torch._grouped_mm(first, second, offs=offsets)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), torch._grouped_mm(first, second, offs=offsets))


def test_a_default_dtype_of_the_users_own_is_back_afterwards():
    torch.set_default_dtype(torch.float16)
    try:
        with promoted():
            pass
        assert torch.get_default_dtype() == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_bits_of_integers_may_be_read_as_floats():
    bits = torch.tensor([0x3F800000, 0x40490FDB, 7], dtype=torch.int32)
    with promoted():
        found = bits.view(torch.float32) * 1.0
    assert found.dtype == torch.float64
    assert torch.equal(found, bits.view(torch.float32).double())
