"""Changes of operations that join elements: reductions, products, convolutions, cumulations and loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ....hints.changes import reductions, scaled_transforms, transposed_operand
from ....sides.subject import Array
from .program import Function, Operation, Program, ProgramChange, Value

DILATIONS = (1, 2, 3, 4)
"""Steps between the elements of a kernel that are tried for one another."""


def of_reduction(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other reductions: a mean for a sum, other axes whose sizes stay with the result as 1 where they did."""
    operand, axes = operation.shapes[0], operation.params["axes"]
    if operand.dtype != np.float64:
        return
    size = int(np.prod([operand.shape[axis] for axis in axes]))
    source = operation.operands[0]

    kinds = {"reduce_sum": "sum", "reduce_max": "maximum", "reduce_min": "minimum"}
    own = kinds[operation.name]
    ways: tuple[tuple[str, Function, float], ...] = (
        ("sum", np.sum, 1.0),
        ("mean", np.sum, 1 / size),
        ("maximum", np.max, 1.0),
    )
    for name, function, times in ways:
        if name != own:
            yield operation.computed(f"a {name} for the {own}", _reduced(function, tuple(axes), times, keepdims=False))
    if own == "sum":
        yield operation.computed("a norm for the sum", lambda x: np.sqrt(np.square(x).sum(tuple(axes))))
    reducers: dict[str, Function] = {"sum": np.sum, "maximum": np.max, "minimum": np.min}
    keeps = [at for at in program.takes.get(operation.results[0], ()) if _keeps_axes(program.operations[at], operand)]
    for text, other in reductions(np.broadcast_to(0.0, operand.shape), axes):
        others = int(np.prod([operand.shape[axis] for axis in other]))
        for times in dict.fromkeys((1.0, size / others)):
            reduce = _reduced(reducers[own], other, times, keepdims=bool(keeps))
            if keeps:

                def kept(read: Callable[..., Value], reduce: Function = reduce) -> list[Value]:
                    return [reduce(read(source))]

                yield ProgramChange(text, operation.at, dict.fromkeys(keeps, kept))
            else:
                yield operation.computed(text, reduce)


def _reduced(function: Function, axes: tuple[int, ...], times: float, *, keepdims: bool) -> Function:
    """Return a reduction, with a factor."""
    return lambda operand: function(operand, axis=axes, keepdims=keepdims) * times


def _keeps_axes(operation: Operation, operand: Value) -> bool:
    """Return whether an operation gives the result of a reduction the axes of its operand, with sizes of 1."""
    return operation.name == "broadcast_in_dim" and len(operation.params["shape"]) == len(operand.shape)


def of_product(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield products with a square operand transposed."""
    for index, item in enumerate(operation.shapes):
        if len(item.shape) >= 2 and item.shape[-1] == item.shape[-2]:

            def turned(*operands: Value, index: int = index) -> list[Value]:
                return [item.swapaxes(-1, -2) if at == index else item for at, item in enumerate(operands)]

            results = operation.taking(turned)
            text = transposed_operand(index, [item.shape for item in operation.shapes])
            yield ProgramChange(text, operation.at, {operation.at: results})


def of_convolution(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield convolutions with their padding shifted, and with a kernel that is flipped or transposed."""
    padding = operation.params["padding"]
    ways = [tuple((low + moved, high - moved) for low, high in padding) for moved in (1, -1)]
    ways += [tuple((low + high, 0) for low, high in padding), tuple((0, low + high) for low, high in padding)]
    for way in dict.fromkeys(ways):
        if way != tuple(padding) and min(map(min, way)) >= 0:
            yield operation.with_params(f"padding {list(way)} for {list(padding)}", padding=way)
    axes = tuple(operation.params["dimension_numbers"].rhs_spec[2:])
    sizes = [operation.shapes[1].shape[axis] for axis in axes]
    own = tuple(operation.params["rhs_dilation"])
    for step in DILATIONS:
        steps = (step,) * len(own)
        spread = [(other - one) * (size - 1) for other, one, size in zip(steps, own, sizes, strict=True)]
        moved = tuple(_widened(pads, more) for pads, more in zip(padding, spread, strict=True))
        if any(spread) and None not in moved:
            text = f"dilation {list(steps)} for {list(own)}"
            yield operation.with_params(text, rhs_dilation=steps, padding=moved)
    kernels: dict[str, Callable[[Array], Array]] = {}
    if max(sizes, default=1) > 1:
        kernels["the kernel flipped"] = lambda kernel: np.flip(kernel, axes)
    if len(axes) == 2 and len(set(sizes)) == 1:
        kernels["the kernel with height and width exchanged"] = lambda kernel: kernel.swapaxes(*axes)
    for text, change in kernels.items():

        def changed(image: Array, kernel: Array, change: Callable[[Array], Array] = change) -> list[Value]:
            return [image, np.ascontiguousarray(change(kernel))]

        yield ProgramChange(text, operation.at, {operation.at: operation.taking(changed)})


def _widened(pads: tuple[int, int], more: int) -> tuple[int, int] | None:
    """Return the padding of an axis for a kernel that is wider by so much; None if it can't be less.

    Padding before the axis alone stays there; otherwise both ends get as much.
    """
    before = more if pads[0] and not pads[1] else more // 2
    low, high = pads[0] + before, pads[1] + more - before
    return (low, high) if min(low, high) >= 0 else None


def of_cumulation(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield cumulations from the other end, and sums that leave out their own element."""
    axis = operation.params["axis"]
    run = functools.partial(operation.run.apply, operation.equation)
    text = f"a {operation.name} from the other end"
    yield operation.computed(text, lambda operand: np.flip(run([np.flip(operand, axis)])[0], axis))
    if operation.name == "cumsum":
        text = "a cumsum that leaves out its own element"
        yield operation.computed(text, lambda operand: run([operand])[0] - operand)


def of_transform(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield Fourier transforms with another normalisation, and complex ones of other axes."""
    sizes, shape = operation.params["fft_lengths"], operation.shapes[0].shape
    count = int(np.prod(sizes))
    names = [text for text, _ in scaled_transforms(np.ones(1), count)]
    yield from operation.named(names, lambda read: scaled_transforms(np.asarray(operation.plain(read)[0]), count))
    kind = operation.params["fft_type"].name
    function = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn}.get(kind)
    if function is None:
        return
    moved = program.maker(operation.operands[0], "transpose")
    order = list(range(len(shape))) if moved is None else [int(axis) for axis in moved.params["permutation"]]
    own = range(len(shape) - len(sizes), len(shape))
    for _, others in reductions(np.empty(shape), list(own)):
        axes = [sorted(order[axis] for axis in some) for some in (others, own)]
        text = f"a Fourier transform of axes {axes[0]} for {axes[1]}"
        yield operation.computed(text, functools.partial(function, axes=others))


def of_place(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the place of the largest element for that of the smallest, or the other way round."""
    (axis,) = operation.params["axes"]
    other, function = ("argmax", np.argmax) if operation.name == "argmin" else ("argmin", np.argmin)
    dtype = operation.shape.dtype
    yield operation.computed(f"{other} for {operation.name}", lambda x: function(x, axis=axis).astype(dtype))


def of_loop(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield a loop that runs from the other end."""
    yield operation.with_params("a loop from the other end", reverse=not operation.params["reverse"])


def of_windows(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the maximum of each window for its mean, or the other way round."""
    params = operation.params
    if any(step != 1 for name in ("base_dilation", "window_dilation") for step in params.get(name, ())):
        return
    sizes, count = tuple(params["window_dimensions"]), int(np.prod(params["window_dimensions"]))
    is_sum = operation.name == "reduce_window_sum"

    def pooled(operand: Array) -> Array:
        padded = np.pad(operand, params["padding"], constant_values=-np.inf if is_sum else 0.0)
        windows = np.lib.stride_tricks.sliding_window_view(padded, sizes)
        windows = windows[tuple(slice(None, None, step) for step in params["window_strides"])]
        axes = tuple(range(-len(sizes), 0))
        return np.asarray(windows.max(axes) * count if is_sum else windows.mean(axes))

    words = "maximum of each window for its mean" if is_sum else "mean of each window for its maximum"
    yield operation.computed(f"the {words}", pooled)
