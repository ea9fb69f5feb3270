"""Carrying a plan out in one process: `conversion` writes, `checks` is asked before, `accompanying` goes with it."""

from .accompanying import accompany, config_beside
from .checks import (
    MIN,
    budget_of,
    check_dropped,
    check_kept,
    check_ties,
    cuts,
    digest_of,
    kept_problems,
    least_memory,
    stamps,
)
from .conversion import Progress, Result, carry_out, write_all

__all__ = [
    "MIN",
    "Progress",
    "Result",
    "accompany",
    "budget_of",
    "carry_out",
    "check_dropped",
    "check_kept",
    "check_ties",
    "config_beside",
    "cuts",
    "digest_of",
    "kept_problems",
    "least_memory",
    "stamps",
    "write_all",
]
