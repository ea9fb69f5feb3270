"""Pickles read without executing anything, and written byte for byte the same for the same values."""

from .flat import Plain, read_pickle
from .machine import STEPS, STORAGES, TORCH_DTYPES, Machine, Record, Storage, Strided
from .writing import Pickler

__all__ = [
    "STEPS",
    "STORAGES",
    "TORCH_DTYPES",
    "Machine",
    "Pickler",
    "Plain",
    "Record",
    "Storage",
    "Strided",
    "read_pickle",
]
