"""The random streams of both frameworks in NumPy: JAX's Threefry and torch's Mersenne Twister."""

from . import fused
from .fused import multiply_add
from .threefry import (
    PARITY,
    ROTATIONS,
    as_shape,
    bernoulli,
    bits,
    check_fold_in,
    check_single,
    fold_in,
    key,
    split,
    threefry2x32,
    threefry_words,
    uniform,
)
from .torch_generator import TorchGenerator

__all__ = [
    "PARITY",
    "ROTATIONS",
    "TorchGenerator",
    "as_shape",
    "bernoulli",
    "bits",
    "check_fold_in",
    "check_single",
    "fold_in",
    "fused",
    "key",
    "multiply_add",
    "split",
    "threefry2x32",
    "threefry_words",
    "uniform",
]
