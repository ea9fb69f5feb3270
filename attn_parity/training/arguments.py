"""Check the arguments of `train`."""

from __future__ import annotations

import math
import numbers
from typing import Any

from attn_bridge import backends

from ..samples import calls

OPTIMIZERS = ("sgd", "momentum", "adamw")
LOSSES = ("mse", "cross_entropy")
DTYPES = (None, "float64")


def check(
    steps: object, optimizer: object, loss: object, lr: object, seed: object, dropout: object, dtype: object
) -> None:
    """Refuse arguments of `train` that can't be used."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps ({steps}) must be a whole number of at least 1")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed ({seed}) must be a whole number of at least 0")
    for what, value, choices in (("optimizer", optimizer, OPTIMIZERS), ("loss", loss, LOSSES)):
        if isinstance(value, str) and value not in choices:
            raise ValueError(f"{what} ({value}) must be one of {', '.join(choices)}, or a pair: torch's, JAX's")
        if not isinstance(value, str) and not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(f"{what} must be a name or a pair: torch's, JAX's; got {type(value).__name__}")
    if isinstance(lr, bool) or not isinstance(lr, numbers.Real) or not 0.0 < float(lr) < math.inf:
        raise ValueError(f"lr ({lr}) must be a positive number")
    if not isinstance(dropout, bool) and not (isinstance(dropout, numbers.Real) and 0.0 <= float(dropout) < 1.0):
        raise ValueError(f"dropout ({dropout}) must be True, False or a rate of at least 0 and below 1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype}) must be float64 or None")


def check_modules(torch_module: object, flax_module: object) -> None:
    """Raise TypeError unless the modules are a torch module and an NNX module, in this order."""
    for module, wanted, what in ((torch_module, "torch", "torch.nn.Module"), (flax_module, "flax", "flax.nnx.Module")):
        if backends.framework_of(module) != wanted or isinstance(module, tuple):
            position = "first" if wanted == "torch" else "second"
            raise TypeError(f"train takes a {what} as its {position} argument, got {_described(module)}")


def _described(module: object) -> str:
    """Return the description of a wrong module argument for the message."""
    if not (isinstance(module, tuple) and len(module) == 2 and backends.framework_of(module) == "flax"):
        return type(module).__name__
    linen = f"the Linen module {type(module[0]).__name__} with its variables"
    return f"{linen}; compare with train=True judges it in train mode"


def batches_of(data: Any, loss: object) -> list[tuple[object, object]]:
    """Return the pairs of inputs and targets that the user's data holds."""
    batches = []
    for pair in data:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"data must hold pairs of inputs and targets, got {type(pair).__name__}")
        targets = calls.to_numpy(pair[1])
        if loss == "cross_entropy" and (targets.dtype.kind not in "iu" or int(targets.min(initial=0)) < 0):
            raise ValueError("targets of cross_entropy must be whole numbers of at least 0")
        batches.append((pair[0], targets))
    if not batches:
        raise ValueError("data must hold at least one pair of inputs and targets")
    return batches
