"""The pairs of ``parity.toml`` as tests, with ``--parity-manifest``: ``parity.toml::NAME``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .comparing import FOUND, file_name, shown, summarised
from .settings import SETTINGS

if TYPE_CHECKING:
    from ..results.changes import Data
    from ..review.judging import Judgement
    from ..review.manifest import ManifestPair

OPTION, INI = "--parity-manifest", "parity_manifest"
NAME = "parity.toml"

SECONDS = 600.0
"""Limit of a pair, as in a review."""


class ManifestFile(pytest.File):
    """The manifest as a collector."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test per pair."""
        from ..review import manifest

        try:
            pairs = manifest.read(self.path)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        for pair in pairs:
            item = PairItem.from_parent(self, name=pair.name)
            item.pair = pair
            yield item


class PairItem(pytest.Item):
    """One pair: passes if its verdict is ``equal``. Its files are those of the working tree.

    Attributes:
        pair: the pair; set by the collector.
    """

    pair: ManifestPair

    def runtest(self) -> None:
        """Judge the pair in a separate process."""
        from ..review import judging

        with tempfile.TemporaryDirectory(prefix="attn-bridge-") as scratch:
            folder = self.path.parent
            result = judging.judge(self.pair, folder, Path(scratch).resolve(), seconds=SECONDS, is_open=True)
        self.user_properties.append(("parity_verdict", result.verdict))
        report: Data = result.report or {}
        allowed = [(one["path"], one["reason"], bool(one["covers"]), one["known"]) for one in report.get("allowed", ())]
        self.stash.setdefault(FOUND, []).append(summarised(result.verdict, allowed, report.get("notes", ())))
        if result.verdict != "equal":
            self._write(result)
            pytest.fail("\n".join(_lines(result)), pytrace=False)

    def _write(self, result: Judgement) -> None:
        """Write the report to the folders of ``--parity-json`` and ``--parity-html``."""
        settings = self.config.stash[SETTINGS]
        text = "" if result.report is None else json.dumps(result.report, indent=1) + "\n"
        for folder, kind, content in ((settings.json, "json", text), (settings.html, "html", result.page)):
            if folder is not None and content:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{file_name(self.nodeid, 1)}.{kind}"
                path.write_text(content, encoding="utf-8")
                self.add_report_section("call", "parity", f"{kind}: {shown(path, self.config.invocation_params.dir)}")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the manifest, and the name of the pair."""
        return self.path, None, self.name


def _lines(result: Judgement) -> Iterator[str]:
    """Yield the verdict, the first divergence and the command of a pair."""
    yield f"{result.pair.name}: {result.message if result.report else f'{result.verdict}: {result.message}'}"
    report: Data = result.report or {}
    first = report.get("first_divergence")
    if isinstance(first, dict):
        yield f"first divergence ({first.get('direction')}): {first.get('path') or 'the module itself'}"
        if first.get("hint"):
            yield f"hint: {first['hint']}"
    if report.get("command"):
        yield f"again: {report['command']}"


def is_wanted(config: pytest.Config) -> bool:
    """Return whether the pairs of the manifest are tests of this run."""
    return bool(config.getoption(OPTION) or config.getini(INI))


def add_items(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of the manifest in the root folder, unless the command line names some of them.

    Raises:
        UsageError: the manifest is missing or malformed.
    """
    path = config.rootpath / NAME
    if any(Path(str(word).partition("::")[0]).name == NAME for word in config.args):
        return
    file = ManifestFile.from_parent(session, path=path)
    try:
        items += file.collect()
    except file.CollectError as error:
        raise pytest.UsageError(str(error)) from None
