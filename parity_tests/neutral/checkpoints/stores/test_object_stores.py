"""Checkpoints behind URLs: read as local ones are, with few requests, and nothing wrong where stores fail."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.checkpoints.containers.remote import faults, to_path
from attn_bridge.checkpoints.containers.remote.connecting import connect
from attn_bridge.cli.app import run
from parity_tests.neutral.checkpoints.checkpoints import gpt
from parity_tests.support.calls import cover

SECRETS = ("AKIASECRETKEY", "topsecret", "hunter2", "X-Amz-Signature", "deadbeef")

ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "npz": ".npz", "msgpack": ".msgpack"} | {
    "orbax": ".orbax",
    "dcp": ".dcp",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in every container, and a folder of shards with a config."""
    root = tmp_path_factory.mktemp("made")
    tensors = gpt(2, width=24, words=97)
    checkpoints_of(tensors, root)
    return root


def checkpoints_of(tensors, root):
    plain = root / "plain.npz"
    np.savez(plain, **tensors)
    for format, ending in ENDINGS.items():
        checkpoints.convert(plain, root / f"x{ending}", to_layout="same", format=format)
    (root / "sharded").mkdir()
    halves = [dict(list(tensors.items())[start::3]) for start in range(3)]
    index = {"metadata": {}, "weight_map": {}}
    for number, half in enumerate(halves):
        name = f"model-{number}.safetensors"
        np.savez(root / "half.npz", **half)
        checkpoints.convert(root / "half.npz", root / "half.safetensors", to_layout="same", overwrite=True)
        shutil.copy(root / "half.safetensors", root / "sharded" / name)
        index["weight_map"] |= dict.fromkeys(half, name)
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "sharded" / "config.json").write_text(json.dumps({"n_head": 4, "num_heads": 4}))


def upload(store, folder, bucket="bucket", prefix="models/"):
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(bucket, f"{prefix}{path.relative_to(folder).as_posix()}", path.read_bytes())


def said(call, *arguments, **options):
    """Return the message of an error, in which nothing may be secret, nor in what it was raised from."""
    with pytest.raises(ValueError, match=r".") as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for secret in SECRETS:
        assert secret not in text
    return text


# ---- reading


@pytest.mark.parametrize("format", ENDINGS)
def test_every_container_is_read_from_a_store_as_from_a_disk(store, folder, format):
    upload(store, folder)
    here, there = f"{folder}/x{ENDINGS[format]}", f"s3://bucket/models/x{ENDINGS[format]}"
    with checkpoints.open(here) as one, checkpoints.open(there) as two:
        assert two.tensors == one.tensors
        assert two.metadata == one.metadata
        for name in one:
            assert two[name].tobytes() == one[name].tobytes()
    assert checkpoints.verify(None, there).passed
    assert checkpoints.inspect(there).has_manifest


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("what", ["sharded", "sharded/", "sharded/model.safetensors.index.json"])
def test_a_folder_is_converted_to_the_same_bytes_as_a_local_one(store, folder, tmp_path, what, scheme):
    upload(store, folder)
    source = f"s3://bucket/models/{what}" if scheme == "s3" else f"{store.url}/bucket/models/{what}"
    planned = checkpoints.plan(source, tmp_path / "x", to_layout="flax")
    checkpoints.convert(source, tmp_path / "theirs", to_layout="flax")
    checkpoints.convert(folder / "sharded", tmp_path / "ours", to_layout="flax")
    assert str(planned.source).startswith(scheme)
    for path in (tmp_path / "ours").iterdir():
        assert (tmp_path / "theirs" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "theirs" / "config.json").is_file()
    assert checkpoints.verify(source, tmp_path / "theirs").passed


def test_commands_take_urls(store, folder, tmp_path, capsys):
    upload(store, folder)
    url = "s3://bucket/models/sharded"
    assert run(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == url
    assert run(["convert", url, str(tmp_path / "x"), "--dry-run"]) == 0
    assert run(["convert", url, str(tmp_path / "x"), "--to", "flax"]) == 0
    assert run(["verify", url, str(tmp_path / "x")]) == 0
    capsys.readouterr()
    assert run(["digest", url, "--json"]) == 0
    assert run(["digest", str(folder / "sharded"), "--json"]) == 0
    here, there = capsys.readouterr().out.split("}\n{")
    assert here.count("blake3") == there.count("blake3") > 9


def test_an_array_in_a_folder_of_its_own_costs_no_listing_of_its_own(store, folder):
    upload(store, folder)
    with checkpoints.open("s3://bucket/models/x.orbax") as found:
        assert len(found) > 20
        listings = [one for one in store.requests if one[2] == "list-type"]
        assert len(listings) <= 2


def test_a_folder_of_a_hundred_files_is_listed_once_and_each_header_read_once(store, tmp_path):
    tensors = {f"t{number:03d}": np.full((3, 5), number, np.float32) for number in range(100)}
    for name, array in tensors.items():
        np.savez(tmp_path / "one.npz", **{name: array})
        checkpoints.convert(tmp_path / "one.npz", tmp_path / "one.safetensors", to_layout="same", overwrite=True)
        store.put("bucket", f"many/{name}.safetensors", (tmp_path / "one.safetensors").read_bytes())
    store.page = 30
    inspected = checkpoints.inspect("s3://bucket/many")
    assert list(inspected.tensors) == list(tensors)
    kinds = [method if not what else what.partition("=")[0] for method, _, what in store.requests]
    assert kinds.count("list-type") == 4
    assert kinds.count("bytes") == 100
    assert len(kinds) < 110


def test_headers_are_read_without_the_rest_of_a_file(store, tmp_path):
    np.savez(tmp_path / "x.npz", big=np.ones((1 << 22,), np.float32))
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "x.safetensors", to_layout="same")
    store.put("bucket", "x.safetensors", (tmp_path / "x.safetensors").read_bytes())
    assert checkpoints.inspect("s3://bucket/x.safetensors").nbytes == 1 << 24
    read = [what for _, _, what in store.requests if what.startswith("bytes=")]
    assert sum(1 + int(one.partition("-")[2]) - int(one[6:].partition("-")[0]) for one in read) < 1 << 18


def test_small_tensors_that_lie_side_by_side_are_read_together(store, tmp_path):
    tensors = {f"t{number:03d}": np.full((64, 33), number, np.float32) for number in range(300)}
    np.savez(tmp_path / "x.npz", **tensors)
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "x.safetensors", to_layout="same")
    store.put("bucket", "x.safetensors", (tmp_path / "x.safetensors").read_bytes())
    with checkpoints.open("s3://bucket/x.safetensors") as found:
        assert all((found[name] == array).all() for name, array in tensors.items())
    assert len(store.requests) < 20


def test_what_lies_in_other_stores_of_fsspec_is_read_too(folder):
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / "sharded"), "/models/sharded", recursive=True)
    try:
        here, there = checkpoints.read(folder / "sharded"), checkpoints.read("memory://models/sharded")
        assert here.keys() == there.keys()
        assert all(here[name].tobytes() == there[name].tobytes() for name in here)
        assert "does not exist" in said(checkpoints.read, "memory://models/none")
    finally:
        memory.rm("/models", recursive=True)


def test_a_web_server_that_lists_nothing_is_asked_for_usual_names(store, folder, tmp_path):
    upload(store, folder)
    store.lists = False
    found = checkpoints.inspect(f"{store.url}/bucket/models/sharded/")
    assert set(found.tensors) == set(checkpoints.inspect(folder / "sharded").tensors)


def test_a_web_server_without_ranges_gives_small_files_and_says_so_of_large_ones(store, folder, monkeypatch):
    from attn_bridge.checkpoints.containers.remote import web

    upload(store, folder)
    store.has_ranges = False
    url = f"{store.url}/bucket/models/x.safetensors"
    assert checkpoints.verify(None, url).passed
    monkeypatch.setattr(web, "SMALL", 1 << 10)
    assert "no requests for ranges; download" in said(checkpoints.read, url)


def test_a_file_url_is_a_local_path(folder):
    assert to_path(f"file://{folder}/x.npz") == folder / "x.npz"
    assert checkpoints.inspect(f"file://{folder}/x.npz").format == "npz"


def test_a_store_by_others_is_read_too(moto, folder):
    moto.put(str(folder) + "/", "bucket/models/", recursive=True)
    for ending in (*ENDINGS.values(), "sharded"):
        name = ending if ending == "sharded" else f"x{ending}"
        here, there = checkpoints.read(folder / name), checkpoints.read(f"s3://bucket/models/{name}")
        assert here.keys() == there.keys()
        assert all(here[one].tobytes() == there[one].tobytes() for one in here)
    with checkpoints.open("s3://bucket/models/x.safetensors") as found:
        moto.pipe_file("bucket/models/x.safetensors", b"another")
        found._reader._file.close()
        assert "has changed while it was read" in said(found.__getitem__, next(iter(found)))


# ---- faults


KINDS = ["drop", "500", "503", "truncate", "short", "other"]


def now_and_then(kind, rate=3):
    """A fault that every third request meets, but never the same request twice in a row."""
    count = itertools.count()
    return lambda request: kind if next(count) % rate == 1 else ""


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_fail_are_made_again_and_nothing_wrong_is_read(store, folder, tmp_path, kind, scheme):
    upload(store, folder)
    store.fault = now_and_then(kind)
    root = "s3://bucket" if scheme == "s3" else f"{store.url}/bucket"
    for name in ("sharded/model.safetensors.index.json", "x.npz", "x.msgpack"):
        found, wanted = checkpoints.read(f"{root}/models/{name}"), checkpoints.read(folder / name)
        assert found.keys() == wanted.keys()
        assert all(found[key].tobytes() == wanted[key].tobytes() for key in wanted)


@cover.rotated(("kind", "scheme"), KINDS, ["s3", "http"])
def test_a_store_that_fails_for_good_is_one_line(store, folder, kind, scheme, capsys):
    upload(store, folder)
    url = ("s3://bucket" if scheme == "s3" else f"{store.url}/bucket") + "/models/x.safetensors"
    begun = []

    def fault(request):
        begun.append(request)
        return kind if request[2] and len(begun) > 1 else ""

    with checkpoints.open(url) as found:
        store.fault = fault
        begun.append("")
        name = list(found)[-1]
        found._reader._file.close()
        text = said(found.__getitem__, name)
    assert text.startswith(f"{url}: ")
    assert "given up after 10 tries" in text
    store.fault = lambda request: "500"
    assert run(["inspect", url]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: {url}: given up after 10 tries: the store answers HTTP 500" + (
        ", InternalError\n" if scheme == "s3" and "Internal" in shown.err else "\n"
    )


def test_a_store_that_is_down_is_waited_for_once(store, folder, monkeypatch):
    monkeypatch.setattr(faults, "PAUSE", 0.0)
    upload(store, folder)
    path = to_path("s3://bucket/models/x.safetensors")
    asked = []

    def tries(is_down):
        asked.clear()
        store.fault = lambda request: asked.append(request) or ("500" if is_down else "")
        path.store.forget()
        if is_down:
            said(path.is_file)
        else:
            assert path.is_file()
        return len(asked)

    assert [tries(True), tries(True), tries(False), tries(True)] == [10, 2, 1, 10]


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_object_that_changes_between_two_requests_is_never_read_as_one(store, folder, scheme):
    upload(store, folder)
    url = ("s3://bucket" if scheme == "s3" else f"{store.url}/bucket") + "/models/x.safetensors"
    old = store.objects["bucket", "models/x.safetensors"].data
    with checkpoints.open(url) as found:
        store.put("bucket", "models/x.safetensors", old[:-8] + bytes(8))
        found._reader._file.close()
        assert "has changed while it was read" in said(found.__getitem__, next(iter(found)))


def test_a_source_that_changes_after_it_was_read_is_found_at_the_end(store, folder, tmp_path):
    upload(store, folder)
    seen = []

    def before(request):
        if "model-2" in request[1] and request[2].startswith("bytes=") and not seen:
            seen.append(request)
            data = store.objects["bucket", "models/sharded/model-0.safetensors"].data
            store.put("bucket", "models/sharded/model-0.safetensors", data[:-4] + b"1234")

    store.before = before
    text = said(checkpoints.convert, "s3://bucket/models/sharded", tmp_path / "x", to_layout="flax")
    assert "changed while it was read" in text
    assert not (tmp_path / "x").exists()


def test_what_is_not_there_or_denied_is_one_line(store, folder, monkeypatch):
    upload(store, folder)
    assert said(checkpoints.inspect, "s3://bucket/none") == "s3://bucket/none: does not exist"
    assert "does not exist" in said(checkpoints.inspect, f"{store.url}/bucket/none.safetensors")
    store.token = "nobody has it"
    assert "access is denied (HTTP 403" in said(checkpoints.inspect, "s3://bucket/models/x.npz")
    store.token = ""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert "no credentials for it are found" in said(checkpoints.inspect, "s3://bucket/models/x.npz?")


def test_neither_passwords_nor_signatures_of_urls_are_shown(store, folder, tmp_path, capsys):
    upload(store, folder)
    place = f"127.0.0.1:{store.port}/bucket/models/x.npz"
    url = f"http://user:hunter2@{place}?X-Amz-Signature=deadbeef"
    store.token = "Basic"
    assert run(["inspect", url, "--json"]) == 0
    assert run(["convert", url, str(tmp_path / "x.npz"), "--to", "same", "--json", str(tmp_path / "r.json")]) == 0
    assert run(["verify", url, str(tmp_path / "x.npz")]) == 0
    store.token = "something else"
    assert run(["inspect", url]) == 2
    assert run(["digest", url]) == 2
    store.token = ""
    assert run(["inspect", url.replace("x.npz", "none.npz")]) == 2
    shown = capsys.readouterr()
    everything = shown.out + shown.err + (tmp_path / "r.json").read_text()
    for path in tmp_path.iterdir():
        everything += path.read_bytes().decode("latin-1")
    assert f"http://{place}" in everything
    for secret in (*SECRETS, "user:"):
        assert secret not in everything


@pytest.mark.parametrize("url", ["http://localhost:1/x.npz", "s3://bucket/x.npz", "hf://user/model/x.npz"])
def test_another_environment_has_connections_of_its_own(url, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "first.example")
    before = connect(to_path(url))._system
    monkeypatch.setenv("NO_PROXY", "second.example")
    assert connect(to_path(url))._system is not before


def test_a_url_made_a_path_is_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match="give it as text"):
        checkpoints.inspect(Path("s3://bucket/x"))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    text = said(checkpoints.inspect, "s3://bucket/x.npz")
    assert "needs fsspec and s3fs: pip install 'attn-bridge[remote]'" in text
    assert "the protocol nonsense is unknown" in said(checkpoints.inspect, "nonsense://x.npz")


def test_a_folder_that_tensorstore_would_have_to_read_says_so(store, folder, tmp_path):
    upload(store, folder)
    for bucket, key in list(store.objects):
        if key.endswith("/.zarray"):
            said_of = json.loads(store.objects[bucket, key].data) | {"compressor": {"id": "zstd", "level": 1}}
            store.put(bucket, key, json.dumps(said_of).encode())
    assert "from a local folder alone" in said(open_reader, to_path("s3://bucket/models/x.orbax"))
