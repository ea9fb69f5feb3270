"""The report of `laws`: a verdict per law, with a witness for each one that is broken."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attn_bridge.whole_files import JsonObject

LawStatus = Literal["holds", "broken", "not tried"]

SCHEMA = 1
"""Version of the JSON data."""

WIDTH = 100
"""Characters of a line of text."""

PURPOSES = {
    "determinism": "a sampler, or statistics that are kept on",
    "batch": "statistics of the batch, a contrastive loss, or a capacity that the batch shares",
    "rows": "a queue of experts that fills up in the order of the rows",
    "gradients": "a straight-through estimator, or a stopped, reversed or clipped gradient",
    "dtype": "a cast of its own, such as logits in float32",
}
"""Name of a law -> what breaks it on purpose in modules that are right."""

ORDER: tuple[LawStatus, ...] = ("broken", "holds", "not tried")


class LawsError(AssertionError):
    """A law is broken; the message names each one with its witness.

    Attributes:
        report: the `LawsReport`.
    """

    def __init__(self, report: LawsReport):
        self.report = report
        super().__init__(report.explain())


@dataclasses.dataclass(frozen=True)
class Witness:
    """The element that shows a broken law best.

    Attributes:
        tensor: name of the tensor: an output, or a weight or input whose gradient is wrong.
        index: position of the element in it; () for a number per tensor.
        expected: its value where the law holds.
        got: its value.
        change: the change between the two runs.
    """

    tensor: str
    index: tuple[int, ...]
    expected: float
    got: float
    change: str

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.tensor}{at} is {self.expected:.6g}, and {self.got:.6g} {self.change}"


@dataclasses.dataclass(frozen=True)
class LawVerdict:
    """The verdict on one law.

    Attributes:
        name: name of the law, as `only` takes it.
        status: ``holds``, ``broken`` or ``not tried``.
        why: how the law was tried, what breaks it, or why it was not tried.
        size: largest difference, relative to the largest value of its tensor; None if not tried.
        limit: largest difference that rounding explains; None if not tried.
        witness: the element that shows a broken law; None otherwise.
        purpose: what breaks a law on purpose in modules that are right; "" if the law holds, or nothing is known to.
    """

    name: str
    status: LawStatus
    why: str
    size: float | None = None
    limit: float | None = None
    witness: Witness | None = None
    purpose: str = ""

    def __str__(self) -> str:
        line = f"{self.name}: {self.status}: {self.why}"
        return f"{line}: {self.witness}" if self.witness else line


@dataclasses.dataclass(frozen=True)
class LawsReport:
    """Result of `attn_bridge.parity.laws`.

    Attributes:
        laws: one verdict per law, in the order in which they were tried.
        name: class of the module, or name of the function.
        kind: kind of side: ``torch module``, ``NNX module``, ``Linen module``, ``torch function`` or ``JAX function``.
        dtype: precision in which the laws were tried.
        notes: remarks for the reader.
        seed: seed of the drawn weights and inputs.
        environment: versions, devices and precision switches.
        seconds: how long it took.
        command: the command to run again, "" when called from Python.
    """

    laws: list[LawVerdict]
    name: str = ""
    kind: str = ""
    dtype: str = "float64"
    notes: list[str] = dataclasses.field(default_factory=list)
    seed: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    command: str = ""

    @property
    def broken(self) -> list[LawVerdict]:
        """The broken laws."""
        return [law for law in self.laws if law.status == "broken"]

    @property
    def passed(self) -> bool:
        """Whether no law is broken, and at least one was tried."""
        return not self.broken and any(law.status == "holds" for law in self.laws)

    def summary(self) -> str:
        """Return the number of laws by status in one line."""
        counts = {status: sum(law.status == status for law in self.laws) for status in ORDER}
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.name} ({self.kind}): {numbers}, in {self.dtype}, {self.seconds:.1f} s"

    def explain(self) -> str:
        """Return the text of an exception: the summary and the broken laws with their witnesses."""
        lines = [self.summary(), *(f"  {law}" for law in self.broken)]
        return "\n".join(lines + ([f"  again: {self.command}"] if self.command else []))

    def raise_for_broken(self) -> LawsReport:
        """Return the report if no law is broken.

        Raises:
            LawsError: (an AssertionError) with the broken laws.
        """
        __tracebackhide__ = True  # pytest shows the line of the test that calls this
        if self.broken:
            raise LawsError(self)
        return self

    def __str__(self) -> str:
        width = max((len(law.name) for law in self.laws), default=0)
        lines = [self.summary()]
        indent = " " * (width + 15)
        for law in sorted(self.laws, key=lambda law: ORDER.index(law.status)):
            text = f"{law.why}: {law.witness}" if law.witness else law.why
            first = f"  {law.name:<{width}}  {law.status:<9}  "
            lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
        lines += [f"note: {note}" for note in self.notes]
        for note in self._meant():
            lines += textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines + ([f"again: {self.command}"] if self.command else []))

    def _meant(self) -> list[str]:
        """Return a remark per broken law that right modules may break on purpose."""
        advice = "keep an original that means it; a port must break it alike, which compare shows"
        return [f"{law.name} can be broken on purpose ({law.purpose}): {advice}" for law in self.broken if law.purpose]

    def to_json(self, path: str | Path | None = None) -> JsonObject:
        """Return the report as JSON-ready data, and write it to `path` if one is given; infinities become null.

        Raises:
            ValueError: the file cannot be written.
        """
        from ..rendering.json import as_json

        return as_json(self, path, SCHEMA)
