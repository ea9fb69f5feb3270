"""Where two sides first part: submodules fed the same numbers, and the code between them."""

from ..hints import Evidence
from .remainder import Remainder, remainder
from .search import Aim, Localisation, find, find_in_calls

__all__ = ["Aim", "Evidence", "Localisation", "Remainder", "find", "find_in_calls", "remainder"]
