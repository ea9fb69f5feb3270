"""How much work some code does, counted in calls of functions, which a busy machine does not change."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any


def count_calls(action: Callable[[], Any]) -> int:
    """Return how many functions, of Python or C, are called while `action` runs."""
    profile = cProfile.Profile()
    profile.runcall(action)
    return pstats.Stats(profile).total_calls
