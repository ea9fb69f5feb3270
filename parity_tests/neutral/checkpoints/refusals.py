"""How a checkpoint made to do harm is refused: in one line that names the file, before much memory is taken."""

from __future__ import annotations

import pytest

from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from parity_tests.fuzz.samples import read
from parity_tests.support.processes.memory import traced_memory

MAX_MEMORY = 1 << 24
"""Bytes that a refusal may cost."""


def refused(path, format=None):
    """Return why a checkpoint is refused, without the file's name."""
    with pytest.raises(CheckpointError) as caught:
        read(path, format)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 20_000
    start = str(path)
    assert said.startswith(start)
    return said.removeprefix(start)


def refusal(path, format=None):
    """Return the same, where it costs little."""
    with traced_memory() as peak:
        said = refused(path, format)
    assert peak.bytes < MAX_MEMORY
    return said


def assert_says(found, *texts):
    """Check that a refusal has one of some texts."""
    assert any(text in found for text in texts), found


def read_a_little(path):
    with open_reader(path) as reader:
        for name in reader.tensors:
            reader.read_range(name, 0, 8)


def refusal_below(path):
    """Return why a folder is refused, where a file of it is named."""
    with traced_memory() as peak, pytest.raises(CheckpointError) as caught:
        read_a_little(path)
    assert peak.bytes < MAX_MEMORY
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(str(path))
    return said


class Payload:
    """What makes a file when it is unpickled.

    Args:
        path: that file.
    """

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")
