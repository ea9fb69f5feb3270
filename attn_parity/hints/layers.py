"""Layers computed both ways in NumPy: which way is the first side's, and which the second's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from .attention import attention
from .case import LARGEST, Array, Case, Ways, computed, first_fit
from .norms import norms, spectral
from .recurrent import recurrent, sigmoid
from .reshaping import modulated, padded, reductions, resized, softmaxes


def _activation(case: Case) -> str:
    """Recognise two activations of the same input, such as exact and approximate GELU."""
    if not case.is_small():
        return ""
    for operand in case.inputs:
        if operand.shape != case.first.shape:
            continue
        kinds = [(name, act(operand)) for name, act in ACTIVATIONS.items()]
        ours = next((name for name, value in kinds if _near(case.first, value)), "")
        its = next((name for name, value in kinds if _near(case.second, value)), "")
        if ours and its and ours != its:
            return f"{case.labels[0]} computes {ours}, {case.labels[1]} {its}"
    return ""


def _erf(value: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[float])(value))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "GELU by erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "GELU by sigmoid": lambda x: x * sigmoid(1.702 * x),
    "SiLU": lambda x: x * sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "squared ReLU": lambda x: np.square(np.maximum(x, 0)),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU by 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU by 0.2": lambda x: np.where(x > 0, x, 0.2 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "hard sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hard swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}


def _near(first: Array, second: Array) -> bool:
    """Return whether two activations agree; float32 constants inside them are let pass."""
    return bool(float(np.abs(first - second).max()) <= 1e-7 * max(float(np.abs(second).max()), 1e-300))


def _gated(case: Case) -> Ways:
    """Yield gated units, of either half and with every activation."""
    if not case.first.ndim:
        return
    size = case.first.shape[-1]
    pairs = []
    for operand in case.inputs:
        if operand.shape == (*case.first.shape[:-1], 2 * size):
            pairs.append(("of halves", operand[..., :size], operand[..., size:]))
            pairs.append(("of interleaved channels", operand[..., ::2], operand[..., 1::2]))
        for axis in (
            place for place, size in enumerate(operand.shape) if size == 2 and operand.ndim == case.first.ndim + 1
        ):
            first, second = np.moveaxis(operand, axis, 0)
            if first.shape == case.first.shape:
                pairs.append(("", first, second))
    alike = [given for given in case.inputs if given.shape == case.first.shape]
    pairs += [("", one, two) for one, two in itertools.combinations(alike[-4:], 2)]
    for what, first_half, second_half in pairs:
        for name, act in ACTIVATIONS.items():
            yield f"{name}(first) * second {what}".strip(), act(first_half) * second_half
            yield f"first * {name}(second) {what}".strip(), first_half * act(second_half)


MOST_MIXED = 5
"""Most arrays, the last ones before a place, of which two may be mixed by a third."""


def _mixed(case: Case) -> Ways:
    """Yield two parts mixed by a gate, which takes either of them, as in highway layers and gated units."""
    parts = [one for one in (*case.around, *case.inputs) if one.shape == case.first.shape][-MOST_MIXED:]
    for gate, new, kept in itertools.permutations(parts, 3):
        share = sigmoid(gate)
        for name, value in [("a", new), *((f"{name}(a)", act(new)) for name, act in ACTIVATIONS.items())]:
            mixture = share * value + (1 - share) * kept
            yield f"g * {name} + (1 - g) * b, with g the sigmoid of a submodule's output", mixture
            yield f"(1 - g) * {name} + g * b", (1 - share) * value + share * kept


def _convolution(case: Case) -> str:
    """Recognise a convolution with another padding, or with a kernel that is transposed or flipped."""
    axes = case.first.ndim
    kernel = next((one for one in case.weights.values() if one.ndim == axes), None)
    operand = next((one for one in case.inputs if one.ndim == axes), None)
    if case.is_gradient or axes not in (3, 4) or kernel is None or operand is None or operand.size > LARGEST:
        return ""
    if axes == 4:
        return first_fit(case, _convolutions(case, operand, kernel))
    for axis in (2, 1):  # a signal is an image of height 1, whose height is the axis before
        first, second, image = (np.expand_dims(array, axis) for array in (case.first, case.second, operand))
        wide = dataclasses.replace(case, first=first, second=second)
        text = first_fit(wide, _convolutions(wide, image, np.expand_dims(kernel, 2 if axis == 2 else 0)))
        if text:
            return text
    return ""


def _convolutions(case: Case, operand: Array, kernel: Array) -> Ways:
    layouts = (  # images as (n, c, h, w) with kernels (o, i, h, w), and as (n, h, w, c) with kernels (h, w, i, o)
        ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 3, 1, 2), (3, 2, 0, 1), (0, 2, 3, 1)),
    )
    biases = [one for one in case.weights.values() if one.ndim == 1]
    for image_axes, kernel_axes, back in layouts:
        image, weights = operand.transpose(image_axes), kernel.transpose(kernel_axes)
        if weights.shape[1] != image.shape[1]:
            yield from _in_groups(case, image, weights, biases, (image_axes, back))
            continue
        shape = case.first.transpose(image_axes).shape
        for name, changed in (
            ("the kernel as it is", weights),
            ("the kernel with height and width exchanged", weights.swapaxes(2, 3)),
            ("the kernel flipped", weights[:, :, ::-1, ::-1]),
        ):
            for low, stride in itertools.product(range(max(weights.shape[2:])), (1, 2)):
                made = _convolved(image, changed, low, stride, shape[2:])
                if made is None or made.shape != shape:
                    continue
                bias = next((one for one in biases if one.shape == (shape[1],)), np.zeros(shape[1]))
                text = f"{name}, {low} of padding before it" + (f", stride {stride}" if stride > 1 else "")
                yield text, (made + bias[:, None, None]).transpose(back)


def _in_groups(
    case: Case, image: Array, kernel: Array, biases: list[Array], axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Ways:
    """Yield convolutions in groups, whose channels follow each other or lie apart, on either side."""
    groups, rest = divmod(image.shape[1], kernel.shape[1])
    shape = case.first.transpose(axes[0]).shape
    if rest or groups < 2 or len(kernel) % groups or shape[:2] != (len(image), len(kernel)):
        return
    orders, outs = _by_group(image.shape[1], groups), _by_group(len(kernel), groups)
    bias = next((one for one in biases if one.shape == (shape[1],)), np.zeros(shape[1]))
    for (way, ins), (outputs, out), low in itertools.product(
        orders.items(), outs.items(), range(max(kernel.shape[2:]))
    ):
        made = np.zeros(shape)
        for chosen, target in zip(ins, out, strict=True):
            part = _convolved(image[:, chosen], kernel[target], low, 1, shape[2:])
            if part is None or part.shape[2:] != shape[2:]:
                break
            made[:, target] = part
        else:
            text = f"a convolution of {groups} groups of {way}inputs and {outputs}outputs"
            yield text, (made + bias[:, None, None]).transpose(axes[1])


def _by_group(count: int, groups: int) -> dict[str, Array]:
    """Return the numbers of channels, a row for each group: of channels that follow each other, or lie apart."""
    places = np.arange(count)
    return {"": places.reshape(groups, -1), "strided ": places.reshape(-1, groups).T}


def _convolved(image: Array, kernel: Array, low: int, stride: int, size: tuple[int, ...]) -> Array | None:
    """Return a convolution with so much padding before the image, and as much behind it as the output's size takes."""
    pads = [(0, 0), (0, 0)]
    for extent, wide, out in zip(image.shape[2:], kernel.shape[2:], size, strict=True):
        before = min(low, wide - 1)
        high = (out - 1) * stride + wide - extent - before
        if not -stride < high < wide:
            return None
        pads.append((before, max(high, 0)))
    padded = np.pad(image, pads)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axis=(2, 3))
    convolved: Array = np.einsum(
        "nchwij,ocij->nohw", windows[:, :, ::stride, ::stride][:, :, : size[0], : size[1]], kernel
    )
    return convolved


def _feed_forward(case: Case) -> Ways:
    """Yield feed-forward layers of the weights, with every activation, and either matrix as the gate."""
    width = case.first.shape[-1] if case.first.ndim else 0
    x = next((one for one in case.inputs if one.ndim and one.shape[:-1] == case.first.shape[:-1]), None)
    matrices = {name: one for name, one in case.weights.items() if one.ndim == 2}
    if x is None or len(matrices) not in (2, 3) or any(one.ndim > 2 for one in case.weights.values()):
        return
    for down in matrices:
        ups = [name for name in matrices if name != down]
        made = [_linear(case, name, x) for name in ups]
        if any(one is None for one in made):
            continue
        hidden = dict(zip(map(_short, ups), (one for one in made if one is not None), strict=True))
        for name, value in _hidden(hidden):
            out = _linear(case, down, value)
            if out is not None and out.shape[-1] == width:
                yield f"{_short(down)}({name})", out


def _hidden(made: Mapping[str, Array]) -> Ways:
    """Yield the candidates for the hidden layer of a feed-forward block, from the results of its first matrices."""
    if len({one.shape for one in made.values()}) > 1:
        return
    for (name, product), *others in itertools.permutations(made.items()):
        for act, function in ACTIVATIONS.items():
            text, value = f"{act}({name})", function(product)
            for other, unit in others:
                text, value = f"{text} * {other}", value * unit
            yield text, value


def _linear(case: Case, name: str, x: Array) -> Array | None:
    """Apply a matrix and its bias to an input; return None if the widths do not fit."""
    weight = case.weights[name] if name.endswith("kernel") else case.weights[name].T
    turned = weight.shape[0] != weight.shape[1] and weight.shape[0] != x.shape[-1]
    weight = weight.T if turned else weight
    if weight.shape[0] != x.shape[-1]:
        return None
    path = name.rpartition(".")[0]
    bias = case.weights.get(f"{path}.bias") if path else None
    return np.asarray(x @ weight + (0.0 if bias is None or bias.shape != weight.shape[1:] else bias))


def _short(name: str) -> str:
    """Return the word for a layer in the name of its weight."""
    path, _, last = name.rpartition(".")
    return path.rpartition(".")[2] if last in ("weight", "kernel", "w") and path else last


BY_WEIGHTS: tuple[Callable[[Case], str], ...] = (recurrent, computed(_feed_forward))
"""Relations computed from the inputs and weights of a whole module, whichever part of its code is wrong."""

LAYERS: tuple[Callable[[Case], str], ...] = (
    _activation,
    computed(_gated),
    computed(_mixed),
    computed(softmaxes, inputs=True),
    spectral,
    computed(modulated, inputs=True),
    norms,
    attention,
    *BY_WEIGHTS,
    _convolution,
    computed(resized, inputs=True),
    computed(padded, inputs=True),
    computed(reductions, inputs=True),
)
"""Relations to try first: they name the computation of each side."""
