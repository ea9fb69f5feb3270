"""Checkpoints of any format that are cut off, may not be read or have odd names: refused in one line."""

from __future__ import annotations

import os

import pytest

from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from parity_tests.fuzz.samples import ENDINGS, random_arrays, write

from ..refusals import refusal_below


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


def test_a_config_has_at_most_16_mebibytes(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"{}".ljust(1 << 24))
    assert configs.beside(tmp_path) == {}
    file.write_bytes(b"{}".ljust((1 << 24) + 1))
    with pytest.raises(CheckpointError, match=r"has 16777217 bytes; at most 16777216 are read$"):
        configs.beside(tmp_path)


def test_a_pickle_has_at_most_2_gibibytes(tmp_path):
    path = tmp_path / "x.pkl"
    path.touch()
    os.truncate(path, (1 << 31) + 1)
    with pytest.raises(CheckpointError, match=r"has 2147483649 bytes; pickles of at most 2147483648 are read$"):
        open_reader(path)
