"""The report of `fault_lab.driver` as a Markdown page; every number in it is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .gallery import HEADINGS, summarised
from .planted.faults import find_fault
from .planted.usual_rules import USUAL_RULES
from .trials import count_rules, upper_bound

if TYPE_CHECKING:
    from .report import MutationReport

HEAD = """# How good the judge is

Every fault below is planted into one side of a transformer block that stands in torch and in Flax
(`mutants.py` in both rooms of `fault_lab/frameworks/`): grouped heads, rotary positions, norms on query and
key, windows, padding, soft-cap, sinks, biases, an MLP, each there or not by the seed; or into one side of one of our
modern variants, which then runs by another config or on weights read in another order. Then
`attn_bridge.parity.compare` judges the pair as it would a user's. Right pairs, the same ones and others, show how often
it objects for nothing. Their numbers were used for no constant of the judge.

A verdict may not depend on how attention is computed. Each side runs it by an implementation that the seed draws from
those of its framework here, ours and others' (the plain formula, fused and block-wise kernels, those of torch, JAX and
Flax); the first of the order that supports a call serves it. A side with a fault in its attention keeps the code that
goes wrong. `config.kernels` in the JSON says what ran.

Beside the judge stand the usual rules, on the same float32 numbers, with the weights that the modules hold. `2 / 5`
says how many pairs a rule rejects by their outputs, and how many by outputs and gradients.
"""

FAULTS = """## Faults

`judge` is how many plants were detected, of those that show. Whether one shows is measured: the right and the wrong
function of the same framework run in float64 on the same numbers, and in float32 where float64 sees nothing.
`invariance` is a plant that changes neither an output nor a gradient, and that the judge rightly calls equal. A dropped
key bias changes nothing either where softmax cancels it; the judge tells it all the same, because nothing reads it.
"""

GALLERY = """## Gallery

Pairs in the styles that people use, right and with faults of a port ([docs/gallery.md](gallery.md)), each judged as it
is. `right` is `yes` where verdict and place are as they should be, `place` where a fault is seen and said to be
elsewhere, `NO` where the verdict is wrong.
"""


LATER = """## Later faults

These came after the run above, and were planted in the same way.
"""


def as_markdown(report: MutationReport) -> str:
    """Return the page; of faults chosen by name, their section alone."""
    if report.only:
        return _later(report)
    alarms = sum(one.outcome == "false alarm" for one in report.right)
    visible = [one for one in report.planted if one.visible]
    detected = sum(one.outcome == "detected" for one in visible)
    parts = [
        HEAD,
        f"<!-- made by: {report.command} -->",
        f"`{report.command}`: {report.summary()}.",
        ", ".join(f"{name} {value}" for name, value in report.environment.items()) + ".",
        "| usual rule | what it says |\n|---|---|\n"
        + "\n".join(f"| {rule.name} | {rule.about} |" for rule in USUAL_RULES),
        "## False alarms",
        f"{alarms} of {len(report.right)} right pairs were objected to; with 95 % confidence the rate is below "
        f"{upper_bound(alarms, len(report.right)):.2%}.",
        _table(
            ["right pairs", "judge", *(rule.name for rule in USUAL_RULES)],
            [[name, judged, *_spoken(rules)] for name, judged, rules in report.alarm_rows()],
        ),
        FAULTS,
        _table(
            ["fault", "what goes wrong", "judge", "verdict", *(rule.name for rule in USUAL_RULES)],
            [
                *map(_fault_row, report.rows()),
                ["all", "", f"{detected}/{len(visible)}", "", *_spoken(count_rules(visible))],
            ],
        ),
    ]
    if report.gallery:
        rows = [[cell.replace("|", "/") for cell in one.row()] for one in report.gallery]
        made_by = f"<!-- gallery made by: {report.command} -->"
        seconds = sum(one.seconds for one in report.gallery)
        summary = f"`{report.command}`: {summarised(report.gallery)}, {seconds:.0f} s of comparisons."
        parts += [GALLERY, made_by, summary, _table(HEADINGS, rows)]
    if report.lines():
        parts += ["## What is not as it should be", "```\n" + "\n".join(report.lines()) + "\n```"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _later(report: MutationReport) -> str:
    parts = [
        LATER,
        f"<!-- later faults made by: {report.command} -->",
        f"`{report.command}`: {report.summary()}.",
        _table(
            ["fault", "what goes wrong", "judge", "verdict", *(rule.name for rule in USUAL_RULES)],
            [*map(_fault_row, report.rows())],
        ),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _fault_row(row: tuple[str, str, str, list[str]]) -> list[str]:
    name, judged, verdicts, rules = row
    return [f"`{name}`", find_fault(name).about, judged, verdicts, *_spoken(rules)]


def _spoken(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", " / ") for cell in cells]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
