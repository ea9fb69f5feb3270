"""Dumps without a framework: right ones get the judge's verdict, wrong ones one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import types

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from attn_bridge.cli.app import run
from attn_parity import factories
from attn_parity.commands.isolation import separate
from attn_parity.dumps import format as dumps
from attn_parity.dumps import recording, replay
from attn_parity.dumps.replay import compare_dumps
from attn_parity.samples import sampling
from attn_parity.verdict import runner
from parity_tests.support.files.fake_dumps import INPUTS, Net, write

from ..test_house import run_python


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A torch dump, and a Flax dump like it."""
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        torch = write(folder / "torch", Net("torch"), patch)
        return torch, write(folder / "flax", Net("flax", seed=2), patch, like=torch)


def verdicts(report):
    return {one.name: one.verdict for one in report.tensors}


@pytest.mark.parametrize(
    ("words", "wanted"), [(["--output", "logits", "--seeds", "2"], ("logits", 2)), ([], (None, 4))]
)
def test_command_dumps_what_it_is_asked_for(words, wanted, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(recording, "dump", lambda *arguments, **options: calls.append((arguments, options)))
    side, target = Net("torch"), tmp_path / "dump"
    monkeypatch.setattr(factories, "load", lambda *_: types.SimpleNamespace(module=None, build=lambda seed: side))
    assert run(["dump", "side.py:make", str(target), "--shape", "2,3", *words]) == 0
    (((module, _, folder), options),) = calls
    assert (module, folder) == (side, target)
    assert (options.get("output"), options["seeds"]) == wanted
    assert (options["like"], options["transfer"], options["device"]) == (None, True, None)


# ---- verdicts


def test_dumps_of_twins_are_equal_and_compare_every_tensor(pair):
    report = compare_dumps(*pair, command="again")
    assert report.verdict == "equal"
    names = ["output", "grad x", "grad fc.weight", "grad fc.bias", "grad shift", "grad spare"]
    assert verdicts(report) == dict.fromkeys(names, "equal")
    assert report.unexercised == ["spare"]
    assert report.invariances == ["shift"]
    first = report.pairing[0]
    assert (first.torch, first.flax, first.pattern) == ("fc.weight", "fc.kernel", "a1 a0 -> a0 a1")
    assert (report.seeds, report.samples, report.command) == (2, 11, "again")
    assert report.first_divergence is None


def test_a_fault_is_different_and_its_place_is_found(pair, tmp_path, monkeypatch):
    flax = write(tmp_path / "flax", Net("flax", gain=1.001), monkeypatch, like=pair[0])
    report = compare_dumps(pair[0], flax)
    assert report.verdict == "different"
    assert verdicts(report)["output"] == verdicts(report)["grad fc.bias"] == "different"
    assert report.first_divergence.path == ""
    assert [(node.path, node.verdict) for node in report.tree.walk()] == [("", "different"), ("fc", "equal")]


def test_a_loss_of_precision_is_confirmed_on_fresh_samples(pair, tmp_path, monkeypatch):
    flax = write(tmp_path / "flax", Net("flax", digits=16), monkeypatch, like=pair[0])
    report = compare_dumps(pair[0], flax)
    assert report.verdict == "precision"
    (failure,) = report.failures
    assert (failure.name, failure.side) == ("output", "flax")
    assert report.samples == 11 + 8


def test_a_module_that_is_not_deterministic_is_inconclusive(pair, tmp_path, monkeypatch, capsys):
    flax = write(tmp_path / "flax", Net("flax", noise=0.01), monkeypatch, like=pair[0])
    assert run(["compare-dumps", str(pair[0]), str(flax), "--json", str(tmp_path / "report.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: inconclusive: the Flax module is not deterministic: ")
    assert error.count("\n") == 1
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "inconclusive"


def test_without_float64_only_large_differences_fail(tmp_path, monkeypatch):
    torch = write(tmp_path / "torch", Net("torch", has_float64=False), monkeypatch)
    for gain, verdict in ((1.0, "equal"), (1.01, "different")):
        flax = write(tmp_path / f"flax {gain}", Net("flax", gain=gain, has_float64=False), monkeypatch, like=torch)
        report = compare_dumps(torch, flax)
        assert report.verdict == verdict
        assert "torch has no float64 here: it can't" in report.notes


def test_several_precisions_are_judged_each(tmp_path, monkeypatch):
    torch = write(tmp_path / "torch", Net("torch"), monkeypatch, dtypes=("float64", "float32"))
    flax = write(tmp_path / "flax", Net("flax"), monkeypatch, like=torch, dtypes=("float64", "float32"))
    report = compare_dumps(torch, flax)
    assert report.verdict == "equal"
    assert [one.dtype for one in report.tensors if one.name == "output"] == ["float64", "float32"]


# ---- weights


def test_without_like_differing_weights_are_listed(pair, tmp_path, monkeypatch):
    same = write(tmp_path / "same", Net("flax"), monkeypatch)
    report = compare_dumps(pair[0], same)
    assert report.verdict == "equal"
    assert {one.weights for one in report.tensors} == {"held"}
    assert (report.seeds, report.samples) == (2, 4)
    assert verdicts(report)["weight fc.weight"] == "equal"
    other = write(tmp_path / "other", Net("flax", seed=2), monkeypatch)
    report = compare_dumps(pair[0], other)
    assert report.verdict == "different"
    assert verdicts(report)["weight fc.weight"] == "different"
    assert report.message == f"the dumps hold different weights; dump the Flax side with --like {pair[0]}"


def test_a_fault_is_found_without_like_too(pair, tmp_path, monkeypatch):
    report = compare_dumps(pair[0], write(tmp_path / "flax", Net("flax", gain=1.001), monkeypatch))
    assert report.verdict == "different"
    assert report.message == ""


def test_other_inputs_without_like_are_an_error(pair, tmp_path, monkeypatch):
    flax = write(tmp_path / "flax", Net("flax"), monkeypatch, inputs=INPUTS + 1)
    with pytest.raises(ValueError, match="the dumps hold different inputs; dump the Flax side with --like "):
        compare_dumps(pair[0], flax)


def test_a_dump_like_another_draws_nothing_itself(pair, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "cotangents", None)
        patch.setattr(runner.Live, "sample", None)
        flax = write(tmp_path / "flax", Net("flax", seed=2), patch, like=pair[0])
    assert compare_dumps(pair[0], flax).verdict == "equal"


def test_other_random_numbers_without_like_are_an_error(pair, tmp_path, monkeypatch):
    drawn = sampling.cotangents
    monkeypatch.setattr(sampling, "cotangents", lambda *given: [2 * one for one in drawn(*given)])
    flax = write(tmp_path / "flax", Net("flax"), monkeypatch)
    with pytest.raises(ValueError, match="the dumps were made of different random numbers"):
        compare_dumps(pair[0], flax)


def test_no_transfer_judges_the_weights_that_each_side_holds(pair, tmp_path, monkeypatch):
    flax = write(tmp_path / "flax", Net("flax", seed=2), monkeypatch, like=pair[0], transfer=False)
    report = compare_dumps(pair[0], flax)
    assert verdicts(report)["weight fc.weight"] == "different"
    same = write(tmp_path / "same", Net("flax"), monkeypatch, like=pair[0], transfer=False)
    assert compare_dumps(pair[0], same).verdict == "equal"


def test_a_flax_dump_is_refused_with_another_torch_dump(pair, tmp_path, monkeypatch):
    other = write(tmp_path / "torch", Net("torch", seed=3), monkeypatch)
    with pytest.raises(ValueError, match="was dumped like another torch dump than"):
        compare_dumps(other, pair[1])


def test_rules_must_match_the_flax_dumps_pairing(pair):
    from attn_bridge import Rule

    names = ("fc.bias", "shift", "spare")
    right = [Rule("fc.weight", "fc.kernel", "o i -> i o"), *(Rule(name, name) for name in names)]
    assert compare_dumps(*pair, rules=right).verdict == "equal"
    wrong = [right[0], Rule("fc.bias", "shift"), Rule("shift", "fc.bias"), right[3]]
    with pytest.raises(ValueError, match="was made with another pairing than these rules say"):
        compare_dumps(*pair, rules=wrong)


# ---- the command


def test_the_command_compares_dumps_without_frameworks(pair, tmp_path):
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    options = ["--json", "--html", str(page), "--junit", str(junit)]
    done = run_python("attn_bridge", "compare-dumps", *map(str, pair), *options)
    assert (done.returncode, done.stderr) == (0, "")
    text, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    assert loaded == "[]"
    data = json.loads(text)
    assert data["verdict"] == "equal"
    assert data["command"] == f"attn-bridge compare-dumps {pair[0]} {pair[1]}"
    assert page.read_text().startswith("<!doctype html>")
    assert 'tests="6"' in junit.read_text()


@pytest.mark.parametrize("blocked", [True, False])
def test_both_commands_are_at_hand_without_a_framework(blocked):
    for command in ("dump", "compare-dumps"):
        done = run_python("attn_bridge", command, "--help", **({} if blocked else {"blocked": set()}))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "[]"


def test_the_table_is_printed_and_a_difference_is_status_1(pair, tmp_path, monkeypatch, capsys):
    flax = write(tmp_path / "flax", Net("flax", gain=1.001), monkeypatch, like=pair[0])
    assert run(["compare-dumps", str(pair[0]), str(flax)]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("different: Net (torch) and Net (Flax), 6 tensors")


# ---- hostile dumps


def test_swapped_dumps_are_one_line(pair, capsys):
    assert run(["compare-dumps", str(pair[1]), str(pair[0])]) == 2
    expected = f"error: {pair[1]} is a flax dump, not a torch one; the torch dump comes first\n"
    assert capsys.readouterr().err == expected


def change(**fields):
    def edit(folder):
        path = folder / dumps.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def edit_manifest(change_it):
    def edit(folder):
        path = folder / dumps.MANIFEST
        data = json.loads(path.read_text())
        change_it(data)
        path.write_text(json.dumps(data))

    return edit


def replace_file(folder, name, data):
    """Change a file and its digest, as someone would who knows the format."""
    (folder / name).write_bytes(data)
    edit_manifest(lambda manifest: manifest["digests"].update({name: hashlib.sha256(data).hexdigest()}))(folder)


def edit_arrays(name, change_it):
    def edit(folder):
        arrays = load_file(folder / name)
        change_it(arrays)
        replace_file(folder, name, save({key: np.ascontiguousarray(array) for key, array in arrays.items()}))

    return edit


RESULTS = "float32/0000.safetensors"


def link_out(name):
    """Return what moves a file or folder of a dump to another place, and leaves a link to it."""

    def change_it(folder):
        outside = folder.with_name(f"outside {folder.name}")
        outside.mkdir()
        (folder / name).rename(outside / "moved")
        (folder / name).symlink_to(outside / "moved")

    return change_it


def make_pipe(name):
    """Return what puts a pipe in place of a file of a dump."""

    def change_it(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change_it


HOSTILE = {
    "no folder": (shutil.rmtree, "it is no folder"),
    "no manifest": (lambda folder: (folder / "dump.json").unlink(), "it has no dump.json"),
    "not JSON": (lambda folder: (folder / "dump.json").write_text("{"), "dump.json: Expecting"),
    "not text": (lambda folder: (folder / "dump.json").write_bytes(b"\xff\xfe{"), "dump.json: "),
    "deep JSON": (lambda folder: (folder / "dump.json").write_text("[" * 100_000), "dump.json: "),
    "a list": (lambda folder: (folder / "dump.json").write_text("[]"), "it holds no object"),
    "another schema": (change(schema=99), "schema (99) must be 3"),
    "a key is missing": (edit_manifest(lambda data: data.pop("floors")), "it lacks floors"),
    "numbers for names": (change(keywords=[1]), "keywords is not what a dump holds (int in place of a text)"),
    "no outputs": (change(outputs=[]), "outputs must hold at least one name"),
    "an unknown framework": (change(framework="mxnet"), "mxnet in place of torch or flax"),
    "an unknown precision": (change(dtypes=["../../etc"]), "dtypes is not what a dump holds (../../etc in place of"),
    "an infinite floor": (change(floors={"float32": {"output": float("inf")}}), "floors is not what a dump holds"),
    "a negative size": (change(positional=-1), "positional is not what a dump holds"),
    "samples out of order": (change(samples=[["own", 1, 0, 0]]), "samples do not begin with"),
    "a sample twice": (change(samples=[["held", 0, 0, -1]] * 2), "a sample is there twice"),
    "a constant that is code": (change(constants={"x": ["import os"]}), "constants is not what a dump holds"),
    "modules that are no tree": (change(modules=[{"path": "a.b", "type": "T"}]), "modules are not a tree"),
    "a parameter of another shape": (
        edit_manifest(lambda data: data["parameters"]["fc.bias"].update(shape=[4])),
        "weights.safetensors does not hold the parameters of dump.json",
    ),
    "a parameter of another framework": (
        edit_manifest(lambda data: data["parameters"]["fc.bias"].update(framework="mxnet")),
        "mxnet in place of torch or flax",
    ),
    "names that lead out": (
        edit_manifest(lambda data: data["parameters"].update({"../../x": data["parameters"]["fc.bias"]})),
        "weights.safetensors does not hold the parameters of dump.json",
    ),
    "weights gone": (lambda folder: (folder / "weights.safetensors").unlink(), "does not exist"),
    "results gone": (lambda folder: (folder / RESULTS).unlink(), "does not exist"),
    "a manifest that links out": (link_out("dump.json"), "the file dump.json is a link out of its folder"),
    "weights that link out": (link_out("weights.safetensors"), "weights.safetensors is a link out of its folder"),
    "results that link out": (link_out(RESULTS), f"the file {RESULTS} is a link out of its folder"),
    "samples that link out": (link_out("samples"), "samples/0000.safetensors is a link out of its folder"),
    "results that are a pipe": (make_pipe(RESULTS), f"{RESULTS}: is not a file"),
    "results cut off": (lambda folder: (folder / RESULTS).write_bytes(b"123"), f"{RESULTS} is not what was written"),
    "results exchanged": (
        lambda folder: shutil.copy(folder / "float32/0001.safetensors", folder / RESULTS),
        f"{RESULTS} is not what was written",
    ),
    "no safetensors": (lambda folder: replace_file(folder, RESULTS, b"\0" * 64), "header"),
    "a gradient is missing": (
        edit_arrays(RESULTS, lambda arrays: arrays.pop("eager/weights/fc.bias")),
        "a file of it holds no eager/weights/fc.bias",
    ),
    "an output is missing": (
        edit_arrays(RESULTS, lambda arrays: arrays.pop("oracle/outputs/0")),
        "a file of it holds no oracle/outputs/0",
    ),
    "a gradient of another shape": (
        edit_arrays(RESULTS, lambda arrays: arrays.update({"eager/weights/fc.bias": np.zeros(2, np.float32)})),
        "holds float32 of shape (2,) for an array of (3,)",
    ),
    "an output of another shape": (
        edit_arrays(RESULTS, lambda arrays: arrays.update({"eager/outputs/0": np.zeros(7, np.float32)})),
        "holds float32 of shape (7,) for an output of float32 (2, 5, 3)",
    ),
    "an output of whole numbers": (
        edit_arrays(RESULTS, lambda arrays: arrays.update({"eager/outputs/0": np.zeros((2, 5, 3), np.uint8)})),
        "holds uint8 of shape (2, 5, 3) for an output of float32 (2, 5, 3)",
    ),
    "inputs are missing": (
        edit_arrays("samples/0000.safetensors", lambda arrays: arrays.clear()),
        "a file of it holds no inputs/0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("side", ["torch", "flax"])
@pytest.mark.parametrize("label", HOSTILE)
def test_a_hostile_dump_is_one_line_and_status_2(label, side, pair, tmp_path, capsys):
    paths = {"torch": tmp_path / "torch", "flax": tmp_path / "flax"}
    for name, source in zip(paths, pair, strict=True):
        shutil.copytree(source, paths[name])
    change_it, message = HOSTILE[label]
    change_it(paths[side])
    if side == "torch" and (paths["torch"] / dumps.MANIFEST).exists():
        digest = hashlib.sha256((paths["torch"] / dumps.MANIFEST).read_bytes()).hexdigest()
        change(like=digest)(paths["flax"])
    assert run(["compare-dumps", str(paths["torch"]), str(paths["flax"])]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {paths[side]} is no")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


PAIRINGS = {
    "left out": (lambda rows: rows.pop(), "does not pair spare of torch once"),
    "twice": (lambda rows: rows.append(rows[0]), "does not pair fc.weight of torch once"),
    "unknown": (lambda rows: rows[1]["first"].update(source="nowhere"), "pairs nowhere, which torch does not have"),
    "parts missing": (lambda rows: rows[1]["first"].update(cut=[0, [0]]), "does not pair fc.bias of torch once"),
    "no bijection": (lambda rows: rows[0].update(pattern="a b -> a"), "pattern is not a bijection"),
    "another shape": (
        lambda rows: rows[0].update(pattern="a b -> a b"),
        "fc.weight: the pattern does not give the shape of fc.kernel",
    ),
    "a size of an argument": (lambda rows: rows[0].update(sizes={"torch": 1}), "pairing is not what a dump holds"),
}


@pytest.mark.parametrize("label", PAIRINGS)
def test_a_hostile_pairing_is_one_line_and_status_2(label, pair, tmp_path, capsys):
    shutil.copytree(pair[1], tmp_path / "flax")
    change_it, message = PAIRINGS[label]
    edit_manifest(lambda data: change_it(data["pairing"]))(tmp_path / "flax")
    assert run(["compare-dumps", str(pair[0]), str(tmp_path / "flax")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_dump_that_breaks_off_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dumps.DumpWriter, "finish", broken)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "torch", Net("torch"), monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_large_modules_are_dumped_on_fewer_samples_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 1)
    torch = write(tmp_path / "torch", Net("torch"), monkeypatch)
    kinds = [one[0] for one in dumps.Dump(torch).manifest.samples]
    assert kinds == ["held", "own", "held", "own", "held", "held"]
    report = compare_dumps(torch, write(tmp_path / "flax", Net("flax", digits=16), monkeypatch, like=torch))
    assert report.verdict == "precision"
    assert any(note.startswith("judged on fewer samples") for note in report.notes)
    assert report.samples == 2 + 2


def test_a_folder_that_holds_something_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(tmp_path, Net("torch"), monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", Net("torch"), monkeypatch).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "note.txt"]


def test_separate_processes_get_the_options_of_their_side(monkeypatch, tmp_path):
    options = dict.fromkeys((*separate.TAKEN, *separate.COMMON, "--rules", "--no-transfer", "--first-python"))
    options |= {
        "--second-python": "other",
        "--inputs": "a.npz",
        "--second-inputs": "b.npz",
        "--seeds": 3,
        "--timeout": 9,
    }
    runs = []
    monkeypatch.setattr(
        separate, "_dump", lambda side, python, factory, out, given: runs.append((factory, python, given))
    )
    monkeypatch.setattr(replay, "compare_dumps", lambda ours, theirs, **more: (ours.name, theirs.name, more))
    report = separate.run_separately("a.py:A", "b.py:B", ("cpu", "gpu"), options, "again")
    assert report == ("first", "second", {"rules": None, "command": "again"})
    (first, python, given), (second, other, more) = runs
    assert (first, python, second, other) == ("a.py:A", None, "b.py:B", "other")
    assert {name: value for name, value in given.items() if value is not None} == {
        "--inputs": "a.npz", "--seeds": 3, "--timeout": 9, "--device": "cpu"
    }  # fmt: skip
    assert (more["--inputs"], more["--device"], more["--timeout"]) == ("b.npz", "gpu", 9)
