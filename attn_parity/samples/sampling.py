"""Which samples a pair is judged on, and their numbers: the user's own, and drawn ones that are not degenerate.

The list of samples follows from the pair's work (parameters times rows) and the seeds alone, never from a clock: the
same pair is judged on the same samples wherever and whenever it runs.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ..results.findings import Side
from ..sides.arrays import is_float, numpy_dtype
from ..sides.subject import Arguments, Array, Arrays, SideWeight
from .calls import masks

OutputStructure = list[tuple[str, tuple[int, ...], str]]
"""Place, shape and dtype of every output."""

MOVE = 2.0**-10
"""By how much of itself every number of a copy is moved: enough to redraw every rounding, too little to change more."""

COPIES = 3
"""Slightly moved copies of each draw, which redraw every rounding."""

AGAIN = 4
"""A loss of precision is confirmed on this many times as many fresh seeds before it is called one."""

QUICK, LARGE = 5e9, 5e10
"""Work of one run (6 x parameters x rows, the operations of forward and backward) up to which every sample is run, and
beyond which only one of held and one of own weights is."""

MEDIUM_SEEDS = 3
"""Most seeds between the two."""

MANY = 10_000_000
"""Numbers from which on weights are drawn in threads."""


class Planned(NamedTuple):
    """Key of a sample before it is drawn.

    `kind` is ``held`` (the pair's own weights) or ``own`` (drawn ones), followed by `` stress`` for inputs that are
    drawn to be hard; samples of one `group` differ by tiny moves only, `copy` 0 is not moved; a `seed` below 0 takes
    the inputs as given.
    """

    kind: str
    group: int
    copy: int
    seed: int


FIRST = Planned("held", 0, 0, -1)
"""The sample that everything begins with: the pair's own weights and the inputs as given."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One set of numbers for both sides: the first side's weights, the arguments of both calls, and the sample's key.

    `stress`: whether the inputs were drawn to be hard. Such samples judge the meaning of the two sides; their precision
    may well differ there.
    """

    weights: Arrays
    arguments: Mapping[Side, Arguments]
    planned: Planned

    @property
    def kind(self) -> str:
        """``held`` or ``own``: whose weights they are."""
        return self.planned.kind.removesuffix(" stress")

    @property
    def stress(self) -> bool:
        """Whether the inputs were drawn to be hard."""
        return self.planned.kind.endswith(" stress")

    @property
    def group(self) -> int:
        """Group of the sample; see `Planned`."""
        return self.planned.group

    @property
    def seed(self) -> tuple[int, int, int]:
        """Seed of what belongs to the sample, such as its cotangents."""
        return self.planned.seed, self.planned.group, self.planned.copy

    def title(self) -> str:
        """Return the sample as a reader knows it: ``your weights``, ``random weights, seed 1``."""
        weights = "your weights" if self.kind == "held" else "random weights"
        inputs = "hard inputs" if self.stress else "your inputs" if self.planned.seed < 0 else ""
        if self.kind == "own":
            return f"{weights}, {'hard inputs, ' if self.stress else ''}seed {self.planned.seed}"
        return (
            weights if inputs == "your inputs" else f"{weights}, {inputs or 'random inputs'}, seed {self.planned.seed}"
        )


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of a plan a pair is worth.

    Attributes:
        work: operations of one forward and backward pass of one side, about.
    """

    work: float

    @property
    def quick(self) -> bool:
        """Whether every sample is run."""
        return self.work <= QUICK

    @property
    def large(self) -> bool:
        """Whether only one sample of held and one of own weights is run."""
        return self.work > LARGE

    def seeds(self, wanted: int) -> int:
        """Return how many times numbers are drawn."""
        return wanted if self.quick else 1 if self.large else min(wanted, MEDIUM_SEEDS)

    def first_look(self, seeds: int, first_seed: int, *, transfer: bool) -> list[Planned]:
        """Return the samples that every verdict begins with."""
        first_sample, own = FIRST, [Planned("own", 1 + s, 0, first_seed + s) for s in range(self.seeds(seeds))]
        if self.large:
            return [own[0], first_sample]
        plan = [first_sample, own[0], Planned("own stress", 1000, 0, first_seed), *own[1:]]
        if not self.quick:
            return plan[:4]
        if transfer:
            plan.append(Planned("held stress", 1001, 0, first_seed + 1))
        moved = [one for one in plan if "stress" not in one.kind and (one.kind == "own" or transfer)]
        return plan + [one._replace(copy=copy) for copy in range(1, COPIES) for one in moved]

    def second_look(self, seeds: int, first_seed: int, *, transfer: bool) -> list[Planned]:
        """Return fresh samples that decide where precision was in doubt."""
        many, copies = (AGAIN * seeds, COPIES) if self.quick else (1 if self.large else 4, 1)
        return [
            # Seeds behind those of the first look, of which there are at most `MAX_SEEDS` (1,000): fresh numbers.
            Planned("held" if n % 4 == 3 and transfer else "own", 2000 + n, copy, first_seed + 10_000 + n)
            for n in range(many)
            for copy in range(copies)
        ]


# ---- numbers


def draw_inputs(
    arguments: Arguments,
    seed: tuple[int, ...],
    *,
    stress: bool = False,
    fixed: Collection[int] = (),
    vary: Collection[int] = (),
) -> Arguments:
    """Draw other numbers of the same shapes.

    Floating-point arrays keep their mean and spread; under `stress` their vectors (along the last axis) differ in size
    by two orders of magnitude and some are nearly constant with a mean far from zero. Arrays without negative values
    get none. Masks (see `masks`) and integers stay as they are.

    Args:
        arguments: the call.
        seed: of the random numbers.
        stress: draw hard inputs.
        fixed: arrays that stay as they are.
        vary: arrays of integers to shuffle.
    """
    random = np.random.default_rng([*seed, 7])
    drawn = []
    for i, (leaf, mask) in enumerate(zip(arguments.leaves, masks(arguments), strict=True)):
        if i in vary and leaf.dtype.kind in "biu":
            drawn.append(random.permutation(leaf.ravel()).reshape(leaf.shape))
        elif i in vary or not (mask or i in fixed or not is_float(leaf)):
            drawn.append(_draw_like(leaf, random, stress))
        else:
            drawn.append(leaf)
    return arguments.with_leaves(drawn)


def _draw_like(leaf: Array, random: np.random.Generator, stress: bool) -> Array:
    """Draw normal numbers with the mean and spread of an array, without negatives if it has none.

    Under `stress` the scale and the mean vary from row to row.
    """
    if leaf.size == 0:
        return leaf
    numbers = leaf.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    mean, spread = (float(finite.mean()), float(finite.std())) if finite.size else (0.0, 1.0)
    spread = spread or abs(mean) or 1.0
    drawn: Array = np.asarray(random.normal(size=leaf.shape))
    if stress:
        leading = (*leaf.shape[:-1], 1) if leaf.ndim else ()
        drawn = drawn * random.choice([0.03, 0.3, 1.0, 1.0, 2.0], size=leading)
        drawn += random.choice([0.0, 0.0, 0.0, 1.0, -1.5], size=leading)
    drawn = drawn * spread + mean
    return np.asarray(drawn if bool((finite < 0).any()) else np.abs(drawn)).astype(leaf.dtype)


def draw_weights(
    parameters: Mapping[str, SideWeight],
    weights: Mapping[str, Array],
    seed: tuple[int, ...],
    kept: Collection[str] = (),
) -> Arrays:
    """Draw weights that are not degenerate: biases and scales are neither 0 nor 1, no two tensors are alike.

    Whole numbers, and the tensors in `kept`, stay as they are. State that holds no negative number gets none.
    """

    def draw(name: str) -> Array:
        if name in kept or not is_float(weights[name]):
            return weights[name]
        random = np.random.default_rng([*seed, zlib.crc32(name.encode())])
        drawn = _draw_weight(random, name, parameters[name]).astype(weights[name].dtype, copy=False)
        # A variance or a count has a root or a logarithm, which a negative number has not.
        return np.asarray(np.abs(drawn)) if parameters[name].role == "state" and _is_positive(weights[name]) else drawn

    if sum(array.size for array in weights.values()) < MANY:
        return {name: draw(name) for name in parameters}
    with ThreadPoolExecutor() as pool:  # each tensor has a generator of its own, which draws without the lock
        return dict(zip(parameters, pool.map(draw, parameters), strict=True))


VARIANCE = re.compile(r"(moving|running)_var(iance)?$|var_ema\b")
"""Names of variances of Keras and Haiku, among the weights of a function, whose roles are unknown."""


def _is_positive(array: Array) -> bool:
    return bool((array >= 0).all() and array.any())


def _draw_weight(random: np.random.Generator, name: str, parameter: SideWeight) -> Array:
    shape = parameter.shape
    if parameter.role == "statistic" or (not parameter.owner and VARIANCE.search(name)):
        is_mean = name.rpartition(".")[2].endswith("mean")
        return np.asarray(0.5 * random.normal(size=shape) if is_mean else random.uniform(0.5, 2.0, size=shape))
    if len(shape) == 0:
        return np.asarray(random.uniform(0.5, 1.5))
    if len(shape) == 1:
        return random.choice([-1.0, 1.0], size=shape) * random.uniform(0.2, 1.6, size=shape)
    last = name.rpartition(".")[2]
    if "Embed" in parameter.owner or last == "embedding":
        return np.asarray(random.normal(size=shape))
    is_known = parameter.owner not in ("", "Module")
    if is_known and last in ("weight", "in_proj_weight"):
        inner = float(np.prod(shape[1:]))
    elif is_known and last == "kernel":
        inner = float(np.prod(shape[:-1]))
    else:
        inner = float(np.prod(shape)) ** (1.0 / len(shape))
    drawn = random.standard_normal(shape, dtype=np.float32)  # a float32 draw takes a third of the time
    drawn *= np.float32(1.0 / np.sqrt(max(inner, 1.0)))
    return drawn


def moved(arrays: Mapping[str, Array], seed: tuple[int, ...], by: float = MOVE, kept: Collection[str] = ()) -> Arrays:
    """Return weights with every number moved at random by a small part of itself, but for the tensors in `kept`."""
    moved_weights = {}
    for name, array in arrays.items():
        random = np.random.default_rng([*seed, zlib.crc32(name.encode()), 1])
        moved_weights[name] = array if name in kept else _moved(array, random, by)
    return moved_weights


def moved_inputs(
    arguments: Arguments, seed: tuple[int, ...], by: float = MOVE, fixed: Collection[int] = ()
) -> Arguments:
    """Return the arguments with every floating-point number moved by a small part of itself.

    Masks and the arrays of `fixed` stay as they are.
    """
    random = np.random.default_rng([*seed, 2])
    pairs = zip(arguments.leaves, masks(arguments), strict=True)
    return arguments.with_leaves(
        [leaf if mask or i in fixed else _moved(leaf, random, by) for i, (leaf, mask) in enumerate(pairs)]
    )


def _moved(array: Array, random: np.random.Generator, by: float) -> Array:
    if not is_float(array):
        return array
    noise = random.standard_normal(array.shape, dtype=np.float32)
    result: Array = np.asarray(array * (1.0 + by * noise)).astype(array.dtype)
    return result


def cotangents(outputs: OutputStructure, seed: tuple[int, ...], dtype: str | None) -> list[Array]:
    """Draw a gradient of the loss for every output, as the precision of the run holds it."""
    random = np.random.default_rng([*(abs(one) for one in seed), 3])
    drawn_cotangents = []
    for _, shape, own in outputs:
        drawn = random.normal(size=shape)
        wanted = numpy_dtype(own)
        drawn_cotangents.append(
            drawn.astype(numpy_dtype(dtype) if dtype else wanted) if is_float(np.empty(0, wanted)) else drawn
        )
    return drawn_cotangents


def rounded(sample: Sample, dtype: str | None) -> Sample:
    """Return the sample with its floating-point numbers rounded to `dtype`; unchanged for None."""
    if dtype is None:
        return sample

    def cast(array: Array) -> Array:
        return array.astype(numpy_dtype(dtype)) if is_float(array) else array

    return dataclasses.replace(
        sample,
        weights={name: cast(array) for name, array in sample.weights.items()},
        arguments={
            side: one.with_leaves([cast(leaf) for leaf in one.leaves]) for side, one in sample.arguments.items()
        },
    )
