"""Two modules made ready to be compared: what they hold, which parameter is which, and their runs on drawn numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import backends
from ...module_weights import check_same_meaning, own_rules
from ...weights import Rule, Rules
from ..check.report import environment
from ..settings.precision import record
from . import coverage
from . import pairing as pairings
from . import samples as numbers
from .criterion import MEANING_LIMIT, scale_of
from .dropout_masks import Difference, differences
from .judgement import SIDES, SLOW, Judgement
from .outputs import apart, check_outputs, class_of
from .pairing import Pairing
from .report import Report, Side, TensorVerdict, Verdict, worst
from .samples import Sample
from .subject import Arguments, Array, Arrays, CannotLiftError, ModuleFailedError, Run, is_float, wide

PROBE_LIMIT = 1e-4
"""How far apart outputs may be that are said to agree, where one side has no float64."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of one sample, on both sides, with torch axes."""

    kind: str
    flax_name: str
    torch: Array
    flax: Array


class Comparison:
    """Two modules made ready: harnesses, pairing, and which side has float64.

    Args:
        torch_module: the torch module.
        flax_module: the Flax module.
        inputs: the torch side's call.
        flax_inputs: the Flax side's call; None is the same.
        device: see `compare`.
        rules: see `compare`.
        transfer: see `compare`.
        train: see `compare`.
        progress: see `compare`.
    """

    train = False
    """Whether both sides run in train mode, with given dropout masks."""

    can_run = True
    """Whether it can run numbers of its own; results that were written down before can't."""

    masks: Sequence[Difference] = ()
    """Dropout masks that the two sides do not have in common, in train mode."""

    foreign: Sequence[Side] = ()
    """Sides that draw random numbers that are no dropout masks, in train mode."""

    _converted: tuple[Arrays, Arrays] | None = None
    """The last weights of the torch side that were converted, and what they are on the Flax side."""

    def __init__(
        self,
        torch_module: Any,
        flax_module: Any,
        inputs: Any,
        flax_inputs: Any = None,
        *,
        device: str | tuple[str, str] | None = None,
        rules: Rules | Iterable[Rule] | None = None,
        transfer: bool = True,
        train: bool = False,
        progress: Progress = lambda what, done, total: None,
    ):
        self.progress = progress
        devices = device if isinstance(device, tuple) else (device, device)
        self.torch: Any = backends.load_harness("torch").Harness(torch_module, devices[0])
        self.flax: Any = backends.load_harness("flax").Harness(flax_module, devices[1])
        self.modules = (torch_module, flax_module)
        self.transfer = transfer
        self.notes: list[str] = []
        self.lacks: dict[Side, str] = {}
        self.held: Arrays = _weights(self.torch, "torch")
        self.held_flax: Arrays = _weights(self.flax, "Flax")
        self.dtype = numbers.common_dtype(self.held) or numbers.common_dtype(self.held_flax)
        given = numbers.as_arguments(inputs)
        flax_given = given if flax_inputs is None else numbers.as_arguments(flax_inputs)
        self.arguments = numbers.in_dtype(given, self.dtype)
        self.flax_arguments = numbers.in_dtype(flax_given, numbers.common_dtype(self.held_flax) or self.dtype)
        self.dtype = self.dtype or next((one.dtype.name for one in self.arguments.leaves if is_float(one)), "float32")
        self.large = self.work() > SLOW
        self.before: dict[Side, list[Array]] = {}
        self.same_inputs = numbers.alike(given, flax_given)
        self.structure = self._structure()
        self.flax_arguments = numbers.like(self.flax_arguments, self.arguments, self.same_inputs)
        self._note_inputs()
        self.pairing = self._pair(rules)  # in eval mode, so that masks make no difference to it
        if train:
            self._start_to_train()

    # ---- preparation

    def _structure(self) -> list[str]:
        """Check that both sides return the same structure."""
        ours = self.torch.describe_outputs(self.held, self.arguments)
        theirs = self.flax.describe_outputs(self.held_flax, self.flax_arguments)
        stock = self.torch.name == "MultiheadAttention" and "need_weights" not in self.arguments.kwargs
        if stock and len(ours) == 2 and len(theirs) == 1:
            self.arguments = Arguments(self.arguments.args, {**self.arguments.kwargs, "need_weights": False})
            self.notes.append("attention weights of torch's MultiheadAttention: not compared, Flax returns none")
            ours = ours[:1]
        check_outputs(ours, theirs)
        for (place, _, dtype), (_, _, other) in zip(ours, theirs, strict=True):
            if class_of(dtype) != class_of(other):
                self.notes.append(
                    f"output{place} is {dtype} in torch and {other} in Flax; only its values are compared"
                )
        self.outputs = ours
        return [place for place, _, _ in ours]

    def _lifted_or_not(self, side: Side, weights: Arrays, arguments: Arguments) -> Run:
        harness = self.torch if side == "torch" else self.flax
        if side not in self.lacks:
            try:
                lifted: Run = harness.run(weights, arguments, dtype="float64")
            except CannotLiftError as error:
                self.lacks[side] = str(error)
            else:
                return lifted
        found: Run = harness.run(weights, arguments)
        return found

    def _pair(self, rules: Rules | Iterable[Rule] | None) -> Pairing:
        ours, theirs = self.torch.parameters(), self.flax.parameters()
        if rules is not None:
            return pairings.from_rules(rules, ours, theirs)
        own = _own_rules(self.modules)
        if own is not None:
            with contextlib.suppress(ValueError):
                return pairings.from_rules(own, ours, theirs, how="config")

        @functools.cache
        def drawn() -> Arrays:
            return numbers.draw_weights(ours, self.held, (0, 1))

        @functools.cache
        def wanted() -> Run:
            return self._lifted_or_not("torch", drawn(), self.arguments)

        def probe(candidate: Pairing) -> float:
            mine = wanted()
            other = self._lifted_or_not("flax", candidate.to_flax(drawn()), self.flax_arguments)
            distance = apart(mine, other)
            return 0.0 if self.lacks and distance < PROBE_LIMIT else distance

        return pairings.propose(ours, theirs, probe)

    def _start_to_train(self) -> None:
        """Switch both sides to train mode, and compare the masks that they ask for."""
        self.train = self.torch.train = self.flax.train = True
        ours = self.torch.run(self.held, self.arguments)
        theirs = self.flax.run(self.held_flax, self.flax_arguments)
        self.foreign = [side for side, run in zip(SIDES, (ours, theirs), strict=True) if run.foreign]
        self.masks = differences(ours.draws, theirs.draws)
        self.notes.append(
            f"train mode: both sides drop by the same masks, {len(ours.draws)} per call"
            if ours.draws or theirs.draws
            else "train mode: neither side drops anything"
        )
        if any(parameter.role == "statistic" for parameter in self.torch.parameters().values()):
            self.notes.append("running statistics that train mode changes are not compared; parity.train does that")

    def _masks_compared(self) -> list[TensorVerdict]:
        """Return a verdict for each mask that the two sides don't have in common."""
        found = []
        for one in self.masks:
            shape = next(draw.shape for draw in (one.torch, one.flax) if draw)
            found.append(TensorVerdict(*one.names(), "dropout", shape, "bool", one.verdict, one.message))
        return found

    def _as_far_as_driven(self, verdict: Verdict) -> tuple[Verdict, str]:
        """Return the verdict of train mode, and why nothing can be said, if so."""
        if verdict != "equal" and self.foreign:
            what = f"the {' and the '.join(self.foreign)} module draws random numbers that are no dropout masks"
            return "inconclusive", f"{what}, so the sides can't be compared in train mode"
        unclear = [one for one in self.masks if one.verdict == "inconclusive"]
        if unclear and verdict != "equal":
            return "inconclusive", unclear[0].message
        return verdict, ""

    # ---- judging

    def judge(
        self, seeds: int, first_seed: int, modes: Iterable[str], dtypes: Iterable[str] | None, localise: bool | None
    ) -> Report:
        """Return the report on all samples."""
        unstable = "" if self.large else self._instability()
        if unstable:
            return self._report("inconclusive", [], message=self._as_far_as_driven("different")[1] or unstable)
        tensors: list[TensorVerdict] = []
        noise: dict[str, float] = {}
        drawn = count = 0
        worst_sample: Sample | None = None
        for dtype in dtypes or (str(self.dtype),):
            judged = self.judgement(dtype, tuple(modes))
            tensors += judged.run(seeds, first_seed)
            drawn, count = judged.seeds, judged.count
            noise |= judged.noise
            worst_sample = judged.furthest or worst_sample
            if dtype == (tuple(dtypes) if dtypes else (self.dtype,))[0]:
                pictures, zero = judged.pictures, judged.zero
        if self.large and any(max(one.torch_ulps or 0.0, one.flax_ulps or 0.0) > 1e4 for one in tensors):
            unstable = self._instability()
            if unstable:
                return self._report("inconclusive", [], message=unstable)
        tensors = self._masks_compared() + self._weights_held() + tensors
        tensors, seen = coverage.settle(self, tensors, zero)
        verdict, message = self._as_far_as_driven(worst([one.verdict for one in tensors]))
        if verdict == "inconclusive" and not message:
            message = next(one.message for one in tensors if one.verdict == "inconclusive")
        report = self._report(
            verdict,
            tensors,
            message=message,
            seeds=drawn,
            samples=count,
            noise=noise,
            pictures=pictures,
            **seen,
        )
        wanted = verdict in ("different", "precision") if localise is None else localise
        if wanted and worst_sample is not None and len(self.torch.modules()) >= 1:
            from .localisation import locate

            self.progress("looking for the first divergence", 0, 1)
            tree, divergence = locate(self, worst_sample, "precision" if verdict == "precision" else "meaning")
            report = dataclasses.replace(
                report, tree=tree, first_divergence=None if verdict in ("equal", "inconclusive") else divergence
            )
        return report

    def judgement(self, dtype: str, modes: tuple[str, ...]) -> Judgement:
        """Return what judges the samples in one precision."""
        return Judgement(self, dtype, modes)

    def _instability(self, sides: Iterable[Side] = SIDES) -> str:
        """Say which side gives other results for the same input, or nothing."""
        for side in sides:
            harness = self.torch if side == "torch" else self.flax
            weights, arguments = self.held, self.arguments
            if side == "flax":
                weights, arguments = self.held_flax, self.flax_arguments
            precise = "float64" if side not in self.lacks else None
            try:
                runs = [harness.run(weights, arguments, dtype=precise, seed=seed) for seed in (0, 1)]
            except CannotLiftError as error:
                self.lacks[side] = str(error)
                precise, runs = None, [harness.run(weights, arguments, seed=seed) for seed in (0, 1)]
            limit = MEANING_LIMIT if precise else 1e-3
            for one, two in zip(runs[0].outputs, runs[1].outputs, strict=True):
                if one.shape != two.shape:
                    return f"the {side} module is not deterministic: it returned shapes {one.shape} and {two.shape}"
                both = np.isfinite(one.astype(np.float64)) & np.isfinite(two.astype(np.float64))
                apart = float(
                    np.abs(np.where(both, one, 0).astype(np.float64) - np.where(both, two, 0)).max(initial=0.0)
                )
                if apart > limit * (scale_of([one.astype(np.float64)]) or 1.0):
                    return (
                        f"the {side} module is not deterministic: the same input gave results that differ by "
                        f"{apart:.3g}; switch its randomness off"
                    )
        return ""

    def _weights_held(self) -> list[TensorVerdict]:
        """Compare the weights that both sides hold, bit by bit, where they are not transferred."""
        if self.transfer:
            return []
        ours, theirs = self.pairing.aligned(self.held, "torch"), self.pairing.aligned(self.held_flax, "flax")
        found = []
        for match in self.pairing.matches:
            one, two = ours[match.torch.name], theirs[match.torch.name]
            differing = one.size if one.dtype != two.dtype else int((_bits(one) != _bits(two)).any(axis=-1).sum())
            verdict: Verdict = "different" if differing else "equal"
            found.append(
                TensorVerdict(
                    f"weight {match.torch.name}",
                    f"weight {match.flax.name}",
                    "weight",
                    one.shape,
                    one.dtype.name,
                    verdict,
                    f"{differing} of {one.size} elements that the two sides hold are not the same" if differing else "",
                    bad=differing,
                    count=one.size,
                )
            )
        return found

    def changed(self, side: Side, weights: Arrays, matches: list[pairings.Match], by: float) -> list[Array]:
        """Return the outputs of one side with some parameters poisoned (NaN) or changed at random."""
        weights = dict(weights if side == "torch" else self.pairing.to_flax(weights))
        random = np.random.default_rng(5)
        for match in matches:
            tensor = match.torch if side == "torch" else match.flax
            weights[tensor.source] = weights[tensor.source].copy()
            part = tensor.take(weights, side)
            part += np.asarray(by * (1.0 + random.normal(size=part.shape))).astype(part.dtype)
        arguments = self.arguments if side == "torch" else self.flax_arguments
        if self.large:
            return [wide(one) for one in (self.torch if side == "torch" else self.flax).run(weights, arguments).outputs]
        return [wide(output) for output in self._lifted_or_not(side, weights, arguments).outputs]

    def reaches(
        self, side: Side, before: Mapping[Side, list[Array]], weights: Arrays, matches: list[pairings.Match], by: float
    ) -> bool:
        """Whether a change of some parameters changes the output; NaN asks whether they are used at all."""
        pairs = list(zip(before[side], self.changed(side, weights, matches, by), strict=True))
        if np.isnan(by):
            return any(np.isnan(two).sum() > np.isnan(one).sum() for one, two in pairs if is_float(one))
        limit = 1e-11 if side not in self.lacks and not self.large else 1e-4
        scale = scale_of([one for one, _ in pairs]) or 1.0
        return any(
            float(np.nanmax(np.abs(one - two), initial=0.0)) > limit * scale for one, two in pairs if is_float(one)
        )

    def _environment(self) -> dict[str, str]:
        devices = {"torch device": str(self.torch.device), "flax device": str(self.flax.device)}
        return {**environment(), **devices, **record()}

    def _report(self, verdict: Verdict, tensors: list[TensorVerdict], **more: Any) -> Report:
        lacks = [f"{side} has no float64 here: {reason}" for side, reason in self.lacks.items()]
        return Report(
            verdict,
            tensors,
            pairing=self.pairing.rows(),
            notes=[*self.notes, *lacks],
            environment=self._environment(),
            torch_name=self.torch.name,
            flax_name=self.flax.name,
            **more,
        )

    def work(self) -> float:
        """Return about how many operations forward and backward of one side take."""
        size = sum(array.size for array in self.held.values())
        return 6.0 * size * max((_rows(leaf) for leaf in self.arguments.leaves), default=1)

    # ---- running samples

    def sample(self, kind: str, group: int, copy: int, seed: int) -> Sample:
        """Return one set of numbers; a copy above 0 is moved a little, a seed below 0 takes the given inputs."""
        stress, kind = kind.endswith(" stress"), kind.removesuffix(" stress")
        weights = self.held
        if kind == "own":
            weights = numbers.draw_weights(self.torch.parameters(), self.held, (abs(seed), group))
        arguments = self.arguments
        if seed >= 0:
            arguments = numbers.draw_inputs(self.arguments, (seed, group), stress=stress)
        if copy:
            weights = numbers.moved(weights, (abs(seed), group, copy))
            arguments = numbers.moved_inputs(arguments, (abs(seed), group, copy))
        arguments = self._as_given(arguments)
        flax = numbers.like(self.flax_arguments, arguments, self.same_inputs)
        return Sample(weights, arguments, flax, kind, group, (seed, group, copy), stress)

    def _as_given(self, arguments: Arguments) -> Arguments:
        """Return the arguments with what the Flax side does not hold, too, as it was given; it could not follow."""
        shared = set(map(numbers.place_index, self.same_inputs))
        pairs = zip(self.arguments.leaves, arguments.leaves, strict=True)
        return arguments.with_leaves([new if i in shared else given for i, (given, new) in enumerate(pairs)])

    def _note_inputs(self) -> None:
        """Say which floating-point inputs are taken as given in every sample, and which hold NaN."""
        shared = set(map(numbers.place_index, self.same_inputs))
        ours = zip(self.arguments.named(self.torch.argument_names), self.arguments.leaves, strict=True)
        theirs = zip(self.flax_arguments.named(self.flax.argument_names), self.flax_arguments.leaves, strict=True)
        own = [f"{name} of torch" for i, (name, leaf) in enumerate(ours) if i not in shared and _is_plain(leaf)]
        for place, (name, leaf) in zip(self.same_inputs, theirs, strict=True):
            own += [f"{name} of Flax"] if place is None and _is_plain(leaf) else []
        if own:
            self.notes.append(
                f"inputs that the other side does not hold, too: {', '.join(own)}; taken as given in every sample, "
                "and their gradients are not compared"
            )
        names = self.arguments.named(self.torch.argument_names)
        for name, leaf, mask in zip(names, self.arguments.leaves, numbers.masks(self.arguments), strict=True):
            unknown = int(np.isnan(leaf.astype(np.float64)).sum()) if is_float(leaf) else 0
            if unknown and unknown == leaf.size:
                raise ModuleFailedError(f"input {name} holds nothing but NaN")
            if unknown:
                self.notes.append(f"input {name}: {unknown} of {leaf.size} elements are NaN; drawn inputs hold none")
            if mask and is_float(leaf) and leaf.size > 1 and bool((leaf == leaf.flat[0]).all()):
                self.notes.append(
                    f"input {name} is {float(leaf.flat[0]):g} everywhere: taken for a mask and so as given in every "
                    "sample; give other numbers if it is none, or one that masks something"
                )

    def flax_weights(self, sample: Sample) -> Arrays:
        """Return the sample's weights for the Flax side."""
        if sample.kind == "held" and not self.transfer:
            return self.held_flax
        if self._converted is None or self._converted[0] is not sample.weights:
            converted = self.pairing.to_flax(sample.weights)
            self._converted = (
                sample.weights,
                {name: converted.get(name, array) for name, array in self.held_flax.items()},
            )
        return self._converted[1]

    def run(
        self,
        side: Side,
        sample: Sample,
        cotangents: list[Array] | None,
        dtype: str | None,
        mode: str = "eager",
        seed: int = 0,
    ) -> Run:
        """Run one side on a sample."""
        if side == "torch":
            run, call = self.torch.run, (sample.weights, sample.torch)
        else:
            run, call = self.flax.run, (self.flax_weights(sample), sample.flax)
        masks = {"masks": sample.group} if self.train else {}
        found: Run = run(*call, cotangents, dtype=dtype, mode=mode, seed=seed, **masks)
        return found

    def named(self, side: Side, run: Run) -> dict[str, tuple[str, Array]]:
        """Return the results of one side as torch name -> (kind, array with torch axes)."""
        found: dict[str, tuple[str, Array]] = {}
        for place, output in zip(self.structure, run.outputs, strict=True):
            found["output" if len(self.structure) == 1 else f"output{place}"] = ("output", output)
        names = self._input_names("torch")
        for j, same in enumerate(self.same_inputs):
            i = numbers.place_index(same)
            if i is None or not run.input_gradients:
                continue
            gradient = run.input_gradients[i if side == "torch" else j]
            if gradient is not None:
                if side == "flax" and isinstance(same, numbers.Rearranged):
                    gradient = same.to_torch(gradient)
                found[f"grad {names[i]}"] = ("input gradient", gradient)
        for name, gradient in self.pairing.aligned(run.parameter_gradients, side).items():
            found[f"grad {name}"] = ("matrix gradient" if gradient.ndim > 1 else "vector gradient", gradient)
        return found

    def _input_names(self, side: Side) -> list[str]:
        """Return a name for each input array; one that a parameter has, too, says that it is the input's."""
        if side == "torch":
            names = self.arguments.named(self.torch.argument_names)
            taken = {match.torch.name for match in self.pairing.matches}
        else:
            names = self.flax_arguments.named(self.flax.argument_names)
            taken = {match.flax.name for match in self.pairing.matches}
        return [f"{name} (input)" if name in taken else name for name in names]

    def flax_names(self) -> dict[str, str]:
        """Return torch name -> Flax name of inputs and parameters, as they stand in results."""
        names, flax_names = self._input_names("torch"), self._input_names("flax")
        found = {
            f"grad {names[i]}": f"grad {flax_names[j]}"
            for j, place in enumerate(self.same_inputs)
            if (i := numbers.place_index(place)) is not None
        }
        return found | {f"grad {match.torch.name}": f"grad {match.flax.name}" for match in self.pairing.matches}

    def tensors(self, torch: Run, flax: Run) -> dict[str, Tensor]:
        """Align the results of both sides by name, with torch axes."""
        ours, theirs, names = self.named("torch", torch), self.named("flax", flax), self.flax_names()
        return {
            name: Tensor(kind, names.get(name, name), array, theirs[name][1])
            for name, (kind, array) in ours.items()
            if name in theirs
        }


# ---- helpers


def _weights(harness: Any, what: str) -> Arrays:
    try:
        held: Arrays = harness.weights()
    except Exception as error:  # uninitialised, abstract, on the meta device
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModuleFailedError(f"the weights of the {what} module {harness.name} cannot be read: {reason}") from error
    for name, array in held.items():
        if array.dtype == np.object_:
            raise ModuleFailedError(f"{name} of the {what} module {harness.name} holds no numbers; initialise it first")
    return held


def _own_rules(modules: tuple[Any, Any]) -> Rules | None:
    """Return the rules of our own modules inside both, if there are any."""
    readers = [backends.load(side) for side in SIDES]
    configs = [reader.find_configs(module) for reader, module in zip(readers, modules, strict=True)]
    if not configs[0] or configs[0].keys() != configs[1].keys():
        return None
    with contextlib.suppress(ValueError):
        check_same_meaning(*configs)
        return own_rules(readers[0], modules[0])
    return None


def _is_plain(leaf: Array) -> bool:
    return is_float(leaf) and not numbers.is_mask(leaf)


def _rows(leaf: Array) -> int:
    """Return how many vectors an input stands for: its rows, the elements of integers, one of a mask of any dtype."""
    is_whole = leaf.dtype.kind in "iu"
    if leaf.dtype == bool or (is_whole and np.isin(leaf, (0, 1)).all()):
        return 1
    return max(1, leaf.size if is_whole else math.prod(leaf.shape[:-1]))


def _bits(array: Array) -> Array:
    """Return the bytes of every element."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
