"""PEFT's LoRA adapters: merged into their base as its bytes are read, in float32, rounded once.

`LoraAdapter.open` reads an adapter's folder and refuses other methods by name, `pairing` finds the base's tensor for
each of its tensors, and `Merged` is the base with the adapter in it.
"""

from .reader import LoraAdapter, Merged, untied
from .unmerged import check_base, without_adapter

__all__ = ["LoraAdapter", "Merged", "check_base", "untied", "without_adapter"]
