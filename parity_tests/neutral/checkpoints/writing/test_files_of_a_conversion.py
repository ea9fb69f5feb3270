"""How many files of the package a plain conversion passes through: who reads it has to read that many."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import attn_bridge
from attn_bridge import checkpoints
from attn_bridge.cli.app import run

MOST = 61
ROOM = str(Path(attn_bridge.__file__).parent)


def test_converting_a_gpt2_passes_through_few_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 0
    checkpoints.convert("demo/gpt2", "out")  # modules are imported, and decorators have run
    files: set[str] = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            files.add(frame.f_code.co_filename.removeprefix(ROOM))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert len(checkpoints.convert("demo/gpt2", "out", overwrite=True).digests) == 37
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert 40 < len(files) <= MOST, sorted(files)
