"""The devices that share a module: what `parallelize` puts on every part of it."""

from __future__ import annotations

import dataclasses

from ..implementations import KernelCall
from ..signatures.attention import Output
from . import attention
from .devices import Devices


@dataclasses.dataclass(frozen=True)
class Sharding(Devices):
    """Devices that compute attention together."""

    def attend(self, call: KernelCall, implementation: str | None = None) -> Output:
        """Like `functional.dot_product_attention`, computed by all devices."""
        return attention.attend(self, call, implementation)
