"""Shared by both backends: specs, masks, weight rules and the judge. Importing it imports no framework.

- `transfer(source, target)`: copy a torch module's weights into its Flax twin, or back
- `torch_to_flax(arrays, rules)`, `flax_to_torch(arrays, rules)`: the same on dictionaries of NumPy arrays
- `digests(module)`: a digest per tensor, in any layout's names, sharded or not
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "MissingBackendError",
    "Rule",
    "Rules",
    "TransferReport",
    "WeightsMismatchError",
    "checkpoints",
    "digests",
    "explain_attention",
    "families",
    "flax_to_torch",
    "layouts",
    "masks",
    "parity",
    "specs",
    "torch_to_flax",
    "transfer",
    "viz",
]

if TYPE_CHECKING:
    from . import checkpoints, masks, parity, specs, viz
    from .backends import MissingBackendError, explain_attention
    from .checkpoints.live import digests
    from .models import families, layouts
    from .module_weights import TransferReport, transfer
    from .weights import Rule, Rules, WeightsMismatchError, flax_to_torch, torch_to_flax

_HOMES = {
    "MissingBackendError": "backends",
    "Rule": "weights",
    "Rules": "weights",
    "TransferReport": "module_weights",
    "WeightsMismatchError": "weights",
    "digests": "checkpoints.live",
    "explain_attention": "backends",
    "families": "models",
    "flax_to_torch": "weights",
    "layouts": "models",
    "torch_to_flax": "weights",
    "transfer": "module_weights",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``import attn_bridge`` stays fast."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
