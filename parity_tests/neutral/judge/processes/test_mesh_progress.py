"""How far the processes of a mesh are, as they report it through a folder."""

from __future__ import annotations

import pytest

from attn_parity.check.mesh import processes, run


def task(folder, rank=0, framework="torch"):
    return processes.MeshTask(framework, "torch", (("tensor", 2),), folder, rank)


def test_first_process_reports_each_step_once(tmp_path):
    calls = []
    with processes.told(tmp_path, lambda *step: calls.append(step), 3, 9):
        processes.tell_done(task(tmp_path), "torch A")
        processes.tell_done(task(tmp_path, rank=1), "torch A")
        processes.tell_done(task(tmp_path), "torch B")
    assert calls == [("torch A", 4, 9), ("torch B", 5, 9)]


def test_steps_are_handed_on_while_the_processes_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_POLL", 0.001)
    seen = processes.threading.Event()
    with processes.told(tmp_path, lambda *step: seen.set(), 0, 1):
        processes.tell_done(task(tmp_path), "torch A")
        assert seen.wait(600)


def test_nothing_is_watched_where_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.threading, "Thread", None)
    with processes.told(tmp_path, None, 0, 1):
        processes.tell_done(task(tmp_path), "torch A")


@pytest.mark.parametrize(("frameworks", "starts"), [(("torch", "flax"), [2, 1]), (("flax",), [1])])
def test_check_of_a_mesh_counts_the_cases_of_all_frameworks(monkeypatch, frameworks, starts):
    calls, asked = [], []

    def results_of(function, tasks):
        asked.append(len(tasks))
        for case in cases:
            processes.tell_done(tasks[0], f"{tasks[0].framework} {case.name}")
        return []

    variants = ("GPTModel", "MultiHeadAttention")
    cases = run.mesh_cases(variants)
    monkeypatch.setattr(run, "chosen_frameworks", lambda wanted: frameworks)
    monkeypatch.setattr(run, "installed", lambda: ("torch", "flax"))
    monkeypatch.setattr(run, "results_of", results_of)
    report = run.check_mesh({"tensor": 2}, variants, progress=lambda *step: calls.append(step))
    total = len(cases) * len(frameworks)
    names = [f"{framework} {case.name}" for framework in frameworks for case in cases]
    assert calls == [(name, number + 1, total) for number, name in enumerate(names)]
    assert asked == starts
    assert not report.rows
