"""The manifest of a repository, and the files of a commit: bad ones are one line, and nothing leads outside."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess

import pytest

from attn_bridge.cli.app import run
from attn_parity.confinement import process
from attn_parity.confinement.keeper import Ending
from attn_parity.plugin import comparing
from attn_parity.review import driver, judging, manifest, report
from attn_parity.review.commit import Commit, Export

from ...support.judging.reports import different_report

PAIR = '[[pair]]\nname = "a"\nfirst = "net.py:A"\nsecond = "net.py:B"\n'

BAD = [
    ("[[pair]", "parity.toml is not TOML: "),
    ("", "parity.toml must have at least one [[pair]] table"),
    ("pair = 1", "parity.toml must have at least one [[pair]] table"),
    ("pairs = []", "parity.toml has no key pairs; it has [[pair]] tables"),
    (PAIR + "seed = 1", "parity.toml: pair a has no key seed; it has name, first, second, inputs, "),
    (PAIR + PAIR.replace('"a"', '"A"'), "parity.toml names two pairs A"),
    (PAIR.replace('"a"', '"../a"'), "parity.toml: pair 1: name (../a) must be letters, digits, "),
    (PAIR.replace("first", "firts"), "parity.toml: pair a has no key firts; "),
    (PAIR.replace('second = "net.py:B"', ""), "parity.toml: pair a needs the key second"),
    (PAIR.replace("net.py:B", "--html=x:B"), "parity.toml: pair a: second (--html=x:B) must read file.py:factory or "),
    (PAIR.replace("net.py:B", "net.py"), "parity.toml: pair a: second (net.py) must read file.py:factory or "),
    (PAIR.replace("net.py:B", "../net.py:B"), "parity.toml: pair a: second (../net.py) must be a path inside the "),
    (PAIR.replace("net.py:B", "/etc/net.py:B"), "parity.toml: pair a: second (/etc/net.py) must be a path inside the "),
    (PAIR.replace("net.py:B", "out/net.py:B"), "parity.toml: pair a: out/net.py leads out of the repository"),
    (PAIR.replace("net.py:B", "gone.py:B"), "parity.toml: pair a: gone.py does not exist"),
    (PAIR + 'inputs = "~/x.npz"', "parity.toml: pair a: inputs (~/x.npz) must be a path inside the repository, "),
    (PAIR + 'inputs = ".git/config"', "parity.toml: pair a: inputs (.git/config) must not be in .git"),
    (PAIR + 'inputs = "net.py"\nshapes = ["2"]', "parity.toml: pair a: inputs and shapes do not go together"),
    (PAIR + 'shapes = ["2,0"]', "parity.toml: pair a: shapes (2,0) must be whole numbers from 1 with commas, "),
    (PAIR + 'shapes = "2,3"', "parity.toml: pair a: shapes (2,3) must be a list of whole numbers from 1 "),
    (PAIR + 'dtypes = ["int8"]', "parity.toml: pair a: dtypes (int8) must be one of "),
    (PAIR + "seeds = 0", "parity.toml: pair a: seeds (0) must be a whole number from 1 to "),
    (PAIR + "seeds = true", "parity.toml: pair a: seeds (True) must be a whole number from 1 to "),
    (PAIR + "rules = 1", "parity.toml: pair a: rules (1) must be a text"),
    (PAIR + 'fixed = ["\\u0000"]', "parity.toml: pair a: fixed (\\x00) must be names of inputs"),
    (PAIR + 'allow = ["a=b"]', "parity.toml: pair a: allow (['a=b']) must be a table of path = reason, "),
    (PAIR + 'allow = {x = ""}', "parity.toml: pair a: allow (x=) must read PATH=REASON"),
    (PAIR + 'allow = {"x=y" = "z"}', "parity.toml: pair a: allow ({'x=y': 'z'}) must be a table of path = reason, "),
    (
        PAIR + 'allow = {x = "\\u0000"}',
        "parity.toml: pair a: allow (\\x00) must have paths and reasons of at most 1000 ",
    ),
    (
        PAIR + f'allow = {{{"x" * 2000} = "r"}}',
        f"parity.toml: pair a: allow ({'x' * 120}... (2000 characters)) must have",
    ),
    (
        PAIR + "".join(f'allow.x{i} = "r"\n' for i in range(501)),
        "parity.toml: pair a: allow has 501 values; at most 500",
    ),
    (
        PAIR + f"fixed = ['{'x' * 2000}']",
        f"parity.toml: pair a: fixed ({'x' * 120}... (2000 characters)) must be names of",
    ),
    (PAIR + "fixed = [" + '"x",\n' * 501 + "]", "parity.toml: pair a: fixed has 501 values; at most 500"),
    ("[" + "a." * 300_000 + "a]", "parity.toml has a line of 600003 characters; at most 4000"),
    ("a = " + "[\n" * 100_000, "parity.toml is not TOML: "),
    (PAIR + "seeds = " + "9" * 3990, f"parity.toml: pair a: seeds ({'9' * 120}... (3990 characters)) must be a whole "),
    (PAIR + "seeds = 0x" + "f" * 3980, "parity.toml: pair a: seeds (a number of thousands of digits) must be a whole "),
    (PAIR * 1001, "parity.toml has 1001 pairs; at most 1000"),
    (
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "parity.toml is a pointer of Git LFS, and not",
    ),
    (PAIR + '"\\u202e" = 1', "parity.toml: pair a has no key \\u202e; it has "),
    (PAIR.replace('"a"', '"\\u202e"'), "parity.toml: pair 1: name (\\u202e) must be letters, digits, "),
    (PAIR.replace("net.py:B", "n\\u202e.py:B"), "parity.toml: pair a: n\\u202e.py does not exist"),
    (PAIR.replace('"a"', '"\\u001b[31m"'), "parity.toml: pair 1: name (\\x1b[31m) must be letters, digits, "),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_a_malformed_manifest_is_one_line(text, message, tmp_path):
    folder = tmp_path / "repository"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/net.py").write_text("")
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    (folder / "net.py").write_text("")
    (folder / "parity.toml").write_text(text)
    with pytest.raises(manifest.ManifestError) as error:
        manifest.read(folder / "parity.toml")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link", "chain", "circle", "device", "large"])
def test_a_manifest_that_is_no_file_is_one_line(kind, tmp_path):
    path = tmp_path / "parity.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as stream:
            stream.truncate(100_000_000)
    elif kind != "missing":
        (tmp_path / "real.toml").write_text(PAIR)
        (tmp_path / "next.toml").symlink_to("real.toml")
        target = {"link": "real.toml", "chain": "next.toml", "circle": "parity.toml", "device": "/dev/zero"}[kind]
        path.symlink_to(target)
    rule = "has more than 1048576 bytes" if kind == "large" else "does not exist, or is not a file"
    with pytest.raises(manifest.ManifestError, match=f"^parity.toml {rule}$"):
        manifest.read(path)


def test_a_value_never_reads_as_an_option(tmp_path):
    text = PAIR + 'fixed = ["--json=x"]\nallow = {"-x" = "--no-transfer"}\nshapes = ["2,3", "4"]\n'
    [pair] = manifest.parse(text)
    words = ["--shape=2,3", "--shape=4", "--fixed=--json=x", "--allow=-x=--no-transfer"]
    assert pair.words == ["compare", "net.py:A", "net.py:B", *words]


# ---- commits


def git(folder, *words, text=None):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    command = ["git", *identity, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment, input=text)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git(folder, "init", "-q")
    return folder


def commit_of(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "files")
    return Commit.of(folder, None)


def test_links_that_lead_outside_are_left_out_also_through_others(repository, tmp_path):
    (repository / "data").mkdir()
    (repository / "data/x").write_text("x")
    links = {
        "good": "data/x",
        "absolute": "/etc",
        "up": "../elsewhere",
        "here": ".",
        "through": "here/../../etc",
        "circle": "circle",
    }
    for name, target in links.items():
        (repository / name).symlink_to(target)
    export = commit_of(repository).export(tmp_path / "out")
    assert sorted(export.outside) == ["absolute", "circle", "through", "up"]
    assert (tmp_path / "out/good").read_text() == "x"
    assert export.digests.keys() == {"data/x"}
    assert export.notes[0].startswith("4 links lead out of the repository and were left out: ")


def test_a_path_that_git_would_not_write_is_refused(repository, tmp_path):
    blob = git(repository, "hash-object", "-w", "--stdin", text="evil")
    raw = b"100644 ..\0" + bytes.fromhex(blob)
    command = ["git", "hash-object", "-t", "tree", "-w", "--literally", "--stdin"]
    tree = subprocess.run(command, cwd=repository, input=raw, capture_output=True, check=True).stdout.decode().strip()
    name = git(repository, "commit-tree", tree, "-m", "evil")
    with pytest.raises(ValueError, match=r"the commit has a file with the path \.\."):
        Commit.of(repository, name).export(tmp_path / "out")


def test_what_can_not_be_reviewed_is_one_line_and_writes_nothing(repository, tmp_path, monkeypatch, capsys):
    def line(*words):
        assert run(["review", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    assert line() == "error: there is no commit HEAD in this repository\n"
    (repository / "net.py").write_text("")
    name = commit_of(repository).name
    assert (
        line() == f"error: commit {name[:12]} has no file parity.toml at the top of the repository (a link is none)\n"
    )
    assert line("nope") == "error: there is no commit nope in this repository\n"
    assert line("--timeout", "0") == "error: --timeout (0) must be a number of seconds above 0\n"
    (repository / "parity.toml").symlink_to("net.py")
    name = commit_of(repository).name
    assert (
        line() == f"error: commit {name[:12]} has no file parity.toml at the top of the repository (a link is none)\n"
    )
    (repository / "parity.toml").unlink()
    (repository / "parity.toml").write_text(PAIR + "seed = 1")
    commit_of(repository)
    assert line().startswith("error: parity.toml: pair a has no key seed; ")
    (repository / "full").mkdir()
    (repository / "full/mine").write_text("")
    assert line("--out", "full") == "error: --out full exists and is not empty; give another one\n"
    (repository / "full/report.json").write_text('{"kind": "mine"}')
    assert line("--out", "full") == "error: full/report.json is not a report of a review\n"
    assert line("--against", "gone") == "error: gone cannot be read: No such file or directory\n"
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.chdir(outside)
    assert line().startswith("error: the current folder is not in a git repository: ")
    assert {path.name for path in repository.iterdir()} == {".git", "net.py", "parity.toml", "full"}
    assert list(outside.iterdir()) == []


# ---- earlier reviews


def data(verdicts, commit="c1", judge="j"):
    pairs = [{"name": name, "verdict": verdict, "tensors": {"output": verdict}} for name, verdict in verdicts.items()]
    return {"kind": "review", "commit": commit, "judge": judge, "pairs": pairs}


def test_changed_verdicts_are_named_with_what_else_changed():
    before = data({"a": "equal", "b": "equal", "c": "different"})
    assert report.comparison(before, before) == [
        "the same verdicts as in the earlier review of this commit, tensor by tensor"
    ]
    after = data({"a": "equal", "b": "different", "d": "equal"}, "c2")
    assert report.comparison(before, after) == [
        "verdicts differ from the earlier review of commit c1 (other than then: the commit)",
        "  b: equal -> different",
        "  c: removed",
        "  d: new",
    ]
    after = data({"a": "equal", "b": "equal", "c": "different"})
    after["pairs"][0]["tensors"] = {"output": "allowed"}
    assert report.comparison(before, after) == [
        "verdicts differ from the earlier review of this commit (commit and judge are the same: "
        "results do not reproduce)",
        "  a: 1 tensors changed: output",
    ]


def test_a_module_of_the_standard_library_is_not_taken_for_one_of_the_working_tree(tmp_path, monkeypatch):
    [pair] = manifest.parse(PAIR)
    pair = dataclasses.replace(pair, first="os:_exit", second="os:_exit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "run", lambda *words, **limits: Ending("exit", 2, "error: it was run"))
    (tmp_path / "scratch").mkdir()
    result = judging.judge(pair, tmp_path / "export", tmp_path / "scratch", seconds=1.0, avoid=tmp_path)
    assert result.message == "it was run"


def test_missing_files_are_counted_and_three_are_named():
    export = Export({}, submodules=("a", "b", "c", "d"), pointers=(), outside=("x", "y", "z"))
    assert export.notes == [
        "4 submodules are not reviewed: a, b, c, ...",
        "3 links lead out of the repository and were left out: x, y, z",
    ]


def test_a_pair_beyond_the_limit_of_memory_of_a_review_is_one_line(repository, monkeypatch):
    (repository / "net.py").write_text("A = B = None")
    (repository / manifest.NAME).write_text(PAIR)
    commit_of(repository)
    limits = []

    def run(words, folder, scratch, **options):
        limits.append((options["seconds"], options["memory"]))
        return Ending("memory", -9, "")

    monkeypatch.setattr(process, "run", run)
    result = driver.review(repository, seconds=5.0, memory=1 << 28)
    assert [one.message for one in result.results] == ["needed more than 0.25 GiB of memory"]
    assert limits == [(5.0, 1 << 28)]
    driver.review(repository)
    assert limits[1] == (600.0, 16 << 30)


# ---- reports that judged code may have written


def test_a_test_run_shows_the_notes_on_allowed_submodules():
    allowed = [("norm", "eps", True, True), ("head", "tied", False, False)]
    notes = ["norm: both sides run", "norms: too", "head: nothing differs"]
    assert comparing.summarised("equal", allowed, notes) == {
        "verdict": "equal",
        "allowed": allowed,
        "notes": ["norm: both sides run"],
    }


def test_a_forged_report_is_not_judged(tmp_path, monkeypatch):
    right = {**different_report().to_json(), "subjects": {"first": {"files": {}}, "second": {"files": {"a": "b"}}}}
    [pair] = manifest.parse(PAIR + 'allow = {norm = "eps\\u001b[31m"}')
    pair = dataclasses.replace(pair, first="net.py:A")
    allowed = [{"path": "norm", "reason": "\x1b[2J", "covers": ["output"], "known": True}, {"path": []}, 1]

    def judged(text, status=1):
        def write(words, folder, scratch, **limits):
            (scratch / "out/report.json").write_text(text)
            return Ending("exit", status, "")

        monkeypatch.setattr(process, "run", write)
        scratch = tmp_path / secrets.token_hex(4)
        scratch.mkdir()
        return judging.judge(pair, tmp_path, scratch, seconds=1.0)

    result = judged(json.dumps({**right, "allowed": allowed}))
    assert (result.verdict, result.allowed) == ("different", ["norm: eps\\x1b[31m"])
    for key, value in (("subjects", []), ("subjects", {"first": 1}), ("environment", None), ("tensors", [1])):
        assert judged(json.dumps({**right, key: value})).message == "its process ended without a result (status 1)"
    assert judged(json.dumps({**right, "seconds": float("nan")})).verdict == "inconclusive"
    assert judged("[" * 100_000).verdict == "inconclusive"
    assert judged(json.dumps(right), 0).message == "its report is different, and its process ended with status 0"
