"""Try the laws that every side must obey alone: which hold, which are broken with a witness, which were not tried."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import numpy as np

from ..compare.driver import choose, entry_of, uncompiled
from ..compare.prepare import subject_of
from ..interrupts import orderly_interrupts
from ..pair import weights_held
from ..results.findings import shown
from ..samples import calls
from ..settings import precision
from ..sides.libraries import as_side
from ..sides.modes import Modes
from ..sides.subject import Returned
from . import LAWS
from .batches import batch_invariance, row_permutation
from .dtypes import output_dtype
from .gradients import gradients
from .heads import head_permutation
from .layout import Axes, layout_of
from .modes import determinism
from .report import PURPOSES, LawsReport, LawVerdict
from .sequences.caches import cached, chunked
from .sequences.documents import document_isolation
from .sequences.order import causality, key_permutation
from .sequences.padding import padding_invariance
from .side import REFUSALS, LawResult, NotTriedError, OneSide, failed

_FUNCTIONS: dict[str, Callable[[OneSide, Axes], LawResult]] = {
    "determinism": determinism,
    "batch": batch_invariance,
    "rows": row_permutation,
    "padding": padding_invariance,
    "causality": causality,
    "cache": cached,
    "chunks": chunked,
    "keys": key_permutation,
    "documents": document_isolation,
    "heads": head_permutation,
    "gradients": gradients,
    "dtype": output_dtype,
}
"""Name of a law -> the function that tries it."""


def laws(
    module: object,
    inputs: object,
    *,
    only: Iterable[str] | str = (),
    output: str | None = None,
    batch_axis: int | None = None,
    device: str | None = None,
    seed: int = 0,
    strict: bool = True,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> LawsReport:
    """Try the laws that a module must obey alone, without a second implementation.

    The module runs in eval mode and in float64, with drawn weights that are not degenerate; it is left as it was. A law
    is tried where the arguments of the module and of the call allow it.

    Args:
        module: a side as `compare` takes it: a ``torch.nn.Module``, a ``flax.nnx.Module``, ``(Linen module,
            variables)``, an Equinox module, ``(transformed, params)`` of Haiku, a Keras model, or
            ``parity.function(f, weights)``.
        inputs: one array, a tuple of positional ones, or a dict of keyword ones; NumPy's, torch's or JAX's.
        only: names of the laws to try; none for all. A law that not every module obeys (``causality``, ``keys``) is
            broken, instead of not tried, if it is named here.
        output: the entry of the return value to judge, such as ``logits``.
        batch_axis: axis of the batch in the main input; None takes axis 0, or axis 1 where a submodule has
            ``batch_first=False``.
        device: ``cpu``, ``gpu`` or ``tpu``; None keeps the module's own.
        seed: of the drawn weights and inputs.
        strict: pin every precision switch for the time of the run (see `attn_bridge.parity.strict`).
        command: the command to run again, for the report.
        progress: callback with the current stage, the work done and the total.

    Returns:
        The report; ``report.raise_for_broken()`` raises if a law is broken.

    Raises:
        TypeError: `module` is not a side.
        ValueError: the module can't be called with these inputs, or an argument is wrong.
    """
    started = time.perf_counter()
    chosen = choose("only", only, tuple(LAWS)) if only else tuple(LAWS)
    strictness = precision.strict() if strict else contextlib.nullcontext()
    advance = progress or (lambda what, done, total: None)
    with orderly_interrupts(), np.errstate(all="ignore"), strictness:
        side = _side(uncompiled(module), inputs, output, device, seed, chosen if only else ())
        layout = layout_of(side, batch_axis)
        verdicts = []
        with side.subject.few_threads():
            for done, name in enumerate(chosen):
                advance(f"trying {name}", done, len(chosen))
                verdicts.append(_verdict(name, side, layout))
        environment = {**precision.environment(), "device": str(side.subject.device), **precision.record()}
    notes = [f"the module has no float64, and runs in its own precision: {side.lack}"] if side.lack else []
    seconds = time.perf_counter() - started
    return LawsReport(
        verdicts,
        side.name,
        side.subject.kind,
        side.dtype or calls.common_dtype(side.held) or "float32",
        notes,
        seed,
        environment,
        seconds,
        command,
    )


def _side(
    module: object, inputs: object, output: str | None, device: str | None, seed: int, only: Iterable[str]
) -> OneSide:
    """Return the side with its call in eval mode."""
    subject = subject_of(module, device)
    subject.returned = Returned(entry_of(output))
    weights = weights_held(subject, shown(subject.framework))
    call = calls.in_dtype(calls.as_arguments(inputs), calls.common_dtype(weights))
    call, _ = Modes.of(subject, call).in_eval_mode(call, subject.name)
    subject.describe_outputs(weights, call)
    return OneSide(as_side(module), subject, call, seed, tuple(only))


def _verdict(name: str, side: OneSide, layout: Axes) -> LawVerdict:
    try:
        if name != "determinism" and side.drawn_apart.size > side.limit:
            raise NotTriedError("a call in eval mode draws random numbers")
        finding = _FUNCTIONS[name](side, layout)
    except NotTriedError as reason:
        return LawVerdict(name, "not tried", str(reason))
    except REFUSALS as error:
        return LawVerdict(name, "not tried", str(failed(error)))
    limit = side.limit if finding.limit is None else finding.limit
    is_broken = not finding.gap.size <= limit if finding.is_broken is None else finding.is_broken
    if not is_broken:
        return LawVerdict(name, "holds", finding.why, finding.gap.size, limit)
    witness = finding.gap.witness(finding.change)
    return LawVerdict(name, "broken", finding.why, finding.gap.size, limit, witness, PURPOSES.get(name, ""))
