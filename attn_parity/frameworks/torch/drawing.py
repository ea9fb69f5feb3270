"""Dropout of any torch module with shared masks; every dropout function is intercepted, under any name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torch_attn import random

from ...sides.dropout_masks import MaskPlan, Masks, asking
from ...sides.subject import ModuleFailedError
from .running.promotion import BACKWARD, backward_inside


@contextlib.contextmanager
def drawing(source: Masks | MaskPlan | None, module: nn.Module) -> Iterator[_Drawing]:
    """Have everything that drops draw its masks from `source`; None drops nothing.

    A checkpoint draws its masks again in the backward pass; it gets the ones that it had in the forward pass.

    Args:
        source: of the masks.
        module: the module that runs; its submodules are named as those that draw.

    Raises:
        ModuleFailedError: inside, something drops in a way that masks can't be given to.
    """
    mode = _Drawing(source, module)
    before = random.bernoulli
    random.bernoulli = mode.of_a_stream
    try:
        with mode:
            yield mode
    finally:
        random.bernoulli = before
        mode.leave()


def random_state() -> list[Tensor]:
    """Return the state of torch's own generators; it changes where something other than a given mask is drawn."""
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


class _Drawing(TorchFunctionMode):
    def __init__(self, source: Masks | MaskPlan | None, module: nn.Module):
        super().__init__()
        self.source = source
        self.owners = {id(child): path for path, child in module.named_modules()}
        self.heads = 0
        self._drawn: dict[bytes, Tensor] = {}
        self._started = torch.get_rng_state()
        self._expected = random_state()
        self._foreign = False
        self.instead: dict[object, Callable[..., object]] = {
            functional.dropout: self._dropout,
            torch.dropout: lambda input, p, train: self._dropout(input, p, train),
            torch.dropout_: lambda input, p, train: self._dropout(input, p, train, True),
            functional.dropout1d: self._of_channels(1),
            functional.dropout2d: self._of_channels(2),
            functional.dropout3d: self._of_channels(3),
            functional.scaled_dot_product_attention: self._attend,
            functional.multi_head_attention_forward: self._attend_with_heads,
            torch.bernoulli: self._bernoulli,
            Tensor.bernoulli: self._bernoulli,
            Tensor.bernoulli_: self._bernoulli_in_place,
        }

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in BACKWARD:
            return backward_inside(self, func, args, kwargs)
        if func in self.instead:
            return self.instead[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in _REFUSED and _is_on(func, args, kwargs) and self.source is not None:
            raise ModuleFailedError(f"{name} is not driven by given masks; replace it, or give it p=0")
        return func(*args, **kwargs)

    def of_a_stream(
        self, key: object, p: float | Tensor = 0.5, shape: object = None, *, x64: bool = False, device: object = None
    ) -> Tensor:
        """Stand for `random.bernoulli`."""
        if self.source is None:
            raise ModuleFailedError("dropout=False, but the torch module draws a dropout mask by itself")
        return self._keep(shape, 1.0 - float(p), device)

    def foreign(self) -> bool:
        """Return whether anything else has drawn from torch's own generators."""
        self._foreign = self._foreign or not all(map(torch.equal, self._expected, random_state()))
        return self._foreign

    def leave(self) -> None:
        """Bring back the random state that there was, unless anything else has drawn."""
        if self._drawn and not self.foreign():
            torch.set_rng_state(self._started)

    def _keep(self, shape: torch.Size, rate: float, device: object) -> Tensor:
        with torch._C.DisableTorchFunction():  # our own way to NumPy is not the module's
            return self._mask(shape, rate).to(device)

    def _mask(self, shape: torch.Size, rate: float) -> Tensor:
        assert self.source is not None
        state = torch.get_rng_state().numpy().tobytes()
        again = torch._C._current_graph_task_id() != -1
        if again and state not in self._drawn:
            raise ModuleFailedError(
                "a dropout mask is drawn again in the backward pass, and another one than in the forward pass "
                "(torch.utils.checkpoint with preserve_rng_state=False)"
            )
        if not again:
            self.foreign()
            mask = self.source.draw(tuple(shape), 1.0 - float(rate), asking(self.owners) or "")
            self._drawn[state] = torch.from_numpy(np.array(mask))
        torch.rand(())  # so that torch's random state, which a checkpoint brings back, tells the masks apart
        if not again:
            self._expected = random_state()
        return self._drawn[state]

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        shape = tuple(input.shape)
        if self.heads and input.ndim == 3 and shape[0] % self.heads == 0:  # batch and heads are one axis there
            shape = (shape[0] // self.heads, self.heads, *shape[1:])
        return self._drop(input, shape, p, training, inplace)

    def _of_channels(self, spatial: int) -> Callable[..., Tensor]:
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            # Without a batch there is one axis less; three axes are a batch to dropout2d all the same.
            kept = 1 if input.ndim == spatial + 1 and not (spatial == 2 and input.ndim == 3) else 2
            return self._drop(input, (*input.shape[:kept], *[1] * (input.ndim - kept)), p, training, inplace)

        return dropout

    def _drop(self, input: Tensor, shape: tuple[int, ...], p: float, training: bool, inplace: bool) -> Tensor:
        if torch._C._functorch.is_batchedtensor(input) and training and p and self.source is not None:
            raise ModuleFailedError("dropout inside torch.vmap is not driven by given masks")
        if not training or p == 0.0 or self.source is None:
            return input
        if p == 1.0:
            dropped = input * 0.0
        else:
            keep = self._keep(shape, p, input.device)
            keep = keep.reshape(input.shape) if keep.numel() == input.numel() else keep
            dropped = torch.where(keep, input * (1.0 / (1.0 - p)), 0.0)
        return input.copy_(dropped) if inplace else dropped

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0 or self.source is None:
            return _ATTEND(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -torch.inf)
            weights = torch.where(attn_mask.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
        else:
            weights = torch.softmax(scores if attn_mask is None else scores + attn_mask, -1)
        return self._drop(weights, tuple(weights.shape), dropout_p, True, False) @ value

    def _attend_with_heads(self, *args: Any, **kwargs: Any) -> object:
        """Run torch's function with its inner dropout and attention replaced; this mode does not see those calls."""
        self.heads = args[4] if len(args) > 4 else kwargs["num_heads"]
        names = {"dropout": self._dropout, "scaled_dot_product_attention": self._attend}
        before = {name: getattr(functional, name) for name in names}
        try:
            for name, replacement in names.items():
                setattr(functional, name, replacement)
            return _ATTEND_WITH_HEADS(*args, **kwargs)
        finally:
            self.heads = 0
            for name, original in before.items():
                setattr(functional, name, original)

    def _bernoulli(
        self, input: Tensor, p: float | None = None, *, generator: object = None, out: Tensor | None = None
    ) -> Tensor:
        if self.source is None:
            keywords = {} if out is None else {"out": out}
            return torch.bernoulli(input, *(() if p is None else (p,)), generator=generator, **keywords)
        if p is None:
            probabilities = input.detach().unique()
            if probabilities.numel() != 1:
                raise ModuleFailedError("torch.bernoulli with several probabilities is not driven by given masks")
            p = float(probabilities)
        mask = self._keep(input.shape, 1.0 - p, input.device).to(input.dtype)
        return mask if out is None else out.copy_(mask)

    def _bernoulli_in_place(self, input: Tensor, p: float | Tensor = 0.5, *, generator: object = None) -> Tensor:
        if self.source is None:
            return input.bernoulli_(p, generator=generator)
        if isinstance(p, Tensor) and p.numel() != 1:
            raise ModuleFailedError("bernoulli_ with several probabilities is not driven by given masks")
        return input.copy_(self._keep(input.shape, 1.0 - float(p), input.device))


_ATTEND = functional.scaled_dot_product_attention
_ATTEND_WITH_HEADS = functional.multi_head_attention_forward
_REFUSED = {
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
    torch.feature_dropout,
    torch.native_dropout,
}


def _is_on(func: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether a refused function drops; all of them take the input, the rate, and whether in training."""
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", False))
    return bool(rate) and training is not False
