"""The report as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compare.report import SCHEMA, ModuleNode, Report
from . import files

if TYPE_CHECKING:
    from ..training.driver import TrainingReport


def as_json(report: Report | TrainingReport, path: str | Path | None = None) -> dict[str, Any]:
    """Return the report as JSON-ready data: every field but the pictures; what is not finite becomes null.

    Args:
        report: what `compare` or `train` found.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    data: dict[str, Any] = {"schema": SCHEMA, "passed": report.passed, "summary": report.summary()}
    for field in dataclasses.fields(report):
        if field.name != "pictures":
            data[field.name] = _plain(getattr(report, field.name))
    if target is not None:
        files.write(target, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        data = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return data | {"amplification": _plain(value.amplification)} if isinstance(value, ModuleNode) else data
    return value
