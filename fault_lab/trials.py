"""The trials of `mutate`: a fault in a pair, or a right pair, and what came of it; and how many of them are counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from attn_bridge.backends import Framework

from .planted.usual_rules import USUAL_RULES
from .visibility import Change

OUTCOMES = ("detected", "missed", "invariance", "below rounding", "right", "false alarm")
"""The outcomes of a trial. Faults: ``detected``, ``missed``, or invisible: ``invariance`` (the same function in exact
arithmetic) or ``below rounding`` (no more is lost than rounding loses anyway). Pairs without a fault are ``right``. A
``false alarm`` is a rejection of a right pair, or of a fault that changes nothing."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One comparison: a fault on one side of a pair (none: a right pair), and the seed of everything else."""

    fault: str
    side: Framework | None
    seed: int

    def __str__(self) -> str:
        return f"{self.fault}:{self.side}:{self.seed}" if self.fault else f"right:{self.seed}"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one trial.

    Attributes:
        trial: the trial.
        module: the module that was compared.
        described: its sizes and options.
        verdict: the judge's verdict; ``refused`` if it gave a reason for not comparing them, ``crashed`` if it failed.
        message: the judge's reason in one line, "" when equal.
        explanation: the judge's reasons in full.
        change: the effect of the fault on its own side; None for a right pair.
        outcome: one of `OUTCOMES`.
        rules: usual rule -> whether it rejects the outputs, and whether it rejects outputs or gradients; None if
            nothing could be compared.
        seconds: its duration.
    """

    trial: Trial
    module: str
    described: Mapping[str, object]
    verdict: str
    message: str
    explanation: str
    change: Change | None
    outcome: str
    rules: Mapping[str, tuple[bool, bool]] | None
    seconds: float

    @property
    def visible(self) -> bool:
        """Whether it counts for or against the judge: a visible fault, or one that the judge reported anyway."""
        return self.outcome in ("detected", "missed")

    @property
    def is_wrong(self) -> bool:
        """Whether it counts against the judge."""
        return self.outcome in ("missed", "false alarm")

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return f"attn-bridge mutate --case {self.trial}"

    def __str__(self) -> str:
        what = f"{self.trial.fault} in {self.trial.side}" if self.trial.fault else self.module
        line = f"{self.outcome}: {what}, seed {self.trial.seed}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line

    def to_json(self) -> dict[str, object]:
        """Return it as JSON-ready data; infinities become null."""
        change = None
        if self.change is not None:
            change = {name: finite(value) for name, value in dataclasses.asdict(self.change).items()}
            change |= {"effect": self.change.effect, "limit": self.change.limit}
        rules = self.rules
        return {
            "case": str(self.trial),
            "fault": self.trial.fault,
            "side": self.trial.side,
            "seed": self.trial.seed,
            "module": self.module,
            "config": dict(self.described),
            "outcome": self.outcome,
            "verdict": self.verdict,
            "message": self.message,
            "change": change,
            "rules": rules
            and {name: {"outputs": found[0], "outputs and gradients": found[1]} for name, found in rules.items()},
            "command": self.command,
            "seconds": round(self.seconds, 3),
        }


def count_rules(results: Sequence[Result]) -> list[str]:
    """Return per usual rule how many it rejects by the outputs, and by outputs and gradients: ``2|5``."""
    cells = []
    for rule in USUAL_RULES:
        rejections = [result.rules[rule.name] for result in results if result.rules is not None]
        forward, all_of_it = (sum(column) for column in zip(*rejections, strict=True)) if rejections else (0, 0)
        cells.append(f"{forward}|{all_of_it}" if rejections else "-")
    return cells


def upper_bound(failures: int, count: int) -> float:
    """Return the rate that is exceeded with 95 % confidence by no process that failed so often (Clopper-Pearson)."""
    low, high = failures / count if count else 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        below = math.fsum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(failures + 1))
        low, high = (rate, high) if below > 0.05 else (low, rate)
    return high


def finite(value: object) -> object:
    """Return a value; None for an infinity, which JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
