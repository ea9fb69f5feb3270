"""Whole models judged block by block: the twins of a model folder, or those of two folders, in the memory of one block.

Every block is built in both frameworks with its weights, judged by `compare` on what really reaches it, forward and
backward, run on, and dropped. What comes out at the end are the logits of both, and how far apart they are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends
from ...checkpoints import configs, containers, modules
from ...specs import DecoderConfig
from ...validation import check_integer
from ..compare.driver import compare
from ..compare.results.report import Report

Array = np.ndarray[Any, Any]
SIDES: tuple[modules.Side, modules.Side] = ("torch", "flax")

ROWS = 1 << 25
"""Numbers of the embedding table that the judge takes its tokens from; a whole one is compared bit for bit."""


@dataclasses.dataclass(frozen=True)
class PartVerdict:
    """What the judge says of a part of a model.

    Attributes:
        name: ``trf_blocks.3``, or ``ends`` for embeddings, last norm and head.
        verdict: as `compare` has it.
        place: path of the first divergence within the model; "" where there is none.
        direction: ``forward`` or ``backward``; "" where there is none.
        hint: what it may be.
        seconds: time the judgement took.
    """

    name: str
    verdict: str
    place: str
    direction: str
    hint: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What the judge says of a whole model.

    Attributes:
        folder: of the model.
        against: the folder whose weights the other side has.
        parts: embeddings and head, then the blocks in order.
        kl: of every token, the Kullback-Leibler divergence of one side's distribution from the other's, in nats, summed
            over the vocabulary, ``(B, T)``.
        seconds: time of it all.
    """

    folder: str
    against: str
    parts: tuple[PartVerdict, ...]
    kl: tuple[tuple[float, ...], ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every part is equal."""
        return all(part.verdict == "equal" for part in self.parts)

    @property
    def first_divergence(self) -> PartVerdict | None:
        """The first part that is not equal, in order of execution; the head comes last, the embeddings first."""
        wrong = [part for part in self.parts if part.verdict != "equal"]
        return wrong[0] if wrong else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        return {"schema": 1, "passed": self.passed, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return the report as lines of text: a verdict per part, the first divergence, and the logits."""
        width = max(len(part.name) for part in self.parts)
        found = [f"{part.name:<{width}}  {part.verdict:<12} {part.place}".rstrip() for part in self.parts]
        first = self.first_divergence
        if first is not None:
            found.append(f"first divergence: {first.place or first.name} ({first.direction or first.verdict})")
            found += [f"hint: {first.hint}"] if first.hint else []
        tokens = [one for row in self.kl for one in row]
        found.append(f"logits: KL divergence per token at most {max(tokens):.2e} nats, on average "
                     f"{sum(tokens) / len(tokens):.2e}, over {len(tokens)} tokens")  # fmt: skip
        count = sum(part.verdict == "equal" for part in self.parts)
        return [*found, f"{count} of {len(self.parts)} parts equal, {self.seconds:.0f} s"]


class _Half:
    """One side of the model: its weights are read part by part."""

    def __init__(self, side: modules.Side, folder: Path, config: DecoderConfig, dtype: str):
        self.side, self.folder, self.config, self.dtype = side, folder, config, dtype
        self.backend: Any = backends.load(side)

    def block(self, index: int) -> Any:
        module = self.backend.build_blank("DecoderBlock", self.config.blocks[index], self.dtype)
        modules.load_part(self.side, self.folder, module, f"trf_blocks.{index}.")
        return module

    def ends(self, rows: int) -> Any:
        """Return embeddings and head of the first `rows` tokens."""
        config = self.config.replace(blocks=(), vocab_size=rows)
        module = self.backend.build_blank("DecoderModel", config, self.dtype)
        modules.load_part(self.side, self.folder, module, "", rows=(self.config.vocab_size, rows))
        return module

    def run(self, function: Any, array: Array) -> Array:
        with self.backend.precision(str(array.dtype)):
            found: Array = self.backend.call(function, array)
        return found


def check_model(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    batch: int = 2,
    tokens: int = 12,
    seeds: int = 2,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelReport:
    """Judge the twins of a model folder part by part.

    Args:
        folder: a folder that `DecoderModel.from_pretrained` reads.
        against: the folder of the Flax side's weights, of the same config; None is the same folder.
        batch: rows of tokens.
        tokens: tokens of each.
        seeds: how many times the judge draws numbers for a part.
        seed: of the tokens.
        progress: called with a part's name, how many are done, and how many there are.

    Raises:
        CheckpointError: (a ValueError) no such folder, no config, no decoder of ours, or malformed files.
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        ValueError: a number that does not fit, or folders whose configs are different.
    """
    for name, value in (("batch", batch), ("tokens", tokens), ("seeds", seeds)):
        check_integer(name, value)
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    start = time.perf_counter()
    paths = [modules.find_folder(folder), modules.find_folder(folder if against is None else against)]
    config, other = (configs.read_config("DecoderModel", path) for path in paths)
    if config != other:
        raise ValueError(f"{paths[0]} and {paths[1]} must have one config; a part of theirs is different")
    for side, path in zip(SIDES, paths, strict=True):
        modules.check_names(side, path, config)
    halves = [_Half(side, path, config, _dtype(path)) for side, path in zip(SIDES, paths, strict=True)]
    rows = min(config.vocab_size, max(8, ROWS // config.emb_dim))
    ids = np.random.default_rng(seed).integers(0, rows, (batch, tokens)).astype(np.int32)
    names = ["ends", *(f"trf_blocks.{index}" for index in range(len(config.blocks)))]
    parts: list[PartVerdict] = []

    def judge(name: str, made: list[Any], inputs: Array) -> None:
        if progress is not None:
            progress(name, len(parts), len(names))
        begin = time.perf_counter()
        report = compare(made[0], made[1], inputs, transfer=False, seeds=seeds, first_seed=seed)
        parts.append(_verdict(name, report, time.perf_counter() - begin))

    ends = [half.ends(rows) for half in halves]
    judge("ends", ends, ids)
    states = [half.run(one.embed, ids) for half, one in zip(halves, ends, strict=True)]
    del ends
    for index in range(len(config.blocks)):
        blocks = [half.block(index) for half in halves]
        judge(names[index + 1], blocks, states[0])
        states = [half.run(one, state) for half, one, state in zip(halves, blocks, states, strict=True)]
        del blocks
    ends = [half.ends(rows) for half in halves]
    logits = [half.run(one.head, state) for half, one, state in zip(halves, ends, states, strict=True)]
    if progress is not None:
        progress("logits", len(names), len(names))
    seconds = time.perf_counter() - start
    return ModelReport(str(paths[0]), str(paths[1]), tuple(parts), _divergences(*logits), seconds)


def _verdict(name: str, report: Report, seconds: float) -> PartVerdict:
    first = report.first_divergence
    if first is None:
        return PartVerdict(name, report.verdict, "", "", "", seconds)
    inner = first.path if name == "ends" else f"{name}.{first.path}".rstrip(".")
    return PartVerdict(name, report.verdict, inner, first.direction, first.hint or "", seconds)


def _divergences(first: Array, second: Array) -> tuple[tuple[float, ...], ...]:
    """Return the divergence of each token's distribution from the other side's, over the whole vocabulary."""
    logs = [_log_softmax(one.astype(np.float64)) for one in (first, second)]
    apart = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return tuple(tuple(map(float, row)) for row in np.maximum(apart, 0.0))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def _dtype(folder: Path) -> str:
    """Return the dtype that most numbers of a folder have, in which the model is built."""
    with containers.open_reader(folder) as reader:
        counts: dict[str, int] = {}
        for info in reader.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes
    floating: Mapping[str, int] = {name: count for name, count in counts.items() if "float" in name}
    return max(floating, key=lambda name: floating[name]) if floating else "float32"
