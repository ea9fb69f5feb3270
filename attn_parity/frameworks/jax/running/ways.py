"""Ways to run a program that are no plain evaluation: directly, with its tables moved, with what was moved counted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....sides.tables import Tables
from ..probes.literals import evaluate_literals
from ..probes.tables import evaluate_tables
from ..sides.adapter import is_jax_float
from .execution import read
from .promotion import promoted


def is_probe(mode: str) -> bool:
    """Tell whether a run is compared with the plain one, and draws what that draws: one program serves all seeds."""
    return mode in ("jitter", "logsumexp", "tables", "flash", "literals")


def counted(run: Callable[..., Any], replaced: Mapping[int, Any]) -> Callable[..., Moved]:
    """Return what gives, beside the results, how many values were moved or operations replaced."""

    def run_and_count(operands: Any, seed: int) -> Moved:
        found = run(operands, seed)
        return found if isinstance(found, Moved) else Moved(found, len(replaced))

    return run_and_count


@dataclasses.dataclass(frozen=True)
class Moved:
    """Results of a run, how many values were moved for it or operations replaced, and the tables that it met."""

    results: Any
    count: int
    tables: Tables | None = None


def moving_tables(closed: Any, tree: Any, tables: Collection[int]) -> Callable[..., Moved]:
    """Return what runs a float64 program while it moves its tables; the arguments at `tables` are some."""

    def run(operands: Any, seed: int) -> Moved:
        weights, leaves, cotangents, masks = operands
        of_leaves = [
            "table" if position in tables else "weight" if is_jax_float(leaf) else "free"
            for position, leaf in enumerate(leaves)
        ]
        kinds = (
            jax.tree.map(lambda _: "weight", weights),
            of_leaves,
            jax.tree.map(lambda _: "weight", cotangents),
            jax.tree.map(lambda _: "free", masks),
        )
        outputs, count, found = evaluate_tables(closed, jax.tree.leaves(operands), jax.tree.leaves(kinds), seed)
        return Moved(jax.tree.unflatten(tree, outputs), count, found)

    return run


def moving_literals(closed: Any, tree: Any) -> Callable[..., Moved]:
    """Return what runs a float64 program with literals of float32 accuracy moved, and close branches exchanged."""

    def run(operands: Any, seed: int) -> Moved:
        outputs, count, found = evaluate_literals(closed, jax.tree.leaves(read(operands)), seed)
        return Moved(jax.tree.unflatten(tree, outputs), count, found)

    return run


def directly(function: Callable[..., Any], *, promote: bool) -> Callable[..., Any]:
    """Run a function that can't be traced, because it looks at values."""

    def run(operands: Any, seed: int = 0) -> Any:
        with promoted() if promote else contextlib.nullcontext():
            result = function(*jax.tree.map(jnp.asarray, read(operands)))
            return jax.tree.map(np.asarray, result)

    return run


def precise(dtype: str | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a program is traced in a precision."""
    return promoted() if dtype == "float64" else contextlib.nullcontext()


def is_double(operands: Any) -> bool:
    """Tell whether a side works in float64, by its weights, or its inputs where it has none."""
    weights, leaves, *_ = operands
    floats = [one for one in weights.values() if is_jax_float(one)] or [one for one in leaves if is_jax_float(one)]
    return bool(floats) and all(one.dtype == np.float64 for one in floats)
