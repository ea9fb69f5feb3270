"""The folder of users' files in which each test runs."""

from __future__ import annotations

import numpy as np
import pytest

from .files import BAD, FLAX, TORCH


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with both sides in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(TORCH)
    (tmp_path / "theirs.py").write_text(FLAX)
    (tmp_path / "bad.py").write_text(BAD)
    np.savez("x.npz", np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32))
    return tmp_path
