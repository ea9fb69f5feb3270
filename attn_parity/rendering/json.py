"""The report as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attn_bridge import whole_files as files
from attn_bridge.whole_files import JsonObject

from ..results.findings import SCHEMA, Divergence, ModuleNode, PairedParameter, TensorVerdict, Worst

if TYPE_CHECKING:
    from ..laws.report import LawsReport
    from ..results.report import Report
    from ..settings.doctor import Diagnosis
    from ..training.report import TrainingReport

FORMER: dict[type, tuple[str, ...]] = {
    Worst: ("torch", "flax"),
    TensorVerdict: ("flax_name", "torch_used", "flax_used", "torch_ulps", "flax_ulps"),
    PairedParameter: ("torch", "flax"),
    ModuleNode: ("flax_path", "torch_type", "flax_type", "amplification"),
    Divergence: ("flax_path",),
}
"""Properties that are written in addition to the fields: former names, for readers of older reports, and growth."""


def as_json(
    report: Report | TrainingReport | LawsReport | Diagnosis, path: str | Path | None = None, schema: int = SCHEMA
) -> JsonObject:
    """Return the report as JSON-ready data: every field but the pictures; non-finite numbers become null.

    Args:
        report: a report of `compare`, `train`, `laws` or `doctor`.
        path: file to write it to as well.
        schema: version of its form.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    data: dict[str, object] = {"schema": schema, "passed": report.passed, "summary": report.summary()}
    for field in dataclasses.fields(report):
        if field.name != "pictures":
            data[field.name] = _plain(getattr(report, field.name))
    data |= {name: getattr(report, name) for name in ("torch_name", "flax_name") if hasattr(report, name)}
    if target is not None:
        files.write(target, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return data


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in (*names, *FORMER.get(type(value), ()))}
    return value
