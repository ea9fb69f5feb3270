"""The adapter of torch: calls attention with NumPy arrays in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_bridge import masks
from parity_tests.support.calls.attention_calls import Options, draw
from torch_attn import functional
from torch_attn.random import JaxRngs


def results(inputs: list[np.ndarray], options: Options, name: str, dtype: str) -> list[np.ndarray]:
    """Return the context and the gradients of every float array, all computed in a dtype."""
    kind = getattr(torch, dtype)
    names = tuple(key for key in ("bias", "sinks") if key in options)
    arrays = [
        torch.from_numpy(np.array(array)).to(kind).requires_grad_() for array in (*inputs, *map(options.get, names))
    ]
    rest = {key: value for key, value in options.items() if key not in names}
    if "mask" in rest:
        rest["mask"] = masks.as_mask(rest["mask"]).with_arrays(torch.as_tensor)
    tensors = dict(zip(names, arrays[3:], strict=True))
    context = functional.dot_product_attention(*arrays[:3], implementation=name, **tensors, **rest)
    cotangent = torch.from_numpy(draw(*context.shape, seed=99)).to(kind)
    found = [context.detach(), *torch.autograd.grad(context, arrays, cotangent)]
    assert all(one.dtype == kind for one in found)
    return [one.double().numpy() for one in found]


def attend(*inputs: np.ndarray, name: str, dtype: str = "float32", **options: Any) -> np.ndarray:
    """Return the context of a call."""
    arrays = [torch.from_numpy(np.array(one)).to(getattr(torch, dtype)) for one in inputs]
    return functional.dot_product_attention(*arrays, implementation=name, **options).double().numpy()


def source(seed: int) -> Any:
    """Return what a dropout mask is drawn with."""
    return JaxRngs(dropout=seed)


def forget() -> None:
    """Forget what was compiled, which is done by what it was compiled for."""
