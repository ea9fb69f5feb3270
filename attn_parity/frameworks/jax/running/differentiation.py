"""One forward and backward pass of a side as a function, to be traced, compiled or run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ....sides.dropout_masks import Masks, Plan
from ....sides.entries import picked
from ....sides.subject import Arguments, ModuleFailedError, flatten
from ..probes.logsumexp import with_logsumexp
from ..recording import Tape, is_jax_array
from ..sides.adapter import Part, Setting, is_jax_float


class Differentiated:
    """One forward and backward pass as a function of weights, inputs, cotangents and masks.

    Attributes:
        structure: where each output stands in what was returned, known once it was traced.
        replaced: the softmaxes that were replaced.
    """

    def __init__(
        self,
        name: str,
        train: bool,
        part: Part,
        arguments: Arguments,
        dtype: str | None,
        seed: int,
        mode: str,
        tape: Tape | None = None,
        entry: str | None = None,
    ):
        self.structure: list[str] = []
        self.replaced: dict[int, Any] = {}
        self._name, self._part, self._arguments, self._mode = name, part, arguments, mode
        self._entry = entry
        self._setting = Setting(dtype, seed, train, None, tape)

    def function(self, source: Plan | Masks) -> Callable[..., Any]:
        """Return the function; a `Plan` is told the masks that it gets as its last argument."""
        setting = dataclasses.replace(self._setting, source=source)
        kinds: list[bool] = []

        def differentiate(weights: dict[str, Any], leaves: list[Any], cotangents: Any, masks: Any) -> Any:
            if isinstance(source, Plan):
                source.start(masks)
            if setting.tape is not None:
                setting.tape.clear()
            mine, others = _divide(weights, self._part.trainable)
            floats = {str(i): leaf for i, leaf in enumerate(leaves) if is_jax_float(leaf)}

            def forward(mine: dict[str, Any], floats: dict[str, Any]) -> Any:
                call = self._arguments.with_leaves([floats.get(str(i), leaf) for i, leaf in enumerate(leaves)])
                result = self._part.call({**others, **mine}, call, setting)
                self.structure[:], outputs = outputs_of(result, self._name, self._entry)
                kinds[:] = map(is_jax_float, outputs)
                return _split(outputs)

            run = with_logsumexp(forward, self.replaced) if self._mode == "logsumexp" else forward
            if cotangents is None:
                outputs, rest = run(mine, floats)
                return _joined(outputs, rest, kinds), {}, {}
            outputs, pull, rest = jax.vjp(run, mine, floats, has_aux=True)
            return _joined(outputs, rest, kinds), *pull(_cotangents(cotangents, outputs, kinds))

        return differentiate


def outputs_of(result: Any, name: str, entry: str | None = None) -> tuple[list[str], list[Any]]:
    """Return where each array stands in what was returned, and the arrays.

    Args:
        result: what a call returned.
        name: the side's, for messages.
        entry: the entry that counts; None is all of it.

    Raises:
        ModuleFailedError: there is none.
    """
    found = flatten(result, is_jax_array)
    if not found:
        raise ModuleFailedError(f"the Flax module {name} returned {type(result).__name__}, which holds no array")
    found = found if entry is None else picked(found, entry, f"the Flax module {name}")
    return [path for path, _ in found], [jnp.asarray(array) for _, array in found]


def _split(outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs that can be differentiated, and the others."""
    return [one for one in outputs if is_jax_float(one)], [one for one in outputs if not is_jax_float(one)]


def _joined(outputs: list[Any], rest: list[Any], kinds: list[bool]) -> list[Any]:
    first, second = iter(outputs), iter(rest)
    return [next(first) if kind else next(second) for kind in kinds]


def _cotangents(given: Sequence[Any], outputs: list[Any], kinds: list[bool]) -> list[Any]:
    wanted = [one for one, kind in zip(given, kinds, strict=True) if kind]
    return [
        jnp.zeros_like(output) if one is None else jnp.asarray(one, output.dtype)
        for one, output in zip(wanted, outputs, strict=True)
    ]


def _divide(weights: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {name: array for name, array in weights.items() if name in names},
        {name: array for name, array in weights.items() if name not in names},
    )
