"""The report on a training of both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from attn_bridge.whole_files import JsonObject

from ..results.findings import PairedParameter, TensorVerdict, Verdict
from ..results.report import ParityError


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where two trainings first differ.

    Attributes:
        step: number of the step, from 1.
        tensor: ``dropout NAME`` (of the submodule that drops), ``loss``, ``grad NAME``, ``statistic NAME``,
            ``mu NAME`` (or ``nu``, ``trace``), or ``update NAME``, with torch names; ``free run`` where every step
            alone is equal.
        flax_tensor: the same with the Flax name.
        message: what differs, in one line.
    """

    step: int
    tensor: str
    flax_tensor: str
    message: str

    def __str__(self) -> str:
        flax = "" if self.flax_tensor == self.tensor else f" (Flax: {self.flax_tensor})"
        return f"first difference at step {self.step} in {self.tensor}{flax}: {self.message}"


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """Result of `attn_bridge.parity.train`.

    Attributes:
        verdict: ``equal``, ``precision``, ``different`` or ``inconclusive``.
        first_difference: the first difference; None if the two agree.
        tensors: one judgement per tensor over all steps, each taken again from the same numbers.
        losses: run -> loss per step: ``torch``, ``flax``, ``torch float64``, ``flax float64``, and ``torch moved`` and
            ``torch float64 moved``, which start one unit in the last place off.
        growth: pair of runs -> distance of their weights after each step, relative to the weights.
        synchronised: tensor kind -> largest difference per step between the sides that start from the same numbers,
            relative to the largest value of the kind, in float64.
        divergence: tensor -> largest difference per step between the sides that start from the same numbers, relative
            to the largest value of its kind, in float64.
        settings: how optimizers and dropout of the two sides were reconciled.
        notes: remarks for the reader.
        message: the reason of an inconclusive verdict; for drift, the drifting quantity.
        steps: how many steps were taken.
        dtype: precision of the two sides.
        pairing: the paired parameters.
        environment: versions, devices and precision switches.
        seconds: how long it took.
        torch_name: class of the torch module.
        flax_name: class of the Flax module.
    """

    verdict: Verdict
    first_difference: FirstDifference | None
    tensors: list[TensorVerdict]
    losses: dict[str, list[float]]
    growth: dict[str, list[float]]
    synchronised: dict[str, list[float]]
    settings: list[str]
    notes: list[str]
    message: str
    steps: int
    dtype: str
    pairing: list[PairedParameter] = dataclasses.field(default_factory=list)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    divergence: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    torch_name: str = ""
    flax_name: str = ""

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``equal``."""
        return self.verdict == "equal"

    @property
    def failures(self) -> list[TensorVerdict]:
        """The tensors that are not equal."""
        return [one for one in self.tensors if one.verdict != "equal"]

    def summary(self) -> str:
        """Return the verdict and its extent in one line."""
        line = (
            f"{self.verdict}: {self.steps} steps of {self.torch_name} (torch) and {self.flax_name} (Flax) "
            f"in {self.dtype}, {self.seconds:.1f} s"
        )
        return f"{line}: {self.message}" if self.message else line

    def explain(self, most: int = 10) -> str:
        """Return the summary, the first difference, losses, growth and settings as text."""
        lines = [self.summary()]
        if self.first_difference is not None:
            lines.append(str(self.first_difference))
        lines += [f"  {one}" for one in self.failures[:most]]
        if len(self.failures) > most:
            lines.append(f"  and {len(self.failures) - most} more")
        for name, losses in self.losses.items():
            if losses:
                lines.append(f"  loss of {name}: {losses[0]:.9g} at step 1, {losses[-1]:.9g} at step {len(losses)}")
        for name, apart in self.growth.items():
            if apart:
                lines.append(f"  weights apart, {name}: {apart[0]:.2g} after step 1, {apart[-1]:.2g} at the end")
        lines += [f"  {one}" for one in [*self.settings, *self.notes]]
        return "\n".join(lines)

    def raise_for_mismatch(self) -> TrainingReport:
        """Return the report if the verdict is ``equal``.

        Raises:
            ParityError: (an AssertionError) with the explanation.
        """
        __tracebackhide__ = True  # pytest shows the line of the test that calls this
        if not self.passed:
            raise ParityError(self)
        return self

    def __str__(self) -> str:
        return self.explain()

    def to_json(self, path: str | Path | None = None) -> JsonObject:
        """Return the report as JSON-ready data, and write it to `path` if one is given; infinities become null."""
        from ..rendering.json import as_json

        return as_json(self, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as one self-contained HTML page, and write it to `path` if one is given."""
        from ..rendering.html.training import as_html

        return as_html(self, path)
