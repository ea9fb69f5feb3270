"""Dropout that draws from streams and generators, inside the transforms of `torch.func` and in captured graphs."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_attn
from torch_attn import functional
from torch_attn.dropout import Dropout
from torch_attn.random import JaxRngs

EXAMPLES = 3

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")  # in torch's jvp


def build(rngs=True):
    torch.manual_seed(0)
    return torch_attn.MultiHeadAttention(6, 6, 8, 0.5, 2, rngs=JaxRngs(3) if rngs else None)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def weigh(outputs):
    return (outputs * torch.cos(torch.arange(outputs.numel())).reshape(outputs.shape)).sum()


def test_gradients_and_tangents_are_those_of_autograd():
    x, tangent = draw(2, 5, 6), draw(2, 5, 6)
    plain = x.clone().requires_grad_()
    outputs = build()(plain)
    weigh(outputs).backward()
    modules = [build() for _ in range(3)]
    value, pull = vjp(modules[0], x)
    torch.testing.assert_close(value, outputs)
    torch.testing.assert_close(pull(torch.cos(torch.arange(60)).reshape(2, 5, 6))[0], plain.grad)
    torch.testing.assert_close(grad(lambda x: weigh(modules[1](x)))(x), plain.grad)
    slope = jvp(lambda x: weigh(modules[2](x)), (x,), (tangent,))[1]
    torch.testing.assert_close(slope, (plain.grad * tangent).sum())
    assert {int(module.dropout.rngs.count) for module in modules} == {1}


def test_different_examples_draw_the_masks_of_a_batch():
    x = draw(EXAMPLES, 2, 5, 6)
    mapped, plain = build(), build()
    found = vmap(mapped, randomness="different")(x)
    torch.testing.assert_close(found, plain(x.flatten(0, 1)).unflatten(0, (EXAMPLES, 2)))
    assert int(mapped.dropout.rngs.count) == 1
    twice = vmap(vmap(mapped, randomness="different"), randomness="different")(x)
    torch.testing.assert_close(twice.flatten(0, 1), plain(x.flatten(0, 1)))


def test_the_same_randomness_draws_one_mask():
    x = draw(2, 5, 6)
    found = vmap(build(), randomness="same")(x.expand(EXAMPLES, 2, 5, 6))
    torch.testing.assert_close(found, build()(x).expand(EXAMPLES, 2, 5, 6))


def test_gradients_per_example_have_their_own_masks():
    x = draw(EXAMPLES, 5, 6)
    mapped, plain, source = build(), build(), x.clone().requires_grad_()
    found = vmap(grad(lambda x: weigh(mapped(x))), randomness="different")(x)
    sum(weigh(one) for one in plain(source)).backward()
    torch.testing.assert_close(found, source.grad)


def test_members_of_an_ensemble_drop_out_differently():
    module, x = build(), draw(2, 5, 6)
    stacked = {name: value.detach().expand(EXAMPLES, *value.shape) for name, value in module.named_parameters()}
    found = vmap(lambda weights: functional_call(module, weights, (x,)), randomness="different")(stacked)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found.flatten(0, 1), build()(x.repeat(EXAMPLES, 1, 1)))


@pytest.mark.parametrize("implementation", ["reference", "cpu_flash"])
@pytest.mark.parametrize("source", [lambda: JaxRngs(1), lambda: JaxRngs(1, x64=True), lambda: torch.Generator()])
def test_functions_draw_as_the_randomness_of_vmap_says(source, implementation):
    def attend(rng, heads):
        return functional.dot_product_attention(
            heads, heads, heads, dropout=0.5, rng=rng, implementation=implementation
        )

    heads = draw(EXAMPLES, 2, 5, 2, 3)
    expected = attend(source(), heads.flatten(0, 1)).unflatten(0, (EXAMPLES, 2))
    rng = source()
    torch.testing.assert_close(vmap(lambda heads: attend(rng, heads), randomness="different")(heads), expected)
    rng = source()
    same = vmap(lambda heads: attend(rng, heads), randomness="same")(heads)
    torch.testing.assert_close(same[1], attend(source(), heads[1]))
    with pytest.raises(RuntimeError, match=r"^dropout inside vmap needs randomness='same' or randomness='different'$"):
        vmap(lambda heads: attend(rng, heads))(heads)


def test_different_masks_of_what_is_equal_are_refused():
    module, x = build(), draw(2, 5, 6)
    message = r"^vmap with randomness='different' drops out what is the same for all examples; use 'same'$"
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda factor: factor * module(x), randomness="different")(torch.ones(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_transforms_of_checkpoints_are_refused(reentrant):
    module = build()
    with pytest.raises(RuntimeError, match=r"saved tensor hooks|setup_context"):  # by torch
        grad(lambda x: weigh(checkpoint(module, x, use_reentrant=reentrant)))(draw(2, 5, 6))


@pytest.mark.filterwarnings("ignore")  # torch warns of what it makes of eval mode
@pytest.mark.parametrize(
    ("capture", "name"),
    [
        (lambda module, x: torch.jit.trace(module, x), "a trace"),
        (lambda module, x: make_fx(module)(x), "a trace"),
        (lambda module, x: linearize(module, x), "a trace"),
        (lambda module, x: torch.export.export(module, (x,), strict=False), "an exported program"),
    ],
)
def test_a_capture_that_would_keep_one_mask_is_refused(capture, name):
    message = rf"^{name} would repeat one draw of the stream 'default' in every run; use eval\(\) or rngs=None$"
    with pytest.raises(RuntimeError, match=message):
        capture(build(), draw(2, 5, 6))
    capture(build().eval(), draw(2, 5, 6))


def test_draws_while_a_cuda_graph_is_captured_are_refused(monkeypatch):
    module = build()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"^a CUDA graph would repeat one draw of the stream 'default' in every run; "
    ):
        module(draw(2, 5, 6))
    module.eval()(draw(2, 5, 6))
    assert int(module.dropout.rngs.count) == 0


@pytest.mark.parametrize(
    "transform", [lambda f: vmap(f, randomness="different"), lambda f: grad(lambda x: weigh(f(x)))]
)
def test_compiled_transforms_of_streams_are_refused(transform):
    torch._dynamo.reset()
    layer = Dropout(0.5, rngs=JaxRngs(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside torch\.func inside torch\.compile"):
        torch.compile(transform(layer), backend="eager", fullgraph=True)(torch.ones(3, 8))
    assert int(layer.rngs.count) == 0


@pytest.mark.parametrize("tokens", [4, 200])
@pytest.mark.parametrize("operand", ["query", "bias"])
def test_a_gradient_by_a_transform_has_gradients_outside_of_it(operand, tokens):
    x, outside = draw(1, tokens, 2, 8), draw(*{"query": (8, 8), "bias": (1, 2, tokens, tokens)}[operand])
    found = []
    for implementation in (None, "reference"):
        leaf = outside.clone().requires_grad_()

        def loss(x, leaf=leaf, implementation=implementation):
            query, options = (x @ leaf, {}) if operand == "query" else (x, {"bias": leaf})
            return weigh(functional.dot_product_attention(query, x, x, implementation=implementation, **options))

        slope = grad(loss)(x)
        found.append((slope, *torch.autograd.grad(slope.square().sum(), leaf)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
