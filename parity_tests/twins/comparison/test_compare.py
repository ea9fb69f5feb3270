"""`compare` on small pairs: what it reports and takes, what it leaves as it was, and what must not fool it."""

from __future__ import annotations

import dataclasses
import json
import math
import typing

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend import core
from torch import nn

from attn_bridge import Rule, WeightsMismatchError
from attn_bridge.parity import ParityError, compare

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
TABLE = np.linspace(0.1, 2.3, 8, dtype=np.float32)
IDS = np.array([[1, 2, 3, 9, 0], [4, 4, 7, 8, 2]])


class TorchSide(nn.Module):
    """A module of one function and the parameters that it uses."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        random = np.random.default_rng(1)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.from_numpy(random.normal(size=shape).astype(np.float32))))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class FlaxSide(nnx.Module):
    """Its twin, with other initial weights."""

    def __init__(self, function, **shapes):
        self.function = function
        random = np.random.default_rng(2)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.asarray(random.normal(size=shape), jnp.float32)))

    def __call__(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def judge(ours, theirs=None, inputs=X, *, shapes=None, **options):
    """Compare two functions of a module and its inputs, one per side, or one for both."""
    shapes = {"w": (8,)} if shapes is None else shapes
    torch_side = ours if isinstance(ours, nn.Module) else TorchSide(ours, **shapes)
    theirs = ours if theirs is None else theirs
    flax_side = theirs if isinstance(theirs, nnx.Module) else FlaxSide(theirs, **shapes)
    return compare(torch_side, flax_side, inputs, **{"seeds": 1} | options)


def linear(**options):
    return nn.Linear(8, 4), nnx.Linear(8, 4, rngs=nnx.Rngs(0), **options)


def scale(m, x):
    return x * m.w


def verdicts(report):
    return {one.name: one.verdict for one in report.tensors}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


# ---- the report


def test_the_report_of_an_equal_pair():
    report = compare(*linear(), X)
    assert report.verdict == "equal"
    assert report.passed
    assert report.raise_for_mismatch() is report
    assert [(one.name, one.flax_name, one.kind) for one in report.tensors] == [
        ("output", "output", "output"),
        ("grad input", "grad inputs", "input gradient"),
        ("grad weight", "grad kernel", "matrix gradient"),
        ("grad bias", "grad bias", "vector gradient"),
    ]
    assert [one.shape for one in report.tensors] == [(2, 5, 4), (2, 5, 8), (4, 8), (4,)]
    assert all(one.dtype == "float32" and one.message == "" for one in report.tensors)
    assert all(one.relative < 1e-14 and one.meaning_used < 0.01 for one in report.tensors)
    assert all(0 < one.torch_used < 1 and 0 < one.flax_used < 1 for one in report.tensors if one.name != "grad bias")
    assert (report.first_divergence, report.tree, report.failures) == (None, None, [])
    assert (report.unexercised, report.invariances, report.message) == ([], [], "")
    assert (report.torch_name, report.flax_name, report.seeds) == ("Linear", "Linear", 4)
    assert str(report).startswith("equal: Linear (torch) and Linear (Flax), 4 tensors, 4 seeds, ")
    assert report.environment["torch"] == torch.__version__
    assert report.noise["float32, torch, run to run"] == report.noise["float32, flax, run to run"] == 0.0


def test_the_report_of_a_pair_that_differs(tmp_path):
    report = judge(scale, lambda m, x: x * m.w * (1 + 5e-5))
    assert report.verdict == "different"
    assert not report.passed
    first = report.first_divergence
    assert (first.path, first.flax_path, first.direction) == ("", "", "forward")
    assert "fed the same inputs, the outputs differ by 5e-05 of the largest value" in str(first)
    assert set(verdicts(report).values()) == {"different"}
    for one in report.failures:
        assert "float64 results differ by 5e-05 of the largest value, allowed 1e-12; worst at (" in one.message
        assert one.relative == pytest.approx(5e-5, rel=1e-3)
        assert one.worst.flax == pytest.approx(one.worst.torch * (1 + 5e-5), rel=1e-9)
        assert one.bad > 0.9 * one.count
    with pytest.raises(ParityError) as caught:
        report.raise_for_mismatch()
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report is report
    assert str(caught.value) == report.explain()
    assert str(first) in report.explain()
    data = report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(data, allow_nan=False))
    assert data["verdict"] == "different"
    assert data["first_divergence"]["direction"] == "forward"
    assert [one["name"] for one in data["tensors"]] == ["output", "grad inputs[0]", "grad w"]


def test_the_command_and_the_progress_are_passed_on():
    seen = []
    report = judge(scale, lambda m, x: x * m.w * 2, command="again!", progress=lambda *what: seen.append(what))
    assert "again: again!" in report.explain()
    assert {type(part) for what in seen for part in what} == {str, int}
    assert all(0 <= done <= total for _, done, total in seen)
    assert any("first divergence" in what for what, _, _ in seen)


def test_the_same_call_gives_the_same_report():
    first, second = (judge(scale, lambda m, x: x * m.w * 2).to_json() for _ in range(2))
    assert first["tensors"] == second["tensors"]
    assert judge(scale, lambda m, x: x * m.w * 2, first_seed=5).to_json()["tensors"] != first["tensors"]


# ---- inputs


TORCH_X = torch.from_numpy(X)
FORMS = {
    "array": X,
    "tuple": (X,),
    "list": [X],
    "dict": {"x": X},
    "torch tensor": TORCH_X,
    "torch tensor that requires gradients": TORCH_X.clone().requires_grad_(),
    "tuple of a torch tensor": (TORCH_X,),
    "jax array": jnp.asarray(X),
    "dict of a jax array": {"x": jnp.asarray(X)},
    "float64": X.astype(np.float64),
    "not contiguous": np.ascontiguousarray(X.swapaxes(0, 2)).swapaxes(0, 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_may_be_given_in_any_form(form):
    def named(m, x):
        return x * m.w

    sides = TorchSide(named, w=(8,)), FlaxSide(named, w=(8,))
    sides[0].forward = lambda x: sides[0].function(sides[0], x)
    report = compare(*sides, FORMS[form], seeds=1)
    assert report.verdict == "equal", str(report)
    assert verdicts(report).keys() == {"output", "grad x", "grad w"}
    picture = next(one for one in report.pictures if one.name == "output")
    assert np.array_equal(picture.torch, X * sides[0].w.detach().numpy()), "the first sample is the given numbers"


def test_bfloat16_tensors_and_nested_inputs_are_taken():
    def mix(m, parts, factor):
        return (parts["a"][0] + parts["b"]) * m.w * factor

    inputs = ({"a": [TORCH_X.bfloat16()], "b": X + 1}, 2.5)
    report = judge(mix, inputs=inputs)
    assert report.verdict == "equal"
    assert {"grad inputs[0]['a'][0]", "grad inputs[0]['b']"} <= verdicts(report).keys()
    wrong = judge(mix, lambda m, p, f: (p["a"][0] + p["b"] * 1.0001) * m.w * f, inputs=inputs)
    assert wrong.verdict == "different"


def test_arrays_without_axes_are_inputs_and_parameters_like_others():
    def heat(m, x, t):
        return x * m.t * t

    shapes = {"t": ()}
    report = judge(heat, inputs=(X, np.float32(2.5)), shapes=shapes)
    assert report.verdict == "equal"
    wrong = judge(heat, lambda m, x, t: x * m.t * t * 1.0001, inputs=(X, np.float32(2.5)), shapes=shapes)
    assert wrong.verdict == "different"
    assert {one.name: one.shape for one in wrong.failures}["grad t"] == ()


def test_keywords_are_matched_by_name_in_any_order():
    def add(m, x, y):
        return x * m.w - y

    assert judge(add, inputs={"y": X + 1, "x": X}).verdict == "equal"


def test_the_flax_side_may_be_called_in_another_way():
    def flax_call(m, hidden, deterministic):
        return hidden["h"] * m.w

    report = judge(scale, flax_call, flax_inputs={"hidden": {"h": X}, "deterministic": True})
    assert report.verdict == "equal"
    assert report.tensors[1].flax_name == "grad hidden['h']"


def test_masks_and_ids_are_inputs_without_gradients():
    mask = X > 0

    def masked(m, x, keep):
        where = torch.where if isinstance(x, torch.Tensor) else jnp.where
        return where(keep, x * m.w, 0.0)

    report = judge(masked, inputs=(X, mask))
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad inputs[0]", "grad w"}
    report = judge(lambda m, ids: m.w[ids], inputs=IDS, shapes={"w": (11, 4)})
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad w"}


BAD_CALLS = {
    "no module": (lambda t, f: compare(t, X, X), TypeError, "second must be a torch.nn.Module, .*, got ndarray"),
    "a function": (lambda t, f: compare(torch.relu, f, X), TypeError, "first must be .*parity.function.*, got builtin"),
    "a class": (lambda t, f: compare(nn.Linear, f, X), TypeError, "Linear is a class, give an instance of it"),
    "linen": (lambda t, f: compare(t, linen.Dense(4), X), TypeError, r"a Linen module, give \(module, variables\)"),
    "no inputs at all": (lambda t, f: compare(t, f), TypeError, "compare needs inputs"),
    "no inputs": (lambda t, f: compare(t, f, None), ValueError, "inputs must be an array, a tuple .*, got NoneType"),
    "a string": (lambda t, f: compare(t, f, "x"), ValueError, "inputs must be an array, a tuple .*, got str"),
    "empty": (lambda t, f: compare(t, f, ()), ValueError, "inputs must be an array, a tuple .*, got tuple"),
    "wrong shape": (
        lambda t, f: compare(t, f, X[..., :3]),
        ValueError,
        "torch module Linear raised RuntimeError: mat1",
    ),
    "unknown keyword": (
        lambda t, f: compare(t, f, {"z": X}),
        ValueError,
        "torch module Linear raised TypeError: .*'z'",
    ),
    "no devices": (lambda t, f: compare(t, f, X, device=()), ValueError, r"device \(\(\)\) must be one of cpu, gpu"),
    "three devices": (lambda t, f: compare(t, f, X, device=("cpu",) * 3), ValueError, "or a pair of them: torch's"),
    "no seeds": (
        lambda t, f: compare(t, f, X, seeds=0),
        ValueError,
        r"seeds \(0\) must be a whole number from 1 to 1000",
    ),
    "half a seed": (lambda t, f: compare(t, f, X, seeds=1.5), ValueError, r"seeds \(1.5\) must be a whole number"),
    "first seed": (lambda t, f: compare(t, f, X, first_seed=-1), ValueError, r"first_seed \(-1\) must be a whole"),
    "mode": (lambda t, f: compare(t, f, X, modes=("fast",)), ValueError, r"modes \(fast\) must be one of eager, jit"),
    "no mode": (lambda t, f: compare(t, f, X, modes=()), ValueError, "modes must hold at least one of eager, jit"),
    "dtype": (lambda t, f: compare(t, f, X, dtypes=("int8",)), ValueError, r"dtypes \(int8\) must be one of float64"),
    "device": (lambda t, f: compare(t, f, X, device="nonsense"), ValueError, "device nonsense: torch finds none on"),
    "torch on a tpu": (lambda t, f: compare(t, f, X, device="tpu"), ValueError, "device tpu: torch does not run on a"),
    "Flax's device": (
        lambda t, f: compare(t, f, X, device=("cpu", "tpu")),
        ValueError,
        "device tpu: JAX finds none on",
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_call_is_one_line(call):
    wrong, kind, message = BAD_CALLS[call]
    with pytest.raises(kind, match=message) as caught:
        wrong(*linear())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_module_that_raises_is_named(side):
    def fail(m, x):
        raise RuntimeError("out\nof order")

    sides = {"torch": scale, "flax": scale} | {side: fail}
    name = {"torch": "torch module TorchSide", "flax": "Flax module FlaxSide"}[side]
    with pytest.raises(ValueError, match=f"^{name} raised RuntimeError: out of order$"):
        judge(sides["torch"], sides["flax"])


def test_modules_left_on_the_cpu_by_name_are_compared():
    assert compare(*linear(), X, seeds=1, device="cpu").verdict == "equal"
    assert compare(*linear(), X, seeds=1, device=("cpu", "cpu")).verdict == "equal"


# ---- nothing is changed


class TorchState(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.from_numpy(TABLE.copy()))
        self.fails = fails

    def forward(self, x):
        self.calls += 1
        self.table.add_(0.0)
        if self.fails:
            raise RuntimeError("no")
        return self.norm(self.drop(self.fc(x))) + self.table


class FlaxState(nnx.Module):
    def __init__(self, fails, factor):
        rngs = nnx.Rngs(0)
        self.fc, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis=1, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.calls, self.table = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.asarray(TABLE))
        self.fails, self.factor, self.rngs = fails, factor, rngs

    def __call__(self, x):
        self.calls[...] += 1
        self.rngs.params()
        if self.fails:
            raise RuntimeError("no")
        return self.norm(self.drop(self.fc(x))) * self.factor + self.table


def keep(module):
    """Return everything about a torch module and torch itself that a comparison could change."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        "bits": {name: (id(one), one.detach().clone()) for name, one in tensors},
        "gradients": [None if one.grad is None else one.grad.clone() for one in module.parameters()],
        "requires_grad": [one.requires_grad for one in module.parameters()],
        "training": [one.training for one in module.modules()],
        "hooks": [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in module.modules()],
        "random": torch.get_rng_state(),
        "global": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }


def keep_flax(module):
    """Return the same of a Flax module and JAX itself."""
    values = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        values[path] = (type(variable), np.array(jax.random.key_data(value) if is_key else value))
    config = jax.config
    return {
        "values": values,
        "modes": (module.drop.deterministic, module.norm.use_running_average),
        "config": (config.jax_enable_x64, config.jax_disable_jit, config.jax_default_matmul_precision),
        "code": (core.Primitive.bind, *(vars(kind)["__call__"] for kind in (nnx.Linear, nnx.BatchNorm, FlaxState))),
        "numpy": (np.random.get_state()[1].copy(), np.geterr()),
    }


def assert_same(one, two, where=""):
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_same(one[key], two[key], f"{where} {key}")
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(two), where
        for first, second in zip(one, two, strict=True):
            assert_same(first, second, where)
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        assert np.array_equal(np.asarray(one), np.asarray(two), equal_nan=True), where
    else:
        assert one == two, where


@pytest.mark.parametrize(
    ("fails", "options", "outcome"),
    [
        ("", {}, "equal"),
        ("", {"transfer": False, "strict": False}, "different"),
        ("", {"factor": 1.001}, "different"),
        ("", {"dtypes": ("bfloat16",)}, "equal"),
        ("torch", {}, "raises"),
        ("flax", {}, "raises"),
    ],
    ids=lambda value: str(value) or "works",
)
def test_both_modules_and_both_frameworks_are_left_as_they_were(fails, options, outcome):
    ours, theirs = TorchState(fails == "torch"), FlaxState(fails == "flax", options.pop("factor", 1.0))
    ours.train()
    ours.fc.eval()
    ours.norm.running_mean.copy_(torch.rand(5))
    ours.fc(torch.from_numpy(X)).square().sum().backward()
    ours.fc.bias.requires_grad_(False)
    theirs.drop.deterministic = False
    before, flax_before = keep(ours), keep_flax(theirs)
    if outcome == "raises":
        with pytest.raises(ValueError, match="raised RuntimeError: no"):
            compare(ours, theirs, X, seeds=1, **options)
    else:
        assert compare(ours, theirs, X, seeds=1, **options).verdict == outcome
    assert_same(before, keep(ours))
    assert_same(flax_before, keep_flax(theirs))


def test_inputs_are_left_as_they_were():
    given = {"x": X.copy(), "y": torch.from_numpy(X.copy()).requires_grad_()}

    def mutate(m, x, y):
        if isinstance(x, torch.Tensor):
            x = x.clone().mul_(2.0)
            return x * m.w + y
        return 2.0 * x * m.w + y

    assert judge(mutate, inputs=given).verdict == "equal"
    assert np.array_equal(given["x"], X)
    assert given["y"].grad is None
    assert np.array_equal(given["y"].detach().numpy(), X)


# ---- weights


def test_weights_are_given_from_torch_to_flax_unless_the_held_ones_are_asked_about():
    ours, theirs = linear()
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert report.verdict == "different"
    assert verdicts(report)["weight weight"] == verdicts(report)["weight bias"] == "different"
    assert "weight bias: different: 4 of 4 elements that the two sides hold are not the same" in report.explain()
    theirs.kernel[...] = jnp.asarray(ours.weight.detach().numpy().T)
    theirs.bias[...] = jnp.asarray(ours.bias.detach().numpy())
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert report.verdict == "equal"
    assert verdicts(report)["weight weight"] == "equal"
    theirs.bias[...] = theirs.bias[...].at[1].multiply(1 + 1e-7)
    report = compare(ours, theirs, X, seeds=1, transfer=False)
    assert {one.name for one in report.failures if one.kind == "weight"} == {"weight bias"}
    assert next(one for one in report.tensors if one.name == "weight bias").bad == 1


def test_rules_say_which_parameter_is_which():
    def ours(m, x):
        return x @ m.a @ m.b

    def theirs(m, x):
        return x @ m.b.T @ m.a.T

    shapes = {"a": (8, 8), "b": (8, 8)}
    rules = [Rule("a", "b", "i o -> o i"), Rule("b", "a", "i o -> o i")]
    report = judge(ours, theirs, shapes=shapes, rules=rules)
    assert report.verdict == "equal"
    assert [(one.torch, one.flax, one.how) for one in report.pairing] == [("a", "b", "rules"), ("b", "a", "rules")]
    assert judge(ours, theirs, shapes=shapes, rules=[Rule("a", "a"), Rule("b", "b")]).verdict == "different"


def test_rules_that_do_not_fit_are_refused_with_all_that_is_wrong():
    with pytest.raises(WeightsMismatchError) as caught:
        judge(scale, rules=[Rule("w", "v"), Rule("x", "y")])
    assert caught.value.missing == ["x"]
    assert caught.value.unexpected == ["v"]
    with pytest.raises(WeightsMismatchError, match=r"misshapen: w: expected \(8,\), the rules give \(2, 4\)"):
        judge(scale, rules=[Rule("w", "w", "(a b) -> a b", a=2)])


def test_what_names_leave_open_is_settled_by_running():
    def ours(m, x):
        return jnp_or_torch(x).tanh(x @ m.left) @ m.right

    def theirs(m, x):
        return jnp_or_torch(x).tanh(x @ m.one.T) @ m.two

    report = compare(TorchSide(ours, left=(8, 8), right=(8, 8)), FlaxSide(theirs, two=(8, 8), one=(8, 8)), X, seeds=1)
    assert report.verdict == "equal"
    assert [(one.torch, one.flax, one.pattern, one.how) for one in report.pairing] == [
        ("left", "one", "a1 a0 -> a0 a1", "probe"),
        ("right", "two", "... -> ...", "probe"),
    ]


def jnp_or_torch(x):
    return torch if isinstance(x, torch.Tensor) else jnp


def test_what_running_leaves_open_is_refused_with_the_candidates():
    def ours(m, x):
        return x @ m.left + x @ m.right

    with pytest.raises(
        ValueError, match=r"2 make the outputs agree, give rules; candidates: left = one .*; left = two"
    ):
        compare(
            TorchSide(ours, left=(8, 4), right=(8, 4)),
            FlaxSide(lambda m, x: x @ m.one + x @ m.two, one=(8, 4), two=(8, 4)),
            X,
        )


def test_a_parameter_without_a_counterpart_is_refused_and_named():
    with pytest.raises(WeightsMismatchError, match=r"unexpected: bias \(4,\) \(torch, no Flax parameter left for it\)"):
        compare(nn.Linear(8, 4), nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)), X)


def test_tied_weights_are_one_parameter_with_both_gradients():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embed(ids)))

    class Theirs(nnx.Module):
        def __init__(self, tied):
            self.embed, self.tied = nnx.Embed(11, 8, rngs=nnx.Rngs(0)), tied

        def __call__(self, ids):
            hidden = jnp.tanh(self.embed(ids))
            table = self.embed.embedding[...]
            return hidden @ (table if self.tied else jax.lax.stop_gradient(table)).T

    report = compare(Ours(), Theirs(tied=True), IDS, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing}["embed.weight"] == "embed.embedding"
    report = compare(Ours(), Theirs(tied=False), IDS, seeds=1)
    assert {one.name for one in report.failures} == {"grad embed.weight"}
    assert report.first_divergence.direction == "backward"


def test_a_zero_initialised_bias_that_is_dropped_is_found_with_weights_of_its_own():
    class NoBias(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    ours = nn.Linear(8, 4)
    nn.init.zeros_(ours.bias)
    report = compare(ours, NoBias(8, 4, rngs=nnx.Rngs(0)), X, seeds=1)
    assert verdicts(report)["output"] == verdicts(report)["grad bias"] == "different"
    assert verdicts(report)["grad input"] == "equal"
    assert next(one for one in report.failures if one.name == "output").weights == "own"


# ---- coverage


def with_extra(m, x):
    return x * m.w + 0.0 * m.extra


def ignoring(m, x):
    return x * m.w


TWO = {"w": (8,), "extra": (8,)}


def test_a_parameter_that_nothing_reaches_is_unexercised():
    report = judge(ignoring, shapes=TWO)
    assert (report.verdict, report.unexercised, report.invariances) == ("equal", ["extra"], [])


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_parameter_that_one_side_ignores_is_a_difference(side):
    sides = {"torch": with_extra, "flax": with_extra} | {side: ignoring}
    report = judge(sides["torch"], sides["flax"], shapes=TWO)
    assert report.verdict == "different"
    assert {one.name: one.message for one in report.failures} == {
        "grad extra": f"the {side} side has this parameter and does not use it"
    }


def test_a_parameter_that_the_output_does_not_depend_on_is_an_invariance():
    def shifted(m, x):
        library = jnp_or_torch(x)
        softmax = torch.softmax if library is torch else jax.nn.softmax
        return softmax(x * m.w + m.extra, -1)

    report = judge(shifted, shapes={"w": (8,), "extra": (1,)})
    assert (report.verdict, report.invariances, report.unexercised) == ("equal", ["extra"], [])


@pytest.mark.parametrize("swallowing", ["torch", "flax"])
def test_a_parameter_of_a_side_that_passes_over_nan_is_not_taken_for_one_that_it_ignores(swallowing):
    """Fused attention gives zeros where all scores are NaN: that a key bias is read does not show as NaN there."""

    def shifted(m, x):
        library = jnp_or_torch(x)
        softmax = torch.softmax if library is torch else jax.nn.softmax
        weights = softmax(x * m.w + m.extra, -1)
        return library.nan_to_num(weights) if swallowing == ("torch" if library is torch else "flax") else weights

    report = judge(shifted, shapes={"w": (8,), "extra": (1,)})
    assert (report.verdict, report.invariances, report.unexercised) == ("equal", ["extra"], [])


def test_a_gradient_that_both_sides_stop_is_noted():
    def ours(m, x):
        return x * m.w + m.extra.detach()

    report = judge(ours, lambda m, x: x * m.w + jax.lax.stop_gradient(m.extra[...]), shapes=TWO)
    assert report.verdict == "equal"
    assert "extra: the output depends on it, but its gradient is zero on both sides" in report.notes


def test_what_was_not_reached_is_listed():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.25)

        def forward(self, x, mask=None):
            return self.drop(self.fc(x))

    class Theirs(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.fc, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)

        def __call__(self, x, positions=None):
            return self.drop(self.fc(x))

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert report.verdict == "equal"
    assert report.unreached == [
        "dropout of drop (0.25): off in eval mode",
        "argument mask of the torch module: not given",
        "dropout of drop (0.25): off in eval mode",
        "argument positions of the Flax module: not given",
    ]


# ---- outputs


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (lambda m, x: (x * m.w, x), scale, r"torch returns 2 \(\[0\] .*\), Flax returns 1 \(an array \(2, 5, 8\)\)"),
        (scale, lambda m, x: (x * m.w, x), r"torch returns 1 .*, Flax returns 2"),
        (lambda m, x: {"a": x * m.w}, lambda m, x: {"b": x * m.w}, r"torch returns 1 \(\['a'\].* Flax .* \(\['b'\]"),
        (scale, lambda m, x: (x * m.w).swapaxes(0, 1), r"output is \(2, 5, 8\) in torch and \(5, 2, 8\) in Flax"),
        (scale, lambda m, x: (x * m.w)[:, :1], r"output is \(2, 5, 8\) in torch and \(2, 1, 8\) in Flax"),
        (lambda m, x: None, scale, "the torch module TorchSide returned NoneType, which holds no tensor"),
        (scale, lambda m, x: {}, "the Flax module FlaxSide returned dict, which holds no array"),
    ],
)
def test_outputs_of_another_structure_or_shape_are_refused_and_never_cut_to_fit(ours, theirs, message):
    with pytest.raises(ValueError, match=message) as caught:
        judge(ours, theirs)
    assert "\n" not in str(caught.value)


def test_dicts_and_nested_outputs_are_compared_one_by_one():
    def both(m, x):
        return {"a": x * m.w, "b": (x + 1, None)}

    report = judge(both)
    assert report.verdict == "equal"
    assert {"output['a']", "output['b'][0]"} <= verdicts(report).keys()
    report = judge(both, lambda m, x: {"a": x * m.w, "b": (x + 1.001, None)})
    assert {one.name for one in report.failures} == {"output['b'][0]"}


@pytest.mark.parametrize(("count", "names"), [(1, {"output"}), (2, {"output[0]", "output[1]"})])
def test_an_output_is_named_by_its_place_where_there_are_several(count, names):
    report = judge(lambda m, x: (x * m.w,) * count if count > 1 else x * m.w)
    assert {name for name in verdicts(report) if name.startswith("output")} == names


def test_integers_are_compared_exactly():
    def best(m, x):
        return x * m.w, (x * m.w).argmax(-1), x * m.w > 0

    assert judge(best).verdict == "equal"
    report = judge(best, lambda m, x: (x * m.w, (x * m.w).argmax(-1).at[0, 0].add(1), x * m.w > 0))
    assert verdicts(report) == {
        "output[0]": "equal",
        "output[1]": "different",
        "output[2]": "equal",
        "grad inputs[0]": "equal",
        "grad w": "equal",
    }
    assert "output[1]: different: 1 of 10 elements are not the same" in report.explain()


def test_an_output_without_floats_can_differ():
    report = judge(lambda m, x: (x * m.w).argmax(-1), lambda m, x: (x * m.w).argmin(-1))
    assert (report.verdict, report.unexercised) == ("different", ["w"])


def where(x):
    return torch.where if isinstance(x, torch.Tensor) else jnp.where


def holes(value):
    return lambda m, x: where(x)(x > 1, value, x * m.w)


def test_nan_at_the_same_places_is_equal():
    report = judge(holes(math.nan))
    assert report.verdict == "equal"
    assert judge(holes(math.nan), lambda m, x: holes(math.nan)(m, x) * 1.001).verdict == "different"


@pytest.mark.parametrize(
    ("ours", "theirs"), [(0.0, math.nan), (math.nan, 0.0), (math.inf, -math.inf), (math.inf, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_on_one_side_is_different(ours, theirs):
    report = judge(holes(ours), holes(theirs))
    assert report.verdict == "different"
    assert report.tensors[0].verdict == "different"
    assert "elements are finite on one side only" in report.tensors[0].message
    assert json.dumps(report.to_json(), allow_nan=False)


def test_nothing_finite_is_inconclusive():
    report = judge(lambda m, x: x * m.w * math.nan)
    assert report.verdict == "inconclusive"
    assert "no element is finite on both sides, so nothing was compared" in report.message
    with pytest.raises(ParityError, match="inconclusive"):
        report.raise_for_mismatch()


def flax_noise():
    class Noise(nnx.Module):
        def __init__(self):
            self.w, self.rngs = nnx.Param(jnp.ones(8)), nnx.Rngs(0)

        def __call__(self, x):
            return x * self.w + jax.random.normal(self.rngs.noise(), x.shape)

    return Noise()


def flax_dropout():
    class Dropout(nnx.Module):
        def __init__(self):
            self.w, self.drop = nnx.Param(jnp.ones(8)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.drop(x * self.w, deterministic=False)

    return Dropout()


@pytest.mark.parametrize(
    ("side", "ours", "theirs"),
    [
        ("torch", lambda m, x: x * m.w + torch.randn_like(x), scale),
        ("torch", lambda m, x: nn.functional.dropout(x * m.w), scale),
        ("torch", lambda m, x: x * m.w * float(np.random.rand()), scale),
        ("flax", scale, flax_noise),
        ("flax", scale, flax_dropout),
        ("flax", scale, lambda m, x: x * m.w * float(np.random.rand())),
    ],
    ids=["torch-noise", "torch-dropout", "torch-numpy", "flax-noise", "flax-dropout", "flax-numpy"],
)
def test_a_module_that_is_not_deterministic_is_inconclusive(side, ours, theirs):
    report = judge(ours, theirs() if theirs in (flax_noise, flax_dropout) else theirs)
    assert report.verdict == "inconclusive"
    assert f"the {side} module is not deterministic: the same input gave results that differ by " in report.message
    assert report.tensors == []


# ---- other modules


def test_a_linen_module_is_compared_through_to_nnx():
    class Theirs(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="fc2")(jnp.tanh(linen.Dense(8, name="fc1")(x)))

    class Ours(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.fc1, self.fc2, self.factor = nn.Linear(8, 8), nn.Linear(8, 4), factor

        def forward(self, x):
            return self.fc2(torch.tanh(self.fc1(x)) * self.factor)

    theirs = nnx.bridge.ToNNX(Theirs(), rngs=nnx.Rngs(0)).lazy_init(X)
    report = compare(Ours(1.0), theirs, X, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing}["fc1.weight"] == "fc1.kernel"
    assert compare(Ours(1.001), theirs, X, seeds=1).verdict == "different"


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_embeddings_take_ids_and_a_dtype_that_is_frozen_is_lifted(dtype):
    theirs = nnx.Embed(11, 8, dtype=dtype, rngs=nnx.Rngs(0))
    report = compare(nn.Embedding(11, 8), theirs, IDS, seeds=1)
    assert report.verdict == "equal"
    assert report.tensors[0].relative < 1e-15
    assert not report.notes


def test_running_statistics_are_weights():
    def theirs(**options):
        return nnx.BatchNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0), **options)

    ours = nn.BatchNorm1d(8)
    ours.running_mean.copy_(torch.randn(8))
    ours.running_var.copy_(torch.rand(8) + 0.5)
    rows = X.reshape(10, 8)
    report = compare(ours, theirs(), rows, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing} == {
        "weight": "scale",
        "bias": "bias",
        "running_mean": "mean",
        "running_var": "var",
    }
    assert verdicts(report).keys() == {"output", "grad input", "grad weight", "grad bias"}

    class Squared(nnx.BatchNorm):
        def __call__(self, x):
            return (x - self.mean[...]) / jnp.sqrt(self.var[...] ** 2 + 1e-5) * self.scale[...] + self.bias[...]

    assert compare(ours, Squared(8, rngs=nnx.Rngs(0)), rows, seeds=1).verdict == "different"
    report = compare(ours, theirs(), rows, seeds=1, transfer=False)
    assert verdicts(report)["weight running_var"] == "different"


def test_integer_parameters_are_passed_on():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.order = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)

        def forward(self, x):
            return (x * self.weight)[..., self.order]

    class Theirs(nnx.Module):
        def __init__(self):
            self.weight, self.order = nnx.Param(jnp.ones(8)), nnx.Param(jnp.array([0, 0, 0]))

        def __call__(self, x):
            return (x * self.weight[...])[..., self.order[...]]

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad x", "grad weight"}


def test_a_module_that_is_called_twice_inside_is_one_module():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.tanh(self.fc(x)))

    class Theirs(nnx.Module):
        def __init__(self, times):
            self.fc, self.times = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), times

        def __call__(self, x):
            for _ in range(self.times):
                x = jnp.tanh(self.fc(x))
            return self.fc(x)

    assert compare(Ours(), Theirs(1), X, seeds=1).verdict == "equal"
    report = compare(Ours(), Theirs(2), X, seeds=1)
    assert (report.verdict, report.first_divergence.path) == ("different", "")
    assert {node.path: node.message for node in report.tree.walk()}["fc"].startswith("called 2 times in torch and 3")


# ---- float64


@jax.custom_vjp
def low_tanh(x):
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


low_tanh.defvjp(
    lambda x: (low_tanh(x), x.astype(jnp.float32)),
    lambda x, gradient: ((gradient * (1 - jnp.tanh(x) ** 2)).astype(gradient.dtype),),
)


class LowTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().tanh().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient.float() * (1 - x.float().tanh() ** 2)).to(gradient.dtype)


ISLANDS = {
    "none": (lambda m, x: torch.tanh(x * m.w), lambda m, x: jnp.tanh(x * m.w)),
    "both": (
        lambda m, x: torch.tanh((x * m.w).float()).to(x.dtype),
        lambda m, x: jnp.tanh((x * m.w).astype(jnp.float32)).astype(x.dtype),
    ),
    "torch": (lambda m, x: LowTanh.apply(x * m.w), lambda m, x: jnp.tanh(x * m.w)),
    "flax": (lambda m, x: torch.tanh(x * m.w), lambda m, x: low_tanh(x * m.w)),
}


@pytest.mark.parametrize("where", ISLANDS)
def test_parts_that_are_fixed_to_float32_are_proven_in_float64(where):
    report = judge(*ISLANDS[where])
    assert report.verdict == "equal"
    assert not report.notes
    assert all(one.relative < 1e-14 for one in report.tensors)
    if where == "both":
        ours, theirs = ISLANDS[where]
        assert judge(ours, lambda m, x: theirs(m, x) * (1 + 1e-9)).verdict == "different"


class ThroughNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.float32(2) * x.detach().numpy().astype(np.float32)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@jax.custom_vjp
def through_callback(x):
    return jax.pure_callback(lambda array: np.asarray(array) * np.float32(2), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


through_callback.defvjp(lambda x: (through_callback(x), None), lambda _, gradient: (gradient * 2,))

OPAQUE = {
    "torch": (lambda m, x: ThroughNumPy.apply(x * m.w), lambda m, x: x * m.w * 2),
    "flax": (lambda m, x: x * m.w * 2, lambda m, x: through_callback(x * m.w)),
    "both": (lambda m, x: ThroughNumPy.apply(x * m.w), lambda m, x: through_callback(x * m.w)),
}
REASONS = {
    "torch": "torch has no float64 here: a part of it is computed by NumPy, in lower precision",
    "flax": "flax has no float64 here: the operation pure_callback has a precision of its own",
}


@pytest.mark.parametrize("side", OPAQUE)
def test_a_side_that_has_no_float64_is_named_and_judged_by_the_other(side):
    ours, theirs = OPAQUE[side]
    report = judge(ours, theirs)
    assert report.verdict == "equal"
    assert {note for note in report.notes if "no float64 here" in note} == {
        REASONS[one] for one in ("torch", "flax") if side in (one, "both")
    }
    report = judge(ours, lambda m, x: theirs(m, x) * 1.001)
    assert report.verdict == "different"
    assert "the results differ by far more than rounding" in report.tensors[0].message
    assert (report.first_divergence.path, report.first_divergence.direction) == ("", "forward")


def values_looked_at(m, x):
    return x * m.w * 2 if (x * m.w).sum() > 0 else x * m.w


def recurrent(m, x):
    hidden, found = torch.zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        hidden = torch.tanh(x[:, t] @ m.inner + hidden * m.w)
        found.append(hidden)
    return torch.stack(found, 1)


def scanned(m, x):
    def step(hidden, row):
        hidden = jnp.tanh(row @ m.inner[...] + hidden * m.w)
        return hidden, hidden

    return jax.lax.scan(step, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def halved(m, x):
    part = x.detach().abs()
    while part.max() > 1:
        part = part / 2
    return x * m.w * part


def halved_by_xla(m, x):
    part = jax.lax.stop_gradient(jnp.abs(x))
    part = jax.lax.while_loop(lambda part: part.max() > 1, lambda part: part / 2, part)
    return x * m.w * part


CONTROL_FLOW = {
    "if in Python": (values_looked_at, values_looked_at),
    "scan": (recurrent, scanned),
    "while_loop": (halved, halved_by_xla),
    "cond": (
        values_looked_at,
        lambda m, x: jax.lax.cond((x * m.w).sum() > 0, lambda h: h * m.w * 2, lambda h: h * m.w, x),
    ),
    "jit and checkpoint": (
        lambda m, x: torch.tanh(x * m.w),
        lambda m, x: jax.checkpoint(jax.jit(jnp.tanh))(x * m.w),
    ),
}


@pytest.mark.parametrize("kind", CONTROL_FLOW)
def test_control_flow_is_followed(kind):
    ours, theirs = CONTROL_FLOW[kind]
    shapes = {"w": (4,), "inner": (8, 4)} if kind == "scan" else {"w": (8,)}
    report = judge(ours, theirs, shapes=shapes)
    assert report.verdict == "equal"
    assert not report.notes
    assert report.tensors[0].relative < 1e-13
    if kind in ("if in Python", "while_loop"):
        report = judge(ours, lambda m, x: theirs(m, x) * (1 + 1e-6), shapes=shapes)
        assert (report.verdict, report.first_divergence.direction) == ("different", "forward")


def test_a_gradient_that_one_side_defines_wrongly_is_found():
    @jax.custom_vjp
    def wrong(x):
        return jnp.tanh(x)

    wrong.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda t, gradient: (gradient * (1 - t),))
    report = judge(lambda m, x: torch.tanh(x * m.w), lambda m, x: wrong(x * m.w))
    assert verdicts(report) == {"output": "equal", "grad inputs[0]": "different", "grad w": "different"}
    assert report.first_divergence.direction == "backward"


# ---- precision


def test_modules_in_bfloat16_are_judged_in_bfloat16():
    ours, theirs = (
        nn.Linear(8, 4).bfloat16(),
        nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
    )
    report = compare(ours, theirs, X, seeds=1)
    assert report.verdict == "equal"
    assert {one.dtype for one in report.tensors} == {"bfloat16"}
    assert all(one.relative < 1e-14 for one in report.tensors)

    class Wrong(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 1.001

    theirs = Wrong(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert compare(ours, theirs, X, seeds=1).verdict == "different"


def test_other_precisions_can_be_asked_for():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.register_buffer("table", torch.from_numpy(TABLE))

        def forward(self, x):
            return self.fc(x + self.table)

    class Theirs(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.table = nnx.Variable(jnp.asarray(TABLE))

        def __call__(self, x):
            return self.fc(x + self.table[...])

    report = compare(Ours(), Theirs(), X, seeds=1, dtypes=("bfloat16", "float64"))
    assert report.verdict == "equal"
    assert [one.dtype for one in report.tensors] == ["bfloat16"] * 4 + ["float64"] * 4


def test_compiled_runs_are_judged_on_request_and_leave_buffers_alone():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    ours = Counting()
    report = compare(ours, nnx.Linear(8, 4, rngs=nnx.Rngs(0)), X, seeds=1, modes=("eager", "jit"))
    assert report.verdict == "equal"
    assert ours.calls == 0
    assert "float32, torch, eager or compiled" in report.noise

    class OnlyCompiled(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * (1.001 if COMPILED[0] else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", compiling(jax.jit))
        wrong = compare(nn.Linear(8, 4), OnlyCompiled(8, 4, rngs=nnx.Rngs(0)), X, seeds=1, modes=("jit",))
    assert wrong.verdict != "equal"


COMPILED = [False]


def compiling(jit):
    def wrapped(function, *args, **kwargs):
        def traced(*operands):
            COMPILED[0] = True
            try:
                return function(*operands)
            finally:
                COMPILED[0] = False

        return jit(traced, *args, **kwargs)

    return wrapped


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 4)

    def softmax(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        return self.softmax(self.query(x) @ x.transpose(-1, -2)) @ self.value(x)


class FlaxAttention(nnx.Module):
    def __init__(self):
        self.query, self.value = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def softmax(self, scores):
        return jax.nn.softmax(scores)

    def __call__(self, x):
        return self.softmax(self.query(x) @ x.swapaxes(-1, -2)) @ self.value(x)


class TorchSoftmaxInBfloat16(TorchAttention):
    def softmax(self, scores):
        return scores.bfloat16().softmax(-1).to(scores.dtype)


class FlaxSoftmaxInBfloat16(FlaxAttention):
    def softmax(self, scores):
        return jax.nn.softmax(scores.astype(jnp.bfloat16)).astype(scores.dtype)


class TorchTensorFloat32(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(self.short(x), self.short(self.weight), self.bias)

    def short(self, array):
        return array.half().to(array.dtype)  # as many digits as TF32 has


class FlaxTensorFloat32(nnx.Linear):
    def __call__(self, x):
        return self.short(x) @ self.short(self.kernel[...]) + self.bias[...]

    def short(self, array):
        return jax.lax.reduce_precision(array, 8, 10)


class TorchHalfWeights(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.half().to(x.dtype), self.bias)


class FlaxHalfWeights(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...].astype(jnp.float16).astype(x.dtype) + self.bias[...]


class TorchFastVariance(nn.LayerNorm):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def layer_norm(**options):
    return nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0), **options)


def flax_linear(kind):
    return kind(8, 4, rngs=nnx.Rngs(0))


LOSSES = {
    "torch: softmax in bfloat16": (TorchSoftmaxInBfloat16, FlaxAttention, X),
    "flax: softmax in bfloat16": (TorchAttention, FlaxSoftmaxInBfloat16, X),
    "torch: as in TF32": (lambda: TorchTensorFloat32(8, 4), lambda: flax_linear(nnx.Linear), X),
    "flax: as in TF32": (lambda: nn.Linear(8, 4), lambda: flax_linear(FlaxTensorFloat32), X),
    "torch: weights in float16": (lambda: TorchHalfWeights(8, 4), lambda: flax_linear(nnx.Linear), X),
    "flax: weights in float16": (lambda: nn.Linear(8, 4), lambda: flax_linear(FlaxHalfWeights), X),
    "torch: fast variance": (lambda: TorchFastVariance(8), lambda: layer_norm(use_fast_variance=False), X + 100),
    "flax: fast variance": (lambda: nn.LayerNorm(8), layer_norm, X + 100),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_precision_names_the_side(loss):
    ours, theirs, x = LOSSES[loss]
    side = loss.partition(":")[0]
    report = compare(ours(), theirs(), x, seeds=1, localise=False)
    assert report.verdict == "precision", str(report)
    assert {one.side for one in report.failures} == {side}
    assert f"output: precision: {side} loses more than its share: its rounding error is " in report.explain()
    output = report.tensors[0]
    assert (output.torch_used > 1, output.flax_used > 1) == (side == "torch", side == "flax")


def test_the_stock_norms_of_flax_are_no_false_alarm_on_ordinary_inputs():
    x = np.random.default_rng(10).normal(size=(2, 6, 8)).astype(np.float32)
    report = compare(nn.LayerNorm(8), layer_norm(), x, seeds=2, first_seed=100)
    assert report.verdict == "equal", str(report)
    assert any(note.startswith("on hard inputs (") and "the flax side loses" in note for note in report.notes)
    assert compare(nn.RMSNorm(8, eps=1e-6), nnx.RMSNorm(8, rngs=nnx.Rngs(0)), x, seeds=1).verdict == "equal"


def test_a_large_mean_is_no_false_alarm_where_both_sides_take_two_passes():
    assert compare(nn.LayerNorm(8), layer_norm(use_fast_variance=False), X + 100, seeds=1).verdict == "equal"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda square: square * (1 + 1e-4),
        lambda square: square + 1e-7,
        lambda square: square * 8 / 7,
    ],
)
def test_a_small_fault_of_scale_is_a_difference(wrong):
    class Theirs(nnx.RMSNorm):
        def __call__(self, x):
            return x * jax.lax.rsqrt(wrong((x * x).mean(-1, keepdims=True)) + self.epsilon) * self.scale[...]

    report = compare(nn.RMSNorm(8, eps=1e-6), Theirs(8, rngs=nnx.Rngs(0)), X, seeds=1, localise=False)
    assert verdicts(report)["output"] == "different"


# ---- which array is which


class TorchNamesake(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x, weight):
        return x * self.weight + 2 * weight.detach()


class FlaxNamesake(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(8))

    def __call__(self, x, weight):
        return x * self.weight + 2 * weight


def test_an_input_that_is_named_like_a_parameter_is_judged_too():
    report = compare(TorchNamesake(), FlaxNamesake(), (X, X + 1), seeds=1)
    assert report.verdict == "different"
    assert verdicts(report) == {
        "output": "equal",
        "grad x": "equal",
        "grad weight (input)": "different",
        "grad weight": "equal",
    }
    assert {one.name: one.flax_name for one in report.tensors}["grad weight (input)"] == "grad weight (input)"


def test_sides_of_two_precisions_get_the_same_inputs():
    theirs = nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    report = compare(nn.Linear(8, 4), theirs, X, seeds=1)
    assert (report.verdict, {one.side for one in report.failures}) == ("precision", {"flax"})


def turned(m, x):
    return (x * m.w).swapaxes(0, 1)


REARRANGED = {
    "transposed": (turned, X.swapaxes(0, 1)),
    "transposed, with an axis more": (turned, X.swapaxes(0, 1)[:, None]),
    "merged axes": (lambda m, x: (x * m.w).reshape(10, 8), X.reshape(10, 8)),
    "in bfloat16": (scale, X.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("form", REARRANGED)
def test_the_flax_side_may_take_an_input_in_another_shape_or_dtype(form):
    ours, flax_inputs = REARRANGED[form]

    def theirs(m, x):
        return (x[:, 0] if x.ndim == 4 else x) * m.w

    report = judge(ours, theirs, flax_inputs=np.ascontiguousarray(flax_inputs))
    assert (report.verdict, report.notes) == ("equal", [])
    assert {one.name: one.shape for one in report.tensors}["grad inputs[0]"] == X.shape
    report = judge(ours, lambda m, x: theirs(m, jnp.where(x > 0, x, 0.999 * x)), flax_inputs=flax_inputs)
    assert set(verdicts(report).values()) == {"different"}


def test_inputs_of_the_same_numbers_are_matched_by_where_they_stand():
    def minus(m, q, k):
        return q * m.w - k

    assert judge(minus, inputs={"q": X, "k": X}, flax_inputs={"k": X, "q": X}).verdict == "equal"


def test_inputs_that_only_one_side_takes_stay_as_given_and_are_named():
    one_hot = np.eye(11, dtype=np.float32)[IDS] * 2

    def looked_up(m, x, ids):
        return x * m.w[ids] * 2

    report = judge(
        looked_up, lambda m, x, rows: x * (rows @ m.w), (X, IDS), flax_inputs=(X, one_hot), shapes={"w": (11, 8)}
    )
    assert report.verdict == "equal"
    assert any("inputs[1] of Flax; taken as given in every sample" in note for note in report.notes)
    wrong = judge(scale, lambda m, x: x * m.w * 0.5, flax_inputs=2.5 * X)
    assert wrong.verdict == "different"
    assert any("inputs[0] of torch, inputs[0] of Flax; taken" in note for note in wrong.notes)


def test_which_way_equal_numbers_are_turned_is_not_guessed():
    keep = np.ones((2, 5), np.float32)
    report = judge(
        lambda m, x, k: x * m.w * k[..., None],
        lambda m, x, k: x * m.w * k.T[..., None],
        (X, keep),
        flax_inputs=(X, keep.T.copy()),
    )
    assert report.verdict == "equal"
    assert any("input inputs[1] is 1 everywhere: taken for a mask" in note for note in report.notes)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_input_hides_no_fault(value):
    report = compare(nn.LayerNorm(8), nnx.LayerNorm(8, rngs=nnx.Rngs(0)), np.full((2, 8), value), seeds=1)
    assert verdicts(report)["output"] == "different"


def test_keys_of_outputs_and_inputs_are_matched_whatever_their_order():
    def ours(m, parts):
        return {"a": parts["x"] * m.w, "b": {10: parts["y"], 2: parts["y"] + 1}}

    def theirs(m, parts):
        return {"b": {2: parts["y"] + 1, 10: parts["y"]}, "a": parts["x"] * m.w}

    report = judge(ours, theirs, ({"x": X, "y": X + 1},), flax_inputs=({"y": X + 1, "x": X},))
    assert report.verdict == "equal"
    wrong = judge(ours, lambda m, parts: theirs(m, parts) | {"a": parts["x"] * 2}, ({"x": X, "y": X + 1},))
    assert {one.name for one in wrong.failures} == {"output['a']", "grad inputs[0]['x']", "grad w"}


@dataclasses.dataclass
class Logits:
    logits: typing.Any
    cache: typing.Any = None


ONLY_ONE = {"a dict": lambda y: {"logits": y}, "an object": Logits, "beside a cache": lambda y: Logits(y, object())}


@pytest.mark.parametrize("what", ONLY_ONE)
def test_an_array_alone_stands_for_a_container_of_one(what):
    def wrapped(m, x):
        return ONLY_ONE[what](x * m.w)

    assert judge(wrapped, scale).verdict == "equal"
    wrong = judge(wrapped, lambda m, x: x * m.w * 1.001)
    assert verdicts(wrong) == {"output": "different", "grad inputs[0]": "different", "grad w": "different"}


def test_the_container_may_be_on_either_side():
    assert judge(scale, lambda m, x: {"logits": x * m.w}).verdict == "equal"


def test_one_array_under_two_names_is_refused():
    with pytest.raises(ValueError, match=r"differ in structure: torch returns 1 \(\['logits'\] .* 1 \(\['hidden'\]"):
        judge(lambda m, x: {"logits": x * m.w}, lambda m, x: {"hidden": x * m.w})


class Ab(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


class Ba(typing.NamedTuple):
    b: typing.Any
    a: typing.Any


NOTHING_TO_JUDGE = {
    "fields in another order": (lambda m, x: Ab(x * m.w, x), lambda m, x: Ba(x, x * m.w), X, "differ in structure"),
    "an empty batch": (scale, scale, X[:0], r"nothing to compare: the outputs are empty \(1 \(an array \(0, 5, 8\)"),
    "complex outputs": (
        lambda m, x: torch.fft.fft(x * m.w),
        lambda m, x: jnp.fft.fft(x * m.w),
        X,
        "output of torch is complex64; complex numbers are not judged",
    ),
    "complex inputs": (scale, scale, X + 1j, "inputs must hold numbers or bools, one has dtype complex64; give real"),
    "words": (scale, scale, np.array(["a"]), "inputs must hold numbers or bools, one has dtype <U1"),
    "NaN": (scale, scale, X * np.nan, r"input inputs\[0\] holds nothing but NaN"),
}


@pytest.mark.parametrize("what", NOTHING_TO_JUDGE)
def test_what_can_not_be_judged_is_refused_in_one_line(what):
    ours, theirs, inputs, message = NOTHING_TO_JUDGE[what]
    with pytest.raises(ValueError, match=message) as caught:
        judge(ours, theirs, inputs)
    assert "\n" not in str(caught.value)


def test_modules_without_weights_yet_are_refused_in_one_line():
    ours, theirs = linear()
    with torch.device("meta"):
        meta = nn.Linear(8, 4)
    abstract = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    for pair, message in (
        ((meta, theirs), "weight weight of torch module Linear is on the meta device and holds no numbers"),
        ((nn.LazyLinear(4), theirs), "weights of the torch module LazyLinear cannot be read: .*uninitialized"),
        ((ours, abstract), "of the Flax module Linear holds no numbers; initialise it first"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            compare(*pair, X)
        assert "\n" not in str(caught.value)


def test_a_module_that_was_compiled_is_taken_as_it_was():
    ours, theirs = linear()
    assert compare(torch.compile(ours), theirs, X, seeds=1).verdict == "equal"


def test_an_output_of_another_kind_is_noted():
    report = judge(lambda m, x: (x * m.w > 0).float(), lambda m, x: x * m.w > 0)
    assert "output is float32 in torch and bool in Flax; only its values are compared" in report.notes


def test_a_few_nans_in_the_inputs_are_noted():
    holed = X.copy()
    holed[0, 0, 0] = np.nan
    report = judge(scale, inputs=holed)
    assert (report.verdict, report.notes) == (
        "equal",
        [
            "input inputs[0]: 1 of 80 elements are NaN; drawn inputs hold none",
            "output: 1 of 80 elements are NaN or infinite on both sides (your weights), and were not compared",
            "grad w: 1 of 8 elements are NaN or infinite on both sides (your weights), and were not compared",
        ],
    )


# ---- tables


def test_the_rounding_of_tables_is_no_difference_in_meaning():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.register_buffer("table", torch.sin(torch.arange(5.0)[:, None] * 1.3 / 10 ** torch.arange(8.0)))

        def forward(self, x):
            return x * self.weight + self.table

    class Theirs(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(8))
            self.table = nnx.Variable(jnp.sin(jnp.arange(5.0)[:, None] * 1.3 / 10 ** jnp.arange(8.0)))

        def __call__(self, x):
            return x * self.weight[...] + self.table[...]

    assert compare(Ours(), Theirs(), X, seeds=1).verdict == "equal"
