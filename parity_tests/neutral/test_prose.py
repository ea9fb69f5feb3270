"""The counts of phrases, pronouns and `Any` that docs/prose.py limits per room."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "prose.py"

ROOM = '''"""Arrays."""
from typing import Any


def first(x: Any) -> int:
    """What is told by nobody."""
    found = 1  # a comment
    return [found for one in x][0]  # type: ignore[no-any-return]
'''


@pytest.fixture
def prose(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "prose", module)
    spec.loader.exec_module(module)
    (tmp_path / "attn_bridge").mkdir()
    (tmp_path / "attn_bridge" / "arrays.py").write_text(ROOM)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LIMITS", tmp_path / "limits.json")
    return module


def counts(prose):
    return prose.counts_per_room([each for path in prose.sources() for each in prose.occurrences_in(path)])


def test_phrases_pronouns_and_types_are_counted(prose):
    assert counts(prose)["attn_bridge"] == {
        "lines": 6, "comments": 1, "ignored": 1, "docstrings": 2, "stumbling": 1, "bindings": 2, "pronouns": 1, "any": 1
    }  # fmt: skip


def test_a_room_above_its_limit_is_refused(prose, capsys):
    prose.LIMITS.write_text(json.dumps({"rooms": {}, "homes": 0}))
    prose.update(counts(prose), 0)
    assert prose.check(counts(prose), 0) == 0
    file = prose.ROOT / "attn_bridge" / "more.py"
    file.write_text("def g(place):\n    pass\n")
    assert prose.check(counts(prose), 0) == 1
    assert "attn_bridge: 2 of pronouns, at most 1" in capsys.readouterr().out


def test_limits_only_fall(prose):
    prose.LIMITS.write_text(json.dumps({"rooms": {"attn_bridge": {"any": 0}}, "homes": 0}))
    prose.update(counts(prose), 3)
    limits = json.loads(prose.LIMITS.read_text())
    assert limits["rooms"]["attn_bridge"]["any"] == 0
    assert limits["homes"] == 0
