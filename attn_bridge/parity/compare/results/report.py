"""What `compare` found: a verdict per tensor, where the two first diverge, and what was not reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .changes import Changes, changes, read

if TYPE_CHECKING:
    from ...training.driver import TrainingReport

Array = np.ndarray[Any, Any]
Verdict = Literal["equal", "precision", "different", "inconclusive"]
Side = Literal["first", "second"]
"""The two sides, in the order in which they were given."""

SEVERITY: tuple[Verdict, ...] = ("equal", "inconclusive", "precision", "different")
"""Verdicts from harmless to worst; a whole is as bad as its worst part."""

SCHEMA = 1
"""Version of the JSON; it changes when a key is renamed or removed."""


SHOWN = {"flax": "Flax"}
"""Labels of sides -> how they are written, where that is another way."""


def shown(label: str) -> str:
    """Return the label of a side as people read it: ``torch``, ``Flax``, ``first``, ``second``."""
    return SHOWN.get(label, label)


def worst(verdicts: Iterator[Verdict] | list[Verdict]) -> Verdict:
    """Return the worst of some verdicts; of none, ``equal``."""
    return max(verdicts, key=SEVERITY.index, default="equal")


class ParityError(AssertionError):
    """The two sides are not equal; the message says what differs, where, and how to run it again.

    Attributes:
        report: the `Report`, or the `TrainingReport`.
    """

    def __init__(self, report: Report | TrainingReport):
        self.report = report
        super().__init__(report.explain())


@dataclasses.dataclass(frozen=True)
class Worst:
    """The element that is furthest off: sample, index, both values, and the float64 value (None if there is none)."""

    sample: int
    index: tuple[int, ...]
    first: float
    second: float
    oracle: float | None

    @property
    def torch(self) -> float:
        """Former name of `first`."""
        return self.first

    @property
    def flax(self) -> float:
        """Former name of `second`."""
        return self.second


@dataclasses.dataclass(frozen=True)
class TensorVerdict:
    """Judgement of one tensor over all samples.

    Attributes:
        name: ``output``, ``output[1]``, ``grad x`` (an input), ``grad fc.weight``, ``weight ...``;
            names of the first side.
        second_name: name of the same tensor on the second side.
        kind: ``output``, ``input gradient``, ``matrix gradient``, ``vector gradient`` or ``weight``.
        shape: its shape, the first side's axes.
        dtype: dtype in which precision was judged.
        verdict: the verdict.
        message: one line that says why, empty when equal.
        side: label of the side that loses too much precision, for ``precision``.
        weights: ``held`` or ``own``: the weights that showed the worst.
        mode: ``eager`` or ``jit``: the run that showed the worst.
        relative: largest float64 difference, relative to the largest value of the kind; None without float64.
        meaning_used: share of the float64 allowance that the difference took.
        first_used: share of the precision allowance that the first side took.
        second_used: the same of the second side.
        first_ulps: root mean square error of the first side, in units of the last place of the largest value.
        second_ulps: the same of the second side.
        bad: number of elements beyond the allowance that failed.
        count: number of elements over all samples.
        worst: the element that is furthest off.
        sample: what showed the worst, in words: ``your weights``, ``random weights, seed 1``.
        allowed: path of the allowance that covers the difference; such a tensor is no failure.
    """

    name: str
    second_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    verdict: Verdict
    message: str = ""
    side: str | None = None
    weights: str = "held"
    mode: str = "eager"
    relative: float | None = None
    meaning_used: float | None = None
    first_used: float | None = None
    second_used: float | None = None
    first_ulps: float | None = None
    second_ulps: float | None = None
    bad: int = 0
    count: int = 0
    worst: Worst | None = None
    sample: str = ""
    allowed: str = ""

    @property
    def used(self) -> float | None:
        """Largest share of the allowed error that either side, or the difference in float64, took."""
        shares = (self.meaning_used, self.first_used, self.second_used)
        return max((one for one in shares if one is not None), default=None)

    @property
    def on(self) -> str:
        """The sample that the numbers are of, in words."""
        return self.sample or {"held": "your weights", "own": "random weights"}.get(self.weights, self.weights)

    @property
    def flax_name(self) -> str:
        """Former name of `second_name`."""
        return self.second_name

    @property
    def torch_used(self) -> float | None:
        """Former name of `first_used`."""
        return self.first_used

    @property
    def flax_used(self) -> float | None:
        """Former name of `second_used`."""
        return self.second_used

    @property
    def torch_ulps(self) -> float | None:
        """Former name of `first_ulps`."""
        return self.first_ulps

    @property
    def flax_ulps(self) -> float | None:
        """Former name of `second_ulps`."""
        return self.second_ulps

    def __str__(self) -> str:
        line = f"{self.name}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line


@dataclasses.dataclass(frozen=True)
class Pair:
    """One parameter on both sides.

    Attributes:
        first: its name on the first side.
        second: its name on the second side.
        pattern: einops pattern from the first side's axes to the second's.
        how: what settled it: ``rules``, ``config``, ``names``, ``shapes``, ``probe``, or ``convention`` (kernels are
            transposed weights; no pairing makes the outputs agree).
    """

    first: str
    second: str
    pattern: str
    how: str

    @property
    def torch(self) -> str:
        """Former name of `first`."""
        return self.first

    @property
    def flax(self) -> str:
        """Former name of `second`."""
        return self.second


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """One submodule of the first side and its counterpart; a tree of them is where a difference is looked for.

    Errors are relative to the largest value and None where there is nothing to compare.

    Attributes:
        path: dotted path on the first side, "" for the module itself; None for a submodule that only the second has.
        second_path: dotted path on the second side; None for a module without a counterpart.
        first_type: class on the first side, "" if there is none.
        second_type: class on the second side, "" if there is none.
        verdict: of the module fed with the other side's activations; None where it was not run by itself.
        error_in: difference of the inputs as the two sides ran freely.
        error_out: difference of the outputs as the two sides ran freely.
        forward_error: difference of the outputs when both are fed the same inputs.
        backward_error: difference of the gradients when both are fed the same inputs and cotangents.
        message: what differs, or why it was not run by itself.
        first: whether this is the first divergence.
        children: the submodules, in order of execution.
    """

    path: str | None
    second_path: str | None
    first_type: str = ""
    second_type: str = ""
    verdict: Verdict | None = None
    error_in: float | None = None
    error_out: float | None = None
    forward_error: float | None = None
    backward_error: float | None = None
    message: str = ""
    first: bool = False
    children: tuple[ModuleNode, ...] = ()

    @property
    def flax_path(self) -> str | None:
        """Former name of `second_path`."""
        return self.second_path

    @property
    def torch_type(self) -> str:
        """Former name of `first_type`."""
        return self.first_type

    @property
    def flax_type(self) -> str:
        """Former name of `second_type`."""
        return self.second_type

    @property
    def amplification(self) -> float | None:
        """How much larger the difference is behind the module than before it."""
        if self.error_in is None or self.error_out is None or self.error_in == 0:
            return None
        return self.error_out / self.error_in

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and all below it, in order of execution."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The submodule, or the code between two, that differs although it was fed the same numbers.

    Attributes:
        path: dotted path on the first side; "" is the module itself, outside its submodules.
        second_path: dotted path on the second side.
        direction: ``forward`` or ``backward``.
        message: what differs there, in one line.
        between: the two submodules of `path` between which the fault lies, where it is in the code around them.
        hint: what the difference is consistent with, in one line.
        second_label: label of the second side.
    """

    path: str
    second_path: str
    direction: Literal["forward", "backward"]
    message: str = ""
    between: tuple[str, str] | None = None
    hint: str = ""
    second_label: str = "flax"

    @property
    def flax_path(self) -> str:
        """Former name of `second_path`."""
        return self.second_path

    @property
    def place(self) -> str:
        """Where it is, in words."""
        where = self.path or "the module itself, outside its submodules"
        if self.between is not None:
            where = f"between {self.between[0]} and {self.between[1]}" + (f", in {self.path}" if self.path else "")
        if self.second_path != self.path:
            where += f" ({shown(self.second_label)}: {self.second_path or 'the module itself'})"
        return where

    def __str__(self) -> str:
        inside = "" if self.between is not None else "in "
        return f"first divergence ({self.direction}) {inside}{self.place}{': ' if self.message else ''}{self.message}"


@dataclasses.dataclass(frozen=True)
class Picture:
    """One tensor of the first sample for pictures, as the two sides computed it in their own precision."""

    name: str
    first: Array
    second: Array
    oracle: Array | None = None

    @property
    def torch(self) -> Array:
        """Former name of `first`."""
        return self.first

    @property
    def flax(self) -> Array:
        """Former name of `second`."""
        return self.second


@dataclasses.dataclass(frozen=True)
class Allowance:
    """A difference that is known and accepted.

    Attributes:
        path: submodule, parameter or tensor that may differ.
        reason: why.
        covers: names of the tensors whose difference it accepts, and of submodules ``in blocks.3.norm``.
    """

    path: str
    reason: str
    covers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"allowed: {self.path}: {self.reason}" + ("" if self.covers else " (nothing there differs)")


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `attn_bridge.parity.compare`.

    Attributes:
        verdict: ``equal``, ``precision``, ``different`` or ``inconclusive``.
        tensors: one judgement per tensor, in the order outputs, input gradients, parameter gradients.
        first_divergence: where the two first differ; None when they are equal or it could not be told.
        tree: the module tree behind it; None unless it was looked for.
        unexercised: parameters that no comparison reached.
        invariances: parameters that the outputs do not depend on although they are used, such as a key bias.
        unreached: branches that were not run: dropout that is off, arguments that were not given.
        pairing: which parameter is which.
        noise: what the sides do to themselves: name of the variation -> relative difference.
        notes: what a reader has to know, such as a side that has no float64.
        message: what is missing, when the verdict is inconclusive.
        seeds: how many times numbers were drawn.
        samples: how many runs each verdict is pooled over.
        environment: versions, devices and precision switches.
        seconds: how long it took.
        peak_memory: largest resident memory of the process, in bytes.
        command: the command that runs it again, "" when it was called from Python.
        first_name: class of the first module.
        second_name: class of the second module.
        first_label: what the first side is called: ``torch`` or ``flax`` where the frameworks differ, else ``first``.
        second_label: what the second side is called.
        allowed: differences that were accepted beforehand.
        changes: what is other than in the baseline; None without one.
        pictures: tensors of the first sample, for the HTML page.
    """

    verdict: Verdict
    tensors: list[TensorVerdict]
    first_divergence: Divergence | None = None
    tree: ModuleNode | None = None
    unexercised: list[str] = dataclasses.field(default_factory=list)
    invariances: list[str] = dataclasses.field(default_factory=list)
    unreached: list[str] = dataclasses.field(default_factory=list)
    pairing: list[Pair] = dataclasses.field(default_factory=list)
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
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

    @property
    def torch_name(self) -> str:
        """Former name of `first_name`."""
        return self.first_name

    @property
    def flax_name(self) -> str:
        """Former name of `second_name`."""
        return self.second_name

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
        """The tensors that are not equal and not allowed to differ, worst first."""
        bad = [tensor for tensor in self.tensors if tensor.verdict != "equal" and not tensor.allowed]
        return sorted(bad, key=lambda tensor: -SEVERITY.index(tensor.verdict))

    def summary(self) -> str:
        """Return the verdict and its extent in one line."""
        effort = f"{len(self.tensors)} tensors, {self.seeds} seeds, {self.samples} samples, {self.seconds:.1f} s"
        line = f"{self.verdict}: {self.sides}, {effort}"
        accepted = sum(bool(tensor.allowed) for tensor in self.tensors)
        line += f", {accepted} allowed to differ" if accepted else ""
        return f"{line}: {self.message}" if self.message else line

    def explain(self, most: int = 10) -> str:
        """Return the summary, where the two diverge, and the worst tensors: what an exception says."""
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
        if not self.passed:
            raise ParityError(self)
        return self

    def __str__(self) -> str:
        from ...rendering.terminal import as_text

        return as_text(self)

    def changes_since(self, baseline: Report | Mapping[str, Any] | str | Path) -> Changes:
        """Return what is other than in an earlier report of the same pair.

        Args:
            baseline: the report, its JSON data, or the file that it was written to.

        Raises:
            ValueError: the file holds no report.
        """
        if isinstance(baseline, Report):
            baseline = baseline.to_json()
        elif not isinstance(baseline, Mapping):
            baseline = read(baseline)
        return changes(baseline, self.to_json())

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the report as JSON-ready data, and write it to `path` if one is given; infinities become null."""
        from ...rendering.json import as_json

        return as_json(self, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as one self-contained HTML page, and write it to `path` if one is given."""
        from ...rendering.html import as_html

        return as_html(self, path)

    def to_junit(self, path: str | Path | None = None) -> str:
        """Return the report as JUnit XML, one test case per tensor, and write it to `path` if one is given."""
        from ...rendering.junit import as_junit

        return as_junit(self, path)
