"""A review as data, as a folder of files, and compared with an earlier one."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from attn_bridge import whole_folders as folders
from attn_bridge.printable import printable
from attn_bridge.whole_files import read_text

from ..attestation import subjects
from ..confinement.process import MAX_REPORT
from ..results.changes import Data
from ..results.findings import SCHEMA
from .commit import Commit
from .judging import Judgement, Verdict

KIND = "review"
FILE = "report.json"
PAGE = "report.html"
ENVIRONMENT = "environment.json"
PAIRS = "pairs"

WORST_LAST: tuple[Verdict, ...] = ("equal", "precision", "different", "inconclusive")

STATUS: Mapping[Verdict, int] = {"equal": 0, "precision": 1, "different": 1, "inconclusive": 2}


@dataclasses.dataclass(frozen=True)
class Review:
    """The result of a review.

    Attributes:
        commit: full hash of the commit.
        tree: hash of its files.
        ref: the commit as the user named it.
        manifest: SHA-256 of its manifest.
        judge: version and digest of the judge's code.
        results: the result of each pair, in the manifest's order.
        unreviewed: paths with uncommitted changes.
        notes: remarks on files that are missing.
    """

    commit: str
    tree: str
    ref: str
    manifest: str
    judge: Mapping[str, str]
    results: tuple[Judgement, ...]
    unreviewed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, commit: Commit, manifest: str, results: tuple[Judgement, ...], notes: list[str]) -> Review:
        """Return the review of a commit."""
        head = (commit.name, commit.tree, commit.ref, manifest, subjects.judge())
        return cls(*head, results, commit.changes, tuple(notes))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; ``inconclusive`` where a pair could not be judged."""
        return max((result.verdict for result in self.results), key=WORST_LAST.index)

    @property
    def status(self) -> int:
        """The exit status: 0 = all equal, 1 = some differ, 2 = some could not be judged."""
        return STATUS[self.verdict]

    def summary(self) -> str:
        """Return the verdict and the number of pairs of each verdict in one line."""
        counts = {verdict: sum(one.verdict == verdict for one in self.results) for verdict in reversed(WORST_LAST)}
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        pairs = f"{len(self.results)} pair{'s' * (len(self.results) > 1)}"
        return f"{self.verdict}: {pairs} at commit {self.commit[:12]}: {text}"

    def to_json(self) -> Data:
        """Return it as JSON-ready data, without the reports of the pairs."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "passed": self.verdict == "equal",
            "verdict": self.verdict,
            "summary": self.summary(),
            "commit": self.commit,
            "tree": self.tree,
            "ref": self.ref,
            "manifest": self.manifest,
            "judge": dict(self.judge),
            "unreviewed": [printable(path) for path in self.unreviewed],
            "notes": list(self.notes),
            "pairs": [_pair(result) for result in self.results],
        }

    @property
    def environment(self) -> Data:
        """Versions, devices and precision switches of each pair that was judged."""
        return {result.pair.name: result.report["environment"] for result in self.results if result.report is not None}


def _pair(result: Judgement) -> Data:
    pair, report = result.pair, result.report
    files = {} if report is None else {"report": f"{PAIRS}/{pair.name}.json"}
    files |= {"page": f"{PAIRS}/{pair.name}.html"} if result.page else {}
    return {
        **{key: value for key, value in dataclasses.asdict(pair).items() if value},
        "verdict": result.verdict,
        "message": result.message,
        "tensors": {} if report is None else tensors(report),
        "allowed_differences": result.allowed,
        "unneeded_allowances": result.unneeded,
        "subjects": {} if report is None else report["subjects"],
        **files,
    }


def tensors(report: Data) -> dict[str, str]:
    """Return the verdict of each tensor by name, and ``allowed`` for a difference that is."""
    keys = ("name", "dtype", "mode")
    return {
        " ".join(str(one.get(key)) for key in keys if one.get(key)): "allowed" if one.get("allowed") else one["verdict"]
        for one in report["tensors"]
    }


# ---- an earlier review


def read(path: Path) -> Data:
    """Return the data of an earlier review, from its folder or its ``report.json``.

    Raises:
        ValueError: it is not one.
    """
    file = path / FILE if path.is_dir() else path
    try:
        data = json.loads(read_text(file, MAX_REPORT))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{file} is not JSON") from None
    if not _is_review(data):
        raise ValueError(f"{file} is not a report of a review")
    return dict(data)


def _is_review(data: object) -> bool:
    if not isinstance(data, Mapping) or data.get("kind") != KIND or not isinstance(data.get("pairs"), list):
        return False
    if not isinstance(data.get("commit"), str):
        return False
    return all(
        isinstance(pair, Mapping)
        and isinstance(pair.get("name"), str)
        and pair.get("verdict") in WORST_LAST
        and isinstance(pair.get("tensors"), Mapping)
        for pair in data["pairs"]
    )


def differences(before: Data, now: Data) -> list[str]:
    """Return a line per pair whose verdict, or a tensor's, differs between two reviews."""
    old, new = ({pair["name"]: pair for pair in data["pairs"]} for data in (before, now))
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name not in new or name not in old:
            lines.append(f"{printable(name)}: {'removed' if name in old else 'new'}")
        elif old[name]["verdict"] != new[name]["verdict"]:
            lines.append(f"{printable(name)}: {old[name]['verdict']} -> {new[name]['verdict']}")
        elif old[name]["tensors"] != new[name]["tensors"]:
            states = (old[name]["tensors"], new[name]["tensors"])
            moved = [tensor for tensor in dict.fromkeys([*states[0], *states[1]]) if _moved(tensor, *states)]
            lines.append(f"{printable(name)}: {len(moved)} tensors changed: {', '.join(map(printable, moved[:3]))}")
    return lines


def _moved(tensor: str, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return before.get(tensor) != now.get(tensor)


def comparison(before: Data, now: Data) -> list[str]:
    """Return lines on an earlier review: the same verdicts, or those that changed, and what else did."""
    lines = differences(before, now)
    commit = str(before["commit"])
    same = commit == now["commit"]
    where = "of this commit" if same else f"of commit {printable(commit[:12])}"
    causes = [] if same else ["the commit"]
    causes += ["the judge"] * (before.get("judge") != now["judge"])
    if not lines:
        other = f"; other than then: {', '.join(causes)}" if causes else ""
        return [f"the same verdicts as in the earlier review {where}, tensor by tensor{other}"]
    why = (
        f"other than then: {', '.join(causes)}" if causes else "commit and judge are the same: results do not reproduce"
    )
    return [f"verdicts differ from the earlier review {where} ({why})", *(f"  {line}" for line in lines)]


# ---- the folder


def check_target(folder: Path) -> Data | None:
    """Return the earlier review in a folder, None if it is new or empty.

    Raises:
        ValueError: it is neither.
    """
    if folder.is_dir() and not folder.is_symlink() and (folder / FILE).is_file():
        return read(folder)
    folders.check_new(folder, "--out")
    return None


def write(review: Review, folder: Path, lines: list[str]) -> None:
    """Write the report folder as a whole; an earlier review there is replaced.

    Args:
        review: the result.
        folder: the folder; see `check_target`.
        lines: lines on an earlier review, for the report.

    Raises:
        ValueError: it can't be written; an earlier one is still complete.
    """
    from .page import as_html

    check_target(folder)
    target = folder.absolute()
    fresh, old = (target.with_name(f".{secrets.token_hex(8)}.part") for _ in range(2))
    fresh.mkdir()
    try:
        data = {**review.to_json(), "earlier": lines}
        _write_json(fresh / FILE, data)
        _write_json(fresh / ENVIRONMENT, review.environment)
        (fresh / PAGE).write_text(as_html(data), encoding="utf-8")
        (fresh / PAIRS).mkdir()
        for result in review.results:
            if result.report is not None:
                _write_json(fresh / PAIRS / f"{result.pair.name}.json", result.report)
            if result.page:
                (fresh / PAIRS / f"{result.pair.name}.html").write_text(result.page, encoding="utf-8")
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise ValueError(f"--out {folder} cannot be written: {error.strerror}") from error
    finally:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_json(path: Path, data: Data) -> None:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
