"""Dropout masks from streams and generators, also inside the transforms of `torch.func`.

The `randomness` of a `vmap` decides how its examples draw. ``"same"``: one mask for all examples. ``"different"``: one
draw with the axis of examples in front, which gives the masks of the same call on a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.types import Device

from .. import random, recomputation
from ..random import RngStream

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo

Draw: TypeAlias = Callable[[tuple[int, ...]], Tensor]
"""Draws a mask of a shape."""


def is_transforming() -> bool:
    """Return whether a transform of `torch.func` is active; a compiler handles transforms itself."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def draw_like(
    like: Float[Tensor, "..."], rate: float, rng: torch.Generator | RngStream, dtype: torch.dtype | None = None
) -> Bool[Tensor, "..."]:
    """Return the dropout mask of these weights, following the `randomness` of `torch.vmap` inside it."""
    draw_shape = drawing(rate, rng, dtype or like.dtype, like.device)
    if is_transforming():
        return _draw_mapped(like, draw_shape)
    return draw_shape(tuple(like.shape))


def drawing(rate: float, rng: torch.Generator | RngStream, dtype: torch.dtype | None, device: Device) -> Draw:
    """Return the function that draws the next mask of a source."""
    if torch.compiler.is_compiling():
        return _bernoulli_from(rate, rng, dtype, device)
    recomputation.check_forward()
    if isinstance(rng, torch.Generator):
        recomputation.prepare(rng)
    draw_shape = _bernoulli_from(rate, rng, dtype, device)

    def draw_hidden(shape: tuple[int, ...]) -> Tensor:
        with recomputation.hidden():
            return draw_shape(shape)

    return draw_hidden


def _bernoulli_from(rate: float, rng: torch.Generator | RngStream, dtype: torch.dtype | None, device: Device) -> Draw:
    if isinstance(rng, RngStream):
        key, x64 = rng(), rng.x64
        return lambda shape: random.bernoulli(key, 1.0 - rate, shape, x64=x64, device=device)
    return lambda shape: torch.empty(shape, dtype=dtype, device=device).bernoulli_(1.0 - rate, generator=rng) == 1.0


def _draw_mapped(like: Tensor, draw: Draw) -> Bool[Tensor, "..."]:
    """Draw a mask of the shape of `like`, which depends on the examples.

    Raises:
        RuntimeError: a `vmap` with ``randomness="error"``, its default, or with ``"different"`` over examples that
            `like` does not depend on.
    """
    modes = [_randomness(one) for one in torch._C._functorch.get_interpreter_stack() or ()]
    if "error" in modes:
        raise RuntimeError("dropout inside vmap needs randomness='same' or randomness='different'")
    levels: list[str] = []
    mask: Tensor = _Mask.apply(like.detach(), draw, levels.append)
    if len(levels) != modes.count("different"):
        raise RuntimeError("vmap with randomness='different' drops out what is the same for all examples; use 'same'")
    return mask


def _randomness(interpreter: Any) -> str | None:
    """Return the randomness of a `vmap`, None for other transforms."""
    functorch = torch._C._functorch
    if interpreter.key() != functorch.TransformType.Vmap:
        return None
    mode: str = functorch.CVmapInterpreterPtr(interpreter).randomness().name.lower()
    return mode


class _Mask(torch.autograd.Function):
    """A mask, which has no derivative. `count` is called for each `vmap` whose examples differ."""

    @staticmethod
    def forward(like: Tensor, draw: Draw, count: Callable[[str], None]) -> Tensor:
        return draw(tuple(like.shape))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: FunctionCtx, *cotangents: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Tensor | None) -> None:
        return None

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: tuple[object, ...], like: Tensor, draw: Draw, count: Callable[[str], None]
    ) -> tuple[Tensor, int | None]:
        if info.randomness == "same":
            return _Mask.apply(like.select(in_dims[0], 0), draw, count), None
        count(info.randomness)
        return _Mask.apply(like.movedim(in_dims[0], 0), draw, count), 0
