"""The page docs/agents.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .trials import RULES

if TYPE_CHECKING:
    from .trials import Outcome

COMMAND = "python -m benchmarks.agents"

HEAD = f"""# Ports and their authors' tests

An agent that ports a module usually writes the test of the port too. Here are ports as agents write them, of 12 kinds
of modules, by hand after public descriptions: right ones, and ones with one or two faults. Each has the test that its
author wrote: a tolerance by feel, on the first weights, and often on the inputs that the author had in mind. Next to it
are three usual rules on the outputs for the same weights and inputs (1e-5: `assert_allclose` with atol = rtol = 1e-5;
1e-2: rtol = 1e-3, atol = 1e-2; mean: the means within 1e-4), and the judge, [`attn-bridge compare`](compare.md).

<!-- made by: {COMMAND} -->

`{COMMAND}`:"""

WITNESSES = """## Witnesses

Where the judge and the author's test disagree, an element shows who is right: its value in the original and in the
port, on the given numbers. `python -m benchmarks.agents WORD` runs the ports whose kind or fault contains a word.
"""


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    environment = outcomes[0].report.environment
    versions = ", ".join(f"{name} {environment[name]}" for name in ("attn-bridge", "torch", "jax", "flax", "numpy"))
    right = [outcome for outcome in outcomes if not outcome.port.fault]
    wrong = [outcome for outcome in outcomes if outcome.port.fault]
    seconds = sum(outcome.report.seconds for outcome in outcomes)
    lines = [HEAD, f"{len(outcomes)} ports, {seconds:.0f} s of judging. Versions: {versions}.", ""]
    lines += [*_row("", "author's test", *RULES, "judge"), "|---|" + "---|" * (len(RULES) + 2)]
    for name, some, accepted in (("wrong ports accepted", wrong, True), ("right ports rejected", right, False)):
        counts = [sum(says == accepted for says in column) for column in zip(*map(_verdicts, some), strict=True)]
        lines += _row(name, *(f"{count} of {len(some)}" for count in counts))
    lines += ["", "## Ports", "", "`+` accepts the port, `-` rejects it.", ""]
    lines += _row("kind", "faults", "author's test", "", *RULES, "judge")
    lines += ["|---|---|---|" + "---|" * (len(RULES) + 2)]
    for outcome in outcomes:
        own, *rest = ("+" if says else "-" for says in _verdicts(outcome))
        kind = outcome.port.kind.replace("_", " ")
        lines += _row(
            kind, outcome.port.fault or "none", outcome.port.test.about, own, *rest[:-1], outcome.report.verdict
        )
    lines += ["", WITNESSES, *_row("kind", "faults", "element", "original", "port", "on"), "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        if outcome.own != outcome.report.passed:
            lines += _row(outcome.port.kind.replace("_", " "), outcome.port.fault or "none", *_witness(outcome))
    return "\n".join(lines) + "\n"


def _verdicts(outcome: Outcome) -> list[bool]:
    return [outcome.own, *outcome.rules.values(), outcome.report.passed]


def _witness(outcome: Outcome) -> tuple[str, ...]:
    """Return the element that differs most; without a difference, the largest share of the allowance."""
    tensor = outcome.witness
    if tensor is None:
        share = max(found.used or 0.0 for found in outcome.report.tensors)
        return f"none: the errors take {share:.0%} of what is allowed", "", "", f"{outcome.report.samples} runs"
    worst = tensor.worst
    assert worst is not None
    at = ", ".join(map(str, worst.index))
    return f"{tensor.name}[{at}]", f"{worst.first:.6g}", f"{worst.second:.6g}", tensor.on


def _row(*cells: str) -> list[str]:
    return ["| " + " | ".join(cells) + " |"]
