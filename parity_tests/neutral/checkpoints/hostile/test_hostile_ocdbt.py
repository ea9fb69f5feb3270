"""Databases of Orbax (OCDBT) made to do harm: refused in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct

import numpy as np
import pytest

from attn_bridge.checkpoints.containers.orbax import ocdbt
from attn_bridge.checkpoints.containers.orbax import writer as orbax_writer
from parity_tests.fuzz.samples import assert_same, random_array, read, write
from parity_tests.support.processes.memory import resident_memory

from ..refusals import MAX_MEMORY, refusal, refused

ARRAYS = {
    "a.weight": random_array("float32", (6, 4), np.random.default_rng(0)),
    "b": random_array("bfloat16", (3,), np.random.default_rng(1)),
}


@pytest.fixture
def database(tmp_path, monkeypatch):
    """An Orbax folder with OCDBT, whose tree has two levels."""
    monkeypatch.setattr(orbax_writer, "CHUNK", 32)
    monkeypatch.setattr(ocdbt, "FANOUT", 3)
    return write("orbax+ocdbt", tmp_path / "x.orbax", ARRAYS)


def rebuilt(database, change):
    """Change where values are said to lie: `change` gets the places by key."""
    places, _ = ocdbt.decode(database, database)
    change(places)
    tree, manifest = ocdbt.encode(places, f"d/{9:032x}")
    (database / "d" / f"{9:032x}").write_bytes(tree)
    (database / ocdbt.MANIFEST).write_bytes(manifest)
    return database


def moved(key, **changes):
    """Return a change of where a value is."""

    def change(places):
        places[key] = dataclasses.replace(places[key], **changes)

    return change


def test_a_right_database_is_read(database):
    assert_same(read(rebuilt(database, lambda places: None)), ARRAYS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places.pop(b"a.weight/1.0"), "the chunk 1.0 of a.weight is missing"),
        (moved(b"a.weight/1.0", start=1 << 40), "ends before the chunk 1.0 of a.weight"),
        (moved(b"a.weight/1.0", size=31), "the chunk 1.0 of a.weight has 31 bytes, not 32"),
        (moved(b"a.weight/1.0", file="../secret"), "is not named as one of its folder"),
        (moved(b"a.weight/1.0", file="/etc/passwd"), "is not named as one of its folder"),
        (moved(b"a.weight/1.0", file="."), "is not named as one of its folder"),
        (moved(b"a.weight/1.0", file="d/absent"), "does not exist"),
        (moved(b"a.weight/.zarray", size=1 << 20), "more than 65536 are not read"),
        (moved(b"a.weight/.zarray", size=20), "is no JSON"),
        (moved(b"a.weight/.zarray", start=1 << 30), "ends at byte"),
    ],
)
def test_a_database_that_lies_is_refused(change, message, database):
    assert message in refusal(rebuilt(database, change))


def test_values_that_are_the_same_bytes_many_times_are_refused(database):
    def change(places):
        for number in range(1 << 10):
            places[f"a.weight/{number}.0".encode()] = places[b"a.weight/0.0"]
        said = {**array, "shape": [1 << 11, 4]}
        raw = json.dumps(said).encode()
        (database / "d" / "more").write_bytes(raw)
        places[b"a.weight/.zarray"] = ocdbt.ValueLocation("d/more", 0, len(raw))

    where, _ = ocdbt.decode(database, database)
    one = where[b"a.weight/.zarray"]
    array = json.loads((database / one.file).read_bytes()[one.start : one.start + one.size])
    assert "bytes; the files that they lie in have" in refusal(rebuilt(database, change))


def test_a_damaged_database_is_refused(database):
    with resident_memory() as peak:
        for path in (database / ocdbt.MANIFEST, database / "d" / f"{1:032x}"):
            whole = path.read_bytes()
            for at in range(len(whole)):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                if at != 13:  # 1 there says that it is compressed, which TensorStore has to look at
                    assert refused(database)
            for cut in range(0, len(whole), 3):
                path.write_bytes(whole[:cut])
                assert refused(database)
            path.write_bytes(whole)
    assert peak.bytes < MAX_MEMORY
    assert_same(read(database), ARRAYS)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff" * 9 + b"\x01",  # so many files
        b"\x01" + b"\xff" * 9 + b"\x01",  # a name of that length
        b"\x02\x05\x01\x01\x00\x00aa",  # a prefix longer than what is before
        b"\x01\x01\x09a",  # a base longer than the name
        b"\x01\x01\x00\xff",  # a name that is no text
        b"\x80" * 20,  # a number without end
        b"\x01\x01\x00a" + b"\xff" * 9 + b"\x01",  # so many entries
        b"\x01\x01\x00a\x01" + b"\xff" * 9 + b"\x01",  # a key of that length
        b"\x01\x01\x00a\x01\x01k\x01\x07\x00\x00",  # a kind of value that is not known
        b"\x01\x01\x00a\x01\x01k\x01\x01\x05\x00",  # a file that its table has not
    ],
)
def test_a_node_that_lies_with_a_right_checksum_is_refused(body, database):
    node = ocdbt._framed(ocdbt.MAGIC_NODE, b"\x00" + body)
    tree = next(path for path in (database / "d").iterdir() if path.read_bytes()[:4] == b"\x0c\xdb\x20\xde")
    tree.write_bytes(node)
    name = f"d/{tree.name}".encode()
    body = bytes(16) + b"\0\0\0\4\0" + b"\1" + bytes([len(name)]) + b"\0" + name + b"\1\1\0\0\0"
    body += ocdbt._column([len(node), 0, 0, 0]) + struct.pack("<Q", 1) + b"\0"
    (database / ocdbt.MANIFEST).write_bytes(ocdbt._framed(ocdbt.MAGIC_MANIFEST, body))
    assert refusal(database)


def test_a_tree_that_leads_back_to_itself_is_refused(database):
    tree = "d/tree"

    def entries(size):
        columns = b"".join(ocdbt._column([one]) for one in (0, size, 1, 0, 0))
        return ocdbt._framed(ocdbt.MAGIC_NODE, b"\1" + ocdbt._files([tree]) + b"\1\1\0k\0" + columns)

    node = entries(len(entries(99)))
    (database / tree).write_bytes(node)
    body = bytes(16) + b"\0\0\0\4\0" + ocdbt._files([tree]) + b"\1\1\1\0\0"
    body += ocdbt._column([len(node), 0, 0, 0]) + struct.pack("<Q", 1) + b"\0"
    (database / ocdbt.MANIFEST).write_bytes(ocdbt._framed(ocdbt.MAGIC_MANIFEST, body))
    assert "is too large, or leads back to itself" in refusal(database)


def test_links_out_of_a_database_are_refused(database, tmp_path):
    for path in (database / ocdbt.MANIFEST, database / "d" / f"{0:032x}", database / "d" / f"{1:032x}"):
        shutil.move(path, tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        assert "is a link out of its folder" in refusal(database)
        path.unlink()
        shutil.move(tmp_path / "moved", path)
