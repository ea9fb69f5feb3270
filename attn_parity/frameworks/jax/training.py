"""Single training steps of any NNX module for the parity judge: loss and gradients, then the optimizer's update.

The module is split, and every step merges a new one; weights and optimizer state
come and go as NumPy arrays, so that a step can start from the numbers of the other side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jax_attn.backend import to_numpy

from ...sides.dropout_masks import Draw, MaskPlan, Masks
from ...sides.subject import Arguments, Arrays, ModuleFailedError, failure_of
from ...training.stepping import Hyperparameters, State, Step
from .drawing import _draws_more, _prepare, drawing
from .running.execution import cast, outputs_of, trace
from .running.promotion import promoted
from .sides.adapter import dotted, is_jax_float
from .sides.nnx_module import NNXPart
from .subject import _layout, _static

Program: TypeAlias = Callable[[tuple[object, ...]], tuple[np.ndarray, Arrays, Arrays]]
"""Weights, leaves, targets and masks of a step -> its loss, gradients and changed statistics."""

SLOTS = {"mu": "mu", "nu": "nu", "trace": "trace"}
"""Optimizer state -> the name that both sides have for it: optax's."""


def optimizer(name: str, values: Hyperparameters, decayed: Sequence[str]) -> optax.GradientTransformation:
    """Return a function that makes a named optimizer; those of both sides compute the same.

    Args:
        name: ``sgd``, ``momentum`` or ``adamw``.
        values: learning rate and the rest.
        decayed: names of the parameters that `adamw` decays.
    """
    if name == "sgd":
        return optax.sgd(values.lr)
    if name == "momentum":
        return optax.sgd(values.lr, momentum=values.momentum)

    def _is_decayed(parameters: Mapping[str, object]) -> dict[str, bool]:
        return {one: one in decayed for one in parameters}

    (b1, b2), decay = values.betas, values.weight_decay
    return optax.adamw(values.lr, b1=b1, b2=b2, eps=values.eps, eps_root=0.0, weight_decay=decay, mask=_is_decayed)


class Trainer:
    """Runs training steps of one module.

    Args:
        module: the module; it is left as it is.
        loss: ``mse``, ``cross_entropy`` or a function of the module's output and the targets.
        optimizer: an optax transformation of a dict of arrays by dotted name.
        dtype: ``float64`` promotes everything; None keeps the module's own.
        dropout: False switches dropout off, a number sets the rate of every dropout layer.
        carried: names of the state that counts among the weights.
    """

    framework = "flax"

    def __init__(
        self,
        module: nnx.Module,
        loss: str | Callable[..., Array],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str | None = None,
        dropout: bool | float = True,
        carried: Collection[str] = (),
    ):
        self.precision = dtype
        self._name = type(module).__name__
        self._part = NNXPart(module, "", carried=carried)
        self._carried = frozenset(carried)
        self._dropout = dropout
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self._optimizer = optimizer
        self._programs: dict[Hashable, tuple[Program, list[Draw], bool]] = {}
        self._update: Callable[..., tuple[dict[str, Array], optax.OptState]] | None = None
        self._own: optax.OptState | None = None

    @property
    def trainable(self) -> set[str]:
        """Names of the parameters that are trained."""
        return self._part.trainable

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
        leaves = [cast(leaf, self.precision) for leaf in arguments.leaves]
        targets = cast(targets, self.precision) if isinstance(targets, np.ndarray) else targets
        mine = {name: cast(weights[name], self.precision) for name in weights if name in self.trainable}
        rest = {name: cast(weights[name], self.precision) for name in weights if name not in self.trainable}
        key = (_layout((mine, rest)), _layout(leaves), _layout(targets), _static(arguments))
        try:
            if key not in self._programs:
                self._programs[key] = self._program(arguments, (mine, rest, leaves, targets))
            program, draws, foreign = self._programs[key]
            drawn = [masks.draw(one.shape, one.keep, one.path, one.setting) for one in draws]
            loss, gradients, statistics = program((mine, rest, leaves, targets, drawn))
        except ModuleFailedError:
            raise
        except Exception as error:  # whatever a step raises is told as its own
            raise failure_of(error, self.precision, f"Flax module {self._name}") from error
        return Step(to_numpy(loss), _arrays(gradients), _arrays(statistics), foreign)

    def update(
        self, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], state: State
    ) -> tuple[Arrays, State]:
        """Return the weights after one step of the optimizer, and its state then."""
        mine = {name: weights[name] for name in gradients}
        with self._precise():
            if self._own is None:
                self._own = self._optimizer.init({name: jnp.asarray(one) for name, one in mine.items()})
            own = _filled(self._own if state.own is None else state.own, state, set(mine))
            if self._update is None:
                self._update = jax.jit(self._step)
            after, own = self._update(mine, dict(gradients), own)
            own = jax.tree.map(np.asarray, own)
            moments: dict[str, Arrays] = {}
            _collect(own, moments)
        return {**weights, **_arrays(after)}, State(moments, state.count + 1, own)

    def _step(
        self, weights: dict[str, Array], gradients: dict[str, Array], own: optax.OptState
    ) -> tuple[dict[str, Array], optax.OptState]:
        updates, own = self._optimizer.update(gradients, own, weights)
        return optax.apply_updates(weights, updates), own

    def _changed(self, module: nnx.Module) -> dict[str, Array]:
        """Return the running statistics and the carried state of a module after a call."""
        flat = {dotted(path): one for path, one in nnx.to_flat_state(nnx.state(module))}
        return {
            name: one.get_value()
            for name, one in flat.items()
            if isinstance(one, nnx.BatchStat) or name in self._carried
        }

    def _precise(self) -> contextlib.AbstractContextManager[None]:
        return jax.enable_x64(True) if self.precision == "float64" else contextlib.nullcontext()

    def _program(self, arguments: Arguments, operands: tuple[object, ...]) -> tuple[Program, list[Draw], bool]:
        """Return a compiled function for one layout of a batch, the masks that it asks for, and if it draws more."""
        plan = MaskPlan()

        def differentiate(
            mine: dict[str, Array],
            rest: dict[str, Array],
            leaves: list[Array],
            targets: object,
            masks: Sequence[Array] | None,
        ) -> tuple[Array, dict[str, Array], dict[str, Array]]:
            plan.start(masks)

            def objective(mine: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
                module = self._part.merged({**rest, **mine}, self.precision, 0)
                if self._dropout is not True:
                    _set_rates(module, float(self._dropout))
                _prepare(module)
                call = arguments.with_leaves(leaves)
                with drawing(plan if self._dropout is not False else None, module):
                    result = module(*call.args, **call.kwargs)
                return self._loss(result, targets), self._changed(module)

            (loss, statistics), gradients = jax.value_and_grad(objective, has_aux=True)(mine)
            return loss, gradients, statistics

        # What is compiled within the module was perhaps traced before, with masks of its own.
        with promoted() if self.precision == "float64" else contextlib.nullcontext(), jax.disable_jit():
            jax.eval_shape(differentiate, *operands, None)
            draws = plan.draws
            masks = [np.ones(one.shape, np.bool_) for one in draws]
            closed, tree = trace(differentiate, (*operands, masks))
        compiled = jax.jit(jax.extend.core.jaxpr_as_fun(closed))

        def run(operands: tuple[object, ...]) -> tuple[np.ndarray, Arrays, Arrays]:
            with self._precise():
                results = compiled(*[jnp.asarray(one) for one in jax.tree.leaves(operands)])
                return jax.tree.unflatten(tree, [np.asarray(one) for one in results])

        return run, draws, _draws_more(closed)


def _arrays(arrays: Mapping[str, object]) -> Arrays:
    return {name: np.array(to_numpy(one), copy=True) for name, one in arrays.items()}


def _is_record(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _filled(node: optax.OptState, state: State, names: set[str]) -> optax.OptState:
    """Return an optimizer state with other moments and another count of steps."""
    if _is_record(node):
        changed: dict[str, object] = {}
        for field in node._fields:
            value = getattr(node, field)
            if field == "count":
                changed[field] = np.full(np.shape(value), state.count, np.asarray(value).dtype)
            elif field in SLOTS and isinstance(value, Mapping):
                moments = state.slots.get(SLOTS[field], {})
                changed[field] = {name: moments.get(name, one) if name in names else one for name, one in value.items()}
            else:
                changed[field] = _filled(value, state, names)
        return type(node)(**changed)
    if isinstance(node, (tuple, list)):
        return type(node)([_filled(one, state, names) for one in node])
    if isinstance(node, Mapping):
        return {key: _filled(one, state, names) for key, one in node.items()}
    return node


def _collect(node: optax.OptState, moments: dict[str, Arrays]) -> None:
    """Gather the moments in an optimizer state."""
    if _is_record(node):
        for field in node._fields:
            value = getattr(node, field)
            if field in SLOTS and isinstance(value, Mapping):
                arrays = {name: np.asarray(one) for name, one in value.items() if hasattr(one, "dtype")}
                moments.setdefault(SLOTS[field], {}).update(arrays)
            else:
                _collect(value, moments)
    elif isinstance(node, (tuple, list)):
        for child in node:
            _collect(child, moments)
    elif isinstance(node, Mapping):
        for child in node.values():
            _collect(child, moments)


def _set_rates(module: nnx.Module, rate: float) -> None:
    """Give every dropout layer of a module one rate."""
    for _, child in nnx.iter_modules(module):
        if isinstance(child, nnx.Dropout):
            child.rate = rate
        elif isinstance(child, nnx.MultiHeadAttention):
            child.dropout_rate = rate


def _first(result: object) -> Array:
    return next(one for one in outputs_of(result, "trained")[1] if is_jax_float(one))


def _mse(result: object, targets: Array) -> Array:
    return jnp.square(_first(result) - targets).mean()


def _cross_entropy(result: object, targets: Array) -> Array:
    logs = jax.nn.log_softmax(_first(result), -1)
    return -jnp.take_along_axis(logs, jnp.asarray(targets)[..., None], -1).mean()


_LOSSES = {"mse": _mse, "cross_entropy": _cross_entropy}
