"""Limits of implementations, and the choice among them."""

from __future__ import annotations

import pytest
import torch

import attn_bridge
from attn_bridge import masks
from torch_attn import functional, implementations

from .attention_calls import Options, operands

LIMITS: dict[str, tuple[str, Options, str]] = {
    "sdpa weights": ("sdpa", {"return_weights": True}, "it does not return the weights"),
    "sdpa softcap": ("sdpa", {"softcap": 2.0}, "it has no softcap"),
    "sdpa sinks": ("sdpa", {"sinks": torch.zeros(4)}, "it has no sinks"),
    "sdpa generator": (
        "sdpa",
        {"dropout": 0.1, "rng": torch.Generator()},
        "its dropout draws from the global generator only",
    ),
    "windowed no mask": ("windowed", {}, "the mask is no window"),
    "windowed causal": ("windowed", {"mask": masks.causal()}, "the mask is no window"),
    "windowed bias": ("windowed", {"mask": masks.sliding_window(2), "bias": torch.zeros(1)}, "it takes no bias"),
    "windowed dropout": ("windowed", {"mask": masks.sliding_window(2), "dropout": 0.1}, "it has no dropout"),
    "windowed array": (
        "windowed",
        {"mask": masks.sliding_window(2) & torch.ones(1, 1, 60, 60, dtype=torch.bool)},
        "it takes no mask array of queries or heads",
    ),
    "windowed wide": (
        "windowed",
        {"mask": masks.sliding_window(30)},
        "the window is not smaller than the keys",
    ),
    "windowed nothing": ("windowed", {"mask": masks.sliding_window(2).offset(-60)}, "no query sees a key"),
    "windowed softcap": ("windowed", {"mask": masks.sliding_window(2), "softcap": 2.0}, "it has no softcap"),
    "by_rows weights": ("by_rows", {"return_weights": True}, "it does not return the weights"),
    "by_rows dropout": ("by_rows", {"dropout": 0.1}, "it has no dropout"),
    "flex on a CPU": ("flex", {}, "query is on no GPU"),
}


@pytest.mark.parametrize("label", LIMITS)
def test_unsupported_calls_are_refused_with_the_reason(label):
    name, options, reason = LIMITS[label]
    inputs = [array.float() for array in operands(queries=60, keys=60)]
    assert functional.explain(*inputs, **options)[name] == reason
    with pytest.raises(NotImplementedError) as caught:
        functional.dot_product_attention(*inputs, **options, implementation=name)
    assert str(caught.value) == f"implementation {name!r} does not support this call: {reason}"
    functional.dot_product_attention(*inputs, **options)


def test_explain_attention_asks_the_backend_of_the_arrays():
    inputs = operands()
    found = attn_bridge.explain_attention(*inputs, mask=masks.causal(), softcap=3.0)
    assert found == functional.explain(*inputs, mask=masks.causal(), softcap=3.0)
    assert list(found) == ["cpu_flash", "windowed", "sdpa", "flex", "by_rows", "reference"]
    assert found["sdpa"] == "it has no softcap"
    with pytest.raises(TypeError) as caught:
        attn_bridge.explain_attention(*(array.numpy() for array in inputs))
    assert str(caught.value) == "query must be a torch.Tensor or a jax.Array, got ndarray"


def test_every_implementation_reports_if_this_machine_runs_it(monkeypatch):
    for present, reason in ((True, None), (False, "it needs a GPU")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        others = dict.fromkeys(("windowed", "sdpa", "by_rows", "reference"))
        ours = implementations.cpu_flash.unavailable()
        assert implementations.unavailable() == {**others, "cpu_flash": ours, "flex": reason}
