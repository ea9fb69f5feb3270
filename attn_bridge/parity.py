"""Parity: the rule that decides whether two implementations compute the same, and the calls that apply it.

- `compare(first, second, inputs)`: judge any two sides, modules or functions
- `function(f, weights)`: a pure function of torch or JAX as a side
- `laws(module, inputs)`: judge one side alone by laws
- `as_precise(got, trusted, oracle)`: judge one tensor by three arrays
- `record(module)`: store the calls of a module, to compare a port on them
- `logprobs(first, second)`: judge the log-probabilities of two whole models
- `train(torch_module, flax_module, data)`: judge whether a pair trains alike
- `check()`, `check_model(folder)`: judge our own variants, or a whole model block by block
- `mutate()`, `mutate_mesh({"tensor": 2})`: measure the judge with planted faults, of many devices too; in a clone
- `strict()`: a context in which no framework rounds more than it must

The judge is the package `attn_parity`, in a layer above this package; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = [
    "CheckReport",
    "LawsError",
    "LawsReport",
    "LogprobsReport",
    "ModelReport",
    "MutationReport",
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
    "mutate",
    "mutate_mesh",
    "record",
    "strict",
    "train",
]

if TYPE_CHECKING:
    from attn_parity import (
        CheckReport,
        LawsError,
        LawsReport,
        LogprobsReport,
        ModelReport,
        ParityError,
        Precision,
        Recording,
        Report,
        TensorVerdict,
        TrainingReport,
        as_precise,
        assert_as_precise,
        check,
        check_model,
        compare,
        function,
        laws,
        logprobs,
        record,
        strict,
        train,
    )
    from fault_lab.driver import mutate
    from fault_lab.mesh.driver import mutate_mesh
    from fault_lab.report import MutationReport

FAULT_LAB = "fault_lab"
"""The package that plants faults; a clone of the repository has it, an installed distribution has not."""

ABSENT = f"planting faults takes the package {FAULT_LAB}, which only a clone of the repository has: run it there"

_PLANTING = {
    "MutationReport": "report",
    "mutate": "driver",
    "mutate_mesh": "mesh.driver",
}


def require_fault_lab() -> None:
    """Check that the package that plants faults can be imported; otherwise name its location.

    Raises:
        ImportError: it can't be imported.
    """
    if importlib.util.find_spec(FAULT_LAB) is None:
        raise ImportError(ABSENT)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _PLANTING:
        if importlib.util.find_spec(FAULT_LAB) is None:
            return _absent  # raises when it is called: `import *` and tools that look at every name go on
        return getattr(importlib.import_module(f"{FAULT_LAB}.{_PLANTING[name]}"), name)
    if name in __all__:
        return getattr(importlib.import_module("attn_parity"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _absent(*_: object, **__: object) -> NoReturn:
    """Refuse the call: the package that plants faults is not installed.

    Raises:
        ImportError: always.
    """
    raise ImportError(ABSENT)


def __dir__() -> list[str]:
    return sorted(__all__)
