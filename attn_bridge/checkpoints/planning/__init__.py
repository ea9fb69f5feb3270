"""Plans of conversions, made from headers alone: `making` makes a plan; `plans` has its classes and checks."""

from .making import TWINS, WHOLE, kept_name, make, with_kept
from .plans import DTYPES, IDLE, Plan, TargetTensor, check_dtype, evened, part_of, parts_of

__all__ = [
    "DTYPES",
    "IDLE",
    "TWINS",
    "WHOLE",
    "Plan",
    "TargetTensor",
    "check_dtype",
    "evened",
    "kept_name",
    "make",
    "part_of",
    "parts_of",
    "with_kept",
]
