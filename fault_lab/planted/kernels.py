"""The implementation of attention of each side of a trial, drawn from its seed apart from everything else.

A verdict must not depend on how either side computes attention. So each side draws an order of all implementations that
its framework has, ours and others'; in every call the first of them that supports the call serves it. The serving
implementation thus follows from the seed and the machine. The numbers of a trial do not depend on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from attn_bridge.backends import Framework

OWN_FORMULA = "formula"
"""The block's own code, which faults are planted into; it is drawn like a kernel where possible."""


class Kernel(Protocol):
    """An implementation of attention, as the modules of ``implementations`` are."""

    def unsupported(self, call: Any) -> str | None:
        """Return why it can't serve a call; None if it can."""

    def attend(self, call: Any) -> Any:
        """Return the context ``(B, T, H, Dv)``."""


class Order:
    """Kernels of one side in the order in which they are asked.

    Args:
        kernels: by name, those to be asked first in front; `OWN_FORMULA` has none.
    """

    def __init__(self, kernels: Mapping[str, Kernel | None]):
        self._kernels = dict(kernels)
        self._served: dict[str, None] = {}

    @property
    def first(self) -> str:
        """Name of the kernel that is asked first; "" where there is none."""
        return next(iter(self._kernels), "")

    @property
    def served(self) -> list[str]:
        """Names of the kernels that served a call so far, in the order in which they first did."""
        return list(self._served)

    def choose(self, call: Any) -> Kernel:
        """Return the first kernel that supports a call, and note that it serves.

        Raises:
            NotImplementedError: none does.
        """
        for name, kernel in self._kernels.items():
            if kernel is not None and kernel.unsupported(call) is None:
                self.serves(name)
                return kernel
        raise NotImplementedError(f"none of {', '.join(self._kernels)} supports this call")

    def serves(self, name: str) -> None:
        """Note that a kernel serves."""
        self._served[name] = None


def draw_order(seed: int, side: Framework, names: Iterable[str]) -> list[str]:
    """Return names in an order that follows from a seed; the order of any two does not depend on the other names.

    Args:
        seed: of the trial.
        side: each side draws another order.
        names: the names.
    """

    def number(name: str) -> float:
        return float(np.random.default_rng([seed, zlib.crc32(f"{side} {name}".encode()), 11]).random())

    return sorted(names, key=number)
