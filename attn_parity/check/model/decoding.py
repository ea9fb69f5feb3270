"""Judge decoding: a block run through its cache gives its one-pass output, on both sides and across them."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_bridge.backends import Framework
from attn_bridge.specs import DecoderBlockConfig

from ...compare.prepare import subject_of
from ...results.findings import SEVERITY
from ...settings.precision import strict
from ...sides.arrays import numpy_dtype
from ...sides.subject import Arguments, Array, Subject, load_adapter
from ...verdict.criterion import decide
from ...verdict.measures import MEANING_LIMIT, measure, scale_of
from .report import Decoding


def judge(torch_block: Any, flax_block: Any, inputs: Array, dtype: str) -> Decoding:
    """Judge the decoding of a block of ours in both frameworks.

    In float64 each side's results with a cache are those without one to `MEANING_LIMIT`; in the precision of the
    weights, and across the two sides, the criterion of every comparison holds. The tokens are those of `steps`.

    Args:
        torch_block: the torch twin.
        flax_block: the Flax twin.
        inputs: what goes into it, ``(B, T, D)``.
        dtype: precision of the weights.
    """
    blocks: dict[Framework, object] = {"torch": torch_block, "flax": flax_block}
    prompt, tokens = steps(torch_block.config, inputs.shape[1])
    inputs = inputs[:, :tokens]
    apart: dict[str, float] = {}
    low: dict[str, Array] = {}
    exact: dict[str, Array] = {}
    with strict(), np.errstate(all="ignore"):
        for side, block in blocks.items():
            plain = subject_of(block)
            cached = subject_of(load_adapter(side, "decoded").Decoded(block, prompt))
            rounded_inputs = inputs.astype(numpy_dtype(dtype))
            whole = _run(plain, rounded_inputs, "float64")
            exact[side], low[side] = _run(cached, rounded_inputs, "float64"), _run(cached, rounded_inputs, None)
            apart[side] = float(np.abs(whole - exact[side]).max(initial=0.0)) / (scale_of([whole]) or 1.0)
    for name, distance in apart.items():
        if not distance <= MEANING_LIMIT:
            message = f"{name}: with a cache the float64 results differ by {distance:.2g} of the largest value"
            return Decoding("different", apart, f"{message}, allowed {MEANING_LIMIT:.0e}")
    if dtype == "float64":  # the runs above: there is no higher precision by which to measure rounding
        distance = float(np.abs(exact["torch"] - exact["flax"]).max(initial=0.0)) / (scale_of([exact["torch"]]) or 1.0)
        if distance <= MEANING_LIMIT:
            return Decoding("equal", apart, "")
        message = f"with a cache the two sides differ by {distance:.2g} of the largest value"
        return Decoding("different", apart, f"{message}, allowed {MEANING_LIMIT:.0e}")
    error = measure(
        low["torch"],
        low["flax"],
        exact["torch"],
        exact["flax"],
        kind_scale=scale_of([exact["torch"]]),
        dtype=dtype,
        group=0,
        weights="held",
        sample=0,
    )
    verdict = decide("decoding", "decoding", "output", low["torch"].shape, dtype, [error])
    is_wrong = SEVERITY.index(verdict.verdict) > SEVERITY.index("inconclusive")
    return Decoding(verdict.verdict, apart, verdict.message if is_wrong else "")


def steps(block: DecoderBlockConfig, tokens: int) -> tuple[int, int]:
    """Return how many tokens of a sequence are read at once, half of them where that can be, and how many there are.

    Keys in a cache stay turned by the angles of their time. Where those change with the length of the sequence
    (LongRoPE, dynamic NTK), decoding gives what all at once gives as long as the sequence grows past no change.
    """
    scaling = getattr(getattr(block.attention, "position", None), "scaling", None)
    for length in range(tokens, 1, -1):
        for prompt in range(max(1, length // 2), length):
            if scaling is None or scaling.turns_alike(prompt, length):
                return prompt, length
    return 1, 1


def _run(subject: Subject, inputs: Array, dtype: str | None) -> Array:
    output: Array = subject.run(subject.weights(), Arguments((inputs,)), None, dtype=dtype).outputs[0]
    return output
