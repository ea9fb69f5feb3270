"""Settings of torch that need a word of their own: its two APIs, inheritance, oneDNN, what a GPU reads, effects."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch

from attn_parity.frameworks.torch import precision
from attn_parity.settings.doctor import examine
from attn_parity.settings.precision import hold_safe, product_errors, rows_of

from ...contract.judge.torch_precision import ON_CPU, SWITCHES, UNSAFE, assert_safe, row_of, values


@pytest.fixture(autouse=True)
def _leave_no_trace():
    before = values()
    yield
    assert values() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", sorted(set(UNSAFE) - ON_CPU - {"sdpa_kernel"}))
def test_gpu_only_switches_have_no_effect_on_a_cpu(name):
    with SWITCHES[name].hold(UNSAFE[name]):
        assert row_of(name).state == "no effect here"
        assert examine().passed


def test_the_fused_kernels_of_attention_are_worth_a_note():
    assert (row_of("sdpa_kernel").value, row_of("sdpa_kernel").state) == ("any", "note")
    with hold_safe(precision):
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        assert row_of("sdpa_kernel").state == "safe"


def test_torch_defaults_on_gpus_are_unsafe_until_strict(monkeypatch):
    monkeypatch.setattr(precision, "kinds", lambda: {"cpu", "gpu"})
    unsafe = {row.name for row in rows_of("torch", precision) if row.state == "unsafe"}
    assert {"cudnn.conv.fp32_precision", "cuda.matmul.allow_bf16_reduced_precision_reduction"} <= unsafe
    with hold_safe(precision):
        assert {row.name for row in rows_of("torch", precision) if row.state == "unsafe"} == set()


def test_strict_takes_back_what_is_changed_inside():
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_safe(precision))
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        with hold_safe(precision):
            assert_safe()
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"


@pytest.mark.parametrize("wish", ["high", "medium"])
@pytest.mark.parametrize("newer", [None, "ieee", "tf32", "none"])
def test_both_apis_at_once_are_read_and_restored(wish, newer):
    with SWITCHES["cuda.matmul.fp32_precision"].hold("none"), SWITCHES["mkldnn.matmul.fp32_precision"].hold("none"):
        before = values()
        torch.set_float32_matmul_precision(wish)
        try:
            if newer:
                torch.backends.cuda.matmul.fp32_precision = newer
            mixed = values()
            with hold_safe(precision):
                assert_safe()
                assert torch.get_float32_matmul_precision() == "highest"
                assert not torch.backends.cuda.matmul.allow_tf32
            assert values() == mixed
        finally:
            torch.set_float32_matmul_precision("highest")
            precision._set_fp32("cuda", "matmul", "none")
            precision._set_fp32("mkldnn", "matmul", "none")
        assert values() == before


def test_the_newer_api_makes_the_older_name_unreadable():
    with SWITCHES["cuda.matmul.fp32_precision"].hold("tf32"):
        row = row_of("float32_matmul_precision")
        assert (row.value, row.state) == (precision.MIXED, "safe")
        with SWITCHES["float32_matmul_precision"].hold("high"):
            assert torch.get_float32_matmul_precision() == "high"
        assert row_of("float32_matmul_precision").value == precision.MIXED


def test_settings_go_on_inheriting_after_strict():
    program = """
import torch
from attn_parity.frameworks.torch import precision
from attn_parity.settings.precision import hold_safe

def follow():
    found = []
    for value in ("ieee", "tf32", "bf16"):
        torch.backends.fp32_precision = value
        found.append([switch.read() for switch in precision.SWITCHES if "fp32_precision" in switch.name])
    torch.backends.fp32_precision = "none"
    return found

never = follow()
with hold_safe(precision):
    pass
assert follow() == never, (follow(), never)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_split_that_was_switched_off_stays_off():
    products = torch.backends.cuda.matmul
    products.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        with hold_safe(precision):
            assert not products.allow_fp16_reduced_precision_reduction_split_k
        assert not products.allow_fp16_reduced_precision_reduction_split_k
    finally:
        products.allow_fp16_reduced_precision_reduction = (True, True)


def test_strict_leaves_users_choices_unchanged():
    torch.set_default_dtype(torch.float64)
    try:
        with hold_safe(precision):
            assert torch.get_default_dtype() == torch.float64
        assert row_of("default_dtype").state == "note"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("value", "state"), [("BF16", "unsafe"), ("ANY", "unsafe"), ("STRICT", "safe"), ("", "safe")])
@pytest.mark.parametrize("prefix", ["ONEDNN", "DNNL"])
def test_the_environment_of_onednn_is_read(prefix, value, state, monkeypatch):
    monkeypatch.setenv(f"{prefix}_DEFAULT_FPMATH_MODE", value)
    assert row_of("ONEDNN_DEFAULT_FPMATH_MODE").state == state
    assert row_of("ONEDNN_DEFAULT_FPMATH_MODE").advice.startswith("unset ONEDNN_DEFAULT_FPMATH_MODE")


# ---- effects that can be measured


def test_a_float32_product_is_float32_and_autocast_is_not():
    assert product_errors(precision)["cpu"] < 2e-6
    with torch.autocast("cpu"):
        assert product_errors(precision)["cpu"] > 1e-4
        assert any("float32 products on cpu are off by" in line for line in examine().unsafe)
        with hold_safe(precision):
            assert product_errors(precision)["cpu"] < 2e-6
        assert torch.is_autocast_enabled("cpu")


def test_strict_keeps_onednn_products_in_float32():
    with SWITCHES["mkldnn.matmul.fp32_precision"].hold("bf16"):
        loose = product_errors(precision)["cpu"]
        with hold_safe(precision):
            held = product_errors(precision)["cpu"]
    if loose < 1e-4:
        pytest.skip("this CPU has no bfloat16 products to run float32 ones in")
    assert held < 2e-6


def test_denormal_numbers_survive_inside_strict():
    tiny = torch.full((1,), 1.5e-38)
    with SWITCHES["flush_denormal"].hold(True):
        assert (tiny * 0.5).item() == 0.0
        with hold_safe(precision):
            assert (tiny * 0.5).item() > 0.0
        assert (tiny * 0.5).item() == 0.0


def test_devices_and_versions_name_what_is_here():
    assert precision.devices()[0].startswith("cpu, ")
    assert precision.versions()["torch"] == torch.__version__
    assert all(isinstance(version, str) for version in precision.versions().values())
