"""One trial on a mesh, a fault in the block or a right pair, and what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge.backends import Framework
from attn_parity.check.mesh.run import build
from attn_parity.compare.driver import compare
from attn_parity.results.report import Report
from attn_parity.sides.subject import Arguments, load_adapter

from ..adapters import load_mutants
from ..planted import mutants
from ..trials import finite
from ..visibility import Change, Numbers, measure_change
from .configs import MeshConfig, draw_mesh_config
from .pairs import draw_right

SEEDS = 1
"""Number of the judge's draws, in addition to the pair's own numbers."""

HAND_WRITTEN = 3
"""One right pair in this many is the block without a fault; the others are modules of ours."""


@dataclasses.dataclass(frozen=True)
class MeshTrial:
    """One comparison: a fault in the sharded block (none: a right pair), and the seed of everything else."""

    fault: str
    framework: Framework
    seed: int

    def __str__(self) -> str:
        return f"{self.fault or 'right'}:{self.framework}:{self.seed}"


@dataclasses.dataclass(frozen=True)
class MeshResult:
    """The outcome of one trial.

    Attributes:
        trial: the trial.
        described: the pair, as JSON-ready data.
        verdict: the judge's verdict; ``crashed`` if it failed.
        message: the judge's reason, "" when equal.
        shard: devices or shards that the report names, "" if none.
        kind: the reported cause that the difference is consistent with, "" if none.
        place: the reported submodule.
        change: the effect of the fault on its own side; None for a right pair.
        outcome: ``detected``, ``missed``, ``invisible``, ``right``, ``refused`` or ``false alarm``.
        seconds: its duration.
    """

    trial: MeshTrial
    described: Mapping[str, object]
    verdict: str
    message: str = ""
    shard: str = ""
    kind: str = ""
    place: str = ""
    change: Change | None = None
    outcome: str = ""
    seconds: float = 0.0

    @property
    def is_visible(self) -> bool:
        """Whether it is a fault that counts for or against the judge."""
        return self.outcome in ("detected", "missed")

    @property
    def is_named(self) -> bool:
        """Whether the report names the devices or shards that differ, or a consistent cause."""
        return bool(self.shard or self.kind)

    @property
    def is_wrong(self) -> bool:
        """Whether it counts against the judge."""
        return self.outcome in ("missed", "false alarm")

    def __str__(self) -> str:
        line = f"{self.outcome}: {self.trial}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line

    def to_json(self) -> dict[str, object]:
        """Return it as JSON-ready data."""
        change = None
        if self.change is not None:
            change = {name: finite(value) for name, value in dataclasses.asdict(self.change).items()}
        own = {name: getattr(self, name) for name in ("verdict", "outcome", "message", "shard", "kind", "place")}
        return {
            "case": str(self.trial),
            "fault": self.trial.fault,
            "framework": self.trial.framework,
            "seed": self.trial.seed,
            "config": dict(self.described),
            **own,
            "change": change,
            "seconds": round(self.seconds, 3),
        }


def run_trial(trial: MeshTrial, mesh: object, sizes: Mapping[str, int], plain: Framework) -> MeshResult:
    """Judge one pair on a mesh.

    Args:
        trial: the trial.
        mesh: of the trial's framework.
        sizes: of its axes.
        plain: framework of the plain side.
    """
    started = time.perf_counter()
    if trial.fault or trial.seed % HAND_WRITTEN == 0:
        result = _block(trial, mesh, sizes, plain)
    else:
        result = _ours(trial, mesh, sizes, plain)
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def _block(trial: MeshTrial, mesh: object, sizes: Mapping[str, int], plain: Framework) -> MeshResult:
    config = draw_mesh_config(trial.seed, sizes)
    weights = mutants.draw_weights(config.shapes(), trial.seed, 1.0)
    first = _builder(plain)(config, weights)
    second = _builder(trial.framework)(config, weights, mesh, trial.fault)
    result = _judged(MeshResult(trial, config.described(), "crashed"), first, second, config.inputs(), "float32")
    if not trial.fault:
        return dataclasses.replace(result, outcome="right" if result.verdict == "equal" else "false alarm")
    change = _change(trial, config, second)
    if result.verdict == "crashed":
        outcome = "missed"
    elif change.effect == "none":
        outcome = "invisible" if result.verdict == "equal" else "false alarm"
    else:
        outcome = "missed" if result.verdict == "equal" else "detected"
    return dataclasses.replace(result, change=change, outcome=outcome)


def _builder(framework: Framework) -> Any:
    return load_mutants(framework, "mesh_mutants.block").build


def _ours(trial: MeshTrial, mesh: object, sizes: Mapping[str, int], plain: Framework) -> MeshResult:
    pair = draw_right(trial.seed, sizes)
    result = MeshResult(trial, pair.described(), "refused", outcome="refused")
    sharded, roles = build(trial.framework, pair.case), {name: name for name in sizes}
    try:
        sharded = backends.load(trial.framework, "parallel").parallelize(sharded, mesh, **roles, method=pair.method)
    except ValueError as error:
        return dataclasses.replace(result, message=str(error))
    result = _judged(result, build(plain, pair.case), sharded, pair.case.inputs("float32"), pair.dtype)
    return dataclasses.replace(result, outcome="right" if result.verdict == "equal" else "false alarm")


def _judged(result: MeshResult, first: object, second: object, inputs: Mapping[str, object], dtype: str) -> MeshResult:
    try:
        report = compare(first, second, dict(inputs), seeds=SEEDS, first_seed=result.trial.seed, dtypes=(dtype,))
    except Exception as error:  # a fault may make a module raise anything; the run goes on and reports it
        return dataclasses.replace(result, verdict="crashed", message=f"{type(error).__name__}: {error}")
    divergence = report.first_divergence
    return dataclasses.replace(
        result,
        verdict=report.verdict,
        message=report.message or " | ".join(str(one) for one in report.failures[:3]),
        shard=shard_of(report),
        kind="" if divergence is None else divergence.hint,
        place="" if divergence is None else str(divergence),
    )


def shard_of(report: Report) -> str:
    """Return the devices or shards that a report names for a difference; "" if it names none."""
    copies = [one.message for one in report.failures if one.kind == "copies"]
    return next(iter([*copies, *(f"{one.name} {one.shards}" for one in report.failures if one.shards)]), "")


def _change(trial: MeshTrial, config: MeshConfig, wrong: object) -> Change:
    """Measure the effect of a fault, against the same block on one device."""
    subject_of = load_adapter(trial.framework).subject_of
    weights = mutants.draw_weights(config.shapes(), trial.seed, 1.0)
    right = subject_of(_builder(trial.framework)(config, weights))
    random = np.random.default_rng([trial.seed, 5])
    inputs = config.inputs()
    module_weights = right.weights()
    shapes = [shape for _, shape, _ in right.describe_outputs(module_weights, Arguments((), dict(inputs)))]
    cotangents = [np.asarray(random.normal(size=shape)) for shape in shapes]
    return measure_change(right, subject_of(wrong), [Numbers(module_weights, module_weights, inputs, cotangents)])
