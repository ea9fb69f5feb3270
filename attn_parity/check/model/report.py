"""The verdict on a whole model, as data and as lines of text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attn_bridge.whole_files import JsonObject

from ...results.findings import SEVERITY, Verdict


@dataclasses.dataclass(frozen=True)
class WorstTensor:
    """The tensor of a part that exceeds its allowance most: its name, its verdict, and the reason."""

    name: str
    verdict: str
    message: str


@dataclasses.dataclass(frozen=True)
class PairVerdict:
    """The verdict on two sides of a part.

    Attributes:
        first: the first side: ``transformers`` or ``torch``.
        second: the second one: ``flax``.
        verdict: as `compare` has it.
        place: path of the first divergence within the model, in our names; "" without one.
        direction: ``forward`` or ``backward``; "" without one.
        hint: a possible cause.
        worst: the tensors that are furthest off; empty if all are equal.
        tensors: how many were compared.
        notes: remarks for the reader.
        seconds: time it took.
    """

    first: str
    second: str
    verdict: Verdict
    place: str
    direction: str
    hint: str
    worst: tuple[WorstTensor, ...]
    tensors: int
    notes: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Whether a block gives the same with a cache, prompt first and then token by token, as all at once.

    Attributes:
        verdict: ``equal``, ``different`` or ``precision``.
        apart: side -> difference of its float64 results with and without a cache, relative to the largest value.
        message: the reason; "" if equal.
    """

    verdict: Verdict
    apart: dict[str, float]
    message: str


@dataclasses.dataclass(frozen=True)
class PartVerdict:
    """The verdict on a part of a model.

    Attributes:
        name: ``trf_blocks.3``, or ``ends`` for embeddings, last norm and head.
        verdict: the worst of its pairs', and of decoding.
        place: path of the first divergence within the model; "" without one.
        direction: ``forward`` or ``backward``; "" without one.
        hint: a possible cause.
        seconds: time the judgement took.
        pairs: the verdict on each pair of sides.
        decoding: the verdict on decoding with a cache; None if it was not judged.
    """

    name: str
    verdict: Verdict
    place: str
    direction: str
    hint: str
    seconds: float
    pairs: tuple[PairVerdict, ...] = ()
    decoding: Decoding | None = None

    @staticmethod
    def of(name: str, pairs: list[PairVerdict], decoding: Decoding | None, seconds: float) -> PartVerdict:
        """Return the verdict on a part from those of its pairs; the twins, where there are two, know places best."""
        wrong = max(pairs, key=lambda pair: (SEVERITY.index(pair.verdict), bool(pair.place), pair.first == "torch"))
        verdict, place, direction, hint = wrong.verdict, wrong.place, wrong.direction, wrong.hint
        if decoding is not None and SEVERITY.index(decoding.verdict) > SEVERITY.index(verdict):
            verdict, place, direction, hint = decoding.verdict, f"{name} (decoding)", "forward", decoding.message
        return PartVerdict(name, verdict, place, direction, hint, seconds, tuple(pairs), decoding)


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The verdict on a whole model.

    Attributes:
        folder: of the model.
        against: the folder of the other side's weights.
        parts: embeddings and head, then the blocks in order.
        kl: of every token, the Kullback-Leibler divergence of one side's distribution from the other's, in nats, summed
        over the vocabulary, ``(B, T)``.
        seconds: total time.
        oracle: the reference of the Flax twin: ``transformers``, or ``torch`` for the torch twin alone.
        notes: remarks for the reader, such as why `transformers` is not used.
        dtype: precision of the weights, in which it is judged.
        stopped: whether it was interrupted, so that parts and logits are missing.
    """

    folder: str
    against: str
    parts: tuple[PartVerdict, ...]
    kl: tuple[tuple[float, ...], ...]
    seconds: float
    oracle: str = "torch"
    notes: tuple[str, ...] = ()
    dtype: str = ""
    stopped: bool = False

    @property
    def passed(self) -> bool:
        """Whether every part is equal, and none is missing."""
        return not self.stopped and all(part.verdict == "equal" for part in self.parts)

    @property
    def first_divergence(self) -> PartVerdict | None:
        """The first part that is not equal, in order of execution; the head comes last, the embeddings first."""
        wrong = [part for part in self.parts if part.verdict != "equal"]
        return wrong[0] if wrong else None

    def to_json(self) -> JsonObject:
        """Return the report as data."""
        return {"schema": 1, "passed": self.passed, **dataclasses.asdict(self)}

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as one HTML page, and write it to a file if there is a path."""
        from ...rendering.html.model import as_html

        return as_html(self, path)

    def lines(self) -> list[str]:
        """Return the report as lines of text: a verdict per part, the first divergence, and the logits."""
        width = max((len(part.name) for part in self.parts), default=0)
        lines = [f"{part.name:<{width}}  {part.verdict:<12} {part.place}".rstrip() for part in self.parts]
        first = self.first_divergence
        if first is not None:
            lines.append(f"first divergence: {first.place or first.name} ({first.direction or first.verdict})")
            lines += [f"hint: {first.hint}"] if first.hint else []
        lines += [f"note: {note}" for note in self.notes]
        tokens = [one for row in self.kl for one in row]
        if tokens:
            lines.append(f"logits: KL divergence per token at most {max(tokens):.2e} nats, on average "
                         f"{sum(tokens) / len(tokens):.2e}, over {len(tokens)} tokens")  # fmt: skip
        count = sum(part.verdict == "equal" for part in self.parts)
        judged = "the Flax twin against transformers" if self.oracle == "transformers" else "torch twin and Flax twin"
        stopped = "; interrupted" if self.stopped else ""
        return [*lines, f"{count} of {len(self.parts)} parts equal, {self.seconds:.0f} s ({judged}{stopped})"]
