"""Compare any two sides: whether they compute the same, where they diverge, and which parts were not reached.

The steps of a comparison: `prepare` makes the pair, `bench` takes samples of it through a `Live` runner and applies the
criterion, `coverage` lists the parts that no sample reached, `localisation` searches for the first divergence, and a
`Report` holds all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..hints import Evidence, hint_for, of_devices
from ..hints import settings as layer_settings
from ..hints.witness import witness
from ..interrupts import orderly_interrupts
from ..matching.submodule_pairs import SHOWN, differing_settings
from ..pair import SIDES, Pair, Progress, few_threads, unlike_inputs
from ..results.allowances import accept, checked
from ..results.findings import Divergence, DtypeLeak, Side, TensorVerdict, Verdict, worst
from ..results.report import Report
from ..samples.limits import MAX_SEEDS
from ..samples.sampling import Planned
from ..settings import precision
from ..sides.arrays import DTYPES
from ..sides.subject import Array, CannotPromoteError, ModuleFailedError
from ..verdict.attention_probes import on_attention
from ..verdict.bench import judge_in
from ..verdict.devices.contributions import lost
from ..verdict.devices.exchanges import exchanged
from ..verdict.devices.shards import copies_compared, on_shards
from ..verdict.devices.softmaxes import mixed
from ..verdict.mask_senses import on_mask_senses
from ..verdict.masked_rows import on_masked_rows
from ..verdict.measures import Explained
from ..verdict.notes import Coverage, Findings, covered, on_literals
from ..verdict.runner import Live, Runner
from .prepare import prepare

if TYPE_CHECKING:
    from ..localisation import Aim, Remainder

MODES = ("eager", "jit")

MISSING = object()
"""Stands for an argument that was not given."""

FRESH = Planned("own", 0, 0, 982_451_653)
"""A sample that no verdict is drawn from: a hint has to hold on it as well."""

UNSTABLE_ULPS = 1e4
"""Units of the last place beyond which a large pair is asked whether it is deterministic at all."""

_ONE_AT_A_TIME = threading.RLock()
"""Settings of both frameworks are the process's: comparisons of several threads follow each other."""


def compare(
    first: object = None,
    second: object = None,
    inputs: object = MISSING,
    second_inputs: object = None,
    *,
    fixed: Iterable[int | str] | int | str = (),
    vary: Iterable[int | str] | int | str = (),
    rules: object = None,
    transfer: bool = True,
    train: bool = False,
    reference: bool = False,
    seeds: int = 4,
    first_seed: int = 0,
    modes: Iterable[str] = ("eager",),
    dtypes: Iterable[str] | None = None,
    device: str | tuple[str, str] | None = None,
    strict: bool = True,
    localise: bool | None = None,
    output: str | None = None,
    allow: Mapping[str, str] | Sequence[str] | None = None,
    command: str = "",
    progress: Progress | None = None,
    flax_inputs: object = None,
    torch_module: object = None,
    flax_module: object = None,
) -> Report:
    """Judge whether two sides compute the same outputs and gradients, and find the first divergence.

    Both are run in eval mode, or in train mode with the same dropout masks, with the weights they hold, and again with
    drawn ones that are not degenerate; meaning is proven in float64, precision by how much more one side loses than the
    other. Both are left as they were. Comparisons in several threads run one after the other.

    Args:
        first: a ``torch.nn.Module``, a ``flax.nnx.Module``, a Linen module with its variables ``(module, variables)``,
            an Equinox module, ``(transformed, params)`` of Haiku, a Keras model, or ``parity.function(f, weights)``, a
            pure function of torch or JAX.
        second: the same; any combination.
        inputs: one array, a tuple of positional ones, or a dict of keyword ones; NumPy's, torch's or JAX's.
        second_inputs: the second side's call, where it takes its arguments in another way. An array that holds the
            numbers of one of `inputs`, also transposed or reshaped, is drawn with it; every other is taken as given.
        fixed: positions or names of arguments that every sample takes as given.
        vary: positions or names of arguments of whole numbers that samples shuffle; others are taken as given.
        rules: pairing of the parameters: a TOML file's path, a `Rules`, or a list of `Rule`s or of dicts with the keys
            of a ``[[rule]]``. Parameters without a rule are paired by names, classes and shapes.
        transfer: give the second side the first side's weights; False judges the weights that each side holds.
        train: run both in train mode, with dropout masks of one stream; masks that only one side requests are
            ``different``, with the name of the submodule that drops.
        reference: take the first side as the reference: if it is the side that loses precision, the report has a
            note and the verdict ignores it.
        seeds: how many times weights and inputs are drawn, at most 1000.
        first_seed: the first of them.
        modes: ``eager``, and ``jit`` for torch.compile and jax.jit.
        dtypes: precisions to judge in, such as ``("float32", "bfloat16")``; None is the sides' own.
        device: ``cpu``, ``gpu`` or ``tpu``, or a pair (the first side's, the second's); None keeps each side's own.
        strict: pin every precision switch for the time of the comparison (see `attn_bridge.parity.strict`).
        localise: look for the first divergence; None looks unless the two are equal.
        output: the entry of a side's return value to judge, such as ``logits``; deeper ones are joined by dots
            (``hidden_states.0``). A side that returns an array alone returns that entry.
        allow: known differences that are accepted: path of a submodule or name of a tensor -> the reason. Every report
            names them.
        command: the command to run again, for the report.
        progress: callback with the current stage, the work done and the total.
        flax_inputs: another name for `second_inputs`.
        torch_module: another name for `first`.
        flax_module: another name for `second`.

    Returns:
        The report; ``report.raise_for_mismatch()`` raises unless the verdict is ``equal``.

    Raises:
        TypeError: an argument is not a side, or of the wrong type.
        ValueError: the sides cannot be compared: one raises, the outputs differ in structure, a device is absent, the
            parameters can't be paired (`WeightsMismatchError` lists them), or an argument is wrong.
    """
    started = time.perf_counter()
    first, second = (first if torch_module is None else torch_module), (second if flax_module is None else flax_module)
    second_inputs = second_inputs if flax_inputs is None else flax_inputs
    if inputs is MISSING:
        raise TypeError("compare needs inputs: an array, a tuple of positional ones or a dict of keyword ones")
    modes, wanted = choose("modes", modes, MODES), None if dtypes is None else choose("dtypes", dtypes, DTYPES)
    _check_options(
        {"train": train, "transfer": transfer, "reference": reference, "strict": strict}, modes, seeds, first_seed
    )
    accepted = checked(allow) if allow else {}
    strictness = precision.strict() if strict else contextlib.nullcontext()
    with orderly_interrupts(), _ONE_AT_A_TIME, np.errstate(all="ignore"), strictness:
        pair = prepare(
            uncompiled(first),
            uncompiled(second),
            inputs,
            second_inputs,
            device=_devices(device),
            rules=rules,
            transfer=transfer,
            train=train,
            reference=reference,
            fixed=fixed,
            vary=vary,
            output=entry_of(output),
            progress=progress or (lambda what, done, total: None),
            fold=True,
        )
        with few_threads(pair):
            try:
                report = judge(Live(pair), seeds, first_seed, modes, wanted, localise, accepted)
            except CannotPromoteError as error:  # float64 was asked for
                raise ModuleFailedError(str(error)) from error
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, command=command, seconds=seconds, peak_memory=peak_memory())


def entry_of(output: str | None) -> str | None:
    """Return the entry of a return value to judge; raise ValueError unless it is a name."""
    if output is not None and not (isinstance(output, str) and all(output.split("."))):
        raise ValueError(f"output ({output!r}) must be the name of an entry, such as logits or hidden_states.0")
    return output


def judge(
    runner: Live,
    seeds: int,
    first_seed: int,
    modes: tuple[str, ...],
    dtypes: tuple[str, ...] | None,
    localise: bool | None,
    accepted: Mapping[str, str],
) -> Report:
    """Return the report on a live pair, with the verdict on all but the accepted differences."""
    pair = runner.pair
    judgement = judged(runner, seeds, first_seed, modes, dtypes or (pair.dtype,))
    judgement.report.notes.extend(_on_unseen(pair, judgement, localise))
    wanted = judgement.report.verdict in ("different", "precision") if localise is None else localise
    if not wanted or judgement.furthest is None:
        return accept(judgement.report, accepted) if accepted else judgement.report
    from .. import localisation  # a dozen modules, of which an equal pair needs none

    pair.progress("looking for the first divergence", 0, 1)
    aim: Aim = "precision" if judgement.report.verdict == "precision" else "meaning"
    outputs_agree = all(one.verdict == "equal" for one in judgement.report.tensors if one.kind == "output")
    fresh = None if pair.effort.large else lambda: runner.sample(FRESH)
    located = localisation.find(
        pair, judgement.furthest, aim, judgement.explained.tables, outputs_agree=outputs_agree, fresh=fresh
    )
    is_meaning = judgement.report.verdict != "precision"
    divergence = None if judgement.report.verdict in ("equal", "inconclusive") else located.divergence
    if divergence is not None:
        hint = divergence.hint or "; ".join(_on_candidates(pair, divergence, located.evidence, is_sure=True))
        hint = hint or _hint(runner, judgement, located.evidence, divergence, is_meaning=is_meaning)
        hint = hint or "; ".join(_on_candidates(pair, divergence, located.evidence))
        hint = "; ".join([*_on_layers(pair), hint] if hint else _on_layers(pair))
        seen = witness(located.evidence) if is_meaning and located.evidence is not None else ""
        divergence = dataclasses.replace(divergence, second_label=pair.labels["second"], hint=hint, witness=seen)
    report = dataclasses.replace(judgement.report, tree=located.tree, first_divergence=divergence)
    left: Remainder = "unknown"
    if accepted and report.verdict == "different" and not pair.train:
        left = localisation.remainder(pair, judgement.furthest, accepted.keys(), judgement.explained.tables)
    return accept(report, accepted, left)


def _hint(
    runner: Live, judgement: Judged, evidence: Evidence | None, divergence: Divergence, *, is_meaning: bool
) -> str:
    """Return the hint at a localised difference, "" without one."""
    is_forward = divergence.direction == "forward"

    def probe() -> str:
        return on_attention(runner, judgement.furthest) if is_forward and not judgement.mesh else ""

    hint = ""
    if is_meaning and not judgement.mesh:
        samples = judgement.furthest, runner.sample(FRESH)
        hint = on_masked_rows(runner, *samples) or on_mask_senses(runner, *samples)
    if judgement.mesh:
        hint = _hint_of_devices(runner, judgement, evidence, divergence)
    if evidence is not None and not hint:
        hint = hint_for(evidence, numbers=is_meaning, probe=probe)
    if judgement.mesh and not hint and is_forward:
        hint = mixed(runner, judgement.furthest, _paths(divergence), judgement.mesh)
    return hint


def _on_layers(pair: Pair) -> list[str]:
    """Return the settings in which layers of a library differ; as a function it has no other place than the whole."""
    is_function = any(side.kind.endswith("function") for side in (pair.first, pair.second))
    return differing_settings(pair, SHOWN) if is_function else []


def _on_candidates(
    pair: Pair, divergence: Divergence, evidence: Evidence | None, *, is_sure: bool = False
) -> Iterator[str]:
    """Yield the settings that differ in submodules that were not excluded, such as those that return other shapes.

    Args:
        pair: the pair.
        divergence: its place and the other candidates.
        evidence: the numbers that other hints have; settings of their submodule are left out.
        is_sure: of the likeliest place alone, and without settings that the code around may make up for.
    """
    shown_path = None if evidence is None else evidence.path
    first, second = pair.first.settings(), pair.second.settings()
    labels = pair.shown["first"], pair.shown["second"]
    for candidate in divergence.candidates[: 1 if is_sure else None]:
        if candidate.between is None and candidate.path != shown_path:
            own = first.get(candidate.path, {}), second.get(candidate.second_path, {})
            for sentence in layer_settings.differing(*own, labels):
                if not (is_sure and sentence.startswith(("padding", *layer_settings.OWN))):
                    yield f"in {candidate.path}, {sentence}"


def _on_unseen(pair: Pair, judgement: Judged, localise: bool | None) -> Iterator[str]:
    """Yield the note on a difference that no float32 run shows, with its place."""
    unseen = judgement.explained.unseen
    if unseen is not None:
        from .. import localisation

        divergence = None if localise is False else localisation.find(pair, unseen, allowed=None).divergence
        yield on_literals(judgement.explained.literals, "" if divergence is None else divergence.path)


def _hint_of_devices(runner: Live, judgement: Judged, evidence: Evidence | None, divergence: Divergence) -> str:
    """Return a cause that only the devices of a side explain, "" without one."""
    hint = "" if evidence is None else of_devices(evidence, judgement.mesh, evidence.labels)
    tensors = judgement.report.tensors
    if hint or any(one.shards or one.kind == "copies" for one in tensors):
        return hint
    if divergence.direction != "forward":
        return lost(runner, judgement.furthest, _paths(divergence))
    return exchanged(runner, judgement.furthest, _paths(divergence), judgement.mesh)


def _paths(divergence: Divergence) -> dict[Side, str]:
    return {"first": divergence.path, "second": divergence.second_path}


@dataclasses.dataclass
class Judged:
    """A report without the first divergence, and the data that the search for it starts from."""

    report: Report
    furthest: Any = None
    explained: Explained = dataclasses.field(default_factory=Explained)
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)


def judged(runner: Runner, seeds: int, first_seed: int, modes: tuple[str, ...], dtypes: tuple[str, ...]) -> Judged:
    """Judge a pair in the given precisions, live or recorded, and list the parts that were not reached."""
    pair = runner.pair
    unstable = "" if pair.effort.large else runner.unstable()
    if unstable:
        return Judged(_report(pair, "inconclusive", [], message=_verdict_of_training(pair, "different")[1] or unstable))
    findings = [judge_in(runner, dtype, modes, seeds, first_seed) for dtype in dtypes]
    tensors = [one for each in findings for one in (on_shards(runner, each) if each.mesh else each.verdicts)]
    if pair.effort.large and any(max(one.first_ulps or 0.0, one.second_ulps or 0.0) > UNSTABLE_ULPS for one in tensors):
        unstable = runner.unstable()
        if unstable:
            return Judged(_report(pair, "inconclusive", [], message=unstable))
    seen = covered(runner, findings[0])
    copies = [one for each in findings if each.apart for one in copies_compared(each, pair.shown)]
    tensors = seen.applied([*_masks_compared(pair), *_weights_compared(pair), *copies, *tensors])
    verdict, message = _verdict_of_training(pair, worst([one.verdict for one in tensors]))
    if verdict == "inconclusive" and not message:
        message = next(one.message for one in tensors if one.verdict == "inconclusive")
    if verdict == "different":
        message = unlike_inputs(pair)
    leaks = [leak for dtype in dtypes if dtype != "float64" for leak in runner.dtype_leaks(dtype)]
    report = _report(pair, verdict, tensors, message=message, findings=findings, seen=seen, leaks=leaks)
    furthest = next((one.furthest for one in reversed(findings) if one.furthest is not None), None)
    explained = Explained()
    for finding in findings:
        explained.join(finding.explained)
    return Judged(report, furthest, explained, findings[0].mesh)


def _report(
    pair: Pair,
    verdict: Verdict,
    tensors: list[TensorVerdict],
    *,
    message: str = "",
    findings: Sequence[Findings] = (),
    seen: Coverage | None = None,
    leaks: Sequence[DtypeLeak] = (),
) -> Report:
    labels, seen = pair.labels, seen or Coverage()
    lacks = [f"{pair.shown[side]} has no float64 here: {reason}" for side, reason in pair.lacks.items()]
    notes = [note for one in findings for note in one.notes]
    devices = {f"{label} device": str(pair.subject(side).device) for side, label in labels.items()}
    noise: dict[str, float] = {}
    for finding in findings:
        noise |= finding.noise
    return Report(
        verdict,
        tensors,
        unexercised=seen.unexercised,
        invariances=seen.invariances,
        unreached=seen.unreached,
        pairing=pair.pairing.rows(),
        noise=noise,
        notes=list(
            dict.fromkeys([*pair.notes, *notes, *seen.notes, *differing_settings(pair), *lacks, *map(str, leaks)])
        ),
        dtype_leaks=list(dict.fromkeys(leaks)),
        message=message,
        seeds=findings[-1].seeds if findings else 0,
        samples=findings[-1].samples if findings else 0,
        environment={**precision.environment(), **devices, **precision.record()},
        first_name=pair.first.name,
        second_name=pair.second.name,
        first_label=labels["first"],
        second_label=labels["second"],
        pictures=findings[0].pictures if findings else [],
    )


# ---- train mode, and weights that are not transferred


def _masks_compared(pair: Pair) -> list[TensorVerdict]:
    """Return a verdict for each dropout mask that the two sides don't have in common."""
    verdicts = []
    for mask in pair.masks:
        shape = next(draw.shape for draw in (mask.first, mask.second) if draw)
        verdicts.append(TensorVerdict(*mask.names(), "dropout", shape, "bool", mask.verdict, mask.message))
    return verdicts


def _verdict_of_training(pair: Pair, verdict: Verdict) -> tuple[Verdict, str]:
    """Return the verdict of train mode, and the reason if it is inconclusive."""
    if verdict != "equal" and pair.foreign:
        names = " and the ".join(pair.shown[side] for side in pair.foreign)
        what = f"the {names} module draws random numbers that are no dropout masks"
        return "inconclusive", f"{what}, so the sides can't be compared in train mode"
    unclear = [one for one in pair.masks if one.verdict == "inconclusive"]
    if unclear and verdict != "equal":
        return "inconclusive", unclear[0].message
    return verdict, ""


def _weights_compared(pair: Pair) -> list[TensorVerdict]:
    """Compare the weights that both sides hold, where they are not transferred: bit by bit, or number by number.

    A side may hold the other's numbers in a wider dtype, as `transformers` does where it keeps some in float32.
    """
    if pair.transfer:
        return []
    ours, theirs = (pair.pairing.aligned(pair.own_weights[side], side) for side in SIDES)
    verdicts = []
    for match in pair.pairing.matches:
        first, second = ours[match.first.name], theirs[match.first.name]
        differing = int(_differ(first, second).sum())
        verdicts.append(
            TensorVerdict(
                f"weight {match.first.name}",
                f"weight {match.second.name}",
                "weight",
                first.shape,
                first.dtype.name,
                "different" if differing else "equal",
                f"{differing} of {first.size} elements that the two sides hold are not the same" if differing else "",
                bad=differing,
                count=first.size,
            )
        )
    return verdicts


def _differ(first: Array, second: Array) -> Array:
    """Return which elements are not the same."""
    differs: Array
    if first.dtype == second.dtype:
        differs = (_bits(first) != _bits(second)).any(axis=-1)
    else:
        wide, other = (array.astype(np.float64) for array in (first, second))
        differs = (wide != other) & ~(np.isnan(wide) & np.isnan(other))
    return differs


def _bits(array: Array) -> Array:
    """Return the bytes of every element."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


# ---- arguments


def uncompiled(module: Any) -> object:
    """Return the module inside a wrapper of torch.compile; `modes` alone decides on compilation."""
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module


def choose(what: str, names: Iterable[str] | str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen names, each once; raise ValueError for an unknown name and for an empty choice."""
    if not isinstance(names, Iterable):
        raise TypeError(f"{what} must hold names of {', '.join(choices)}, got {type(names).__name__}")
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in choices:
            raise ValueError(f"{what} ({name}) must be one of {', '.join(choices)}")
    if not chosen:
        raise ValueError(f"{what} must hold at least one of {', '.join(choices)}")
    return tuple(dict.fromkeys(chosen))


def _check_options(switches: Mapping[str, object], modes: tuple[str, ...], seeds: int, first_seed: int) -> None:
    for name, value in switches.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    if switches["train"] and modes != ("eager",):
        raise ValueError("train=True goes with modes=('eager',) only: compiled code draws masks of its own")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= MAX_SEEDS:
        raise ValueError(f"seeds ({seeds}) must be a whole number from 1 to {MAX_SEEDS}")
    if isinstance(first_seed, bool) or not isinstance(first_seed, int) or first_seed < 0:
        raise ValueError(f"first_seed ({first_seed}) must be a whole number of at least 0")


def _devices(device: object) -> tuple[str, str] | None:
    if device is None:
        return None
    pair = (device, device) if isinstance(device, str) else tuple(device) if isinstance(device, Iterable) else ()
    if len(pair) != 2 or not all(isinstance(one, str) for one in pair):
        raise ValueError(f"device ({device}) must be one of cpu, gpu, tpu, or a pair of them: torch's, Flax's")
    return "gpu" if pair[0] == "cuda" else pair[0], "gpu" if pair[1] == "cuda" else pair[1]


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
