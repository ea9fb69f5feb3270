"""Every way in which torch computes attention: against the reference, the NumPy formula, and its declared limits."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import attn_bridge
import torch_attn
from attn_bridge import masks
from attn_bridge.reference.attention import attend as formula
from torch_attn import functional, implementations
from torch_attn.implementations import Call, by_rows, flex, sdpa

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Dtype -> error allowed beside that of the reference, as part of the largest value: a few units in the last place."""

Options = dict[str, Any]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(batch=2, queries=9, keys=9, heads=4, key_heads=2, width=8, value_width=8, seed=0) -> list[Tensor]:
    """Return query, key and value in float64; token vectors differ in size."""
    shapes = ((queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width))
    return [draw(batch, *shape, seed=10 * seed + n) * (1.0 + n) for n, shape in enumerate(shapes)]


def some(*shape: int, seed: int, share: float = 0.7) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape) < share)


def per_head(batch: int, heads: int, queries: int, keys: int, seed: int) -> Tensor:
    """Return a mask of its own for every head, with rows that hide every key."""
    mask = some(batch, heads, queries, keys, seed=seed)
    mask[0, 1, 2] = mask[-1, 0, queries - 1] = False
    return mask


CASES: dict[str, tuple[Options, Any]] = {
    "no mask": ({}, lambda seed: {}),
    "causal": ({}, lambda seed: {"mask": masks.causal()}),
    "causal, more keys": ({"keys": 14}, lambda seed: {"mask": masks.causal()}),
    "causal, fewer keys": ({"keys": 5}, lambda seed: {"mask": masks.causal()}),
    "causal after cached keys": ({"queries": 5, "keys": 14}, lambda seed: {"mask": masks.causal().offset(9)}),
    "one token after cached keys": ({"queries": 1, "keys": 14}, lambda seed: {"mask": masks.causal().offset(13)}),
    "one token": ({"queries": 1, "keys": 1}, lambda seed: {"mask": masks.causal()}),
    "no queries": ({"queries": 0}, lambda seed: {"mask": masks.causal()}),
    "padding": ({}, lambda seed: {"mask": some(2, 9, seed=seed)}),
    "causal with padding": ({}, lambda seed: {"mask": masks.causal() & some(2, 9, seed=seed)}),
    "per head": ({}, lambda seed: {"mask": per_head(2, 4, 9, 9, seed)}),
    "all hidden": ({}, lambda seed: {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}),
    "bias": ({}, lambda seed: {"bias": draw(1, 4, 9, 9, seed=seed), "scale": 0.3}),
    "bias of keys, causal": ({}, lambda seed: {"bias": draw(9, seed=seed), "mask": masks.causal()}),
    "bias, per head": ({}, lambda seed: {"bias": draw(2, 1, 9, 9, seed=seed), "mask": per_head(2, 4, 9, 9, seed)}),
    "bias that hides": ({}, lambda seed: {"bias": torch.where(per_head(2, 4, 9, 9, seed), 0.5, -torch.inf)}),
    "wider value": ({"value_width": 12}, lambda seed: {"mask": masks.causal()}),
    "narrower value": ({"value_width": 3}, lambda seed: {"mask": some(2, 9, seed=seed)}),
    "head_dim 1": ({"width": 1, "value_width": 1}, lambda seed: {"mask": masks.causal()}),
    "head_dim 40": ({"width": 40, "value_width": 40}, lambda seed: {"mask": masks.causal()}),
    "head_dim 256": ({"width": 256, "value_width": 256}, lambda seed: {"mask": masks.causal()}),
    "own key heads": ({"key_heads": 4}, lambda seed: {"mask": masks.causal()}),
    "long": ({"queries": 300, "keys": 300}, lambda seed: {"mask": masks.causal()}),
    "window": ({"queries": 90, "keys": 90}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window of one": ({"queries": 70, "keys": 70}, lambda seed: {"mask": masks.sliding_window(1)}),
    "window and causal": (
        {"queries": 90, "keys": 90, "batch": 1},
        lambda seed: {"mask": masks.causal() & masks.sliding_window(40)},
    ),
    "window with padding": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": masks.sliding_window(7) & some(2, 90, seed=seed, share=0.3)},
    ),
    "window with one padding for all": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": some(1, 90, seed=seed) & masks.sliding_window(7)},
    ),
    "window with masks per head": (
        {"queries": 60, "keys": 60},
        lambda seed: {"mask": masks.sliding_window(7) & per_head(2, 4, 60, 60, seed)},
    ),
    "window after cached keys": (
        {"queries": 5, "keys": 99, "value_width": 5},
        lambda seed: {"mask": masks.sliding_window(7).offset(94)},
    ),
    "window, one token": ({"queries": 1, "keys": 80}, lambda seed: {"mask": masks.sliding_window(9).offset(50)}),
    "window past the keys": ({"queries": 90, "keys": 50}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window before the keys": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": masks.sliding_window(7).offset(-20)},
    ),
    "window as wide as the keys": ({}, lambda seed: {"mask": masks.sliding_window(9)}),
    "either mask": ({}, lambda seed: {"mask": masks.causal() | some(2, 9, seed=seed)}),
    "softcap": ({}, lambda seed: {"softcap": 2.0, "mask": masks.causal()}),
    "sinks": ({}, lambda seed: {"sinks": draw(4, seed=seed), "mask": masks.sliding_window(3)}),
}
"""Sizes, and the options of a call for a seed."""

WITH_ROWS: dict[str, tuple[Options, Any]] = {
    "softcap and sinks": ({}, lambda seed: {"softcap": 2.0, "sinks": draw(4, seed=seed), "mask": masks.causal()}),
    "sinks that hide rows": (
        {},
        lambda seed: {"sinks": draw(4, seed=seed), "mask": masks.causal() & per_head(2, 4, 9, 9, seed)},
    ),
    "bias and softcap": ({}, lambda seed: {"softcap": 2.0, "bias": draw(4, 9, 1, seed=seed), "mask": masks.prefix(5)}),
    "bias that hides rows, causal": (
        {},
        lambda seed: {"bias": torch.where(per_head(2, 4, 9, 9, seed), 0.5, -torch.inf), "mask": masks.causal()},
    ),
    "chunks": ({"queries": 14, "keys": 17}, lambda seed: {"mask": masks.chunked(5), "softcap": 3.0}),
    "documents": ({}, lambda seed: {"mask": masks.documents(IDS) & masks.causal(), "softcap": 3.0}),
    "hidden before all keys": ({}, lambda seed: {"mask": masks.causal().offset(-3), "sinks": draw(4, seed=seed)}),
}
"""Calls that make `by_rows` work, beside those of `CASES`."""

IDS = [[0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 5, 5, 5, 5]]

FIRST = {
    **dict.fromkeys(CASES, "sdpa"),
    **{name: "windowed" for name in CASES if name.startswith("window")},
    "window with masks per head": "sdpa",
    "window as wide as the keys": "sdpa",
    "softcap": "by_rows",
    "sinks": "by_rows",
}
"""Which implementation a CPU picks, for calls this small."""


def make(label: str, seed: int) -> tuple[list[Tensor], Options]:
    sizes, options = CASES[label]
    return operands(**sizes, seed=seed), options(seed)


def to(dtype: torch.dtype, inputs: list[Tensor], options: Options) -> tuple[list[Tensor], Options]:
    """Return the call in a dtype, every float array a leaf that takes gradients."""

    def leaf(array: Tensor) -> Tensor:
        return array.detach().to(dtype).requires_grad_()

    floats = ("bias", "sinks")
    return [leaf(one) for one in inputs], {k: leaf(v) if k in floats else v for k, v in options.items()}


def results(inputs: list[Tensor], options: Options, name: str | None) -> list[Tensor]:
    """Return the context and the gradients of every float array."""
    context = functional.dot_product_attention(*inputs, **options, implementation=name)
    sources = [*inputs, *(value for value in options.values() if isinstance(value, Tensor) and value.requires_grad)]
    cotangent = draw(*context.shape, seed=99).to(context.dtype)
    return [context.detach(), *torch.autograd.grad(context, sources, cotangent)]


def supported(inputs: list[Tensor], options: Options) -> list[str]:
    reasons = functional.explain(*inputs, **options)
    return [name for name, reason in reasons.items() if reason is None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", CASES)
def test_every_implementation_computes_what_the_reference_does(label, dtype):
    for seed in (0, 1):
        inputs, options = make(label, seed)
        low = to(dtype, inputs, options)
        wide = to(torch.float64, *low)
        exact, plain = results(*wide, "reference"), results(*low, "reference")
        names = supported(*low)
        assert names[0] == FIRST[label]
        for name in names:
            hold(results(*low, name), exact, plain, DTYPES[dtype])


def hold(found: list[Tensor], exact: list[Tensor], plain: list[Tensor], unit: float) -> None:
    """Hold results to twice the error of the reference, and some units in the last place."""
    # Gradients of scores cancel, exactly where there is one key only; those of the value don't.
    scale = max(one.abs().max().item() for one in exact if one.numel())
    for got, want, other in zip(found, exact, plain, strict=True):
        assert got.dtype == other.dtype
        assert got.shape == other.shape
        allowed = 2.0 * (other.double() - want).abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=0.0, atol=allowed + unit * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 200])
@pytest.mark.parametrize("label", [*(label for label in CASES if label != "no queries"), *WITH_ROWS])
def test_blocks_of_rows_compute_what_the_reference_does(label, rows, dtype, monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", rows)
    sizes, options = {**CASES, **WITH_ROWS}[label]
    low = to(dtype, operands(**sizes), options(0))
    exact, plain = results(*to(torch.float64, *low), "reference"), results(*low, "reference")
    hold(results(*low, "by_rows"), exact, plain, DTYPES[dtype])


def test_blocks_of_rows_leave_out_the_keys_that_none_of_them_sees(monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", 10)
    inputs, _ = to(torch.float32, operands(queries=100, keys=100, batch=1, heads=1, key_heads=1), {})

    def cost(mask: masks.Mask) -> int:
        with Sizes() as found:
            functional.dot_product_attention(*inputs, mask=mask, softcap=2.0, implementation="by_rows")
        assert max(found.all) < 100 * 100
        return sum(found.all)

    assert cost(masks.causal()) < 0.65 * cost(masks.full())
    assert cost(masks.sliding_window(10)) < 0.35 * cost(masks.full())


def test_many_scores_make_small_blocks_but_not_too_small(monkeypatch):
    rows = []
    right = by_rows.masked_softmax
    monkeypatch.setattr(by_rows, "masked_softmax", lambda scores, *x: rows.append(scores.shape[2]) or right(scores, *x))
    inputs, bias = [one.float() for one in operands(queries=40, keys=40)], torch.zeros(40)
    for most, want in ((2**22, [40]), (20 * 2 * 4 * 40, [20, 20]), (1, [16, 16, 8])):
        monkeypatch.setattr(by_rows, "MAX_SCORES", most)
        functional.dot_product_attention(*inputs, bias=bias, implementation="by_rows")
        assert rows == want
        rows.clear()


def test_a_compiler_is_given_the_reference_and_no_blocks():
    inputs = [one.float() for one in operands(queries=300, keys=300)]
    counter = CompileCounter()
    program = torch.compile(
        lambda *x: functional.dot_product_attention(*x, softcap=2.0), backend=counter, fullgraph=True
    )
    torch.testing.assert_close(program(*inputs), functional.dot_product_attention(*inputs, softcap=2.0))
    assert counter.op_count < 40


@pytest.mark.parametrize("label", ["causal", "causal with padding", "per head", "wider value", "window with padding"])
def test_every_implementation_computes_the_formula(label):
    for seed in (0, 1):
        (query, key, value), options = make(label, seed)
        groups = query.shape[2] // key.shape[2]
        arrays = [query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)]
        positions = torch.arange(query.shape[1])
        mask = masks.as_mask(options["mask"]).allowed(positions[:, None], positions[None, :])
        mask = mask.expand(2, 4, query.shape[1], key.shape[1]).numpy()
        heads_first = [array.transpose(1, 2).numpy() for array in arrays]
        want, _ = formula(*heads_first, scale=query.shape[-1] ** -0.5, causal=False, attention_mask=mask)
        for name in supported([query, key, value], options):
            got = functional.dot_product_attention(query, key, value, **options, implementation=name)
            np.testing.assert_allclose(got.transpose(1, 2), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "label", ["per head", "all hidden", "bias, per head", "bias that hides", "window past the keys"]
)
def test_hidden_rows_give_zeros_without_gradient(label, dtype):
    inputs, options = to(dtype, *make(label, 0))
    call = functional._checked(*inputs, **all_options(options))
    bias = call.bias
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if call.mask is None else call.allowed()
    visible = allowed if bias is None else allowed & (bias > -torch.inf)
    hidden = ~visible.expand(call.scores_shape).any(-1).transpose(1, 2)
    assert hidden.any()
    for name in supported(inputs, options):
        context, of_query, *others = results(inputs, options, name)
        assert not context[hidden].any()
        assert not of_query[hidden].any()
        assert all(torch.isfinite(gradient).all() for gradient in (context, of_query, *others))


def all_options(options: Options) -> Options:
    """Return the options of a call with the defaults of those left out."""
    defaults = dict.fromkeys(("mask", "bias", "scale", "softcap", "sinks", "rng"))
    return {**defaults, "dropout": 0.0, "return_weights": False, **options}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label", ["causal", "per head", "bias", "window", "wider value"])
def test_scores_of_ten_thousand_give_no_nan(label, dtype):
    (query, key, value), options = make(label, 0)
    inputs, options = to(dtype, [query * 1e4, key, value], options)
    for name in supported(inputs, options):
        assert all(torch.isfinite(one).all() for one in results(inputs, options, name))


@pytest.mark.parametrize("label", ["causal", "padding", "window"])
def test_strides_do_not_matter(label):
    inputs, options = make(label, 0)
    odd = [array.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for array in inputs]
    assert all(array.stride(-1) != 1 for array in odd)
    for name in supported(inputs, options):
        for got, want in zip(
            results(*to(torch.float64, odd, options), name),
            results(*to(torch.float64, inputs, options), name),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


# ---- time and memory


class Sizes(TorchDispatchMode):
    """Notes how many elements the results of operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.all += [
            one.numel() for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)
        ]
        return result


def sizes(label_or_mask: Any, name: str | None = None, **shape: int) -> list[int]:
    inputs, _ = to(torch.float32, operands(**shape), {})
    with Sizes() as found:
        context = functional.dot_product_attention(*inputs, mask=label_or_mask, implementation=name)
        torch.autograd.grad(context.sum(), inputs)
    return found.all


@pytest.mark.parametrize("value_width", [8, 5, 12])
def test_causal_attention_makes_no_array_of_queries_times_keys(value_width):
    found = sizes(masks.causal(), queries=400, keys=400, value_width=value_width)
    assert max(found) <= 2 * 400 * 4 * 12 < 400 * 400


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_costs_in_proportion_to_the_tokens(padded):
    def cost(tokens: int) -> int:
        mask = masks.sliding_window(16)
        mask = mask & some(2, tokens, seed=0) if padded else mask
        return sum(sizes(mask, "windowed", queries=tokens, keys=tokens))

    assert cost(2048) < 2.1 * cost(1024)
    assert cost(1024) > 1.9 * cost(512)


def test_a_window_over_cached_keys_reads_what_it_sees():
    inputs = operands(queries=1, keys=4000)
    with Sizes() as found:
        functional.dot_product_attention(*inputs, mask=masks.sliding_window(16).offset(3999))
    assert max(one for one in found.all if one not in {array.numel() for array in inputs}) <= 4000


def test_16_bits_run_in_the_dtype_in_which_the_kernel_is_fast(monkeypatch):
    seen = []
    right = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa,
        "scaled_dot_product_attention",
        lambda query, *rest, **more: seen.append(query.dtype) or right(query, *rest, **more),
    )
    inputs, _ = to(torch.bfloat16, operands(), {})
    for fast in ((torch.float32,), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(sdpa, "FAST_ON_CPU", fast)
        assert functional.dot_product_attention(*inputs).dtype == torch.bfloat16
    assert seen == [torch.float32, torch.bfloat16]


# ---- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_the_fused_kernel_draws_what_the_reference_draws(dtype):
    inputs, options = to(dtype, operands(), {"mask": masks.causal(), "dropout": 0.4})
    found = []
    for name in ("sdpa", "reference"):
        torch.manual_seed(3)
        found.append(functional.dot_product_attention(*inputs, **options, implementation=name))
    torch.testing.assert_close(*found)
    assert (functional.dot_product_attention(*inputs, **options) - found[0]).abs().max() > 0.1


# ---- limits, and who is picked

LIMITS: dict[str, tuple[str, Options, str]] = {
    "sdpa weights": ("sdpa", {"return_weights": True}, "it does not return the weights"),
    "sdpa softcap": ("sdpa", {"softcap": 2.0}, "it has no softcap"),
    "sdpa sinks": ("sdpa", {"sinks": torch.zeros(4)}, "it has no sinks"),
    "sdpa generator": (
        "sdpa",
        {"dropout": 0.1, "rng": torch.Generator()},
        "its dropout draws from the global generator only",
    ),
    "windowed no mask": ("windowed", {}, "the mask is no window"),
    "windowed causal": ("windowed", {"mask": masks.causal()}, "the mask is no window"),
    "windowed bias": ("windowed", {"mask": masks.sliding_window(2), "bias": torch.zeros(1)}, "it takes no bias"),
    "windowed dropout": ("windowed", {"mask": masks.sliding_window(2), "dropout": 0.1}, "it has no dropout"),
    "windowed array": (
        "windowed",
        {"mask": masks.sliding_window(2) & torch.ones(1, 1, 60, 60, dtype=torch.bool)},
        "it takes no mask array of queries or heads",
    ),
    "windowed wide": (
        "windowed",
        {"mask": masks.sliding_window(30)},
        "the window is not smaller than the keys",
    ),
    "windowed nothing": ("windowed", {"mask": masks.sliding_window(2).offset(-60)}, "no query sees a key"),
    "windowed softcap": ("windowed", {"mask": masks.sliding_window(2), "softcap": 2.0}, "it has no softcap"),
    "by_rows weights": ("by_rows", {"return_weights": True}, "it does not return the weights"),
    "by_rows dropout": ("by_rows", {"dropout": 0.1}, "it has no dropout"),
    "flex on a CPU": ("flex", {}, "query is on no GPU"),
}


@pytest.mark.parametrize("label", LIMITS)
def test_what_an_implementation_does_not_support_is_an_error_that_says_why(label):
    name, options, reason = LIMITS[label]
    inputs = [array.float() for array in operands(queries=60, keys=60)]
    assert functional.explain(*inputs, **options)[name] == reason
    with pytest.raises(NotImplementedError) as caught:
        functional.dot_product_attention(*inputs, **options, implementation=name)
    assert str(caught.value) == f"implementation {name!r} does not support this call: {reason}"
    functional.dot_product_attention(*inputs, **options)


def test_explain_attention_asks_the_backend_of_the_arrays():
    inputs = operands()
    found = attn_bridge.explain_attention(*inputs, mask=masks.causal(), softcap=3.0)
    assert found == functional.explain(*inputs, mask=masks.causal(), softcap=3.0)
    assert list(found) == ["cpu_flash", "windowed", "sdpa", "flex", "by_rows", "reference"]
    assert found["sdpa"] == "it has no softcap"
    with pytest.raises(TypeError) as caught:
        attn_bridge.explain_attention(*(array.numpy() for array in inputs))
    assert str(caught.value) == "query must be a torch.Tensor or a jax.Array, got ndarray"


def test_each_says_whether_this_machine_can_run_it(monkeypatch):
    for present, reason in ((True, None), (False, "it needs a GPU")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        others = dict.fromkeys(("windowed", "sdpa", "by_rows", "reference"))
        ours = implementations.cpu_flash.unavailable()
        assert implementations.unavailable() == {**others, "cpu_flash": ours, "flex": reason}


# ---- transforms, which use what torch itself has deprecated

deprecated_by_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Tensor:
    return functional.dot_product_attention(query, key, value, mask=mask, **options)


MASKS = {"causal": masks.causal(), "window": masks.sliding_window(7), "none": None}
masked = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@masked
@deprecated_by_torch
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_of_grad_works(mask):
    query, key, value = (
        torch.stack([one, two])
        for one, two in zip(*(operands(queries=60, keys=60, seed=s) for s in (0, 1)), strict=True)
    )
    found = torch.func.vmap(torch.func.grad(lambda *x: attend(*x, mask).square().sum(), argnums=(0, 1, 2)))(
        query, key, value
    )
    for n in range(2):
        inputs, _ = to(torch.float64, [query[n], key[n], value[n]], {})
        want = torch.autograd.grad(attend(*inputs, mask).square().sum(), inputs)
        for got, one in zip(found, want, strict=True):
            torch.testing.assert_close(got[n], one)


@deprecated_by_torch
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_blocks_of_rows_have_all_derivatives(monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", 7)
    options = {"mask": masks.sliding_window(9), "softcap": 3.0}
    inputs, tangents = operands(queries=20, keys=20), operands(queries=20, keys=20, seed=1)
    assert supported(inputs, options)[0] == "by_rows"

    def loss(name: str | None) -> Any:
        return lambda *x: functional.dot_product_attention(*x, **options, implementation=name).square().sum()

    def derivatives(of: Any) -> list[Any]:
        gradient = torch.func.grad(of, argnums=(0, 1, 2))
        stacked = [torch.stack([one, two]) for one, two in zip(inputs, tangents, strict=True)]
        one_of = torch.func.grad(lambda *x: sum(one.square().sum() for one in gradient(*x)))
        _, forward = torch.func.jvp(of, tuple(inputs), tuple(tangents))
        return [*torch.func.vmap(gradient)(*stacked), one_of(*inputs), forward]

    for got, want in zip(derivatives(loss(None)), derivatives(loss("reference")), strict=True):
        torch.testing.assert_close(got, want)


@masked
@deprecated_by_torch
def test_forward_mode_runs_through_the_reference(mask):
    inputs, tangents = operands(queries=60, keys=60), operands(queries=60, keys=60, seed=1)
    _, found = torch.func.jvp(lambda *x: attend(*x, mask), tuple(inputs), tuple(tangents))
    _, want = torch.func.jvp(lambda *x: attend(*x, mask, implementation="reference"), tuple(inputs), tuple(tangents))
    torch.testing.assert_close(found, want)
    moved = [attend(*(x + h * t for x, t in zip(inputs, tangents, strict=True)), mask) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused_unless_torch_computes_plainly():
    inputs, _ = to(torch.float64, operands(), {})

    def second() -> Tensor:
        first = torch.autograd.grad(attend(*inputs, masks.causal()).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(first[0].square().sum(), inputs[1])[0]

    with pytest.raises(RuntimeError, match=r"derivative for .*scaled_dot_product.* is not implemented"):
        second()
    with sdpa_kernel(SDPBackend.MATH):
        assert second().abs().max() > 0.0


# ---- compilation


@contextlib.contextmanager
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield CompileCounter()
    torch.compiler.reset()


LENGTHS = (64, 96, 128, 200, 257, 400)


@pytest.mark.parametrize("label", ["module", "module with padding", "window", "window with padding", "full", "softcap"])
def test_one_graph_serves_all_lengths_after_the_first(label):
    module = torch_attn.MultiHeadAttention(8, 8, 512, num_heads=2).eval()

    def call(x: Tensor, padding: Tensor) -> Any:
        if label.startswith("module"):
            return module(x, attention_mask=padding if "padding" in label else None)
        heads = x.reshape(*x.shape[:2], 2, 4)
        options = {"softcap": 3.0} if label == "softcap" else {}
        mask = masks.sliding_window(20) if "window" in label else masks.full()
        return attend(heads, heads, heads, mask.restrict(padding if "padding" in label else None), **options)

    with fresh_compiler() as counter:
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for length in LENGTHS:
            arguments = draw(2, length, 8, seed=length).float(), some(2, length, seed=length)
            torch.testing.assert_close(compiled(*arguments), call(*arguments))
        assert counter.frame_count == 2, "one for the first length, one for all others"


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"mask": masks.sliding_window(8), "scale": 0.3}])
def test_everything_may_be_a_symbol_from_the_start(options):
    """dynamic=True makes symbols of numbers of heads and of scales, too, which the kernels and checks must take."""
    with fresh_compiler() as counter:
        compiled = torch.compile(
            lambda *heads: attend(*heads, **options), fullgraph=True, dynamic=True, backend=counter
        )
        for length in (16, 33, 100):
            heads = [draw(2, length, heads, 8, seed=length).float() for heads in (4, 2, 2)]
            torch.testing.assert_close(compiled(*heads), attend(*heads, **options))
        assert counter.frame_count <= 2, "the window takes another path where it covers all keys"


# ---- FlexAttention, whose backward needs a GPU: its forward as torch's plain code runs it


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.sliding_window(3), masks.sliding_window(3).offset(-4)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"sinks": draw(4, seed=5)}, {"softcap": 2.0, "sinks": draw(4, seed=5)}], ids=str
)
def test_flex_attention_computes_what_the_reference_does(options, mask, key_heads):
    inputs = operands(queries=20, keys=20, key_heads=key_heads, width=16, value_width=32)
    call = functional._checked(*inputs, **all_options({**options, "mask": mask}))
    got = flex.attend_by(flex_attention.flex_attention, call)
    want = functional.dot_product_attention(*inputs, mask=mask, **options, implementation="reference")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"return_weights": True}, "it does not return the weights"),
        ({}, {"bias": torch.zeros(1)}, "it takes no bias"),
        ({}, {"dropout": 0.1}, "it has no dropout"),
        ({}, {"mask": masks.causal() & torch.ones(2, 9, dtype=torch.bool)}, "it takes no mask arrays"),
        ({"width": 8}, {}, "head_dim (8) is not between 16 and 256"),
        ({"value_width": 300}, {}, "head_dim (300) is not between 16 and 256"),
        ({}, {"softcap": 2.0, "sinks": torch.zeros(4), "mask": masks.sliding_window(3)}, None),
    ],
)
def test_flex_attention_declares_its_limits(changes, options, reason):
    inputs = [one.float() for one in operands(**{"width": 16, "value_width": 16, **changes})]
    call: Call = functional._checked(*inputs, **all_options(options))
    assert flex.unsupported_anywhere(call) == reason
    wide = functional._checked(*(one.double() for one in inputs), **all_options({}))
    if reason is None:
        assert flex.unsupported_anywhere(wide) == "it does not compute in float64"


# ---- the order of torch's kernels on a GPU, which needs none: operands are stand-ins, and what is asked is recorded


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(sdpa, "_capability", lambda index: ((9, 0), (8, 0), (10, 0))[index])
    with sdpa_kernel(list(sdpa.FIRST_CUDNN)):
        yield


def stand_in(**changes: Any) -> Any:
    device = types.SimpleNamespace(index=changes.pop("index", 0))
    defaults = {"is_cuda": True, "dtype": torch.bfloat16, "device": device, "shape": (2, 8, 1024, 64)}
    return types.SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("query", "options", "is_first"),
    [
        (stand_in(), {}, True),
        (stand_in(dtype=torch.float16), {}, True),
        (stand_in(dtype=torch.float32), {}, False),
        (stand_in(is_cuda=False), {}, False),
        (stand_in(index=1), {}, False),
        (stand_in(index=2), {}, False),
        (stand_in(), {"mask": torch.ones(1)}, False),
        (stand_in(), {"dropout": 0.1}, False),
    ],
)
def test_cudnn_comes_first_on_hopper(query, options, is_first, on_hopper):
    before = torch._C._get_sdp_priority_order()
    with sdpa._kernels(query, options.get("mask"), options.get("dropout", 0.0)):
        first = torch._C._get_sdp_priority_order()[0]
        assert torch.backends.cuda.flash_sdp_enabled(), "what cuDNN refuses goes to the next"
    assert (first == int(SDPBackend.CUDNN_ATTENTION)) == is_first
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize(("index", "tokens", "is_last"), [(0, 1, True), (2, 1, True), (1, 1, False), (2, 1024, False)])
def test_cudnn_comes_last_where_each_call_has_another_shape(index, tokens, is_last, on_hopper):
    few = stand_in(index=index, shape=(2, 8, tokens, 64))
    with sdpa_kernel(list(sdpa.FIRST_CUDNN), set_priority=True), sdpa._kernels(few, torch.ones(1), 0.0):
        assert (torch._C._get_sdp_priority_order()[3] == int(SDPBackend.CUDNN_ATTENTION)) == is_last


def test_a_choice_of_kernels_stays(on_hopper):
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel(SDPBackend.MATH), sdpa._kernels(stand_in(), None, 0.0):
        assert torch._C._get_sdp_priority_order() == before
        assert not torch.backends.cuda.cudnn_sdp_enabled()


# ---- the projections of a list of heads


def products(module: torch.nn.Module, x: Tensor) -> int:
    """Return how many matrix products a module's linear layers are."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    with Log():
        module(x)
    return sum(name in ("addmm", "mm", "linear") for name in seen)


@pytest.mark.parametrize("bias", [False, True])
def test_the_heads_of_the_wrapper_are_projected_in_one_product(bias):
    torch.manual_seed(0)
    module = torch_attn.MultiHeadAttentionWrapper(6, 3, 9, num_heads=4, qkv_bias=bias)
    x = draw(2, 5, 6, seed=1).float()
    parameters = list(module.parameters())
    assert products(module, x) == 1
    context = module(x)
    cotangent = draw(*context.shape, seed=2).float()
    alone = torch.cat([head(x) for head in module.heads], -1)
    torch.testing.assert_close(context, alone)
    torch.testing.assert_close(
        torch.autograd.grad(context, parameters, cotangent), torch.autograd.grad(alone, parameters, cotangent)
    )


def test_layers_that_are_watched_or_replaced_are_called_themselves():
    module = torch_attn.MultiHeadAttentionWrapper(6, 3, 9, num_heads=4)
    x = draw(2, 5, 6, seed=1).float()
    seen = []
    handle = module.heads[2].W_key.register_forward_hook(lambda layer, args, result: seen.append(result))
    before = module(x)
    assert [one.shape for one in seen] == [(2, 5, 3)]
    handle.remove()
    module.heads[1].W_value = torch.nn.Sequential(torch.nn.Linear(6, 3, bias=False))
    assert (module(x) - before).abs().amax((0, 1)).gt(1e-4).tolist() == [False] * 3 + [True] * 3 + [False] * 6


@pytest.mark.parametrize("scale", [-0.3, -1e-30, 0.0])
@pytest.mark.parametrize("queries", [5, 70])
def test_scales_of_zero_and_below_hide_the_same_keys(scale, queries):
    inputs = to(torch.float32, operands(queries=queries, keys=queries), {})[0]
    options = {"mask": masks.causal(), "scale": scale}
    for got, want in zip(results(inputs, options, None), results(inputs, options, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_masks_of_few_axes_go_with_windows():
    inputs = operands(queries=130, keys=130)
    for mask in (some(130, seed=0), some(1, seed=1), torch.ones((), dtype=torch.bool)):
        options = {"mask": masks.sliding_window(5) & mask}
        got, want = (
            functional.dot_product_attention(*inputs, **options, implementation=n) for n in (None, "reference")
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(5)])
def test_operands_of_two_dtypes_are_served(mask):
    query, key, value = operands(queries=80, keys=80)
    context = functional.dot_product_attention(query.float(), key, value, mask=mask)
    assert context.dtype == torch.float32
    bias = draw(80, 80, seed=3)
    context = functional.dot_product_attention(query.float(), key.float(), value.float(), mask=mask, bias=bias)
    assert context.isfinite().all()
