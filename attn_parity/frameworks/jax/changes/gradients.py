"""Gradients that code stops, or lets through: the change of one operand with which the backward pass is the one wanted.

The forward program is run again with the gradient of one operand stopped, or with one `stop_gradient` left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ....hints.changes import MOST_FITTING, PER_OPERATION, TRACED, Budget, stopped
from ....sides.subject import Array, GradientSample, Run
from ..probes.numpy_interpreter import Interpreter, bind, evaluate
from .program import Atom, Jaxpr, Program

Item = TypeVar("Item")

Leaf = str | int
"""A weight's name, or the position of an input."""

Stops = Callable[[int, int, Atom], bool]
"""From the position of an operation, and the index of an operand and the operand, to whether no gradient passes."""


@dataclasses.dataclass(frozen=True)
class _Stop:
    """A change: its operations, the operands whose gradients it stops, or the `stop_gradient` that it leaves out."""

    text: str
    at: Sequence[int]
    stops: Stops = lambda at, index, atom: False
    passes: Collection[int] = ()


def _together(sites: Iterable[Sequence[Item]]) -> Iterator[Sequence[Item]]:
    """Yield the items of a line that runs several times, then each alone."""
    groups = list(sites)
    yield from (group for group in groups if len(group) > 1)
    yield from ([item] for group in groups for item in group)


class StoppedPrograms:
    """Runs a float64 program forward and backward, with changes of the operands that gradients pass.

    Args:
        closed: the forward program.
        leaves: its arguments, in order.
        trained: those that have gradients.
        run_of: makes a run from the outputs and the gradients by leaf.
        trace: traces a function of these arguments in float64, to its program and the structure of its results.
    """

    def __init__(
        self,
        closed: Jaxpr,
        leaves: Sequence[Leaf],
        trained: Collection[Leaf],
        run_of: Callable[[Sequence[Array], Mapping[Leaf, Array]], Run],
        trace: Callable[[Callable[..., object], object], tuple[Jaxpr, jax.tree_util.PyTreeDef]],
    ):
        self._program, self._leaves, self._run_of, self._trace = Program(closed, Interpreter()), leaves, run_of, trace
        self._trained = [position for position, leaf in enumerate(leaves) if leaf in trained]

    def found(
        self, samples: Sequence[GradientSample], operands: Sequence[Sequence[ArrayLike]], differing: Collection[Leaf]
    ) -> list[tuple[str, str]]:
        """Return the changes with which every sample agrees; `differing` leaves have other gradients."""
        budget, hits = Budget(), dict[str, tuple[str, str]]()
        for change in self._changes(frozenset(differing)):
            line = self._program.operations[change.at[0]].where if change.at else ""
            if line in hits or not budget.spend(TRACED * PER_OPERATION * len(self._program.operations)):
                continue
            made = ((sample, self._run(change, sample, own)) for sample, own in zip(samples, operands, strict=True))
            with contextlib.suppress(Exception):  # a change may make any operation fail
                if all(sample.agrees(run) for sample, run in made):
                    hits[line] = change.text + self._program.in_run(change.at), self._program.where(change.at)
            if len(hits) == MOST_FITTING:
                break
        return list(hits.values())

    def _changes(self, differing: frozenset[Leaf]) -> Iterator[_Stop]:
        """Yield the changes that may reach every leaf that differs, the likeliest first."""
        sources = dict[Atom, frozenset[Leaf]]()
        for position in self._trained:
            sources[self._program.inputs[position]] = frozenset([self._leaves[position]])
        edges = []
        passes = dict[object, list[tuple[int, frozenset[Leaf]]]]()
        for at, operation in enumerate(self._program.operations):
            reached = frozenset[Leaf]().union(
                *(sources.get(item, frozenset()) for item in operation.operands if isinstance(item, int))
            )
            if operation.name == "stop_gradient":
                passes.setdefault(operation.code, []).append((at, reached))
                continue
            for item, variable in zip(operation.results, operation.equation.outvars, strict=True):
                if jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                    sources[item] = reached
            edges += [(at, index, item) for index, item in enumerate(operation.operands) if isinstance(item, int)]
        for several in _together(passes.values()):
            if differing <= frozenset[Leaf]().union(*(reached for _, reached in several)):
                places = [at for at, _ in several]
                yield _Stop("a gradient not stopped", places, passes=places)
        edges = [edge for edge in edges if sources.get(edge[2])]
        edges.sort(key=lambda edge: len(sources[edge[2]]))  # what feeds nothing else explains the difference best
        sites = dict[object, list[tuple[int, int, Atom]]]()
        for at, index, item in edges:
            operation = self._program.operations[at]
            sites.setdefault((operation.code, operation.name, index), []).append((at, index, item))
        for some in _together(sites.values()):
            if not differing <= frozenset[Leaf]().union(*(sources[item] for _, _, item in some)):
                continue
            group = frozenset((at, index) for at, index, _ in some)
            at, index = min(group)
            operation = self._program.operations[at]

            def stops(at: int, index: int, atom: Atom, group: Collection[tuple[int, int]] = group) -> bool:
                return (at, index) in group

            yield _Stop(stopped(operation.name, index, len(operation.operands)), [at for at, _, _ in some], stops)
        for value in dict.fromkeys(item for _, _, item in edges):
            if len(self._program.takes[value]) > 1 and differing <= sources[value]:
                maker = self._program.makes.get(value)
                name = (
                    "an argument" if maker is None else f"the result of {self._program.operations[maker].called_name}"
                )

                def ends(at: int, index: int, atom: Atom, value: Atom = value) -> bool:
                    return bool(atom == value)

                yield _Stop(f"the gradient of {name} stopped", [] if maker is None else [maker], ends)

    def _run(self, change: _Stop, sample: GradientSample, operands: Sequence[ArrayLike]) -> Run:
        cotangents = sample.cotangents

        def differentiated(*args: ArrayLike) -> tuple[list[ArrayLike], list[ArrayLike]]:
            chosen = [args[position] for position in self._trained]
            floats: list[int] = []

            def forward(chosen: Sequence[ArrayLike]) -> tuple[list[ArrayLike], list[ArrayLike]]:
                operands = list(args)
                for position, value in zip(self._trained, chosen, strict=True):
                    operands[position] = value
                outputs = self._forward(change, operands)
                floats[:] = [at for at, one in enumerate(outputs) if jnp.issubdtype(jnp.result_type(one), jnp.inexact)]
                return [outputs[at] for at in floats], outputs

            outputs, pull, whole = jax.vjp(forward, chosen, has_aux=True)
            wanted = [
                jnp.zeros_like(one) if cotangents[at] is None else jnp.asarray(cotangents[at], one.dtype)
                for at, one in zip(floats, outputs, strict=True)
            ]
            return whole, pull(wanted)[0]

        closed, tree = self._trace(differentiated, operands)
        made = jax.tree.unflatten(tree, evaluate(closed, *operands))
        leaves = [self._leaves[position] for position in self._trained]
        return self._run_of(made[0], dict(zip(leaves, made[1], strict=True)))

    def _forward(self, change: _Stop, args: Sequence[ArrayLike]) -> list[ArrayLike]:
        values: dict[int, ArrayLike] = {**self._program.constants}
        values.update(zip(self._program.inputs, args, strict=True))

        def read(atom: Atom) -> ArrayLike:
            return values[atom] if isinstance(atom, int) else atom.val

        for at, operation in enumerate(self._program.operations):
            operands = [
                jax.lax.stop_gradient(read(item)) if change.stops(at, index, item) else read(item)
                for index, item in enumerate(operation.operands)
            ]
            results = operands[:1] if at in change.passes else bind(operation.equation, operands)
            values.update(zip(operation.results, results, strict=True))
        return [read(item) for item in self._program.outputs]
