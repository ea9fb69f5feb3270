"""Settings that change a layer without changing its weights, under one name for all frameworks.

Each backend's `settings()` reads the attributes in `ATTRIBUTES` of a submodule through `read`. Values are compared by
meaning: momentum is torch's on both sides (Flax's is one minus it), ``2`` equals ``(2, 2)``, and ``'SAME'`` equals the
padding that it results in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

ATTRIBUTES: dict[str, str] = {
    "eps": "eps",
    "epsilon": "eps",
    "variance_epsilon": "eps",
    "layer_norm_eps": "eps",
    "rms_norm_eps": "eps",
    "momentum": "momentum",
    "num_heads": "num_heads",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "num_key_value_heads": "num_kv_heads",
    "n_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "negative_slope": "negative_slope",
    "approximate": "approximate",
    "padding": "padding",
    "padding_mode": "padding_mode",
    "stride": "stride",
    "strides": "stride",
    "dilation": "dilation",
    "kernel_size": "kernel_size",
    "kernel_dilation": "dilation",
    "groups": "groups",
    "num_groups": "num_groups",
    "feature_group_count": "groups",
    "padding_idx": "padding_idx",
    "max_norm": "max_norm",
    "scale_grad_by_freq": "scale_grad_by_freq",
    "rope_theta": "base",
    "theta": "base",
    "base": "base",
    "sliding_window": "window",
    "window_size": "window",
    "window": "window",
    "scale": "scale",
    "scaling": "scale",
    "softmax_scale": "scale",
    "attn_logits_soft_cap": "soft_cap",
    "logit_cap": "soft_cap",
    "soft_cap": "soft_cap",
    "is_causal": "is_causal",
    "causal": "is_causal",
    "bidirectional": "bidirectional",
    "use_bias": "use_bias",
    "use_scale": "use_scale",
    "use_running_average": "use_running_average",
    "track_running_stats": "track_running_stats",
    "ceil_mode": "ceil_mode",
    "count_include_pad": "count_include_pad",
    "p": "dropout",
    "rate": "dropout",
    "compute_dtype": "dtype",
    "dtype": "dtype",
}
"""Attribute of a submodule -> the name under which both sides' values are compared."""

IGNORED = frozenset(
    {"dropout", "kernel_size", "momentum", "use_running_average", "track_running_stats", "use_bias", "use_scale"}
    | {"dtype", "carry_dtype"}
)
"""Read for the record; another comparison judges them, they show in the weights, or no call shows them: a momentum
changes the running statistics after it, a dtype does in another precision."""

MODES = frozenset({"CIRCULAR", "REFLECT"})
"""Paddings of Flax that are values beyond the border; torch has them as `padding_mode`."""

OWN = ("scale is ", "the base of the rotary angles is ", "window is ")
"""Beginnings of sentences on settings that only users' classes have, which need not mean the same on both sides."""

NAMES = {"base": "the base of the rotary angles", "is_causal": "causal"}

Value = float | int | bool | str | tuple[Any, ...] | None


def read(module: object) -> dict[str, Value]:
    """Return the settings of a submodule by their common names, without arrays, functions and modules."""
    settings: dict[str, Value] = {}
    for attribute, name in ATTRIBUTES.items():
        try:
            value = getattr(module, attribute)
        except Exception:  # a property of a user's class may raise anything
            continue
        plain = _float_name(value) if name == "dtype" else _plain(value)
        if name == "momentum" and _is_flax(module) and isinstance(plain, float):
            plain = round(1.0 - plain, 12)
        if name not in settings and (plain is not None or name == "padding_idx"):
            settings[name] = plain
    if settings.get("padding") in MODES:  # Flax gives the values beyond the border in the place of their number
        settings |= {"padding": "SAME", "padding_mode": str(settings["padding"]).lower()}
    elif _is_flax(module) and "kernel_size" in settings and "padding" in settings:
        settings.setdefault("padding_mode", "zeros")
    if hasattr(module, "initialize_carry"):  # a recurrent cell of Flax makes its first state in that dtype
        carry = _float_name(getattr(module, "param_dtype", None))
        settings |= {} if carry is None else {"carry_dtype": carry}
    return settings


def differing(
    first: Mapping[str, object],
    second: Mapping[str, object],
    labels: tuple[str, str],
    classes: tuple[str, str] = ("", ""),
    direction: str = "backward",
) -> list[str]:
    """Return a sentence for each setting whose meaning differs between the two sides.

    Args:
        first: name -> value on the first side.
        second: the same of the second side.
        labels: names of the two sides.
        classes: classes of the submodules.
        direction: of the fault; settings that only one side has, which may affect gradients alone, are left out for a
            forward fault.
    """
    sentences = []
    for name in sorted(first.keys() & second.keys(), key=_order):
        left, right = _tuples(first[name]), _tuples(second[name])
        if name in IGNORED or _means_the_same(name, left, right, first, second):
            continue
        sentences.append(
            f"{NAMES.get(name, name)} is {_written(left)} in {labels[0]} and {_written(right)} in {labels[1]}"
        )
    lone = [] if direction == "forward" else _lone(first, second, labels, classes)
    return [*sentences, *lone]


def _order(name: str) -> int:
    return list(dict.fromkeys(ATTRIBUTES.values())).index(name) if name in ATTRIBUTES.values() else 10**6


def _lone(
    first: Mapping[str, object], second: Mapping[str, object], labels: tuple[str, str], classes: tuple[str, str]
) -> list[str]:
    """Return a sentence on padding_idx if only one side has it; Flax's embeddings have no such setting."""
    sentences = []
    for mine, other, label, kind in ((first, second, labels[0], classes[1]), (second, first, labels[1], classes[0])):
        if mine.get("padding_idx") is not None and "padding_idx" not in other and kind:
            row = mine["padding_idx"]
            sentences.append(f"padding_idx is {row} in {label}, and {kind} has none: row {row} gets no gradient there")
    return sentences


def _means_the_same(
    name: str, first_value: object, second_value: object, first: Mapping[str, object], second: Mapping[str, object]
) -> bool:
    if name == "padding":
        return _same_padding(first_value, second_value, first, second)
    if name == "approximate":
        return _kind_of_gelu(first_value) == _kind_of_gelu(second_value)
    if name in ("stride", "dilation"):
        return _same(_all_ones(first_value), _all_ones(second_value))
    return _same(first_value, second_value)


def _same(left: object, right: object) -> bool:
    if isinstance(left, tuple) or isinstance(right, tuple):
        left, right = (value if isinstance(value, tuple) else (value,) for value in (left, right))
        size = max(len(left), len(right))
        left, right = (value * size if len(value) == 1 else value for value in (left, right))
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=1e-9)
    return bool(left == right)


def _all_ones(value: object) -> object:
    """Return None, which Flax takes for 1, as 1."""
    return 1 if value is None else value


def _same_padding(left: object, right: object, first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    """Compare paddings as they are per axis, before and behind; names that can't be counted are compared as names."""
    pairs = _padding(left, first, second), _padding(right, second, first)
    same = _padding("SAME", first, second), _padding("SAME", second, first)
    if same[0] != same[1] and "SAME" not in same and all(map(_same_pairs, pairs, same)):
        return True  # each keeps the size of its input, for kernels that are spread differently
    return _same_pairs(*pairs) or _is_cut_behind(*pairs, first, second)


def _is_cut_behind(left: object, right: object, first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    """Return whether two paddings of a causal convolution differ behind the sequence alone.

    torch pads both ends alike, and the caller cuts the further outputs off (`mamba`, `fla`); Flax pads the beginning.
    """
    totals = [_total_padding(own, other) for own, other in ((first, second), (second, first))]
    if isinstance(left, str) or isinstance(right, str) or None in totals:
        return False
    pairs = [*cast("Any", left), *cast("Any", right)]
    return [before for before, _ in pairs] == totals and 0 in {behind for _, behind in pairs}


def _total_padding(settings: Mapping[str, object], other: Mapping[str, object]) -> int | None:
    """Return the padding that keeps the length of a sequence; None for strides, or more axes than one."""
    kernel, steps = settings.get("kernel_size", other.get("kernel_size")), _all_ones(settings.get("dilation"))
    size = kernel[0] if isinstance(kernel, tuple) and len(kernel) == 1 else kernel
    step = steps[0] if isinstance(steps, tuple) and len(steps) == 1 else steps
    if type(size) is not int or type(step) is not int or not _same(_all_ones(settings.get("stride")), 1):
        return None
    return step * (size - 1)


def _same_pairs(left: Any, right: Any) -> bool:
    """Return whether two paddings are the same: names, or ``(before, behind)`` per axis, where one is for all axes."""
    if isinstance(left, str) or isinstance(right, str):
        return bool(left == right)
    size = max(len(left), len(right))
    left, right = (value * size if len(value) == 1 else value for value in (left, right))
    return len(left) == len(right) and all(tuple(a) == tuple(b) for a, b in zip(left, right, strict=True))


def _padding(value: object, settings: Mapping[str, object], other: Mapping[str, object]) -> object:
    """Return a padding as (before, behind) per axis, or as a name where that depends on the input's size."""
    if isinstance(value, (int, float)):
        return ((int(value), int(value)),)
    if isinstance(value, tuple):
        return tuple(one if isinstance(one, tuple) else (one, one) for one in value)
    name = str(value).upper()
    if name == "VALID":
        return ((0, 0),)
    kernel = settings.get("kernel_size", other.get("kernel_size"))
    if name == "CAUSAL" and (total := _total_padding(settings, other)) is not None:
        return ((total, 0),)
    if name != "SAME" or kernel is None or not _same(_all_ones(settings.get("stride")), 1):
        return name
    sizes = kernel if isinstance(kernel, tuple) else (kernel,)
    steps = _all_ones(settings.get("dilation"))
    steps = steps * len(sizes) if isinstance(steps, tuple) and len(steps) == 1 else steps
    steps = steps if isinstance(steps, tuple) else (steps,) * len(sizes)
    totals = [step * (size - 1) for step, size in zip(steps, sizes, strict=False)]
    return tuple((total // 2, total - total // 2) for total in totals)


def _kind_of_gelu(value: object) -> str:
    return {"none": "erf", "tanh": "tanh", "True": "tanh", "False": "erf"}.get(str(value), str(value))


def _tuples(value: object) -> object:
    """Return lists, as JSON has them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _is_flax(module: object) -> bool:
    return any(base.__module__.partition(".")[0] == "flax" for base in type(module).__mro__)


def _float_name(value: object) -> str | None:
    """Return the name of a dtype of floats, given as NumPy's, as a scalar type or by name; None for anything else."""
    try:
        dtype = np.dtype(cast("np.dtype[np.generic]", value))
    except TypeError:
        return None
    return dtype.name if value is not None and dtype.kind in "fV" else None


def _plain(value: object) -> Value:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and len(value) <= 6:
        values = tuple(_plain(one) for one in value)
        return values if None not in values else None
    return None


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) else str(value)
