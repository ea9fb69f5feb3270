"""Changes of operations that join elements: reductions, products, convolutions, cumulations and loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .....hints.changes import reductions, scaled_transforms
from .....sides.subject import Array
from ..numpy_interpreter import Interpreter
from .operands import lazily, with_equation
from .program import Atom, Function, Jaxpr, Operation, Program, ProgramChange, Read, Results, Value, plain


def of_reduction(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other reductions: a mean for a sum, other axes whose sizes stay with the result as 1 where they did."""
    operand, axes = operation.equation.invars[0].aval, operation.params["axes"]
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
            made = _reduced(function, source, tuple(axes), times, keepdims=False)
            yield ProgramChange(f"a {name} for the {own}", at, {at: made})
    if own == "sum":
        yield ProgramChange(
            "a norm for the sum", at, {at: lambda read: [np.sqrt(np.square(read(source)).sum(tuple(axes)))]}
        )
    reducers: dict[str, Function] = {"sum": np.sum, "maximum": np.max, "minimum": np.min}
    same = reducers[own]
    keeps = [at for at in program.takes.get(operation.results[0], ()) if _keeps_axes(program.operations[at], operand)]
    for text, other in reductions(np.broadcast_to(0.0, operand.shape), axes):
        others = int(np.prod([operand.shape[axis] for axis in other]))
        for times in dict.fromkeys((1.0, size / others)):
            kept = _reduced(same, source, other, times, keepdims=True)
            if keeps:
                yield ProgramChange(text, at, dict.fromkeys(keeps, kept))
            else:
                yield ProgramChange(text, at, {at: _reduced(same, source, other, times, keepdims=False)})


def _reduced(function: Function, source: Atom, axes: tuple[int, ...], times: float, *, keepdims: bool) -> Results:
    """Return a reduction of a value as a change."""
    return lambda read: [function(read(source), axis=axes, keepdims=keepdims) * times]


def _keeps_axes(operation: Operation, operand: Jaxpr) -> bool:
    """Return whether an operation gives the result of a reduction the axes of its operand, with sizes of 1."""
    return operation.name == "broadcast_in_dim" and len(operation.params["shape"]) == len(operand.shape)


def of_product(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield products with a square operand transposed."""
    for index, atom in enumerate(operation.equation.invars):
        shape = atom.aval.shape
        if len(shape) >= 2 and shape[-1] == shape[-2]:

            def results(read: Read, index: int = index) -> list[Value]:
                operands = [read(item) for item in operation.operands]
                operands[index] = operands[index].swapaxes(-1, -2)
                return run.apply(operation.equation, operands)

            yield ProgramChange(f"operand {index} of a product transposed", at, {at: results})


def of_convolution(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield convolutions with their padding shifted, and with a kernel that is flipped or transposed."""
    padding = operation.params["padding"]
    ways = [tuple((low + moved, high - moved) for low, high in padding) for moved in (1, -1)]
    ways += [tuple((low + high, 0) for low, high in padding), tuple((0, low + high) for low, high in padding)]
    for way in dict.fromkeys(ways):
        if way != tuple(padding) and min(map(min, way)) >= 0:
            other = operation.equation.replace(params={**operation.params, "padding": way})
            yield ProgramChange(
                f"padding {list(way)} for {list(padding)}", at, {at: with_equation(run, operation, other)}
            )
    axes = tuple(operation.params["dimension_numbers"].rhs_spec[2:])
    if max((operation.equation.invars[1].aval.shape[axis] for axis in axes), default=1) > 1:
        yield ProgramChange(
            "the kernel flipped", at, {at: _with_kernel(run, operation, lambda item: np.flip(item, axes))}
        )
    if len(axes) == 2 and len({operation.equation.invars[1].aval.shape[axis] for axis in axes}) == 1:
        turned = _with_kernel(run, operation, lambda item: item.swapaxes(*axes))
        yield ProgramChange("the kernel with height and width exchanged", at, {at: turned})


def _with_kernel(run: Interpreter, operation: Operation, change: Callable[[Array], Array]) -> Results:
    def results(read: Read) -> list[Value]:
        image, kernel = (read(item) for item in operation.operands)
        return run.apply(operation.equation, [image, np.ascontiguousarray(change(kernel))])

    return results


def of_cumulation(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield cumulations from the other end, and sums that leave out their own element."""
    axis = operation.params["axis"]

    def results(read: Read) -> list[Value]:
        turned = np.flip(read(operation.operands[0]), axis)
        return [np.flip(run.apply(operation.equation, [turned])[0], axis)]

    yield ProgramChange(f"a {operation.name} from the other end", at, {at: results})
    if operation.name == "cumsum":
        yield ProgramChange(
            "a cumsum that leaves out its own element",
            at,
            {at: lambda read: [plain(run, operation, read)[0] - read(operation.operands[0])]},
        )


def of_transform(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield Fourier transforms with another normalisation, and complex ones of other axes."""
    sizes, shape = operation.params["fft_lengths"], operation.equation.invars[0].aval.shape
    count = int(np.prod(sizes))

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        return scaled_transforms(np.asarray(plain(run, operation, read)[0]), count)

    yield from lazily(at, ways, [text for text, _ in scaled_transforms(np.ones(1), count)])
    kind = operation.params["fft_type"].name
    function = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn}.get(kind)
    if function is None:
        return
    moved = program.maker(operation.operands[0], "transpose")
    names = list(range(len(shape))) if moved is None else [int(axis) for axis in moved.params["permutation"]]
    own = range(len(shape) - len(sizes), len(shape))
    for _, others in reductions(np.empty(shape), list(own)):

        def results(read: Read, others: tuple[int, ...] = others) -> list[Value]:
            return [function(read(operation.operands[0]), axes=others)]

        axes = [sorted(names[axis] for axis in some) for some in (others, own)]
        yield ProgramChange(f"a Fourier transform of axes {axes[0]} for {axes[1]}", at, {at: results})


def of_place(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the place of the largest element for that of the smallest, or the other way round."""
    (axis,) = operation.params["axes"]
    other, function = ("argmax", np.argmax) if operation.name == "argmin" else ("argmin", np.argmin)
    dtype = operation.equation.outvars[0].aval.dtype

    def results(read: Read) -> list[Value]:
        return [function(read(operation.operands[0]), axis=axis).astype(dtype)]

    yield ProgramChange(f"{other} for {operation.name}", at, {at: results})


def of_loop(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield a loop that runs from the other end."""
    params = {**operation.params, "reverse": not operation.params["reverse"]}
    turned = operation.equation.replace(params=params)
    yield ProgramChange("a loop from the other end", at, {at: with_equation(run, operation, turned)})
