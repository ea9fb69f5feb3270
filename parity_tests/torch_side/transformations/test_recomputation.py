"""Gradients with activation checkpointing are those without it, whatever dropout draws from."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torch_attn
from attn_bridge import masks
from attn_bridge.specs import GroupedQueryAttentionConfig, find_variant
from parity_tests.support.calls import cover
from parity_tests.support.calls.bad_calls import MODULES
from torch_attn import functional, recomputation
from torch_attn.dropout import Dropout
from torch_attn.random import JaxRngs, RngStream

DECODER = {"vocab_size": 11, "context_length": 8, "emb_dim": 8, "n_heads": 2, "n_layers": 2}


class AfterLinear(nn.Module):
    """A model of whole tokens, which takes vectors."""

    def __init__(self, model):
        super().__init__()
        self.mix, self.model = nn.Linear(6, 11, bias=False), model
        nn.init.ones_(self.mix.weight)

    def forward(self, x):
        return self.model(self.mix(x).argmax(-1)) * x.mean()


def attention(name, rngs, **options):
    return getattr(torch_attn, name)(**{**MODULES[name], "dropout": 0.5, "d_in": 6, **options}, rngs=rngs)


BUILD = {
    "Dropout": lambda rngs: nn.Sequential(nn.Linear(6, 6), Dropout(0.5, rngs=rngs)),
    "CausalAttention": functools.partial(attention, "CausalAttention"),
    "MultiHeadAttentionWrapper": functools.partial(attention, "MultiHeadAttentionWrapper"),
    "MultiHeadAttention": functools.partial(attention, "MultiHeadAttention"),
    "GPTModel": lambda rngs: AfterLinear(
        torch_attn.GPTModel({**DECODER, "drop_rate": 0.5, "qkv_bias": True}, rngs=rngs)
    ),
}


def build(name, rngs=True):
    torch.manual_seed(0)
    module = BUILD[name](JaxRngs(3) if rngs else None)
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.train()


def streams(module):
    return [one.rngs for one in module.modules() if isinstance(getattr(one, "rngs", None), RngStream)]


def weigh(outputs):
    return (outputs * torch.cos(torch.arange(outputs.numel())).reshape(outputs.shape)).sum()


def step(module, call=None, passes=1):
    """Return output, gradients, and what the next step will draw from."""
    torch.manual_seed(2)
    x = torch.randn(2, 5, 6).requires_grad_()
    outputs = (call or module)(x)
    for remaining in reversed(range(passes)):
        weigh(outputs).backward(retain_graph=remaining > 0)
    gradients = [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    counts = [int(stream.count) for stream in streams(module)]
    return [outputs.detach(), *gradients], [*counts, torch.rand(1).item()]


def assert_same(found, expected):
    assert found[1] == expected[1], "counts continue as without recomputation"
    assert len(found[0]) == len(expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def every_second_policy():
    seen = []

    def policy(context, operation, *args, **kwargs):
        seen.append(operation)
        return CheckpointPolicy.MUST_SAVE if len(seen) % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def nested(module, x):
    return checkpoint(lambda x: checkpoint(module, x, use_reentrant=False) + module(x).mean(), x, use_reentrant=False)


PLAIN = functools.partial(checkpoint, use_reentrant=False)
WAYS = {
    "plain": PLAIN,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "without early stop": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "global state not preserved": functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "debug": functools.partial(checkpoint, use_reentrant=False, debug=True),
    "products saved": functools.partial(PLAIN, context_fn=selective([torch.ops.aten.mm.default])),
    "all saved": functools.partial(PLAIN, context_fn=selective(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)),
    "half saved": functools.partial(PLAIN, context_fn=lambda: selective(every_second_policy())()),
    "wrapper": lambda module, x: wrappers.checkpoint_wrapper(module)(x),
    "reentrant wrapper": lambda module, x: wrappers.checkpoint_wrapper(
        module, checkpoint_impl=wrappers.CheckpointImpl.REENTRANT
    )(x),
    "composable": lambda module, x: composable_checkpoint(module)(x),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("plain", "CausalAttention"),
        ("plain", "MultiHeadAttentionWrapper"),
        ("plain", "MultiHeadAttention"),
        ("plain", "GPTModel"),
        ("reentrant", "Dropout"),
        ("reentrant", "MultiHeadAttention"),
        ("reentrant", "GPTModel"),
        *zip(list(WAYS)[2:], ["MultiHeadAttention", "GPTModel", "CausalAttention"] * 3, strict=True),
    ],
)
def test_recomputed_dropout_gives_the_gradients_of_plain_calls(way, name):
    module = build(name)
    assert_same(step(module, functools.partial(WAYS[way], module)), step(build(name)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_from_the_global_generator_is_recomputed_too(reentrant):
    module = build("MultiHeadAttention", rngs=False)
    call = functools.partial(checkpoint, module, use_reentrant=reentrant)
    assert_same(step(module, call), step(build("MultiHeadAttention", rngs=False)))


@pytest.mark.parametrize("implementation", ["reference", "cpu_flash"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_generators_of_callers_are_recomputed_too(reentrant, implementation):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x):
            heads = x.unflatten(-1, (2, 3))
            options = {"dropout": 0.5, "rng": self.generator, "implementation": implementation}
            first = functional.dot_product_attention(heads, heads, heads, **options)
            return functional.dot_product_attention(first, heads, first, **options)

    module, plain = Attention(), Attention()
    assert_same(step(module, functools.partial(checkpoint, module, use_reentrant=reentrant)), step(plain))
    assert torch.equal(module.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_kernels_recompute_their_dropout(reentrant):
    def attend(stream, x):
        heads = x.unflatten(-1, (2, 3))
        return functional.dot_product_attention(
            heads, heads, heads, dropout=0.5, rng=stream, implementation="cpu_flash"
        )

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.rngs = JaxRngs(3).dropout

        def forward(self, x):
            return attend(self.rngs, x)

    module = Attention()
    assert_same(step(module, functools.partial(checkpoint, module, use_reentrant=reentrant)), step(Attention()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_of_a_sequence_are_recomputed(reentrant):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), Dropout(0.5, rngs=rngs))])

    rngs = JaxRngs(1)
    expected = step(layers())
    rngs = JaxRngs(1)
    module = layers()
    call = functools.partial(checkpoint_sequential, module, 4, use_reentrant=reentrant)
    assert_same(step(module, lambda x: call(input=x)), expected)


def test_modules_that_share_a_stream_are_recomputed_in_order():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.rngs = JaxRngs(1).dropout

        def forward(self, x):
            first = x * self.rngs.bernoulli(0.5, x.shape)
            return first * self.rngs.uniform(x.shape) + checkpoint(torch.sin, x, use_reentrant=False)

    module, plain = Shared(), Shared()
    assert_same(
        step(module, lambda x: module(PLAIN(module, PLAIN(module, x)))), step(plain, lambda x: plain(plain(plain(x))))
    )


def test_nested_checkpoints_recompute_each_level():
    module, plain = build("MultiHeadAttention"), build("MultiHeadAttention")
    found = step(module, functools.partial(nested, module))
    assert_same(found, step(plain, lambda x: plain(x) + plain(x).mean()))


@pytest.mark.parametrize("way", ["plain", "wrapper"])
def test_a_retained_graph_is_recomputed_twice(way):
    module = build("MultiHeadAttention")
    assert_same(
        step(module, functools.partial(WAYS[way], module), passes=2), step(build("MultiHeadAttention"), passes=2)
    )


def test_a_gradient_within_a_checkpoint_is_recomputed():
    def penalised(module, inner, x):
        outputs = inner(module, x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs + slope.square().sum()

    module, plain = build("Dropout"), build("Dropout")
    found = step(module, lambda x: penalised(module, PLAIN, x))
    assert_same(found, step(plain, lambda x: penalised(plain, lambda f, x: f(x), x)))


def test_draws_go_on_after_a_forward_pass_that_failed():
    def fails(x):
        module(x)
        raise ValueError("stop")

    module, plain = build("MultiHeadAttention"), build("MultiHeadAttention")
    for reentrant in (False, True):
        with pytest.raises(ValueError, match="stop"):
            checkpoint(fails, torch.ones(2, 5, 6, requires_grad=True), use_reentrant=reentrant)
        plain(torch.ones(2, 5, 6))
    assert not recomputation._LOCAL.active
    assert_same(step(module, functools.partial(PLAIN, module)), step(plain))


def test_a_step_without_gradients_counts_once():
    module = build("MultiHeadAttention")
    with torch.no_grad():
        PLAIN(module, torch.ones(2, 5, 6))
    assert int(module.dropout.rngs.count) == 1


def test_each_thread_recomputes_what_it_drew():
    def run(name, ready, go):
        x = torch.ones(40, requires_grad=True)
        outputs = checkpoint(lambda x: x * layer(x), x, use_reentrant=False)
        ready.set()
        go.wait(60)
        outputs.sum().backward()
        results[name] = outputs.detach(), x.grad

    layer, results = Dropout(0.5, rngs=JaxRngs(0)), {}
    events = [threading.Event() for _ in range(3)]
    threads = [threading.Thread(target=run, args=(name, events[name], events[2])) for name in range(2)]
    for thread, ready in zip(threads, events[:2], strict=True):
        thread.start()
        assert ready.wait(60)
    events[2].set()
    for thread in threads:
        thread.join()
    assert not torch.equal(results[0][0], results[1][0])
    for outputs, gradient in results.values():
        torch.testing.assert_close(gradient, 2 * outputs)
    assert int(layer.rngs.count) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_noise_on_gradients_is_new_in_each_backward_pass(reentrant):
    module, noise = build("MultiHeadAttention"), JaxRngs(noise=7).noise
    drawn = []
    module.W_query.weight.register_hook(lambda gradient: drawn.append(noise.uniform(3)))
    for _ in range(2):
        step(module, functools.partial(checkpoint, module, use_reentrant=reentrant))
    again = JaxRngs(noise=7).noise
    assert all(torch.equal(one, again.uniform(3)) for one in drawn)
    assert int(noise.count) == len(drawn) == 2


# ---- compiled code


@cover.some("reentrant", [False, True], always=[False])
def test_compiled_modules_are_recomputed(reentrant):
    torch._dynamo.reset()
    module = build("CausalAttention")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    plain = build("CausalAttention")
    for _ in range(2):
        found = step(module, functools.partial(checkpoint, compiled, use_reentrant=reentrant))
        assert_same(found, step(plain))


def test_checkpoints_within_compiled_functions_are_recomputed():
    torch._dynamo.reset()
    module = build("Dropout")
    assert_same(
        step(module, torch.compile(functools.partial(PLAIN, module), backend="aot_eager")), step(build("Dropout"))
    )


def test_graphs_with_a_checkpoint_recompute_the_same_keys():
    torch._dynamo.reset()
    module = build("Dropout")
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        call = torch.compile(functools.partial(PLAIN, module), backend="aot_eager_decomp_partition", fullgraph=True)
        assert_same(step(module, call), step(build("Dropout")))


def test_a_recomputation_that_alone_is_compiled_is_refused():
    torch._dynamo.reset()
    module = build("Dropout")
    compiled = torch.compile(module, backend="eager")
    calls = iter([module])
    with pytest.raises(
        RuntimeError, match=r"^compiled code drew from the stream '\w+' in a recomputation only, and so "
    ):
        step(module, functools.partial(checkpoint, lambda x: next(calls, compiled)(x), use_reentrant=True))


# ---- refused


class Recomputed(torch.autograd.Function):
    """The checkpoint of a library that torch does not know."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, cotangent):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.module(x).backward(cotangent)
        return None, x.grad


def attend_from_generator(implementation):
    generator = torch.Generator()
    return lambda x: functional.dot_product_attention(
        *[x.unflatten(-1, (2, 3))] * 3, dropout=0.5, rng=generator, implementation=implementation
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("MultiHeadAttention"),
        lambda: build("Dropout"),
        lambda: attend_from_generator("reference"),
        lambda: attend_from_generator("cpu_flash"),
    ],
)
def test_dropout_in_other_backward_passes_is_refused(make):
    outputs = Recomputed.apply(make(), torch.ones(2, 5, 6, requires_grad=True))
    message = r"^dropout in a backward pass would draw another mask than the forward pass did; recompute with .*[^\n]$"
    with pytest.raises(RuntimeError, match=message):
        outputs.sum().backward()


def test_a_recomputation_that_draws_more_is_refused():
    layer = Dropout(0.5, rngs=JaxRngs(0))
    times = iter([1, 2])
    x = torch.ones(5, requires_grad=True)
    outputs = checkpoint(
        lambda x: functools.reduce(lambda x, _: layer(x), range(next(times)), x), x, use_reentrant=True
    )
    message = r"^a recomputation draws more keys from the stream 'default' than its forward pass did \(1\)$"
    with pytest.raises(RuntimeError, match=message):
        outputs.sum().backward()


# ---- processes


def test_distributed_wrappers_recompute():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for reentrant in (False, True):
            module, plain = build("MultiHeadAttention"), build("MultiHeadAttention")
            found = nn.parallel.DistributedDataParallel(module, find_unused_parameters=not reentrant)
            call = functools.partial(checkpoint, found, use_reentrant=reentrant)
            for _ in range(2):
                assert_same(step(module, call), step(plain))
        module, plain = build("Dropout"), build("Dropout")
        whole = wrappers.checkpoint_wrapper(module)
        sharded = torch.distributed.fsdp.fully_shard(whole, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        found, expected = step(module, sharded), step(plain)
        found = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found[0]], found[1]
        assert_same(found, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_of_a_watched_function_is_left_as_it_is(monkeypatch):
    recomputation.watch()
    function = torch.utils.checkpoint.CheckpointFunction
    inner = function.forward

    @functools.wraps(inner)
    def wrapper(*arguments):
        return inner(*arguments)

    monkeypatch.setattr(function, "forward", staticmethod(wrapper))
    recomputation.watch()
    assert function.forward is wrapper


CACHED = {
    "keys": find_variant("GroupedQueryAttention").examples[0].config,
    "window": GroupedQueryAttentionConfig(12, 2, mask=masks.sliding_window(2)),
    "state": find_variant("GatedDeltaNet").examples[0].config,
    "sums": find_variant("LinearAttention").examples[0].config,
}


def cached_call(name):
    torch.manual_seed(0)
    config = CACHED[name]
    module = getattr(torch_attn, type(config).__name__.removesuffix("Config"))(config).eval()
    return module, torch.randn(2, 6, config.d_in, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_a_repeated_call_with_a_cache_of_before_is_refused(name, reentrant):
    module, x = cached_call(name)
    cache = module.init_cache(2, 40)
    output = checkpoint(lambda x: module(x, cache=cache)[0], x, use_reentrant=reentrant)
    with pytest.raises(
        RuntimeError, match=r"^a recomputation in the backward pass would append its tokens to the cache"
    ):
        output.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "first"), [("keys", 6), ("window", 6), ("state", 4), ("sums", 4)])
def test_a_cache_of_the_repeated_call_is_filled_again(name, first, reentrant):
    module, x = cached_call(name)

    def decode(x):
        output, cache = module(x[:, :first], cache=module.init_cache(2, 6))
        return output if first == 6 else torch.cat([output, module(x[:, first:], cache=cache)[0]], 1)

    (expected,) = torch.autograd.grad(weigh(module(x)), x)
    weigh(checkpoint(decode, x, use_reentrant=reentrant)).backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)
