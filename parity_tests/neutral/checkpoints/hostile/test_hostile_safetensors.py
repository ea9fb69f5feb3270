"""Files of safetensors, and folders of them, made to do harm: refused in one line."""

from __future__ import annotations

import json
import struct

import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.files import MAX_HEADER

from ..refusals import assert_says, refusal


def raw(path, header, data=b"", length=None):
    """Write a file of safetensors with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start, stop, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def test_a_right_file_made_by_hand_is_read(tmp_path):
    path = raw(tmp_path / "x.safetensors", {"a": entry(0, 3), "b": entry(3, 4)}, b"abcd")
    with open_reader(path) as reader:
        assert reader.read("b").tobytes() == b"d"


@pytest.mark.parametrize("names", [{"b": "a", "c": "b", "d": "c"}, {"x": "y", "y": "x", "z": "z", "b": "a"}])
def test_names_that_lead_to_one_another_are_the_same_for_the_next_reader(tmp_path, names):
    """The target has the metadata of the source, which must not add tensors to those that were written."""
    source = raw(tmp_path / "x.safetensors", {"__metadata__": names, "a": entry(0, 3)}, b"abc")
    checkpoints.convert(source, tmp_path / "y.safetensors", to_layout="same")
    assert checkpoints.verify(source, tmp_path / "y.safetensors").passed
    written = {"a", *(name for name in "bcd" if name in names)}
    assert checkpoints.read(tmp_path / "y.safetensors").keys() == written


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6, ": a and b overlap"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"x" * 4, ": a and b overlap"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, b"x" * 8, ": a and b leave a hole of 2 bytes"),
        ({"a": entry(2, 4)}, b"x" * 4, ": the header and a leave a hole of 2 bytes"),
        ({"a": entry(-2, 2)}, b"x" * 4, ": the header and a overlap"),
        ({"a": entry(0, 4)}, b"x" * 5, ": its tensors end at byte 72; the file has 73"),
        ({"a": entry(0, 4)}, b"x" * 3, ": its tensors end at byte 72; the file has 71"),
        ({"a": entry(0, 4, "F32", [2])}, b"x" * 4, ": a needs 8 bytes; its offsets hold 4"),
        ({"a": entry(4, 0, "U8", [0])}, b"", ": a needs 0 bytes; its offsets hold -4"),
        ({"a": entry(0, 4, "F32", [1 << 62, 4])}, b"x" * 4, "which no file can hold"),
        ({"a": entry(0, 4, "F32", [0, 1 << 62, 1 << 62])}, b"", "which no file can hold"),
        ({"a": entry(0, 4, "F32", [-1])}, b"x" * 4, ": a has a negative size in its shape [-1]"),
        ({"a": entry(0, 4, "F32", [True])}, b"x" * 4, ": a has a shape that is no list of integers"),
        ({"a": entry(0, 4, "F32", [1.0])}, b"x" * 4, ": a has a shape that is no list of integers"),
        ({"a": entry(0, 4, "F32", "1")}, b"x" * 4, ": a has a shape that is no list of integers"),
        ({"a": entry(0, 4, "F32", [1] * 65)}, b"x" * 4, ": a has 65 axes; at most 64 can be held"),
        ({"a": entry(0, 4, "F4")}, b"x" * 4, ": a has the dtype F4, whose numbers are smaller than a byte"),
        ({"a": entry(0, 4, "\n")}, b"x" * 4, ": a has the unknown dtype \\n"),
        ({"a": entry(0, 4, ["F32"])}, b"x" * 4, ": a has the unknown dtype"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"x", ": the entry of a is not dtype, shape and data_offsets"),
        ({"a": {**entry(0, 1), "more": 1}}, b"x", ": the entry of a is not dtype, shape and data_offsets"),
        ({"a": 1}, b"", ": the entry of a is not dtype, shape and data_offsets"),
        ({"a": {**entry(0, 1), "data_offsets": [0, 1, 2]}}, b"x", ": the data_offsets of a are not two integers"),
        ({"a": {**entry(0, 1), "data_offsets": [0.0, 1]}}, b"x", ": the data_offsets of a are not two integers"),
        ({"__metadata__": {"a": 1}}, b"", ": __metadata__ of its header must map strings to strings"),
        ({"__metadata__": []}, b"", ": __metadata__ of its header must map strings to strings"),
        ({"": entry(0, 1)}, b"x", ": a tensor has an empty name"),
        ({"a\x1b[2J": entry(0, 1)}, b"x", ": the name a\\x1b[2J has control characters"),
        ({"a\nb": entry(0, 1)}, b"x", ": the name a\\nb has control characters"),
        ({"a\ud800": entry(0, 1)}, b"x", ": the name a\\ud800 has control characters"),
        ({"n" * 10_000: entry(0, 1)}, b"x", "is longer than 1000 characters"),
        ([], b"", ": its header is no object"),
        (b'{"a": NaN}', b"", ": the header has NaN, which JSON has not"),
        (b'{"a": -Infinity}', b"", ": the header has -Infinity, which JSON has not"),
        (b'{"a": 1e999}', b"", ": the header has the number 1e999, which is too large"),
        (b'{"a": 1, "a": 1}', b"", ": the header has a twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8"}}', b"", ": the header has dtype twice"),
        (b"[" * 100_000, b"", ": the header is nested too deeply"),
        (b'{"a": {"dtype": ' + b"[" * 900 + b"]" * 900 + b"}}", b"", "nested too deeply|is not dtype"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", ": the header has a number of more than 4300 digits"),
        (b'{"a": "\xff"}', b"", ": the header is no JSON"),
        (b"{", b"", ": the header is no JSON"),
        (b"", b"", ": the header is no JSON"),
        (b"{}{}", b"", ": the header is no JSON"),
    ],
)
def test_a_header_of_safetensors_that_is_wrong_is_refused(header, data, message, tmp_path):
    found = refusal(raw(tmp_path / "x.safetensors", header, data))
    assert_says(found, *message.split("|"))


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (1 << 62, f": its header claims {1 << 62} bytes; more than {MAX_HEADER} are not read"),
        ((1 << 64) - 1, "more than 100000000 are not read"),
        (MAX_HEADER, f": its header claims {MAX_HEADER} bytes; the file has 10"),
        (3, ": its header claims 3 bytes; the file has 10"),
    ],
)
def test_a_header_that_claims_too_much_is_refused_unread(length, message, tmp_path):
    assert message in refusal(raw(tmp_path / "x.safetensors", {}, length=length))


def test_a_name_that_turns_text_around_is_shown_escaped(tmp_path):
    path = raw(tmp_path / "x.safetensors", {"a\u202eb": entry(0, 1, "?")}, b"x")
    assert ": a\\u202eb has the unknown dtype" in refusal(path)


def test_names_of_paths_and_attributes_are_names(tmp_path):
    names = ["../../x", "/etc/passwd", "__class__.__init__"]
    header = {name: entry(index, index + 1) for index, name in enumerate(names)}
    with open_reader(raw(tmp_path / "x.safetensors", header, b"abc")) as reader:
        assert list(reader.tensors) == names


def test_bytes_of_bools_beyond_1_are_kept(tmp_path):
    with open_reader(raw(tmp_path / "x.safetensors", {"a": entry(0, 2, "BOOL")}, b"\x02\xff")) as reader:
        assert reader.read("a").tobytes() == b"\x02\xff"


# ---- shards


def shard(folder, name, **tensors):
    header = {key: entry(index, index + 1) for index, key in enumerate(tensors or {"t": 1})}
    return raw(folder / name, header, b"x" * len(header))


def index(folder, weight_map, **more):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map, **more})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize("name", ["../secret.safetensors", "a/../../x.safetensors", "./a.safetensors", "a//b", "a\\b"])
def test_a_shard_outside_the_folder_is_refused(name, tmp_path):
    shard(tmp_path, "secret.safetensors")
    (tmp_path / "x").mkdir()
    found = refusal(index(tmp_path / "x", {"t": name}))
    assert "is not named as one of its folder" in found


def test_a_shard_of_an_absolute_path_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    path = shard(tmp_path / "x", "a.safetensors")
    assert "is not named as one of its folder" in refusal(index(tmp_path / "x", {"t": str(path)}))


def test_links_out_of_the_folder_are_refused(tmp_path):
    secret = shard(tmp_path, "secret.safetensors")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.safetensors").symlink_to(secret)
    assert ": the file a.safetensors is a link out of its folder" in refusal(tmp_path / "x")
    index(tmp_path / "x", {"t": "a.safetensors"})
    assert "the file a.safetensors is a link out of its folder" in refusal(tmp_path / "x")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "model.safetensors.index.json").symlink_to(tmp_path / "x" / "model.safetensors.index.json")
    assert "is a link out of its folder" in refusal(tmp_path / "y")


@pytest.mark.parametrize("where", ["repo/other/abc", "repo/blobs/in/abc", "elsewhere/blobs/abc"])
def test_links_within_the_hubs_cache_lead_to_its_blobs_alone(where, tmp_path):
    snapshot, blob = tmp_path / "repo" / "snapshots" / "rev", tmp_path / where
    snapshot.mkdir(parents=True)
    blob.parent.mkdir(parents=True)
    shard(blob.parent, "abc")
    (snapshot / "model.safetensors").symlink_to(blob)
    assert ": the file model.safetensors is a link out of its folder" in refusal(snapshot)


def test_a_link_that_leads_nowhere_or_to_itself_is_refused(tmp_path):
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    assert ": these files of it are missing: a.safetensors" in refusal(tmp_path)
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    assert ": the file a.safetensors is a link to itself" in refusal(tmp_path)


def test_missing_shards_are_all_named(tmp_path):
    shard(tmp_path, "a.safetensors")
    weight_map = {"t": "a.safetensors", "u": "b.safetensors", "v": "c.safetensors"}
    found = refusal(index(tmp_path, weight_map))
    assert "these files of it are missing: b.safetensors; c.safetensors" in found


def test_all_differences_between_index_and_shards_are_in_one_line(tmp_path):
    shard(tmp_path, "a.safetensors", t=1, extra=1)
    shard(tmp_path, "b.safetensors", moved=1)
    weight_map = {"t": "a.safetensors", "moved": "a.safetensors", "gone": "b.safetensors"}
    found = refusal(index(tmp_path, weight_map))
    assert found.endswith(
        "index and files differ: moved is in b.safetensors, not in a.safetensors; gone is not in b.safetensors; "
        "extra of a.safetensors is not in the index"
    )


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shard(tmp_path, "a.safetensors", t=1)
    shard(tmp_path, "b.safetensors", t=1, u=1)
    assert ": tensors come twice: t is in a.safetensors and b.safetensors" in refusal(tmp_path)
    assert "tensors come twice" in refusal(index(tmp_path, {"t": "a.safetensors", "u": "b.safetensors"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"t": NaN}}', "the index has NaN"),
        ('{"weight_map": {"t": "a.safetensors", "t": "b.safetensors"}}', "the index has t twice"),
        ('{"weight_map": []}', "the index has no weight_map"),
        ('{"weight_map": {"t": 1}}', "names a file by something that is not text"),
        ('{"weight_map": {"t": ["a.safetensors"]}}', "names a file by something that is not text"),
        ('{"weight_map": {"t": "a\\u0000b"}}', "the name a\\x00b has control characters"),
        ('{"weight_map": {"t": ""}}', "empty name"),
        ('{"weight_map": {}, "metadata": 3}', "the metadata of the index is no object"),
        ("[" * 100_000, "the index is nested too deeply"),
        ("", "the index is no JSON"),
    ],
)
def test_an_index_that_is_wrong_is_refused(text, message, tmp_path):
    shard(tmp_path, "a.safetensors")
    assert message in refusal(index(tmp_path, text))
