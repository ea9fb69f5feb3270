"""The fixture that runs pytest with the plugin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from .pytest_runs import CONFTEST, FRAMEWORKS, ROOT, Done


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
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *chosen, *always, *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path / folder,
            env=kept | environment,
        )
        lines = asked.read_text().splitlines() if asked.exists() else []
        return Done(done.returncode, done.stdout, done.stderr, [json.loads(line) for line in lines])

    return run_pytest
