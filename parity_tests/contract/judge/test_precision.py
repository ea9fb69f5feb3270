"""Every precision switch of a framework: seen when unsafe, safe inside `strict`, and back afterwards as it was."""

from __future__ import annotations

import functools

import pytest

from attn_bridge.parity import strict as strict_for_both
from attn_parity.settings import precision as joint
from attn_parity.settings.doctor import examine

from .. import backends

ADAPTERS = backends.adapters("precision", __package__)
backend = backends.fixture(ADAPTERS)


class PlannedError(Exception):
    """Raised by a test itself."""


@pytest.fixture(autouse=True)
def _leave_no_trace(backend):
    before = backend.values()
    yield
    assert backend.values() == before


def test_every_setting_exists_and_has_a_name_of_its_own(backend):
    settings = backend.precision.SWITCHES
    assert all(switch.exists for switch in settings)
    assert len(backend.SWITCHES) == len(settings) == len(joint.rows_of("", backend.precision))
    assert {name for name, switch in backend.SWITCHES.items() if switch.hold} == set(backend.UNSAFE)


def test_a_setting_that_this_version_lacks_is_not_listed(backend, monkeypatch):
    monkeypatch.setattr(backend.precision, "SWITCHES", (backend.LACKING, *backend.precision.SWITCHES))
    assert backend.LACKING.name not in {row.name for row in joint.rows_of("", backend.precision)}
    with joint.hold_safe(backend.precision):
        pass


@pytest.mark.parametrize("of_both", [False, True], ids=["own", "both"])
@backends.each(ADAPTERS, "name", "UNSAFE")
def test_an_unsafe_value_is_seen_held_safe_and_restored(backend, name, of_both):
    strict = strict_for_both if of_both else functools.partial(joint.hold_safe, backend.precision)
    with backend.set_unsafe(name):
        row = backend.row_of(name)
        assert row.value == str(backend.UNSAFE[name])
        assert row.state in backend.states(name)
        assert "attn_bridge.parity.strict()" in row.advice
        before = backend.values()
        with strict():
            assert backend.row_of(name).state == "safe"
            backend.assert_safe()
            with strict():
                backend.assert_safe()
            backend.assert_safe()
        assert backend.values() == before
        with pytest.raises(PlannedError), strict():
            raise PlannedError
        assert backend.values() == before


def test_strict_alone_changes_nothing_for_good(backend):
    before = backend.values()
    with joint.hold_safe(backend.precision):
        backend.assert_safe()
    assert backend.values() == before


@backends.each(ADAPTERS, "name", "ON_CPU")
def test_unsafe_cpu_settings_fail_the_doctor(backend, name):
    value = backend.UNSAFE[name]
    with backend.SWITCHES[name].hold(value):
        diagnosis = examine()
        assert not diagnosis.passed
        assert any(line.startswith(f"unsafe: {backend.LABEL} {name} is {value}: ") for line in diagnosis.unsafe)
        assert joint.record()[f"{backend.LABEL} {name}"] == str(value)
