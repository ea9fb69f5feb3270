"""The judge: decides whether two implementations compute the same. `attn_bridge.parity` exports its public names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "CheckReport",
    "LawsError",
    "LawsReport",
    "LogprobsReport",
    "ModelReport",
    "ParityError",
    "Precision",
    "Recording",
    "Report",
    "TensorVerdict",
    "TrainingReport",
    "as_precise",
    "assert_as_precise",
    "check",
    "check_model",
    "compare",
    "function",
    "laws",
    "logprobs",
    "record",
    "strict",
    "train",
]

if TYPE_CHECKING:
    from .check.matrix import check
    from .check.model.report import ModelReport
    from .check.model.walk import check_model
    from .check.report import CheckReport
    from .compare.driver import compare
    from .laws.driver import laws
    from .laws.report import LawsError, LawsReport
    from .logprobs.judge import LogprobsReport, logprobs
    from .recorded.calls import Recording, record
    from .results.findings import TensorVerdict
    from .results.precision import Precision
    from .results.report import ParityError, Report
    from .settings.precision import strict
    from .sides.function import function
    from .training.driver import train
    from .training.report import TrainingReport
    from .verdict.arrays import as_precise, assert_as_precise

_HOMES = {
    "CheckReport": "check.report",
    "LawsError": "laws.report",
    "LawsReport": "laws.report",
    "LogprobsReport": "logprobs.judge",
    "ModelReport": "check.model.report",
    "ParityError": "results.report",
    "Precision": "results.precision",
    "Recording": "recorded.calls",
    "Report": "results.report",
    "TensorVerdict": "results.findings",
    "TrainingReport": "training.report",
    "as_precise": "verdict.arrays",
    "assert_as_precise": "verdict.arrays",
    "check": "check.matrix",
    "check_model": "check.model.walk",
    "compare": "compare.driver",
    "function": "sides.function",
    "laws": "laws.driver",
    "logprobs": "logprobs.judge",
    "record": "recorded.calls",
    "strict": "settings.precision",
    "train": "training.driver",
}


class _Package(ModuleType):
    """A package whose public names survive the import of a module with the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module `compare` would put it here, in place of the function.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Load a public name on first use: pytest loads the plugin of this package in every run."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
