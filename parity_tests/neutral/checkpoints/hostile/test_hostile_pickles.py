"""Files of torch whose pickles are made to do harm: nothing runs, and each is refused in one line."""

from __future__ import annotations

import pickle
import pickletools
import struct
import zipfile

import pytest

from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.pickles import STEPS

from ..refusals import Payload, assert_says, refusal


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
        ({"shape": (1 << 40,), "strides": (0,)}, ": a of shape [1099511627776] repeats a storage of 2 elements"),
        (
            {"shape": (3,), "strides": (0,)},
            "(torch.Tensor.expand): save it .contiguous()",
        ),
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
    remedy = "; save it again with pickle's protocol 2 or a later one" if chr(code) in "2FILSTVdglp" else ""
    assert found == f": its pickle has the operation {code:#04x}, which is refused{remedy}"


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
