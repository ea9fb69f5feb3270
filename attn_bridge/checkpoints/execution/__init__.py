"""What every conversion does around its tensors: `checks` come before and after, `accompanying` goes with them."""

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

__all__ = [
    "MIN",
    "accompany",
    "budget_of",
    "check_dropped",
    "check_kept",
    "check_ties",
    "config_beside",
    "cuts",
    "digest_of",
    "kept_problems",
    "least_memory",
    "stamps",
]
