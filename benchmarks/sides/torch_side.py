"""The contenders in torch, and how torch is timed. The twin is `benchmarks.sides.jax_side`."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import torch_attn
from attn_bridge.masks import causal

from ..measuring.cells import LINEARS, Group
from .contender import Contender, Work
from .peers_torch import PlainMultiHeadAttention

STOCK = {"attention": "SDPA", "modules": "torch.nn.MultiheadAttention"}
"""The layers of torch itself, by subject."""


def device() -> torch.device:
    """Return the GPU if available, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Result = TypeVar("Result")


def describe() -> dict[str, object]:
    """Return the version, the device and the threads."""
    facts = {"versions": {"torch": torch.__version__}, "device": "cpu", "threads": torch.get_num_threads()}
    if device().type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"}
    return facts


def start(group: Group) -> None:
    """Clear compilation caches; compute float32 products in float32, as on the other side."""
    del group
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")


def contenders(group: Group, modes: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Return the contenders of a group in the modes, and a line for each of ours that can't compute it."""
    rows, notes = (_attention if group.subject == "attention" else _modules)(group)
    all_contenders = [
        Contender(name, kind, mode, functools.partial(build, group, mode), **options)
        for name, kind, build, options in rows
        for mode in modes
    ]
    return all_contenders, notes


def elapsed(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds per call, from the first call's start until all results are ready."""
    if device().type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before.record()
        for _ in range(repeats):
            call()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1000 / repeats
    start_time = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start_time) / repeats


def wait(result: Result) -> Result:
    """Return a result once it is ready."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return result


def matmul(size: int, dtype: str) -> Callable[[], object]:
    """Return the product of two square matrices, to call."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device(), getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def device_peak(work: Work) -> int | None:
    """Return the bytes that a call takes on a GPU in addition to those in use before; None without a GPU."""
    if device().type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wait(work.call())
    return torch.cuda.max_memory_allocated() - before


_Row = tuple[str, str, Callable[[Group, str], Work], dict[str, object]]


def _attention(group: Group) -> tuple[list[_Row], list[str]]:
    arrays = [_tensor(array, group.backward) for name, array in group.inputs().items() if name != "cotangent"]
    reasons = torch_attn.functional.explain(*arrays, mask=causal())
    rows: list[_Row] = []
    for name, reason in reasons.items():
        if reason is None:
            picked = not rows
            attend = functools.partial(_attend, implementation=None if picked else name)
            build = functools.partial(_function, attend=attend, heads_first=False)
            rows.append((f"ours: {name}", "ours", build, {"picked": picked, "square": name == "reference"}))
    build = functools.partial(_function, attend=_sdpa, heads_first=True)
    rows.append((STOCK["attention"], "stock", build, {}))
    return rows, [f"torch ours: {name} left out: {reason}" for name, reason in reasons.items() if reason]


def _attend(query: Tensor, key: Tensor, value: Tensor, implementation: str | None) -> Tensor:
    return torch_attn.functional.dot_product_attention(query, key, value, mask=causal(), implementation=implementation)


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _function(group: Group, mode: str, attend: Callable[..., Tensor], heads_first: bool) -> Work:
    """Put the inputs of attention in place, each in the order of axes that the function is made for."""
    inputs = group.inputs()
    if heads_first:
        inputs = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in inputs.items()}
    names = ("query", "key", "value")
    arguments = [_tensor(inputs[name], group.backward) for name in names]

    def read(result: Sequence[Tensor]) -> dict[str, np.ndarray]:
        named = zip(("output", *(f"grad {name}" for name in names)), result, strict=False)
        arrays = {name: _array(tensor) for name, tensor in named}
        return {name: array.swapaxes(1, 2) if heads_first else array for name, array in arrays.items()}

    call = _caller(_compiled(attend, mode), arguments, arguments, _tensor(inputs["cotangent"], False), group)
    return Work(call, read)


def _modules(group: Group) -> tuple[list[_Row], list[str]]:
    return [
        ("ours", "ours", _ours, {"picked": True}),
        ("book", "peer", _book, {"square": True}),
        (STOCK["modules"], "stock", _stock, {"square": False}),
    ], []


def _ours(group: Group, mode: str) -> Work:
    cell = group.cell
    return _linears(
        torch_attn.MultiHeadAttention(cell.width, cell.width, cell.tokens, 0.0, cell.heads, True), group, mode
    )


def _book(group: Group, mode: str) -> Work:
    cell = group.cell
    return _linears(PlainMultiHeadAttention(cell.width, cell.width, cell.tokens, cell.heads), group, mode)


def _linears(module: nn.Module, group: Group, mode: str) -> Work:
    """Load the weights into four linear layers with the names of the book."""
    inputs = group.inputs()
    module = module.to(device(), getattr(torch, group.dtype)).eval()
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            array = inputs[name]
            parameter.copy_(_tensor(array.T if array.ndim == 2 else array, False))

    def read(grads: Sequence[Tensor]) -> Iterator[tuple[str, np.ndarray]]:
        for name, grad in zip(parameters, grads, strict=True):
            yield name, _array(grad).T

    return _module(module, list(parameters.values()), inputs, read, _compiled(module, mode), group)


def _stock(group: Group, mode: str) -> Work:
    cell, inputs = group.cell, group.inputs()
    module = nn.MultiheadAttention(cell.width, cell.heads, batch_first=True)
    module = module.to(device(), getattr(torch, group.dtype)).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(cell.tokens, device(), getattr(torch, group.dtype))
    parameters = [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]
    with torch.no_grad():
        parameters[0].copy_(_tensor(np.concatenate([inputs[f"{name}.weight"].T for name in LINEARS[:3]]), False))
        parameters[1].copy_(_tensor(np.concatenate([inputs[f"{name}.bias"] for name in LINEARS[:3]]), False))
        parameters[2].copy_(_tensor(inputs["out_proj.weight"].T, False))
        parameters[3].copy_(_tensor(inputs["out_proj.bias"], False))

    def read(grads: Sequence[Tensor]) -> Iterator[tuple[str, np.ndarray]]:
        weight, bias, out_weight, out_bias = map(_array, grads)
        for index, name in enumerate(LINEARS[:3]):
            rows = slice(index * cell.width, (index + 1) * cell.width)
            yield from ((f"{name}.weight", weight[rows].T), (f"{name}.bias", bias[rows]))
        yield from (("out_proj.weight", out_weight.T), ("out_proj.bias", out_bias))

    def forward(x: Tensor) -> Tensor:
        return module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    return _module(module, parameters, inputs, read, _compiled(forward, mode), group)


def _module(
    module: nn.Module,
    parameters: list[nn.Parameter],
    inputs: dict[str, np.ndarray],
    read_grads: Callable[[Sequence[Tensor]], Iterator[tuple[str, np.ndarray]]],
    forward: Callable[..., Tensor],
    group: Group,
) -> Work:
    module.requires_grad_(group.backward)
    x = _tensor(inputs["x"], group.backward)

    def read(result: Sequence[Tensor]) -> dict[str, np.ndarray]:
        arrays = {"output": _array(result[0])}
        if group.backward:
            arrays["grad x"] = _array(result[1])
            arrays |= {f"grad {name}": array for name, array in read_grads(result[2:])}
        return arrays

    call = _caller(forward, [x], [x, *parameters], _tensor(inputs["cotangent"], False), group)
    return Work(call, read)


def _caller(
    forward: Callable[..., Tensor], arguments: list[Tensor], wanted: list[Tensor], cotangent: Tensor, group: Group
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call that gives the output, and with gradients those of `wanted`."""

    def run_forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(*arguments),)

    def run_both() -> tuple[Tensor, ...]:
        output = forward(*arguments)
        return (output.detach(), *torch.autograd.grad(output, wanted, cotangent))

    return run_both if group.backward else run_forward


def _compiled(forward: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
    return torch.compile(forward, dynamic=False) if mode == "compiled" else forward


def _tensor(array: np.ndarray, requires_grad: bool) -> Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype != np.float32:  # torch takes no bfloat16 from NumPy
        tensor = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array.copy())
    return tensor.to(device()).requires_grad_(requires_grad)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()
