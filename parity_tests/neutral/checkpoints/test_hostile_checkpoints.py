"""Checkpoints made to do harm: each is refused in one line that names the file, before much memory is taken."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import struct
import zipfile

import numpy as np
import pytest

from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.checkpoints.containers.files import MAX_HEADER
from attn_bridge.checkpoints.containers.msgpack import values as msgpack_values
from attn_bridge.checkpoints.containers.pickles import STEPS
from parity_tests.fuzz.samples import ENDINGS, random_arrays, read, write
from parity_tests.support.memory import resident_memory, traced_memory

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


# ---- safetensors


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
        ({"a": entry(0, 4, "F4")}, b"x" * 4, ": a has the unknown dtype F4"),
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
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", ": the header is no JSON"),
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


# ---- pickles


def torch_file(path, data, storages=None, **more):
    """Write an archive as torch does, with any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", data)
        for key, held in (storages or {}).items():
            file.writestr(f"x/data/{key}", held)
        for name, held in more.items():
            file.writestr(f"x/{name}", held)
    return path


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(offset=0, shape=(2,), strides=(1,), count=2, key="0", kind="torch\nFloatStorage", shape_code=None):
    """Return the operations that make a tensor."""
    storage = b"(" + text("storage") + b"c" + kind.encode() + b"\n" + text(key) + text("cpu") + number(count) + b"tQ"
    rest = number(offset) + (shape_code or numbers(shape)) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def dict_of(code, name="a"):
    return b"\x80\x02}" + text(name) + code + b"s."


def test_a_right_archive_made_by_hand_is_read(tmp_path):
    path = torch_file(tmp_path / "x.pt", dict_of(tensor()), {"0": b"abcdefgh"})
    with open_reader(path) as reader:
        assert reader.read("a").tobytes() == b"abcdefgh"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (1 << 40,), "strides": (0,)}, ": a of shape [1099511627776] is larger than its storage"),
        ({"shape": (3,)}, "larger than its storage"),
        ({"shape": (2,), "strides": (2,)}, "larger than its storage"),
        ({"offset": 1}, "larger than its storage"),
        ({"shape": (1,), "offset": 1 << 60}, "larger than its storage"),
        ({"shape": (1 << 40, 1 << 40), "strides": (1, 1)}, "which no file can hold"),
        ({"shape": (-1,)}, "a has a negative size in its shape [-1]"),
        ({"strides": (-1,)}, "a has strides or an offset that are no natural numbers"),
        ({"offset": -1}, "a has strides or an offset that are no natural numbers"),
        ({"strides": (1, 1)}, "a has strides or an offset that are no natural numbers"),
        ({"shape": (1,) * 65, "strides": (1,) * 65}, "a has 65 axes"),
        ({"count": 1 << 60}, f"the storage of a is said to have {1 << 62} bytes; it has 8"),
        ({"count": 1}, "the storage of a is said to have 4 bytes; it has 8"),
        ({"count": -2}, "the storage of a is said to have -8 bytes; it has 8"),
        ({"key": "1"}, "the storage 1 of a is missing"),
        ({"key": "../data.pkl"}, "the storage ../data.pkl of a is missing"),
        ({"kind": "torch.storage\nUntypedStorage"}, "whose dtype is not known"),
        ({"kind": "torch\nfloat32"}, "its pickle has a storage of the class torch.float32"),
        ({"shape_code": b"N"}, "a has a shape that is no list of integers"),
        ({"shape_code": b"(\x88t"}, "a has a shape that is no list of integers"),
    ],
)
def test_a_tensor_that_its_storage_can_not_hold_is_refused(change, message, tmp_path):
    found = refusal(torch_file(tmp_path / "x.pt", dict_of(tensor(**change)), {"0": b"abcdefgh"}))
    assert message in found


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_does_not_run(protocol, tmp_path):
    data = pickle.dumps({"a": Payload(tmp_path / "ran")}, protocol)
    assert ": its pickle " in refusal(torch_file(tmp_path / "x.pt", data))
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)["a"].close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "posix.system", "builtins.eval", "builtins.getattr", "numpy.load", "copyreg._reconstructor"),
        *("torch.load", "torch.hub.load", "torch._utils._rebuild_sparse_tensor", "collections.defaultdict"),
        *("torch._tensor._rebuild_from_type_v2", "torch.serialization.os.system", "torch.FloatStorage.__init__"),
        "torch.storage._load_from_bytes",
    ],
)
def test_every_other_name_is_refused_by_name(name, tmp_path):
    module, _, last = name.rpartition(".")
    for code in (f"c{module}\n{last}\n".encode(), text(module) + text(last) + b"\x93"):
        found = refusal(torch_file(tmp_path / "x.pt", b"\x80\x04" + code + b"."))
        assert found == f": its pickle refers to {name}, which is refused"


@pytest.mark.parametrize("name", [b"Ordered\\x44ict", b"OrderedDi\\ct", "Словарь".encode(), b"\xff"])
def test_a_name_is_taken_as_it_is_written(name, tmp_path):
    """`pickletools` resolves escapes in names, which `pickle` does not, and fails at some others."""
    found = refusal(torch_file(tmp_path / "x.pt", b"\x80\x02ccollections\n" + name + b"\n)R."))
    assert_says(found, ": its pickle refers to collections.Ordered\\", ": its pickle is damaged or cut off")


@pytest.mark.parametrize(
    "code", sorted(set(range(256)) - {ord(one.code) for one in pickletools.opcodes if one.name in STEPS})
)
def test_every_other_operation_is_refused(code, tmp_path):
    found = refusal(torch_file(tmp_path / "x.pt", b"\x80\x02})" + bytes([code]) + b"\1\0\0\0\n\n\n."))
    assert found == f": its pickle has the operation {code:#04x}, which is refused"


@pytest.mark.parametrize(
    "data",
    [
        b".",
        b"\x80\x02}",
        b"\x80",
        b"}s.",
        b"}(K\x01u.",
        b"(.",
        b"u.",
        b"e.",
        b"t.",
        b"}K\x01K\x01e.",
        b"]K\x01K\x01s.",
        b"h\x05.",
        b"j\xff\xff\xff\xff.",
        b"R.",
        b")R.",
        b"ccollections\nOrderedDict\nK\x01R.",
        b"ccollections\nOrderedDict\n(]K\x01atR.",
        b"ccollections\nOrderedDict\n(K\x01K\x01tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
        b"ctorch._utils\n_rebuild_tensor_v3\n(NNNNNNNtR.",
        b"ctorch._utils\n_rebuild_parameter\n(NNNtR.",
        b"ctorch\nSize\n(NtR.",
        b"ctorch\nFloatStorage\n)R.",
        b"NQ.",
        b"(NNNNNtQ.",
        b"(" + text("storage") + b"NNNNtQ.",
        b"K\x01Nb.",
        b"}Nb.",
        b"X\xff\xff\xff\xffa.",
        b"X\x01\0\0\0\xff.",
        b"\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
        b"\x8b\xff\xff\xff\x7fa.",
        b"\x8b\xff\xff\xff\xffa.",
        b"c" + b"a" * 5000,
        b"cos",
        b"K\x01K\x02\x93.",
        b"}]Ns.",
        b"}}Ns.",
        b"}G\x7f\xf0\0\0\0\0\0\0K\x01s.",
        b"K\x01.",
        b"N.",
        b"].",
        b"\x80\x02}" + text("") + b"K\x01s.",
        b"\x80\x02}" + text("a") + b"G\x7f\xf8\0\0\0\0\0\0s.",
    ],
)
def test_a_damaged_pickle_is_refused(data, tmp_path):
    found = refusal(torch_file(tmp_path / "x.pt", data))
    assert_says(found, "pickle", "not a dict of", "is empty", "plain value", "a key of")


def test_a_far_place_in_the_memo_takes_no_memory(tmp_path):
    with open_reader(torch_file(tmp_path / "x.pt", b"\x80\x02}r\xff\xff\xff\xff.")) as reader:
        assert reader.tensors == {}


def test_values_repeated_without_end_are_refused(tmp_path):
    code = b"\x80\x02}" + text("a") + b"]q\0" + b"0](h\0h\0eq\0" * 60 + b"s."
    assert "nested too deeply or repeated too often" in refusal(torch_file(tmp_path / "x.pt", code))
    shape = b")q\0" + b"0h\0h\0\x86q\0" * 60
    path = torch_file(tmp_path / "y.pt", dict_of(tensor(shape_code=shape)), {"0": b"abcdefgh"})
    assert "a has a shape that is no list of integers" in refusal(path)


@pytest.mark.parametrize(
    "call", [b"ccollections\nOrderedDict\nh\x01\x85R", b"ctorch\nSize\nh\x01\x85R", b"ctorch\nSize\nh\x02\x85R"]
)
def test_calls_that_copy_the_same_values_again_and_again_are_refused(call, tmp_path):
    """A bomb of 105 KB: each of 3000 calls makes a dict of the same 3000 pairs."""
    pairs = b"".join(b"M" + struct.pack("<H", index) + b"K\x01\x86" for index in range(3000))
    values = b"](" + pairs + b"eq\x010(" + pairs + b"tq\x020"
    path = torch_file(tmp_path / "x.pt", b"\x80\x02}" + text("a") + values + b"(" + call * 3000 + b"ts.")
    assert refusal(path) == ": its pickle repeats values too often"


def test_an_integer_of_too_many_bits_is_refused(tmp_path):
    code = b"\x8b" + struct.pack("<i", 1000) + b"\x7f" * 1000
    assert ": its pickle has an integer of more than 512 bits" in refusal(torch_file(tmp_path / "x.pt", dict_of(code)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
            "was written by torch.save of torch < 1.6; load it with",
        ),
        (b"", "is no file of torch.save: it is no zip archive"),
        (b"hello", "is no file of torch.save: it is no zip archive"),
        (b"PK\3\4" + b"\0" * 100, "is no whole zip archive: it is cut off, or was never finished"),
    ],
)
def test_what_is_no_archive_of_torch_is_refused_with_what_to_do(data, message, tmp_path):
    (tmp_path / "x.pt").write_bytes(data)
    assert message in refusal(tmp_path / "x.pt")


def test_archives_of_something_else_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("a.txt", "x")
    assert "it has 0 members called data.pkl" in refusal(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("a/data.pkl", "x")
        file.writestr("b/data.pkl", "x")
    assert "it has 2 members called data.pkl" in refusal(tmp_path / "x.pt")
    script = torch_file(tmp_path / "x.pt", b"\x80\x02}.", **{"constants.pkl": b"x"})
    assert "is a TorchScript archive; save its state_dict with torch.save" in refusal(script)
    big = torch_file(tmp_path / "x.pt", b"\x80\x02}.", byteorder=b"big")
    assert "was written on a big-endian machine" in refusal(big)


# ---- zip archives


@pytest.mark.parametrize("format", ["torch", "npz"])
def test_compressed_members_are_refused(format, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", {"a": np.zeros(1 << 20, np.uint8)})
    with zipfile.ZipFile(path) as old:
        held = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in held.items():
            new.writestr(name, data)
    assert path.stat().st_size < 5000
    assert "is compressed; only stored ones are read" in refusal(path)


def patched(path, format, changes):
    """Write a small archive and change places in it: (after these bytes, offset, new bytes)."""
    write(format, path, {"a": np.arange(3, dtype=np.int32), "b": np.arange(3, dtype=np.int32)})
    data = bytearray(path.read_bytes())
    for mark, which, offset, new in changes:
        at = -1
        for _ in range(which + 1):
            at = data.index(mark, at + 1)
        data[at + offset : at + offset + len(new)] = new
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("format", ["torch", "npz"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(b"PK\1\2", 1, 42, b"\0\0\0\0")], "another one than its directory says|overlap"),
        ([(b"PK\1\2", 1, 42, b"\xff\xff\xff\x7f")], "ends at byte"),
        ([(b"PK\1\2", 1, 42, b"\xff\xff\xff\xff")], "ends at byte"),
        ([(b"PK\1\2", 1, 20, b"\xff\xff\xff\x7f" * 2)], "has another size than its directory says"),
        ([(b"PK\1\2", 1, 24, b"\xff\xff\xff\x7f")], "is compressed"),
        ([(b"PK\1\2", 1, 10, b"\x08\0")], "is compressed"),
        ([(b"PK\1\2", 1, 8, b"\x01\x08")], "is encrypted or elsewhere"),
        ([(b"PK\1\2", 1, 0, b"XX")], "the directory of the zip is damaged"),
        ([(b"PK\1\2", 1, 28, b"\xff\xff")], "the directory of the zip is damaged"),
        ([(b"PK\1\2", 1, 46, b"\xff\xff")], "which is not UTF-8"),
        ([(b"PK\5\6", 0, 10, b"\xff\xff")], "the directory of the zip is damaged"),
        ([(b"PK\5\6", 0, 10, b"\1\0")], "the directory of the zip is damaged"),
        ([(b"PK\5\6", 0, 12, b"\xff\xff\xff\x7f")], "the directory of the zip is not where its end says"),
        ([(b"PK\5\6", 0, 16, b"\0\0\0\0")], "the directory of the zip is not where its end says"),
        ([(b"PK\5\6", 0, 4, b"\1\0")], "the end of the zip is damaged"),
        ([(b"PK\5\6", 0, 20, b"\1\0")], "the end of the zip is damaged"),
        ([(b"PK\3\4", 1, 0, b"XX")], "where its directory says"),
        ([(b"PK\3\4", 1, 8, b"\x08\0")], "is another one than its directory says"),
        ([(b"PK\3\4", 1, 28, b"\xff\xff")], "ends before|claims"),
    ],
)
def test_a_damaged_archive_is_refused(format, changes, message, tmp_path):
    found = refusal(patched(tmp_path / f"x{ENDINGS[format]}", format, changes))
    assert_says(found, *message.split("|"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("format", ["torch", "npz"])
def test_a_member_that_comes_twice_is_refused(format, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", {"a": np.zeros(3)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(file.namelist()[0], b"other")
    assert "twice" in refusal(path)


def test_members_that_share_their_bytes_are_refused(tmp_path):
    """The bomb of overlapping members: a thousand entries of one directory for the same bytes."""
    held = io.BytesIO()
    np.save(held, np.zeros(1000))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", held.getvalue())
        twin = zipfile.ZipInfo("a.npy")
        for slot in zipfile.ZipInfo.__slots__:
            if hasattr(file.filelist[0], slot):
                setattr(twin, slot, getattr(file.filelist[0], slot))
        twin.filename = twin.orig_filename = "b.npy"
        file.filelist.append(twin)
        file.NameToInfo["b.npy"] = twin
        file._didModify = True
    assert "is another one than its directory says" in refusal(tmp_path / "x.npz")


def test_a_member_within_another_is_refused(tmp_path):
    path = write("npz", tmp_path / "x.npz", {"a": np.arange(3), "b": np.arange(3)})
    data = bytearray(path.read_bytes())
    second = data.index(b"PK\3\4", 4)
    directory = data.index(b"PK\1\2")
    size = struct.pack("<I", directory - 30 - len("a.npy"))
    data[18:26] = data[directory + 20 : directory + 28] = size * 2
    path.write_bytes(data)
    assert 0 < second < directory
    assert ": the members a.npy and b.npy of the zip overlap" in refusal(path)


@pytest.mark.parametrize("format", ["torch", "npz"])
def test_an_extra_field_that_would_take_long_is_refused(format, tmp_path):
    """`zipfile` cuts an extra field down part by part, so its time grows with the square of the bytes."""
    path = write(format, tmp_path / f"x{ENDINGS[format]}", {"a": np.zeros(3)})
    with zipfile.ZipFile(path, "a") as file:
        file.filelist[0].extra = struct.pack("<HH", 0x4242, 0) * 16383
        file._didModify = True
    assert ": a member of the zip has an extra field of 65532 bytes; at most 1024 are read" in refusal(path)


@pytest.mark.parametrize("format", ["torch", "npz"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": b"\1\0\xff\0"}, "the directory of the zip is damaged"),
        ({"extra": struct.pack("<HHBI", 0x7075, 5, 1, 0)}, ""),
        ({"extra": struct.pack("<HHBI", 0x7075, 6, 1, 0) + b"\xff"}, ""),
        ({"extract_version": 64}, "the directory of the zip is damaged: zip file version 6.4"),
        ({"comment": b"PK\6\7" + bytes(16)}, "the end of the zip is damaged"),
    ],
)
def test_entries_that_zipfile_would_stumble_over_are_read_or_refused(format, change, message, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", {"a": np.zeros(3)})
    with zipfile.ZipFile(path, "a") as file:
        for name, value in change.items():
            setattr(file.filelist[-1], name, value)
        file._didModify = True
    if message:
        assert message in refusal(path)
    else:
        assert read(path)["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("comment", [b"plain", b"PK\6\7" + bytes(16)])
def test_a_directory_that_ends_like_a_64_bit_archive_is_refused(comment, tmp_path):
    """`zipfile` would look for its end record in there."""
    path = write("npz", tmp_path / "x.npz", {"a": np.zeros(3)})
    with zipfile.ZipFile(path, "a") as file:
        file.filelist[-1].comment = comment
        file._didModify = True
    data = path.read_bytes()
    end = data.rindex(b"PK\5\6")
    count, length, begin = struct.unpack_from("<HII", data, end + 10)
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, begin)
    path.write_bytes(data[:end] + wide + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1) + data[end:])
    if comment == b"plain":
        assert read(path)["a"].tolist() == [0, 0, 0]
    else:
        assert ": the directory of the zip is damaged" in refusal(path)


def test_a_name_is_not_cut_at_a_null(tmp_path):
    path = write("npz", tmp_path / "x.npz", {"a": np.zeros(3), "b.npyx": np.zeros(3)})
    path.write_bytes(path.read_bytes().replace(b"b.npyx.npy", b"a.npy\0.npy"))
    assert ": the name a.npy\\x00 has control characters" in refusal(path)


# ---- npz


def npy(header, data=b"", version=(1, 0), length=None):
    text = header.encode("latin-1")
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", size) + text + data


def npz(path, held, name="a.npy", **more):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, held)
        for other, data in more.items():
            file.writestr(other, data)
    return path


def said(descr="'<f4'", fortran="False", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def test_a_right_npz_made_by_hand_is_read(tmp_path):
    for version in ((1, 0), (2, 0)):
        with open_reader(npz(tmp_path / "x.npz", npy(said(), b"abcdefgh", version))) as reader:
            assert reader.read("a").tobytes() == b"abcdefgh"


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (npy(said(shape=f"({1 << 36},)"), b"x" * 8), f"a claims {1 << 38} bytes; its member has 8"),
        (npy(said(shape="(3,)"), b"x" * 8), "a claims 12 bytes; its member has 8"),
        (npy(said(shape="(1,)"), b"x" * 8), "a claims 4 bytes; its member has 8"),
        (npy(said(shape="(-1,)"), b"x" * 8), "a has a negative size"),
        (npy(said(shape="(True,)"), b"x" * 8), "no list of integers"),
        (npy(said(shape="2"), b"x" * 8), "no list of integers"),
        (npy(said(shape=f"({1 << 62}, 4)"), b"x" * 8), "which no file can hold"),
        (npy(said(shape="(" + "1," * 65 + ")"), b"x" * 4), "a has 65 axes"),
        (npy(said("'|O'"), b"x" * 16), "a is an array of objects"),
        (npy(said("'O'"), b"x" * 16), "a is an array of objects"),
        (npy(said("'<V2'"), b"x" * 4), "a is an array of |V2, which is no dtype of a tensor"),
        (npy(said("'<U1'"), b"x" * 8), "a is an array of <U1, which is no dtype of a tensor"),
        (npy(said("'<M8[s]'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("'<f16'"), b"x" * 32), "which is no dtype of a tensor"),
        (npy(said("'<f4,<f4'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("'(2,)<f4'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("[('x', '<f4')]"), b"x" * 8), "a is an array of records"),
        (npy(said("'nonsense'"), b"x" * 8), "which is no dtype of a tensor"),
        (npy(said("'\\x00'"), b"x" * 8), "the header of a is damaged|which is no dtype"),
        (npy(said(fortran="1"), b"x" * 8), "or its order is not said"),
        (npy("{}\n", b"x" * 8), "is not descr, fortran_order and shape"),
        (npy("[]\n", b"x" * 8), "is not descr, fortran_order and shape"),
        (npy("{'descr': __import__('os')}", b""), "the header of a is damaged: malformed node or string on line 1"),
        (npy("(" * 9000, b""), "the header of a is damaged"),
        (npy("-" * 9000 + "1", b""), "the header of a is damaged"),
        (npy("1" + "+1" * 4500, b""), "the header of a is damaged|is not descr"),
        (npy("\0" * 9, b""), "the header of a is damaged"),
        (npy("\n" * 9, b""), "the header of a is damaged"),
        (npy(said(), b"", length=60_000), "the header of a claims 60000 bytes"),
        (npy(said(), b"", (2, 0), length=(1 << 32) - 1), "the header of a claims 4294967295 bytes"),
        (npy(said(), b"", length=200), "the header of a claims 200 bytes"),
        (npy(said(), b"x" * 8, (3, 0)), "is no array of NumPy's format"),
        (b"\x93NUMPY", "is no array of NumPy's format"),
        (b"", "is no array of NumPy's format"),
        (pickle.dumps([1, 2, 3]), "is no array of NumPy's format"),
    ],
)
def test_an_array_that_is_none_is_refused(held, message, tmp_path):
    found = refusal(npz(tmp_path / "x.npz", held))
    assert_says(found, *message.split("|"))


def test_an_array_of_objects_does_not_run(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([Payload(tmp_path / "ran")], dtype=object))
    assert "a is an array of objects" in refusal(tmp_path / "x.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("a.txt", {}, "a.txt in it is no array"),
        (".npy", {}, "a tensor has an empty name"),
        ("a\nb.npy", {}, "the name a\\nb has control characters"),
        ("a.npy", {"attn_bridge.json": b"[]"}, "attn_bridge.json in it is no object"),
        ("a.npy", {"attn_bridge.json": b"{"}, "is no JSON"),
        ("a.npy", {"attn_bridge.json": b'{"dtypes": []}'}, "has no objects"),
        ("a.npy", {"attn_bridge.json": b'{"dtypes": {"b": "bfloat16"}}'}, "names arrays that are not there: b"),
        ("a.npy", {"attn_bridge.json": b'{"dtypes": {"a": "bfloat16"}}'}, "a is float32, which can't be bfloat16"),
        ("a.npy", {"attn_bridge.json": b'{"dtypes": {"a": "object"}}'}, "a has the unknown dtype object"),
    ],
)
def test_members_that_are_no_arrays_are_refused(name, more, message, tmp_path):
    assert message in refusal(npz(tmp_path / "x.npz", npy(said(), b"x" * 8), name, **more))


# ---- msgpack


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut off: byte 1 is beyond its end 0"),
        (b"\x93", "is no map of msgpack"),
        (array(), "is no map of msgpack"),
        (b"\xc1", "has the invalid msgpack type byte 0xc1"),
        (at(b"\xa1a", array()) + b"\0", "its map ends at byte"),
        (at(b"\xa1a", array(kind=b"\x02")), "a is an extension of type 2; only arrays, 1, are read"),
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
        (at(b"\xa1a", b"\xcb\x7f\xf8" + b"\0" * 6), "a is nan, which JSON can't hold"),
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


# ---- Orbax


def folder(tmp_path, **changes):
    """Write a folder of Orbax and change its _METADATA."""
    path = write("orbax", tmp_path / "x.orbax", {"a.b": np.arange(6, dtype=np.int32).reshape(2, 3)})
    said = json.loads((path / "_METADATA").read_text())
    (entry,) = said["tree_metadata"].values()
    for key, value in changes.items():
        entry[key] = value
    (path / "_METADATA").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["..", "b"], "is empty or has a dot"),
        (["a.b"], "is empty or has a dot"),
        (["", "b"], "is empty or has a dot"),
        ([], "is empty or has a dot"),
        (["a\x1b"], "has control characters"),
        (["n" * 2000], "is longer than 1000 characters"),
        (["/etc"], "is not named as one of its folder"),
        (["gone"], "can't be opened|TensorStore"),
    ],
)
def test_keys_of_orbax_that_are_none_are_refused(keys, message, tmp_path):
    path = folder(tmp_path, key_metadata=[{"key": key, "key_type": 2} for key in keys])
    with resident_memory() as peak:
        assert_says(refused(path), *message.split("|"))
    assert peak.bytes < MAX_MEMORY


@pytest.mark.parametrize("value", [None, [], {"key": 1}, [{"key": 1}], [1], "a"])
def test_entries_of_orbax_that_are_none_are_refused(value, tmp_path):
    found = refusal(folder(tmp_path, key_metadata=value))
    assert "without key_metadata and value_metadata" in found or "is empty or has a dot" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1 << 40, 3]}, "has 1 chunks; its shape [1099511627776, 3] needs 549755813888"),
        ({"shape": [-1, 3]}, "negative size"),
        ({"shape": [1 << 62, 3], "chunks": [1 << 62, 3]}, "which no file can hold"),
        ({"shape": [1 << 50, 3], "chunks": [1 << 50, 3]}, "a chunk has"),
        ({"chunks": [2]}, "has chunks [2] for the shape [2, 3]"),
        ({"chunks": [0, 3]}, "has chunks [0, 3] for the shape [2, 3]"),
        ({"chunks": [1, 3]}, "has 1 chunks; its shape [2, 3] needs 2"),
        ({"dtype": "<c8"}, "has 24 bytes; a chunk has 48"),
        ({"dtype": "<f16"}, "unknown dtype"),
    ],
)
def test_arrays_of_zarr_that_claim_more_than_is_there_are_refused(change, message, tmp_path):
    path = folder(tmp_path)
    file = path / "a.b" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert message in refusal_below(path)


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


def test_links_and_missing_chunks_of_orbax_are_refused(tmp_path):
    path = folder(tmp_path)
    chunk = path / "a.b" / "0.0"
    chunk.rename(tmp_path / "secret")
    assert "has 0 chunks; its shape [2, 3] needs 1" in refusal_below(path)
    chunk.symlink_to(tmp_path / "secret")
    assert "is a link out of its folder" in refusal_below(path)
    chunk.unlink()
    chunk.write_bytes(b"x" * 23)
    assert "has 23 bytes; a chunk has 24" in refusal_below(path)
    (path / "_METADATA").write_text("{}")
    assert "has no tree_metadata" in refusal_below(path)


# ---- cut off


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
