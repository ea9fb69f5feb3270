"""Commands whose calls are recorded: their processes and their last words."""

from __future__ import annotations

import pytest

from attn_parity.recorded import process


@pytest.mark.parametrize(
    ("printed", "last"),
    [("", ""), ("a\nb  c\n", "b c"), ("x" * 300, "x" * 300), ("x" * 301, "x" * 300)],
    ids=["silent", "two lines", "300 characters", "301 characters"],
)
def test_the_last_line_of_a_command_is_passed_on_within_bounds(printed, last, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{printed}' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(program))
    assert process._run([], timeout=60, command="pytest") == (3, last)
