"""Judge log-probabilities of two models by the noise that rounding in bfloat16 makes in one of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..results.findings import Verdict
from ..sides.libraries import Value
from ..sides.subject import Array
from ..verdict.measures import MAX_LIMIT, RMS_LIMIT
from .models import scored
from .sequences import Sequences, check_alike, read, sequences

HOW = "give a model as a side, or noise: log-probabilities of the first side's model as bfloat16 gives them"

UNSCORED = "null in JSON lines, or 0 in an array mask of an .npz file, marks a token that is not scored"

MOST = 10
"""Most tokens that the text of a report names."""

JUMP = 10.0
"""Times the usual noise beyond which a token jumps; in tiny dense models rounding moves tokens by up to 6 times."""

TO_RMS = 1.4826
"""Root mean square of normal numbers whose absolute values have the median 1."""


@dataclasses.dataclass(frozen=True)
class TokenGap:
    """One token whose log-probabilities are further apart than rounding takes them, or finite on one side only.

    Attributes:
        sequence: number of the sequence.
        position: position in it.
        token: its id; None where ids are unknown.
        first: log-probability of the first side; NaN or -inf where it has no number.
        second: log-probability of the second side.
        allowed: the gap that rounding may make there; NaN if unknown.
    """

    sequence: int
    position: int
    token: int | None
    first: float
    second: float
    allowed: float

    def __str__(self) -> str:
        name = "" if self.token is None else f" (id {self.token})"
        numbers = f"sequence {self.sequence}, token {self.position}{name}: {self.first:.4f} and {self.second:.4f}"
        gap = abs(self.first - self.second)
        return f"{numbers}, {gap:.3g} apart, {self.allowed:.3g} allowed" if math.isfinite(gap) else numbers


@dataclasses.dataclass(frozen=True)
class LogprobsReport:
    """Result of `attn_bridge.parity.logprobs`.

    Attributes:
        verdict: ``equal``: rounding explains every token; ``different``: a token or all of them are beyond it, or a
            token is NaN or -inf on one side only; ``inconclusive``: no noise was given.
        gap: root mean square of the gaps, in nats.
        noise: root mean square of what rounding in bfloat16 does; None if unknown.
        explained: part of the gap that the noise explains, 0 to 1; None if unknown.
        mean: mean of first minus second: the part of the gap in one direction.
        count: tokens with a log-probability on both sides.
        beyond: the tokens beyond their allowance: those that are finite on one side only, then the worst first.
        message: the reason in one line, empty when equal.
        hint: what single tokens that jump may come from, where those of the noise jump too; empty otherwise.
    """

    verdict: Verdict
    gap: float
    noise: float | None
    explained: float | None
    mean: float
    count: int
    beyond: list[TokenGap]
    message: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, Value]:
        """Return the report as JSON-ready data; numbers that are not finite become their names, such as ``nan``."""
        data = dataclasses.asdict(self)
        data["beyond"] = [{name: _plain(value) for name, value in token.items()} for token in data["beyond"]]
        return data

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.count} tokens, {self.gap:.3g} nats apart (rms), {self.mean:+.2g} on average"]
        if self.noise is not None and self.explained is not None:
            lines.append(
                f"rounding in bfloat16 makes {self.noise:.3g} (rms) and explains {self.explained:.0%} of the gap; "
                f"{len(self.beyond)} tokens are beyond it"
            )
        lines += [self.message] if self.message else []
        lines += [f"hint: {self.hint}"] if self.hint else []
        lines += [f"  {token}" for token in self.beyond[:MOST]]
        lines += [f"  and {len(self.beyond) - MOST} more"] if len(self.beyond) > MOST else []
        return "\n".join(lines)


def logprobs(first: Value, second: Value, *, tokens: Value = None, noise: Value = None) -> LogprobsReport:
    """Judge the log-probabilities that two models give to the same tokens.

    The noise is what rounding in bfloat16 does to one model: a model's own runs in it, each operation rounded at random
    in all but one, against its run in float32. A token may be apart by 5 times its noise, or that of all tokens
    if larger, and all tokens by 3 times (root mean squares): the criterion of `compare`. No more than half of the
    tokens may be further apart than 3 times their own noise, so that jumps of few tokens hide no shift of all.

    Args:
        first: a file (``.npz``, JSON lines), log-probabilities ``(sequences, tokens)``, or a model that returns logits
            ``(sequences, tokens, ids)`` for token ids: any side of `compare`.
        second: the same.
        tokens: token ids ``(sequences, tokens)``, for a model; None takes those of the other side's file.
        noise: log-probabilities of the first side's model as bfloat16 gives them, a file or an array; of a list, each
            is a draw. None measures that of the first model among the sides; two files need it.

    Raises:
        ValueError: the sides score other tokens, a file holds something else, or a model can't be run.
    """
    sides = [_side(value) for value in (first, second)]
    ids = next((side.tokens for side in sides if isinstance(side, Sequences) and side.tokens), None)
    if tokens is not None:
        ids = [np.asarray(row) for row in (tokens if isinstance(tokens, list) else np.atleast_2d(np.asarray(tokens)))]
    scores: list[Sequences] = []
    draws: list[Array] = []
    for side in sides:
        if isinstance(side, Sequences):
            scores.append(side)
        elif ids is None:
            raise ValueError("a model needs token ids: give tokens, or a file with tokens on the other side")
        else:
            own = scored(side, ids, with_noise=not draws and noise is None)
            scores.append(sequences(own.own, ids))
            draws = draws or own.noise
    check_alike(*scores)
    if noise is not None:
        draws = list(_given(noise, scores[0]))
    return judged(scores[0], scores[1], draws)


def _given(noise: Value, side: Sequences) -> Iterator[Array]:
    """Yield what given log-probabilities of bfloat16 runs add to those of a side."""
    for value in noise if isinstance(noise, list) else [noise]:
        rounded = _side(value)
        if not isinstance(rounded, Sequences):
            raise ValueError("noise must be log-probabilities: files, or arrays")
        check_alike(side, rounded)
        yield rounded.flat - side.flat


def _side(value: Value) -> Sequences | Value:
    if isinstance(value, (str, Path)):
        return read(Path(value))
    return sequences(value) if isinstance(value, (np.ndarray, list)) else value


def judged(first: Sequences, second: Sequences, draws: Sequence[Array]) -> LogprobsReport:
    """Return the report on two sides.

    Args:
        first: the first side.
        second: the second side, with the same tokens.
        draws: what rounding does to each token, one or more times; empty if unknown.
    """
    ours, theirs = first.flat, second.flat
    finite = np.isfinite(ours) & np.isfinite(theirs)
    alike = finite | (np.isnan(ours) & np.isnan(theirs)) | (np.isneginf(ours) & np.isneginf(theirs))
    alone = np.flatnonzero(~alike & ~first.unscored_flat & ~second.unscored_flat)
    gaps = np.zeros(ours.size)
    gaps[finite] = ours[finite] - theirs[finite]
    count = int(finite.sum())
    gap, mean = _rms(gaps[finite]), float(gaps[finite].mean()) if count else 0.0
    ids = np.concatenate(first.tokens) if first.tokens else None

    places = first.places

    def named(at: Array, allowed: Array | None) -> list[TokenGap]:
        tokens = []
        for i in at:
            sequence, position = places[i]
            token = None if ids is None else int(ids[i])
            most = math.nan if allowed is None else float(allowed[i])
            tokens.append(TokenGap(sequence, position, token, float(ours[i]), float(theirs[i]), most))
        return tokens

    moved = np.abs(np.stack(draws)) if draws else np.zeros((1, ours.size))
    # A run in bfloat16 that overflows says nothing about the size of rounding.
    is_finite = np.isfinite(moved)
    moved = np.where(is_finite, moved, 0.0)
    has_noise = bool(draws) and bool((is_finite & finite).any())
    if alone.size and not has_noise:
        return LogprobsReport("different", gap, None, None, mean, count, named(alone, None), _one_side_text(alone.size))
    if not count:
        reason = "no token has a log-probability on both sides"
        return LogprobsReport("inconclusive", gap, None, None, mean, 0, [], reason)
    if not has_noise:
        return LogprobsReport("inconclusive", gap, None, None, mean, count, [], f"the noise is unknown: {HOW}")
    level = _rms(moved[is_finite & finite])
    allowed = MAX_LIMIT * np.maximum(moved.max(axis=0), level)
    over = np.flatnonzero(finite & (np.abs(gaps) > allowed))
    worst = over[np.argsort(-np.abs(gaps[over]) / np.maximum(allowed[over], 1e-300))]
    beyond = named(alone, None) + named(worst, allowed)
    explained = 1.0 if gap <= level else level / gap
    message = _one_side_text(alone.size) if alone.size else ""
    if gap > RMS_LIMIT * level and not beyond:
        message = f"the gap is {gap / level if level else math.inf:.3g} times the noise, allowed {RMS_LIMIT:g}"
    own = np.median(moved, axis=0)
    apart = int((finite & (np.abs(gaps) > RMS_LIMIT * own)).sum())
    # Two standard deviations above half, so that few tokens don't decide by chance.
    is_shift = apart > count / 2 + math.sqrt(count)
    if is_shift and not message:
        message = f"{apart} of {count} tokens are further apart than {RMS_LIMIT:g} times their own noise, allowed half"
    verdict: Verdict = "different" if beyond or message else "equal"
    hint = "" if message else _on_jumps(gaps[finite], moved[:, finite], len(beyond), float(allowed[finite].min()))
    return LogprobsReport(verdict, gap, level, explained, mean, count, beyond, message, hint)


def _on_jumps(gaps: Array, moved: Array, beyond: int, allowed: float) -> str:
    """Return a hint on tokens that jump in the noise: a choice, such as that of experts, which rounding changes.

    Args:
        gaps: per token, first minus second.
        moved: absolute noise (draws, tokens).
        beyond: number of tokens that the report names.
        allowed: the smallest allowance of a token.
    """
    usual = TO_RMS * float(np.median(moved))
    counts = (moved > JUMP * usual).sum(axis=1)
    if not usual or not counts.any():
        return ""
    jumps, most = int((np.abs(gaps) > JUMP * usual).sum()), int(counts.max())
    size = f"{JUMP:g} times the usual noise of {usual:.2g} nats"
    cause = "as where rounding changes a choice, such as the experts of a mixture"
    if not beyond:
        return (
            f"up to {most} tokens per run of the noise are moved by over {size}, {cause}; this widens what is allowed, "
            f"and a fault that moves few tokens by less than {allowed:.2g} nats is not seen: see compare on the models"
        )
    if jumps > most + 3 * math.sqrt(most + jumps):
        return (
            f"{jumps} tokens are over {size} apart, {most} in the noise ({cause}): a fault, or a second side that "
            "rounds more coarsely than the noise's run"
        )
    return (
        f"{jumps} tokens are over {size} apart, and {most} in the noise, {cause}; a fault that few tokens reach looks "
        "the same: let both sides replay one choice of experts, or see compare on the models"
    )


def _one_side_text(count: int) -> str:
    tokens = "1 token is" if count == 1 else f"{count} tokens are"
    return f"{tokens} NaN or -inf on one side only ({UNSCORED})"


def _plain(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rms(values: Array) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0
