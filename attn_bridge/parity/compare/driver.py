"""Any torch module against any Flax NNX module: whether they compute the same, where they part, what was not seen."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ... import backends
from ...weights import Rule, Rules
from ..check.cases import DTYPES
from ..settings.precision import strict as pinned
from .judgement import QUICK
from .pair import Comparison, Progress
from .report import Report
from .subject import CannotLiftError, ModuleFailedError

MODES = ("eager", "jit")


def compare(
    torch_module: Any,
    flax_module: Any,
    inputs: Any,
    *,
    rules: Rules | Iterable[Rule] | None = None,
    transfer: bool = True,
    train: bool = False,
    seeds: int = 4,
    first_seed: int = 0,
    modes: Iterable[str] = ("eager",),
    dtypes: Iterable[str] | None = None,
    device: str | tuple[str, str] | None = None,
    flax_inputs: Any = None,
    strict: bool = True,
    localise: bool | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Judge whether a torch and a Flax module compute the same outputs and gradients, and find where they part.

    Both are run in eval mode, or in train mode with the same dropout masks, with the weights they hold, and again with
    drawn ones that are not degenerate; meaning is proven in float64, precision by how much more one side loses than the
    other. The modules are left as they were.

    Args:
        torch_module: a ``torch.nn.Module``.
        flax_module: a ``flax.nnx.Module``; a Linen one through ``nnx.bridge.ToNNX``.
        inputs: one array, a tuple of positional ones, or a dict of keyword ones; NumPy's, torch's or JAX's.
        rules: which parameter is which; by default it is proposed from names, classes and shapes.
        transfer: give the Flax side the torch side's weights; False judges the weights that each side holds.
        train: run both in train mode, with dropout masks of one stream; masks that only one side asks for are
            ``different``, by the name of the submodule that drops.
        seeds: how many times weights and inputs are drawn.
        first_seed: the first of them.
        modes: ``eager``, and ``jit`` for torch.compile and jax.jit.
        dtypes: precisions to judge in, such as ``("float32", "bfloat16")``; None is the modules' own.
        device: ``cpu``, ``gpu`` or ``tpu``, or a pair (torch's, Flax's); None is where each module is.
        flax_inputs: the Flax side's call, where it takes its arguments in another way. An array that holds the numbers
            of one of `inputs`, also transposed or reshaped, is drawn with it; every other array is taken as given.
        strict: pin every precision switch for the time of the comparison (see `attn_bridge.parity.strict`).
        localise: look for the first divergence; None looks unless the two are equal.
        command: the command that runs it again, for the report.
        progress: called with what is done, how much of it, and how much there is.

    Returns:
        The report; ``report.raise_for_mismatch()`` raises unless the verdict is ``equal``.

    Raises:
        TypeError: not one module of each framework.
        ValueError: the modules can't be compared: one raises, the outputs differ in structure, a device is absent, the
            parameters can't be paired (`WeightsMismatchError` lists them), or an argument is wrong.
    """
    started = time.perf_counter()
    if type(torch_module).__name__ == "OptimizedModule":  # torch.compile made it; modes says what is compiled here
        torch_module = torch_module._orig_mod
    check_modules(torch_module, flax_module)
    device = _devices(device)
    modes, wanted = _choose("modes", modes, MODES), None if dtypes is None else _choose("dtypes", dtypes, DTYPES)
    if not isinstance(train, bool):
        raise TypeError(f"train must be True or False, got {type(train).__name__}")
    if train and modes != ("eager",):
        raise ValueError("train=True goes with modes=('eager',) only: compiled code draws masks of its own")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be a whole number of at least 1")
    if isinstance(first_seed, bool) or not isinstance(first_seed, int) or first_seed < 0:
        raise ValueError(f"first_seed ({first_seed}) must be a whole number of at least 0")
    with np.errstate(all="ignore"), pinned() if strict else contextlib.nullcontext():
        comparison = Comparison(
            torch_module,
            flax_module,
            inputs,
            flax_inputs,
            device=device,
            rules=rules,
            transfer=transfer,
            train=train,
            progress=progress or (lambda what, done, total: None),
        )
        small = comparison.work() <= QUICK
        with comparison.torch.few_threads() if small else contextlib.nullcontext():
            try:
                report = comparison.judge(seeds, first_seed, modes, wanted, localise)
            except CannotLiftError as error:  # float64 was asked for
                raise ModuleFailedError(str(error)) from error
    return dataclasses.replace(
        report, command=command, seconds=time.perf_counter() - started, peak_memory=peak_memory()
    )


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def check_modules(torch_module: Any, flax_module: Any) -> None:
    """Refuse what is not one module of each framework."""
    for module, wanted, what in ((torch_module, "torch", "torch.nn.Module"), (flax_module, "flax", "flax.nnx.Module")):
        if backends.framework_of(module) == wanted:
            continue
        kinds = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
        if any(kind.startswith("flax.linen") for kind in kinds):
            raise TypeError(
                f"{type(module).__name__} is a Linen module; give nnx.bridge.ToNNX(module, rngs=...).lazy_init(inputs)"
            )
        position = "first" if wanted == "torch" else "second"
        raise TypeError(f"compare takes a {what} as its {position} argument, got {type(module).__name__}")


def _devices(device: Any) -> tuple[str, str] | None:
    if device is None:
        return None
    pair = (device, device) if isinstance(device, str) else tuple(device)
    if len(pair) != 2 or not all(isinstance(one, str) for one in pair):
        raise ValueError(f"device ({device}) must be one of cpu, gpu, tpu, or a pair of them: torch's, Flax's")
    return pair


def _choose(what: str, names: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{what} ({name}) must be one of {', '.join(known)}")
    if not chosen:
        raise ValueError(f"{what} must hold at least one of {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))
