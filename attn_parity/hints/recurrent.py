"""Recurrent layers computed both ways in NumPy: which gate is which, and what becomes of the state.

The weights of a layer are read from their names and shapes: four matrices from the state are an LSTM's, three a GRU's,
one those of a plain RNN. Gates have the names of torch: ``i f g o`` and ``r z n``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .case import Array, Arrays, Case, Ways, first_fit

LARGEST = 1 << 16
"""Most elements of an output that a layer is computed for."""

LONGEST = 64
"""Most steps."""

GATES = {4: "ifgo", 3: "rzn", 1: "h"}
"""Number of gates -> their letters, in the order in which torch and Flax store them."""

KINDS = {4: "an LSTM", 3: "a GRU", 1: "an RNN"}

Run = Callable[["RecurrentWeights", Array, Array, Array], tuple[Array, Array]]
"""From the weights, an input, a state and a memory to the state and the memory after a step."""

_GATE = re.compile(r"(?:^|[._\[])([ih])([ifgorzn])_?(?=[\].]|$)")
_SOURCE = re.compile(r"(?:^|[._])(?:([ixh])|(?:w|dense)_?([ixh])|w?_?([ixh])2?h)(?=$|[._])", re.IGNORECASE)
_LAYER = re.compile(r"_l(\d+)")


@dataclasses.dataclass(frozen=True)
class RecurrentWeights:
    """The weights of one layer in one direction; g gates, a state of width h, an input of width d.

    Attributes:
        of_input: matrices of the input ``(g, h, d)``.
        of_state: matrices of the state ``(g, h, h)``.
        input_bias: bias of the input's products, ``(g, h)``.
        state_bias: bias of the state's products, ``(g, h)``.
    """

    of_input: Array
    of_state: Array
    input_bias: Array
    state_bias: Array

    def ordered(self, order: Sequence[int]) -> RecurrentWeights:
        """Return the layer with its gates in another order."""
        tensors = (self.of_input, self.of_state, self.input_bias, self.state_bias)
        return RecurrentWeights(*(one[list(order)] for one in tensors))


def recurrent(case: Case) -> str:
    """Recognise gates that are exchanged, and states that go another way, in an LSTM, a GRU or an RNN."""
    layers = [] if case.is_gradient or case.first.size > LARGEST else read(case.weights)
    if not layers or not 2 <= case.first.ndim <= 3:
        return ""
    return first_fit(case, _outputs(case, layers))


# ---- weights


def read(weights: Arrays) -> list[RecurrentWeights]:
    """Return the layer that weights belong to, or two for both directions; empty if names or shapes are unclear."""
    if len({hit[1] for name in weights if (hit := _LAYER.search(name))}) > 1:
        return []
    weights = _named_as_torch(weights)
    layers = []
    for backward in (False, True):
        mine = {name: one for name, one in weights.items() if bool(re.search("reverse|backward", name)) == backward}
        layer = _layer(mine) if mine else None
        if layer is not None:
            layers.append(layer)
        elif mine:
            return []
    return layers


def _named_as_torch(weights: Arrays) -> Arrays:
    """Rename Keras's weights after their operand, input or state; return other weights unchanged."""
    names = {name: re.split(r"[./]", name)[-1] for name in weights}
    if set(names.values()) - {"kernel", "recurrent_kernel", "bias"} or "recurrent_kernel" not in names.values():
        return weights
    renamed: dict[str, Array] = {}
    for name, word in names.items():
        path, array = name.removesuffix(word).replace("/", "."), weights[name]
        if word == "bias":
            rows = array if array.ndim == 2 else array[None]
            renamed |= {f"{path}{source}.bias": row for source, row in zip("ih", rows, strict=False)}
        else:
            renamed[f"{path}{'h' if word == 'recurrent_kernel' else 'i'}.kernel"] = array
    return renamed


def _layer(weights: Mapping[str, Array]) -> RecurrentWeights | None:
    """Return the layer that the weights of one direction are of."""
    matrices: dict[str, dict[str, Array]] = {"i": {}, "h": {}}
    biases: dict[str, dict[str, Array]] = {"i": {}, "h": {}}
    for name, array in weights.items():
        source_and_gate = _place(name)
        if source_and_gate is None or array.ndim not in (1, 2):
            return None
        source, gate = source_and_gate
        target = (matrices if array.ndim == 2 else biases)[source]
        if gate in target:
            return None
        # torch's matrices are (outputs, inputs), Flax's kernels the other way round
        target[gate] = array.T if array.ndim == 2 and name.endswith("kernel") else array
    of_state = _gates(matrices["h"], None)
    if of_state is None or of_state.shape[1] != of_state.shape[2]:
        return None
    nothing = np.zeros(of_state.shape[:2])
    of_input = _gates(matrices["i"], len(of_state))
    added = [_gates(biases[source], len(of_state)) if biases[source] else nothing for source in "ih"]
    if of_input is None or of_input.shape[:2] != nothing.shape or any(one is None for one in added):
        return None
    added_biases = [one for one in added if one is not None and one.shape == nothing.shape]
    return RecurrentWeights(of_input, of_state, *added_biases) if len(added_biases) == 2 else None


def _place(name: str) -> tuple[str, str] | None:
    """Return the operand of a weight, ``i`` or ``h``, and its gate, "" for all gates; None if the name has neither."""
    gates = _GATE.findall(name)
    if gates:
        return gates[-1][0], gates[-1][1]
    sources = _SOURCE.findall(_LAYER.sub("", name).replace("_reverse", ""))
    if not sources:
        return None
    source = next(one for one in sources[-1] if one).lower()
    return ("i" if source == "x" else source), ""


def _gates(matrices: Mapping[str, Array], count: int | None) -> Array | None:
    """Return weights with the gates as the first axis; without a count those of the state, whose shape shows it."""
    if list(matrices) == [""]:
        (whole,) = matrices.values()
        count = whole.shape[0] // whole.shape[-1] if count is None else count
        return whole.reshape(count, -1, *whole.shape[1:]) if count in GATES and whole.shape[0] % count == 0 else None
    for gates in GATES.values():
        if matrices.keys() == set(gates) and len({one.shape for one in matrices.values()}) == 1:
            return np.stack([matrices[gate] for gate in gates])
    return None


# ---- layers


@dataclasses.dataclass(frozen=True)
class RecurrentStep:
    """A way to compute one step of a layer; an LSTM has a memory (its cell state) in addition to its output.

    Attributes:
        name: the deviation from the usual step, "" for none.
        order: the positions of the gates, in the order of `GATES`.
        run: computes it.
        backward: whether it runs backwards in time.
    """

    name: str
    order: tuple[int, ...]
    run: Run
    backward: bool = False


def sigmoid(value: Array) -> Array:
    """Return the logistic function of every element."""
    return np.asarray(1 / (1 + np.exp(-value)))


def _sums(layer: RecurrentWeights, x: Array, h: Array) -> tuple[Array, Array]:
    """Return the contributions of the input and of the state to every gate, gates first."""
    of_input = np.einsum("ghd,bd->gbh", layer.of_input, x) + layer.input_bias[:, None]
    of_state = np.einsum("ghk,bk->gbh", layer.of_state, h) + layer.state_bias[:, None]
    return of_input, of_state


def _lstm(
    candidate: Callable[[Array], Array] = np.tanh,
    output: Callable[[Array], Array] = np.tanh,
    forget: float = 0.0,
    *,
    late: bool = False,
) -> Run:
    def run(layer: RecurrentWeights, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        of_input, of_state = _sums(layer, x, h)
        i, f, g, o = of_input + of_state
        new = sigmoid(f + forget) * c + sigmoid(i) * candidate(g)
        return sigmoid(o) * output(c if late else new), new

    return run


def _gru(
    candidate: Callable[[Array], Array] = np.tanh, *, turned: bool = False, before: bool = False, outside: bool = False
) -> Run:
    def run(layer: RecurrentWeights, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        of_input, of_state = _sums(layer, x, h)
        r, z = sigmoid(of_input[0] + of_state[0]), sigmoid(of_input[1] + of_state[1])
        bias = layer.state_bias[2]
        product = (r * h) @ layer.of_state[2].T if before else r * (of_state[2] - bias)
        new = candidate(of_input[2] + product + (bias if before or outside else r * bias))
        z = 1 - z if turned else z
        return (1 - z) * new + z * h, c

    return run


def _rnn(act: Callable[[Array], Array]) -> Run:
    def run(layer: RecurrentWeights, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        of_input, of_state = _sums(layer, x, h)
        return act(of_input[0] + of_state[0]), c

    return run


def _relu(value: Array) -> Array:
    result: Array = np.maximum(value, 0)
    return result


def _steps(count: int) -> Iterator[RecurrentStep]:
    """Yield the ways to compute a layer with this many gates: the correct one, then typical errors of ports."""
    usual = tuple(range(count))
    plain = {4: _lstm(), 3: _gru(), 1: _rnn(np.tanh)}[count]
    yield RecurrentStep("", usual, plain)
    gates = GATES[count]
    orders = sorted(itertools.permutations(usual), key=lambda order: sum(map(int.__ne__, order, usual)))
    for order in orders[1:]:
        moved = [gates[k] for k in usual if order[k] != k]
        if len(moved) == 2:
            yield RecurrentStep(f"with the gates {moved[0]} and {moved[1]} exchanged", order, plain)
        else:
            yield RecurrentStep(
                f"with its gates in the order {' '.join(gates[order.index(k)] for k in usual)}", order, plain
            )
    yield RecurrentStep("that goes backwards in time", usual, plain, backward=True)
    others: dict[int, dict[str, Run]] = {
        4: {
            "with a sigmoid for the candidate": _lstm(candidate=sigmoid),
            "that gives out its state without tanh": _lstm(output=np.asarray),
            "with 1 added to the forget gate": _lstm(forget=1.0),
            "whose output is of the state before": _lstm(late=True),
        },
        3: {
            "whose update gate is the other way round": _gru(turned=True),
            "that resets the state before the product": _gru(before=True),
            "whose bias from the state is not reset": _gru(outside=True),
            "with a sigmoid for the candidate": _gru(candidate=sigmoid),
        },
        1: {"with ReLU": _rnn(_relu), "with a sigmoid": _rnn(sigmoid), "with no activation": _rnn(np.asarray)},
    }
    for name, run in others[count].items():
        yield RecurrentStep(name, usual, run)


def _outputs(case: Case, layers: Sequence[RecurrentWeights]) -> Ways:
    """Yield a description and the result of the layers on the inputs, for every way that a port may compute them."""
    width, count = layers[0].of_input.shape[2], len(layers[0].of_state)
    state = layers[0].of_state.shape[1]
    x = next((one for one in case.inputs if one.ndim in (2, 3) and one.shape[-1] == width), None)
    if x is None or any(len(one.of_state) != count for one in layers):
        return
    states = [one.reshape(-1, state) for one in case.inputs if one is not x and one.shape[-1:] == (state,)]
    is_cell = x.ndim == 2
    for axis in (0, 1) if not is_cell else (None,):
        steps = x[None] if axis is None else np.moveaxis(x, axis, 0)
        if len(steps) > LONGEST:
            continue
        for some, what in _given_states(states, steps.shape[1], state, len(layers)):
            for step in _steps(count):
                runs = [_run(layer, step, steps, *some, turned=bool(k)) for k, layer in enumerate(layers)]
                for joined, h, c in _joined(runs, has_variants=not step.name):
                    name = " ".join(filter(None, (KINDS[count], step.name, what, joined)))
                    yield from _shown(case.first.shape, name, h, c, axis, has_memory=count == 4)


def _joined(runs: Sequence[tuple[Array, Array]], *, has_variants: bool) -> Iterator[tuple[str, Array, Array]]:
    """Yield states and memories of both directions side by side, and as ports get them wrong."""
    h, c = (np.concatenate(each, -1) for each in zip(*runs, strict=True))
    yield "", h, c
    if len(runs) == 2 and has_variants:
        (forward, _), (backward, _) = runs
        yield "with its directions exchanged", np.concatenate([backward, forward], -1), c
        yield "whose backward half is not turned round", np.concatenate([forward, backward[::-1]], -1), c


def _given_states(
    states: Sequence[Array], rows: int, width: int, count: int
) -> Iterator[tuple[tuple[Array, Array], str]]:
    """Yield the state and the memory that a layer starts from, as given or exchanged; zeros where there are none."""
    if count == 1 and states and all(one.shape == (rows, width) for one in states[:2]):
        state, memory = (*states, states[0])[:2]
        yield (state, memory), ""
        if len(states) > 1:
            yield (memory, state), "with state and memory exchanged"
    elif not states:
        nothing = np.zeros((rows, width))
        yield (nothing, nothing), ""


def _run(
    layer: RecurrentWeights, step: RecurrentStep, x: Array, h: Array, c: Array, *, turned: bool
) -> tuple[Array, Array]:
    """Return all states and memories; those of a layer that is `turned` stand where their inputs do."""
    layer, backward = layer.ordered(step.order), turned != step.backward
    steps = []
    for row in x[::-1] if backward else x:
        h, c = step.run(layer, row, h, c)
        steps.append((h, c))
    states, memories = (np.stack(each) for each in zip(*steps, strict=True))
    return (states[::-1], memories[::-1]) if backward else (states, memories)


def _shown(shape: tuple[int, ...], name: str, h: Array, c: Array, axis: int | None, *, has_memory: bool) -> Ways:
    """Yield the arrays that a layer may return from its states and memories, if they have the shape in question."""
    ways = [("", h), (" (its memory)", c)] if has_memory else [("", h)]
    for what, states in ways:
        if axis is not None and np.moveaxis(states, 0, axis).shape == shape:
            yield name + what, np.moveaxis(states, 0, axis)
        if states[-1].size == int(np.prod(shape)) and states[-1].shape == tuple(size for size in shape if size != 1):
            yield name + what, states[-1].reshape(shape)
