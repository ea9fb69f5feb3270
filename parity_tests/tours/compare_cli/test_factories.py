"""How `attn-bridge compare` finds and runs users' factories."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from attn_bridge.cli.app import run

from .files import FLAX, TORCH


def test_files_of_one_name_do_not_clash(here, capfd):
    for folder, text, wanted in (("a", TORCH, 6), ("b", FLAX, 6)):
        (here / folder / "parts").mkdir(parents=True)
        (here / folder / "model.py").write_text(
            f"import sizes\nfrom parts.deep import SIZE\nassert sizes.SIDE == SIZE == {folder!r}\n" + text
        )
        (here / folder / "sizes.py").write_text(f"SIDE = {folder!r}\nWIDTH = {wanted}\n")
        (here / folder / "parts" / "deep.py").write_text(f"SIZE = {folder!r}\n")
    arguments = ["compare", "a/model.py:make", "b/model.py:wrong", "--shape", "2,6", "--seeds", "1"]
    assert run([*arguments, "--save-repro", "repro", "--json", "-"]) == 1
    assert json.loads(capfd.readouterr().out)["verdict"] == "different"
    copied = {path.relative_to(here / "repro").as_posix() for path in (here / "repro" / "sources").rglob("*.py")}
    parts = ("model.py", "sizes.py", "parts/deep.py")
    assert copied == {f"sources/{side}/{name}" for side in ("torch", "flax") for name in parts}
    record = json.loads((here / "repro" / "repro.json").read_text())
    options = shlex.split(record["again"])[4:]
    inside = [f"repro/{one}" if (here / "repro" / one).exists() else one for one in options]
    assert run(["compare", "repro/torch_side.py:make", "repro/flax_side.py:make", *inside]) == 1


def test_factories_may_be_in_packages_and_import_relatively(here, capfd):
    (here / "pack" / "deep").mkdir(parents=True)
    for path in ("pack/__init__.py", "pack/deep/__init__.py"):
        (here / path).write_text("")
    (here / "pack" / "widths.py").write_text("WIDTH = 6\n")
    (here / "pack" / "deep" / "net.py").write_text("from ..widths import WIDTH\nfrom . import __name__ as n\n" + TORCH)
    (here / "pack" / "flax_net.py").write_text("from pack.widths import WIDTH\n" + FLAX)
    arguments = ["compare", "pack/deep/net.py:Net", "pack.flax_net:wrong", "--shape", "2,6", "--seeds", "1"]
    assert run([*arguments, "--save-repro", "repro"]) == 1
    record = json.loads((here / "repro" / "repro.json").read_text())
    assert record["factories"] == {
        "torch": "sources/torch/pack/deep/net.py:Net",
        "flax": "sources/flax/pack/flax_net.py:wrong",
    }
    (here / "pack" / "widths.py").unlink()
    options = shlex.split(record["again"])[4:]
    inside = [f"repro/{one}" if (here / "repro" / one).exists() else one for one in options]
    assert run(["compare", "repro/torch_side.py:make", "repro/flax_side.py:make", *inside]) == 1
    assert capfd.readouterr().err == ""


def test_files_may_be_named_like_their_frameworks(here):
    (here / "both").mkdir()
    (here / "both" / "torch.py").write_text(TORCH)
    (here / "both" / "flax.py").write_text(FLAX)
    done = subprocess.run(
        [sys.executable, "-m", "attn_bridge", "compare", "both/torch.py:make", "both/flax.py:make", "--seeds", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_changes_by_user_code_are_undone(here):
    (here / "rude.py").write_text(
        "import os, sys\nsys.argv.append('x')\nsys.path.clear()\nsys.path.append('/nowhere')\nos.chdir('/')\n"
    )
    before = list(sys.path), list(sys.argv), Path.cwd()
    assert run(["compare", "rude.py:make", "theirs.py:make", "--shape", "2,6"]) == 2
    assert (sys.path, sys.argv, Path.cwd()) == before
