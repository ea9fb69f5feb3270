"""Measure the judge: faults that it must find, and right pairs that it must accept.

Every trial is one call of `attn_bridge.parity.compare`, as a user makes it. The result also has the verdicts of the
usual rules on the same numbers and, for a fault, its measured effect on its side, so that an invisible fault is not
counted as missed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge.backends import Framework
from attn_bridge.printable import printable
from attn_parity import workers
from attn_parity.results.findings import Picture, Side
from attn_parity.results.report import Report
from attn_parity.samples import calls, sampling
from attn_parity.settings.precision import environment
from attn_parity.sides.subject import Arguments, load_adapter

from .adapters import load_mutants
from .gallery import PREFIX, Finding, GalleryTrial, find_gallery_trial, judge_trial, plan_gallery
from .planted import mutants, pairs, usual_rules
from .planted.block_faults import Fault, always, never
from .planted.faults import FAULTS, find_fault
from .planted.kernels import OWN_FORMULA, Order
from .planted.mutants import FIRST_SEED, Arrays
from .report import MutationReport
from .trials import Result, Trial
from .visibility import Change, Numbers, measure_change

SIDES: tuple[Framework, Framework] = ("torch", "flax")
SIDE_OF: dict[Framework, Side] = {"torch": "first", "flax": "second"}

SEEDS = 4
"""How many times the judge draws numbers by default."""

CONFIGS = 30
"""Right pairs that are judged by default."""

FAULT_SEEDS = 100_000
"""Faults are planted into configurations from this many seeds after the right pairs."""

PROGRAMS_OF = 20
"""Trials whose compiled programs a process keeps: shapes hardly ever recur, and those of a trial take some 35 MB."""

_turns = itertools.count(1)

Progress = Callable[[str, int, int], None]


def mutate(
    configs: int = CONFIGS,
    faults: int | None = None,
    seed: int = FIRST_SEED,
    *,
    plants: int = 1,
    jobs: int = 1,
    gallery: str | Sequence[str] = (),
    only: str = "",
    progress: Progress | None = None,
) -> MutationReport:
    """Measure the share of faults that `compare` finds, and of right pairs that it rejects.

    Args:
        configs: number of right pairs of modules, each of another shape, scale and seed.
        faults: number of faults, the first ones of the list; None is all. With a gallery, both may be 0.
        seed: the first seed; seeds below 5000 were used to choose the judge's constants.
        plants: number of times that each fault is planted on each side.
        jobs: number of processes.
        gallery: galleries whose entries are judged as well, right and with each fault: ``file.py`` or ``module``, with
            ``:name`` if the entries are not called ``entries`` (see `fault_lab.gallery`).
        only: plants the faults whose names begin with one of these, joined by commas; `configs` may be 0 then.
        progress: called with a stage, the work done and the total.

    Returns:
        The report; ``report.passed`` is True if every fault was found and no right pair rejected.

    Raises:
        ValueError: a number that is too small, more faults than the list has, a prefix of no fault, or an invalid
            gallery.
        MissingBackendError: torch or Flax is not installed.
    """
    faults = len(FAULTS) if faults is None else faults
    galleries = (gallery,) if isinstance(gallery, str) else tuple(gallery)
    fewest = 0 if galleries else 1
    no_pairs = 0 if only else fewest
    for name, value, least in (("configs", configs, no_pairs), ("faults", faults, fewest), ("plants", plants, 1)):
        check_number(name, value, least)
    check_number("seed", seed, 0)
    check_number("jobs", jobs, 1)
    if faults > len(FAULTS):
        raise ValueError(f"faults ({faults}) must be at most {len(FAULTS)}")
    chosen = tuple(fault for fault in FAULTS[:faults] if fault.name.startswith(tuple(only.split(","))))
    if only and not chosen:
        raise ValueError(f"only ({printable(only)}) must be the beginning of a fault's name")
    for side in SIDES:
        load_adapter(side)
    started = time.perf_counter()
    trials: list[Trial | GalleryTrial] = [*plan_faults(chosen, seed + FAULT_SEEDS, plants)]
    trials += [Trial("", None, seed + number) for number in range(configs)]
    for gallery_name in galleries:
        trials += plan_gallery(gallery_name)
    results = []
    with contextlib.closing(run_trials(trials, jobs)) as outcomes:
        for done, result in enumerate(outcomes):
            if progress is not None:
                progress(result.trial.fault or "right pairs", done + 1, len(trials))
            results.append(result)
    return MutationReport(
        tuple(one for one in results if isinstance(one, Result)),
        configs=configs,
        faults=faults,
        seed=seed,
        plants=plants,
        jobs=jobs,
        environment=environment(),
        seconds=time.perf_counter() - started,
        galleries=galleries,
        only=only,
        gallery=tuple(one for one in results if isinstance(one, Finding)),
    )


def find_trial(case: str, gallery: str | Sequence[str] = ()) -> Trial | GalleryTrial:
    """Return the trial with a name from a report: ``right:SEED``, ``FAULT:SIDE:SEED`` or ``gallery:ENTRY``.

    Args:
        case: the name; an entry with a fault is ``gallery:ENTRY:FAULT``.
        gallery: the galleries that have the entry.

    Raises:
        ValueError: the name is malformed or unknown, or the fault does not apply to the seed.
    """
    kind, _, rest = case.partition(":")
    if kind == PREFIX:
        return find_gallery_trial(case, (gallery,) if isinstance(gallery, str) else gallery)
    side, _, number = rest.rpartition(":")
    if not number.isdecimal() or (kind == "right") != (side == "") or side not in ("", *SIDES):
        raise ValueError(f"case ({case}) must read right:SEED or FAULT:SIDE:SEED, with a side of {', '.join(SIDES)}")
    if kind == "right":
        return Trial("", None, int(number))
    if find_fault(kind).pair(int(number)) is None:
        raise ValueError(f"case ({case}): the configuration of seed {number} does not have what this fault needs")
    return Trial(kind, "torch" if side == "torch" else "flax", int(number))


def run_trial(trial: Trial | GalleryTrial) -> Result | Finding:
    """Run one trial."""
    return judge_trial(trial) if isinstance(trial, GalleryTrial) else _run(trial)


def _run(trial: Trial) -> Result:
    started = time.perf_counter()
    subject = _Subject(trial)
    verdict, report, message = _judge(subject)
    rules = None
    if verdict not in ("refused", "crashed"):
        rules = usual_rules.rejections(report.pictures if report and report.pictures else subject.pictures())
    change = subject.change() if trial.fault else None
    if change is not None and change.effect == "none" and verdict in ("different", "precision"):
        change = subject.change_on_samples()  # what the judge saw may show on its own samples alone
    return Result(
        trial=trial,
        module=subject.pair.name,
        described=subject.described(),
        verdict=verdict,
        message=message,
        explanation=report.explain() if report is not None else message,
        change=change,
        outcome=_outcome(subject.fault, verdict, change),
        rules=rules,
        seconds=time.perf_counter() - started,
    )


def _judge(subject: _Subject) -> tuple[str, Report | None, str]:
    from attn_parity.compare.driver import compare

    try:
        report = compare(
            *subject.modules,
            dict(subject.pair.inputs),
            flax_inputs=dict(subject.pair.flax_inputs),
            transfer=subject.fault is None or not subject.fault.held,
            first_seed=subject.trial.seed,
            localise=False,
        )
    except (ValueError, TypeError) as error:  # the judge refuses to compare them, and says why
        return "refused", None, str(error)
    except Exception as error:  # a fault may make a module raise anything; the run goes on and reports it
        return "crashed", None, f"{type(error).__name__}: {error}"
    failures = report.failures
    return report.verdict, report, report.message or (str(failures[0]) if failures else "")


def _outcome(fault: Fault | None, verdict: str, change: Change | None) -> str:
    if fault is None or change is None:
        return "right" if verdict == "equal" else "false alarm"
    if verdict == "crashed":
        return "missed"
    if change.effect == "none" and not fault.held:
        if verdict == "equal":
            return "below rounding" if fault.verdict == "precision" else "invariance"
        return "detected" if fault.drops_parameter else "false alarm"
    return "missed" if verdict == "equal" else "detected"


class _Subject:
    """The two modules of a trial, with weights."""

    def __init__(self, trial: Trial):
        self.trial = trial
        self.fault = find_fault(trial.fault) if trial.fault else None
        pair = pairs.draw_pair(trial.seed) if self.fault is None else self.fault.pair(trial.seed)
        if pair is None:
            raise ValueError(f"case ({trial}): there is nothing in this configuration that the fault could change")
        self.pair = pair
        self._backends = {side: backends.load(side) for side in SIDES}
        self._orders = {side: self._order(side) for side in SIDES}
        self.modules = self._build("torch", self._orders["torch"]), self._build("flax", self._orders["flax"])
        described = self._backends["torch"].describe_weights(self.modules[0])
        self.shapes = {name: shape for name, (shape, _) in described.items()}
        self.held = mutants.draw_weights(self.shapes, self.pair.seed, self.pair.gain, zero_biases=self.pair.zero_biases)
        torch_weights = self._rounded(self.held) if self._holds("torch") else self.held
        self._backends["torch"].set_weights(self.modules[0], torch_weights)
        if self.fault is not None and self.fault.held:
            flax_weights = self._rounded(self.held) if self._holds("flax") else self.held
            self._backends["flax"].set_weights(self.modules[1], self._on_side(flax_weights, "flax"))

    def described(self) -> dict[str, object]:
        """Return the configuration of the pair and the attention kernels that served each side, as JSON-ready data."""
        return self.pair.described() | {"kernels": {side: order.served for side, order in self._orders.items()}}

    def pictures(self) -> list[Picture]:
        """Run both sides once on the pair's weights and inputs, for a pair that the judge did not compare."""
        from attn_parity.compare.prepare import prepare
        from attn_parity.verdict.runner import Live

        pair = prepare(*self.modules, dict(self.pair.inputs), dict(self.pair.flax_inputs))
        runner = Live(pair)
        sample = runner.sample(sampling.FIRST)
        first, second = (runner.run(side, sample, pair.dtype) for side in ("first", "second"))
        truth = pair.named("first", runner.exact("first", sample, pair.dtype))
        return [
            Picture(name, tensor.first, tensor.second, truth[name][1])
            for name, tensor in pair.aligned(first, second).items()
        ]

    def change(self) -> Change:
        """Measure the effect of the fault on its own side."""
        assert self.fault is not None
        assert self.trial.side is not None
        side, seed = self.trial.side, self.pair.seed
        subject_of = load_adapter(side).subject_of
        right = subject_of(self._build(side, self._order(side), with_fault=False))
        wrong = subject_of(self._build(side, self._order(side)))
        numbers = []
        for number in range(2):
            weights, inputs = self.held, self.pair.inputs
            if number:
                weights = mutants.draw_weights(self.shapes, seed + number, 1.0)
                inputs = sampling.draw_inputs(calls.as_arguments(dict(inputs)), (seed, number)).kwargs
            random = np.random.default_rng([seed, number, 5])
            own_weights = self._on_side(weights, side)
            described = right.describe_outputs(own_weights, Arguments((), dict(inputs)))
            cotangents = [np.asarray(random.normal(size=shape)) for _, shape, _ in described]
            others = self._rounded(weights) if self.fault.held else weights
            numbers.append(Numbers(own_weights, self._on_side(others, side), inputs, cotangents))
        return measure_change(right, wrong, numbers)

    def change_on_samples(self) -> Change:
        """Measure the effect of the fault on the samples that the judge takes."""
        from attn_parity.compare.prepare import prepare
        from attn_parity.verdict.runner import Live

        assert self.fault is not None
        assert self.trial.side is not None
        side, subject_of = self.trial.side, load_adapter(self.trial.side).subject_of
        pair = prepare(*self.modules, dict(self.pair.inputs), dict(self.pair.flax_inputs))
        runner, position = Live(pair), SIDE_OF[side]
        numbers = []
        for planned in pair.effort.first_look(SEEDS, self.trial.seed, transfer=pair.transfer):
            sample = runner.sample(planned)
            weights = pair.weights(sample, position)
            cotangents = [one.astype(np.float64) for one in runner.cotangents(sample, None)]
            numbers.append(Numbers(weights, weights, sample.arguments[position].kwargs, cotangents))
        right = subject_of(self._build(side, self._order(side), with_fault=False))
        return measure_change(right, pair.subject(position), numbers)

    def _build(self, side: Framework, order: Order, *, with_fault: bool = True) -> Any:
        build = load_mutants(side, "mutants").build
        if self.fault is None:
            return build(self.pair.name, self.pair.arguments, order)
        return build(*self.fault.module(self.pair, planted=with_fault and self.trial.side == side), order)

    def _order(self, side: Framework) -> Order:
        """Draw the kernels of a side; one that holds a fault in its own formula has that and no other."""
        if self.fault is not None and self.fault.in_attention and self.trial.side == side:
            return Order({OWN_FORMULA: None})
        order: Order = load_mutants(side, "kernels").draw(self.trial.seed, self.pair.name)
        return order

    def _holds(self, side: Framework) -> bool:
        """Whether the fault is in the weights that this side holds."""
        return self.fault is not None and self.fault.held and self.trial.side == side

    def _on_side(self, weights: Arrays, side: Framework) -> Arrays:
        if side == "torch":
            return weights
        from attn_bridge.weights import torch_to_flax

        assert self.fault is not None, "right pairs are loaded by the judge"
        return torch_to_flax(weights, self.fault.rules(self.pair, self.shapes))

    @staticmethod
    def _rounded(weights: Arrays) -> Arrays:
        return {name: array.astype(np.float16).astype(array.dtype) for name, array in weights.items()}


def plan_faults(faults: tuple[Fault, ...], seed: int, plants: int) -> Iterator[Trial]:
    """Plant every fault where it shows, and once on each side where it is hidden, if there is such a place."""
    for position, fault in enumerate(faults):
        start = seed + 1000 * (FAULTS.index(fault) if fault in FAULTS else position)
        for side in SIDES:
            for _ in range(0 if fault.hidden is always else plants):
                start = _find_seed(fault, start, is_hidden=False)
                yield Trial(fault.name, side, start)
                start += 1
            if fault.hidden is not never:
                start = _find_seed(fault, start, is_hidden=True)
                yield Trial(fault.name, side, start)
                start += 1


def _find_seed(fault: Fault, start: int, *, is_hidden: bool) -> int:
    def fits(seed: int) -> bool:
        pair = fault.pair(seed)
        return pair is not None and fault.is_hidden(pair) == is_hidden

    return mutants.find_seed(start, fits)


def run_trials(trials: Sequence[Trial | GalleryTrial], jobs: int) -> Generator[Result | Finding]:
    """Run trials, in worker processes if there are to be several; the results come in the order of the trials."""
    if jobs == 1:
        yield from map(_run_in_turn, trials)
    else:
        yield from workers.run(_run_in_turn, trials, jobs)


def _run_in_turn(trial: Trial | GalleryTrial) -> Result | Finding:
    """Run one of many trials in this process."""
    result = run_trial(trial)
    if next(_turns) % PROGRAMS_OF == 0:
        load_mutants("flax", "mutants").forget_programs()
    return result


def check_number(name: str, value: int, least: int) -> None:
    """Raise for anything but a whole number of at least `least`.

    Raises:
        TypeError: it is not an int.
        ValueError: it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")
