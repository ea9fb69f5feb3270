"""The model card of a repository: the model, how to load it, and its parity report.

User text in a card is kept: a push rewrites only the part between two marks, or appends it if the marks are missing.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...printable import printable

BEGIN, END = "<!-- attn-bridge: parity, written by push_to_hub -->", "<!-- attn-bridge: end -->"
TAGS = ("attn-bridge", "safetensors", "pytorch", "jax", "flax")
MOST = 12
"""Maximum rows of a table in the card; the report has all."""
LONGEST = 600
"""Characters of a text from the report."""


def read_report(report: object) -> dict[str, object] | None:
    """Return a parity report as data.

    Args:
        report: the result of `compare`, `check_model`, `check` or `train`, its data, or its JSON file; or None.

    Raises:
        ValueError: its data are not a parity report, or its file can't be read.
        TypeError: it is of another type.
    """
    if report is None:
        return None
    if isinstance(report, str | os.PathLike):
        try:
            data = json.loads(Path(report).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"report {printable(str(report))} can't be read as JSON: {printable(str(error))}"
            ) from None
    elif hasattr(report, "to_json"):
        data = json.loads(json.dumps(report.to_json()))
    elif isinstance(report, Mapping):
        data = dict(report)
    else:
        raise TypeError(f"report must be a parity report, its data or its JSON file, got {type(report).__name__}")
    if not isinstance(data, dict) or not isinstance(data.get("passed"), bool):
        raise ValueError("report holds no parity report: there is no 'passed' in it")
    return data


def write(
    repo_id: str,
    model: str,
    report: Mapping[str, object] | None,
    *,
    before: str | None = None,
    files: Sequence[str] = (),
    license: str | None = None,
) -> str:
    """Return a card.

    Args:
        repo_id: of the repository.
        model: the class that reads it.
        report: as returned by `read_report`.
        before: the existing card; None if missing.
        files: reports in the same repository.
        license: identifier of the weights' licence; None leaves it out.
    """
    part = "\n".join([BEGIN, "", *describe(report, files), "", END])
    if before is None:
        return "\n".join([*_front(license), "", *_about(repo_id, model), "", part, ""])
    if BEGIN not in before:
        return f"{before.rstrip()}\n\n{part}\n"
    start, _, rest = before.partition(BEGIN)
    return f"{start}{part}{rest.partition(END)[2]}"


def _front(license: str | None) -> list[str]:
    head = [f"license: {json.dumps(license)}"] if license else []
    return ["---", *head, "library_name: attn-bridge", "tags:", *(f"- {tag}" for tag in TAGS), "---"]


def _about(repo_id: str, model: str) -> list[str]:
    return [
        f"# {repo_id.rpartition('/')[2]}",
        "",
        f"Weights of attn-bridge's `{model}`, which stands in PyTorch and in Flax NNX and reads them in both:",
        "",
        "```python",
        "import jax_attn",
        "import torch_attn",
        "",
        f'model = torch_attn.{model}.from_pretrained("{repo_id}")',
        f'twin = jax_attn.{model}.from_pretrained("{repo_id}")',
        "```",
        "",
        "`revision=` takes a branch, a tag or a commit.",
    ]


def describe(report: Mapping[str, Any] | None, files: Sequence[str] = ()) -> list[str]:
    """Return a parity report in Markdown, line by line: verdict, first divergence, unequal parts, versions.

    Args:
        report: as returned by `read_report`; None gives the commands that make one.
        files: reports in the same repository, which are linked.
    """
    lines = ["## Parity", ""]
    if report is None:
        return [
            *lines,
            "No parity report came with these weights. `attn-bridge check --model FOLDER --json report.json` makes "
            'one, and `push_to_hub(..., report="report.json")` adds it here.',
        ]
    verdict = report.get("verdict") or ("equal" if report["passed"] else "different")
    lines += [f"**{_plain(verdict)}**: {_plain(_summary(report))}", ""]
    first = report.get("first_divergence") or report.get("first_difference")
    if isinstance(first, Mapping):
        where = first.get("path") or first.get("tensor") or "the module itself"
        lines += [
            f"First difference: {_code(where)}. {_plain(first.get('hint') or first.get('message') or '')}".rstrip(),
            "",
        ]
    lines += _table(report)
    notes = [one for one in report.get("notes") or () if isinstance(one, str)][:MOST]
    lines += [*(f"- {_plain(note)}" for note in notes), *([""] if notes else [])]
    environment = report.get("environment")
    if isinstance(environment, Mapping) and environment:
        lines += [
            "Judged with " + ", ".join(f"{_plain(name)} {_plain(one)}" for name, one in environment.items()) + ".",
            "",
        ]
    if report.get("command"):
        lines += [f"Run it again: {_code(report['command'])}", ""]
    if files:
        lines.append(f"The whole report: {', '.join(f'[{name}]({name})' for name in files)}.")
    while not lines[-1]:
        lines.pop()
    return lines


def _summary(report: Mapping[str, object]) -> str:
    if isinstance(report.get("summary"), str):
        return re.sub(rf"^{re.escape(str(report.get('verdict')))}: ", "", str(report["summary"]))
    parts = report.get("parts")
    if isinstance(parts, list):
        equal = sum(isinstance(one, Mapping) and one.get("verdict") == "equal" for one in parts)
        against = "transformers" if report.get("oracle") == "transformers" else "each other"
        return f"{equal} of {len(parts)} parts of the model equal; torch and Flax were judged against {against}"
    return "see the report"


def _table(report: Mapping[str, object]) -> list[str]:
    """Return a table of verdicts: of the parts of a model, or counted over tensors or a variant's comparisons."""
    parts, tensors, cells = report.get("parts"), report.get("tensors"), report.get("cells")
    if isinstance(parts, list):
        rows = [(_code(one.get("name")), _plain(one.get("verdict")), _code(one.get("place"))) for one in _maps(parts)]
        rows.sort(key=lambda row: row[1] == "equal")
        return _rows(("part", "verdict", "first divergence"), rows)
    if isinstance(cells, list):
        counts = Counter((str(one.get("variant")), str(one.get("verdict"))) for one in _maps(cells))
        verdict_rows = [(_code(name), _plain(verdict), str(count)) for (name, verdict), count in counts.items()]
        return _rows(("variant", "verdict", "comparisons"), sorted(verdict_rows, key=lambda row: row[1] == "equal"))
    if isinstance(tensors, list):
        kept = sorted(_maps(tensors), key=lambda tensor: tensor.get("verdict") == "equal")
        table_rows = [
            (_code(one.get("name")), _plain(one.get("verdict")), _number(one.get("relative"))) for one in kept
        ]
        return _rows(("tensor", "verdict", "relative difference in float64"), table_rows)
    return []


def _maps(values: Sequence[object]) -> list[Mapping[str, object]]:
    return [one for one in values if isinstance(one, Mapping)]


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    more = [f"and {len(rows) - MOST} more in the report", ""] if len(rows) > MOST else []
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows[:MOST])]
    return [*lines, "", *more]


def _number(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _plain(value: object) -> str:
    """Return text that Markdown shows as it is, in one line."""
    text = html.escape(" ".join(printable(str(value or ""), LONGEST).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def _code(value: object) -> str:
    text = " ".join(printable(str(value or ""), LONGEST).split()).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""
