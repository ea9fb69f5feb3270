"""Files of msgpack made to do harm: refused in one line."""

from __future__ import annotations

import contextlib
import struct

import pytest

from attn_bridge.checkpoints.containers import files, open_reader
from attn_bridge.checkpoints.containers.msgpack import values as msgpack_values

from ..refusals import assert_says, refusal


def packed(value):
    return b"\xc7" + bytes([len(value)]) + b"\x01" + value


def array(shape=b"\x91\x02", dtype=b"\xa5uint8", data=b"\xc4\x02ab", kind=b"\x01"):
    inner = b"\x93" + shape + dtype + data
    return b"\xc8" + struct.pack(">H", len(inner)) + kind + inner


def at(key, value):
    return b"\x81" + key + value


def test_a_right_file_of_msgpack_made_by_hand_is_read(tmp_path):
    (tmp_path / "x.msgpack").write_bytes(at(b"\xa1a", array()))
    with open_reader(tmp_path / "x.msgpack") as reader:
        assert reader.read("a").tobytes() == b"ab"


@pytest.mark.parametrize("value", ["", "x" * 31, "x" * 32, 0, 127, 128, -1, -32, -33, None, True, 0.5], ids=repr)
def test_a_plain_value_is_read_as_it_was_packed(tmp_path, value):
    (tmp_path / "x.msgpack").write_bytes(msgpack_values.pack(value))
    with contextlib.closing(files.File(tmp_path / "x.msgpack")) as file:
        found = msgpack_values.Scanner(file).next()
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("size", [0, 15, 16])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_collection_has_as_many_entries_as_were_packed(tmp_path, kind, size):
    value = dict.fromkeys(range(size)) if kind is dict else [0] * size
    (tmp_path / "x.msgpack").write_bytes(msgpack_values.pack(value))
    with contextlib.closing(files.File(tmp_path / "x.msgpack")) as file:
        head = msgpack_values.Scanner(file).next()
    assert (head.kind, head.size) == ("map" if kind is dict else "list", size)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut off: byte 1 is beyond its end 0"),
        (b"\x93", "is no map of msgpack"),
        (array(), "is no map of msgpack"),
        (b"\xc1", "has the invalid msgpack type byte 0xc1"),
        (at(b"\xa1a", array()) + b"\0", "its map ends at byte"),
        (at(b"\xa1a", array(kind=b"\x02")), "a is a complex number, neither a tensor nor a plain value"),
        (at(b"\xa1a", array(kind=b"\x04")), "a is an extension of type 4; only arrays, 1, are read"),
        (at(b"\xa1a", array(kind=b"\xff")), "a is an extension of type -1"),
        (at(b"\xa1a", array(kind=b"\x7f")), "a is an extension of type 127"),
        (at(b"\xa1a", array(shape=b"\x91\xff")), "a has a negative size in its shape [-1]"),
        (at(b"\xa1a", array(shape=b"\x91\xa1x")), "no list of integers"),
        (at(b"\xa1a", array(shape=b"\x91\xc3")), "no list of integers"),
        (at(b"\xa1a", array(shape=b"\x91\xcb" + b"\0" * 8)), "no list of integers"),
        (at(b"\xa1a", array(shape=b"\x92\xcf" + b"\xff" * 8 + b"\x01")), "which no file can hold"),
        (at(b"\xa1a", array(shape=b"\x91\x03")), "a of shape [3] needs 3 bytes; has 2"),
        (at(b"\xa1a", array(shape=b"\xdd\xff\xff\xff\xff")), "a is no array"),
        (at(b"\xa1a", array(shape=b"\x02")), "a is no array"),
        (at(b"\xa1a", array(dtype=b"\xa6object")), "a has the unknown dtype object"),
        (at(b"\xa1a", array(dtype=b"\xa1O")), "a has the unknown dtype O"),
        (at(b"\xa1a", array(dtype=b"\xa5i1,i1")), "a has the unknown dtype i1,i1"),
        (at(b"\xa1a", array(dtype=b"\xa2V1")), "a has the unknown dtype V1"),
        (at(b"\xa1a", array(dtype=b"\xa4int4")), "a has the unknown dtype int4"),
        (at(b"\xa1a", array(dtype=b"\x01")), "a has the unknown dtype 1"),
        (at(b"\xa1a", array(dtype=b"\xa3\x1b[A")), "a has the unknown dtype \\x1b[A"),
        (at(b"\xa1a", array(data=b"\xc4\x01ab")), "its bytes don't end where it does"),
        (at(b"\xa1a", array(data=b"\xc4\x03ab")), "is cut off"),
        (at(b"\xa1a", array(data=b"\xc6\xff\xff\xff\xff")), "is cut off"),
        (at(b"\xa1a", array(data=b"\xa2ab")), "its bytes don't end where it does"),
        (at(b"\xa1a", packed(b"")), "is cut off|a is no array"),
        (at(b"\xa1a", b"\xc9\xff\xff\xff\xff\x01"), "is cut off"),
        (at(b"\xa1a", b"\xc6\xff\xff\xff\xff"), "is cut off"),
        (at(b"\xa1a", b"\xdb\xff\xff\xff\xff"), "has a text of 4294967295 bytes"),
        (at(b"\xa1a", b"\xda\xff\xff"), "is cut off"),
        (at(b"\xa1a", b"\xa1\xff"), "has a text that is not UTF-8"),
        (at(b"\xa1a", b"\xc4\x01x"), "a is bytes, neither a tensor nor a plain value"),
        (at(b"\xa1a", b"\xcb\x7f\xf8" + b"\0" * 6), "a is nan, neither a tensor nor a plain value"),
        (at(b"\xa0", array()), "the key '' of its map is empty or has a dot"),
        (at(b"\xa3a.b", array()), "the key 'a.b' of its map is empty or has a dot"),
        (at(b"\xa1\x1b", array()), "the name \\x1b has control characters"),
        (at(b"\xc3", array()), "a key of its map is neither text nor a number"),
        (at(b"\xc4\x01a", array()), "a key of its map is neither text nor a number"),
        (at(b"\x91\x01", array()), "a key of its map is neither text nor a number"),
        (b"\x82\xa1a\x01\xa1a\x02", "its map has the key a twice"),
        (b"\x82\xa11\x01\x01\x02", "its map has the key 1 twice"),
        (b"\xdf\xff\xff\xff\xff", "is cut off"),
        (at(b"\xa1a", b"\xdd\xff\xff\xff\xff"), "is cut off"),
        (b"\x81\xa1a" * 100 + b"\x01", "nested more than 64 deep"),
        (b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01", "nested more than 64 deep"),
    ],
)
def test_msgpack_that_is_wrong_is_refused(data, message, tmp_path):
    (tmp_path / "x.msgpack").write_bytes(data)
    found = refusal(tmp_path / "x.msgpack")
    assert_says(found, *message.split("|"))


def test_more_text_than_a_header_may_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(msgpack_values, "MAX_HEADER", 5000)
    values = b"".join(b"\xa2" + b"%02d" % index + b"\xd9\xff" + b"x" * 255 for index in range(15))
    (tmp_path / "x.msgpack").write_bytes(b"\x8f" + values)
    assert len(open_reader(tmp_path / "x.msgpack").metadata) == 15
    monkeypatch.setattr(msgpack_values, "MAX_HEADER", 3000)
    assert ": has more than 3000 bytes beside its arrays" in refusal(tmp_path / "x.msgpack")


CHUNKED = b"\xb9__msgpack_chunked_array__"


@pytest.mark.parametrize(
    "data",
    [
        b"\x81" + CHUNKED + b"\xc3",
        b"\x83" + CHUNKED + b"\xc2\xa5shape\x81\xa10\x02\xa6chunks\x81\xa10" + array(),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa6chunks\x80",
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x03\xa6chunks\x81\xa10" + array(),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa11\x02\xa6chunks\x81\xa10" + array(),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\xff\xa6chunks\x81\xa10" + array(),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa6chunks\x81\xa11" + array(),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa6chunks\x81\xa10\x01",
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa5shape\x81\xa10\x02",
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa6chunks\x81\xa10" + array(b"\x92\x01\x02"),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\x81\xa10\x02\xa6chunks\x81\xa10" + array(b"\x91\x01"),
        b"\x83" + CHUNKED + b"\xc3\xa5shape\xdf\xff\xff\xff\xff",
        b"\x83"
        + CHUNKED
        + b"\xc3\xa5shape\x81\xa10\x04\xa6chunks\x82\xa10"
        + array()
        + b"\xa11"
        + array(dtype=b"\xa4int8"),
    ],
)
def test_an_array_in_pieces_that_do_not_fit_is_refused(data, tmp_path):
    (tmp_path / "x.msgpack").write_bytes(at(b"\xa1a", data))
    found = refusal(tmp_path / "x.msgpack")
    assert_says(found, "in pieces", "piece of", "needs 3 bytes", "negative size", "is no array")


def test_values_of_json_are_packed_as_the_library_unpacks_them():
    msgpack = pytest.importorskip("msgpack")
    lengths = [15, 16, 31, 32, 255, 256, 65535, 65536]
    numbers = [0, 127, 128, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -32769, -(2**31) - 1]
    value = {"none": None, "flags": [True, False], "floats": [1.5, -0.1, 1e300], "numbers": numbers,
             "texts": ["é" * length for length in lengths[:6]], "lists": [[0] * length for length in lengths],
             "maps": [dict.fromkeys(map(str, range(length)), 0) for length in lengths[:3]]}  # fmt: skip
    assert msgpack.unpackb(msgpack_values.pack(value)) == value
