"""Links that lead out of a source's folder: every reader refuses them, and follows those that stay inside."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers import files
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_parity.check import real_weights
from parity_tests.fuzz.samples import read, write

from ..checkpoint_files import bits, folder, made, tree
from ..refusals import refusal, refusal_below

OUT = "is a link out of its folder; put a copy of the file there"
ARRAYS = {"a.weight": np.float32([[1, 2], [3, 4]]), "b": np.arange(3)}


def moved_out(path, outside):
    """Move a file or folder to another place and leave a link to it."""
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


CALLS = {
    "convert": lambda source, to: checkpoints.convert(source, to),
    "convert as it is": lambda source, to: checkpoints.convert(source, to, to_layout="same"),
    "plan": lambda source, to: checkpoints.plan(source, to, to_layout="same"),
    "tasks": lambda source, to: checkpoints.tasks(source, to),
    "inspect": lambda source, to: checkpoints.inspect(source),
    "verify": lambda source, to: checkpoints.verify(None, source),
}


def refused_by(call, source, tmp_path):
    """Return why a call refuses a source, once nothing was written."""
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        CALLS[call](source, tmp_path / "to")
    assert tree(tmp_path) == before
    return str(caught.value)


@pytest.fixture
def converted(tmp_path):
    """Return a folder with a config, a manifest and a file of kept tensors."""
    target = tmp_path / "in" / "model"
    (tmp_path / "in").mkdir()
    return checkpoints.convert(folder(tmp_path / "hf"), target).target


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("config.json", "convert"),
        ("config.json", "convert as it is"),
        ("attn-bridge.json", "convert"),
        ("attn-bridge.json", "plan"),
        ("attn-bridge.json", "inspect"),
        ("attn-bridge.json", "verify"),
        ("attn-bridge.kept", "convert"),
        ("attn-bridge.kept", "tasks"),
        ("attn-bridge.kept", "verify"),
    ],
)
def test_a_linked_file_next_to_the_weights_is_refused(converted, tmp_path, name, call):
    moved_out(converted / name, tmp_path / "outside")
    assert refused_by(call, converted, tmp_path) == f"{converted}: the file {name} {OUT}"


def test_a_linked_config_without_a_manifest_is_refused(tmp_path):
    source = folder(tmp_path / "hf")
    moved_out(source / "config.json", tmp_path / "outside")
    refusal = f"{source}: the file config.json {OUT}"
    assert refused_by("convert", source, tmp_path) == refusal
    assert checkpoints.inspect(source).why == refusal
    with pytest.raises(CheckpointError) as caught:
        configs.read_config("GPTModel", source)
    assert str(caught.value) == refusal


def test_a_shard_below_a_linked_folder_is_refused(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write("safetensors", tmp_path / "in" / "sub" / "x.safetensors", ARRAYS)
    index = {"weight_map": dict.fromkeys(ARRAYS, "sub/x.safetensors")}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bits(read(tmp_path / "in")) == bits(ARRAYS)
    moved_out(tmp_path / "in" / "sub", tmp_path / "outside")
    assert f"the file sub/x.safetensors {OUT}" in refusal(tmp_path / "in")


@pytest.mark.parametrize("ending", ["json", "kept"])
def test_linked_files_of_a_single_file_are_refused(tmp_path, ending):
    (tmp_path / "in").mkdir()
    source = checkpoints.convert(folder(tmp_path / "hf"), tmp_path / "in" / "x.npz").target
    name = f"x.npz.attn-bridge.{ending}"
    moved_out(source.with_name(name), tmp_path / "outside")
    for call in ("convert", "verify"):
        assert refused_by(call, source, tmp_path) == f"{tmp_path / 'in'}: the file {name} {OUT}"


@pytest.mark.parametrize("name", ["x.npz", "x.msgpack", "x.pt", "x.bin", "x.safetensors"])
def test_the_only_file_of_a_folder_is_no_link_out(tmp_path, name):
    format = {"npz": "npz", "msgpack": "msgpack", "safetensors": "safetensors"}.get(name[2:], "torch")
    (tmp_path / "in").mkdir()
    write(format, tmp_path / "in" / name, ARRAYS)
    assert bits(read(tmp_path / "in")) == bits(ARRAYS)
    moved_out(tmp_path / "in" / name, tmp_path / "outside")
    assert refusal(tmp_path / "in") == f": the file {name} {OUT}"


def test_the_current_folder_is_a_source_like_any_other(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(converted)
    assert checkpoints.verify(None, ".").passed
    moved_out(converted / "attn-bridge.json", tmp_path / "outside")
    with pytest.raises(CheckpointError, match=f"attn-bridge.json {OUT}$"):
        checkpoints.verify(None, ".")


def test_linked_parts_of_a_split_model_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(2):
        write(
            "torch", tmp_path / "in" / f"consolidated.0{number}.pth", {"layers.0.attention.wq.weight": np.ones((2, 2))}
        )
    moved_out(tmp_path / "in" / "consolidated.01.pth", tmp_path / "outside")
    assert f"the file consolidated.01.pth {OUT}" in refusal(tmp_path / "in")


@pytest.mark.parametrize("name", ["_METADATA", "attn_bridge.json", "b", "b/.zarray", "b/0"])
def test_links_out_of_an_orbax_folder_are_refused(tmp_path, name):
    path = write("orbax", tmp_path / "x.orbax", ARRAYS, metadata={"note": "1"})
    moved_out(path / name, tmp_path / "outside")
    assert OUT in refusal_below(path)


@pytest.mark.parametrize("settings", [{}, {"ocdbt": 1}])
def test_an_item_of_orbax_is_no_link_out(tmp_path, settings):
    (tmp_path / "step").mkdir()
    source = write("safetensors", tmp_path / "x.safetensors", ARRAYS)
    checkpoints.convert(source, tmp_path / "step" / "default", to_layout="same", format="orbax", settings=settings)
    assert bits(read(tmp_path / "step")) == bits(ARRAYS)
    moved_out(tmp_path / "step" / "default", tmp_path / "outside")
    assert OUT in refusal_below(tmp_path / "step")


def test_links_within_the_folder_are_followed(converted, tmp_path):
    before = checkpoints.convert(converted, tmp_path / "before").digests
    (converted / "files").mkdir()
    for name in ("config.json", "attn-bridge.json", "attn-bridge.kept", "model.safetensors"):
        (converted / name).rename(converted / "files" / name)
        (converted / name).symlink_to(converted / "files" / name)
    assert checkpoints.convert(converted, tmp_path / "after").digests == before
    assert tree(tmp_path / "before") == tree(tmp_path / "after")


def test_a_source_that_is_a_link_itself_is_followed(converted, tmp_path):
    (tmp_path / "link").symlink_to(converted)
    (tmp_path / "weights.safetensors").symlink_to(converted / "model.safetensors")
    assert checkpoints.verify(None, tmp_path / "link").passed
    assert bits(read(tmp_path / "weights.safetensors")) == bits(read(converted))


def test_the_hubs_links_are_followed_for_all_files(converted, tmp_path):
    before = checkpoints.convert(converted, tmp_path / "before").digests
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in converted.iterdir():
        shutil.copy(path, blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-{path.name}")
    assert checkpoints.verify(None, snapshot).passed
    assert checkpoints.convert(snapshot, tmp_path / "after").digests == before
    assert tree(tmp_path / "before") == tree(tmp_path / "after")


def test_a_file_that_becomes_a_link_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    source = folder(tmp_path / "hf")
    (source / "config.json").rename(source / "real.json")
    (source / "config.json").symlink_to("real.json")
    (tmp_path / "secret.json").write_text('{"n_head": 9}')
    assert configs.beside(source)["n_head"] == 3
    resolve = files.resolve

    def swapped(path):
        resolved = resolve(path)
        if resolved.name == "real.json":
            resolved.unlink()
            resolved.symlink_to(tmp_path / "secret.json")
        return resolved

    monkeypatch.setattr(files, "resolve", swapped)
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read: Too many levels of symbolic links$"):
        configs.beside(source)


def test_a_config_taken_along_is_as_small_as_one_that_is_read(tmp_path, monkeypatch):
    source = folder(tmp_path / "hf")
    monkeypatch.setattr(configs, "MAX_BYTES", 20)
    with pytest.raises(CheckpointError, match="at most 20 are read"):
        checkpoints.convert(source, tmp_path / "to", to_layout="same")
    assert not (tmp_path / "to").exists()


def test_the_number_of_heads_is_not_read_through_a_link_out(tmp_path):
    source = write("safetensors", tmp_path / "x.safetensors", made("hf-bert"))
    (tmp_path / "in").mkdir()
    source.rename(tmp_path / "in" / source.name)
    (tmp_path / "secret.json").write_text('{"num_attention_heads": 2}')
    (tmp_path / "in" / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=f"config.json {OUT}$"):
        real_weights.subjects_from_file(tmp_path / "in" / source.name, "hf-bert")


@pytest.mark.parametrize("leads_to", ["x.safetensors", "gone"])
def test_a_source_that_is_a_link_to_nothing_is_named(tmp_path, leads_to):
    (tmp_path / "x.safetensors").symlink_to(leads_to)
    with pytest.raises(CheckpointError, match="is a link that leads nowhere or to itself"):
        checkpoints.inspect(tmp_path / "x.safetensors")
