"""All faults that `mutate` plants: those of the block, and those of ports of our modern variants."""

from __future__ import annotations

from .block_faults import BLOCK_FAULTS, Fault
from .port_faults import PORT_FAULTS

FAULTS: tuple[Fault, ...] = (*BLOCK_FAULTS, *PORT_FAULTS)

BY_NAME = {fault.name: fault for fault in FAULTS}


def find_fault(name: str) -> Fault:
    """Return a fault.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in BY_NAME:
        raise ValueError(f"fault ({name}) must be one of {', '.join(BY_NAME)}")
    return BY_NAME[name]
