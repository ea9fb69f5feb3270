"""Invalid sides are refused in one line that names them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_parity.frameworks.torch.running.execution import failure
from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.function import function
from attn_parity.sides.subject import Arguments, ModuleFailedError

from .modules import Calls, X, assert_same, dense, run

HELD = nn.Linear(6, 6)


def holders():
    child = nn.Linear(6, 6)
    weight = torch.randn(6, 6, requires_grad=True)
    return {
        "Calls.kept[0]": Calls(lambda self, x: x @ self.kept[0], kept=[nn.Parameter(torch.randn(6, 6))]),
        "Calls.kept['a'][1]": Calls(lambda self, x: x @ self.kept["a"][1], kept={"a": (1, weight)}),
        "Calls.kept[0].weight": Calls(lambda self, x: self.kept[0](x), kept=[nn.Linear(6, 6)]),
        "Calls.kept": Calls(lambda self, x: x @ self.kept, kept=weight),
        "Calls.kept[0] ": Calls(lambda self, x: x @ self.kept[0], child=child, kept=(child.weight,)),
        "Calls.call (weight)": Calls(lambda self, x: x @ weight),
        "Calls.call (HELD).weight": Calls(lambda self, x: HELD(x)),
    }


@pytest.mark.parametrize("where", holders())
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_weight_that_is_not_registered_is_named(where, dtype):
    subject = subject_of(holders()[where])
    with pytest.raises(ModuleFailedError) as caught:
        subject.run(subject.weights(), Arguments((X,)), [X], dtype=dtype)
    assert str(caught.value) == (
        f"torch module Calls uses {where.strip()}, a trainable tensor that torch does not register there (a list, dict "
        "or closure); hold it in an nn.ParameterList, an nn.ModuleList or as an nn.Parameter"
    )


def test_an_unused_list_of_registered_weights_is_accepted():
    module = Calls(lambda self, x: self.linear(x))
    module.everything, module.modules_too = list(module.parameters()), [module.linear]
    assert_same(run(subject_of(module)), run(subject_of(Calls(lambda self, x: self.linear(x)))))


@pytest.mark.filterwarnings("ignore")  # torch's own, of quantised and of nested tensors, and of TorchScript
def test_unreadable_weights_and_outputs_are_refused_in_one_line():
    quantised = nn.Linear(6, 6)
    quantised.weight = nn.Parameter(torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 0, torch.qint8), False)
    sparse = nn.Linear(6, 6)
    sparse.weight = nn.Parameter(torch.ones(6, 6).to_sparse())
    cases = {
        "weight weight of torch module Linear is quantised (qint8); compare the module before": quantised,
        "weight weight of torch module Linear is sparse (sparse_coo); give tensor.to_dense()": sparse,
        "weight weight of torch module Linear is on the meta device": nn.Linear(6, 6, device="meta"),
        "output of the torch module Calls is sparse (sparse_coo)": Calls(lambda self, x: x.to_sparse()),
        "output[0] of the torch module Calls is a nested tensor": Calls(
            lambda self, x: [torch.nested.nested_tensor([x[0], x[1, :2]])]
        ),
        "the torch module Calls returned int, which holds no tensor": Calls(lambda self, x: 3),
    }
    for message, module in cases.items():
        subject = subject_of(module)
        with pytest.raises(ModuleFailedError) as caught:
            subject.run(subject.weights(), Arguments((X,)))
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModuleFailedError, match="TorchScript module, whose weights can't be exchanged"):
        subject_of(torch.jit.script(nn.Linear(6, 6)))
    with pytest.raises(ModuleFailedError, match=r"must be an nn.Module or parity.function\(f, weights\), got int"):
        subject_of(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, {}), "call must be a function of the weights and the inputs, got int"),
        ((dense, {"a": 1}), "weights['a'] must be a tensor of torch or an array of JAX, got int"),
        (
            (dense, {"layers": [{"a": np.ones(2)}]}),
            "weights['layers'][0]['a'] must be a tensor of torch or an array of JAX, got a NumPy array",
        ),
    ],
)
def test_invalid_functions_and_weights_are_refused(arguments, message):
    with pytest.raises(TypeError) as caught:
        function(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(("length", "is_cut"), [(300, False), (301, True)])
def test_long_error_messages_are_cut_after_300_characters(length, is_cut):
    shown = str(failure(KeyError("x" * (length - 2)), "float32", "your module"))  # and two quotation marks
    assert shown.startswith("your module raised KeyError: 'xxx")
    assert shown.count("x") == min(length - 2, 299)
    assert (" ..." in shown) is is_cut


def test_tied_parameters_are_known_by_their_first_name():
    module = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False))
    module[2].weight = module[0].weight
    assert subject_of(module).tied() == {"2.weight": "0.weight"}
    assert subject_of(nn.Sequential(nn.Linear(6, 6))).tied() == {}


class WithoutHash(nn.Module):
    def __eq__(self, other):
        return isinstance(other, WithoutHash)


def test_a_module_without_a_hash_is_refused_with_the_line_to_write():
    module = nn.Sequential(nn.Linear(2, 2))
    module._modules["1"] = WithoutHash()
    with pytest.raises(ModuleFailedError, match=r"write `WithoutHash\.__hash__ = torch\.nn\.Module\.__hash__` before"):
        subject_of(module)
