"""Archives of torch and NumPy made to do harm: refused in one line."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.printable import printable
from parity_tests.fuzz.samples import ENDINGS, assert_same, read, write

from ..refusals import Payload, assert_says, refusal


@pytest.mark.parametrize("format", ["torch", "npz"])
def test_compressed_members_are_refused(format, tmp_path):
    path = write(format, tmp_path / f"x{ENDINGS[format]}", {"a": np.zeros(1 << 20, np.uint8)})
    with zipfile.ZipFile(path) as old:
        held = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in held.items():
            new.writestr(name, data)
    assert path.stat().st_size < 5000
    again = {"torch": "torch.save", "npz": "np.savez"}[format]
    assert f"is compressed; only stored ones are read: save it again by {again}" in refusal(path)


def test_a_torchscript_module_is_named(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/code/__torch__/net.py", "def forward(self): pass\n" * 9)
    assert "is a TorchScript module; save the state_dict of torch.jit.load(FILE) by torch.save" in refusal(path)


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


# ---- names that an unpacker would follow out of its folder

OUTSIDE = ["../../../x", "a/../../x", "/etc/x", "//server/x", "C:x", "c:/x", "..\\x", "\\x", "a\\..\\x", "a/.. /x"]
INSIDE = ["..", "params/Dense_0/kernel", "..a/b", "a..b", "...a", ".a/.b", "ab:0", "~/x", "a/./b", "-x"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_member_that_would_be_unpacked_elsewhere_is_refused(name, tmp_path):
    wanted = f": the member {printable(name)}.npy of the zip would be unpacked outside of its folder"
    path = npz(tmp_path / "x.npz", npy(said(), b"abcdefgh"), f"{name}.npy")
    assert refusal(path) == wanted
    path = write("torch", tmp_path / "x.pt", {"a": np.zeros(3)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(f"{name}.npy", b"not a tensor")
    assert refusal(path) == wanted


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("format", ["npz", "orbax"])
def test_a_tensor_that_would_be_unpacked_elsewhere_is_not_written(name, format, tmp_path):
    source = write("safetensors", tmp_path / "x.safetensors", {name: np.arange(3), "a": np.zeros(2)})
    with pytest.raises(CheckpointError, match=r"an unpacker would write it outside of its folder|a part is empty"):
        checkpoints.convert(source, tmp_path / f"to{ENDINGS[format]}", to_layout="same")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_names_of_folders_in_an_npz_are_taken(tmp_path):
    arrays = {name: np.arange(3.0) for name in INSIDE}
    assert_same(read(write("npz", tmp_path / "x.npz", arrays)), arrays)
    np.savez(tmp_path / "numpy.npz", **arrays)
    assert_same(read(tmp_path / "numpy.npz"), arrays)


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
        (npy(said("'<V4'"), b"x" * 8), "a is an array of |V4, which is no dtype of a tensor"),
        (npy(said("'<U1'"), b"x" * 8), "a is an array of <U1, which is no dtype of a tensor"),
        (npy(said("'<M8[s]'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("'<f16'"), b"x" * 32), "which is no dtype of a tensor"),
        (npy(said("'<f4,<f4'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("'(2,)<f4'"), b"x" * 16), "which is no dtype of a tensor"),
        (npy(said("[('x', '<f4')]"), b"x" * 8), "or its order is not said; save each field by its own name"),
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
