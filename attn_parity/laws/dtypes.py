"""Dtypes: a side returns numbers of the dtype that its weights have, in its own precision and in bfloat16."""

from __future__ import annotations

from ..sides.arrays import is_float, width_of
from ..sides.subject import CannotPromoteError, ModuleFailedError
from .layout import Axes
from .side import SAME, Gap, LawResult, NotTriedError, OneSide

LOW = "bfloat16"
"""The other precision that a side is tried in: weights and inputs are cast to it."""

WIDE_ON_PURPOSE = ("residual_in_fp32", "fp32_residual", "fp32_residual_connection")
"""Settings of configs whose outputs are float32 on purpose."""

KEPT = ("dtype", "carry_dtype")
"""Settings that name a dtype in which a part computes, or makes its first state, whatever its inputs are."""


def output_dtype(side: OneSide, layout: Axes) -> LawResult:
    """Compare the dtypes of the outputs with that of the weights."""
    del layout
    names = {array.dtype.name for array in side.held.values() if is_float(array)}
    if len(names) != 1:
        raise NotTriedError(
            f"the weights have several dtypes ({', '.join(sorted(names))})" if names else "no weights are floats"
        )
    (own,) = names
    asked = [name for name in WIDE_ON_PURPOSE if getattr(getattr(side.root, "config", None), name, False) is True]
    if asked:
        raise NotTriedError(f"its config asks for float32 ({asked[0]})")
    tried, declared = [], _declared(side)
    for dtype in dict.fromkeys((own, LOW)):
        if dtype != own and declared - {LOW}:
            continue
        try:
            outputs = side.subject.run(side.held, side.call, dtype=None if dtype == own else dtype).outputs
        except (CannotPromoteError, ModuleFailedError):
            if dtype == own:
                raise
            continue
        tried.append(dtype)
        for name, output in zip(side.structure, outputs, strict=True):
            if is_float(output) and output.dtype.name not in {dtype, *declared}:
                bits = [float(8 * width_of(each)) for each in (dtype, output.dtype.name)]
                gap = Gap(float("inf"), f"the number of bits of {name}", (), bits[0], bits[1])
                why = f"{name} is {output.dtype.name} where all weights and inputs are {dtype}"
                return LawResult(gap, why, f"in {output.dtype.name}", is_broken=True)
    return LawResult(SAME, f"outputs of weights in {' and '.join(tried)}")


def _declared(side: OneSide) -> set[str]:
    """Return the dtypes that parts keep from their construction, as layers with a `dtype` do: they compute in them."""
    settings = side.subject.settings().values()
    return {dtype for some in settings for name in KEPT if isinstance(dtype := some.get(name), str)}
