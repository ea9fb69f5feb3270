"""Log-probabilities of tokens as files and arrays hold them."""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from attn_bridge.whole_files import check_regular, read_text

from ..sides.subject import Array

FORMATS = (
    "an .npz file with `logprobs` and `tokens` (and `mask`) of one shape (sequences, tokens), or JSON lines, "
    '{"tokens": [...], "logprobs": [...]} per sequence'
)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences of tokens and their log-probabilities.

    Attributes:
        values: per sequence the log-probability of each token; NaN where it has none, or a model computed NaN.
        tokens: per sequence the token ids; empty where they are unknown.
        unscored: per sequence whether a token is marked as one without a log-probability, as the first token may be.
    """

    values: list[Array]
    tokens: list[Array]
    unscored: list[Array]

    @property
    def flat(self) -> Array:
        """All log-probabilities, one sequence after the other."""
        return np.concatenate(self.values)

    @property
    def unscored_flat(self) -> Array:
        """Whether each element of `flat` is marked as one without a log-probability."""
        return np.concatenate(self.unscored)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Sequence and position of each element of `flat`."""
        return [(i, j) for i, one in enumerate(self.values) for j in range(one.size)]


def read(path: Path) -> Sequences:
    """Return the log-probabilities in a file.

    Raises:
        ValueError: it is missing, of another format, or holds something else.
    """
    check_regular(path)
    try:
        if zipfile.is_zipfile(path):
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if "logprobs" not in arrays:
                raise ValueError(f"it has no array logprobs; it has {', '.join(arrays) or 'none'}")
            return sequences(arrays["logprobs"], arrays.get("tokens"), arrays.get("mask"))
        lines = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
        if not lines or not all(isinstance(line, dict) and "logprobs" in line for line in lines):
            raise ValueError("each line must be an object with logprobs")
        tokens = [line["tokens"] for line in lines if "tokens" in line]
        return sequences([line["logprobs"] for line in lines], tokens or None)
    except (ValueError, TypeError, OSError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be {FORMATS}: {' '.join(str(error).split())}") from error


def read_tokens(path: Path) -> list[Array]:
    """Return the token ids in a file, per sequence.

    Raises:
        ValueError: it is missing, or not an archive with whole numbers as `tokens`.
    """
    check_regular(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return list(np.atleast_2d(file["tokens"].astype(np.int64, casting="safe")))
    except (ValueError, TypeError, KeyError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be an .npz file with whole numbers as `tokens`: {error}") from error


def sequences(
    values: Array | Sequence[object], tokens: Array | Sequence[object] | None = None, mask: Array | None = None
) -> Sequences:
    """Return arrays as sequences, and check them.

    Args:
        values: shape (sequences, tokens), or (tokens,), or a list of sequences of any lengths; None marks a token
            without a log-probability, and so does NaN for the first token of a sequence.
        tokens: the ids, of the same shape.
        mask: of the same shape; False or 0 marks a token without a log-probability.

    Raises:
        ValueError: a value is above 0 or not a number, or the lengths differ.
    """
    rows = _rows(values, np.float64)
    ids = [] if tokens is None else _rows(tokens, np.int64)
    scored = [] if mask is None else _rows((np.asarray(mask) != 0).astype(np.int64), np.int64)
    for name, others in (("tokens", ids), ("mask", scored)):
        if others and [one.size for one in others] != [one.size for one in rows]:
            raise ValueError(
                f"{name} {[one.size for one in others]} must be as many as logprobs {[one.size for one in rows]}"
            )
    if not any(one.size for one in rows):
        raise ValueError("logprobs must hold at least one number")
    unscored = [_nones(row, own.size) for row, own in zip(_listed(values, len(rows)), rows, strict=True)]
    for number, row in enumerate(rows):
        if scored:
            unscored[number] |= scored[number] == 0  # tokens of a prompt, which a sampler does not score
        unscored[number][:1] |= np.isnan(row[:1])
        row[unscored[number]] = np.nan
        # -inf is the log-probability of a token that a sampler cut off.
        bad = row > 1e-6
        if bad.any():
            raise ValueError(f"logprobs ({row[bad][0]:g}) must be at most 0")
    return Sequences(rows, ids, unscored)


def _listed(values: Array | Sequence[object], count: int) -> Sequence[object]:
    """Return a value per sequence: the list itself, a list around its only sequence, or Nones for an array."""
    if isinstance(values, np.ndarray):
        return [None] * count
    is_nested = any(isinstance(row, (list, tuple, np.ndarray)) for row in values)
    return values if is_nested else [values]


def _nones(row: object, size: int) -> Array:
    if isinstance(row, list):
        return np.array([value is None for value in row], bool)
    return np.zeros(size, bool)


def _rows(values: Array | Sequence[object], dtype: type) -> list[Array]:
    array = np.asarray(values) if isinstance(values, np.ndarray) else None
    if array is not None and array.ndim in (1, 2):
        rows: Iterable[object] = array.reshape(-1, array.shape[-1])
    elif array is not None:
        raise ValueError(f"an array of shape {list(array.shape)} must have one or two axes: sequences, tokens")
    else:
        rows = list(values)
        rows = [rows] if all(one is None or isinstance(one, (int, float, np.number)) for one in rows) else rows
    return [_row(row, dtype) for row in rows]


def _row(row: object, dtype: type) -> Array:
    """Return numbers as an array; None is NaN. Token ids must be whole numbers: others would be cut off silently."""
    if isinstance(row, list):
        row = [math.nan if value is None else value for value in row]
    array = np.array(row)
    rule = "whole numbers" if dtype is np.int64 else "numbers or null"
    if array.size and array.dtype.kind not in ("iu" if dtype is np.int64 else "iufV"):
        raise ValueError(f"{'tokens' if dtype is np.int64 else 'logprobs'} ({array.dtype.name}) must be {rule}")
    return array.astype(dtype)


def check_alike(first: Sequences, second: Sequences) -> None:
    """Check that both sides score the same tokens.

    Raises:
        ValueError: they don't; names the first place.
    """
    lengths = [[one.size for one in side.values] for side in (first, second)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"both sides must hold as many tokens per sequence, got {lengths[0][:8]} and {lengths[1][:8]}")
    for i, (ours, theirs) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        unlike = np.flatnonzero(ours != theirs)
        if unlike.size:
            at = int(unlike[0])
            raise ValueError(
                f"both sides must score the same tokens; sequence {i} has {ours[at]} and {theirs[at]} at {at}"
            )
