"""What `compare` found: a verdict per tensor, where the two first diverge, and what was not reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from ..training.driver import TrainingReport

Array = np.ndarray[Any, Any]
Verdict = Literal["equal", "precision", "different", "inconclusive"]
Side = Literal["torch", "flax"]

SEVERITY: tuple[Verdict, ...] = ("equal", "inconclusive", "precision", "different")
"""Verdicts from harmless to worst; a whole is as bad as its worst part."""

SCHEMA = 1
"""Version of the JSON; it changes when a key is renamed or removed."""


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
    torch: float
    flax: float
    oracle: float | None


@dataclasses.dataclass(frozen=True)
class TensorVerdict:
    """Judgement of one tensor over all samples.

    Attributes:
        name: ``output``, ``output[1]``, ``grad x`` (an input), ``grad fc.weight`` (torch names), ``weight ...``.
        flax_name: name of the same tensor on the Flax side.
        kind: ``output``, ``input gradient``, ``matrix gradient``, ``vector gradient`` or ``weight``.
        shape: its shape, torch's axes.
        dtype: dtype in which precision was judged.
        verdict: the verdict.
        message: one line that says why, empty when equal.
        side: which side loses too much precision, for ``precision``.
        weights: ``held`` or ``own``: the weights that showed the worst.
        mode: ``eager`` or ``jit``: the run that showed the worst.
        relative: largest float64 difference, relative to the largest value of the kind; None without float64.
        meaning_used: share of the float64 allowance that the difference took.
        torch_used: share of the precision allowance that the torch side took.
        flax_used: the same of the Flax side.
        torch_ulps: root mean square error of the torch side, in units of the last place of the largest value.
        flax_ulps: the same of the Flax side.
        bad: number of elements beyond the allowance that failed.
        count: number of elements over all samples.
        worst: the element that is furthest off.
    """

    name: str
    flax_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    verdict: Verdict
    message: str = ""
    side: Side | None = None
    weights: str = "held"
    mode: str = "eager"
    relative: float | None = None
    meaning_used: float | None = None
    torch_used: float | None = None
    flax_used: float | None = None
    torch_ulps: float | None = None
    flax_ulps: float | None = None
    bad: int = 0
    count: int = 0
    worst: Worst | None = None

    def __str__(self) -> str:
        line = f"{self.name}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line


@dataclasses.dataclass(frozen=True)
class Pair:
    """One parameter on both sides.

    Attributes:
        torch: its torch name.
        flax: its Flax name.
        pattern: einops pattern from the torch axes to the Flax axes.
        how: what settled it: ``rules``, ``config``, ``names``, ``shapes``, ``probe``, or ``convention`` (kernels are
            transposed weights; no pairing makes the outputs agree).
    """

    torch: str
    flax: str
    pattern: str
    how: str


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """One submodule of the torch side and its counterpart; a tree of them is where a difference is looked for.

    Errors are relative to the largest value and None where there is nothing to compare.

    Attributes:
        path: dotted torch path, "" for the module itself; None for a submodule that only Flax has.
        flax_path: dotted Flax path; None for a module without a counterpart.
        torch_type: class on the torch side, "" if there is none.
        flax_type: class on the Flax side, "" if there is none.
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
    flax_path: str | None
    torch_type: str = ""
    flax_type: str = ""
    verdict: Verdict | None = None
    error_in: float | None = None
    error_out: float | None = None
    forward_error: float | None = None
    backward_error: float | None = None
    message: str = ""
    first: bool = False
    children: tuple[ModuleNode, ...] = ()

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
    """The submodule that differs although it was fed the same numbers.

    Attributes:
        path: dotted torch path; "" is the module itself, outside its submodules.
        flax_path: dotted Flax path.
        direction: ``forward`` or ``backward``.
        message: what differs there, in one line.
    """

    path: str
    flax_path: str
    direction: Literal["forward", "backward"]
    message: str = ""

    def __str__(self) -> str:
        where = self.path or "the module itself, outside its submodules"
        flax = "" if self.flax_path == self.path else f" (Flax: {self.flax_path or 'the module itself'})"
        return f"first divergence ({self.direction}) in {where}{flax}{': ' if self.message else ''}{self.message}"


@dataclasses.dataclass(frozen=True)
class Picture:
    """One tensor of the first sample for pictures, as the two sides computed it in their own precision."""

    name: str
    torch: Array
    flax: Array
    oracle: Array | None = None


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
        torch_name: class of the torch module.
        flax_name: class of the Flax module.
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
    torch_name: str = ""
    flax_name: str = ""
    pictures: list[Picture] = dataclasses.field(default_factory=list, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``equal``."""
        return self.verdict == "equal"

    @property
    def failures(self) -> list[TensorVerdict]:
        """The tensors that are not equal, worst first."""
        bad = [tensor for tensor in self.tensors if tensor.verdict != "equal"]
        return sorted(bad, key=lambda tensor: -SEVERITY.index(tensor.verdict))

    def summary(self) -> str:
        """Return the verdict and its extent in one line."""
        effort = f"{len(self.tensors)} tensors, {self.seeds} seeds, {self.samples} samples, {self.seconds:.1f} s"
        line = f"{self.verdict}: {self.torch_name} (torch) and {self.flax_name} (Flax), {effort}"
        return f"{line}: {self.message}" if self.message else line

    def explain(self, most: int = 10) -> str:
        """Return the summary, where the two diverge, and the worst tensors, enough to start debugging."""
        lines = [self.summary()]
        if self.first_divergence is not None:
            lines.append(str(self.first_divergence))
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
        return self.explain()

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
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
