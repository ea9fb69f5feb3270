"""Every rendering shows allowed differences and changes since a baseline."""

import dataclasses

from attn_parity.rendering.html import as_html
from attn_parity.rendering.json import as_json
from attn_parity.rendering.junit import as_junit
from attn_parity.results.findings import Allowance
from attn_parity.results.report import Report
from parity_tests.support.judging.html_outline import Outline
from parity_tests.support.judging.reports import different_report, equal_report, large_report
from parity_tests.support.processes.work import count_calls

from .renderings import parsed, printed


def allowed_report() -> Report:
    report = different_report()
    report.tensors[3] = dataclasses.replace(report.tensors[3], allowed="head")
    return dataclasses.replace(report, allowed=[Allowance("head", "tied on purpose", ("grad head.weight",))])


def test_every_rendering_shows_allowances_with_reasons():
    report = allowed_report()
    line = "allowed: head: tied on purpose"
    assert line in str(report)
    assert line in printed(report, full=True)
    assert line in report.explain()
    assert line in Outline(as_html(report)).words
    cases = {case.get("name"): case for case in parsed(report).iter("testcase")}
    assert [one.tag for one in cases["grad head.weight"]] == ["skipped"]
    assert cases["grad head.weight"][0].get("message") == line
    assert (parsed(report)[0].get("skipped"), parsed(report)[0].get("failures")) == ("1", "2")
    covers = as_json(report)["allowed"]
    assert covers == [{"path": "head", "reason": "tied on purpose", "covers": ["grad head.weight"], "known": True}]
    assert "3 of 54 tensors are not equal" in str(report)
    assert "grad head.weight" not in str(report).partition("where;")[0].partition("tensors are not equal")[2]


def test_an_unused_allowance_is_shown():
    report = dataclasses.replace(equal_report(), allowed=[Allowance("gone", "it was")])
    assert "allowed: gone: it was (nothing there differs)" in str(report)


def test_every_rendering_shows_changes_since_a_baseline():
    before, now = equal_report(), different_report()
    report = dataclasses.replace(now, changes=now.changes_since(before))
    line = "since the baseline: verdict equal -> different; 4 newly failing (output, grad x, grad head.weight, ...)"
    flat = " ".join(str(report).split())
    assert line[:70] in flat
    for shown in (printed(report, 130, full=True), Outline(as_html(report)).words):
        assert line in shown
    assert as_json(report)["changes"]["verdict"] == ["equal", "different"]


def test_rendering_work_grows_linearly_with_the_tensors():
    def render(report):
        return as_html(report), as_json(report), as_junit(report), printed(report)

    report, small = large_report(), large_report(100)
    assert len(report.tensors) == len(report.pictures) == 1000
    render(small)  # what is imported and compiled once
    assert count_calls(lambda: render(report)) < 11 * count_calls(lambda: render(small))
    page, data, xml, shown = render(report)
    assert page.count('<tr><th scope="row"><span class="name">grad') == 1000 + 5
    assert len(data["tensors"]) == xml.count("<testcase") == 1000
    assert "10 of 1000 tensors are not equal" in shown
