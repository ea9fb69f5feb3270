"""NumPy float64 references, one file per variant, written from the formulas and independent of both backends.

Each file offers ``reference(config, parameters, x, attention_mask=None) -> (output, weights)``. Every reference is
complex-analytic: on complex input it carries a derivative in the imaginary part (complex step; Squire and Trapp 1998).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..specs import Variant

__all__ = ["Reference", "directional_derivative", "find"]

Reference = Callable[..., tuple[np.ndarray, np.ndarray | None]]

# Complex step (Squire and Trapp, 1998): Im f(x + ih) / h subtracts nothing, so h may be so small that the error of
# order h^2 is far below the unit of float64.
_STEP = 1e-30


def find(variant: Variant) -> Reference:
    """Return the reference of a variant, from the file that bears the variant's name."""
    return importlib.import_module(f"{__name__}.{variant.file}").reference


def directional_derivative(
    function: Reference,
    config: object,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None,
    name: str,
    direction: np.ndarray,
    cotangents: Sequence[np.ndarray | None],
    **others: np.ndarray,
) -> float:
    """Differentiate ``sum(cotangent * output)`` along a direction of an input or of the parameter `name`.

    Inputs are ``"x"`` and the `others` that a variant takes, such as ``context``. Shapes: `direction` as the array it
    moves; `cotangents` as ``(output, weights)``, where the second may be left out and None counts as zero.

    Raises:
        ValueError: unknown name, a shape that differs, or a cotangent for an output that does not exist.

    Source: complex step, Squire and Trapp, SIAM Review 40 (1998) 110-112.
    """
    arrays = {**parameters, "x": x, **others}
    if name not in arrays:
        raise ValueError(f"name ({name}) must be one of {', '.join(arrays)}")
    _require_shape("direction", direction, np.shape(arrays[name]))
    arrays[name] = np.asarray(arrays[name], np.float64) + 1j * _STEP * np.asarray(direction, np.float64)
    moved = {input_name: arrays.pop(input_name) for input_name in ("x", *others)}
    outputs = function(config, arrays, moved.pop("x"), attention_mask, **moved)
    if len(cotangents) > len(outputs):
        raise ValueError(f"cotangents ({len(cotangents)}) must be at most {len(outputs)}")
    total = 0.0
    for index, cotangent in enumerate(cotangents):
        if cotangent is None:
            continue
        output = outputs[index]
        if output is None:
            raise ValueError(f"cotangents[{index}] must be None, there is no such output")
        _require_shape(f"cotangents[{index}]", cotangent, output.shape)
        total += float(np.sum(np.asarray(cotangent, np.float64) * (output.imag / _STEP)))
    return total


def _require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if np.shape(array) != shape:
        raise ValueError(f"{name} has shape {np.shape(array)}, must be {shape}")
