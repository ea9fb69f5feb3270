"""Next steps of an agent after a report of `compare`, which its tools allow.

In: a report. Out: one sentence. The server runs in eval mode and takes no options but those of its tools, so a step
names the command line where only that can do it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..rendering.text import worst_first
from ..results.changes import Data
from ..results.findings import TensorVerdict
from ..results.report import Report

AGAIN = "mend the second side, and call compare again"

_ARGUMENT = re.compile(r"the .* `(?P<name>.+)` \(you gave none\)")
_OTHERS = re.compile(r"another (?P<name>.+?): .* everywhere, so that a side may ignore it")
_ROWS = re.compile(r"\d+ of \d+ rows of (?P<name>.+): no gradient reached .*")
_TRAIN = re.compile(
    r"(dropout|statistics|train mode) of .*: (off in eval mode|those of a batch are .*|its code asks .*)"
)

NAMES = 3
"""Most names in a step."""


def after_comparison(report: Report, name: str) -> str:
    """Return the step after a report of `compare`, which is stored as `name`."""
    if report.verdict == "equal":
        return _after_equal(report)
    if report.verdict == "inconclusive":
        return "change the inputs or the sides as the summary asks, and call compare again"
    first = report.first_divergence
    if first is not None and first.between is not None:  # no submodule or tensor says more of it
        return f"compare the code of both sides {first.place}, {AGAIN}"
    losing = _losing(report)
    if losing == report.first_label and losing != report.second_label:
        return (
            "leave the second side as it is if the first is its original, which loses the precision, and report that; "
            "else mend the first side, and call compare again"
        )
    if first is not None and first.path:
        return f"call explain with report={name!r} and path={first.path!r}, {AGAIN}"
    failures = worst_first(report.failures)
    idle = next((tensor for tensor in failures if "does not use it" in tensor.message), None)
    if idle is not None:
        parameter = idle.name.removeprefix("grad ")
        return f"{idle.message}: use {parameter} on both sides or on none, and compare again"
    if first is not None:
        return f"compare the code of both sides in {first.place}, {AGAIN}"
    if not failures:
        return "see the summary for the difference, mend the second side or its inputs, and call compare again"
    return f"call explain with report={name!r} and path={failures[0].name!r}, {AGAIN}"


def _losing(report: Report) -> str:
    """Return the label of the side that loses precision; "" if the sides differ, or both lose."""
    labels = {tensor.side for tensor in report.failures if tensor.verdict == "precision" and tensor.side}
    [label] = labels if report.verdict == "precision" and len(labels) == 1 else {""}
    return {"first": report.first_label, "second": report.second_label}.get(label, label)


def _after_equal(report: Report) -> str:
    """Return the step after a verdict `equal`: to the parts that are not covered, by whatever can reach them."""
    steps = list(_steps_to_uncovered(report))
    if steps:
        return f"where the port will be used so, {'; '.join(steps)}; else done"
    return "done; call compare with other dtypes or inputs for more evidence"


def _steps_to_uncovered(report: Report) -> Iterator[str]:
    """Yield the steps that reach uncovered parts: other inputs, train mode, or a look at unused parameters."""
    lines = report.unreached
    for pattern, text in (
        (_ARGUMENT, "call compare with an example_inputs() that gives {} by name"),
        (_OTHERS, "call compare with inputs in which {} differs from place to place"),
        (_ROWS, "call compare with ids that read all rows of {}"),
    ):
        names = list(dict.fromkeys(match["name"] for line in lines if (match := pattern.fullmatch(line))))
        if names:
            yield text.format(_listed(names))
    if any(_TRAIN.fullmatch(line) for line in lines):
        yield "run attn-bridge compare --train in a shell, as this tool has no train mode"
    if report.unexercised:
        yield (
            f"see in the code of both sides whether anything reads {_listed(report.unexercised)} (an unused parameter "
            "has no inputs that reach it)"
        )


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - NAMES} more"] * (len(names) > NAMES)
    words = [*names[:NAMES], *more]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ---- after explain


def after_tensor(tensor: TensorVerdict, node: Data | None, report: Report, name: str) -> str:
    """Return the step after one tensor that is not equal was explained.

    Args:
        tensor: the tensor.
        node: the submodule that it belongs to; None if unknown.
        report: the report that it is of.
        name: name of the report.
    """
    if tensor.allowed:
        return elsewhere(report, name, f"{tensor.name} is allowed to differ")
    if tensor.side is not None and tensor.side in ("first", report.first_label):
        return after_comparison(report, name)
    own = "" if node is None else str(node.get("path") or "")
    first = report.first_divergence
    if own and node is not None and node.get("verdict") == "equal" and first is not None:
        return elsewhere(report, name, f"{own} computes the same when fed the same numbers: mend nothing in it")
    if first is not None and (first.path != own or first.between is not None):
        return elsewhere(report, name, "begin where the sides part first")
    return f"compare the code of both sides{f' in {own}' if own else ''}, {AGAIN}"


def after_submodule(node: Data, report: Report, name: str) -> str:
    """Return the step after a submodule was explained."""
    path, first = node.get("path"), report.first_divergence
    if first is not None and first.between is not None and first.path == path:
        return f"compare the code of both sides {first.place}, {AGAIN}"
    bad = [child for child in node.get("children") or () if child.get("verdict") in ("different", "precision")]
    wrong = next((child for child in bad if child.get("path")), None)
    if wrong is not None:
        return f"call explain with report={name!r} and path={wrong['path']!r}"
    if node.get("verdict") in ("different", "precision") or (first is not None and first.path == path):
        return f"compare the code of both sides in {path or 'the module itself'}, {AGAIN}"
    label = path or "the module"
    if node.get("verdict") == "equal":
        return elsewhere(report, name, f"{label} computes the same when fed the same numbers: mend nothing in it")
    return elsewhere(report, name, f"{label} was not judged alone")


def elsewhere(report: Report, name: str, reason: str) -> str:
    """Return a step to the first divergence, or to the rest of the report, after the reason."""
    if report.verdict in ("equal", "inconclusive"):
        return f"{reason}; {after_comparison(report, name)}"
    first = report.first_divergence
    if first is not None and first.between is not None:
        return f"{reason}; compare the code of both sides {first.place}, {AGAIN}"
    if first is not None and first.path:
        return f"{reason}; call explain with report={name!r} and path={first.path!r}"
    return f"{reason}; {after_comparison(report, name)}"
