"""Quantised originals as floating point: MXFP4, and float8 with scales, dequantised as their bytes are read.

A quantised tensor is two in the file: small numbers, and scales that many of them share. `find` pairs them by name,
`Dequantised` reads them as one tensor of floating point, and `in_file_order` makes a plan read from that.
"""

from .moves import in_file_order, rounding_losses
from .pairs import QuantisedTensor, find, first_of, unquantised
from .reader import Dequantised

__all__ = ["Dequantised", "QuantisedTensor", "find", "first_of", "in_file_order", "rounding_losses", "unquantised"]
