"""In-toto statements on verdicts: which code, weights and inputs they are about, and which judge gave them.

In: the report of a comparison or a review, as JSON. Out: a statement, as JSON-ready data. Source: in-toto Attestation
Framework, Statement v1, https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attn_bridge.printable import printable
from attn_bridge.whole_files import read_text

from ..results import changes
from ..results.changes import Data
from .subjects import SIDES

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:attn-bridge:verdict:v1"

MAX_BYTES = 1 << 28
"""Bytes of the largest report or attestation that is read."""

JUDGED = ("equal", "precision", "different")
"""Verdicts that are attested."""


class AttestationError(ValueError):
    """A report can't be attested, or a file is not an attestation; the message names the cause."""


@dataclasses.dataclass(frozen=True)
class AttestedComparison:
    """One attested comparison.

    Attributes:
        name: of its pair; "" for a report of `compare`.
        verdict: ``equal``, ``precision`` or ``different``.
        tensors: name -> verdict of each tensor.
        words: the command that made it, from ``compare``.
        subjects: digests of code, weights, inputs and rules.
    """

    name: str
    verdict: str
    tensors: Mapping[str, str]
    words: Sequence[str]
    subjects: Data

    @property
    def digests(self) -> Iterator[tuple[str, str]]:
        """Name and digest of each subject."""
        front = f"{self.name}: " if self.name else ""
        for side in SIDES:
            yield f"{front}{side} code", self.subjects[side]["code"]
            yield f"{front}{side} weights", self.subjects[side]["weights"]
        for number, digest in enumerate(self.subjects["inputs"]):
            yield f"{front}inputs{f' of the {SIDES[number]} side' if number else ''}", digest
        if self.subjects.get("rules"):
            yield f"{front}rules", self.subjects["rules"]


def of_report(path: Path) -> Data:
    """Return the statement on a report file of ``compare --json`` or of a review.

    Raises:
        AttestationError: it is not a report, has no digests, or has no verdict on a pair.
    """
    text = _text(path)
    data = _parsed(text, path)
    if isinstance(data, Mapping) and data.get("kind") == "review":
        comparisons = [_of_pair(pair, path) for pair in data["pairs"]]
        more = {key: data[key] for key in ("commit", "tree", "manifest")}
        judge = data["judge"]
    else:
        comparisons, more = [_comparison("", data, path)], {}
        judge = data["subjects"]["judge"]
    subjects = [item for each in comparisons for item in each.digests]
    report = ("report", hashlib.sha256(text.encode()).hexdigest())
    return {
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in (report, *subjects)],
        "predicateType": PREDICATE,
        "predicate": {**more, "judge": judge, "comparisons": [dataclasses.asdict(each) for each in comparisons]},
    }


def _of_pair(pair: Data, path: Path) -> AttestedComparison:
    if "report" not in pair:
        raise AttestationError(
            f"{path}: pair {printable(pair.get('name'))} was not judged: {printable(pair.get('message'))}"
        )
    file = path.parent / "pairs" / f"{pair['name']}.json"
    return _comparison(str(pair["name"]), _parsed(_text(file), file), file)


def _comparison(name: str, report: object, path: Path) -> AttestedComparison:
    if not isinstance(report, Mapping) or not changes.is_report(report):
        raise AttestationError(f"{path} is not a report of compare or review")
    subjects = report.get("subjects")
    if not isinstance(subjects, Mapping) or not subjects or not report.get("command"):
        raise AttestationError(f"{path} has no digests: write it with attn-bridge compare --json FILE, or review")
    if report["verdict"] not in JUDGED:
        raise AttestationError(
            f"{path} has no verdict to attest: {report['verdict']}: {printable(report.get('message'))}"
        )
    for side in SIDES:
        if not subjects[side].get("weights"):
            raise AttestationError(f"{path}: the weights of the {side} side have no digest: its kind is not supported")
    states = {_tensor(each): "allowed" if each.get("allowed") else each["verdict"] for each in report["tensors"]}
    words = shlex.split(report["command"])[1:]
    return AttestedComparison(
        name, report["verdict"], states, words, {key: subjects[key] for key in (*SIDES, "inputs", "rules")}
    )


def _tensor(data: Data) -> str:
    return " ".join(str(data[key]) for key in ("name", "dtype", "mode") if data.get(key))


def comparisons(statement: object) -> tuple[Data, list[AttestedComparison]]:
    """Return the judge and the comparisons of a statement.

    Raises:
        AttestationError: it is not a statement on verdicts.
    """
    try:
        assert isinstance(statement, Mapping)
        assert (statement["_type"], statement["predicateType"]) == (TYPE, PREDICATE)
        predicate = statement["predicate"]
        read = [AttestedComparison(**each) for each in predicate["comparisons"]]
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        # The subjects are what other tools look for: they must be those of the comparisons.
        assert read
        assert all(subjects[name] == digest for each in read for name, digest in each.digests)
        assert all(each.words[0] == "compare" and each.verdict in JUDGED for each in read)
        return predicate["judge"], read
    except (AssertionError, KeyError, TypeError, IndexError, AttributeError):
        raise AttestationError("the statement is not one on verdicts of attn-bridge") from None


def _text(path: Path) -> str:
    try:
        return read_text(path, MAX_BYTES)
    except OSError as error:
        raise AttestationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AttestationError(f"{path} is not JSON") from None


def _parsed(text: str, path: Path) -> Data:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise AttestationError(f"{path} is not JSON") from None
    if not isinstance(data, dict):
        raise AttestationError(f"{path} is not a report of compare or review")
    return data


def read_json(path: Path) -> Data:
    """Return the object in a JSON file.

    Raises:
        AttestationError: it can't be read, or holds no object.
    """
    return _parsed(_text(path), path)
