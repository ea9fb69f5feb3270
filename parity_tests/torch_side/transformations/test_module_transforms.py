"""Every class under the transformations of torch: `torch.vmap`, derivatives forward and twice, programs of open sizes.

The twin is `jax_side/transformations/test_transforms.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import torch_attn
from attn_bridge.specs import VARIANTS, FeedForwardConfig, MixtureOfExpertsConfig, find_variant
from torch_attn.blocks.mixture_of_experts import MixtureOfExperts

from ...contract import modules, torch_backend
from ...support.calls.bad_calls import D_IN, MODULES

LENGTH = 140
"""Tokens of exported programs: more than a block of a window, or than an indexer chooses."""

MODERN = [variant.name for variant in VARIANTS if variant.group == "modern" and variant.examples]
WINDOW, LEARNED_BIAS = "MultiHeadLatentAttention window", "GroupedQueryAttention t5-decoder"
CLASSES = [*MODULES, *MODERN, "RMSNorm", WINDOW, LEARNED_BIAS]
MASKED = [name for name in CLASSES if name not in ("LayerNorm", "RMSNorm", "CrossAttention")]

pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning",  # in torch's jvp
    "ignore:There is a performance drop:UserWarning",
)


class Called(torch.nn.Module):
    """A module whose call is that of an attention to itself."""

    def __init__(self, inner: torch.nn.Module, crosses: bool):
        super().__init__()
        self.inner, self.crosses = inner, crosses

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        options = {} if mask is None else {"attention_mask": mask}
        return self.inner(x, **options, **({"context": x} if self.crosses else {}))


@functools.cache
def made(case: str, seed: int = 0) -> tuple[Called, int]:
    """Return a module in float64 and the width of its input."""
    name, _, example = case.partition(" ")
    if name in MODULES:
        longer = {"context_length": LENGTH} if "context_length" in MODULES[name] else {}
        return Called(modules.make(torch_backend, name, seed, **longer).double(), False), D_IN
    if name == "RMSNorm":
        return Called(torch_attn.RMSNorm(D_IN).double(), False), D_IN
    if not example:
        module, x = modules.make_example(torch_backend, name, seed)
        return Called(module.double(), name == "CrossAttention"), x.shape[-1]
    config = next(each.config for each in find_variant(name).examples if each.name == example)
    module = torch_backend.build(name, config=config)
    torch_backend.load(module, modules.draw_weights(config, seed))
    return Called(module.eval().double(), False), config.d_in


def make_traced(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Return the graph of a call."""
    return make_fx(module)(*inputs)


def tokens(case: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(0.3 * modules.draw(*shape, made(case)[1], seed=seed, dtype="float64"))


def alone(call: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    return torch.stack([call(*each) for each in zip(*batches, strict=True)])


def assert_close(got: Tensor, wanted: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("case", CLASSES)
def test_vmap_gives_what_calls_give(case):
    call, x = made(case)[0], tokens(case, 3, 2, 5)
    assert_close(vmap(call, in_dims=2, out_dims=1)(x.movedim(0, 2)).movedim(1, 0), alone(call, x))
    if case in MASKED:
        masks = torch.from_numpy(modules.PADDING).expand(3, 2, 5) & (
            torch.arange(5) != torch.tensor([[[2]], [[3]], [[9]]])
        )
        assert_close(vmap(call)(x, masks), alone(call, x, masks))
        assert_close(vmap(call, in_dims=(None, 0))(x[0], masks.int()), alone(lambda mask: call(x[0], mask), masks))


@pytest.mark.parametrize("case", [case for case in CLASSES if case != "RMSNorm"])
def test_an_ensemble_gives_what_its_members_give(case):
    members, x = [made(case, seed)[0] for seed in (0, 1)], tokens(case, 2, 5)
    weights, buffers = stack_module_state(members)
    got = vmap(lambda *state: functional_call(members[0], state, (x,)))(weights, buffers)
    assert_close(got, torch.stack([member(x) for member in members]))


def mixture() -> MixtureOfExperts:
    torch.manual_seed(0)
    experts = FeedForwardConfig(d_in=8, hidden_dim=12)
    return MixtureOfExperts(MixtureOfExpertsConfig(experts, num_experts=4, top_k=2)).double()


def test_experts_that_overflow_for_tokens_of_others_change_nothing():
    config = MixtureOfExpertsConfig(FeedForwardConfig(2, 2), num_experts=2, top_k=1)
    module, x = MixtureOfExperts(config), torch.tensor([[1e-30, 1e-30], [-1.0, 1e30]])
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        for number, scale in enumerate((1e30, 1e-30)):
            for weight in module.experts[number].parameters():
                weight.fill_(scale)

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        out = call(x)
        return [out, *torch.autograd.grad(out.sum(), list(module.experts.parameters()))]

    wanted = gradients(module)
    assert all(torch.isfinite(array).all() for array in wanted)
    for got, want in zip(gradients(torch.compile(module, backend="aot_eager")), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_experts_are_chosen_for_each_sample_inside_vmap():
    module = mixture()
    weights = dict(module.named_parameters())
    x = torch.from_numpy(modules.draw(3, 5, 8, seed=0, dtype="float64"))
    assert_close(vmap(module)(x), alone(module, x))

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, weights, (x,)).square().sum()

    got = vmap(grad(loss), (None, 0))(weights, x)
    for index, sample in enumerate(x):
        wanted = grad(loss)(weights, sample)
        for name, gradient in got.items():
            assert_close(gradient[index], wanted[name])


@pytest.mark.parametrize("case", CLASSES)
def test_derivatives_forward_and_twice_are_those_of_gradients(case):
    call, x, tangent = made(case)[0], tokens(case, 1, 70), tokens(case, 1, 70, seed=1)

    def loss(x: Tensor) -> Tensor:
        return call(x).sin().sum()

    (output, slope), (_, pull) = jvp(call, (x,), (tangent,)), vjp(call, x)
    assert_close((slope * output.cos()).sum(), (pull(output.cos())[0] * tangent).sum())
    curve = jvp(grad(loss), (x,), (tangent,))[1]
    largest = float(curve.detach().abs().max())
    torch.testing.assert_close(
        grad(lambda x: (grad(loss)(x) * tangent).sum())(x), curve, rtol=1e-7, atol=1e-9 * max(largest, 1.0)
    )
    step = 1e-5 * tangent
    difference = (grad(loss)(x + step) - grad(loss)(x - step)) / 2e-5
    torch.testing.assert_close(difference, curve, rtol=1e-3, atol=1e-4 * max(largest, 1.0))


@pytest.mark.parametrize("case", [case for case in CLASSES if case not in modules.RECURRENT])  # test_recurrent_calls.py
def test_a_program_of_open_sizes_is_exported(case):
    call, sizes = made(case)[0], {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("t", min=2, max=LENGTH)}
    program = torch.export.export(call, (tokens(case, 2, 70),), dynamic_shapes=(sizes,)).module()
    for x in (tokens(case, 1, 3), tokens(case, 2, LENGTH)):
        assert_close(program(x), call(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", CLASSES)
def test_a_traced_program_takes_other_sizes(case):
    call = made(case)[0]
    for length in (1, 3):  # fewer than a window, or than an indexer chooses, see the first as a whole
        program = torch.jit.trace(call, (tokens(case, 2, length),), check_trace=False)
        for x in (tokens(case, 1, 3), tokens(case, 2, LENGTH)):
            torch.testing.assert_close(program(x), call(x), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("record", [functools.partial(torch.jit.trace, check_trace=False), make_traced])
def test_a_traced_program_chooses_experts_for_other_tokens(record):
    module = mixture().requires_grad_(False)
    x = torch.from_numpy(modules.draw(3, 40, 8, seed=0, dtype="float64"))
    assert len(module.choose(x[0, :1])[0].unique()) < 4 == len(module.choose(x[0])[0].unique())
    program = record(module, (x[:1, :1].expand(3, 40, 8),))
    assert_close(program(x), module(x))
