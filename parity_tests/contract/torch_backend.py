"""The adapter of torch: builds and calls what `torch_attn` offers, with NumPy arrays in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import torch_attn
from attn_bridge.masks import Mask
from torch_attn import functional, implementations
from torch_attn.backend import build_blank, from_numpy, precision, set_weights, to_numpy
from torch_attn.decoding import generation
from torch_attn.implementations import reference

__all__ = ["build_blank", "precision", "reference"]

package = torch_attn
OTHERS = {"jax", "jaxlib", "flax", "optax", "orbax"}
"""Packages without which this backend must work."""

PROGRAM = """
import torch, torch_attn, torch_attn.backend
torch_attn.MultiHeadAttention(4, 4, 6, num_heads=2)(torch.ones(5, 4))
"""
"""Imports the backend and calls a module."""

SOURCES = "a torch.Generator, a stream, a JaxRngs or None"
"""What `functional` takes for a random source, in the words of its message."""


def build(name: str, seed: int = 0, **arguments: Any) -> nn.Module:
    """Return a new module whose weights, and then masks of dropout, are drawn from a seed."""
    torch.manual_seed(seed)
    return getattr(torch_attn, name)(**arguments)


def load(module: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Give a module its weights by their torch names."""
    set_weights(module, weights)


def halve(layer: nn.Linear, half: int, side: str) -> None:
    """Keep the first or the second half of the ``outputs`` or ``inputs`` of a linear layer."""
    for name, array in list(layer.named_parameters()):
        if name == "weight" or side == "outputs":
            axis = 0 if side == "outputs" else 1
            setattr(layer, name, nn.Parameter(array.detach().chunk(2, axis)[half]))


def stock_linear(inputs: int, outputs: int, bias: int) -> nn.Linear:
    """Return torch's linear layer with a bias of a width."""
    layer = nn.Linear(inputs, outputs)
    layer.bias = nn.Parameter(torch.ones(bias))
    return layer


def keep_first(layer: nn.Linear) -> None:
    """Keep the first output of a linear layer alone."""
    for name, array in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(array.detach()[:1]))


def keep_first_number(owner: nn.Module, name: str, axis: int = -1) -> None:
    """Keep the first number of a parameter along an axis alone."""
    setattr(owner, name, nn.Parameter(getattr(owner, name).detach().narrow(axis, 0, 1)))


def parameter(module: nn.Module, name: str) -> np.ndarray:
    """Return a parameter by its torch name."""
    return module.get_parameter(name).detach().numpy()


def as_argument(value: Any) -> Any:
    """Return what a user gives for a NumPy array; anything else as it is."""
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def output(module: Any, *inputs: np.ndarray) -> np.ndarray:
    """Return what a plain call gives."""
    return to_numpy(module(*map(from_numpy, inputs)))


output_eagerly = output


def call_once(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Return what a call gives."""
    return module(*inputs, **options)


def pick(logits: np.ndarray, numbers: np.ndarray, options: Any) -> np.ndarray:
    """Return the tokens that numbers from [0, 1) pick."""
    return generation.pick(torch.tensor(logits), torch.tensor(numbers), options.checked(logits.shape[-1])).numpy()


def run(module: Any, x: np.ndarray, mask: np.ndarray | Mask | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights."""
    mask = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    context, weights = module(from_numpy(x), attention_mask=mask, return_weights=True)
    return to_numpy(context), to_numpy(weights)


run_eagerly = run


def gradients(module: Any, x: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the input and of every parameter, for a cotangent without symmetry."""
    source = torch.from_numpy(x).requires_grad_()
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    outputs = module(source, attention_mask=torch.from_numpy(mask), return_weights=True)
    return [gradient.numpy() for gradient in torch.autograd.grad(_loss(outputs), [source, *parameters])]


def random_state(module: nn.Module) -> Any:
    """Return the state of everything that a module may draw from."""
    del module
    return torch.get_rng_state().numpy().tobytes()


def attend(*inputs: np.ndarray, **options: Any) -> Any:
    """Call `functional.dot_product_attention` on NumPy arrays."""
    result = functional.dot_product_attention(*map(torch.from_numpy, inputs), **_tensors(options))
    return tuple(part.numpy() for part in result) if isinstance(result, tuple) else result.numpy()


def attend_gradients(*inputs: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Return the gradients of query, key, value and, if there are any, of the sinks."""
    tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
    options = _tensors(options)
    sources = tensors if options.get("sinks") is None else [*tensors, options["sinks"].requires_grad_()]
    loss = _loss([functional.dot_product_attention(*tensors, **options)])
    return [gradient.numpy() for gradient in torch.autograd.grad(loss, sources)]


def unavailable(*inputs: np.ndarray) -> dict[str, str | None]:
    """Return why each implementation can't serve a call, None if it can."""
    call = functional._checked(*map(torch.from_numpy, inputs), *[None] * 5, 0.0, None, False)
    return {name: one.unsupported(call) for name, one in implementations.IMPLEMENTATIONS.items()}


def source(seed: int) -> torch.Generator:
    """Return a random source of `functional`."""
    return torch.Generator().manual_seed(seed)


def source_state(rng: torch.Generator) -> Any:
    """Return the state of a random source."""
    return rng.get_state().numpy().tobytes()


def _loss(outputs: Any) -> torch.Tensor:
    return sum((part * torch.cos(torch.arange(part.numel())).reshape(part.shape)).sum() for part in outputs)


def _tensors(options: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
