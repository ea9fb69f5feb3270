"""Checkpoints of any format that are cut off, may not be read or have odd names: refused in one line."""

from __future__ import annotations

import os

import pytest

from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from parity_tests.fuzz.samples import ENDINGS, random_arrays, write

from .refusals import refusal_below


@pytest.mark.parametrize("format", ["safetensors", "torch", "npz", "msgpack"])
def test_a_file_that_is_cut_off_anywhere_is_refused(format, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", random_arrays({"float32", "int8"}), {"a": "b"})
    size = path.stat().st_size
    data = path.read_bytes()
    step = max(1, size // 300)
    for cut in sorted({*range(0, size, step), *range(size - 40, size)}):
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError) as caught:
            open_reader(path)
        assert str(caught.value).startswith(str(path))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("format", list(ENDINGS))
def test_a_folder_or_file_without_permission_is_refused(format, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", random_arrays({"float32"}))
    path.chmod(0)
    try:
        if os.access(path, os.R_OK):
            pytest.skip("everything may be read by this user")
        assert "Permission denied" in refusal_below(path)
    finally:
        path.chmod(0o755)


def test_a_path_with_control_characters_is_shown_escaped(tmp_path):
    path = tmp_path / "a\x1b[31m.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        open_reader(path)
    assert "a\\x1b[31m.safetensors: is no safetensors file" in str(caught.value)
