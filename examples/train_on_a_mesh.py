"""Train a model of two layers on four devices, and say whether it learns what it learns on one, in both frameworks.

python examples/train_on_a_mesh.py [all_gather|ring|ulysses]

Two devices share heads, hidden units and the vocabulary (tensor), and two the tokens (context). They are simulated:
torch's are four processes that speak by gloo, JAX's are parts of the processor in one process. All start from the same
weights and see the same text. Needs both frameworks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TEXT = Path(__file__).with_name("fables.txt")
MESH, DEVICES = {"tensor": 2, "context": 2}, 4
METHODS = ("all_gather", "ring", "ulysses")
STEPS, BATCH, LENGTH, SEED, RATE = 4, 4, 32, 123, 0.5

LIMITS = {"float32": 1e-5, "float64": 1e-12}
"""By how much losses of the same step may differ."""

RUNS = ("torch, 1 device", "torch, 4 devices", "JAX, 1 device", "JAX, 4 devices")


def main(method: str = "ring") -> None:
    """Print the losses of all runs; exit with status 1 unless they are the same."""
    if method not in METHODS:
        sys.exit(f"error: method ({method}) must be one of {', '.join(METHODS)}")
    losses = {name: run for one in train(method) for name, run in one.items()}
    print(f"a decoder of two layers on {', '.join(f'{axis}={size}' for axis, size in MESH.items())} by {method}")
    print("step" + "".join(f"{name:>18}" for name in RUNS))
    for step in range(STEPS):
        print(f"{step + 1:4}" + "".join(f"{losses[name]['float64'][step]:18.10f}" for name in RUNS))
    fail = False
    for dtype, limit in LIMITS.items():
        of_runs = np.array([losses[name][dtype] for name in RUNS])
        apart = float(np.ptp(of_runs, axis=0).max())
        falls = bool((of_runs[:, -1] < of_runs[:, 0]).all())
        holds = falls and apart <= limit
        fail = fail or not holds
        print(f"{dtype}: losses at most {apart:.0e} apart: {'equal' if holds else 'NOT equal'}")
    sys.exit(fail)


def train(method: str) -> list[dict[str, Any]]:
    """Train in processes of their own, as torch's devices and JAX's have to be; return what torch's and JAX's found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--in-process", method, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        names = [*(f"torch {rank}" for rank in range(DEVICES)), "jax 0"]
        processes = [subprocess.Popen([*command, *name.split()], env=environment) for name in names]
        try:
            ended = [one.wait() for one in processes]
            if any(ended):
                sys.exit("error: a process failed")
        finally:
            for one in processes:
                one.kill()
        return [json.loads((Path(folder) / f"{name}.json").read_text()) for name in ("torch", "jax")]


# ---- in a process of a mesh


def train_in_torch(method: str, folder: str, rank: int) -> dict[str, Any]:
    """Return the losses of both torch runs; every process calls this."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from torch_attn.parallel import parallelize

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=DEVICES)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))

    def losses(model: Any, is_sharded: bool) -> list[float]:
        if is_sharded:
            parallelize(model, mesh, tensor="tensor", context="context", method=method)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
        for tokens, targets in batches():
            logits = model(torch.from_numpy(tokens))  # on the mesh a DTensor, of which each rank has a part
            logits = logits.full_tensor() if is_sharded else logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    results = {
        name: {dtype: losses(torch_model(dtype), "4" in name) for dtype in LIMITS} for name in RUNS if "torch" in name
    }
    torch.distributed.destroy_process_group()
    return results


def train_in_jax(method: str) -> dict[str, Any]:
    """Return the losses of both JAX runs."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jax_attn
    from attn_bridge import transfer
    from jax_attn.parallel import parallelize

    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * len(MESH))

    @jax.jit
    def step(model: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
        graph, weights = nnx.split(model)

        def loss(weights: Any) -> Any:
            chances = jax.nn.log_softmax(nnx.merge(graph, weights)(tokens))
            return -jnp.take_along_axis(chances, targets[..., None], -1).mean()

        value, slopes = jax.value_and_grad(loss)(weights)
        return value, nnx.merge(graph, jax.tree.map(lambda one, slope: one - RATE * slope, weights, slopes))

    def losses(dtype: str, is_sharded: bool) -> list[float]:
        model = jax_attn.DecoderModel(config(), rngs=nnx.Rngs(0), param_dtype=dtype)
        transfer(torch_model(dtype), model)
        if is_sharded:
            parallelize(model, mesh, tensor="tensor", context="context", method=method)
        found = []
        for tokens, targets in batches():
            value, model = step(model, tokens, targets)
            found.append(float(value))
        return found

    with jax.enable_x64(True):
        return {name: {dtype: losses(dtype, "4" in name) for dtype in LIMITS} for name in RUNS if "JAX" in name}


def config() -> Any:
    """Return the config of the model: grouped heads, a window in the first layer, rotary positions."""
    from attn_bridge import masks, specs

    width, norm = 32, specs.RMSNormConfig(32)
    blocks = tuple(
        specs.DecoderBlockConfig(
            specs.GroupedQueryAttentionConfig(width, 4, 2, 8, position=specs.Rotary(), mask=mask),
            specs.FeedForwardConfig(width, 64),
            norm,
        )
        for mask in (masks.sliding_window(9), masks.causal())
    )
    return specs.DecoderConfig(vocab_size=64, emb_dim=width, blocks=blocks, norm=norm)


def torch_model(dtype: str) -> Any:
    """Return the plain model with the weights that all runs start from."""
    import torch

    import torch_attn

    torch.manual_seed(SEED)
    return torch_attn.DecoderModel(config()).to(getattr(torch, dtype))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each step some tokens of the fables and those that follow them, each ``(BATCH, LENGTH)``."""
    text = TEXT.read_text()
    letters = sorted(set(text))
    tokens = np.array([letters.index(letter) for letter in text[: STEPS * BATCH * LENGTH + 1]])
    shape = (STEPS, BATCH, LENGTH)
    return list(zip(tokens[:-1].reshape(shape), tokens[1:].reshape(shape), strict=True))


def in_process(method: str, folder: str, framework: str, rank: str) -> None:
    """Train in one process, and have the first of a framework write down what it found."""
    found = train_in_torch(method, folder, int(rank)) if framework == "torch" else train_in_jax(method)
    if rank == "0":
        (Path(folder) / f"{framework}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        in_process(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
