"""Random faults: where one can be planted, what it changes, which tests are asked, and what their answers mean."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from parity_tests.power import __main__ as command
from parity_tests.power import drawing, lanes, ordering, planting, trial

SOURCE = '''\
"""What 1 + 1 is."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    SIZE = 3
__all__ = ["a"[0:1]]
Kind = int | None


def a(x: Literal[1] = 2, *, deep: bool = True) -> "list[0]":
    """Return 1 of 2."""
    größe = x * 1.5  # 3 + 4
    if größe is not None and not deep:
        raise ValueError(f"{x + 1} must be" + "3", 4)
    warnings.warn("much", stacklevel=2)
    assert x > 3
    while x < 4:
        x = -(x)
    return [y for y in zip(a, b, strict=True) if y] if x else cast("int", 5)
'''

SITES = [
    ("constant", 11, "2", "3"),
    ("constant", 11, "True", "False"),
    ("operator", 13, "*", "/"),
    ("constant", 13, "1.5", "1.515"),
    ("branch", 14, "größe is not None and not deep", "False"),
    ("branch", 14, "größe is not None and not deep", "True"),
    ("operator", 14, "is not", "is"),
    ("operator", 14, "and", "or"),
    ("operator", 14, "not ", ""),
    ("branch", 18, "x < 4", "False"),
    ("operator", 18, "<", "<="),
    ("constant", 18, "4", "5"),
    ("operator", 19, "-", ""),
    ("branch", 20, "y", "False"),
    ("branch", 20, "y", "True"),
    ("branch", 20, "x", "False"),
    ("branch", 20, "x", "True"),
]


EXITS = {
    (11, "2"): 'def a(x: Literal[1] = !, *, deep: bool = True) -> "list[0]":',
    (11, "True"): 'def a(x: Literal[1] = 2, *, deep: bool = !) -> "list[0]":',
    (13, "*"): "    größe = !  # 3 + 4",
    (13, "1.5"): "    größe = x * !  # 3 + 4",
    (14, "größe is not None and not deep"): "    if !:",
    (14, "is not"): "    if ! and not deep:",
    (14, "and"): "    if !:",
    (14, "not "): "    if größe is not None and !:",
    (18, "x < 4"): "    while !:",
    (18, "<"): "    while !:",
    (18, "4"): "    while x < !:",
    (19, "-"): "        x = !",
    (20, "y"): '    return [y for y in zip(a, b, strict=True) if !] if x else cast("int", 5)',
    (20, "x"): '    return [y for y in zip(a, b, strict=True) if y] if ! else cast("int", 5)',
}


def test_sites_are_expressions_that_change_a_result():
    assert [(site.kind, site.line, site.before, site.after) for site in planting.sites(SOURCE)] == SITES


@pytest.mark.parametrize("site", planting.sites(SOURCE), ids=lambda site: f"{site.line}-{site.before}-{site.after}")
def test_a_fault_changes_its_line_alone(site):
    changed = site.plant(SOURCE)
    different = [
        number
        for number, (old, new) in enumerate(zip(SOURCE.splitlines(), changed.splitlines(), strict=True), 1)
        if old != new
    ]
    assert different == [site.line]
    compile(changed, "changed", "exec")
    with pytest.raises(ValueError, match=r"^text at \d+ must be "):
        site.plant(changed[1:])


@pytest.mark.parametrize("site", planting.sites(SOURCE), ids=lambda site: f"{site.line}-{site.before}-{site.after}")
def test_the_expression_around_a_site_ends_the_program(site):
    changed = planting.plant_exit(SOURCE, site)
    compile(changed, "changed", "exec")
    (line,) = [new for new, old in zip(changed.splitlines(), SOURCE.splitlines(), strict=True) if new != old]
    assert line == EXITS[site.line, site.before].replace("!", "exit('reached')")


@pytest.fixture
def tree(tmp_path):
    for package in drawing.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "one.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_a_seed_draws_the_same_faults_for_every_number(tree):
    faults = drawing.draw(tree, 12, 3)
    assert drawing.draw(tree, 5, 3) == faults[:5]
    assert drawing.draw(tree, 12, 4) != faults
    assert [fault.number for fault in faults] == list(range(1, 13))
    assert len({(fault.path, fault.site.start) for fault in faults}) == 12
    assert {fault.site.kind for fault in faults} == set(planting.KINDS)


def test_faults_are_where_the_lines_are(tree):
    (tree / "torch_attn" / "long.py").write_text("x = [\n" + "    1 + 1,\n" * 400 + "]\n")
    paths = [fault.path for fault in drawing.draw(tree, 60, 1)]
    assert 40 < paths.count("torch_attn/long.py") < 60


def test_a_fault_is_found_again_by_the_text_of_its_line(tree):
    for fault in drawing.draw(tree, 12, 3):
        moved = drawing.find_again(fault, "x = 1\n\n" + SOURCE)
        assert (
            dataclasses.replace(moved, start=fault.site.start, end=fault.site.end, line=fault.site.line) == fault.site
        )
        assert drawing.find_again(fault, SOURCE) == fault.site
        assert drawing.find_again(fault, "x = 1\n") is None
        assert drawing.find_again(fault, SOURCE.replace("x", "z")) is None or "x" not in fault.text


def test_tests_come_by_distance_then_by_words(tmp_path):
    edges = {
        "attn_bridge.masks.positions": {"attn_bridge.masks", "parity_tests.twins.test_far"},
        "attn_bridge.masks": {
            "parity_tests.twins.test_a",
            "parity_tests.neutral.test_b",
            "parity_tests.twins.test_masks",
        },
        "parity_tests.twins.test_far": set(),
        "parity_tests.twins.test_a": set(),
        "parity_tests.neutral.test_b": {"parity_tests.support.not_a_test"},
        "parity_tests.support.not_a_test": set(),
        "parity_tests.twins.test_masks": set(),
    }
    for module in edges:
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert ordering.by_distance("attn_bridge/masks/positions.py", edges, tmp_path) == [
        "parity_tests/twins/test_masks.py",
        "parity_tests/twins/test_far.py",
        "parity_tests/neutral/test_b.py",
        "parity_tests/twins/test_a.py",
    ]


def test_files_go_to_the_lanes_of_their_folder(tmp_path):
    texts = {
        "parity_tests/neutral/test_a.py": "",
        "parity_tests/contract/test_b.py": "",
        "parity_tests/twins/test_c.py": "@pytest.mark.optimized",
        "parity_tests/tours/test_d.py": "",
        "parity_tests/twins/places/test_e.py": "",
        "parity_tests/jax_side/test_f.py": "",
        "parity_tests/neutral/command_line/test_cli.py": "",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    a, b, c, _, _, f, cli = texts
    names = [(batch.lane.name, batch.tests) for batch in lanes.batches(texts, tmp_path)]
    assert names == [
        ("neutral", (a, cli)),
        ("torch", (b, cli)),
        ("jax", (b, f, cli)),
        ("both", (c, cli)),
        ("optimized", (c,)),
    ]
    assert [batch.lane.name for batch in lanes.batches([f, a], tmp_path)] == ["jax", "neutral"]

    costs = {a: 3, b: 40, c: 5}
    assert lanes.in_budget(texts, tmp_path, costs, 20, done=()) == [a, c, f]  # `f` is assumed to need 10
    assert lanes.in_budget(texts, tmp_path, costs, 20, done={c}) == [a, f]
    assert lanes.in_budget(texts, tmp_path, costs, 43, done={a}) == [b]


def test_a_lane_runs_as_the_makefile_runs_it():
    by_name = {lane.name: lane for lane in lanes.LANES}
    command = by_name["torch"].command(["x.py"])
    assert command[-5:] == ["--without", "jax", "-m", "not optimized and not full", "x.py"]
    assert by_name["optimized"].command(["x.py"])[-3:] == ["-m", "optimized and not full", "x.py"]
    assert by_name["both"].environment({"XLA_FLAGS": "a"}) == {"XLA_FLAGS": "a"}
    assert by_name["optimized"].environment({"XLA_FLAGS": "a"}) == {"XLA_FLAGS": ""}


class Answers(trial.Workshop):
    """A workshop whose runs are answered from lists: with the fault, with its expression as an exit, and without."""

    def answer(self, planted, exits, clean):
        self.planted, self.exits, self.clean, self.ran = list(planted), list(exits), list(clean), []
        self._ordered = {"attn_bridge/one.py": ["parity_tests/neutral/test_a.py", "parity_tests/jax_side/test_b.py"]}
        return self

    def _run(self, lane, tests, *, skipped):
        text = (self.root / "attn_bridge" / "one.py").read_text(encoding="utf-8")
        answers = self.clean if text == SOURCE else self.exits if "exit('reached')" in text else self.planted
        self.ran += tests
        self._used += 2.0
        return trial._Run(*answers.pop(0))


GREEN, RED, SLOW = (0, [], 1.0), (1, ["test_a.py::test_x"], 1.0), (None, [], 60.0)
BROKEN = (3, [], 1.0)
OUTCOMES = {
    "red in the first file": ([RED], [], [GREEN], "caught", "test_a.py::test_x"),
    "red in the second file": ([GREEN, RED], [], [GREEN], "caught", "test_a.py::test_x"),
    "green, reached": ([GREEN, GREEN], [GREEN, RED], [GREEN], "survived", "test_a.py::test_x"),
    "green, not reached": ([GREEN, GREEN], [GREEN, GREEN], [], "unreached", ""),
    "no test selected": ([(5, [], 1.0), GREEN], [GREEN, GREEN], [], "unreached", ""),
    "red without the fault too": ([RED, GREEN, GREEN], [GREEN, GREEN], [RED], "unreached", ""),
    "pytest fails without the fault too": ([BROKEN] * 2 + [GREEN], [GREEN, GREEN], [BROKEN], "unreached", ""),
    "endless": ([SLOW], [], [GREEN], "timeout", "neutral: parity_tests/neutral/test_a.py"),
    "slow without the fault too": ([SLOW, GREEN], [], [SLOW], "undecided", ""),
    "nearly as slow without the fault": ([SLOW, GREEN], [], [(0, [], 56.0)], "undecided", ""),
    "pytest itself fails": ([BROKEN], [], [GREEN], "caught", "pytest itself, status 3"),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for name in ("attn_bridge/one.py", "parity_tests/neutral/test_a.py", "parity_tests/jax_side/test_b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    (root / "attn_bridge/one.py").write_text(SOURCE, encoding="utf-8")  # not committed
    return root


@pytest.mark.parametrize("case", OUTCOMES)
def test_the_outcome_of_a_fault(case, checkout):
    planted, exits, clean, outcome, test = OUTCOMES[case]
    (fault,) = drawing.draw(checkout, 1, 1, ("attn_bridge",))
    with Answers.of(checkout, budget=60, limit=60) as workshop:
        result = workshop.answer(planted, exits, clean).try_fault(fault)
        assert (workshop.root / "attn_bridge/one.py").read_text(encoding="utf-8") == SOURCE
        assert workshop.planted == workshop.exits == workshop.clean == []
    assert (result.outcome, result.test) == (outcome, test)
    assert result.seconds == 2.0 * (len(planted) + len(exits) + len(clean))
    assert not workshop.root.exists()
    assert (checkout / "attn_bridge/one.py").read_text(encoding="utf-8") == SOURCE


def test_a_line_that_a_checkout_lacks_is_absent(checkout):
    (fault,) = drawing.draw(checkout, 1, 1, ("attn_bridge",))
    with Answers.of(checkout, budget=60, limit=60) as workshop:
        lost = dataclasses.replace(fault, text="    return 7")
        assert workshop.answer([], [], []).try_fault(lost).outcome == "absent"


def test_a_later_run_takes_the_files_that_did_not_run(checkout):
    (fault,) = drawing.draw(checkout, 1, 1, ("attn_bridge",))
    near, far = "parity_tests/neutral/test_a.py", "parity_tests/jax_side/test_b.py"
    with Answers.of(checkout, budget=10, limit=60) as workshop:
        first = workshop.answer([GREEN], [RED], [GREEN]).try_fault(fault)
        assert (first.outcome, list(first.files), set(workshop.ran)) == (
            "survived",
            [near],
            {near, "test_a.py::test_x"},
        )
        workshop.budget = 20
        second = workshop.answer([GREEN], [], []).try_fault(fault, first)
        assert (second.outcome, second.test, workshop.ran) == ("survived", "test_a.py::test_x", [far])
        assert list(second.files) == [near, far]
        assert second.seconds == first.seconds + 2.0
        (workshop.root / near).write_text("# changed\n")
        third = workshop.answer([RED], [], [GREEN]).try_fault(fault, second)
        assert (third.outcome, workshop.ran[0]) == ("caught", near)


def test_the_command_goes_on_from_its_state(checkout, tmp_path, monkeypatch, capsys):
    tried = []

    def try_fault(self, fault, earlier):
        tried.append(fault.number)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return trial.Result("survived" if fault.number == 1 else "caught", "test_x", 1.5, {"test_a.py": "0"})

    monkeypatch.setattr(trial.Workshop, "try_fault", try_fault)
    monkeypatch.setattr(trial.Workshop, "order_tests", lambda self, paths: None)
    monkeypatch.setattr(command, "ROOT", checkout)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    words = ["--faults", "3", "--packages", "attn_bridge", "--state", str(tmp_path / "new" / "state.json")]
    with pytest.raises(KeyboardInterrupt):
        command.main(words)
    assert command.main(words) == 1
    assert tried == [1, 2, 3, 1, 3]
    assert "caught 2 of 3: survived 1, caught 2" in capsys.readouterr().out
    assert command.main([*words, "--list"]) == 0
    assert "2 caught         2 s   1 files  attn_bridge/one.py:" in capsys.readouterr().out
