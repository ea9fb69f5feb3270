"""The kernels for processors in torch: transforms, compilers, dropout, threads, and when others take their place."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn
from attn_bridge import masks
from attn_bridge.specs import GroupedQueryAttentionConfig
from attn_kernels import words
from parity_tests.support.calls.attention_calls import draw, operands, some
from torch_attn import functional
from torch_attn.implementations import cpu_flash, sdpa, unavailable
from torch_attn.random import JaxRngs

from ...support.calls import cover

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

deprecated_by_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def tensors(**sizes: Any) -> list[Tensor]:
    return [torch.from_numpy(one).float() for one in operands(**sizes)]


def attend(*inputs: Tensor, name: str | None = "cpu_flash", **options: Any) -> Tensor:
    return functional.dot_product_attention(*inputs, implementation=name, **options)


def squared(name: str, **options: Any) -> Any:
    """Return a function of query, key and value, whose gradients depend on all that they are."""
    return lambda *inputs: attend(*inputs, name=name, **options).square().sum()


def assert_close(found: Any, want: Any, error: float = 2e-5) -> None:
    found, want = ((one,) if isinstance(one, Tensor) else tuple(one) for one in (found, want))
    for got, wanted in zip(found, want, strict=True):
        scale = wanted.abs().max().item()
        assert scale > 0.0
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=error * scale)


# ---- transformations

OPTIONS = {
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.sliding_window(9)},
    "array": {"mask": masks.causal() & torch.from_numpy(some(1, 1, 70, 70, seed=3))},
    "bias, softcap": {"bias": torch.from_numpy(draw(1, 4, 70, 70, seed=4)).float(), "softcap": 2.0},
    "sinks": {"sinks": torch.from_numpy(draw(4, seed=4)).float()},
}

grad, vmap = torch.func.grad, torch.func.vmap


@deprecated_by_torch
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(f, (0, 1, 2)),
        lambda f: vmap(grad(lambda q, k, v: f(q[None], k[None], v[None]), (0, 1, 2))),
        lambda f: lambda *xs: vmap(grad(f), (0, None, None))(torch.stack([xs[0], 2 * xs[0]]), *xs[1:]),
        lambda f: lambda q, k, v: vmap(grad(f, (0, 1, 2)), (None, 3, None))(q, torch.stack([k, 2 * k], 3), v),
        lambda f: lambda *xs: vmap(vmap(grad(f)))(*(torch.stack([x, 3 * x])[None] for x in xs)),
        lambda f: grad(lambda *xs: sum((one**2).sum() for one in grad(f, (0, 1, 2))(*xs)), (0, 1, 2)),
        lambda f: torch.func.jacrev(lambda *xs: f(*xs)[None]),
    ],
    ids=["grad", "vmap", "vmap of query", "vmap of key", "vmap twice", "second order", "jacrev"],
)
def test_transformations(transform, options):
    inputs = tensors()
    assert_close(*(transform(squared(name, **options))(*inputs) for name in ("cpu_flash", "reference")))


@cover.rotated(("dims", "kind"), [(0, None), (None, 0), (0, 0)], ["bias", "sinks"])
@deprecated_by_torch
def test_biases_and_sinks_are_vmapped(dims, kind):
    query, key, value = tensors()
    shape = (2, 1, 1, 70) if kind == "bias" else (4,)
    given = torch.from_numpy(draw(*shape, seed=8)).float()
    given, query = (
        one if dim is None else torch.stack([one, 2 * one]) for one, dim in zip((given, query), dims, strict=True)
    )

    def gradients(name: str) -> Any:
        def of(given: Tensor, query: Tensor) -> Tensor:
            return squared(name, mask=masks.causal(), **{kind: given})(query, key, value)

        return vmap(grad(of, (0, 1)), dims)(given, query)

    assert_close(gradients("cpu_flash"), gradients("reference"))


@deprecated_by_torch
def test_second_derivatives_go_through_all_that_has_some():
    inputs = [one.requires_grad_() for one in tensors()]
    given = {
        "bias": torch.from_numpy(draw(1, 4, 70, 70, seed=3)).float().requires_grad_(),
        "sinks": torch.from_numpy(draw(4, seed=5)).float().requires_grad_(),
    }
    mask = masks.causal() & masks.documents([[0] * 30 + [7] * 40]) & torch.from_numpy(some(2, 70, seed=1))

    def second(name: str) -> Any:
        options = {**given, "mask": mask, "dropout": 0.3, "rng": JaxRngs(dropout=2), "softcap": 3.0}
        sources = [*inputs, *given.values()]
        first = torch.autograd.grad(squared(name, **options)(*inputs), sources, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), sources)

    assert_close(second("cpu_flash"), second("reference"))


def test_checkpoints_compute_again():
    inputs = [one.requires_grad_() for one in tensors()]
    of = squared("cpu_flash", mask=masks.causal())
    again = torch.utils.checkpoint.checkpoint(of, *inputs, use_reentrant=False)
    assert_close(torch.autograd.grad(again, inputs), torch.autograd.grad(of(*inputs), inputs))


@pytest.mark.parametrize("shape", [(1, 4, 70, 70), (2, 1, 1, 70), (1, 1, 70, 70), (70, 70)], ids=str)
def test_a_constant_bias_has_no_gradient_computed(shape):
    inputs = [one.requires_grad_() for one in tensors()]
    bias = torch.from_numpy(draw(*shape, seed=3)).float()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "flash_backward" in str(func):
                sizes.append(result[3].numel())
            return result

    found = []
    for sources in (inputs, [*inputs, bias.requires_grad_()]):
        bias.requires_grad_(len(sources) == 4)
        with Sizes():
            found.append(
                torch.autograd.grad(squared("cpu_flash", bias=bias, mask=masks.causal())(*inputs), sources)[:3]
            )
    assert sizes == [0, bias.numel()]
    assert_close(*found)


def test_the_logarithms_of_the_sums_have_gradients():
    inputs = [one.requires_grad_() for one in tensors(queries=140, keys=140)]
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True)
    call = functional._checked(*inputs, masks.causal(), None, None, None, sinks, 0.0, None, False)

    def results(implementation: Any) -> list[Tensor]:
        context, sums = implementation.attend_with_lse(call)
        given = [torch.sin(torch.arange(one.numel()).view(one.shape)) for one in (context, sums)]
        return [context.detach(), sums.detach(), *torch.autograd.grad((context, sums), [*inputs, sinks], given)]

    assert_close(results(cpu_flash), results(torch_attn.implementations.reference), 3e-5)


def test_strides_do_not_matter():
    inputs = tensors(queries=140, keys=140)
    odd = [one.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for one in inputs]
    plain = [one.requires_grad_() for one in inputs]
    cotangent = torch.ones(()).expand(2, 140, 4, 8)
    found, want = (
        torch.autograd.grad(attend(*one, mask=masks.causal()), one, cotangent, allow_unused=False)
        for one in (odd, plain)
    )
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0)


# ---- compilers


@cover.rotated(
    ("mask", "backend"),
    ["causal", "window after cached keys", "chunks and a prefix", "padding", "documents"],
    ["aot_eager", "eager"],
)
def test_one_graph_holds_them_forward_and_backward(mask, backend):
    inputs = [one.requires_grad_() for one in tensors(queries=150, keys=150)]
    sinks, seen = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True), torch.from_numpy(some(2, 150, seed=1))
    ids = torch.arange(150)[None] // 40
    counter = CompileCounterWithBackend(backend)

    def of(name: str) -> Any:
        def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor, ids: Tensor) -> Tensor:
            chosen = {
                "causal": masks.causal(),
                "window after cached keys": masks.sliding_window(30).offset(9),
                "chunks and a prefix": masks.chunked(40) & masks.prefix(20),
                "padding": masks.causal().restrict(seen),
                "documents": masks.causal() & masks.documents(ids),
            }[mask]
            return squared(name, mask=chosen, sinks=sinks, softcap=3.0)(query, key, value)

        return loss

    torch.compiler.reset()
    found = torch.compile(of("cpu_flash"), fullgraph=True, backend=counter)(*inputs, sinks, seen, ids)
    want = of("reference")(*inputs, sinks, seen, ids)
    assert "flash_forward" in str(counter.graphs[0].graph)
    assert_close(*(torch.autograd.grad(one, [*inputs, sinks]) for one in (found, want)))
    torch.compiler.reset()


def test_the_compiler_of_torch_takes_them():
    inputs = [one.requires_grad_() for one in tensors(queries=150, keys=150, batch=1)]
    of = squared("cpu_flash", mask=masks.chunked(40))
    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(of, fullgraph=True)(*inputs), inputs)
    assert_close(found, torch.autograd.grad(of(*inputs), inputs))
    torch.compiler.reset()


def test_one_graph_of_any_length_holds_them():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    module = torch_attn.MultiHeadAttention(8, 8, 512, num_heads=2).eval()
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    for length in (40, 200, 257):
        x = torch.from_numpy(draw(2, length, 8, seed=length)).float()
        torch.testing.assert_close(compiled(x), module(x))
    assert counter.frame_count == 1
    assert "flash_forward" in str(counter.graphs[0].graph)
    torch.compiler.reset()


class Attention(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return attend(*inputs, name=None, mask=masks.causal())


def test_programs_that_travel_need_nothing_of_ours():
    inputs = tensors(queries=150, keys=150)
    exported = torch.export.export(Attention(), tuple(inputs))
    assert "attn_bridge" not in str(exported.graph)
    assert_close(exported.module()(*inputs), attend(*inputs, mask=masks.causal()))


# ---- dropout


@pytest.mark.parametrize("rate", [0.001, 0.4, 0.999])
def test_dropout_keeps_what_the_generator_of_torch_draws(rate):
    """With values that name their key and all weights alike, the context tells which were kept."""
    query = torch.zeros(2, 130, 3, 8)
    value = torch.eye(130)[None, :, None].expand(2, 130, 3, 130)
    found = []
    for name in ("cpu_flash", "reference"):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        found.append(
            [
                attend(query, query, value, name=name, dropout=rate),
                attend(query, query, value, name=name, dropout=rate, rng=generator),
                torch.rand(3),
                torch.rand(3, generator=generator),
            ]
        )
    for got, want in zip(*found, strict=True):
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("source", [lambda: torch.Generator().manual_seed(5), lambda: JaxRngs(dropout=5, x64=True)])
def test_gradients_with_dropout_are_those_of_the_reference(source):
    inputs = [one.requires_grad_() for one in tensors(queries=150, keys=140)]
    options = {"dropout": 0.4, "mask": masks.causal()}
    assert_close(
        *(
            torch.autograd.grad(squared(name, **options, rng=source())(*inputs), inputs)
            for name in ("cpu_flash", "reference")
        )
    )


# ---- threads


def test_calls_from_many_threads_do_not_disturb_each_other():
    inputs = [[one.requires_grad_() for one in tensors(queries=150, keys=150, seed=seed)] for seed in range(8)]

    def gradients(n: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(squared("cpu_flash", mask=masks.causal())(*inputs[n % 8]), inputs[n % 8])

    want = [gradients(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for n, found in enumerate(pool.map(gradients, range(80))):
            assert all(torch.equal(one, two) for one, two in zip(found, want[n % 8], strict=True))


FORK = """
import os, torch
from torch_attn import functional
inputs = [torch.ones(1, 150, 2, 8) * n for n in range(3)]
def attend():
    return functional.dot_product_attention(*inputs, implementation="cpu_flash")
want = attend()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(attend(), want) else 1)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_process_computes_on():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=300)


@pytest.mark.parametrize("threads", [1, 3])
def test_they_take_as_many_threads_as_torch(threads, monkeypatch):
    from attn_kernels.direct import calls

    seen, run = [], calls.run
    monkeypatch.setattr(calls, "run", lambda *given: seen.append(given[4]) or run(*given))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    attend(*tensors())
    torch.set_num_threads(before)
    assert seen == [threads]


# ---- limits, and who is picked


def test_importing_torch_attn_loads_neither_a_compiler_nor_the_families():
    heavy = {"llvmlite", "jax", "torch._dynamo", "attn_bridge.models"}
    program = f"import sys, torch_attn.functional; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_llvmlite_others_do_it(monkeypatch):
    inputs = tensors(queries=140, keys=140)
    monkeypatch.setattr(cpu_flash, "_lacks", cpu_flash._lacks.__wrapped__)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llvmlite" else find(name))
    assert "llvmlite" in functional.explain(*inputs)["cpu_flash"]
    assert "llvmlite" in unavailable()["cpu_flash"]
    assert functional.explain(*inputs)["sdpa"] is None
    with pytest.raises(NotImplementedError, match="llvmlite, which compiles it, is not installed"):
        attend(*inputs)


def test_where_the_kernels_do_not_load_others_do_it(monkeypatch):
    from attn_kernels.direct import calls

    def refuse(kind: str) -> None:
        raise RuntimeError(f"LLVM does not take {kind}")

    inputs = tensors(queries=140, keys=140)
    monkeypatch.setattr(cpu_flash, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(calls, "compiled", refuse)
    monkeypatch.setattr(cpu_flash, "_fails_to_load", cpu_flash._fails_to_load.__wrapped__)
    assert "LLVM does not take forward" in functional.explain(*inputs)["cpu_flash"]
    assert "LLVM does not take forward" in unavailable()["cpu_flash"]
    with pytest.raises(NotImplementedError, match="does not run here: its kernels do not load: LLVM does not take"):
        attend(*inputs)
    attend(*inputs, name=None)


@dataclasses.dataclass(frozen=True)
class Backwards(masks.Mask):
    """Later queries see earlier keys."""

    def interval(self, queries):
        return 60 - queries, 70 - queries


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_weights": True}, "never holds"),
        ({"bias": torch.ones(70, 1)}, r"the bias \(70, 1\) is the same for all keys"),
        ({"mask": masks.sliding_window(3) | masks.sliding_window(3).offset(-9)}, "are no interval"),
        ({"mask": Backwards()}, "the intervals go back"),
        ({"mask": masks.causal() | torch.ones(2, 70, dtype=torch.bool)}, r"joins arrays or paddings by \|"),
        (
            {"mask": masks.as_mask(torch.ones(2, 70, dtype=torch.bool)) & torch.ones(1, 1, 70, 70, dtype=torch.bool)},
            r"the arrays \(2, 1, 1, 70\), \(1, 1, 70, 70\) of the mask would make a larger one together",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_it_says_what_it_lacks(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(*tensors(), **options)


@pytest.mark.parametrize("keys", [2, 70])
def test_a_bias_without_axes_is_the_same_for_all_keys(keys):
    with pytest.raises(NotImplementedError, match=r"the bias \(\) is the same for all keys"):
        attend(*tensors(keys=keys), bias=torch.ones(()))


def test_it_has_no_float64_and_mixes_no_dtypes_or_classes():
    query, key, value = tensors()
    with pytest.raises(NotImplementedError, match="of float32, bfloat16, float16, got float32, bfloat16, float32"):
        attend(query, key.bfloat16(), value)
    with pytest.raises(NotImplementedError, match="got float64"):
        attend(query.double(), key.double(), value.double())
    with pytest.raises(NotImplementedError, match="these are of a class of their own"):
        attend(query.as_subclass(Wrapped), key, value)
    with (
        pytest.raises(NotImplementedError, match="no forward-mode derivatives"),
        torch.autograd.forward_ad.dual_level(),
    ):
        attend(query, key, value)


def test_it_is_left_out_where_others_are_as_fast(monkeypatch):
    def reason(**sizes: int) -> str | None:
        return functional.explain(*tensors(**sizes))["cpu_flash"]

    assert reason(queries=140, keys=140) == f"fewer products than {cpu_flash.MIN_PRODUCTS}"
    assert reason(queries=800, keys=800, width=16) is None
    monkeypatch.setattr(cpu_flash, "MIN_PRODUCTS", 0)
    assert reason(queries=140, keys=140) is None
    assert reason(queries=100, keys=140) == f"fewer scores per head than {cpu_flash.MIN_SCORES}"
    assert reason(queries=17, keys=9000) == f"fewer than {cpu_flash.MIN_QUERIES} queries"
    assert reason(queries=4, keys=9000, width=32) is None
    assert reason(queries=4, keys=300) == f"less than {cpu_flash.MIN_BYTES} bytes of keys and values"
    with sdpa_kernel(SDPBackend.MATH):
        assert reason(queries=140, keys=140).startswith("fused attention is switched off")
    monkeypatch.setattr(sdpa, "FAST_ON_CPU", (torch.float32, torch.bfloat16))
    inputs = [one.bfloat16() for one in tensors(queries=140, keys=140)]
    processor = importlib.import_module("attn_kernels.compiler.processor")
    monkeypatch.setattr(processor, "pairs", lambda: "amx")
    assert functional.explain(*inputs)["cpu_flash"] is None
    monkeypatch.setattr(processor, "pairs", lambda: None)
    assert "multiplies torch.bfloat16 itself" in functional.explain(*inputs)["cpu_flash"]
    assert functional.explain(*inputs, softcap=2.0)["cpu_flash"] is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert reason(queries=140, keys=140).startswith("4 key heads in all for 64 threads")


def test_documents_may_have_any_numbers():
    inputs = tensors(queries=140, keys=140)
    for ids in (
        torch.arange(140) // 50 * 2**32 - 2**40,
        torch.arange(140) // 50 * 7 - 3,
        torch.arange(140).short() // 50,
    ):
        options = {"mask": masks.documents(ids[None].numpy()) & masks.causal()}
        assert_close(*(attend(*inputs, name=name, **options) for name in ("cpu_flash", "reference")))


def test_a_key_of_nan_that_is_masked_stays_hidden():
    query, key, value = tensors(queries=140, keys=140)
    seen = torch.arange(140) != 77
    bad = key.clone()
    bad[:, 77] = np.nan
    for mask in (seen[None], seen.expand(1, 1, 140, 140), masks.causal().offset(-63)):
        torch.testing.assert_close(
            attend(query, bad, value, mask=mask), attend(query, key, value, mask=mask), rtol=0.0, atol=0.0
        )


# ---- few queries


def test_a_cache_is_read_where_it_lies(monkeypatch):
    """Of several slots, fewer than there is room for, and of one head of latents, whatever its type."""
    calls = importlib.import_module("attn_kernels.direct.calls")
    seen, run = [], calls.run
    monkeypatch.setattr(calls, "run", lambda kind, told, addresses, *rest: seen.append((kind, addresses)) or run(
        kind, told, addresses, *rest))  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        config = GroupedQueryAttentionConfig(64, 4, 2, 128)
        module = torch_attn.GroupedQueryAttention(config, dtype=dtype).eval()
        cache = module.init_cache(2, 1100)
        x = torch.randn(2, 1003, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            want = module(x)[:, 1000:]
            _, cache = module(x[:, :1000], cache=cache)
            seen.clear()
            found, cache = module(x[:, 1000:], cache=cache)
        assert [kind for kind, _ in seen] == ["decode"]
        assert (seen[0][1][words.KEY], seen[0][1][words.VALUE]) == (cache.key.data_ptr(), cache.value.data_ptr())
        assert_close(found.double(), want.double(), 1e-5 if dtype == torch.float32 else 0.02)


def test_few_queries_with_gradients_are_left_to_other_kernels():
    inputs = [one.requires_grad_() for one in tensors(queries=4, keys=9000, width=32)]
    assert functional.explain(*inputs)["cpu_flash"] == "few queries whose gradient may be asked for"
    with torch.no_grad():
        assert functional.explain(*inputs)["cpu_flash"] is None


def test_few_queries_of_eight_threads_do_not_disturb_each_other():
    inputs = [tensors(queries=3, keys=900, width=64, seed=seed) for seed in range(8)]
    want = [attend(*one) for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: attend(*inputs[n % 8]), range(80)))
    for n, got in enumerate(found):
        torch.testing.assert_close(got, want[n % 8], rtol=0.0, atol=0.0)


FORKING = """
import os, threading, torch
from torch_attn import functional
from torch_attn.implementations import flash_operation
torch.set_num_threads(2)
heads = [torch.randn(1, n, 4, 64, generator=torch.Generator().manual_seed(n)) for n in (2, 900, 900)]
many = [torch.randn(1, 200, 4, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)]
def attend():
    return [functional.dot_product_attention(*one, implementation="cpu_flash") for one in (heads, many)]
def same():
    return all(torch.equal(*pair) for pair in zip(attend(), want))
torch.randn(500, 500) @ torch.randn(500, 500)
want, stop = attend(), threading.Event()
def work():
    while not stop.is_set():
        assert same()
threads = [threading.Thread(target=work) for _ in range(2)]
for one in threads:
    one.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if same() and flash_operation._team() == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for one in threads:
    one.join()
assert same()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_child_has_separate_threads():
    program = [sys.executable, "-W", "ignore", "-c", FORKING]
    subprocess.run(program, check=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
