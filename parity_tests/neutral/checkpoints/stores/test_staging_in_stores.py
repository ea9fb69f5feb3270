"""What a conversion stages in a store before its target is there: bytes by position, journals, the order of the end."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

pytest.importorskip("fsspec", reason="pip install 'attn-bridge[remote]'")

import fsspec

from attn_bridge.checkpoints import manifest
from attn_bridge.checkpoints.containers import UNFINISHED
from attn_bridge.checkpoints.containers.remote import staged, stores, to_path
from attn_bridge.checkpoints.workers.jobs import JournalEntry, Piece
from attn_bridge.checkpoints.workers.places.stored import StoredPlace


@pytest.fixture
def folder(monkeypatch):
    """A path in the memory of this process, where objects are 100 bytes long."""
    monkeypatch.setattr(staged, "LEAST", 100)
    yield to_path("memory://staged/folder")
    memory = fsspec.filesystem("memory")
    with contextlib.suppress(FileNotFoundError):
        memory.rm("/staged", recursive=True)


@pytest.mark.parametrize("is_others", [False, True])
def test_bytes_come_back_from_wherever_they_lie_in_objects(folder, is_others):
    """Files share objects, are cut among them, and are partly written twice, by this process or another."""
    parts = staged.Staged(folder.store, "staged/parts")
    parts._pack = 100
    random, files = np.random.default_rng(3), {name: np.zeros(900, np.uint8) for name in "xy"}
    for start in [*range(0, 900, 45), 70, 300]:
        for wanted in files.values():
            wanted[start : start + 45] = random.integers(1, 256, 45)
        for name, wanted in files.items():
            parts.write(name, start, memoryview(wanted[start : start + 45].tobytes()))
    parts.flush()
    if is_others:
        others = staged.Staged(folder.store, "staged/parts")
        others.take(parts.settled()[1])
        parts = others
    assert len({span.at for span in parts.spans("x", 0, 900)}) > 3
    for name, wanted in files.items():
        for start, count in ((0, 900), (1, 44), (40, 10), (333, 70), (899, 1)):
            assert bytes(parts.read(name, start, count)) == wanted[start : start + count].tobytes()


def test_a_settled_place_has_its_bytes_and_journal_in_the_store(folder):
    """Fewer bytes than fill an object, which nothing else sends: whoever ends the work reads them."""
    place, other = StoredPlace(folder), StoredPlace(folder)
    place.entries("plan")
    place._staged.write("payload/x", 0, memoryview(b"seven b"))
    entry = JournalEntry(Piece("t", 0, 7), "digest", 0, "run")
    place.record([entry])
    assert other.entries("plan") == {}
    place.settle()
    assert other.entries("plan") == {entry.piece: [entry]}
    assert bytes(other.read("x", 0, 7)) == b"seven b"


def test_a_folder_is_published_with_what_vouches_for_it_last(folder, monkeypatch):
    """Readers are kept away until all is there; who meets a killed publication can tell whether it was all there."""
    made = []
    put, delete = stores.Store.put, stores.Store.delete

    def puts(store, key, data):
        made.append(key.removeprefix("staged/"))
        return put(store, key, data)

    def deletes(store, keys):
        made.extend(f"no {key.removeprefix('staged/')}" for key in keys)
        delete(store, keys)

    place = StoredPlace(folder)
    tensors = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in (manifest.IN_FOLDER, "model.safetensors.index.json", *tensors):
        place._staged.write(f"payload/{name}", 0, memoryview(name.encode()))
    monkeypatch.setattr(stores.Store, "put", puts)
    monkeypatch.setattr(stores.Store, "delete", deletes)
    place.publish(True)
    partial, mark = ".folder.partial", f"folder/{UNFINISHED}"
    first, last = made.index(f"{partial}/publishing"), made.index(f"no {mark}")
    assert made[first + 1] == mark
    between = [name for name in made[first:last] if name.startswith("folder/") and name != mark]
    assert sorted(between[:2]) == [f"folder/{name}" for name in tensors]
    assert between[2:] == ["folder/model.safetensors.index.json", f"folder/{manifest.IN_FOLDER}"]
    assert made.index(f"{partial}/committed") > made.index(between[-1])
    assert made.index(f"{partial}/committed") < last
    assert made[-1] == f"no {partial}/committed"
    memory = fsspec.filesystem("memory")
    assert {name: memory.cat_file(name) for name in memory.find("/staged")} == {
        f"/staged/{name}": name.removeprefix("folder/").encode() for name in between
    }


def test_a_name_below_a_folder_that_its_parent_lacks_is_missing_without_a_request(folder, monkeypatch):
    store, asked = folder.store, []
    store.put("staged/there/x", b"12")
    info = stores.Store._info

    def counted(self, key, as_file=False):
        asked.append(key)
        return info(self, key, as_file)

    monkeypatch.setattr(stores.Store, "_info", counted)
    store.forget()
    assert store.entry("staged/gone/below/x") is None
    assert asked == ["staged/gone/below/x"]
    assert store.children("staged").keys() == {"there"}
    assert store.entry("staged/lost/x") is None
    assert store.entry("staged/lost/below/x") is None
    assert asked == ["staged/gone/below/x"]
    assert store.entry("staged/there/x").size == 2
    assert asked == ["staged/gone/below/x", "staged/there/x"]
