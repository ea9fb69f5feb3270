"""Costs of masks, bias, softcap, sinks and dropout, relative to a causal call without them, in both frameworks.

python -m benchmarks.options [--shape 4,1024,12,64] [--rounds 7]

Everything is measured alternately in one process, each call behind an equal one that is not timed, and the median of
the rounds is shown, with the implementation that is picked. torch runs eagerly, JAX compiled; gradients are those of
query, key and value, and of the bias where noted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import attn_bridge
import jax_attn.functional
import torch_attn.functional
from attn_bridge import masks
from torch_attn.random import JaxRngs

from .measuring import machine
from .sides import jax_side, torch_side

Way = Callable[[], object]
Options = dict[str, Any]
"""Arguments of a call in addition to query, key and value."""

WAYS = "fwd", "fwd+bwd"

SELF = "each token alone"
"""The case whose masks let one score of each query through: nearly all of its time is reading and writing."""

SETTLING = 5
"""Calls of the first case before a round: behind the drawing of masks some took a third longer, on a Xeon."""

BITS = "drawing a mask alone"
"""The case that draws the mask of `dropout`, with each framework's own generator, and computes no attention."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4,1024,12,64", help="batch, tokens, heads, width of a head")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    sizes = [int(size) if size.isdecimal() else 0 for size in chosen.shape.split(",")]
    if len(sizes) != 4 or 0 in sizes:
        parser.error(f"--shape ({chosen.shape}) must be four whole numbers above 0 such as 4,1024,12,64")
    if chosen.rounds < 1:
        parser.error(f"--rounds ({chosen.rounds}) must be at least 1")
    batch, tokens, heads, width = sizes
    medians, picked = measure(batch, tokens, heads, width, chosen.rounds)
    print(
        f"{batch}x{tokens}x{heads}x{width}, float32, causal and more; milliseconds, median of {chosen.rounds} rounds,"
    )
    print("and how many times as long as without")
    print(f"{'':28}" + "".join(f"{side:>13}{'fwd':>8}{'x':>6}{'fwd+bwd':>9}{'x':>6}" for side in ("torch", "jax")))
    for name in dict.fromkeys(name for name, _, _ in medians):
        line = f"{name:28}"
        for side in ("torch", "jax"):
            line += f"{picked[name, side]:>13}"
            for what, digits in zip(WAYS, (8, 9), strict=True):
                seconds = medians[name, side, what]
                line += f"{1000 * seconds:{digits}.1f}{seconds / medians['causal', side, what]:6.2f}"
        print(line)
    visible = visible_shares(batch, tokens, heads)
    print("time per score that the mask lets through, relative to causal; the share of scores that it lets through")
    _print_per_score(medians, visible)
    print(f"the same of what a call takes beyond `{SELF}`, which reads and writes as much and computes hardly anything")
    beyond = {key: seconds - medians[SELF, *key[1:]] for key, seconds in medians.items()}
    more = {name: share - visible[SELF] for name, share in visible.items() if name != SELF}
    _print_per_score(beyond, more)
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def _print_per_score(seconds: Mapping[tuple[str, str, str], float], shares: Mapping[str, float]) -> None:
    """Print the times of calls, each divided by its share of the scores, relative to that of the causal call."""
    print(f"{'':28}{'share':>9}" + "".join(f"{f'{side} {way}':>15}" for side in ("torch", "jax") for way in WAYS))
    for name, share in shares.items():
        line = f"{name:28}{share:9.1%}"
        for side in ("torch", "jax"):
            for what in WAYS:
                relative = seconds[name, side, what] / seconds["causal", side, what]
                line += f"{relative * shares['causal'] / share:15.2f}"
        print(line)


def cases(batch: int, tokens: int, heads: int) -> dict[str, Options]:
    """Return the arguments of each call in addition to query, key and value, as NumPy arrays."""
    random, causal = np.random.default_rng(0), masks.causal()
    bias = random.normal(size=(1, heads, tokens, tokens)).astype(np.float32)
    return {
        "causal": {"mask": causal},
        SELF: {"mask": masks.sliding_window(1)},
        "window of 1/8": {"mask": masks.sliding_window(max(tokens // 8, 1))},
        "chunks of 1/4": {"mask": masks.chunked(max(tokens // 4, 1))},
        "prefix of 1/4": {"mask": masks.prefix(max(tokens // 4, 1))},
        "8 documents": {"mask": causal & masks.documents(np.sort(random.integers(0, 8, (batch, tokens)), 1))},
        "padding": {"mask": causal & masks.padding(random.integers(tokens // 2, tokens + 1, batch))},
        "array of queries and keys": {"mask": causal & (random.random((batch, 1, tokens, tokens)) < 0.8)},
        "sinks": {"mask": causal, "sinks": random.normal(size=heads).astype(np.float32)},
        "softcap": {"mask": causal, "softcap": 30.0},
        "bias": {"mask": causal, "bias": bias},
        "bias, differentiated": {"mask": causal, "bias": bias},
        "dropout": {"mask": causal, "dropout": 0.1},
        "dropout, JAX's stream": {"mask": causal, "dropout": 0.1, "rng": None},
        BITS: {"dropout": 0.1},
    }


def visible_shares(batch: int, tokens: int, heads: int) -> dict[str, float]:
    """Return the share of its scores that the mask of each case lets through, of the cases without dropout."""
    queries, keys = np.arange(tokens)[:, None], np.arange(tokens)[None]
    return {
        name: float(np.mean(options["mask"].allowed(queries, keys)))
        for name, options in cases(batch, tokens, heads).items()
        if "dropout" not in options
    }


def measure(
    batch: int, tokens: int, heads: int, width: int, rounds: int
) -> tuple[dict[tuple[str, str, str], float], dict[tuple[str, str], str]]:
    """Return (call, framework, fwd or fwd+bwd) -> median seconds, and (call, framework) -> implementation picked."""
    random = np.random.default_rng(1)
    inputs = [random.normal(size=(batch, tokens, heads, width)).astype(np.float32) for _ in range(3)]
    ways: dict[tuple[str, str, str], Way] = {}
    picked = {}
    for name, options in cases(batch, tokens, heads).items():
        for side, make in (("torch", in_torch), ("jax", in_jax)):
            if name == BITS:
                draw = (_drawn_by_torch if side == "torch" else _drawn_by_jax)(batch, heads, tokens, options["dropout"])
                which, forward, with_gradients = "no attention", draw, draw
            else:
                which, forward, with_gradients = make(
                    inputs, options, differentiates_bias=name.endswith("differentiated")
                )
            picked[name, side], ways[name, side, "fwd"], ways[name, side, "fwd+bwd"] = which, forward, with_gradients
    seconds: dict[tuple[str, str, str], list[float]] = {key: [] for key in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for _ in range(SETTLING):
            next(iter(ways.values()))()
        for key, way in ways.items():
            way()  # caches and threads as this case leaves them, not as the case before it does
            start = time.perf_counter()
            way()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(found) for key, found in seconds.items()}, picked


def _drawn_by_torch(batch: int, heads: int, tokens: int, rate: float) -> Way:
    shape = batch, heads, tokens, tokens
    return lambda: torch.empty(shape, dtype=torch.bool).bernoulli_(1.0 - rate)


def _drawn_by_jax(batch: int, heads: int, tokens: int, rate: float) -> Way:
    key, shape = jax.random.key(0), (batch, heads, tokens, tokens)
    draw = jax.jit(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))
    return lambda: jax.block_until_ready(draw(key))


def _picked(arrays: Sequence[object], options: Options) -> str:
    reasons = attn_bridge.explain_attention(*arrays, **options)
    return next(name for name, reason in reasons.items() if reason is None)


def in_torch(inputs: list[np.ndarray], options: Options, *, differentiates_bias: bool) -> tuple[str, Way, Way]:
    """Return the implementation picked, a forward call, and one with gradients."""
    arrays = [torch.from_numpy(one).requires_grad_() for one in inputs]
    options = {name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in options.items()}
    if "rng" in options:
        options["rng"] = JaxRngs(dropout=0)
    if differentiates_bias:
        options["bias"].requires_grad_()
        arrays = [*arrays, options["bias"]]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return torch_attn.functional.dot_product_attention(*arrays[:3], **options)

    def both() -> tuple[torch.Tensor, ...]:
        context = torch_attn.functional.dot_product_attention(*arrays[:3], **options)
        return torch.autograd.grad(context.square().sum(), arrays)

    return _picked(arrays[:3], options), forward, both


def in_jax(inputs: list[np.ndarray], options: Options, *, differentiates_bias: bool) -> tuple[str, Way, Way]:
    """Return the implementation picked, a forward call, and one with gradients, both compiled."""
    arrays = [jnp.asarray(one) for one in inputs]
    options = {name: jnp.asarray(one) if isinstance(one, np.ndarray) else one for name, one in options.items()}
    if "dropout" in options:
        options["rng"] = jax.random.key(0)
    array_options = {name: options.pop(name) for name in ("bias", "sinks") if name in options}

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, array_options: dict[str, jax.Array]) -> jax.Array:
        return jax_attn.functional.dot_product_attention(query, key, value, **array_options, **options)

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.square(attend(*operands)).sum()

    forward, with_gradients = (
        jax.jit(attend),
        jax.jit(jax.grad(loss, (0, 1, 2, 3) if differentiates_bias else (0, 1, 2))),
    )

    def run(program: Callable[..., object]) -> Way:
        return lambda: jax.block_until_ready(program(*arrays, array_options))

    return _picked(arrays, {**options, **array_options}), run(forward), run(with_gradients)


if __name__ == "__main__":
    main()
