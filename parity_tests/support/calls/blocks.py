"""Configurations of the block of `fault_lab.planted.mutants` that tests look for."""

from __future__ import annotations

from collections.abc import Callable

from fault_lab.planted.mutants import BlockConfig, draw_config, find_seed


def find_config(start: int, wanted: Callable[[BlockConfig], bool]) -> BlockConfig:
    """Return the first configuration from the seed `start` on that is wanted."""
    return draw_config(find_seed(start, lambda seed: wanted(draw_config(seed))))
