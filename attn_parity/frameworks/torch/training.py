"""Single training steps of any torch module for the parity judge: loss and gradients, then the optimizer's update.

A copy of the module is trained; weights and optimizer state come and go as NumPy
arrays, so that a step can start from the numbers of the other side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_attn.backend import from_numpy, to_numpy

from ...sides.dropout_masks import Masks
from ...sides.subject import Arguments, Arrays, ModuleFailedError
from ...training.stepping import Hyperparameters, State, Step
from .drawing import drawing, random_state
from .running.execution import NeedsBackwardError, differentiable, failure, gradients_of, precision_of
from .running.state import ONE_AT_A_TIME
from .weights import device_of, named_weights, outputs_of

SLOTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
"""Optimizer state -> the name that both sides have for it: optax's."""


def optimizer(name: str, values: Hyperparameters, decayed: Sequence[str]) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes a named optimizer; those of both sides compute the same.

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
        loss: ``mse``, ``cross_entropy`` or a function of the module's output and the targets.
        optimizer: a function that makes a `torch.optim.Optimizer` from the named parameters.
        dtype: ``float64`` promotes everything; None keeps the module's own.
        dropout: False switches dropout off, a number sets the rate of every dropout layer.
        carried: names of the buffers that count among the weights.
    """

    framework = "torch"

    def __init__(
        self,
        module: nn.Module,
        loss: str | Callable[..., Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        dtype: str | None = None,
        dropout: bool | float = True,
        carried: Collection[str] = (),
    ):
        self.precision = dtype
        with torch.inference_mode(False):
            self._module = copy.deepcopy(module).train()
            if dtype is not None:
                self._module.to(getattr(torch, dtype))
        self._device = device_of(module, None)
        self._dropout = dropout is not False
        if dropout is not True:
            _set_rates(self._module, float(dropout))
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self._named = [(name, one) for name, one in self._module.named_parameters() if one.requires_grad]
        self._weights = [(name, one) for name, one, _ in named_weights(self._module)]
        self._weights += [(name, one) for name, one in self._module.named_buffers() if name in carried]
        self._others = {name: one for name, one in self._weights if not isinstance(one, nn.Parameter)}
        self._optimizer = optimizer(self._named)
        self._accumulates = False

    @property
    def trainable(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for name, _ in self._named}

    def first_state(self) -> State:
        """Return the state of the optimizer before its first step."""
        return State({}, 0)

    def gradients(self, weights: Mapping[str, np.ndarray], arguments: Arguments, targets: object, masks: Masks) -> Step:
        """Return loss and gradients of one batch, in train mode.

        Args:
            weights: all weights by name.
            arguments: the call.
            targets: the targets of the loss.
            masks: source of the dropout masks.

        Raises:
            ModuleFailedError: the module or the loss raised.
            CannotPromoteError: it cannot run in float64.
        """
        with ONE_AT_A_TIME, differentiable():
            try:
                return self._differentiated(weights, arguments, targets, masks, self._accumulates)
            except NeedsBackwardError:
                masks.restart()
                loss_and_gradients = self._differentiated(weights, arguments, targets, masks, accumulate=True)
            self._accumulates = True
        return loss_and_gradients

    def _differentiated(
        self,
        weights: Mapping[str, np.ndarray],
        arguments: Arguments,
        targets: object,
        masks: Masks,
        accumulate: bool,
    ) -> Step:
        """Return loss and gradients; `accumulate` adds gradients to the parameters, as ``loss.backward()`` does."""
        self._write(weights)
        sources = [parameter for _, parameter in self._named]
        for source in sources:
            source.grad = None
        before = random_state()
        dropped = masks if self._dropout else None
        try:
            with precision_of(self.precision), drawing(dropped, self._module):
                call = arguments.with_leaves([self._tensor(leaf) for leaf in arguments.leaves])
                loss = self._loss(self._module(*call.args, **call.kwargs), self._tensor(targets))
                if not loss.requires_grad or loss.numel() != 1:
                    raise ValueError("the loss must be one number that depends on the weights")
                results = gradients_of(
                    [loss], [torch.ones_like(loss)], sources, accumulate, lambda _, tensor: to_numpy(tensor)
                )
        except (ModuleFailedError, NeedsBackwardError):
            raise
        except Exception as error:  # whatever a step raises is told as its own
            raise failure(error, self.precision, f"torch module {type(self._module).__name__}") from error
        foreign = not all(map(torch.equal, before, random_state()))
        gradients = {name: one for (name, _), one in zip(self._named, results, strict=True) if one is not None}
        statistics = {name: to_numpy(one).copy() for name, one in self._others.items()}
        return Step(to_numpy(loss), gradients, statistics, foreign)

    def update(
        self, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], state: State
    ) -> tuple[Arrays, State]:
        """Return the weights after one step of the optimizer, and its state then."""
        with ONE_AT_A_TIME, torch.inference_mode(False):
            return self._updated(weights, gradients, state)

    def _updated(
        self, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], state: State
    ) -> tuple[Arrays, State]:
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
        for name, moments in own.items():
            for key, moment in moments.items():
                if key in SLOTS and isinstance(moment, Tensor):
                    slots.setdefault(SLOTS[key], {})[name] = to_numpy(moment).copy()
        after = {name: to_numpy(parameter).copy() for name, parameter in self._named}
        return {**weights, **after}, State(slots, state.count + 1, own)

    def _write(self, weights: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, tensor in self._weights:
                tensor.copy_(from_numpy(weights[name]))

    def _tensor(self, array: object) -> Tensor:
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


def _first(result: object) -> Tensor:
    return outputs_of(result, "torch module that is trained")[1][0]


def _mse(result: object, targets: Tensor) -> Tensor:
    return torch.square(_first(result) - targets).mean()


def _cross_entropy(result: object, targets: Tensor) -> Tensor:
    logits = _first(result)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long())


_LOSSES = {"mse": _mse, "cross_entropy": _cross_entropy}
