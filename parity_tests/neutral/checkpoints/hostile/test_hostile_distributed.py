"""Distributed checkpoints of torch made to do harm: refused in one line, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest

from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.checkpoints.containers.base import Extent
from attn_bridge.checkpoints.containers.dcp import chunks as dcp_chunks
from attn_bridge.checkpoints.containers.dcp import metadata as dcp_metadata
from attn_bridge.checkpoints.containers.dcp import reader as dcp_reader
from attn_bridge.checkpoints.containers.dcp import writer as dcp_writer
from attn_bridge.checkpoints.containers.dcp.metadata import HOME, INERT, STORAGE_INFO
from attn_bridge.checkpoints.containers.pickles import Machine, Pickler, Record
from attn_bridge.checkpoints.containers.pickles.calls import Global
from parity_tests.fuzz.samples import assert_same, random_array, read, write

from ..refusals import refusal

ARRAYS = {
    "a.weight": random_array("float32", (6, 4), np.random.default_rng(0)),
    "b": random_array("bfloat16", (3,), np.random.default_rng(1)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A distributed checkpoint of two tensors, one of them in three chunks, and a value."""
    monkeypatch.setattr(dcp_writer, "CHUNK", 32)
    return write("dcp", tmp_path / "x.dcp", ARRAYS, {"step": 3})


def dump(value, pickler):
    """Write what `Machine` reads of a ``.metadata``, calls of functions and objects of classes included."""
    if isinstance(value, Record):
        is_object = value.name.startswith((HOME, STORAGE_INFO)) and not value.name.endswith("_ENCODING")
        pickler.remembered(value.name)
        dump(value.arguments, pickler)
        pickler.raw(b"\x81" if is_object else b"R")
        if value.state is not None:
            dump(value.state, pickler)
            pickler.raw(b"b")
    elif isinstance(value, Global):
        pickler.remembered(value.name)
    elif isinstance(value, tuple):
        pickler.raw(b"(")
        for one in value:
            dump(one, pickler)
        pickler.raw(b"t")
    elif isinstance(value, list):
        pickler.raw(b"](")
        for one in value:
            dump(one, pickler)
        pickler.raw(b"e")
    elif isinstance(value, dict):
        pickler.raw(b"}(")
        for key, one in value.items():
            dump(key, pickler)
            dump(one, pickler)
        pickler.raw(b"u")
    else:
        pickler.value(value)


def changed(folder, change):
    """Change what the ``.metadata`` says: `change` gets its tensors, and where everything is, by (name, offset)."""
    path = folder / ".metadata"
    whole = Machine(path.read_bytes(), path, INERT).run()
    entries, stored = whole.state["state_dict_metadata"], whole.state["storage_data"]
    change(
        entries, {(key.state["fqn"], key.state.get("offset")): (key, place) for key, place in stored.items()}, stored
    )
    pickler = Pickler()
    dump(whole, pickler)
    path.write_bytes(pickler.finish())
    return folder


def chunk(entries, number=0):
    return entries["a.weight"].state["chunks"][number].state


def place(places, offset=(0, 0)):
    return places["a.weight", offset][1].state


def test_what_the_tests_write_anew_is_read(folder):
    changed(folder, lambda entries, places, stored: None)
    assert_same(read(folder), ARRAYS)
    with open_reader(folder) as reader:
        assert reader.metadata == {"step": 3}
        assert len(reader.files()) == 2


CHANGES = {
    "offset behind the end": (lambda e, p, s: place(p).update(offset=1 << 40), "ends at byte"),
    "negative offset": (lambda e, p, s: place(p).update(offset=-1), "-1 is no natural number"),
    "offset as text": (lambda e, p, s: place(p).update(offset="1"), "'1' is no natural number"),
    "offset of many bits": (lambda e, p, s: place(p).update(offset=1 << 70), "is no natural number"),
    "length as truth": (lambda e, p, s: place(p).update(length=True), "True is no natural number"),
    "length too long": (lambda e, p, s: place(p).update(length=1 << 62), "ends at byte"),
    "length too short": (lambda e, p, s: place(p).update(length=5), "takes 32 bytes; 5 are said to be there"),
    "two chunks in one place": (
        lambda e, p, s: place(p).update(place(p, (2, 0))),
        "a.weight and a.weight overlap in it",
    ),
    "path upwards": (lambda e, p, s: place(p).update(relative_path="../x/y"), "is not named as one of its folder"),
    "absolute path": (lambda e, p, s: place(p).update(relative_path="/etc/passwd"), "is not named as one of its"),
    "path of a folder": (
        lambda e, p, s: place(p).update(relative_path="."),
        "the file . is not named as one of its folder",
    ),
    "path with a null": (lambda e, p, s: place(p).update(relative_path="a\0b"), "has control characters"),
    "path of no file": (lambda e, p, s: place(p).update(relative_path="__9_9.distcp"), "are missing: __9_9.distcp"),
    "path of a number": (lambda e, p, s: place(p).update(relative_path=3), "is 3, not text"),
    "an extension": (lambda e, p, s: place(p).update(transform_descriptors=["zstd"]), "was stored by the extension"),
    "a chunk not stored": (lambda e, p, s: s.pop(p["a.weight", (2, 0)][0]), "is stored nowhere, or listed twice"),
    "a chunk not listed": (lambda e, p, s: e["a.weight"].state["chunks"].pop(), "is stored, and not listed"),
    "a hole": (
        lambda e, p, s: (e["a.weight"].state["chunks"].pop(), s.pop(p["a.weight", (4, 0)][0])),
        "do not fill it: they hold 16 elements of 24",
    ),
    "no chunks": (
        lambda e, p, s: (e["a.weight"].state["chunks"].clear(), [s.pop(p["a.weight", (n, 0)][0]) for n in (0, 2, 4)]),
        "a.weight has no chunks",
    ),
    "overlapping chunks": (
        lambda e, p, s: chunk(e).update(sizes=(3, 4)),
        "do not fill it: they hold 28 elements of 24",
    ),
    "as much, elsewhere": (lambda e, p, s: chunk(e).update(sizes=(4, 2)), "do not fill it: they overlap and leave"),
    "a chunk beyond": (lambda e, p, s: chunk(e, 2).update(sizes=(3, 4)), "has a chunk that reaches to [7, 4]"),
    "a negative size": (lambda e, p, s: chunk(e).update(sizes=(-2, 4)), "has a negative size"),
    "a negative offset": (lambda e, p, s: chunk(e).update(offsets=(-2, 0)), "has a negative size"),
    "other axes": (lambda e, p, s: chunk(e).update(sizes=(8,)), "has a chunk of 1 axes at 2; it has 2"),
    "sizes of text": (lambda e, p, s: chunk(e).update(sizes="ab"), "has a shape that is no list of integers"),
    "a huge shape": (lambda e, p, s: e["a.weight"].state.update(size=(1 << 40, 1 << 40)), "which no file can hold"),
    "a large shape": (lambda e, p, s: e["a.weight"].state.update(size=(1 << 40, 4)), "do not fill it"),
    "another dtype": (
        lambda e, p, s: (
            e["a.weight"]
            .state["properties"]
            .__setattr__("state", (Global("torch.int32"), *e["a.weight"].state["properties"].state[1:]))
        ),
        "its chunk is float32 [2, 4]; .metadata says int32 [2, 4]",
    ),
    "a sparse tensor": (
        lambda e, p, s: e["a.weight"].state["properties"].state[1].__setattr__("arguments", ("torch.sparse_coo",)),
        "is a sparse tensor, or of another layout",
    ),
    "no properties": (lambda e, p, s: e["a.weight"].state.update(properties=3), "has no properties of a tensor"),
    "no size": (lambda e, p, s: e["a.weight"].state.pop("size"), "has a TensorStorageMetadata without size"),
    "a number for a tensor": (lambda e, p, s: e.update({"a.weight": 3}), "has a int where TensorStorageMetadata"),
    "a chunk for a tensor": (
        lambda e, p, s: e.update({"a.weight": e["a.weight"].state["chunks"][0]}),
        "has a ChunkStorageMetadata where TensorStorageMetadata should be",
    ),
    "a tensor as a value": (lambda e, p, s: e.update({"b": e["step"]}), "b is stored 1 times, or in chunks"),
    "a value as a tensor": (lambda e, p, s: e.update({"step": e["b"]}), "is stored"),
    "a name with a line": (lambda e, p, s: e.update({"a\nb": e["b"]}), "has control characters"),
    "something more stored": (lambda e, p, s: e.pop("b"), "b is stored, and not listed as a tensor or a value"),
    "stored twice": (
        lambda e, p, s: s.update({Record(f"{HOME}MetadataIndex", (), {"fqn": "b", "offset": (0,)}): p["b", (0,)][1]}),
        "the chunk (0,) of b is stored twice",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_lies_is_refused(change, folder):
    how, message = CHANGES[change]
    assert message in refusal(changed(folder, how))


class Payload:
    """What would run `os.system`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_metadata_that_runs_code_does_not_run(protocol, folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps({"a": Payload(tmp_path / "ran")}, protocol))
    assert "refused" in refusal(folder)
    with pytest.raises(CheckpointError, match="refused"):
        open_reader(folder / ".metadata")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cposix\nsystem\n(X\x04\x00\x00\x00truetR.",
        b"cbuiltins\neval\n)\x81.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n)R.",
        b"ctorch.distributed.checkpoint.metadata\nsys\n)\x81.",
        b"ctorch\nload\n(X\x01\x00\x00\x00atR.",
        b"(cos\nsystem\no.",
        b"(ios\nsystem\n.",
        b"cos\nsystem\n)}\x92.",
        b"\x82\x01.",
    ],
)
def test_every_other_way_to_call_is_refused(code, folder):
    (folder / ".metadata").write_bytes(b"\x80\x04" + code)
    assert "refused" in refusal(folder)


@pytest.mark.parametrize(
    "code",
    [
        b"]}b.",  # a state for a list
        b"c" + HOME.encode()[:-1] + b"\nMetadata\n)\x81}b}b.",  # two states
        b"c" + HOME.encode()[:-1] + b"\nMetadata\n}\x81.",  # arguments that are no tuple
        b")\x81.",
        b"}}]s.",  # a key that is a list
        b"c" + HOME.encode()[:-1] + b"\nMetadata\n.",
        b".",
        b"",
    ],
)
def test_objects_that_are_none_are_refused(code, folder):
    (folder / ".metadata").write_bytes(b"\x80\x04" + code)
    assert refusal(folder)


def test_an_object_that_holds_itself_is_refused(folder):
    def change(entries, places, stored):
        entries["a.weight"].state["chunks"].append(entries["a.weight"])

    (folder / ".metadata").write_bytes(
        b"\x80\x02c" + HOME.encode()[:-1] + b"\nMetadata\n)\x81q\x00}(X\x13\x00\x00\x00state_dict_metadata}"
        b"X\x01\x00\x00\x00ah\x00sX\x0c\x00\x00\x00storage_data}ub."
    )
    assert "has a Metadata where TensorStorageMetadata should be" in refusal(folder)


@pytest.mark.parametrize("name", ["step", "b"])
def test_an_entry_that_runs_code_is_refused_and_does_not_run(name, folder, tmp_path, monkeypatch):
    harm = pickle.dumps(Payload(tmp_path / "ran"), 2)
    made = dcp_writer._shell(harm, None)[0]
    (folder / "__7_0.distcp").write_bytes(made)

    def change(entries, places, stored):
        _, found = places[name, None if name == "step" else (0,)]
        found.state.update(relative_path="__7_0.distcp", offset=0, length=len(made))

    assert "its pickle refers to posix.system, which is refused" in refusal(changed(folder, change))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"C\x02ab.", "neither a tensor nor a plain value"),
        (b"ccollections\ndeque\n(]tR.", "neither a tensor nor a plain value"),
        (b"G\x7f\xf0\x00\x00\x00\x00\x00\x00.", "neither a tensor nor a plain value"),
        (b"}(K\x01NX\x01\x00\x00\x001Nu.", "has a key as a number and as text"),
    ],
)
def test_values_that_are_no_json_are_named_and_not_read(value, reason, folder):
    made = dcp_writer._shell(b"\x80\x02" + value, None)[0]
    (folder / "__7_0.distcp").write_bytes(made)
    changed(
        folder,
        lambda e, p, s: p["step", None][1].state.update(relative_path="__7_0.distcp", offset=0, length=len(made)),
    )
    with open_reader(folder) as reader:
        assert reason in reader.metadata[dcp_reader.UNREAD]["step"]
    assert_same(read(folder), ARRAYS)


def test_a_chunk_that_is_cut_off_or_missing_is_refused(folder):
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 1):
        data.write_bytes(whole[:cut])
        assert refusal(folder)
    data.unlink()
    assert "these files of it are missing: __0_0.distcp" in refusal(folder)


def test_metadata_that_is_cut_off_anywhere_is_refused(folder):
    whole = (folder / ".metadata").read_bytes()
    for cut in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:cut])
        assert refusal(folder)


def test_a_tensor_of_another_kind_in_a_chunk_is_refused(folder):
    for dtype, shape, message in (
        ("int32", (2, 4), "its chunk is int32 [2, 4]; .metadata says float32 [2, 4]"),
        ("float32", (4, 2), "its chunk is float32 [4, 2]; .metadata says float32 [2, 4]"),
    ):
        head, tail = dcp_writer._tensor_shell(dtype, shape)
        (folder / "__7_0.distcp").write_bytes(head + bytes(32) + tail)
        size = (folder / "__7_0.distcp").stat().st_size
        changed(
            folder,
            lambda e, p, s, size=size: place(p).update(relative_path="__7_0.distcp", offset=0, length=size),
        )
        assert message in refusal(folder)


def test_links_out_of_a_distributed_checkpoint_are_refused(folder, tmp_path):
    for name in ("__0_0.distcp", ".metadata"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        assert "is a link out of its folder" in refusal(folder)
        (folder / name).unlink()
        shutil.move(tmp_path / name, folder / name)
    assert_same(read(folder), ARRAYS)


def test_a_folder_without_metadata_is_told_what_it_lacks(folder):
    (folder / ".metadata").unlink()
    assert "has no .metadata" in refusal(folder, "dcp")


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_chunks_fill_a_tensor_however_they_are_cut(axes, folder, monkeypatch):
    rng = np.random.default_rng(axes)
    for _ in range(20):
        shape = tuple(int(size) for size in rng.integers(1, 6, axes))
        boxes = [(tuple(0 for _ in shape), shape)]
        for _ in range(6):  # cut any box anywhere
            start, stop = boxes.pop(int(rng.integers(len(boxes))))
            axis = int(rng.integers(axes))
            cut = int(rng.integers(start[axis], stop[axis] + 1))
            middle = (*stop[:axis], cut, *stop[axis + 1 :]), (*start[:axis], cut, *start[axis + 1 :])
            boxes += [(start, middle[0]), (middle[1], stop)]
        boxes = [box for box in boxes if all(one < two for one, two in zip(*box, strict=True))]
        check(shape, boxes)
        for number in range(len(boxes)):
            with pytest.raises(CheckpointError, match=r"do not fill it|has no chunks"):
                check(shape, boxes[:number] + boxes[number + 1 :])
            with pytest.raises(CheckpointError, match="do not fill it"):
                check(shape, [*boxes, boxes[number]])


def check(shape, boxes):
    """Check boxes as the chunks of a tensor."""
    info = dcp_metadata.TensorInfo("t", "int8", shape)
    item = Extent("x", 0, 0)
    sides = (np.array([box[side] for box in boxes], np.int64).reshape(len(boxes), len(shape)) for side in (0, 1))
    dcp_chunks.check_filled("x", dcp_chunks.Chunks(info, *sides, (item,) * len(boxes)))


def test_chunks_along_too_many_axes_are_refused(monkeypatch):
    monkeypatch.setattr(dcp_chunks, "MAX_CORNERS", 8)
    boxes = [((row, column), (row + 1, column + 1)) for row in range(2) for column in range(2)]
    with pytest.raises(CheckpointError, match="has 4 chunks along 2 axes, which are too many"):
        check((2, 2), boxes)
