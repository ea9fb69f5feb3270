"""Pickles read without executing anything, and written byte for byte the same for the same values."""

from .calls import STORAGES, TORCH_DTYPES, Record, Storage, Strided
from .flat import PlainValues, read_pickle
from .machine import STEPS, Machine
from .writing import Pickler

__all__ = [
    "STEPS",
    "STORAGES",
    "TORCH_DTYPES",
    "Machine",
    "Pickler",
    "PlainValues",
    "Record",
    "Storage",
    "Strided",
    "read_pickle",
]
