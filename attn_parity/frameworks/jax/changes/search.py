"""Change one operation of a program at a time, run on from it, and compare the results with the other side's.

The float64 program is run once in NumPy, with all its values kept. A change replaces the results of one operation, and
what depends on these is computed again. In loops every step has the change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ....hints.changes import (
    MOST_FITTING,
    MOST_TIMES,
    MOST_VALUES,
    PER_OPERATION,
    Budget,
    Hits,
    agree,
    apart,
    are_alike,
    in_run,
    limit_of,
    solutions,
)
from ....sides.arrays import LargeWeight
from ....sides.subject import Array, CannotPromoteError
from ..probes.numpy_interpreter import Interpreter
from .kinds import changes_of
from .program import Atom, Jaxpr, Program, ProgramChange, Read, Results, Value, literals


class ChangedPrograms(Interpreter):
    """Runs a program, keeps its values, and runs it again with changes.

    Args:
        closed: the program, in float64.
        args: its arguments.
    """

    def __init__(self, closed: Jaxpr, args: Sequence[Value]):
        super().__init__()
        self._programs: dict[int, tuple[Jaxpr, Program]] = {}
        self._changes: dict[int, Mapping[int, Results]] = {}
        self._most_runs: int | None
        self.program = self._program(closed)
        self.values: dict[int, Value] = dict(zip(self.program.inputs, args, strict=True))
        self.values |= {number: self.constant(value) for number, value in self.program.constants.items()}
        self.budget = Budget()
        self._runs, self._most_runs = 0, None
        self.is_small = self._keep()
        self._plain_runs = self._runs

    def _program(self, closed: Jaxpr) -> Program:
        key = id(closed.jaxpr)
        if key not in self._programs:
            self._programs[key] = closed, Program(closed, self)
        return self._programs[key][1]

    def _keep(self) -> bool:
        """Run the program and keep its values; return False if they are too many."""
        kept = 0
        with np.errstate(all="ignore"):
            for operation in self.program.operations:
                results = operation.plain(lambda atom: self._value(atom, self.values))
                self.values.update(zip(operation.results, results, strict=True))
                kept += _sizes(results)
                if kept > MOST_VALUES:
                    return False
        return not any(isinstance(item, LargeWeight) for item in self.values.values())

    def _value(self, atom: Atom, values: Mapping[int, Value]) -> Value:
        return values[atom] if isinstance(atom, int) else self.constant(atom.val)

    def _run(self, closed: Jaxpr, args: Sequence[Value], *, spills: bool = False) -> list[Value]:
        """Run the body of a loop, with its changes if it has some."""
        program = self._program(closed)
        changes = self._changes.get(id(program), {})
        values: dict[int, Value] = dict(zip(program.inputs, args, strict=True))
        values |= {number: self.constant(value) for number, value in program.constants.items()}

        def read(atom: Atom) -> Value:
            return self._value(atom, values)

        for at, operation in enumerate(program.operations):
            results = changes[at](read) if at in changes else operation.plain(read)
            values.update(zip(operation.results, results, strict=True))
        self._runs += 1
        if self._most_runs is not None:
            work = PER_OPERATION * len(program.operations) + _sizes(values.values())
            if self._runs > self._most_runs or not self.budget.spend(work):
                raise CannotPromoteError("it does not end with this change")
        return [read(atom) for atom in program.outputs]

    @property
    def outputs(self) -> list[Array]:
        """The results without a change."""
        return [np.asarray(self._value(item, self.values)) for item in self.program.outputs]

    def changed(self, results: Mapping[int, Results]) -> list[Array] | None:
        """Return the results of the program with a change; None if it fails."""
        new: dict[int, Value] = {}

        def read(atom: Atom) -> Value:
            return new[atom] if isinstance(atom, int) and atom in new else self._value(atom, self.values)

        pending = set(results)
        operations = self.program.operations
        self._runs, self._most_runs = 0, MOST_TIMES * self._plain_runs
        try:
            with np.errstate(all="ignore"):
                while pending:
                    at = min(pending)
                    pending.remove(at)
                    operation = operations[at]
                    made = results[at](read) if at in results else operation.plain(read)
                    if not self.budget.spend(PER_OPERATION + _sizes(made)):
                        return None
                    for number, value in zip(operation.results, made, strict=True):
                        old = self.values[number]
                        if np.shape(old) != np.shape(value) or not np.array_equal(old, value):
                            new[number] = value
                            pending.update(self.program.takes.get(number, ()))
        except Exception:  # a change may make any operation fail
            return None
        finally:
            self._most_runs = None
        return [np.asarray(read(item)) for item in self.program.outputs]

    # ---- the search

    def found(
        self,
        wanted: Sequence[Sequence[Array]],
        others: Sequence[ChangedPrograms],
        *,
        numbers: bool = False,
        has_literals: bool = True,
    ) -> list[tuple[str, str]]:
        """Return the changes with which the results are those wanted: what changes, and ``file:line``.

        Args:
            wanted: the results wanted, of this run and of the others.
            others: runs of the same program on other arguments, on which a change has to fit as well.
            numbers: whether numbers in code are solved for, instead of trying other operations.
            has_literals: see `limit_of`.
        """
        runs = [self, *others]
        if not all(run.is_small for run in runs) or not are_alike(self.outputs, wanted[0]):
            return []
        pairs = zip(runs, wanted, strict=True)
        limits = [limit_of(run.outputs, each, has_literals=has_literals) for run, each in pairs]

        def fits(results: Mapping[int, Results]) -> bool:
            made = (run.changed(results) for run in runs)
            return all(
                item is not None and agree(item, each, limit)
                for item, each, limit in zip(made, wanted, limits, strict=True)
            )

        if numbers:
            return self._numbers(wanted[0], fits, limits[0])
        hits = Hits()
        for results, change, program in self._all(changes_of):
            operation, at = program.operations[change.at], sorted({change.at, *change.results})
            if not hits.have(operation.where, change.text, at) and fits(results):
                text = operation.described(change.text) + program.in_run(at)
                hits.add(operation.where, change.text, at, (text, program.where(at)))
            if hits.are_enough or self.budget.left < 0:
                break
        return hits.messages()

    def _loops(self) -> list[list[tuple[int, Program]]]:
        """Return the position and the body of each loop, those with the same code together."""
        groups: dict[tuple[tuple[str, str], ...], list[tuple[int, Program]]] = {}
        for at, operation in enumerate(self.program.operations):
            for key in ("jaxpr", "body_jaxpr"):
                if operation.name in ("scan", "while") and key in operation.params:
                    body = self._program(operation.params[key])
                    code = tuple((item.name, item.where) for item in body.operations)
                    groups.setdefault(code, []).append((at, body))
        return list(groups.values())

    def _all(
        self, changes: Callable[..., Iterator[ProgramChange]]
    ) -> Iterator[tuple[Mapping[int, Results], ProgramChange, Program]]:
        """Yield the changes of the program and of the loops in it, of all with the same code, then of each.

        The operation that a change of a loop replaces is the loop.
        """
        for change in changes(self.program):
            yield change.results, change, self.program
        for loops in self._loops():
            of_loops = [list(changes(body)) for _, body in loops]
            for several in zip(*of_loops, strict=False) if len(loops) > 1 else ():
                results = {at: self._in_loop(at, body, one) for (at, body), one in zip(loops, several, strict=True)}
                if len({one.text for one in several}) == 1:
                    yield results, several[0], loops[0][1]
            for number, ((at, body), own) in enumerate(zip(loops, of_loops, strict=True)):
                for change in own:
                    text = change.text + in_run(number, len(loops))
                    yield {at: self._in_loop(at, body, change)}, dataclasses.replace(change, text=text), body

    def _in_loop(self, at: int, body: Program, change: ProgramChange) -> Results:
        def results(read: Read) -> list[Value]:
            self._changes = {id(body): change.results}
            try:
                return self.program.operations[at].plain(read)
            finally:
                self._changes = {}

        return results

    def _numbers(
        self, wanted: Sequence[Array], fits: Callable[[Mapping[int, Results]], bool], limit: float
    ) -> list[tuple[str, str]]:
        """Return the numbers in the code with each of which the results are those wanted, by solving for them."""
        hits: dict[tuple[str, float, tuple[int, ...]], tuple[str, str]] = {}
        for number, program, places, which, changes in self._replaced():
            line = program.operations[places[0]].where
            if len(hits) == MOST_FITTING or self.budget.left < 0:
                break
            if any((line, number) == hit[:2] and (which or len(hit[2]) > len(places)) for hit in hits):
                continue  # all of the line together fit

            def rest(value: float, changes: Callable[[float], Mapping[int, Results]] = changes) -> Array | None:
                outputs = self.changed(changes(value))
                return apart(self.outputs if outputs is None else outputs, wanted)

            for value in solutions(number, rest, limit):
                if value != number and fits(changes(value)):
                    text = f"{value:.6g} for {number:.6g}{program.in_run(places)}{which}"
                    hits.setdefault((line, number, tuple(places)), (text, program.where(places)))
        return list(hits.values())

    def _replaced(self) -> Iterator[tuple[float, Program, list[int], str, Callable[[float], Mapping[int, Results]]]]:
        """Yield the numbers in code, their operations, and changes to others: all equal ones of a line, then each.

        Those in a library's own code would fit by chance. Of loops with the same code all are changed, then each; the
        fourth item is the number of the loop, if it is changed alone.
        """
        loops = self._loops()
        single = [([loop], in_run(at, len(some))) for some in loops if len(some) > 1 for at, loop in enumerate(some)]
        together: list[tuple[list[tuple[int, Program]], str]] = [([], ""), *((some, "") for some in loops), *single]
        for several, which in together:
            program = several[0][1] if several else self.program
            groups: dict[tuple[str, float], list[tuple[int, int, float]]] = {}
            for position, operation in enumerate(program.operations):
                for index, number in literals(operation):
                    if program.is_written(operation.operands[index]):
                        groups.setdefault((operation.where, abs(number)), []).append((position, index, number))
            for places in groups.values():
                alike = [[place for place in places if place[2] == number] for *_, number in places]
                for some in dict.fromkeys(map(tuple, (places, *alike, *([place] for place in places)))):
                    own = [position for position, *_ in some]
                    signs = " of both signs" if len({number for *_, number in some}) > 1 else ""
                    yield some[0][2], program, own, which + signs, functools.partial(self._with_number, several, some)

    def _with_number(
        self, loops: Sequence[tuple[int, Program]], places: Sequence[tuple[int, int, float]], value: float
    ) -> Mapping[int, Results]:
        """Return the results with another number at some operands, in some loops or else outside of them.

        Operands of the other sign than the first keep it, as bounds to both sides do.
        """

        def changed(program: Program) -> ProgramChange:
            results = {
                position: program.operations[position].with_number(index, value if number == places[0][2] else -value)
                for position, index, number in places
            }
            return ProgramChange("", min(results), results)

        in_loops = {at: self._in_loop(at, body, changed(body)) for at, body in loops}
        return in_loops if loops else changed(self.program).results


def _sizes(values: Iterable[Value]) -> int:
    """Return how many elements some values have."""
    return sum(np.size(value) for value in values)
