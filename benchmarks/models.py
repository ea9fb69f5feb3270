"""Whole models next to `transformers`: loading next to reading the file, a prompt, and a token with a long cache.

python -m benchmarks.models [--layers 16] [--width 1024] [--length 2048] [--rounds 15] [--json FILE]

A random Llama in float32 is written to a temporary folder. Everything is measured alternately in one process, and the
median of the rounds is shown. All logits of a prompt are computed on every side; `transformers` decodes with its static
cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn

from .measuring import machine
from .sides import jax_side, torch_side

Way = Callable[[], object]
VOCABULARY = 32000

CLOSE = 1e-3
"""By how much logits in float32 may be off, as a share of the largest."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024, help="of the model; heads are of 64")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt, and in the cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = write(Path(folder), options.layers, options.width, options.length)
        measurements = measure(Path(folder), theirs, options.length, options.rounds)
        size = (Path(folder) / "model.safetensors").stat().st_size
    facts = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print(f"Llama in float32, {options.layers} layers of {options.width}, {size / 2**30:.2f} GiB; "
          f"{options.length} tokens; milliseconds, median of {options.rounds}")  # fmt: skip
    for part, ways in measurements.items():
        first = next(iter(ways.values()))
        print(part)
        for name, seconds in ways.items():
            print(f"  {name:28}{1000 * seconds:9.1f}{seconds / first:7.2f}")
    described = {**machine.describe(), "frameworks": facts}
    print("\n".join(machine.sentences(described)))
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": measurements, "machine": described}, indent=1) + "\n")


def write(folder: Path, layers: int, width: int, length: int) -> transformers.LlamaForCausalLM:
    """Write a model of `transformers` with random weights, and return it."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=2 * length,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def measure(
    folder: Path, theirs: transformers.LlamaForCausalLM, length: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return part -> way -> median seconds; the first way of a part is the baseline."""
    medians = {"loading": alternate(loading(folder), rounds)}
    ours = torch_attn.DecoderModel.from_pretrained(folder)
    flax = jax_attn.DecoderModel.from_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, length + 2 * rounds + 8))
    with torch.inference_mode():
        for part, ways, count in (
            ("a prompt", prompts(theirs, ours, flax, ids[:, :length]), max(3, rounds // 3)),
            ("a token behind it", steps(theirs, ours, flax, ids, length), rounds),
        ):
            check(part, ways)
            medians[part] = alternate(ways, count)
    return medians


def loading(folder: Path) -> dict[str, Way]:
    """Return ways to read a model's file, and the model."""
    return {
        "reading the file": (folder / "model.safetensors").read_bytes,
        "torch": lambda: torch_attn.DecoderModel.from_pretrained(folder),
        "JAX": lambda: jax_attn.DecoderModel.from_pretrained(folder),
    }


def prompts(
    theirs: transformers.LlamaForCausalLM, ours: torch_attn.DecoderModel, flax: jax_attn.DecoderModel, ids: np.ndarray
) -> dict[str, Way]:
    """Return ways to all logits of a prompt, without a cache."""
    graph, weights = nnx.split(flax)
    forward = jax.jit(lambda weights, ids: nnx.merge(graph, weights)(ids))
    in_torch, in_jax = torch.from_numpy(ids), jnp.asarray(ids, jnp.int32)
    return {
        "transformers": lambda: theirs(in_torch, use_cache=False).logits,
        "torch": lambda: ours(in_torch),
        "JAX": lambda: jax.block_until_ready(forward(weights, in_jax)),
    }


def steps(
    theirs: transformers.LlamaForCausalLM,
    ours: torch_attn.DecoderModel,
    flax: jax_attn.DecoderModel,
    ids: np.ndarray,
    length: int,
) -> dict[str, Way]:
    """Return ways to read one token more, with a cache of as many tokens as the prompt has."""
    capacity = ids.shape[1]
    state: dict[str, Any] = {"transformers": length, "torch": ours.init_cache(1, capacity)}
    cache = transformers.StaticCache(config=theirs.config, max_cache_len=capacity)
    theirs(torch.from_numpy(ids[:, :length]), past_key_values=cache, cache_position=torch.arange(length))
    _, state["torch"] = ours(torch.from_numpy(ids[:, :length]), cache=state["torch"])
    graph, weights = nnx.split(flax)
    step = jax.jit(lambda weights, ids, cache: nnx.merge(graph, weights)(ids, cache=cache), donate_argnums=2)
    _, state["JAX"] = step(weights, jnp.asarray(ids[:, :length], jnp.int32), flax.init_cache(1, capacity))
    token = ids[:, :1]

    def of_transformers() -> torch.Tensor:
        at = torch.tensor([state["transformers"]])
        state["transformers"] += 1
        return theirs(torch.from_numpy(token), past_key_values=cache, cache_position=at).logits

    def of_torch() -> torch.Tensor:
        logits, state["torch"] = ours(torch.from_numpy(token), cache=state["torch"])
        return logits

    def of_jax() -> jax.Array:
        logits, state["JAX"] = step(weights, jnp.asarray(token, jnp.int32), state["JAX"])
        return jax.block_until_ready(logits)

    return {"transformers, static cache": of_transformers, "torch": of_torch, "JAX": of_jax}


def check(part: str, ways: dict[str, Way]) -> None:
    """Exit if the logits of a way differ from those of the first: a wrong way must not win."""
    wanted, *others = (np.asarray(way()) for way in ways.values())
    for name, logits in zip(list(ways)[1:], others, strict=True):
        apart = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
        if not apart < CLOSE:
            raise SystemExit(f"error: {part}, {name}: logits are off by {apart:.1e} of the largest")


def alternate(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, after one run that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
