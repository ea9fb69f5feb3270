"""The command line in processes of its own: how it starts, and how the shell completes it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from attn_bridge import cli
from attn_bridge.cli import app, collector
from attn_parity.commands.isolation import supervision

RUN = "from attn_bridge.cli.app import run; assert 0 == run"


@pytest.mark.parametrize(("arguments", "begun"), [(None, [["doctor"]]), (["doctor"], [])])
def test_only_the_process_of_the_command_is_supervised(arguments, begun, monkeypatch):
    calls, ran = [], []
    monkeypatch.setattr(sys, "argv", ["attn-bridge", "doctor"])
    monkeypatch.setattr(supervision, "begin", calls.append)
    monkeypatch.setattr(app, "main", ran.append)
    cli.main(arguments)
    assert (calls, ran) == (begun, [arguments])


def test_console_module_runs_as_a_program_without_a_framework():
    code = (
        "import sys\n"
        "from attn_bridge.cli.app import run\n"
        "status = run(['--help'])\n"
        "loaded = {'torch', 'jax', 'flax'} & sys.modules.keys()\n"
        "sys.exit(status or ','.join(sorted(loaded)) or 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-m", "attn_bridge", "bogus"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: No such command 'bogus'. See attn-bridge --help\n")


@pytest.mark.parametrize(
    ("statement", "limit", "heavy"),
    [
        ("import attn_bridge", 1, "numpy|typer|rich"),
        (f"{RUN}(['--help'])", 52, "torch|jax|flax|attn_bridge.models|attn_bridge.reference"),
        (
            f"{RUN}(['convert', 'source.npz', 'target.npz', '--to', 'same'])",
            196,
            "torch|jax|flax|transformers|fsspec|ray|huggingface_hub|h5py|gguf|optax|scipy|rich.progress|numpy.ma|"
            "attn_parity.factories|attn_bridge.cli.demo",
        ),
        (
            "import attn_parity.commands.compare, attn_parity.compare.driver, attn_parity.repro",
            156,
            "torch|jax|flax|scipy|rich|attn_bridge.models|attn_bridge.checkpoints",
        ),
    ],
    ids=["import", "help", "convert", "compare"],
)
def test_few_modules_are_imported(statement, limit, heavy, tmp_path):
    """Budgets in modules of ours, which no busy machine changes; of others, those that take long are named."""
    np.savez(tmp_path / "source.npz", x=np.ones(2, np.float32))
    program = (
        f"import sys\n{statement}\n"
        "names = {name for name in sys.modules if name.startswith('attn_')}\n"
        f"heavy = sorted(set({heavy!r}.split('|')) & sys.modules.keys())\n"
        "print(len(names), heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    number, loaded = done.stderr.splitlines()[-1].split(" ", 1)
    assert loaded == "[]"
    assert int(number) <= limit


SIDE = "from attn_bridge import parity\nimport numpy as np\n\ndef make():\n    return parity.function(np.tanh, {})\n"

AT_EXIT = """
import atexit, gc, os, pathlib, sys
from attn_bridge import cli
pid = os.getpid()
def note():
    if os.getpid() != pid or "--shape" not in sys.argv:
        pathlib.Path("state").write_text(f"{gc.isenabled()} {gc.get_freeze_count() > 10_000}")
atexit.register(note)
cli.main()
"""


@pytest.mark.parametrize("command", [*collector.COMMANDS, "convert --dry-run", "digest"])
def test_the_garbage_collector_runs_once_modules_are_loaded(command, tmp_path):
    np.savez(tmp_path / "source.npz", x=np.ones(2, np.float32))
    (tmp_path / "side.py").write_text(SIDE)
    words = {
        "compare": "side.py:make side.py:make --shape 2,3",
        "convert": "source.npz target.npz --to same",
        "dump": "side.py:make out --shape 2,3",
        "laws": "side.py:make --shape 2,3",
        "logprobs": "source.npz source.npz",
        "plan": "source.npz target.npz --to same",
        "verify": "source.npz source.npz",
    }.get(command.split()[0], "source.npz")
    line = [sys.executable, "-c", AT_EXIT, *command.split(), *words.split()]
    subprocess.run(line, capture_output=True, check=False, cwd=tmp_path)
    assert (tmp_path / "state").read_text() == f"True {command.split()[0] in collector.COMMANDS}"


def test_the_shell_completes_commands_and_options():
    def completed(words):
        environment = os.environ | {
            "_ATTN_BRIDGE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-m", "attn_bridge"], capture_output=True, text=True, check=True, env=environment
        )
        return done.stdout.split()

    assert completed("attn-bridge con") == ["convert"]
    assert completed("attn-bridge convert --dr") == ["--drop", "--dry-run"]
