"""Every way to ask torch for a lower precision inside a module gives float64 in the judge's float64 run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_bridge.parity.compare.sides.subject import Arguments, CannotPromoteError
from torch_attn._parity.running.promotion import promoted
from torch_attn._parity.subject import subject_of

X = np.array([0.12345678901234567, 0.7654321987654321, -1.1111111111111112])
THIRD = 1.0 / 3.0
PLAIN = torch.tensor([1.1, 0.7, 0.3])
TURNS = torch.tensor([1 + 2j, 0.5j, 3.0])
IDS = torch.tensor([2, 0, 1])


class Thirds(torch.autograd.Function):
    """A third of the exponential, with float32 on the way there and bfloat16 on the way back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float().exp() * THIRD).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient.bfloat16() * x.half().exp() * THIRD).to(gradient.dtype)


class Module(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def third(x):
    return x * THIRD


def wide(tensor):
    return tensor.double()


def filled(x):
    empty = torch.empty(3, dtype=torch.float16)
    empty[:] = x
    return empty * THIRD


def summed(x):
    total = torch.zeros(3, dtype=torch.bfloat16)
    total += x * THIRD
    return total


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.outer(x, x) @ torch.eye(3)


def casts_inside(x):
    return torch.func.grad(lambda h: (h.half() ** 3).sum())(x)


WAYS = {
    "to": (lambda x: x.to(torch.float32) * THIRD, third),
    "to(dtype=)": (lambda x: x.to(dtype=torch.bfloat16) * THIRD, third),
    "to(device, dtype)": (lambda x: x.to("cpu", torch.float16) * THIRD, third),
    "to(other)": (lambda x: x.to(PLAIN) * THIRD, third),
    "float": (lambda x: x.float() * THIRD, third),
    "half": (lambda x: x.half() * THIRD, third),
    "bfloat16": (lambda x: x.bfloat16() * THIRD, third),
    "type": (lambda x: x.type(torch.float32) * THIRD, third),
    "type by name": (lambda x: x.type("torch.FloatTensor") * THIRD, third),
    "type by class": (lambda x: x.type(torch.HalfTensor) * THIRD, third),
    "type_as": (lambda x: x.type_as(PLAIN) * THIRD, third),
    "zeros": (lambda x: torch.zeros(3, dtype=torch.float16).add_(x * THIRD), third),
    "tensor": (lambda x: x * torch.tensor([THIRD] * 3, dtype=torch.float32), third),
    "tensor by default": (lambda x: x * torch.tensor(THIRD), third),
    "Tensor": (lambda x: x.detach() * torch.Tensor([THIRD] * 3) + x, lambda x: x.detach() * THIRD + x),
    "as_tensor": (lambda x: x * torch.as_tensor([THIRD] * 3, dtype=torch.float16), third),
    "full": (lambda x: torch.full((3,), THIRD, dtype=torch.bfloat16) * x, third),
    "full_like": (lambda x: torch.full_like(x, THIRD, dtype=torch.float32) * x, third),
    "new_full": (lambda x: PLAIN.new_full((3,), THIRD) * x, third),
    "new_tensor": (lambda x: x.new_tensor([THIRD] * 3, dtype=torch.float32) * x, third),
    "linspace": (
        lambda x: torch.linspace(0, THIRD, 3, dtype=torch.float32) * x,
        lambda x: x * torch.tensor([0, 0.5, 1]) / 3,
    ),
    "arange": (
        lambda x: (torch.arange(3, dtype=torch.float32) / 7).exp() * x,
        lambda x: (torch.arange(3.0).double() / 7).exp() * x,
    ),
    "softmax(dtype=)": (lambda x: torch.softmax(x, -1, dtype=torch.float32), lambda x: x.softmax(-1)),
    "Tensor.softmax(dtype=)": (lambda x: x.softmax(-1, dtype=torch.float32), lambda x: x.softmax(-1)),
    "F.softmax(dtype=)": (lambda x: F.softmax(x, dim=-1, dtype=torch.bfloat16), lambda x: x.softmax(-1)),
    "F.log_softmax(dtype=)": (lambda x: F.log_softmax(x, -1, dtype=torch.float32), lambda x: x.log_softmax(-1)),
    "sum(dtype=)": (lambda x: x.sum(dtype=torch.float32) * THIRD, lambda x: x.sum() * THIRD),
    "cumsum(dtype=)": (lambda x: x.cumsum(0, dtype=torch.float32), lambda x: x.cumsum(0)),
    "copy_ into an empty one": (lambda x: torch.empty(3, dtype=torch.float16).copy_(x) * THIRD, third),
    "assignment to an empty one": (filled, third),
    "+= on zeros": (summed, third),
    "index_put": (
        lambda x: torch.zeros(3, dtype=torch.bfloat16).index_put((IDS,), x * THIRD),
        lambda x: third(x)[[1, 2, 0]],
    ),
    "attribute": (lambda x: PLAIN * x * THIRD, lambda x: wide(PLAIN) * x * THIRD),
    "attribute in a list": (lambda x: torch.stack([PLAIN, x * THIRD]), lambda x: torch.stack([wide(PLAIN), third(x)])),
    "attribute in a tuple": (lambda x: torch.cat((x * THIRD, PLAIN)), lambda x: torch.cat((third(x), wide(PLAIN)))),
    "attribute in einsum": (lambda x: torch.einsum("i,j->ij", x, PLAIN), lambda x: torch.outer(x, wide(PLAIN))),
    "attribute by keyword": (
        lambda x: torch.where(x > 0, other=PLAIN, input=x),
        lambda x: torch.where(x > 0, x, wide(PLAIN)),
    ),
    "attribute of complex numbers": (
        lambda x: torch.view_as_real(TURNS * x),
        lambda x: torch.view_as_real(TURNS.to(torch.complex128) * x),
    ),
    "complex": (lambda x: torch.view_as_real(x.to(torch.complex64) * THIRD)[..., 0], third),
    "cfloat": (lambda x: x.cfloat().real * THIRD, third),
    "polar": (
        lambda x: torch.view_as_real(torch.polar(torch.ones(3, dtype=torch.float32), x)),
        lambda x: torch.stack([x.cos(), x.sin()], -1),
    ),
    "F.layer_norm with float32 weights": (
        lambda x: F.layer_norm(x.float(), (3,), PLAIN, PLAIN),
        lambda x: F.layer_norm(x, (3,), wide(PLAIN), wide(PLAIN)),
    ),
    "scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 1).half()] * 3),
        lambda x: (torch.outer(x, x).softmax(-1) @ x).view(1, 1, 3, 1),
    ),
    "autocast": (autocast, lambda x: torch.outer(x, x)),
    "autograd.Function": (Thirds.apply, lambda x: x.exp() * THIRD),
    "checkpoint": (
        lambda x: checkpoint(lambda h: h.float().exp() * THIRD, x, use_reentrant=False),
        lambda x: x.exp() * THIRD,
    ),
    "vmap": (lambda x: torch.func.vmap(lambda h: h.half() * THIRD)(x), third),
    "torch.func.grad": (casts_inside, lambda x: 3 * x**2),
    "item": (lambda x: x * (x.float() * THIRD).sum().item(), lambda x: x * (x.detach() * THIRD).sum()),
    "through NumPy in float64": (
        lambda x: x + torch.from_numpy(np.exp(x.detach().numpy())),
        lambda x: x + x.detach().exp(),
    ),
    "NumPy constants": (
        lambda x: x.float() * torch.from_numpy(np.float32([3.0, 0.5, 0.25])) * THIRD,
        lambda x: third(x) * torch.tensor([3, 0.5, 0.25]),
    ),
}


def run(function, dtype, x=X):
    subject = subject_of(Module(function))
    with np.errstate(all="ignore"):
        outputs = subject.run({}, Arguments((x,)), dtype=dtype).outputs
        cotangents = [np.random.default_rng(1).normal(size=one.shape) for one in outputs]
        return subject.run({}, Arguments((x,)), cotangents, dtype=dtype)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_ask_for_less_gives_float64(way):
    low, exact = WAYS[way]
    wanted = run(exact, None)
    found = run(low, "float64")
    for got, expected in zip(
        (*found.outputs, *found.input_gradients), (*wanted.outputs, *wanted.input_gradients), strict=True
    ):
        assert got.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-15)


EXACT = {
    "linspace",
    "attribute in a list",
    "attribute in a tuple",
    "attribute of complex numbers",
    "attribute in einsum",
}
SAME = {"through NumPy in float64", "NumPy constants", "item", "arange", "attribute", "attribute by keyword"}


@pytest.mark.parametrize("way", sorted(set(WAYS) - EXACT - SAME))
def test_the_same_way_loses_digits_without_promotion(way):
    low, exact = WAYS[way]
    with torch.no_grad():
        x = torch.from_numpy(X.astype(np.float32))
        try:
            found = low(x)
        except RuntimeError:
            return  # torch refuses to mix dtypes, where promotion leaves one
        assert not np.allclose(found.double(), exact(x.double()), rtol=1e-13, atol=1e-13)


def test_parameters_buffers_and_attributes_are_promoted_and_stay_what_they_are():
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


class PlannedError(Exception):
    """Raised by a test itself."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_promoted(fails):
    def work():
        with promoted():
            assert torch.get_default_dtype() == torch.float64
            assert torch.ones(2).float().dtype == torch.float64
            if fails:
                raise PlannedError

    if fails:
        with pytest.raises(PlannedError):
            work()
    else:
        work()
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32
    assert torch.ones(2).dtype == torch.float32
    assert not torch.overrides._get_current_function_mode_stack()


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


STATE = torch.zeros(3)


def writes(x):
    STATE[:] = x.detach() * THIRD
    return STATE * x


def adds(x):
    STATE.add_(x.detach())
    return STATE * x


REFUSED = {
    "through NumPy in float32": (
        lambda x: x + torch.from_numpy(x.detach().numpy().astype(np.float32)) * THIRD,
        "a part of it is computed by NumPy, in lower precision",
    ),
    "through an array": (
        lambda x: x + torch.from_numpy(np.sin(np.asarray(x.detach()), dtype=np.float32)),
        "a part of it is computed by NumPy, in lower precision",
    ),
    "assignment to an attribute": (writes, "a tensor of dtype float32 that is no buffer is written to"),
    "in place on an attribute": (adds, "a tensor of dtype float32 that is no buffer is written to"),
    "an error": (lambda x: x.nonsense, "torch module Module raised AttributeError: .*nonsense"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_can_not_be_promoted_is_refused_with_the_reason(way):
    function, why = REFUSED[way]
    with pytest.raises(CannotPromoteError, match=why):
        run(function, "float64")
    assert torch.get_default_dtype() == torch.float32
    assert not STATE.any()
