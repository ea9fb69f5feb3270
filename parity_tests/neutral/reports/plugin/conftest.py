"""The fixture that runs pytest with the plugin."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import warnings

import pytest

from parity_tests.support.processes.forks import in_a_process

from .pytest_runs import CONFTEST, FRAMEWORKS, ROOT, Done

REIMPORTED = ("attn_bridge", "attn_kernels", "attn_parity", "conftest", "flax", "jax", "jax_attn", "parity_tests")
REIMPORTED += ("test_it", "torch", "torch_attn")
"""Modules of this process that a run of pytest has to import itself, as a new process does."""


def started(arguments, folder, environment, out, err):
    """Become `python -m pytest`, in a fork: it need not import pytest again, which takes most of a short run."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    warnings.resetwarnings()
    sys.meta_path[:] = [
        one for one in sys.meta_path if type(one).__name__ not in ("AssertionRewritingHook", "_Blocker")
    ]
    for name in [name for name in sys.modules if name.partition(".")[0] in REIMPORTED]:
        del sys.modules[name]
    sys.path[:0] = [str(folder), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv = ["pytest", *arguments]
    try:
        status = pytest.console_main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


@pytest.fixture
def run(tmp_path):
    """Run pytest on one test file, with all warnings as errors, and with no plugin but ours."""

    def run_pytest(
        source, *options, ini="", gpu=False, without=(), plugin="attn_parity.plugin", folder=".", **environment
    ) -> Done:
        fakes = tmp_path.parent / f"{tmp_path.name}-frameworks"
        for name, text in FRAMEWORKS.items():
            (fakes / name).mkdir(parents=True, exist_ok=True)
            (fakes / name / "__init__.py").write_text(f"GPU = {gpu}\n{re.sub('^ {8}', '', text, flags=re.MULTILINE)}")
        blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
        (tmp_path / "conftest.py").write_text(f"import sys\n{blocked}{CONFTEST}")
        (tmp_path / "test_it.py").write_text(f"import pytest\n{source}")
        (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{ini}\n")
        asked = tmp_path / "asked.jsonl"
        asked.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB"))}
        kept |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join([str(fakes), str(ROOT)])}
        chosen = ["-p", plugin] if plugin else []
        always = ["-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--strict-config"]
        arguments, place, kept = [*chosen, *always, *options], tmp_path / folder, kept | environment
        if "xdist.plugin" in options:  # its workers are processes that have to be started
            command = [sys.executable, "-m", "pytest", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=kept)
            status, out, err = done.returncode, done.stdout, done.stderr
        else:
            files = [fakes.with_name(f"{tmp_path.name}-{name}") for name in ("out", "err")]
            status = in_a_process(functools.partial(started, arguments, place, kept, *files))
            out, err = (file.read_text(encoding="utf-8") for file in files)
        lines = asked.read_text().splitlines() if asked.exists() else []
        return Done(status, out, err, [json.loads(line) for line in lines])

    return run_pytest
