"""Gradients of a run: asked for by their sources, or accumulated as ``loss.backward()`` does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torch_attn.backend import to_numpy
from torch_attn.shards import cut_as

from ....sides.subject import Array


class NeedsBackwardError(Exception):
    """Gradients could not be asked for by their sources; a checkpoint with ``use_reentrant=True`` accumulates them."""


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Hold the context in which gradients can be asked for, whatever the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def gradients_of(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    accumulate: bool,
    read: Callable[[int, Tensor], Array],
) -> list[Array | None]:
    """Return the gradient of each source; None for one that has none, zeros for one that nothing depends on.

    Args:
        outputs: what the gradients are of.
        cotangents: one for each output, or None.
        sources: what they are for.
        accumulate: have them added to their sources, as ``loss.backward()`` does.
        read: makes an array of the gradient of the source at a position.

    Raises:
        NeedsBackwardError: the graph has a checkpoint that only accumulates.
    """
    wanted = [source for source in sources if source.requires_grad]
    with torch._C.DisableTorchFunction():  # what is done here is not the module's
        pairs = [
            (output, cut_as(cotangent.to(output.device, output.dtype), output))
            for output, cotangent in zip(outputs, cotangents, strict=bool(cotangents))
            if output.requires_grad and cotangent is not None
        ]
    if not pairs or not wanted:
        return [_zeros_for(None, source) if source.requires_grad else None for source in sources]
    edge = torch.autograd.graph.get_gradient_edge  # given tensors, torch would leave the modes that are entered
    roots, given = [edge(output) for output, _ in pairs], [cotangent for _, cotangent in pairs]
    if accumulate:
        torch.autograd.backward(roots, given)
        found = iter([source.grad for source in wanted])
    else:
        try:
            found = iter(torch.autograd.grad(roots, [edge(one) for one in wanted], given, allow_unused=True))
        except RuntimeError as error:
            raise NeedsBackwardError from error
    return [
        _zeros_for(_numpy_or_none(next(found), functools.partial(read, position)), one) if one.requires_grad else None
        for position, one in enumerate(sources)
    ]


def _zeros_for(gradient: Array | None, tensor: Tensor) -> Array:
    """Return a gradient; zeros where there is none."""
    if gradient is not None:
        return gradient
    return np.zeros(tuple(tensor.shape), to_numpy(tensor[..., :0] if tensor.ndim else tensor).dtype)


def _numpy_or_none(gradient: Tensor | None, read: Callable[[Tensor], Array]) -> Array | None:
    return None if gradient is None else read(gradient if gradient.layout == torch.strided else gradient.to_dense())
