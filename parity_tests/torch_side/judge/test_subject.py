"""The judge's torch side on other people's code: checkpoints, torch.func, lists of weights, functions, tables."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from attn_bridge.parity.compare.sides.function import function
from attn_bridge.parity.compare.sides.subject import Arguments, CannotPromoteError, ModuleFailedError
from attn_bridge.parity.compare.sides.tables import STILL
from torch_attn._parity.drawing import drawing
from torch_attn._parity.running import probes
from torch_attn._parity.running.execution import failure
from torch_attn._parity.subject import subject_of

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(2, 5, 6)).astype(np.float32)
COTANGENT = DRAW.normal(size=(2, 5, 6)).astype(np.float32)


def run(subject, *arrays, cotangents=None, **options):
    arrays = arrays or (X,)
    found = subject.run(subject.weights(), Arguments(arrays))
    given = [np.random.default_rng(1).normal(size=one.shape).astype(np.float32) for one in found.outputs]
    return subject.run(subject.weights(), Arguments(arrays), cotangents or given, **options)


def everything(found):
    return [
        *found.outputs,
        *[one for one in found.input_gradients if one is not None],
        *found.parameter_gradients.values(),
    ]


def assert_same(found, wanted, rtol=0.0):
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=rtol, atol=rtol)


def relative(found, wanted):
    """Return the largest distance of an array from its counterpart, as a share of that one's size."""
    pairs = zip(everything(found), everything(wanted), strict=True)
    return max(np.sqrt(np.mean((one - two) ** 2) / (np.mean(two**2) or 1.0)) for one, two in pairs)


# ---- checkpoints


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.up, self.norm, self.down, self.how = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6), how

    def inner(self, x):
        hidden = torch.softmax(self.norm(self.up(x)).float(), -1).to(x.dtype)
        return x + self.down(hidden) * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

    def forward(self, x):
        return self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)


class Stack(nn.Module):
    def __init__(self, how, segments=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.Sequential(*[Block(None if segments else how) for _ in range(3)])
        self.how, self.segments = how, segments

    def forward(self, x):
        x = self.first(x)
        if self.segments:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.how)
        return self.blocks(x)


CHECKPOINTED = {
    "reentrant": lambda: Stack(True),
    "not reentrant": lambda: Stack(False),
    "in segments, reentrant": lambda: Stack(True, segments=True),
    "in segments": lambda: Stack(False, segments=True),
    "nested": lambda: Nested(),
}


class Nested(Stack):
    """A reentrant checkpoint around others: its backward pass calls another, from Python."""

    def __init__(self):
        super().__init__(False)

    def forward(self, x):
        return checkpoint(self.blocks, self.first(x), use_reentrant=True)


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"mode": "tables", "seed": 1}, {"mode": "logsumexp"}])
def test_a_checkpoint_changes_nothing(name, options):
    module = CHECKPOINTED[name]()
    plain = subject_of(Stack(None))
    subject = subject_of(module)
    wanted = run(plain, **options)
    assert_same(run(subject, **options), wanted)
    moved = subject.weights()
    for array in moved.values():
        array += 1.0  # the weights of the call, not those that the module holds
    assert_same(subject.run(moved, Arguments((X,)), [X], **options), plain.run(moved, Arguments((X,)), [X], **options))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpointed_call_is_recorded_once_with_its_gradients(name):
    plain, subject = subject_of(Stack(None)), subject_of(CHECKPOINTED[name]())
    arguments = Arguments((X,))
    wanted = plain.record(plain.weights(), arguments, [COTANGENT])
    if "segments" in name:  # there torch calls the parts of a Sequential itself
        wanted = [call for call in wanted if call.path != "blocks"]
    found = subject.record(subject.weights(), arguments, [COTANGENT])
    assert [(call.path, call.number) for call in found] == [(call.path, call.number) for call in wanted]
    for one, two in zip(found, wanted, strict=True):
        for ours, theirs in zip(
            (*one.arguments.leaves, *one.outputs, *one.cotangents),
            (*two.arguments.leaves, *two.outputs, *two.cotangents),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)
        assert all(cotangent.any() for cotangent in one.cotangents)


def test_what_a_checkpoint_writes_to_again_is_returned_as_the_call_left_it():
    """A cache counts its tokens in place; the backward pass computes the block again, and counts them again."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, count):
            def step(x):
                count[:] = count + 1
                return self.linear(x)

            return checkpoint(step, x, use_reentrant=False), count

    found = run(subject_of(Cached()), X, np.array([3], np.int32), cotangents=[COTANGENT, np.zeros(1, np.float32)])
    assert found.outputs[1] == 4


def test_rounding_at_random_reaches_what_is_computed_again():
    subject = subject_of(Stack(True))
    plain, found = run(subject), run(subject, mode="jitter", seed=3)
    assert 1e-8 < relative(found, plain) < 1e-5


@pytest.mark.parametrize("how", [True, False])
def test_dropout_in_a_checkpoint_is_driven_as_outside_of_it(how):
    class Drops(nn.Module):
        def __init__(self, how):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.drop, self.how = nn.Linear(6, 6), nn.Dropout(0.5), how

        def inner(self, x):
            return self.drop(torch.tanh(self.linear(self.drop(x))))

        def forward(self, x):
            for _ in range(3):
                x = self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)
            return x

    plain, subject = (subject_of(Drops(one), train=True) for one in (None, how))
    found, wanted = run(subject), run(plain)
    assert_same(found, wanted)
    assert len(found.draws) == len(wanted.draws) == 6
    assert not found.foreign


@pytest.mark.parametrize("p", [(), (0.5,)])
def test_where_no_masks_are_given_bernoulli_draws_as_always(p):
    def draw():
        return torch.bernoulli(torch.linspace(0.1, 0.9, 64), *p, generator=torch.Generator().manual_seed(3))

    with drawing(None, nn.Identity()):
        found = draw()
        out = torch.bernoulli(torch.full((64,), 0.5), out=torch.empty(64))
    assert torch.equal(found, draw())
    assert {0.0, 1.0} == set(out.tolist())


def test_given_masks_are_no_way_through_numpy():
    table = torch.ones(6)
    subject = subject_of(Calls(lambda self, x: F.dropout(x, 0.5, self.training) * table), train=True)
    assert run(subject, dtype="float64").outputs[0].dtype == np.float64


# ---- what else is called inside


class Calls(nn.Module):
    def __init__(self, call, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.call = nn.Linear(6, 6), call
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.call(self, x)


def slope(self, x):
    return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


def slope_by_hand(self, x):
    return (1.0 - self.linear(x).tanh() ** 2) @ self.linear.weight


def writes(self, x):
    x.mul_(2.0)
    x[0] = 0.0
    return self.linear(x)


SAME = {
    "vmap": (lambda self, x: torch.func.vmap(self.linear)(x), lambda self, x: self.linear(x)),
    "torch.func.grad": (
        lambda self, x: torch.func.grad(lambda h: self.linear(h).tanh().sum())(x),
        slope_by_hand,
    ),
    "jvp": (
        lambda self, x: torch.func.jvp(self.linear, (x,), (2.0 * x,))[1],
        lambda self, x: 2.0 * x @ self.linear.weight.T,
    ),
    "jacrev": (
        lambda self, x: torch.func.jacrev(lambda h: self.linear(h).tanh().sum())(x),
        slope_by_hand,
    ),
    "functional_call": (
        lambda self, x: torch.func.functional_call(
            self.linear, {name: 2.0 * one for name, one in self.linear.named_parameters()}, (x,)
        ),
        lambda self, x: 2.0 * self.linear(x),
    ),
    "autograd.grad": (slope, slope_by_hand),
    "torch.compile": (
        lambda self, x: torch.compile(self.linear, backend="aot_eager")(x),
        lambda self, x: self.linear(x),
    ),
    "a write into the input": (writes, lambda self, x: self.linear(2.0 * x * torch.tensor([0.0, 1.0])[:, None, None])),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("mode", ["eager", "jitter", "tables"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, from jvp
def test_a_call_gives_what_the_same_in_plain_words_gives(name, mode):
    call, plain = SAME[name]
    wide = run(subject_of(Calls(plain)), dtype="float64")
    x = X.copy()
    found = run(subject_of(Calls(call)), dtype="float64" if mode == "eager" else None, mode=mode)
    assert np.array_equal(x, X)
    assert relative(found, wide) < (1e-14 if mode != "jitter" else 1e-6)
    assert found.moved == 0


def test_parametrised_tied_and_hooked_weights_are_the_given_ones():
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    hooked = nn.Linear(6, 6)
    hooked.register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))
    hooked.register_forward_hook(lambda module, args, output: output * module.weight.sum())
    with pytest.warns(FutureWarning):
        old = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    parametrizations = torch.nn.utils.parametrizations
    modules = [tied, hooked, old, parametrizations.weight_norm(nn.Linear(6, 6)), nn.LSTM(6, 6, batch_first=True)]
    for module in [*modules, parametrizations.spectral_norm(nn.Linear(6, 6)).eval()]:
        subject = subject_of(module)
        weights = {name: array * 1.5 + 0.1 for name, array in subject.weights().items()}
        state = {name: one.clone() for name, one in module.state_dict().items()}
        attributes = {name: value for child in module.modules() for name, value in child.__dict__.items()}
        found = subject.run(weights, Arguments((X,)))
        now = {name: value for child in module.modules() for name, value in child.__dict__.items()}
        assert all(now[name] is attributes[name] for name in {*now, *attributes})
        assert all(torch.equal(one, state[name]) for name, one in module.state_dict().items())
        with torch.no_grad():
            for name, one in module.named_parameters():
                one.copy_(torch.from_numpy(weights[name]))
            wanted = module(torch.from_numpy(X))
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
        np.testing.assert_allclose(found.outputs[0], wanted, rtol=1e-5, atol=1e-6)


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


def test_a_list_of_registered_weights_that_is_not_used_is_nobodys_fault():
    module = Calls(lambda self, x: self.linear(x))
    module.everything, module.modules_too = list(module.parameters()), [module.linear]
    assert_same(run(subject_of(module)), run(subject_of(Calls(lambda self, x: self.linear(x)))))


@pytest.mark.filterwarnings("ignore")  # torch's own, of quantised and of nested tensors, and of TorchScript
def test_what_can_not_be_read_as_an_array_is_one_clear_line():
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


# ---- functions


def dense(weights, x, *, scale):
    hidden = torch.tanh(x @ weights["layers"][0]["kernel"] + weights["layers"][0]["bias"])
    return {"out": hidden * scale, "ids": weights["ids"]}


def tree():
    torch.manual_seed(0)
    return {"layers": [{"kernel": torch.randn(6, 4), "bias": torch.randn(4)}], "ids": torch.arange(3)}


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
    assert [one.path for one in subject.record(subject.weights(), call, cotangents)] == []


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, {}), "call must be a function of the weights and the inputs, got int"),
        ((dense, {"a": 1}), "weights must hold tensors of torch or arrays of JAX, got dict without any"),
    ],
)
def test_what_is_no_function_with_weights_is_refused(arguments, message):
    with pytest.raises(TypeError) as caught:
        function(*arguments)
    assert str(caught.value) == message


# ---- tables


def angles():
    turns = torch.arange(5)[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 6, 2) / 6.0))
    return torch.cat([turns, turns], -1)


def turned(x, cos, sin):
    return x * cos + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin


def in_the_call(self, x):
    with torch.no_grad():
        table = angles()
        cos, sin = table.cos(), table.sin()
    return turned(self.linear(x), cos, sin)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("cos", angles().cos(), persistent=False)
        self.register_buffer("sin", angles().sin())

    def forward(self, x):
        return turned(self.linear(x), self.cos, self.sin)


COS, SIN = angles().cos(), angles().sin()
COS_AS_NUMPY, SIN_AS_NUMPY = COS.numpy(), SIN.numpy()


def rotated(self, x):
    turns = torch.polar(torch.ones(5, 3), angles()[:, :3])
    return torch.view_as_real(torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2))) * turns).flatten(-2)


TABLES = {
    "buffers": Buffers,
    "in the call": lambda: Calls(in_the_call),
    "globals": lambda: Calls(lambda self, x: turned(self.linear(x), COS, SIN)),
    "attributes": lambda: Calls(lambda self, x: turned(self.linear(x), *self.kept), kept=(COS, SIN)),
    "lists": lambda: Calls(
        lambda self, x: turned(self.linear(x), torch.tensor(COS.tolist()), torch.tensor(SIN.tolist()))
    ),
    "NumPy": lambda: Calls(
        lambda self, x: turned(self.linear(x), torch.from_numpy(COS_AS_NUMPY), torch.as_tensor(SIN_AS_NUMPY).to(x))
    ),
    "complex": lambda: Calls(rotated),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_moves_by_a_float32_unit_and_the_user_s_does_not(name):
    subject = subject_of(TABLES[name]())
    wide = run(subject, dtype="float64")
    first, again, second = (run(subject, mode="tables", seed=seed) for seed in (1, 1, 2))
    assert 1e-8 < relative(first, wide) < 3e-7
    assert first.moved >= 20
    assert_same(first, again)
    assert relative(first, second) > 1e-9
    assert torch.equal(COS, angles().cos())
    assert np.array_equal(COS_AS_NUMPY, angles().cos().numpy())
    assert_same(run(subject, dtype="float64"), wide)


def test_given_tables_move_where_they_are_named():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, cos, sin):
            return turned(self.linear(x), cos, sin)

    subject, arrays = subject_of(Given()), (X, COS_AS_NUMPY, SIN_AS_NUMPY)
    wide = run(subject, *arrays, dtype="float64")
    unnamed, named = run(subject, *arrays, mode="tables"), run(subject, *arrays, mode="tables", tables=(1, 2))
    assert unnamed.moved == 0
    assert_same(unnamed, wide)
    assert named.moved > 20
    assert 1e-8 < relative(named, wide) < 3e-7
    assert np.abs(named.input_gradients[1]).max() > 0


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.batch = nn.LSTM(6, 6, batch_first=True), nn.LayerNorm(6), nn.BatchNorm1d(5)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.batch(self.rnn(x)[0])
        keep = torch.tril(torch.ones(5, 5))
        return F.gelu(self.norm(self.attention(x, x, x, attn_mask=keep == 0)[0])) * keep.sum(-1, keepdim=True)


@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(6), Everything, lambda: Calls(writes)])
def test_what_holds_no_tables_does_not_move(build):
    subject = subject_of(build())
    found = run(subject, mode="tables")
    assert found.moved == 0
    assert_same(found, run(subject, dtype="float64"))


def test_what_depends_on_the_input_does_not_move_without_a_gradient_either():
    def call(self, x):
        with torch.no_grad():
            size = x.abs().amax(-1, keepdim=True) * 0.3
        return self.linear(x) / size

    assert run(subject_of(Calls(call)), mode="tables").moved == 0


def test_minus_infinity_and_the_lowest_number_stay_finite_or_not():
    def call(self, x):
        hidden = torch.full((6,), torch.finfo(x.dtype).min) * torch.tensor([0.0, 1, 0, 0, 1, 0])
        return torch.softmax(self.linear(x) + hidden + torch.tensor([0.0, 0, 0, -torch.inf, 0, 0]), -1)

    found = run(subject_of(Calls(call)), mode="tables")
    assert all(np.isfinite(one).all() for one in everything(found))
    assert not found.outputs[0][..., [1, 3, 4]].any()


def test_the_moves_are_uniform_and_follow_from_number_and_seed():
    values = np.random.default_rng(0).normal(size=100_000)
    found = probes.uniform(values, 3)
    assert -1.0 <= found.min() < -0.999 < 0.999 < found.max() < 1.0
    assert abs(found.mean()) < 0.01
    assert abs((found**2).mean() - 1.0 / 3.0) < 0.01
    assert np.array_equal(found, probes.uniform(values, 3))
    assert abs(np.corrcoef(found, probes.uniform(values, 4))[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02


# ---- the formula of FlashAttention


class FlashByHand(torch.autograd.Function):
    """FlashAttention-2 in float32, its backward pass from the paper; scores are computed again in another order."""

    @staticmethod
    def forward(ctx, query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        output = weights @ value / total
        ctx.save_for_backward(query, key, value, output, top + torch.log(total))
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, logsumexp = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        weights = torch.exp((query * scale) @ key.mT - logsumexp)
        inner = (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * (gradient @ value.mT - inner) * scale
        return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


class Attends(nn.Module):
    def __init__(self, how, **options):
        super().__init__()
        self.how, self.options = how, options

    def forward(self, query, key, value):
        return self.how(query, key, value, **self.options)


def plainly(query, key, value):
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value


def loss(found, wanted):
    """Return the relative rms errors of the gradients."""
    pairs = zip(found.input_gradients, wanted.input_gradients, strict=True)
    return np.array([np.sqrt(np.mean((one - two) ** 2) / np.mean(two**2)) for one, two in pairs])


def draw_attention(time, seed, scale, width=32):
    draw = np.random.default_rng(seed)
    query, key, value = (draw.normal(size=(2, 3, time, width)).astype(np.float32) for _ in range(3))
    return query * np.float32(scale), key, value


@pytest.mark.parametrize("how", [F.scaled_dot_product_attention, FlashByHand.apply], ids=["fused", "by hand"])
@pytest.mark.parametrize("time", [48, 128])
def test_the_formula_loses_as_much_as_flash_attention_on_peaked_rows(how, time):
    arrays = draw_attention(time, 0, 12.0)
    wanted = run(subject_of(Attends(plainly)), *arrays, dtype="float64")
    real = loss(run(subject_of(Attends(how)), *arrays), wanted)
    for subject in (subject_of(Attends(plainly)), subject_of(Attends(F.scaled_dot_product_attention))):
        found = run(subject, *arrays, mode="logsumexp")
        assert found.moved == 2  # forward and backward
        assert (real < 2.0 * loss(found, wanted)).all()
        assert (loss(found, wanted) < 1e-5).all()
        np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-3, atol=3e-5)


def test_plain_softmax_loses_less_than_the_formula():
    arrays = draw_attention(48, 0, 12.0)
    subject = subject_of(Attends(plainly))
    wanted = run(subject, *arrays, dtype="float64")
    assert (loss(run(subject, *arrays), wanted) * 1.5 < loss(run(subject, *arrays, mode="logsumexp"), wanted)).all()


OPTIONS = {
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.4},
    "bias": {"attn_mask": torch.randn(7, 7, generator=torch.Generator().manual_seed(0))},
    "scale": {"scale": 0.3},
    "a row that sees nothing": {"attn_mask": torch.tensor([[True] * 7] * 3 + [[False] * 7] + [[True] * 7] * 3)},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_computes_what_the_kernel_computes(name, dtype):
    query, key, value = draw_attention(7, 1, 2.0, 8)
    if name == "grouped":
        key, value = key[:, :1], value[:, :1]
    subject = subject_of(Attends(F.scaled_dot_product_attention, **OPTIONS[name]))
    arguments = Arguments((query, key, value))
    cotangents = [np.random.default_rng(1).normal(size=query.shape).astype(np.float32)]
    wanted = subject.run({}, arguments, cotangents)
    found = subject.run({}, arguments, cotangents, mode="logsumexp", dtype=None if dtype == "float32" else dtype)
    assert found.moved >= 2
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype.name == dtype
        close = 1e-5 if dtype == "float32" else 4e-2
        np.testing.assert_allclose(one.astype(np.float32), two, rtol=close, atol=close * np.abs(two).max())


@pytest.mark.parametrize("seed", [STILL, 0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_fused_attention_by_plain_operations_computes_what_the_kernel_computes(name, seed):
    query, key, value = draw_attention(7, 1, 2.0, 8)
    if name == "grouped":
        key, value = key[:, :1], value[:, :1]
    subject = subject_of(Attends(F.scaled_dot_product_attention, **OPTIONS[name]))
    arguments, cotangents = Arguments((query, key, value)), [np.random.default_rng(1).normal(size=query.shape)]
    wanted = subject.run({}, arguments, cotangents, dtype="float64")
    found = subject.run({}, arguments, cotangents, mode="flash", seed=seed)
    assert found.moved == 2  # forward and backward
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype.name == "float64"
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


def test_no_other_attention_is_taken_for_a_fused_one():
    arrays = draw_attention(7, 1, 2.0, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        by_math = run(subject_of(Attends(F.scaled_dot_product_attention)), *arrays, mode="flash")
    subject = subject_of(Attends(plainly))
    plain = run(subject, *arrays, mode="flash", seed=1)
    assert (by_math.moved, plain.moved) == (0, 0)
    assert_same(plain, run(subject, *arrays, dtype="float64"))


def lost_in_float64(*arrays):
    """Return per gradient of fused attention what its kernel loses in float64, and what the formula does."""
    subject = subject_of(Attends(F.scaled_dot_product_attention))
    kernel = run(subject, *arrays, dtype="float64").input_gradients
    still, *drawn = (run(subject, *arrays, mode="flash", seed=seed).input_gradients for seed in (STILL, 0, 1))
    by_kernel = [np.abs(one - two).max() for one, two in zip(kernel, still, strict=True)]
    by_formula = [max(np.abs(one[i] - two).max() for one in drawn) for i, two in enumerate(still)]
    return np.array(by_kernel), np.array(by_formula)


@pytest.mark.parametrize("width", [3, 32])
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_the_formula_loses_as_much_as_the_kernel_in_float64(size, width):
    """It grows with the scores, and is measured, not bounded: far above it a fault is seen."""
    by_kernel, by_formula = lost_in_float64(*draw_attention(48, 0, size, width))
    assert (by_kernel < 4.0 * by_formula).all()
    assert (by_formula < 30.0 * by_kernel).all()
    assert (by_formula < 4e-15 * (size + 10.0) ** 2).all()


def test_what_keys_have_in_common_multiplies_the_rounding_of_the_outputs_dot_product():
    """Softmax does not see it, and a row's gradients of scores add up to zero but for that rounding."""
    query, key, value = draw_attention(48, 0, 0.01)
    by_kernel, by_formula = lost_in_float64(query, key + np.float32(1e4), value)
    alone = lost_in_float64(query, key, value)[1]
    assert by_formula[0] > 100.0 * alone[0]
    assert (by_kernel < 4.0 * by_formula).all()


def test_what_a_kernel_does_wrong_is_no_part_of_what_its_formula_loses():
    def wrong(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
        return 2.0 * query, 2.0 * key, 2.0 * value

    arrays = draw_attention(12, 0, 5.0)
    right = lost_in_float64(*arrays)
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", wrong, "CPU")
        found = lost_in_float64(*arrays)
    np.testing.assert_array_equal(found[1], right[1])
    assert (found[0] > 1e10 * right[0]).all()


def test_float64_inside_a_float32_module_moves_by_a_float32_unit():
    def call(self, x):
        return self.linear(x).double().tanh().float()

    class Wide(nn.Module):
        def forward(self, x):
            return (x.double() * 3.0).double()

    subject = subject_of(Wide())
    moves = []
    for x in (X, X.astype(np.float64)):
        found, plain = (run(subject, x, mode=mode).outputs[0] for mode in ("jitter", "eager"))
        moves.append(np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)))
    assert 1e-8 < moves[0] < 1e-6
    assert 1e-17 < moves[1] < 1e-15
    assert relative(run(subject_of(Calls(call)), mode="jitter"), run(subject_of(Calls(call)))) > 1e-8


# ---- nothing stays changed


class Trouble(nn.Module):
    """Changes what it can reach, and then does what it is told."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.norm, self.then = nn.Linear(6, 6), nn.BatchNorm1d(5), then
        self.register_buffer("cache", None)
        self.register_buffer("table", torch.ones(6))
        self.history, self.plain, self.seen = [], torch.zeros(6), {}
        self.norm.train()
        self.linear.eval()

    def forward(self, x):
        self.cache = x.detach()
        self.table.add_(1.0)
        self.history.append(x)
        self.seen["x"] = {"deep": x}
        if x.dtype == torch.float32:
            self.plain.add_(1.0)
        self.new = x
        self.linear.register_forward_hook(lambda *_: None)
        random.random()
        np.random.rand()
        torch.rand(2)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(True)
        x = self.norm(self.linear(x))
        self.train(not self.training)
        self.then(x)
        return x


def interrupt(x):
    raise KeyboardInterrupt


def interrupt_later(x):
    if x.requires_grad:
        x.register_hook(interrupt)


def fail(x):
    raise LookupError("planned")


def state_of(module):
    children = [child for _, child in module.named_modules()]
    return [
        [child.training for child in children],
        [{name: id(value) for name, value in child.__dict__.items()} for child in children],
        [len(child._forward_hooks) for child in children],
        [(name, id(one), one.requires_grad, one.grad, one._version) for name, one in module.named_parameters()],
        [(name, id(one)) for name, one in module.named_buffers()],
        (list(module.history), dict(module.seen), module.plain.tolist(), module.table.tolist()),
        (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        torch.are_deterministic_algorithms_enabled(),
        (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
        ),
        (len(torch.overrides._get_current_function_mode_stack()), torch._C._len_torch_dispatch_stack()),
    ]


@pytest.mark.parametrize("then", [lambda x: None, fail, interrupt, interrupt_later], ids=lambda one: one.__name__)
@pytest.mark.parametrize("mode", ["eager", "float64", "jitter", "tables", "logsumexp", "flash", "record", "train"])
def test_everything_is_as_before(then, mode):
    module = Trouble(then)
    subject = subject_of(module, train=mode == "train")
    before, weights, arguments = state_of(module), subject.weights(), Arguments((X,))
    error = None
    try:
        if mode == "record":
            subject.record(weights, arguments, [X])
        elif mode in ("eager", "float64", "train"):
            subject.run(weights, arguments, [X], dtype="float64" if mode == "float64" else None)
        else:
            subject.run(weights, arguments, [X], mode=mode)
    except (KeyboardInterrupt, ModuleFailedError, CannotPromoteError) as caught:
        error = caught
    assert state_of(module) == before
    expected = {fail: (ModuleFailedError, CannotPromoteError), interrupt: KeyboardInterrupt}.get(then, type(None))
    if then is interrupt_later:
        expected = KeyboardInterrupt
    assert isinstance(error, expected)
    if then is fail:
        assert str(error) == "torch module Trouble raised LookupError: planned"
    np.testing.assert_array_equal(X, np.random.default_rng(0).normal(size=X.shape).astype(np.float32))


def test_eight_threads_at_once_get_what_one_gets():
    import concurrent.futures

    subjects = [subject_of(Stack(how)) for how in (None, True, False, None)] * 2
    options = [{"dtype": "float64"}, {}] * 4
    wanted = [run(subject, **one) for subject, one in zip(subjects, options, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run, subject, **one) for subject, one in zip(subjects, options, strict=True)]
        for job, expected in zip(jobs, wanted, strict=True):
            assert_same(job.result(), expected)
    assert torch.get_default_dtype() == torch.float32


def test_weights_read_while_another_thread_runs_are_those_of_the_module():
    import concurrent.futures

    read = []

    class Reading(nn.Linear):
        def forward(self, x):
            read.append(pool.submit(subject.weights))
            with contextlib.suppress(concurrent.futures.TimeoutError):
                read[0].result(timeout=0.3)  # it waits for the run's end, or reads at once
            return super().forward(x)

    module = Reading(6, 2)
    subject = subject_of(module)
    moved = {name: array + 1.0 for name, array in subject.weights().items()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        subject.run(moved, Arguments((X,)), dtype="float64")
        found = read[0].result()
    assert {array.dtype.name for array in found.values()} == {"float32"}
    np.testing.assert_array_equal(found["weight"], module.weight.detach().numpy())


def test_a_run_seeds_no_device_that_is_not_in_use(monkeypatch):
    """torch would keep the seed for the device's first use, long after the comparison."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("CUDA was seeded"))
    subject = subject_of(nn.Linear(3, 2))
    subject.run(subject.weights(), Arguments((np.ones((1, 3), np.float32),), {}))


@pytest.mark.parametrize(("length", "is_cut"), [(300, False), (301, True)])
def test_a_long_message_of_a_module_is_cut_behind_300_characters(length, is_cut):
    shown = str(failure(KeyError("x" * (length - 2)), "float32", "your module"))  # and two quotation marks
    assert shown.startswith("your module raised KeyError: 'xxx")
    assert shown.count("x") == min(length - 2, 299)
    assert (" ..." in shown) is is_cut
