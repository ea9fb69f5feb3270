"""The kernel for TPUs, interpreted: against the reference in float64, its limits, and its program for a TPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import tpu_flash

from ...support.calls import cover
from .attention_calls import CASES, FLOAT32, arrays, draw, hold, program

LEFT_TO_OTHERS = {
    "per head": "arrays of a mask for keys alone",
    "per head, all keys": "arrays of a mask for keys alone",
    "either mask": "joins arrays",
    **{label: "takes no bias" for label, (_, options) in CASES.items() if "bias" in options(0)},
}


@pytest.fixture
def interpreted():
    program.cache_clear()
    with tpu_flash.interpreted():
        yield
    program.cache_clear()


SERVED = [one for one in CASES if one not in LEFT_TO_OTHERS]
BLOCKS = (
    *("no mask, odd sizes", "causal, more keys", "causal, fewer keys", "causal with padding", "all hidden"),
    *("wider value", "one key head", "window", "prefix", "documents in any order, with padding", "sinks"),
)
"""Cases that differ in which blocks there are, or in what is done to their scores."""


@cover.some("label", SERVED, BLOCKS)
def test_it_matches_the_reference(label, interpreted):
    hold(label, 0, "float32", FLOAT32, "tpu_flash")


@cover.some("label", ["causal with padding", "window", "sinks", "documents"], ["causal with padding", "sinks"])
def test_it_matches_the_reference_in_bfloat16(label, interpreted):
    hold(label, 1, "bfloat16", float(jnp.finfo("bfloat16").eps), "tpu_flash")


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_large_and_small_blocks_agree(softcap, interpreted, monkeypatch):
    inputs = arrays(queries=1100, keys=1100, batch=1, heads=2, key_heads=1)
    options = {"mask": masks.chunked(300), "softcap": softcap, "implementation": "tpu_flash"}
    large = functional.dot_product_attention(*inputs, **options)
    monkeypatch.setattr(tpu_flash, "LARGE_BLOCK", 128)
    small = functional.dot_product_attention(*inputs, **options)
    assert not np.array_equal(large, small), "both were computed by the same blocks"
    np.testing.assert_allclose(large, small, rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", LEFT_TO_OTHERS)
def test_it_says_what_it_leaves_to_others(label, interpreted):
    with pytest.raises(NotImplementedError, match=LEFT_TO_OTHERS[label]):
        hold(label, 0, "float32", FLOAT32, "tpu_flash")


def test_documents_of_other_numbers_than_the_keys_have_see_nothing(interpreted):
    inputs = arrays(queries=5, keys=3, batch=1)
    ids = np.array([[7, -(2**31), 7, 2**31 - 1, 9]], np.int32)  # of the keys: 7, the least, 7
    options = {"mask": masks.documents(ids)}
    found, want = (
        functional.dot_product_attention(*inputs, **options, implementation=name) for name in ("tpu_flash", "reference")
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert not np.asarray(found)[0, 3:].any()
    assert np.asarray(found)[0, :3].all()


def test_it_is_picked_on_a_tpu_alone(monkeypatch):
    inputs = arrays(queries=200, keys=200)
    reasons = functional.explain(*inputs, mask=masks.causal())
    assert reasons["tpu_flash"] == "it needs a TPU, and JAX runs on cpu"
    with tpu_flash.interpreted():
        assert functional.explain(*inputs)["tpu_flash"] == "it is interpreted, which is for checks"
    monkeypatch.setattr(tpu_flash, "unavailable", lambda: None)
    assert functional.explain(*inputs, mask=masks.causal())["tpu_flash"] is None
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert "4 devices" in str(functional.explain(*inputs)["tpu_flash"])


# ---- programs for devices that are not here: exported, as far as they are lowered before a device compiles them


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"queries": 300, "keys": 300, "width": 64}, {"mask": masks.causal()}),
        ({"queries": 2000, "keys": 2000, "width": 80}, {"mask": masks.sliding_window(100), "softcap": 3.0}),
        ({"queries": 150, "keys": 150, "width": 128}, {"mask": masks.documents(np.arange(150) // 40)}),
        ({"queries": 150, "keys": 150}, {"mask": masks.padding([40, 150]), "sinks": draw(4, seed=3)}),
    ],
    ids=["causal", "window, soft cap", "documents", "padding, sinks"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_lowered_for_a_tpu_with_gradients(sizes, options, dtype, monkeypatch):
    monkeypatch.setattr(tpu_flash, "unavailable", lambda: None)
    options = {key: jnp.asarray(value, dtype) if key == "sinks" else value for key, value in options.items()}
    inputs = [one.astype(dtype) for one in arrays(**sizes)]

    def total(*operands: jax.Array) -> jax.Array:
        return functional.dot_product_attention(*operands, **options, implementation="tpu_flash").sum()

    lowered = export.export(jax.jit(jax.grad(total, (0, 1, 2))), platforms=["tpu"])(*inputs)
    assert lowered.mlir_module().count("tpu_custom_call") >= 3  # forward, and backward of the query and of the rest


def test_cudnn_is_lowered_for_a_gpu_with_gradients(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    from jax_attn.implementations import cudnn

    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91300)  # asks a library that is not here
    monkeypatch.setattr(of_jax, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(of_jax, "is_cuda_compute_capability_equal", lambda capability: False)
    for mask in (masks.causal(), masks.sliding_window(20), None):
        inputs = [one.astype("bfloat16") for one in arrays(width=64, value_width=64, key_heads=2)]

        def total(*operands: jax.Array, mask: masks.Mask | None = mask) -> jax.Array:
            return functional.dot_product_attention(*operands, mask=mask, implementation="cudnn").sum()

        lowered = export.export(
            jax.jit(jax.grad(total, (0, 1, 2))), platforms=["cuda"], disabled_checks=[
                export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax"),
                export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmaxBackward"),
            ],
        )(*inputs)  # fmt: skip
        text = lowered.mlir_module()
        assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= set(re.findall(r"__cudnn\$\w+", text))
        assert ("CAUSAL" in text) == (mask is not None), "the mask is the kernel's"
        assert rf"sliding_window_length\22: {20 if mask == masks.sliding_window(20) else 0}," in text
