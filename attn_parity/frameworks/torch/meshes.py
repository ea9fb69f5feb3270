"""Simulated devices: processes that speak by gloo, a mesh of them, and the collectives that a call makes.

The twin is `attn_parity.frameworks.jax.meshes`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from torch_attn.backend import from_numpy, to_numpy
from torch_attn.shards import cut_as

PATIENCE = datetime.timedelta(days=1)
"""How long a process waits for the others: however busy the machine is. One that has ended is waited for no longer."""


def simulate(sizes: Mapping[str, int], rank: int, folder: Path, *, again: bool = False) -> DeviceMesh:
    """Join the processes of a mesh, and return it.

    Args:
        sizes: of its axes by name.
        rank: number of this process.
        folder: an empty one, which all of them reach.
        again: whether they have met before, for another mesh of as many devices.
    """
    if again:
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    devices = math.prod(sizes.values())
    address = f"file://{folder.resolve()}/processes"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=devices, timeout=PATIENCE)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def leave() -> None:
    """Leave the processes of a mesh."""
    torch.distributed.destroy_process_group()


def double_precision() -> contextlib.AbstractContextManager[None]:
    """Return the context in which there is float64; here always."""
    return contextlib.nullcontext()


def results(module: nn.Module, inputs: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the output of a call, and the gradients of inputs and parameters, whole, by name.

    Args:
        module: plain or sharded, with one output.
        inputs: keyword arguments.
        seed: of the numbers that the output is multiplied with to give the loss.
    """
    tensors = {name: from_numpy(array) for name, array in inputs.items()}
    sources = {name: one.requires_grad_() for name, one in tensors.items() if one.is_floating_point()}
    output = module(**tensors)
    weights = from_numpy(np.random.default_rng(seed).normal(size=tuple(output.shape))).to(output.dtype)
    (output * cut_as(weights, output)).sum().backward()
    sources |= dict(module.named_parameters())
    arrays = {"output": to_numpy(output)}
    arrays |= {f"grad {name}": to_numpy(one.grad) for name, one in sources.items() if one.grad is not None}
    module.zero_grad()
    return arrays


def collectives(module: nn.Module, inputs: Mapping[str, np.ndarray], *, backward: bool) -> dict[str, int]:
    """Return how often each collective operation runs in a call of a module, and in its backward pass, too."""
    tensors = {name: from_numpy(array) for name, array in inputs.items()}
    tensors = {name: one.requires_grad_() if one.is_floating_point() else one for name, one in tensors.items()}
    with CommDebugMode() as counts, torch.set_grad_enabled(backward):
        # What it notes of modules is not asked for, and loses count where a call runs one twice, as blocks do.
        counts.advanced_module_tracker.__exit__()
        output = module(**tensors)
        if backward:
            output.sum().backward()
    module.zero_grad()
    counts_by_name = {str(operation).rpartition(".")[2]: count for operation, count in counts.get_comm_counts().items()}
    return dict(sorted(counts_by_name.items()))
