"""A function with its weights is a side."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.frameworks.torch.weights import dotted
from attn_parity.sides.function import function
from attn_parity.sides.subject import Arguments, ModuleFailedError

from .modules import X, dense, run


def tree():
    torch.manual_seed(0)
    return {"layers": [{"kernel": torch.randn(6, 4), "bias": torch.randn(4)}], "ids": torch.arange(3)}


@pytest.mark.parametrize(
    ("path", "name"),
    [("['layers'][0].kernel", "layers.0.kernel"), (".outer.inner[1]", "outer.inner.1"), ("", "weights")],
)
def test_paths_of_weights_are_written_with_dots(path, name):
    assert dotted(path) == name


def test_a_function_is_a_side_with_dotted_names():
    weights = tree()
    made = function(dense, weights)
    assert made.framework == "torch"
    subject = subject_of(made)
    assert (subject.framework, subject.kind, subject.name) == ("torch", "torch function", "dense")
    assert [(one.path, one.type) for one in subject.modules()] == [("", "dense")]
    assert subject.argument_names == ["x"]
    assert {name: (one.shape, one.owner, one.path, one.framework) for name, one in subject.parameters().items()} == {
        "layers.0.bias": ((4,), "", "layers.0", "torch"),
        "layers.0.kernel": ((6, 4), "", "layers.0", "torch"),
        "ids": ((3,), "", "", "torch"),
    }
    call = Arguments((X,), {"scale": np.float32(2.0).reshape(())})
    cotangents = [None, np.ones((2, 5, 4), np.float32)]
    found = subject.run(subject.weights(), call, cotangents, dtype="float64")
    assert found.structure == ["['ids']", "['out']"]
    kernel, bias = (weights["layers"][0][name].double().numpy() for name in ("kernel", "bias"))
    hidden = np.tanh(X @ kernel + bias)
    np.testing.assert_allclose(found.outputs[1], 2.0 * hidden, rtol=1e-14)
    np.testing.assert_allclose(
        found.parameter_gradients["layers.0.bias"], (2 * (1 - hidden**2)).sum((0, 1)), rtol=1e-13
    )
    assert not weights["layers"][0]["bias"].requires_grad
    jitted = subject.run(subject.weights(), call, cotangents, mode="jit")
    np.testing.assert_allclose(jitted.outputs[1], found.outputs[1], rtol=1e-5)
    assert [one.path for one in subject.substituted(subject.weights(), call, cotangents, {})[1]] == []


def test_a_function_may_call_a_module_with_its_weights():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    subject = subject_of(
        function(lambda weights, x: torch.func.functional_call(net, weights, (x,)), dict(net.named_parameters()))
    )
    found, wanted = run(subject), run(subject_of(net))
    np.testing.assert_array_equal(found.outputs[0], wanted.outputs[0])
    for name, gradient in wanted.parameter_gradients.items():
        np.testing.assert_array_equal(found.parameter_gradients[name], gradient)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_bare_tensor_and_a_partial_function_are_taken():
    subject = subject_of(function(functools.partial(lambda weight, x, k: x @ weight * k, k=2.0), torch.ones(6, 6)))
    assert list(subject.parameters()) == ["weights"]
    np.testing.assert_allclose(run(subject).outputs[0], 2.0 * X @ np.ones((6, 6)), rtol=1e-5)


def test_a_weight_without_a_derivative_is_to_be_bound():
    target = torch.rand(*X.shape)

    def loss(weights, x, bound=None):
        positive = weights["positive"] if bound is None else bound
        return nn.functional.binary_cross_entropy_with_logits(x, target, pos_weight=positive)

    with pytest.raises(ModuleFailedError, match=r"'pos_weight'.*; bind an array without a gradient to the code, as"):
        run(subject_of(function(loss, {"positive": torch.rand(6)})))
    bound = functools.partial(loss, bound=torch.rand(6))
    assert np.isfinite(run(subject_of(function(bound, {"scale": torch.ones(1)}))).outputs[0])
