"""Whole models judged block by block: the Flax twin against `transformers`' own model and the torch twin.

Every block is built on both sides with its weights, judged by `compare` on what really reaches it, forward and
backward, run on, and dropped. What comes out at the end are the logits of both, and how far apart they are.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from attn_bridge.checkpoints import configs, modules
from attn_bridge.checkpoints.hub import reading
from attn_bridge.specs import DecoderConfig
from attn_bridge.validation import check_integer

from ...compare.driver import compare
from ...compare.prepare import subject_of
from ...pairing import Pairing
from ...results.findings import SEVERITY
from ...results.report import Report
from ...sides.arrays import LARGE
from ...sides.subject import Array, load_adapter
from . import decoding, same_elements
from .makers import Maker, Theirs, Twin, dtype_of
from .report import ModelReport, PairVerdict, PartVerdict, WorstTensor

ROWS = 1 << 25
"""Numbers of the embedding table that the judge takes its tokens from; a whole one is compared bit for bit."""

SHOWN = 5
"""Tensors of a pair that are named as the worst."""

Oracle = Literal["auto", "transformers", "torch"]


def check_model(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    oracle: Oracle = "auto",
    batch: int = 2,
    tokens: int = 12,
    seeds: int = 2,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelReport:
    """Judge the Flax twin of a model folder part by part, against `transformers`' own model and the torch twin.

    If `transformers` is not installed, or does not know the model, the torch twin alone is the reference. Otherwise
    large blocks are judged against `transformers` alone.

    Args:
        folder: a folder that `DecoderModel.from_pretrained` reads.
        against: the folder of the Flax side, whose parameters have the same names and shapes; its config is judged,
            too. None is the same folder.
        oracle: ``transformers`` or ``torch`` for a single reference; ``auto`` for both, as available.
        batch: rows of tokens.
        tokens: tokens per row.
        seeds: number of draws per part.
        seed: of the tokens.
        progress: called with a part's name, the number of finished parts and the total.

    Returns:
        The report; after Ctrl-C, of the parts judged before.

    Raises:
        CheckpointError: (a ValueError) no such folder, no config, an unknown decoder, or malformed files.
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        ValueError: a number that does not fit, folders whose parameters differ, or `transformers` is requested and
            missing.
    """
    for name, value in (("batch", batch), ("tokens", tokens), ("seeds", seeds)):
        check_integer(name, value)
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if oracle not in get_args(Oracle):
        raise ValueError(f"oracle ({oracle}) must be one of {', '.join(get_args(Oracle))}")
    paths = reading.find_folder(folder), reading.find_folder(folder if against is None else against)
    walk = _Walk(paths, oracle, seeds, seed, progress)
    positions = walk.config.num_positions
    if positions is not None and tokens > positions:
        raise ValueError(f"tokens ({tokens}) must be at most num_positions ({positions})")
    return walk.report(batch, tokens)


class _Walk:
    """One walk through a model."""

    def __init__(
        self, paths: tuple[Path, Path], oracle: Oracle, seeds: int, seed: int, progress: Callable[..., None] | None
    ):
        self.paths, self.seeds, self.seed, self.progress = paths, seeds, seed, progress
        self.start = time.perf_counter()
        self.config, other = (DecoderConfig.read(configs.read_config("DecoderModel", path)) for path in paths)
        _check_chain(paths[0], self.config)
        _check_alike(paths, (self.config, other))
        modules.check_names("torch", paths[0], self.config)
        modules.check_names("flax", paths[1], other)
        self.dtype = dtype_of(paths[0])
        self.notes: list[str] = []
        self.flax = Twin("flax", paths[1], other, self.dtype)
        self.torch = Twin("torch", paths[0], self.config, self.dtype)
        self.beside = Twin("flax", paths[0], self.config, self.dtype)
        self.theirs = None if oracle == "torch" else self._theirs(needed=oracle == "transformers")
        self.twins = oracle != "transformers"
        self.parts: list[PartVerdict] = []
        self.rows = min(self.config.vocab_size, max(8, ROWS // self.config.emb_dim))
        self.names = ["ends", *(f"trf_blocks.{index}" for index in range(len(self.config.blocks)))]

    def _theirs(self, *, needed: bool) -> Theirs | None:
        try:
            return Theirs(self.paths[0], self.config, self.dtype)
        except _unknown_model() as error:
            self._do_without(error, needed=needed)
        return None

    def _do_without(self, error: Exception, *, needed: bool) -> None:
        """Take the torch twin alone for the measure where `transformers` can't be asked."""
        if needed:
            raise ValueError(f"{self.paths[0]}: {error}") from None
        self.theirs = None
        self.notes.append(f"{error}: the torch twin alone is the measure")

    def _make(self, size: int, make: Callable[[Maker], object]) -> dict[str, object]:
        """Return side -> its part that `make` builds, of the sides that judge a part of `size` parameters."""
        try:
            return {side.name: make(side) for side in self._sides(size)}
        except _unknown_model() as error:  # it has such a model, and does not read these tensors
            self._do_without(error, needed=not self.twins)
            return {side.name: make(side) for side in self._sides(size)}

    def report(self, batch: int, tokens: int) -> ModelReport:
        """Judge all parts."""
        kl: tuple[tuple[float, ...], ...] = ()
        stopped = False
        ids = np.random.default_rng(self.seed).integers(0, self.rows, (batch, tokens)).astype(np.int32)
        # JAX cuts float64 down to float32 where nothing asks it not to.
        wide = self.flax.backend.precision if self.dtype == "float64" else contextlib.nullcontext
        try:
            with wide(self.dtype):
                kl = self._judged(ids)
        except KeyboardInterrupt:
            if not self.parts:
                raise
            stopped = True
        return ModelReport(
            str(self.paths[0]),
            str(self.paths[1]),
            tuple(self.parts),
            kl,
            time.perf_counter() - self.start,
            "torch" if self.theirs is None else "transformers",
            tuple(self.notes),
            self.dtype,
            stopped,
        )

    def _judged(self, ids: Array) -> tuple[tuple[float, ...], ...]:
        made = self._make(self._size_of_ends(), lambda side: side.ends(self.rows))
        self._judge("ends", lambda side, **options: side.ends(self.rows, **options), made, ids, None)
        del made
        twins = {side.name: side.ends(self.rows) for side in (self.torch, self.flax)}
        states = {"first": self.torch.run(twins["torch"].embed, ids), "flax": self.flax.run(twins["flax"].embed, ids)}
        del twins
        for index, block in enumerate(self.config.blocks):
            size = sum(math.prod(row.shape) for row in block.parameters)
            blocks = self._make(size, lambda side: side.block(index))  # noqa: B023 - it is called before the next one
            self._judge(
                self.names[index + 1],
                lambda side, **options: side.block(index, **options),  # noqa: B023 - it is called before the next one
                blocks,
                states["first"],
                block,
            )
            first = next(side for side in self._sides(size) if side.name != "flax")
            states = {
                "first": first.run(blocks[first.name], states["first"]),
                "flax": self.flax.run(blocks["flax"], states["flax"]),
            }
            del blocks
        ends = {side.name: side.ends(self.rows) for side in (self.torch, self.flax)}
        logits = (
            self.torch.run(ends["torch"].head, states["first"]),
            self.flax.run(ends["flax"].head, states["flax"]),
        )
        self._tell("logits")
        return _divergences(*logits)

    def _size_of_ends(self) -> int:
        rows = self.config.embedding_parameters, self.config.head_parameters
        return sum(math.prod(row.shape) for some in rows for row in some) * self.rows // self.config.vocab_size

    def _sides(self, size: int) -> list[Maker]:
        """Return the sides of a part of some size, the Flax twin last."""
        has_both = self.twins and (self.theirs is None or size < LARGE)
        first: list[Maker] = [] if self.theirs is None else [self.theirs]
        return [*first, *([self.torch] if has_both or not first else []), self.flax]

    def _tell(self, name: str) -> None:
        if self.progress is not None:
            self.progress(name, len(self.parts), len(self.names))

    def _judge(
        self, name: str, make: Callable[..., object], made: dict[str, object], inputs: Array, block: object
    ) -> None:
        """Judge a part by each available pair of sides."""
        self._tell(name)
        begin = time.perf_counter()
        pairs = []
        sides: dict[str, Maker] = {side.name: side for side in self._sides(0)}
        for first in [one for one in made if one != "flax"]:
            started = time.perf_counter()
            rules = self._pairing(make, sides[first], made) if first == "transformers" else None
            report = compare(
                made[first],
                made["flax"],
                inputs,
                transfer=False,
                reference=first == "transformers",
                rules=rules,
                seeds=self.seeds,
                first_seed=self.seed,
            )
            pairs.append(_verdict(name, first, report, time.perf_counter() - started))
        decoded = None
        if block is not None and "torch" in made:
            decoded = decoding.judge(made["torch"], made["flax"], inputs, self.dtype)
        self.parts.append(PartVerdict.of(name, pairs, decoded, time.perf_counter() - begin))

    def _pairing(self, make: Callable[..., object], side: Maker, made: dict[str, object]) -> Pairing | None:
        """Return which parameter of `transformers`' part is which of ours, as both read a checkpoint."""
        first, second = subject_of(made[side.name]), subject_of(made["flax"])
        size = sum(math.prod(one.shape) for one in first.parameters().values())
        if size >= LARGE:
            return None
        weights = [subject_of(make(one, numbered=True)).weights() for one in (side, self.beside)]
        return same_elements.pair(weights[0], weights[1], first.parameters(), second.parameters())


def _unknown_model() -> type[Exception]:
    """Return the exception for `transformers` missing or not supporting a model."""
    error_class: type[Exception] = load_adapter("torch", "hugging_face").UnknownModelError
    return error_class


def _check_chain(path: Path, config: DecoderConfig) -> None:
    """Refuse a model whose blocks read more than the output of the previous one: they are run one at a time."""
    for number, block in enumerate(config.blocks):
        what = "" if block.layer_input is None else "the per-layer embeddings"
        what = what if block.keys_of is None else f"the keys of blocks[{block.keys_of}]"
        if what:
            raise ValueError(
                f"{path}: blocks are judged one at a time, and blocks[{number}] also reads {what}; attn-bridge compare "
                "judges whole models"
            )


def _check_alike(paths: tuple[Path, Path], configs: tuple[DecoderConfig, DecoderConfig]) -> None:
    """Refuse two folders whose models are not made of the same parameters."""
    first, second = ({row.rule.torch: row.shape for row in config.parameters} for config in configs)
    if first != second:
        names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
        shapes = ["none" if side.get(names[0]) is None else str(side[names[0]]) for side in (first, second)]
        raise ValueError(
            f"{paths[0]} and {paths[1]} must have parameters of the same names and shapes; {names[0]} is {shapes[0]} "
            f"and {shapes[1]}"
        )


def _verdict(name: str, first: str, report: Report, seconds: float) -> PairVerdict:
    bad = sorted(
        (one for one in report.tensors if one.verdict != "equal"),
        key=lambda divergence: -SEVERITY.index(divergence.verdict),
    )
    worst = tuple(WorstTensor(one.second_name, one.verdict, one.message) for one in bad[:SHOWN])
    where = direction = hint = ""
    if report.first_divergence is not None:
        divergence = report.first_divergence
        inner = divergence.path if first == "torch" else divergence.second_path or divergence.path
        where = inner if name == "ends" else f"{name}.{inner}".rstrip(".")
        direction, hint = divergence.direction, divergence.hint or ""
    notes, count = tuple(report.notes), len(report.tensors)
    return PairVerdict(first, "flax", report.verdict, where, direction, hint, worst, count, notes, seconds)


def _divergences(first: Array, second: Array) -> tuple[tuple[float, ...], ...]:
    """Return the divergence of each token's distribution from the other side's, over the whole vocabulary."""
    logs = [_log_softmax(one.astype(np.float64)) for one in (first, second)]
    apart = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return tuple(tuple(map(float, row)) for row in np.maximum(apart, 0.0))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    logarithms: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logarithms
