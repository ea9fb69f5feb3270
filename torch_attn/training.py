"""Single training steps of any torch module for the parity judge: loss and gradients, then the optimizer's update.

The twin is `jax_attn.training`. A copy of the module is trained; weights and optimizer state come and go as NumPy
arrays, so that a step can start from the numbers of the other side.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_bridge.parity.stepping import Hyperparameters, Masks, State, Step
from attn_bridge.parity.subjects import Arguments, Arrays, ModuleFailedError

from . import random
from .backend import from_numpy, to_numpy
from .harness import _device, _failure, _named_weights, _outputs, _precision, _zeros
from .implementations import sdpa

SLOTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
"""Optimizer state -> the name that both sides have for it: optax's."""


def optimizer(name: str, values: Hyperparameters, decayed: Sequence[str]) -> Any:
    """Return what makes a named optimizer; those of both sides compute the same.

    Args:
        name: ``sgd``, ``momentum`` or ``adamw``.
        values: learning rate and the rest.
        decayed: names of the parameters that `adamw` decays.
    """

    def _make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(named, lr=values.lr)
        if name == "momentum":
            return torch.optim.SGD(named, lr=values.lr, momentum=values.momentum)
        groups = [
            {
                "params": [pair for pair in named if (pair[0] in decayed) is wanted],
                "weight_decay": values.weight_decay if wanted else 0.0,
            }
            for wanted in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=values.lr, betas=values.betas, eps=values.eps)

    return _make


class Trainer:
    """Runs training steps of one module.

    Args:
        module: the module; a copy of it is trained.
        loss: ``mse``, ``cross_entropy`` or a function of what the module returned and the targets.
        optimizer: a function that makes a `torch.optim.Optimizer` from the named parameters.
        dtype: ``float64`` lifts everything; None is the module's own.
        dropout: False switches dropout off, a number sets the rate of every dropout layer.
    """

    framework = "torch"

    def __init__(
        self,
        module: nn.Module,
        loss: str | Callable[..., Any],
        optimizer: Any,
        *,
        dtype: str | None = None,
        dropout: bool | float = True,
    ):
        self.precision = dtype
        self._module = copy.deepcopy(module).train()
        self._device = _device(module, None)
        self._dropout = dropout is not False
        if dtype is not None:
            self._module.to(getattr(torch, dtype))
        if dropout is not True:
            _set_rates(self._module, float(dropout))
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self._named = [(name, one) for name, one in self._module.named_parameters() if one.requires_grad]
        self._others = {name: one for name, one, role in _named_weights(self._module) if role == "statistic"}
        self._optimizer = optimizer(self._named)

    @property
    def trainable(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for name, _ in self._named}

    def first_state(self) -> State:
        """Return the state of the optimizer before its first step."""
        return State({}, 0)

    def gradients(
        self, weights: Mapping[str, np.ndarray[Any, Any]], arguments: Arguments, targets: Any, masks: Masks
    ) -> Step:
        """Return loss and gradients of one batch, in train mode.

        Args:
            weights: all weights by name.
            arguments: the call.
            targets: what the loss compares with.
            masks: source of the dropout masks.

        Raises:
            ModuleFailedError: the module or the loss raised.
            CannotLiftError: it can't be run in float64.
        """
        self._write(weights)
        sources = [parameter for _, parameter in self._named]
        state = torch.get_rng_state()
        try:
            with _precision(self.precision), _drawing(masks if self._dropout else None), torch.enable_grad():
                call = arguments.with_leaves([self._tensor(leaf) for leaf in arguments.leaves])
                loss = self._loss(self._module(*call.args, **call.kwargs), self._tensor(targets))
            edge = torch.autograd.graph.get_gradient_edge  # given tensors, torch would leave the mode that lifts
            with _precision(self.precision):
                found = torch.autograd.grad([edge(loss)], [edge(one) for one in sources], allow_unused=True)
        except ModuleFailedError:
            raise
        except Exception as error:
            raise _failure(error, self.precision, f"torch module {type(self._module).__name__}") from error
        masks.foreign = masks.foreign or not torch.equal(state, torch.get_rng_state())
        gradients = {
            name: _zeros(None if gradient is None else to_numpy(gradient), source)
            for (name, source), gradient in zip(self._named, found, strict=True)
        }
        statistics = {name: to_numpy(one).copy() for name, one in self._others.items()}
        return Step(to_numpy(loss), gradients, statistics)

    def update(
        self, weights: Mapping[str, np.ndarray[Any, Any]], gradients: Mapping[str, np.ndarray[Any, Any]], state: State
    ) -> tuple[Arrays, State]:
        """Return the weights after one step of the optimizer, and its state then."""
        self._write(weights)
        self._optimizer.state.clear()
        for name, parameter in self._named:
            parameter.grad = from_numpy(gradients[name]).to(parameter)
            if state.own and name in state.own:
                self._optimizer.state[parameter] = {
                    key: _copied(one, parameter if key in SLOTS else one) for key, one in state.own[name].items()
                }
        self._optimizer.step()
        own = {name: dict(self._optimizer.state[parameter]) for name, parameter in self._named}
        slots: dict[str, Arrays] = {}
        for name, held in own.items():
            for key, one in held.items():
                if key in SLOTS and isinstance(one, Tensor):
                    slots.setdefault(SLOTS[key], {})[name] = to_numpy(one).copy()
        after = {name: to_numpy(parameter).copy() for name, parameter in self._named}
        return {**weights, **after}, State(slots, state.count + 1, own)

    def _write(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
        with torch.no_grad():
            for name, tensor, _ in _named_weights(self._module):
                tensor.copy_(from_numpy(weights[name]))

    def _tensor(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        tensor = from_numpy(array).to(self._device)
        return tensor.to(getattr(torch, self.precision)) if self.precision and tensor.is_floating_point() else tensor


def _copied(value: Any, like: Any) -> Any:
    return value.detach().clone().to(like.dtype) if isinstance(value, Tensor) else value


def _set_rates(module: nn.Module, rate: float) -> None:
    """Give every dropout layer of a module one rate."""
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p = rate
        elif isinstance(child, nn.MultiheadAttention):
            child.dropout = rate


@contextlib.contextmanager
def _drawing(masks: Masks | None) -> Iterator[None]:
    """Have everything that drops draw its masks from `masks`; None drops nothing."""
    functional, attend = nn.functional, nn.functional.scaled_dot_product_attention

    def keep(shape: Any, rate: float, device: Any) -> Tensor:
        return torch.from_numpy(np.array(masks.draw(tuple(shape), 1.0 - rate))).to(device)  # type: ignore[union-attr]

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0 or masks is None:
            return input
        if p == 1.0:
            return input * 0.0
        dropped = torch.where(keep(input.shape, p, input.device), input * (1.0 / (1.0 - p)), 0.0)
        return input.copy_(dropped) if inplace else dropped

    def bernoulli(
        key: Any, p: float | Tensor = 0.5, shape: Any = None, *, x64: bool = False, device: Any = None
    ) -> Tensor:
        if masks is None:
            raise ModuleFailedError("dropout=False, but the torch module draws a dropout mask by itself")
        return keep(shape, 1.0 - float(p), device)

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0 or masks is None:
            return attend(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
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
        return dropout(weights, dropout_p) @ value

    patches: list[tuple[Any, str, Any]] = [
        (functional, "dropout", dropout),
        (functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        (sdpa, "scaled_dot_product_attention", scaled_dot_product_attention),
        (random, "bernoulli", bernoulli),
    ]
    before = [(home, name, getattr(home, name)) for home, name, _ in patches]
    try:
        for home, name, replacement in patches:
            setattr(home, name, replacement)
        yield
    finally:
        for home, name, original in before:
            setattr(home, name, original)


def _first(result: Any) -> Tensor:
    return _outputs(result, "trained")[1][0]


def _mse(result: Any, targets: Tensor) -> Tensor:
    return torch.square(_first(result) - targets).mean()


def _cross_entropy(result: Any, targets: Tensor) -> Tensor:
    logits = _first(result)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long())


_LOSSES = {"mse": _mse, "cross_entropy": _cross_entropy}
