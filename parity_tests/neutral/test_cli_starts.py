"""The command line in processes of its own: how it starts, and how the shell completes it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest


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
    assert (done.returncode, done.stderr) == (2, "error: No such command 'bogus'.\n")


@pytest.mark.parametrize(
    ("command", "limit"), [(["-c", "import attn_bridge"], 1.0), (["-m", "attn_bridge", "--help"], 5.0)]
)
def test_start_up_is_quick(command, limit):
    """In times of what importing NumPy takes, measured in turn: others on the machine slow both down."""

    def seconds(arguments):  # of the processor
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime - start.ru_utime + end.ru_stime - start.ru_stime

    bare, numpy, found = (
        min(times)
        for times in zip(
            *([seconds(one) for one in (["-c", "pass"], ["-c", "import numpy"], command)] for _ in range(5)),
            strict=True,
        )
    )
    assert found - bare < limit * (numpy - bare)


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
