"""Judges a pair in one precision: takes the planned samples, measures them, looks again where precision is in doubt.

A right pair's verdict may not depend on how its arithmetic is carried out. What is in doubt is therefore measured, by
running a side once more with other roundings (*probes*): every operation rounded at random, softmax by the formula that
fused attention kernels use, tables in float32 moved by their last unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..pair import SIDES
from ..results.findings import Side, TensorVerdict
from ..samples.sampling import Planned
from ..sides.large import is_large
from .bench import Bench, Findings
from .runner import Runner


def judge_in(runner: Runner, dtype: str, modes: tuple[str, ...], seeds: int, first_seed: int) -> Findings:
    """Judge a pair in one precision.

    Args:
        runner: what runs the pair.
        dtype: the precision.
        modes: how it is run: ``eager``, ``jit``.
        seeds: how many times numbers are drawn.
        first_seed: the first of them.
    """
    pair = runner.pair
    plan = pair.effort.first_look(seeds, first_seed, transfer=pair.transfer)
    bench = Bench(runner, dtype, modes)
    if pair.effort.large:
        _take_large(bench, plan)
    else:
        bench.noise = runner.noise(dtype, modes)
        bench.take_all(plan, f"comparing in {dtype}")
    verdicts = bench.verdicts()
    doubted = [one.name for one in verdicts if one.verdict == "precision"]
    if doubted:
        verdicts = _looked_again(bench, verdicts, seeds, first_seed)
    bench.note(verdicts)
    return bench.findings(verdicts)


def _take_large(bench: Bench, plan: Sequence[Planned]) -> None:
    """Judge drawn weights in full; held ones need float64 only if the sides are further apart on them.

    Weights that are too large to be held twice, and that each side has of its own, are judged in full, and drawn ones
    only where they leave a gradient zero.
    """
    own, held = plan
    runner, pair = bench.runner, bench.pair
    if runner.live and not pair.transfer and any(map(is_large, pair.held["first"].values())):
        bench.take(held)
        if bench.zero:
            bench.take(own)
        bench.probe_doubted()
        return
    bench.take(own)
    bench.probe_doubted()
    pair.progress(f"comparing in {bench.dtype}", 1, 2)
    needed = not runner.live or bool(pair.lacks) or not pair.transfer
    if needed or not bench.agrees(held):
        bench.take(held)


def _looked_again(bench: Bench, verdicts: list[TensorVerdict], seeds: int, first_seed: int) -> list[TensorVerdict]:
    """Judge precision again on fresh samples, which alone decide: chance does not repeat.

    What is in doubt even then is judged by what the other side loses when its roundings are drawn again, and by what
    the formula of fused attention kernels would cost either side.
    """
    pair = bench.pair
    plan = pair.effort.second_look(seeds, first_seed, transfer=pair.transfer)
    if not bench.runner.live and not any(bench.runner.sample(one) for one in plan):
        return verdicts
    fresh = Bench(bench.runner, bench.dtype, bench.modes)
    fresh.noise = bench.noise
    fresh.take_all(plan, "looking again at what is in doubt")
    doubted = fresh.probe_doubted()
    bench.count += fresh.count
    bench.drawn |= fresh.drawn
    bench.tables, bench.flash = max(bench.tables, fresh.tables), max(bench.flash, fresh.flash)
    bench.literals, bench.unseen = max(bench.literals, fresh.literals), bench.unseen or fresh.unseen
    bench.notes += fresh.notes
    bench.reached.join(fresh.reached)
    second = {one.name: one for one in fresh.verdicts()}
    bench.notes += _cleared(doubted, second, pair.shown)
    return [second.get(one.name, one) if one.verdict == "precision" else one for one in verdicts]


def _cleared(
    doubted: Sequence[TensorVerdict], second: Mapping[str, TensorVerdict], shown: Mapping[Side, str]
) -> list[str]:
    """Say which side is beyond the plain formula's loss, where that is what other roundings explain."""
    largest: dict[Side, tuple[float, str]] = {}
    for one in doubted:
        if second[one.name].verdict == "equal":
            for side, used in zip(SIDES, (one.first_used, one.second_used), strict=True):
                largest[side] = max(largest.get(side, (1.0, "")), (used or 0.0, one.name))
    return [
        f"the {shown[side]} side loses up to {used:.1f} times its share of precision against the other one's "
        f"arithmetic, most in {name}; other roundings, or softmax recomputed from its log-sum-exp as fused attention "
        "kernels do, explain it, and it is allowed"
        for side, (used, name) in largest.items()
        if name
    ]
