"""Where two sides first part: submodules fed the same numbers, and the code between them."""

from ..hints import Evidence
from .remainder import Remainder, remainder
from .search import Aim, Found, find, find_in_calls

__all__ = ["Aim", "Evidence", "Found", "Remainder", "find", "find_in_calls", "remainder"]
