"""Quantised originals as floating point: MXFP4, float8, GPTQ, AWQ, compressed-tensors, GGUF, as bytes are read.

A quantised tensor is several in the file: small numbers, and scales that many of them share. `schemes` reads how
config.json describes them, `find` groups them by name, `Dequantised` reads each as one tensor of floating point, and
`in_file_order` makes a plan read from that.
"""

from .moves import TurnedTensors, dequantised_in, in_file_order, is_in_order, notes_of, rounding_losses
from .pairs import QuantisedTensor, first_of, unquantised
from .reader import Dequantised
from .searching import (
    check_blocks,
    check_dropped,
    check_loadable,
    check_plain,
    default_dtype,
    find,
    notes_on_codes,
    notes_on_config,
)

__all__ = [
    "Dequantised",
    "QuantisedTensor",
    "TurnedTensors",
    "check_blocks",
    "check_dropped",
    "check_loadable",
    "check_plain",
    "default_dtype",
    "dequantised_in",
    "find",
    "first_of",
    "in_file_order",
    "is_in_order",
    "notes_of",
    "notes_on_codes",
    "notes_on_config",
    "rounding_losses",
    "unquantised",
]
