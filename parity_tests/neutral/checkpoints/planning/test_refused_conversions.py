"""Conversions that are refused in one line: usage, targets in the way, tensors, configs and manifests."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.workers.places import staging
from attn_bridge.cli.app import run
from attn_bridge.models.layouts import LayoutError

from ..checkpoint_files import NEWER, bits, folder, made, tree, write
from ..checkpoints import CONFIG


def test_an_existing_target_stays_unless_it_may_go(tmp_path):
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", seed=1)
    for name in ("flax", "flax.npz"):
        there = checkpoints.convert(one, tmp_path / name).target
        before = tree(tmp_path)
        with pytest.raises(CheckpointError, match=r"exists; --overwrite \(in Python, overwrite=True\) replaces it$"):
            checkpoints.convert(two, there)
        assert tree(tmp_path) == before
        checkpoints.convert(two, there, overwrite=True)
        assert checkpoints.verify(two, there).passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.safetensors", "x"], "missing.safetensors"),
        (["hf", "no/such/folder/x"], "no/such/folder"),
        (["hf", "hf"], "must not be in one another"),
        (["hf", "hf/inside"], "must not be in one another"),
        (["hf", "x", "--to", "foo"], "layout (foo) is not known; docs/layouts.md lists all layouts"),
        (["hf", "x", "--format", "foo"], "foo"),
        (["hf", "x", "--dtype", "int8"], "dtype (int8) must be one of bf16, f16, f32, f64"),
        (["hf", "x", "--to", "nnx-mha", "--set", "num_heads=0"], "num_heads (0) must be a whole number of at least 1"),
        (["hf", "x", "--set", "foo=1"], "--set foo: hf-gpt2 and flax take"),
        (["hf", "x", "--set", "foo"], "--set takes KEY=VALUE"),
        (["hf", "x", "--max-memory", "much"], "--max-memory (much) must be a size"),
        (["hf", "x", "--max-memory", "1MiB"], "max-memory (1048576) must be at least"),
        (["hf", "x", "--rules", "none.toml"], "none.toml"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    folder(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert run(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert {path: data for path, data in tree(tmp_path).items() if ".partial" not in path} == before


def test_missing_and_unknown_tensors_are_refused(tmp_path):
    arrays = made("hf-gpt2")
    del arrays["transformer.ln_f.bias"]
    with pytest.raises(WeightsMismatchError, match=r"missing: transformer\.ln_f\.bias"):
        checkpoints.convert(write(tmp_path / "a.safetensors", arrays), tmp_path / "x.npz")
    arrays = made("hf-gpt2") | {"surprise": np.ones(3, np.float32)}
    source = write(tmp_path / "b.safetensors", arrays)
    with pytest.raises(LayoutError, match="does not know surprise"):
        checkpoints.convert(source, tmp_path / "x.npz")
    with pytest.raises(WeightsMismatchError, match="unexpected: surprise"):
        checkpoints.convert(source, tmp_path / "x.npz", from_layout="hf-gpt2")
    there = checkpoints.convert(source, tmp_path / "x.npz", to_layout="same").target
    assert bits(checkpoints.read(there)) == bits(arrays)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_target_that_may_not_be_written_to_is_one_line(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    (tmp_path / "locked").mkdir(mode=0o555)
    assert run(["convert", str(source), str(tmp_path / "locked" / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'locked'} can't be written to")


def test_ocdbt_is_a_setting_of_orbax_alone(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    assert run(["convert", str(source), str(tmp_path / "x.orbax"), "--set", "ocdbt=1"]) == 0
    assert json.loads((tmp_path / "x.orbax" / "_METADATA").read_text())["use_ocdbt"] is True
    assert run(["convert", str(source), str(tmp_path / "y.orbax"), "--set", "ocdbt=0", "--to", "same"]) == 0
    assert json.loads((tmp_path / "y.orbax" / "_METADATA").read_text())["use_ocdbt"] is False
    assert run(["verify", str(source), str(tmp_path / "x.orbax")]) == 0
    assert run(["convert", str(tmp_path / "x.orbax"), str(tmp_path / "back"), "--to", "hf-gpt2"]) == 0
    assert tree(tmp_path / "back").keys() >= {"model.safetensors"}
    capsys.readouterr()
    assert run(["convert", str(source), str(tmp_path / "z.orbax"), "--set", "ocdbt=2", "--dry-run"]) == 2
    assert capsys.readouterr().err == "error: --set ocdbt=2: must be 0 or 1\n"
    assert run(["convert", str(source), str(tmp_path / "z"), "--set", "ocdbt=1"]) == 2
    assert "ocdbt" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [NEWER, "[", '{"attn-bridge": 1, "layout": 3}', "null"])
def test_a_damaged_manifest_is_named(tmp_path, damage):
    there = checkpoints.convert(folder(tmp_path / "hf"), tmp_path / "x.npz").target
    (tmp_path / "x.npz.attn-bridge.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"x\.npz\.attn-bridge\.json can't be used: .*; remove it"):
        checkpoints.verify(None, there)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "rules.toml", "--to", "hf-bert"], "--to (hf-bert) must be torch or flax beside --rules"),
        (["--rules", "rules.toml", "--from", "flax", "--to", "flax"], "must be the two sides of the rules"),
        (["--to", "same", "--set", "foo=1"], "--set foo: the layout stays"),
        (["--to", "same", "--from", "hf-bert"], "unexpected: "),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, monkeypatch, capsys, arguments, message):
    folder(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "hf", "x", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_tensors_is_one_line(tmp_path, capsys):
    source = write(tmp_path / "a.safetensors", {})
    assert run(["inspect", str(source)]) == 0
    assert "it holds no tensor" in capsys.readouterr().out
    assert run(["verify", str(source), str(source)]) == 2
    assert capsys.readouterr().err == "error: it holds no tensor\n"


@pytest.mark.parametrize("report", ["hf/model.safetensors", "x.npz", "x.npz.attn-bridge.json", "other.pt", "hf/r.json"])
def test_a_report_never_goes_over_a_checkpoint(tmp_path, monkeypatch, capsys, report):
    folder(tmp_path / "hf")
    write(tmp_path / "other.pt", {})
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert run(["convert", "hf", "x.npz", "--json", report]) == 2
    assert run(["verify", "--json", "hf/model.safetensors", "x.npz"]) == 2
    assert all(line.startswith("error: --json") for line in capsys.readouterr().err.splitlines())
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("act", "count"), [("relu6", 1), ("silu", 0)])
def test_a_config_that_from_pretrained_refuses_is_noted(tmp_path, act, count):
    source = folder(tmp_path / "hf", "hf-llama")
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": act}
    (source / "config.json").write_text(json.dumps(config))
    plan = checkpoints.plan(source, tmp_path / "x")
    refusals = [note for note in plan.notes if note.endswith("but from_pretrained refuses this config")]
    assert len(refusals) == count
    assert all(note.startswith("config.json: hidden_act ('relu6') of llama must be one of") for note in refusals)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hf-bert", "roberta"), ("hf-bert", "electra"), ("hf-gpt2", "imagegpt"), ("hf-llama", "hyperclovax")],
)
def test_models_of_another_kind_with_the_same_names_are_refused(tmp_path, capsys, name, kind):
    source = folder(tmp_path / "hf", name)
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    assert run(["convert", str(source), str(tmp_path / "x")]) == 2
    assert f"the names fit {name}, which is for " in (said := capsys.readouterr().err)
    assert f"config.json says {kind}, which may mean other things by them; --from {name} takes them as they are" in said
    assert f"config.json says {kind}" in checkpoints.inspect(source).why
    assert checkpoints.convert(source, tmp_path / "x", from_layout=name).target.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object, got []"),
        ('"x"', 'must hold a JSON object, got "x"'),
        ("{", "can't be read as JSON: "),
        ("\xff", "can't be read as JSON: "),
        ("[" * 100_000, "can't be read as JSON: "),
        ('{"tie_word_embeddings": 7}', "tie_word_embeddings (7) of config.json must be true or false"),
        ('{"tie_word_embeddings": "yes"}', 'tie_word_embeddings ("yes") of config.json must be true or false'),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path, capsys, text, message):
    source = folder(tmp_path / "hf")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    assert run(["convert", str(source), str(tmp_path / "x")]) == 2
    assert message in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert len(said) < 1000
    assert checkpoints.convert(source, tmp_path / "y.npz", to_layout="same").target.exists()  # which needs no config


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "12", [12], 1 << 31, 10**400])
def test_a_size_in_a_config_that_can_be_none_is_refused(tmp_path, value):
    source = write(tmp_path / "x.safetensors", made("linen-mha"))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": value}))
    with pytest.raises(LayoutError, match=r"^num_attention_heads \(.* of config.json must be a whole number from 1 to"):
        checkpoints.convert(source, tmp_path / "y.npz", to_layout="nnx-mha")
    assert not (tmp_path / "y.npz").exists()


TRIANGLE = np.tri(7, dtype=np.uint8)[None, None]


@pytest.mark.parametrize(
    ("layout", "name", "array"),
    [
        ("hf-gpt2", "transformer.h.0.attn.bias", np.ones((1, 1, 7, 7), np.uint8)),
        ("hf-gpt2", "transformer.h.0.attn.bias", 1 - TRIANGLE),
        ("hf-gpt2", "transformer.h.0.attn.bias", TRIANGLE[..., :5]),
        ("hf-gpt2", "transformer.h.0.attn.bias", np.tri(3000, k=1, dtype=np.float32)),
        ("hf-gpt2", "transformer.h.0.attn.masked_bias", np.array(0, np.float32)),
        ("hf-bert", "embeddings.position_ids", np.arange(9)[None] + 2),
        ("hf-bert", "embeddings.token_type_ids", np.int64([[0, 0, 1]])),
        ("hf-llama", "model.layers.0.self_attn.rotary_emb.inv_freq", np.float32([0.5, 0.7])),
        ("meta-llama", "rope.freqs", np.float32([0.5, np.nan])),
        ("book", "net.att.mask", np.tri(5, dtype=np.float32)),
        ("book", "net.att.mask", np.triu(np.ones((5, 5), np.float32))),
        ("fused-qkv", "net.att.mask", np.zeros((5, 5), bool)),
        ("fused-qkv", "net.att.mask", np.zeros(0, np.float32)),
    ],
)
def test_what_is_left_out_for_a_reason_has_to_be_what_the_reason_says(tmp_path, capsys, layout, name, array):
    source = write(tmp_path / "source.safetensors", made(layout) | {name: array})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run(["convert", str(source), str(tmp_path / "x.npz"), "--from", layout]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {source}: {name} is not what it would be left out as: ")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "source.safetensors"]


@pytest.mark.parametrize(
    ("layout", "arrays"),
    [
        ("hf-gpt2", {"transformer.h.0.attn.bias": np.tri(3000, dtype=bool)[None, None]}),
        ("hf-gpt2", {"transformer.h.1.attn.masked_bias": np.array(-1e4, np.float32)}),
        ("hf-bert", {"embeddings.token_type_ids": np.zeros((1, 9), np.int64)}),
        ("hf-bert", {"embeddings.position_ids": np.stack([np.arange(5)] * 2).astype(np.float32)}),
        ("book", {"net.att.mask": np.triu(np.full((5, 5), -np.inf, ml_dtypes.bfloat16), 1)}),
    ],
)
def test_what_is_what_its_reason_says_is_left_out(tmp_path, layout, arrays):
    source = write(tmp_path / "source.safetensors", made(layout) | arrays)
    assert checkpoints.convert(source, tmp_path / "x.npz", from_layout=layout).target.exists()


def test_overwriting_never_takes_a_folder_of_other_things(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    write(tmp_path / "home" / "old.safetensors", {"x": np.ones(2)})
    (tmp_path / "home" / "thesis").mkdir()
    (tmp_path / "home" / "thesis" / "text").write_text("x")
    before = tree(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "home"), "--overwrite"]) == 2
    assert "is a folder of other things than a checkpoint" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_devices_pipes_and_sockets_are_never_replaced(tmp_path, capsys, kind, options):
    source, target = folder(tmp_path / "hf"), tmp_path / "x.npz"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(target))
    else:
        try:
            os.mknod(target, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this user can make no device")
    before = target.lstat()
    assert run(["convert", str(source), str(target), *options]) == 2
    assert capsys.readouterr().err == f"error: {target} is a device, a pipe or a socket, which is never replaced\n"
    assert os.path.samestat(before, target.lstat())
    assert {one.name for one in tmp_path.iterdir()} == {"hf", "x.npz"}


def test_links_are_replaced_and_never_followed(tmp_path):
    source = folder(tmp_path / "hf")
    real = tree(folder(tmp_path / "real", seed=1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "dangling"):
        there = checkpoints.convert(source, tmp_path / name, overwrite=True).target
        assert not there.is_symlink()
        assert checkpoints.verify(source, there).passed
    assert tree(tmp_path / "real") == real
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match="is a link to itself"):
        checkpoints.convert(source, tmp_path / "loop", overwrite=True)
    with pytest.raises(CheckpointError, match="the name is too long"):
        checkpoints.convert(source, tmp_path / ("x" * 250))


def test_a_folder_that_may_not_be_entered_is_not_called_a_link(tmp_path, monkeypatch):
    def resolve(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(staging, "resolve", resolve)  # tests run as root, who may enter any folder
    with pytest.raises(CheckpointError, match=r"out can't be written to: Permission denied$"):
        checkpoints.convert(folder(tmp_path / "hf"), tmp_path / "out")


@pytest.mark.parametrize(
    "part",
    [
        {"settings": []},
        {"settings": {"prefix": []}},
        {"settings": {"prefix": "../"}},
        {"order": [[]]},
        {"dropped": {}},
        {"files": [1]},
        {"files": {"wte.weight": "../x.safetensors"}},
        {"files": {"transformer.wte.weight": "../x.safetensors"}},
        {"metadata": 3},
        {"metadata": {"files": 3}, "files": {"a": "b.safetensors"}},
    ],
)
def test_a_hostile_manifest_is_one_line_or_does_no_harm(tmp_path, capsys, part):
    source = folder(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / "x.npz").target
    path = tmp_path / "x.npz.attn-bridge.json"
    document = json.loads(path.read_text())
    document["restore"]["hf-gpt2"] |= part
    path.write_text(json.dumps(document))
    before = tree(tmp_path)
    status = run(["convert", str(there), str(tmp_path / "back"), "--to", "hf-gpt2"])
    error = capsys.readouterr().err
    found = tree(tmp_path)
    if status:
        assert status == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert found == before
    else:
        assert {name: data for name, data in found.items() if not name.startswith("back/")} == before
        assert bits(checkpoints.read(tmp_path / "back")) == bits(checkpoints.read(source))
