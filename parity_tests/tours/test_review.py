"""Reviews of a repository: its manifest, a hostile one, and the same verdicts again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from attn_bridge.cli.app import run
from attn_parity.confinement import landlock

from ..support.files.judged_files import NET

ALLOWED = {"output": "another activation", "grad x": "follows", "fc": "follows", "nope": "never"}


def git(folder, *words):
    # The repository of a developer's hook is another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout.strip()


def table(name, first, second="net.py:Net", **more):
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in {"shapes": ["2,4"], "seeds": 1, **more}.items()
        if key != "allow"
    ]
    allow = [f"allow.{json.dumps(path)} = {json.dumps(reason)}" for path, reason in more.get("allow", {}).items()]
    return "\n".join(["[[pair]]", f'name = "{name}"', f'first = "{first}"', f'second = "{second}"', *lines, *allow, ""])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(NET)
    git(folder, "init", "-q")
    return folder


def commit(folder, *tables, **files):
    (folder / "parity.toml").write_text("\n".join(tables))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--no-verify", "-m", "pairs")
    return git(folder, "rev-parse", "HEAD")


def state(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pairs_are_judged_at_a_commit_and_the_same_again(repository, capfd):
    pairs = [
        table("same", "net.py:Net", dtypes=["float32"]),
        table("allowed", "net.py:tanh", allow=ALLOWED),
    ]
    name = commit(repository, *pairs)
    (repository / "net.py").write_text("raise SystemExit('not committed')")
    before = state(repository)
    out = repository / "review"
    status = run(["review", "--out", "review"])
    printed = capfd.readouterr()
    data = json.loads((out / "report.json").read_text())
    same, allowed = data["pairs"]
    assert (same["verdict"], data["commit"], data["unreviewed"]) == ("equal", name, ["net.py"])
    assert "warning: uncommitted changes are not judged: net.py\n" in printed.err
    assert (status, data["verdict"], allowed["verdict"]) == (0, "equal", "equal")
    assert allowed["unneeded_allowances"] == ["nope: nothing has that name"]
    assert "warning: allowed: an allowance is not needed: nope: nothing has that name\n" in printed.err
    assert "allowed: output: another activation" in printed.out
    # The digests are those of the commit's files, and the folder has everything.
    digest = git(repository, "show", f"{name}:net.py")
    assert same["subjects"]["first"]["files"].keys() == {"net.py"}
    assert len(same["subjects"]["first"]["weights"]) == 64
    assert digest != (repository / "net.py").read_text()
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    pages = {f"pairs/{pair}.{kind}" for pair in ("same", "allowed") for kind in ("html", "json")}
    assert files == {"report.json", "report.html", "environment.json", *pages}
    assert "torch" in json.loads((out / "environment.json").read_text())["same"]
    assert {path: content for path, content in state(repository).items() if path.parts[0] != "review"} == before
    # Again, by name, against the first.
    assert run(["review", name[:10], "--out", "again", "--against", "review"]) == status
    assert "the same verdicts as in the earlier review of this commit, tensor by tensor\n" in capfd.readouterr().out


HOSTILE = {
    "leaves": ("os._exit(0)", "os._exit"),
    "forks": (
        """
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "987"])
        """,
        "must give",
    ),
    "prints": (
        r"""
        os.system("yes hello | head -100000; yes hello | head -100000 >&2")
        raise ValueError("\x1b[31m" + "\n" * 9 + "error: all is well")
        """,
        "raised ValueError",
    ),
    "claims": (
        """
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b'{"end": "exit", "status": 0, "errors": ""}')
            except OSError:
                pass
        [report] = [word[7:] for word in sys.orig_argv if word.startswith("--json=")]
        os.symlink("/etc/passwd", report)
        os.kill(os.getppid(), 9)
        """,
        "ended without a result|crashed|killed",
    ),
    "rewrites": ("open('net.py', 'a').write('#')", "changed files of the commit: net.py"),
}
"""Name -> what a factory does, and the line on it."""


def factory(body):
    return f"import os, sys\n\ndef make():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n    return 1\n"


def test_a_hostile_repository_is_one_line_each_and_touches_nothing(repository, tmp_path, capfd):
    home = tmp_path / "victim"
    home.mkdir()
    (home / "file").write_text("mine")
    hook = repository / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {home}/hooked\n")
    hook.chmod(0o755)
    (repository / ".gitattributes").write_text("data filter=evil\n")
    targets = [str(home / "file"), str(home / "new"), str(repository / "net.py"), str(repository / ".git/hooks/evil")]
    writer = factory(
        f"""
        refused = 0
        for path in {targets!r}:
            try:
                open(path, "a").write("x")
            except OSError:
                refused += 1
        raise ValueError(f"{{refused}} refused, home {{os.environ['HOME']}} {{os.environ.get('SECRET')}}")
        """
    )
    files = {name: factory(body) for name, (body, _) in HOSTILE.items()}
    commit(repository, *(table(name, f"{name}.py:make") for name in [*HOSTILE, "writes"]), **files, writes=writer)
    for name, value in (
        ("core.fsmonitor", "monitored"),
        ("filter.evil.clean", "filtered"),
        ("filter.evil.smudge", "smudged"),
    ):
        git(repository, "config", name, f"touch {home}/{value}; cat")
    (repository / "data").write_text("changed")
    before = state(repository), state(home)
    environment = os.environ | {"SECRET": "secret-token"}
    words = [sys.executable, "-m", "attn_bridge", "review", "--out", str(tmp_path / "review")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "warning: uncommitted changes are not judged: data\n")
    lines = done.stdout.splitlines()
    assert len(lines) == len(HOSTILE) + 3
    for line, (name, (_, reason)) in zip(lines, HOSTILE.items(), strict=False):
        assert line.startswith(f"{name:<8}  inconclusive: ")
        assert re.search(reason, line), line
        assert "\x1b" not in line
    assert "secret-token" not in done.stdout
    assert not subprocess.run(["pgrep", "-f", "^sleep 987"], capture_output=True, text=True, check=False).stdout
    if landlock.version():
        assert (state(repository), state(home)) == before
        assert "4 refused, home " in lines[len(HOSTILE)]
    else:
        assert "while it ran, files of the repository changed: " in lines[len(HOSTILE)]
    assert str(Path.home()) not in lines[len(HOSTILE)].partition(" home ")[2]
    assert not [name for name in ("hooked", "monitored", "filtered", "smudged") if (home / name).exists()]


def test_a_pair_that_hangs_is_ended_in_time(repository, capfd):
    commit(repository, table("hangs", "hangs.py:make"), hangs="import time\ntime.sleep(1000)")
    assert run(["review", "--timeout", "0.5"]) == 2
    assert capfd.readouterr().out.startswith("hangs  inconclusive: took longer than 0.5 s\n")


def test_the_pairs_are_tests_of_pytest(repository):
    commit(repository, table("same", "net.py:Net"), table("absent", "net.py:absent"))
    (repository / "test_it.py").write_text("def test_mine(): pass")

    def pytest_run(*words):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return re.findall(r"^(\S+::\S+) (\w+)", done.stdout, re.MULTILINE), done.stdout + done.stderr

    assert pytest_run()[0] == [("test_it.py::test_mine", "PASSED")]
    outcomes, text = pytest_run("--parity-manifest")
    pairs = [("parity.toml::same", "PASSED"), ("parity.toml::absent", "FAILED")]
    assert outcomes[:3] == [("test_it.py::test_mine", "PASSED"), *pairs]
    assert "absent: inconclusive: net.py has no absent" in text
    assert "parity: 2 comparisons, 1 inconclusive, 1 equal" in text
    assert pytest_run("--parity-manifest", "parity.toml::absent")[0][:1] == [("parity.toml::absent", "FAILED")]
    (repository / "parity.toml").write_text("pair = 1")
    assert "ERROR: parity.toml must have at least one [[pair]] table" in pytest_run("--parity-manifest")[1]
