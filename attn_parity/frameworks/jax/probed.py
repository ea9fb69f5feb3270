"""Further runs of a JAX side: with its calls recorded, or some of them replaced, and with changes of its code."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jax_attn.backend import to_numpy

from ...sides.dropout_masks import Masks
from ...sides.subject import WHOLE, Arguments, Array, Call, GradientSample, OutputSample, Returned, Run, Substitute
from .changes.gradients import StoppedPrograms
from .changes.search import ChangedPrograms
from .probes.numpy_interpreter import evaluate
from .probes.uses import first_uses
from .recording import Tape, recording
from .running.execution import UNTRACEABLE, Differentiated, cast, kept_wide, precise, read, trace, weight_in
from .sides.adapter import JaxPart, is_jax_float

TAPES = itertools.count(1)
"""Numbers of the recordings, so that JAX takes no trace of another for the same."""


class ProbedSide(abc.ABC):
    """Runs a side with its calls recorded or replaced, or with changes; `JaxSubject` is the side."""

    train: bool
    returned: Returned

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Class of the module, or name of the function."""

    @abc.abstractmethod
    def part(self, path: str) -> JaxPart:
        """Return a submodule as a function of its weights."""

    @abc.abstractmethod
    def reported(self, dtype: str | None, arguments: Arguments) -> contextlib.AbstractContextManager[None]:
        """Convert an exception of the side into a one-line error that names the side."""

    @abc.abstractmethod
    def trace_promoted(
        self, function: Callable[..., object], operands: object
    ) -> tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]:
        """Trace a function in float64."""

    def _differentiated(
        self, path: str, arguments: Arguments, dtype: str | None, tape: Tape | None = None
    ) -> tuple[Differentiated, Callable[..., Any]]:
        """Return a plain run of a submodule, and the function that runs it."""
        returned, part = WHOLE if path else self.returned, self.part(path)
        probe = Differentiated(self.name, self.train, part, arguments, dtype, 0, "eager", tape, returned)
        return probe, probe.function(Masks(0) if self.train else None)

    def uses(self, weights: Mapping[str, np.ndarray], arguments: Arguments) -> dict[str, int]:
        """Return weight -> number of the first operation that combines it with values that depend on inputs."""
        names = [name for name in self.part("").names if name in weights]
        _, function = self._differentiated("", arguments, None)

        def forward(weights: list[ArrayLike], leaves: list[ArrayLike]) -> list[jax.Array]:
            outputs: list[jax.Array] = function(dict(zip(names, weights, strict=True)), leaves, None, [])[0]
            return outputs

        leaves = arguments.leaves
        with self.reported(None, arguments):
            closed, _ = trace(forward, ([weights[name] for name in names], leaves))
        uses = first_uses(closed, [True] * len(names) + [False] * len(leaves))
        return {names[position]: at for position, at in uses.items()}

    def substituted(
        self,
        weights: Mapping[str, np.ndarray],
        arguments: Arguments,
        cotangents: Sequence[np.ndarray | None] | None,
        substitutes: Mapping[str, Sequence[Substitute]],
        *,
        path: str = "",
        dtype: str | None = "float64",
    ) -> tuple[Run, list[Call]]:
        """Run with the results of some submodules' calls replaced, and return every call; see `Subject.substituted`."""
        tape = Tape(substitutes)
        part = self.part(path)
        operands = (
            {name: weight_in(weights[name], dtype) for name in part.names if name in weights},
            [cast(leaf, dtype) for leaf in arguments.leaves],
            None if cotangents is None else [None if one is None else cast(one, dtype) for one in cotangents],
            None,
        )
        probe, function = self._differentiated(path, arguments, dtype, tape)
        with (
            self.reported(None, arguments),
            precise(dtype),
            kept_wide(operands[0], operands[1]),
            jax.disable_jit(),
            recording(next(TAPES)),
        ):
            results = _noted(function, operands, tape, in_float64=dtype == "float64")
        outputs, of_weights, of_inputs = results
        return Run(
            [to_numpy(one) for one in outputs],
            list(probe.structure),
            [to_numpy(of_inputs[str(i)]) if str(i) in of_inputs else None for i in range(len(arguments.leaves))],
            {name: to_numpy(one) for name, one in of_weights.items()},
        ), [call for call in tape.calls() if call.path != path]

    def changes(
        self, samples: Sequence[OutputSample], *, path: str = "", numbers: bool = False, has_literals: bool = True
    ) -> list[tuple[str, str]]:
        """Return the changes of one operation that give the outputs wanted; see `Subject.changes`."""
        part, arguments = self.part(path), samples[0].arguments
        operands, *others = [_in_float64(part.names, sample) for sample in samples]
        _, function = self._differentiated(path, arguments, "float64")
        with self.reported("float64", arguments), kept_wide(operands[0], operands[1]):
            try:
                closed, _ = self.trace_promoted(function, operands)
            except UNTRACEABLE:  # it looks at values
                return []
            runs = [ChangedPrograms(closed, jax.tree.leaves(one)) for one in (operands, *others)]
        wanted = [one.wanted for one in samples]
        return runs[0].found(wanted, runs[1:], numbers=numbers, has_literals=has_literals)

    def gradient_changes(
        self, samples: Sequence[GradientSample], differing: Collection[str | int], *, path: str = ""
    ) -> list[tuple[str, str]]:
        """Return the changes of what gradients pass with which every sample agrees; see `Subject.gradient_changes`."""
        part, arguments = self.part(path), samples[0].arguments
        operands = [_in_float64(part.names, sample) for sample in samples]
        floats = [position for position, leaf in enumerate(arguments.leaves) if is_jax_float(leaf)]
        probe, function = self._differentiated(path, arguments, "float64")

        def run_of(outputs: Sequence[Array], gradients: Mapping[str | int, Array]) -> Run:
            inputs = [gradients.get(position) for position in range(len(arguments.leaves))]
            own = {name: array for name, array in gradients.items() if isinstance(name, str)}
            return Run(list(outputs), list(probe.structure), inputs, own)

        with self.reported("float64", arguments), kept_wide(operands[0][0], operands[0][1]):
            try:
                closed, _ = self.trace_promoted(function, operands[0])
            except UNTRACEABLE:  # it looks at values
                return []
            leaves = [*operands[0][0], *range(len(arguments.leaves))]
            programs = StoppedPrograms(closed, leaves, {*part.trainable, *floats}, run_of, self.trace_promoted)
            return programs.found(samples, [jax.tree.leaves(one) for one in operands], differing)


def _in_float64(
    names: Collection[str], sample: OutputSample | GradientSample
) -> tuple[dict[str, Array], list[Array], None, None]:
    """Return the operands of a differentiated function for one call, without cotangents and masks."""
    weights = {name: cast(sample.weights[name], "float64") for name in sorted(names) if name in sample.weights}
    return weights, [cast(leaf, "float64") for leaf in sample.arguments.leaves], None, None


def _noted(function: Callable[..., object], operands: object, tape: Tape, *, in_float64: bool) -> Any:
    """Return the results of a function whose calls a tape records.

    In float64 the traced program runs in NumPy; a program that reads values cannot be traced and runs in JAX.
    """
    if in_float64:
        try:
            closed, tree = trace(function, operands)
            return jax.tree.unflatten(tree, evaluate(closed, *jax.tree.leaves(operands)))
        except UNTRACEABLE:  # it looks at values
            tape.clear()
    return function(*jax.tree.map(jnp.asarray, read(operands)))
