"""Errors of text that users gave: they name the file it stands in, and hold no more of it than shows which it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.cli.app import run
from attn_bridge.cli.errors import MAX_LINE, one_line
from attn_bridge.weights import Rule, Rules
from parity_tests.neutral.checkpoints.checkpoints import attention

LONG = "o i -> " + "ab c. " * 8000 + "z"
QUOTED = json.dumps(LONG)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "x.npz"
    np.savez(path, **attention(bias=False))
    return path


def refused(capsys, *arguments):
    """Return the one short line with which a command is refused."""
    assert run([str(one) for one in arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert len(shown.err) < 1500
    return shown.err.removeprefix("error: ").rstrip("\n")


# ---- long text


@pytest.mark.parametrize(
    "lines",
    [
        *(f'torch = "a"\nflax = "b"\n{key} = {QUOTED}' for key in ("pattern", "part", "along", "drop", "h", "other")),
        *(f'torch = "a"\nflax = "b"\n{key} = [[{QUOTED}], 3]' for key in ("pattern", "split")),
        f'torch = "a"\nflax = "b"\n{QUOTED} = 3',
        f'torch = ["a", {QUOTED}]\nflax = "b"',
        f'torch = "a"\nflax = {QUOTED}',
        f'torch = "a"\nflax = "b"\nsplit = [{{ x = {QUOTED} }}]',
    ],
    ids=lambda lines: lines[:45],
)
def test_a_long_text_of_a_rule_is_cut_and_its_line_named(lines, weights, tmp_path, capsys):
    rules = tmp_path / "rules.toml"
    rules.write_text(f"# of mine\n[[rule]]\n{lines}\n")
    said = refused(capsys, "convert", weights, tmp_path / "y.npz", "--rules", rules)
    assert said.startswith(f"{rules}, line 2: ")
    with pytest.raises(ValueError, match=r"rules\.toml, line 2: ") as caught:
        Rules.from_toml(rules)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("text", [f"[{QUOTED}]\nx = 1", f"{QUOTED} = 1\n{QUOTED} = 1", LONG])
def test_a_long_text_outside_of_rules_is_cut(text, weights, tmp_path, capsys):
    (tmp_path / "rules.toml").write_text(text)
    refused(capsys, "convert", weights, tmp_path / "y.npz", "--rules", tmp_path / "rules.toml")


def test_a_long_rule_is_cut_in_messages_and_whole_in_python():
    with pytest.raises(ValueError, match=r"\.\.\. \(\d+ characters\): pattern must read ") as caught:
        Rule("a", "b", LONG.replace("->", "to"))
    assert len(str(caught.value)) < 600
    assert repr(Rule("a" * 900, "b")) == f"Rule('{'a' * 900}', 'b', '... -> ...')"


@pytest.mark.parametrize(
    "options",
    [
        *(("--" + name, LONG) for name in ("from", "to", "format", "dtype", "strip", "set", "max-memory", "workers")),
        ("--set", f"{LONG}=3"),
        ("--set", f"num_heads={LONG}"),
        (f"--to={LONG}",),
        ("--json", f"no/{LONG}.json"),
        ("--no-such-option", LONG),
        (LONG,),
    ],
    ids=lambda options: options[0][:20] + options[-1][:12],
)
def test_a_long_argument_is_cut(options, weights, tmp_path, capsys):
    refused(capsys, "convert", weights, tmp_path / "y.npz", *options)


def test_a_long_command_and_a_long_path_are_cut(tmp_path, weights, capsys):
    refused(capsys, LONG)
    refused(capsys, "inspect", "x/" * 20_000)
    refused(capsys, "convert", weights, tmp_path / ("x" * 40_000) / "y.npz")


def test_a_path_that_can_be_one_is_not_cut():
    path = "/folder" * 500
    message = f"{path} exists; rm -r {path} removes it"
    assert one_line(message, ["convert", path, f"--json={path}"]) == message


def test_a_line_of_many_findings_is_cut_in_its_middle():
    line = one_line("; ".join(f"finding {number}" for number in range(9000)), [])
    assert len(line) < MAX_LINE
    assert line.startswith("finding 0; finding 1; ")
    assert line.endswith("; finding 8999")
    assert "characters) ... " in line


# ---- bad paths


@pytest.fixture
def folder(weights, tmp_path):
    """A folder with a manifest that leads back to torch, and what changes its files' names there."""
    checkpoints.convert(weights, tmp_path / "made", to_layout="flax")
    manifest = tmp_path / "made" / "attn-bridge.json"

    def rename(file):
        found = json.loads(manifest.read_text())
        found["restore"]["torch"]["files"] = dict.fromkeys(attention(bias=False), file)
        manifest.write_text(json.dumps(found))

    return tmp_path / "made", manifest, rename


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("../../evil.safetensors", "is not named as one of its folder"),
        ("/etc/evil.safetensors", "is not named as one of its folder"),
        ("..", "is not named as one of its folder"),
        ("x" * 300 + ".safetensors", "has too long a name"),
        ("a\nb.safetensors", "has control characters"),
    ],
)
def test_a_bad_path_in_a_manifest_names_the_manifest(file, why, folder, tmp_path):
    made, manifest, rename = folder
    rename(file)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(made, tmp_path / "back", to_layout="torch")
    said = str(caught.value)
    assert said.endswith(why)
    assert said.startswith(f"{manifest}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_name_that_a_container_cannot_hold_names_target_and_rules(workers, weights, tmp_path):
    rules = tmp_path / "mine.toml"
    names = enumerate(attention(bias=False))
    rules.write_text("".join(f'[[rule]]\ntorch = "{name}"\nflax = "../evil.{n}"\n' for n, name in names))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(weights, tmp_path / "y.orbax", rules=rules, workers=workers)
    start = f"{tmp_path / 'y.orbax'} as mine.toml flax: ../evil.0 can't be the name of a folder: "
    assert str(caught.value).startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_name_in_rules_that_cannot_be_printed_names_its_line(weights, tmp_path, capsys):
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rule]]\ntorch = "W_query.weight"\nflax = "a\\nb"\n')
    said = refused(capsys, "convert", weights, tmp_path / "y.npz", "--rules", rules)
    assert said == rf"{rules}, line 1: the name a\nb of flax has characters that can't be printed"
