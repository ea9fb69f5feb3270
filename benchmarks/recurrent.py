"""Recurrent layers next to the published torch code, as transformers has it for CPUs.

    python -m benchmarks.recurrent [--rounds 7] [--decode | --products]

The gated delta rule of whole sequences, with ``--products`` three rules next to their matrix products alone, or with
``--decode`` layers that decode token by token behind a cache. Everything is measured alternately in one process, and
the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import jax_attn
import torch_attn
from attn_bridge.recurrence import CHANNEL_CHUNK_SIZE
from jax_attn.recurrent import decayed as decayed_in_jax
from jax_attn.recurrent import recurrence as recurrence_in_jax
from torch_attn.recurrent import decayed as decayed_in_torch
from torch_attn.recurrent import recurrence as recurrence_in_torch

from .measuring import machine, products
from .sides import jax_side, torch_side

SHAPES = [(1, 2048, 16, 128), (2, 512, 8, 64), (1, 777, 4, 80)]
"""Batch, tokens, heads, and channels of a head."""

WIDTH, STEPS = 1024, 64

LAYERS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "Mamba": ("MambaMixer", "backbone.layers.1.mixer.", "mamba", {}),
    "Mamba2": ("Mamba2Mixer", "backbone.layers.1.mixer.", "mamba2", {"num_heads": 32, "head_dim": 64, "n_groups": 1}),
    "KimiDeltaAttention": (
        "KimiLinearDeltaAttention",
        "model.layers.1.self_attn.",
        "kimi_linear",
        {"linear_head_dim": 128, "linear_num_heads": 8, "num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "GatedDeltaNet": ("Qwen3NextGatedDeltaNet", "model.layers.1.linear_attn.", "qwen3_next", {}),
}
"""Class of ours -> that of transformers, the prefix of its tensors, its model, and sizes."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--decode", action="store_true", help="measure layers that decode behind a cache")
    parser.add_argument("--products", action="store_true", help="measure ours next to their matrix products alone")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.products:
        _print_products(rounds)
        return
    print(f"float32, milliseconds, median of {rounds}; times as long as the reference takes")
    for name in LAYERS if arguments.decode else ():
        for batch in (1, 8):
            row = _row(decoding(name, batch), rounds)
            print(f"{name}, batch {batch}, {STEPS + 1} tokens one by one: {row}", flush=True)
    for shape in () if arguments.decode else SHAPES:
        for what, make in (("forward", forward), ("with gradients", with_gradients)):
            ways = make("gated delta rule", *shape)
            print(f"{shape} {what}: {_row(ways, rounds)}", flush=True)
    _print_machine()


def _print_products(rounds: int) -> None:
    """Measure and print how many times as long as its matrix products each rule takes."""
    print(
        f"float32, milliseconds, median of {rounds}: a call, its matrix products and triangular systems alone, and how"
    )
    print("many times as long the call takes; in torch also copying as many bytes as the other operations move")
    rate = products.rate_of_copies()
    for rule in RULES:
        print(rule)
        for shape in SHAPES:
            arrays = [jnp.asarray(operand) for operand in operands_of(rule, *shape)]
            for what, make in (("forward", forward), ("with gradients", with_gradients)):
                ways = {name: way for name, way in make(rule, *shape).items() if name != "reference"}
                program = traced(rule, with_gradients=make is with_gradients)
                alone = {"torch": products.of_torch(ways["torch"]), "jax": products.of_jax(program, *arrays)}
                durations = measure({**ways, **{f"{name} alone": way for name, way in alone.items()}}, rounds)
                cells = [
                    f"{name} {1000 * durations[name]:.2f} of {1000 * durations[f'{name} alone']:.2f} "
                    f"({durations[name] / durations[f'{name} alone']:.2f})"
                    for name in ways
                ]
                copies = f"copies {1000 * products.moved_by_torch(ways['torch']) / rate:.2f}"
                print(f"  {shape} {what}: {cells[0]}, {copies}; {cells[1]}", flush=True)
    _print_machine()


def _print_machine() -> None:
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def _row(ways: Mapping[str, Callable[[], object]], rounds: int) -> str:
    durations = measure(ways, rounds)
    cells = (
        f"{name} {1000 * seconds:.2f} ({seconds / durations['reference']:.2f})" for name, seconds in durations.items()
    )
    return ", ".join(cells)


def decoding(name: str, batch: int) -> dict[str, Callable[[], object]]:
    """Return contender -> function that sends `STEPS + 1` tokens one by one through a layer with a cache."""
    kind, prefix, model_type, sizes = LAYERS[name]
    room = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = transformers.AutoConfig.for_model(model_type, hidden_size=WIDTH, num_hidden_layers=2, **sizes)
    layer = getattr(room, kind)(config, 1).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(spread * torch.randn(parameter.shape, generator=draw) + 0.01)
    raw = json.loads(config.to_json_string())
    state = {prefix + key: tensor.numpy() for key, tensor in layer.state_dict().items()}
    tokens = torch.randn(STEPS + 1, batch, 1, WIDTH, generator=draw)
    ours, twin = torch_attn.from_hf(raw, 1, state), jax_attn.from_hf(raw, 1, state)
    graph, weights = nnx.split(twin)
    step = jax.jit(lambda weights, x, cache: nnx.merge(graph, weights)(x, cache=cache), donate_argnums=2)
    in_jax = [jnp.asarray(x) for x in tokens.numpy()]

    @torch.inference_mode()
    def published() -> torch.Tensor:
        cache = transformers.DynamicCache(config=config)
        return [layer(x, cache_params=cache, attention_mask=None) for x in tokens][-1]

    @torch.inference_mode()
    def in_torch() -> torch.Tensor:
        cache = ours.init_cache(batch, STEPS + 1)
        for x in tokens:
            out, cache = ours(x, cache=cache)
        return out

    def in_flax() -> jax.Array:
        cache = twin.init_cache(batch, STEPS + 1)
        for x in in_jax:
            out, cache = step(weights, x, cache)
        return out.block_until_ready()

    outputs = published(), in_torch(), torch.from_numpy(np.array(in_flax()))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-3 * float(outputs[0].abs().max()))
    return {"reference": published, "torch": in_torch, "jax": in_flax}


def operands(batch: int, tokens: int, heads: int, width: int) -> list[np.ndarray]:
    """Return queries, scaled, and keys of length one, values, logarithms of decays, and how much is written."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(batch, tokens, heads, width)) for _ in range(3))
    query, key = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (query, key))
    decay, beta = -0.3 * random.random((batch, tokens, heads)), random.random((batch, tokens, heads))
    return [one.astype(np.float32) for one in (query * width**-0.5, key, value, decay, beta)]


RULES: dict[
    str,
    tuple[
        Callable[..., tuple[torch.Tensor, torch.Tensor]],
        Callable[..., tuple[jax.Array, jax.Array]],
        dict[str, int],
    ],
] = {
    "gated delta rule": (recurrence_in_torch.gated_delta_rule, recurrence_in_jax.gated_delta_rule, {}),
    "gated delta rule by channel (KDA)": (
        recurrence_in_torch.gated_delta_rule,
        recurrence_in_jax.gated_delta_rule,
        {"chunk_size": CHANNEL_CHUNK_SIZE},
    ),
    "decayed attention (Mamba-2)": (decayed_in_torch.decayed_attention, decayed_in_jax.decayed_attention, {}),
}
"""Rule -> its form in torch and in JAX, and options."""


def operands_of(rule: str, *shape: int) -> list[np.ndarray]:
    """Return the operands of a rule: decays of each channel for one by channel, no beta for one without."""
    *sequences, decay, beta = operands(*shape)
    if "channel" in rule:
        decay = np.random.default_rng(1).random(shape, np.float32) * decay[..., None]
    return [*sequences, decay] if "Mamba" in rule else [*sequences, decay, beta]


def traced(rule: str, *, with_gradients: bool) -> Callable[..., object]:
    """Return a function of operands that JAX can trace: the context, or the gradients of its sum for all operands."""
    _, in_jax, options = RULES[rule]

    def context(*inputs: jax.Array) -> jax.Array:
        return in_jax(*inputs, **options)[0]

    if not with_gradients:
        return context
    return lambda *inputs: jax.grad(lambda *inputs: context(*inputs).sum(), argnums=tuple(range(len(inputs))))(*inputs)


def forward(rule: str, *shape: int) -> dict[str, Callable[[], object]]:
    """Return contender -> function that computes the context."""
    arrays, (in_torch, _, options) = operands_of(rule, *shape), RULES[rule]
    tensors, in_jax = [torch.from_numpy(array) for array in arrays], [jnp.asarray(array) for array in arrays]
    run = jax.jit(traced(rule, with_gradients=False))
    return {
        "reference": lambda: reference(*tensors),
        "torch": lambda: in_torch(*tensors, **options)[0],
        "jax": lambda: run(*in_jax).block_until_ready(),
    }


def with_gradients(rule: str, *shape: int) -> dict[str, Callable[[], object]]:
    """Return contender -> function that computes the gradients of all operands."""
    arrays, (in_torch, _, options) = operands_of(rule, *shape), RULES[rule]
    in_jax = [jnp.asarray(array) for array in arrays]
    run = jax.jit(traced(rule, with_gradients=True))

    def gradients(function: Callable[..., torch.Tensor]) -> None:
        function(*(torch.from_numpy(array).requires_grad_() for array in arrays)).sum().backward()

    return {
        "reference": lambda: gradients(reference),
        "torch": lambda: gradients(lambda *inputs: in_torch(*inputs, **options)[0]),
        "jax": lambda: jax.block_until_ready(run(*in_jax)),
    }


def reference(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the reference's context; it scales queries itself."""
    scaled = query * query.shape[-1] ** 0.5
    return torch_chunk_gated_delta_rule(scaled, *others, use_qk_l2norm_in_kernel=False)[0]


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, taken in turns after a first call that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(one) for name, one in seconds.items()}


if __name__ == "__main__":
    main()
