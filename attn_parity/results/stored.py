"""Reports that were written as JSON, as objects again: those of another process, which may be forged."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from .changes import Data
from .findings import Allowance, Candidate, Divergence, TensorVerdict, Worst
from .report import Report


def report_of(data: Data) -> Report:
    """Return a report of `compare` from its JSON, without the tree, the pairing and the environment.

    Raises:
        TypeError: a field is missing, or is of another kind.
    """
    first = data.get("first_divergence")
    fields = {
        **_fields(Report, data),
        "tensors": [_tensor(each) for each in data["tensors"]],
        "first_divergence": _divergence(first) if isinstance(first, Mapping) else None,
        "allowed": [Allowance(**_fields(Allowance, each)) for each in data.get("allowed", ())],
        **dict.fromkeys(("tree", "changes")),
        **{name: [] for name in ("pairing", "dtype_leaks", "pictures")},
    }
    return Report(**fields)


def _tensor(data: Data) -> TensorVerdict:
    worst = data.get("worst")
    element = None
    if isinstance(worst, Mapping):
        number = {key: float("nan") if worst.get(key) is None else worst[key] for key in ("first", "second")}
        element = Worst(**{**_fields(Worst, worst), **number, "index": tuple(worst["index"])})
    return TensorVerdict(**{**_fields(TensorVerdict, data), "worst": element, "shape": tuple(data["shape"])})


def _divergence(data: Data) -> Divergence:
    between = data.get("between")
    candidates = tuple(
        Candidate(each["path"], each["second_path"], tuple(each["between"]) if each.get("between") else None)
        for each in data.get("candidates", ())
    )
    return Divergence(
        **{**_fields(Divergence, data), "between": tuple(between) if between else None, "candidates": candidates}
    )


def _fields(kind: type, data: Data) -> Data:
    """Return the fields of a dataclass that the data has."""
    return {name: data[name] for name in inspect.signature(kind).parameters if name in data}
