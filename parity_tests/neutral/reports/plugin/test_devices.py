"""Comparisons on absent and present devices, and without a framework."""

from __future__ import annotations

import re

import pytest

from .pytest_runs import GRID, ids

DEVICES = """
@pytest.mark.parity(devices=("cpu", "gpu", ("cpu", "tpu"), "tpu"))
def test_everywhere(parity):
    parity("a", "a", [1])

def test_in_the_call(parity):
    parity("a", "a", [1], device="gpu")

@pytest.mark.parity(device=("gpu", "cpu"))
def test_mixed(parity):
    parity("a", "a", [1])

@pytest.mark.parity(device="tpu")
def test_not_entered(parity):
    raise AssertionError
"""


def test_an_absent_device_is_skipped_with_the_reason(run):
    done = run(DEVICES, "-v", "-rs", COLUMNS="300")
    assert done.status == 0
    assert "test_everywhere[cpu] PASSED" in done.out
    assert "6 skipped" in done.out
    reasons = re.findall(r"^SKIPPED \[\d\] .*?: (no .*)", done.out, re.MULTILINE)
    assert set(reasons) == {
        "no gpu: torch.cuda.is_available() is False",
        "no tpu: jax says: Unknown backend: 'tpu' requested, but no platforms are present",
        "no tpu: torch has none; name a pair for torch and Flax, such as cpu,tpu",
    }


def test_a_present_device_is_used(run):
    done = run(DEVICES, "-v", gpu=True)
    assert [asked["device"] for asked in done.asked] == ["cpu", "gpu", "gpu", ["gpu", "cpu"]]
    assert "test_mixed[gpu,cpu] PASSED" in done.out
    assert "\nparity: 4 comparisons, 4 equal\n" in done.out


def test_the_command_line_takes_pairs_of_devices(run):
    done = run("def test_it(parity): parity('a', 'a', [1])", "-v", "--parity-device=cpu,gpu", gpu=True)
    assert ids(done) == ["test_it[cpu,gpu]"]
    assert done.asked[0]["device"] == ["cpu", "gpu"]


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (["torch"], "torch not installed: pip install 'attn-bridge[torch]'"),
        (["jax", "flax"], "jax, flax not installed: pip install 'attn-bridge[jax]'"),
        (["torch", "jax", "flax"], "torch, jax, flax not installed: pip install 'attn-bridge[torch,jax]'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_missing_framework_skips_and_names_the_extra(run, without, reason):
    done = run(GRID, "-rs", without=without, COLUMNS="300")
    assert done.status == 0
    assert "4 skipped" in done.out
    assert reason in done.out
