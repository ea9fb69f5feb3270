"""The right answer in float64 NumPy, and how far from it an answer in a lower precision may be.

Written from the formula, block by block of queries, so that long sequences fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ..measuring.cells import LINEARS, Group

BLOCK = 512
"""Queries per block."""

ALLOWED = {"float32": (64, 512), "bfloat16": (8, 16)}
"""Largest error over the norm of the right answer, in units of the dtype's epsilon: of a whole tensor, and of its worst
row. Plain code, which rounds scores, weights and sums to that dtype, stays below a quarter of it (measured: 11 and 35
in float32, which rounds at every step; 2.2 in bfloat16, where products are summed in float32). A wrong mask or scale,
or a head in another's place, is far above."""

NOT_COMPARED = ("grad W_key.bias",)
"""Zero in exact arithmetic, since softmax is invariant to a constant added to all scores of a row."""


def answer(group: Group) -> dict[str, np.ndarray]:
    """Return ``output``, and with gradients ``grad NAME`` of every input and parameter, shaped as `Group.inputs`."""
    inputs = {name: array.astype(np.float64) for name, array in group.inputs().items()}
    return _attention(inputs, group) if group.subject == "attention" else _module(inputs, group)


def wrong(actual: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], dtype: str) -> str | None:
    """Return the error of an answer in `dtype`, in a line; None if it is right.

    Args:
        actual: float64 arrays by name.
        right: the result of `answer`; every name in it must be in `actual`.
        dtype: the precision that `actual` was computed in.
    """
    most, most_of_row = (units * float(ml_dtypes.finfo(dtype).eps) for units in ALLOWED[dtype])
    for name, expected in right.items():
        if name in NOT_COMPARED:
            continue
        if name not in actual or actual[name].shape != expected.shape:
            got = actual[name].shape if name in actual else "nothing"
            return f"{name} has shape {got}, not {expected.shape}"
        whole, row = errors(actual[name], expected)
        if not (whole <= most and row <= most_of_row):
            return (
                f"{name} is off by {whole:.1e} of its norm (allowed {most:.1e}), "
                f"its worst row by {row:.1e} (allowed {most_of_row:.1e})"
            )
    return None


def errors(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the norm of the error over that of the right answer: of the whole, and of the worst row.

    A row with less than half of the usual norm counts as one with half of it.
    """
    error = actual - expected
    whole = np.linalg.norm(error) / np.linalg.norm(expected)
    rows = np.linalg.norm(error, axis=-1), np.linalg.norm(expected, axis=-1)
    # The right gradient may be zero, such as that of a query which sees one key only.
    floor = 0.5 * np.sqrt(np.mean(rows[1] ** 2))
    return float(whole), float(np.max(rows[0] / np.maximum(rows[1], floor)))


def _attention(inputs: Mapping[str, np.ndarray], group: Group) -> dict[str, np.ndarray]:
    query, key, value, cotangent = (inputs[name] for name in ("query", "key", "value", "cotangent"))
    names = ("output", "grad query", "grad key", "grad value") if group.backward else ("output",)
    arrays = {name: np.zeros_like(query) for name in names}
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            views = {name: array[b, :, h] for name, array in arrays.items()}
            _head(query[b, :, h], key[b, :, h], value[b, :, h], cotangent[b, :, h], views)
    return arrays


def _head(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray, arrays: dict[str, np.ndarray]
) -> None:
    """Write the output of one head, ``(T, D)``, and its gradients where `arrays` has them."""
    tokens, scale = len(query), query.shape[1] ** -0.5
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        rows = slice(start, stop)
        scores = scale * (query[rows] @ key[:stop].T)
        scores[np.arange(stop) > np.arange(start, stop)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        output = weights @ value[:stop]
        arrays["output"][rows] = output
        if "grad query" in arrays:
            grad = cotangent[rows]
            inner = (grad * output).sum(-1, keepdims=True)
            grad_scores = scale * weights * (grad @ value[:stop].T - inner)
            arrays["grad query"][rows] = grad_scores @ key[:stop]
            arrays["grad key"][:stop] += grad_scores.T @ query[rows]
            arrays["grad value"][:stop] += weights.T @ grad


def _module(inputs: Mapping[str, np.ndarray], group: Group) -> dict[str, np.ndarray]:
    cell = group.cell
    heads = (cell.batch, cell.tokens, cell.heads, cell.head_dim)
    x, cotangent = inputs["x"], inputs["cotangent"]

    def project(name: str, features: np.ndarray) -> np.ndarray:
        return features @ inputs[f"{name}.weight"] + inputs[f"{name}.bias"]

    split = {name: project(f"W_{name}", x).reshape(heads) for name in ("query", "key", "value")}
    split["cotangent"] = (cotangent @ inputs["out_proj.weight"].T).reshape(heads)
    inside = _attention(split, group)
    context = inside["output"].reshape(x.shape)
    arrays = {"output": project("out_proj", context)}
    if not group.backward:
        return arrays
    grads = {f"W_{name}": inside[f"grad {name}"].reshape(x.shape) for name in ("query", "key", "value")}
    arrays["grad x"] = sum(grad @ inputs[f"{name}.weight"].T for name, grad in grads.items())
    for name in LINEARS:
        features, grad = (context, cotangent) if name == "out_proj" else (x, grads[name])
        arrays[f"grad {name}.weight"] = np.einsum("bti,bto->io", features, grad, optimize=True)
        arrays[f"grad {name}.bias"] = grad.sum((0, 1))
    return arrays
