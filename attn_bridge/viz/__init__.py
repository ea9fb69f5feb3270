"""Pictures of attention, the same for both backends; they are drawn with the extra ``viz``.

attn_bridge.viz.heatmap(module, x)                  attention weights per head, of a torch or a Flax module
attn_bridge.viz.heatmap(module, x, second=twin)     both and their difference
attn_bridge.viz.heatmap(weights)                    weights that you have
attn_bridge.viz.weights(module, x)                  the numbers alone
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Heatmap", "heatmap", "weights"]

if TYPE_CHECKING:
    from .drawing import Heatmap, heatmap
    from .reading import weights

_HOMES = {"Heatmap": "drawing", "heatmap": "drawing", "weights": "reading"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
