"""Parity: the rule that says whether two implementations compute the same, and what applies it.

attn_bridge.parity.compare(first, second, inputs)               judge any two sides: modules, or functions
attn_bridge.parity.function(f, weights)                         a pure function of torch or JAX as a side
attn_bridge.parity.train(torch_module, flax_module, data)       judge whether a pair trains alike
attn_bridge.parity.check()                                      judge our own variants
attn_bridge.parity.check_model(folder)                          judge a whole model block by block
attn_bridge.parity.mutate()                                     measure the judge with planted faults
attn_bridge.parity.mutate_mesh({"tensor": 2})                   the same with faults of many devices
attn_bridge.parity.strict()                                     a context in which no framework rounds more than it must
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "CheckReport",
    "ModelReport",
    "MutationReport",
    "ParityError",
    "Report",
    "TensorVerdict",
    "TrainingReport",
    "check",
    "check_model",
    "compare",
    "function",
    "mutate",
    "mutate_mesh",
    "strict",
    "train",
]

if TYPE_CHECKING:
    from .check.matrix import check
    from .check.model.report import ModelReport
    from .check.model.walk import check_model
    from .check.report import CheckReport
    from .compare.driver import compare
    from .compare.results.findings import TensorVerdict
    from .compare.results.report import ParityError, Report
    from .compare.sides.function import function
    from .mutation.driver import mutate
    from .mutation.mesh.driver import mutate_mesh
    from .mutation.report import MutationReport
    from .settings.precision import strict
    from .training.driver import train
    from .training.report import TrainingReport

_HOMES = {
    "CheckReport": "check.report",
    "ModelReport": "check.model.report",
    "MutationReport": "mutation.report",
    "ParityError": "compare.results.report",
    "Report": "compare.results.report",
    "TensorVerdict": "compare.results.findings",
    "TrainingReport": "training.report",
    "check": "check.matrix",
    "check_model": "check.model.walk",
    "compare": "compare.driver",
    "function": "compare.sides.function",
    "mutate": "mutation.driver",
    "mutate_mesh": "mutation.mesh.driver",
    "strict": "settings.precision",
    "train": "training.driver",
}


class _Package(ModuleType):
    """A package whose public names stay what they are when a module of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
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
