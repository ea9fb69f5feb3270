"""The report of `compare`: a verdict per tensor, the first divergence, and the parts that were not reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge.whole_files import JsonObject

from .changes import Changes, Data, changes, read
from .findings import (
    SEVERITY,
    Allowance,
    Divergence,
    DtypeLeak,
    ModuleNode,
    PairedParameter,
    Picture,
    TensorVerdict,
    Verdict,
    former,
    shown,
)

if TYPE_CHECKING:
    from ..training.report import TrainingReport
    from .precision import Precision


class ParityError(AssertionError):
    """The two sides are not equal; the message names the differences, their location and the command to run again.

    Attributes:
        report: the `Report`, the `TrainingReport`, or the `Precision` of three arrays.
    """

    def __init__(self, report: Report | TrainingReport | Precision):
        self.report = report
        super().__init__(report.explain())


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `attn_bridge.parity.compare`.

    Attributes:
        verdict: ``equal``, ``precision``, ``different`` or ``inconclusive``.
        tensors: one judgement per tensor, in the order outputs, input gradients, parameter gradients.
        first_divergence: the first divergence; None when they are equal or it was not determined.
        tree: the module tree behind it; None unless it was looked for.
        unexercised: parameters that no comparison reached.
        invariances: parameters that the outputs do not depend on although they are used, such as a key bias.
        unreached: branches that were not run: dropout that is off, arguments that were not given.
        pairing: the paired parameters.
        noise: difference of each side from itself: name of the variation -> relative difference.
        notes: remarks for the reader, such as a side without float64.
        dtype_leaks: places where a side computes or returns a wider dtype than its inputs and weights have.
        message: the reason of an inconclusive verdict; inputs that differ, for a different one.
        seeds: number of draws.
        samples: number of runs that each verdict pools.
        environment: versions, devices and precision switches.
        seconds: how long it took.
        peak_memory: largest resident memory of the process, in bytes.
        command: the command to run again, "" when called from Python.
        first_name: class of the first module.
        second_name: class of the second module.
        first_label: label of the first side: ``torch`` or ``flax`` where the frameworks differ, else ``first``.
        second_label: label of the second side.
        allowed: differences that were accepted beforehand.
        changes: changes since the baseline; None without one.
        pictures: tensors of the first sample, for the HTML page.
        subjects: digests of code, weights, inputs and judge, as `attestation.subjects` takes them; empty unless the
            command line wrote JSON.
    """

    verdict: Verdict
    tensors: list[TensorVerdict]
    first_divergence: Divergence | None = None
    tree: ModuleNode | None = None
    unexercised: list[str] = dataclasses.field(default_factory=list)
    invariances: list[str] = dataclasses.field(default_factory=list)
    unreached: list[str] = dataclasses.field(default_factory=list)
    pairing: list[PairedParameter] = dataclasses.field(default_factory=list)
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    dtype_leaks: list[DtypeLeak] = dataclasses.field(default_factory=list)
    message: str = ""
    seeds: int = 0
    samples: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    peak_memory: int = 0
    command: str = ""
    first_name: str = ""
    second_name: str = ""
    first_label: str = "torch"
    second_label: str = "flax"
    allowed: list[Allowance] = dataclasses.field(default_factory=list)
    changes: Changes | None = None
    pictures: list[Picture] = dataclasses.field(default_factory=list, repr=False)
    subjects: Data = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        first = self.first_divergence
        if first is not None and not (first.first_name and first.second_name):
            named = dataclasses.replace(first, first_name=self.first_name, second_name=self.second_name)
            object.__setattr__(self, "first_divergence", named)

    torch_name = former("first_name")
    flax_name = former("second_name")

    @property
    def sides(self) -> str:
        """Both classes with their labels: ``GPT (torch) and GPTModel (Flax)``."""
        return f"{self.first_name} ({shown(self.first_label)}) and {self.second_name} ({shown(self.second_label)})"

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``equal``."""
        return self.verdict == "equal"

    @property
    def failures(self) -> list[TensorVerdict]:
        """The tensors that are not equal and not allowed to differ, those of the worst verdict first."""
        bad = [tensor for tensor in self.tensors if tensor.verdict != "equal" and not tensor.allowed]
        return sorted(bad, key=lambda tensor: -SEVERITY.index(tensor.verdict))

    def summary(self) -> str:
        """Return the verdict and its extent in one line."""
        tensors, runs, seeds = (
            f"{number} {what}{'' if number == 1 else 's'}"
            for number, what in ((len(self.tensors), "tensor"), (self.samples, "run"), (self.seeds, "seed"))
        )
        effort = f"{tensors}, {runs} ({seeds}), {self.seconds:.1f} s"
        line = f"{self.verdict}: {self.sides}, {effort}"
        accepted = sum(bool(tensor.allowed) for tensor in self.tensors)
        line += f", {accepted} allowed to differ" if accepted else ""
        return f"{line}: {self.message}" if self.message else line

    def explain(self, most: int = 10) -> str:
        """Return the text of an exception: the summary, the first divergence, and up to `most` failing tensors."""
        lines = [self.summary()]
        if self.first_divergence is not None:
            lines.append(str(self.first_divergence))
            lines += [f"hint: {self.first_divergence.hint}"] if self.first_divergence.hint else []
        lines += [str(one) for one in self.allowed]
        lines += [f"  {tensor}" for tensor in self.failures[:most]]
        if len(self.failures) > most:
            lines.append(f"  and {len(self.failures) - most} more")
        if self.command:
            lines.append(f"  again: {self.command}")
        return "\n".join(lines)

    def raise_for_mismatch(self) -> Report:
        """Return the report if the verdict is ``equal``.

        Raises:
            ParityError: (an AssertionError) with the explanation.
        """
        __tracebackhide__ = True  # pytest shows the line of the test that calls this
        if not self.passed:
            raise ParityError(self)
        return self

    def __str__(self) -> str:
        from ..rendering.terminal import as_text

        return as_text(self)

    def changes_since(self, baseline: Report | Mapping[str, object] | str | Path) -> Changes:
        """Return the changes since an earlier report of the same pair.

        Args:
            baseline: the report, its JSON data, or the file that it was written to.

        Raises:
            ValueError: the file does not hold a report.
        """
        if isinstance(baseline, Report):
            baseline = baseline.to_json()
        elif not isinstance(baseline, Mapping):
            baseline = read(baseline)
        return changes(baseline, self.to_json())

    def to_json(self, path: str | Path | None = None) -> JsonObject:
        """Return the report as JSON-ready data, and write it to `path` if one is given; infinities become null."""
        from ..rendering.json import as_json

        return as_json(self, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as one self-contained HTML page, and write it to `path` if one is given."""
        from ..rendering.html import as_html

        return as_html(self, path)

    def to_junit(self, path: str | Path | None = None) -> str:
        """Return the report as JUnit XML, one test case per tensor, and write it to `path` if one is given."""
        from ..rendering.junit import as_junit

        return as_junit(self, path)
